"""The interface of a Kinesis client, and its values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, Protocol

import pyarrow as pa

from kcl_pipeline.shards import ChildShard, Shard, StreamId

MIN_RETENTION_MILLIS: Final = 24 * 3600 * 1000
"""Shortest retention period of a stream. Records that arrived within it still exist."""
ARRIVAL_TOLERANCE: Final = timedelta(seconds=60)
"""By how much the arrival time of a record may be less than that of an earlier one of its shard."""

IteratorType = Literal[
    "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"
]
ShardFilterType = Literal["AT_LATEST", "AT_TRIM_HORIZON", "AT_TIMESTAMP"]


@dataclass(frozen=True, slots=True)
class RecordsPage:
    """A decoded GetRecords response.

    Attributes:
        records: The records (`RECORD_SCHEMA`) in shard order, not de-aggregated.
        next_iterator: Iterator of the next page. None: the shard has ended.
        millis_behind_latest: Lag behind the latest record. None: unknown.
        child_shards: Children of a shard that has ended.
        bytes: Payload (data and partition keys) of the records.
        served_millis: A time on the clock of the service at which the response was true, in epoch
            milliseconds. None: unknown.
    """

    records: pa.Table
    next_iterator: str | None
    millis_behind_latest: int | None
    child_shards: tuple[ChildShard, ...] = ()
    bytes: int = 0
    served_millis: int | None = None


@dataclass(frozen=True, slots=True)
class LatestIterator:
    """An iterator at LATEST.

    Attributes:
        iterator: The iterator.
        since: A time on the clock of the service, not later than the position of the iterator.
            AT_TIMESTAMP with this time leads to the position again. None: unknown.
    """

    iterator: str
    since: datetime | None


class StreamLister(Protocol):
    """The calls about streams, see `KinesisClient`."""

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:
        """Return the identifier of a stream with ARN and creation time (DescribeStreamSummary).

        Args:
            name_or_arn: The stream.
            multi_stream: Set `account` and `creation_epoch`.

        Raises:
            NotFoundError: The stream does not exist.
        """

    def list_shards(
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        """Return all shards. Without a filter this includes closed shards in retention."""

    def service_time(self, stream: StreamId) -> datetime | None:
        """Return a time on the clock of the service, not later than now. None: unknown.

        AT_TIMESTAMP with this time leads to all records that arrive after the call. The clock of
        this host is not used, because it may differ by minutes.
        """


class ShardClient(Protocol):
    """The calls about the records of a shard, see `KinesisClient`."""

    def get_shard_iterator(
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """Return an iterator, which is valid for five minutes."""

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """Return an iterator at LATEST and its time on the clock of the service.

        The clock of this host is not used, because it may differ by minutes.
        """

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """Return a page of up to `limit` (at most 10,000) records and 10 MB.

        Raises:
            ExpiredIteratorError: The iterator is not valid any more.
            ThrottledError: The limits of the shard are exceeded.
            NotFoundError: The stream or the shard does not exist.
            UnavailableError: The call failed, or the response cannot be read.
        """


class KinesisClient(StreamLister, ShardClient, Protocol):
    """The calls to Kinesis that a consumer needs.

    Every call has a time-out and raises the errors of `kcl_pipeline.errors`.
    """

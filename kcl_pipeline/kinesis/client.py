"""Kinesis as the rest of the package sees it: one protocol, two twins (boto3, and the in-memory
model of `kcl_pipeline.testing`).

The data path speaks Arrow: a page of records is one `pyarrow.Table` and no Python object is made
per record.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol

import pyarrow as pa

from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard, Shard, StreamId

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("shard_id", pa.string(), nullable=False),
        pa.field("sequence_number", pa.string(), nullable=False),
        pa.field("sub_sequence_number", pa.int64(), nullable=False),
        pa.field("partition_key", pa.string(), nullable=False),
        pa.field("explicit_hash_key", pa.string()),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("approximate_arrival_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("encryption_type", pa.string()),
    ]
)
"""The columns that a transform gets: `stream` is the bare stream name; `sub_sequence_number` is 0
for records that are not in a KPL aggregate.
"""

NO_RECORDS: Final = pa.Table.from_batches([], schema=RECORD_SCHEMA)
"""The table without rows. It has no chunks either; `empty_table()` would import pandas."""

IteratorType = Literal[
    "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"
]
ShardFilterType = Literal["AT_LATEST", "AT_TRIM_HORIZON", "AT_TIMESTAMP"]


@dataclass(frozen=True, slots=True)
class RecordsPage:
    """One GetRecords answer, decoded.

    `records` has `RECORD_SCHEMA`, in shard order, not de-aggregated. `next_iterator` None: the
    shard is at its end, and `child_shards` are its children. `bytes` is the payload (data and
    partition keys) of the records. `millis_behind_latest` may be None.
    """

    records: pa.Table
    next_iterator: str | None
    millis_behind_latest: int | None
    child_shards: tuple[ChildShard, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class LatestIterator:
    """An iterator at LATEST.

    `since` is a time on the service's own clock that is not later than the place of the iterator,
    so that the place can be asked for again by AT_TIMESTAMP. None: the answer did not say.
    """

    iterator: str
    since: datetime | None


class StreamLister(Protocol):
    """The calls about streams; see `KinesisClient`."""

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:
        """The stream's identifier with ARN and creation time (DescribeStreamSummary).

        `account` and `creation_epoch` are set only when `multi_stream`. Raises `NotFound`.
        """
        ...

    def list_shards(
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        """All shards, pages joined (following pages by NextToken alone); unfiltered it includes
        closed ones in retention.
        """
        ...


class ShardClient(Protocol):
    """The calls about the records of a shard; see `KinesisClient`."""

    def get_shard_iterator(
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """An iterator, good for five minutes."""
        ...

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """An iterator at LATEST, and the time of the service then.

        No clock of this host is asked: it may be minutes away from the service's.
        """
        ...

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """Up to `limit` (≤ 10,000) records and 10 MB.

        Raises `ExpiredIteratorError`, `Throttled`, `NotFound`.
        """
        ...


class KinesisClient(StreamLister, ShardClient, Protocol):
    """What the consumer needs of Kinesis. Raises the errors of `kcl_pipeline.errors`; every call is
    bounded by a time-out.
    """


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one lease that follow each other, ready for a batch.

    `records` has `RECORD_SCHEMA`, de-aggregated, only positions after `after` (exclusive) up to
    `through` (inclusive). `through` may be past the last row, when the rows at the end were
    filtered out. `shard_end`: the shard ends here, with these children; then `through` is still a
    number (or `after` when there were no rows), and the worker checkpoints SHARD_END itself after
    the batch. `lost`: the stream does not list the shard any more, so nothing after `through` can
    be read, and `shard_end` are the oldest shards that follow it. `bytes` counts against the
    budget. `rejected`: what was wrong with KPL aggregates of this chunk; the code that buffers the
    chunk emits it. `oldest_at`: when the first record arrived, in seconds on this process's
    monotonic clock (see `worker.monitoring.lag`); None when there is none, or nobody needs it.
    """

    lease_key: str
    records: pa.Table
    after: Position
    through: Position
    bytes: int
    millis_behind_latest: int | None = None
    shard_end: tuple[ChildShard, ...] | None = None
    lost: bool = False
    rejected: AggregatesRejected | None = None
    oldest_at: float | None = None

    @property
    def record_count(self) -> int:
        """How many records it has."""
        return int(self.records.num_rows)

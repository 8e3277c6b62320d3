"""The interface of a Kinesis client, its values, and the bytes of records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, Protocol

import numpy as np
import pyarrow as pa

from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard, Shard, StreamId

MIN_RETENTION_MILLIS: Final = 24 * 3600 * 1000
"""Shortest retention period of a stream. Records that arrived within it still exist."""
ARRIVAL_SAMPLES: Final = 64


def sampled_arrivals(records: pa.Table) -> tuple[int, ...]:
    """Return the arrival times, in epoch microseconds, of about `ARRIVAL_SAMPLES` records.

    The records are spread evenly over the table.
    """
    if records.num_rows == 0:
        return ()
    arrivals = records["approximate_arrival_timestamp"]
    step = max(records.num_rows // ARRIVAL_SAMPLES, 1)
    if step > 1:
        arrivals = arrivals.take(pa.array(np.arange(0, records.num_rows, step)))
    return tuple(
        micros for chunk in arrivals.chunks for micros in chunk.view(pa.int64()).to_pylist()
    )


def payload_bytes(records: pa.Table) -> int:
    """Return the bytes of data and partition keys, as Kinesis counts them."""
    return data_bytes(records) + _column_bytes(records, "partition_key")


def data_bytes(records: pa.Table) -> int:
    """Return the bytes of data, as KCL counts them for the throughput of a lease."""
    return _column_bytes(records, "data")


def _column_bytes(records: pa.Table, name: str) -> int:
    return sum(_value_bytes(chunk) for chunk in records.column(name).chunks)


def _value_bytes(array: pa.Array) -> int:
    if len(array) == 0:
        return 0
    offsets = np.frombuffer(array.buffers()[1], np.int32)
    return int(offsets[array.offset + len(array)]) - int(offsets[array.offset])


RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("shard_id", pa.string(), nullable=False),
        pa.field("sequence_number", pa.string(), nullable=False),
        pa.field("sub_sequence_number", pa.int64(), nullable=False),
        pa.field("partition_key", pa.string()),
        pa.field("explicit_hash_key", pa.string()),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("approximate_arrival_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("encryption_type", pa.string()),
    ]
)
"""The columns that a transform receives.

`stream` is the name of the stream, or its ARN if the application reads streams of this name in
several accounts. `sub_sequence_number` is 0 for records that are not in a KPL
aggregate. `partition_key` is null for a record that a producer put without a key, which a stream
with the record distribution strategy AUTO accepts.

Example:
    >>> from kcl_pipeline import RECORD_SCHEMA
    >>> str(RECORD_SCHEMA.field("data").type)
    'binary'
"""

NO_RECORDS: Final = pa.Table.from_batches([], schema=RECORD_SCHEMA)
"""The table without rows and chunks. (`empty_table()` would import pandas.)"""

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one lease, ready for a batch.

    Attributes:
        lease_key: The lease.
        records: De-aggregated records (`RECORD_SCHEMA`) in shard order.
        after: First position (exclusive).
        through: Last position (inclusive). It may be after the last row, if the rows at the end
            were filtered out.
        bytes: Payload bytes of the records.
        millis_behind_latest: Lag behind the latest record. None: unknown.
        shard_end: The shard ends here and has these children. `through` is still a number, or
            `after` if there are no rows. The worker checkpoints SHARD_END after the batch.
        lost: The stream does not list the shard any more, so records after `through` cannot be
            read. `shard_end` has the oldest shards that follow it.
        rejected: KPL aggregates of this chunk that were not de-aggregated. The code that buffers
            the chunk emits the event.
        oldest_at: When the first record arrived, in seconds of this process's monotonic clock (see
            `worker.status.Lag`). None: no record, or not computed.
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
        """Number of records."""
        return int(self.records.num_rows)

    @property
    def data_bytes(self) -> int:
        """Bytes of the records' data, without partition keys."""
        return data_bytes(self.records)

    @property
    def arrival_micros(self) -> tuple[int, ...]:
        """Sample of the records' arrival times (epoch microseconds)."""
        return sampled_arrivals(self.records)

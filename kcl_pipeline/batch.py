"""A micro-batch: its records and what they become, and the interface `BatchWriter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one lease: what a read has brought, or a range of a batch.

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


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is written but not committed.

    Attributes:
        path: Path relative to the root of the table, separated by `/`.
        size: Size in bytes.
        rows: Number of rows.
        partition_values: Values of the partition columns as strings; None is null.
        modified_millis: Modification time in epoch milliseconds.
        statistics: Minima, maxima and numbers of nulls of its columns, in the form of the table's
            format. Empty: unknown.
    """

    path: str
    size: int
    rows: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    modified_millis: int = 0
    statistics: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of writing a batch. Readers of the table do not see it until it is committed.

    Attributes:
        files: The files with the rows of the output.
        schema: Schema of the output, also when there is no file. None: the batch has no records, so
            the transform was not called.
        rows: Number of rows in the files.
        rejected: The records that the transform returned as dead letters (`REJECTED_SCHEMA`).
            None of their rejected rows is in the files. None: there are no such records.
    """

    files: tuple[DataFile, ...]
    schema: pa.Schema | None
    rows: int
    rejected: pa.Table | None = None


NOTHING_WRITTEN: Final = Written((), None, 0)


class ReadPart(Protocol):
    """What one read of a shard has brought: a `Chunk`, or a range of an executor.

    Attributes:
        lease_key: The lease of the shard.
        after: First position (exclusive).
        through: Last position (inclusive).
        record_count: Number of records.
        bytes: Payload bytes of the records.
        data_bytes: Bytes of the records' data, without partition keys.
        arrival_micros: Sample of the records' arrival times (epoch microseconds).
        oldest_at: When the first record arrived, in monotonic seconds. None: no record, or unknown.
        shard_end: The shard ends here and has these children. None: it does not end here.
        lost: The stream does not list the shard any more.
    """

    @property
    def lease_key(self) -> str: ...  # noqa: D102 (see Attributes)

    @property
    def after(self) -> Position: ...  # noqa: D102

    @property
    def through(self) -> Position: ...  # noqa: D102

    @property
    def record_count(self) -> int: ...  # noqa: D102

    @property
    def bytes(self) -> int: ...  # noqa: D102

    @property
    def data_bytes(self) -> int: ...  # noqa: D102

    @property
    def arrival_micros(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def oldest_at(self) -> float | None: ...  # noqa: D102

    @property
    def shard_end(self) -> tuple[ChildShard, ...] | None: ...  # noqa: D102

    @property
    def lost(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of several shards that are committed together, from their read to their commit.

    A source makes it with what was read. Each step returns another one that has its result, too. A
    batch with failing records may be split: then each part is a batch of its own.

    Attributes:
        batch_id: Identifies the batch in logs and events.
        ranges: What is committed, one chunk per lease. There may be none: then only ends of shards
            were read. Failing records that a search has found are not among theirs.
        records: The records of all ranges (`RECORD_SCHEMA`), in their order.
        loaded: Whether this process has read the records. False: executors have read and written
            the ranges, and `records` is empty until this process reads them again.
        read: The reads that the batch was made of, also those outside of its ranges. A part of a
            batch has the reads of the whole batch.
        milliseconds: How long the steps up to now have taken, by their names.
        written: The files of the records. None: they are not written yet.
        failed: Records that failed, by lease key (`worker.failures.FAILED_SCHEMA`). They are in
            none of the files.
        version: A version of the table that has the batch. None: it is not committed, or there is
            no table because no batch has had a column yet.
    """

    batch_id: str
    ranges: tuple[Chunk, ...]
    records: pa.Table
    loaded: bool = True
    read: tuple[ReadPart, ...] = ()
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    written: Written | None = None
    failed: Mapping[str, pa.Table] = field(default_factory=dict)
    version: int | None = None

    @property
    def lease_keys(self) -> tuple[str, ...]:
        """The leases of the ranges, in their order."""
        return tuple(part.lease_key for part in self.ranges)

    def by_lease(self, amount: Callable[[ReadPart], int]) -> dict[str, int]:
        """Return the sum of an amount, such as bytes, over the reads of each range by lease key.

        Failing records are included.
        """
        totals = dict.fromkeys(self.lease_keys, 0)
        reached = {part.lease_key: part.after for part in self.ranges}
        for part in self.read:
            if reached.get(part.lease_key) == part.after:
                totals[part.lease_key] += amount(part)
                reached[part.lease_key] = part.through
        return totals

    def oldest_by_lease(self) -> dict[str, float]:
        """Return when the oldest record of each range arrived, in monotonic seconds, if known."""
        keys, oldest = set(self.lease_keys), dict[str, float]()
        for part in self.read:
            if part.oldest_at is not None and part.lease_key in keys:
                oldest.setdefault(part.lease_key, part.oldest_at)
        return oldest


REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("shard_id", pa.string()),
        pa.field("sequence_number", pa.string()),
        pa.field("sub_sequence_number", pa.int64()),
        pa.field("error", pa.string(), nullable=False),
    ]
)
"""The position of a record that a transform returned as a dead letter, and the error.

`stream` may be null.
"""


def dead_letter_address(sink: object) -> str | None:
    """Return the address of the dead-letter table of a sink; None for a sink without one."""
    uri = getattr(sink, "dead_letters", None) or getattr(sink, "dead_letter_uri", None)
    return str(uri) if uri else None


@dataclass(frozen=True, slots=True)
class PartFailure:
    """Why the transform fails on a part of a batch.

    Attributes:
        error: The error in one line.
        suspects: The rows of the part where the failing record probably is. Empty: unknown. It is a
            guess from the number of rows that the transform had returned. Use it to choose which
            rows to evaluate next, never to conclude that a record fails or does not.
    """

    error: str
    suspects: range = range(0)


class BatchWriter(Protocol):
    """Turns a batch into files by means of the user's transform."""

    def write(self, batch: Batch) -> Written:
        """Transform and write a batch. The transform is not called for a batch without records.

        Raises:
            TransformFailedError: The transform raised.
            SinkError: The files could not be written.
        """

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[PartFailure | None]:
        """Run the transform on each part of a batch alone, and write nothing.

        Args:
            slices: Slices of a batch's records, none of them empty.

        Returns:
            The failure of each part; None where the transform succeeds.

        Raises:
            SinkError: The transform could not be run.
        """

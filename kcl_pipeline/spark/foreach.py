"""A user's own sink: **at least once**, with what it takes to make it idempotent.

A worker that dies after the user's function returned and before the checkpoint leaves the range to its successor, which runs the function again. The
successor may cut the range differently: what repeats is records, told by shard and sequence number, not batches. To have each record once, write
in one transaction of your store the rows and, per shard, the last position of `BatchIdentity.ranges`, and skip what is at or before the position found
there; or upsert by (stream, shard id, sequence number, sub-sequence number), which every record carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from kcl_pipeline.batch import Batch, CommitEntry, CommitOutcome, DataFile, ShardRange, SinkNumbers, Written
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.spark.delta import append_dead_letters
from kcl_pipeline.spark.storage import table_root
from kcl_pipeline.spark.writer import SparkTransform, classified, records_frame, spark_line, transformed

_BATCHES_KEPT: Final = 8


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """What a batch is: its ranges (first exclusive, last inclusive), and per lease key the number under which its lease row announced it.

    A range that is repeated by another worker comes with another number, and possibly with another end.
    """

    batch_id: str
    ranges: tuple[ShardRange, ...]
    numbers: Mapping[str, int]


ForeachBatchFunction = Callable[[DataFrame, BatchIdentity], None]


@dataclass(frozen=True, slots=True)
class ForeachBatchSink:
    """Settings of a sink that is the user's function. It gets the transformed DataFrame and the identity, at least once; it must not return before it is done.

    `dead_letter_uri` is a Delta table for records that the transform cannot take; without one such a record stops the worker.
    """

    function: ForeachBatchFunction
    dead_letter_uri: str | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingsError(f"ForeachBatchSink function={self.function!r} cannot be called; write a function of (DataFrame, BatchIdentity)")


def parquet_sink(uri: str, partition_by: Sequence[str] = (), dead_letter_uri: str | None = None) -> ForeachBatchSink:
    """Plain Parquet files below a folder, at least once: a batch that is repeated is there twice. A `DeltaSink` is not slower and exact."""
    target = table_root(uri)

    def append(frame: DataFrame, _identity: BatchIdentity) -> None:
        frame.write.mode("append").partitionBy(*partition_by).parquet(target)

    return ForeachBatchSink(append, dead_letter_uri)


class ForeachBatch:
    """The `BatchWriter` and the `TransactionalSink` of a `ForeachBatchSink` in one: pass it as both.

    `write` runs the transform and keeps its result, so that a record it cannot take shows before anything is prepared; the function runs in `commit`, when
    the batch has its numbers. These live in this process: a successor knows none and repeats what was pending. That is what makes it at least once.
    """

    def __init__(self, session: SparkSession, sink: ForeachBatchSink, transform: SparkTransform | None = None) -> None:
        self._session = session
        self._sink = sink
        self._transform = transform
        self._kept: dict[str, tuple[Batch, DataFrame]] = {}
        self._numbers: dict[str, SinkNumbers] = {}
        self._written = self._version = 0

    def write(self, batch: Batch) -> Written:
        """Transform, and keep the result for `commit` (see `BatchWriter.write`); the one `DataFile` stands for it."""
        records = batch.records.num_rows
        frame = transformed(records_frame(self._session, batch.records), self._transform, records)
        try:
            rows = frame.persist().count()
            schema = to_arrow_schema(frame.schema, timezone="UTC")
        except Exception as error:
            frame.unpersist()
            raise classified(error, records) from error
        self._written += 1
        name = f"kept/{self._written}"
        self._kept[name] = (batch, frame)
        for old in list(self._kept)[:-_BATCHES_KEPT]:
            self._forget(old)
        return Written((DataFile(name, batch.records.nbytes, rows),), schema, rows)

    def ensure_table(self, schema: pa.Schema) -> None:
        """Nothing: the function brings its own store."""

    def numbers(self, lease_keys: Sequence[str]) -> dict[str, SinkNumbers]:
        """The numbers of what this process has handed over."""
        return {key: self._numbers.get(key, SinkNumbers()) for key in lease_keys}

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Call the function. Raises `SinkError` with what it raised; the worker then calls again: it may have done its work."""
        now = self.numbers([entry.lease_key for entry in entries])
        if all(now[entry.lease_key].data == entry.number for entry in entries):
            return CommitOutcome(self._version)
        refused = tuple(entry.lease_key for entry in entries if now[entry.lease_key] != entry.expected)
        if refused:
            return CommitOutcome(None, refused)
        name = written.files[0].path
        if name not in self._kept:
            raise SinkError("the result of the batch is not kept any more; it has to be written again")
        batch, frame = self._kept[name]
        try:
            self._sink.function(frame, BatchIdentity(batch.batch_id, batch.ranges, {entry.lease_key: entry.number for entry in entries}))
        except Exception as error:
            raise SinkError(f"the foreach_batch function failed on batch {batch.batch_id}: {spark_line(error)}") from error
        self._forget(name)
        self._numbers |= {entry.lease_key: SinkNumbers(entry.number, entry.expected.fence) for entry in entries}
        self._version += 1
        return CommitOutcome(self._version)

    def fence(self, lease_key: str, expected: SinkNumbers) -> SinkNumbers | None:
        """There is no log to put a fence in: the numbers as they are, if they are as expected. The old owner's function may still be running."""
        return expected if self._numbers.get(lease_key, SinkNumbers()) == expected else None

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table. Raises `SinkError` when the sink has none."""
        if self._sink.dead_letter_uri is None:
            raise SinkError(f"{records.num_rows} records failed and ForeachBatchSink has no dead_letter_uri; name one, or set failed_records to skip or fail")
        append_dead_letters(self._sink.dead_letter_uri, self._sink.storage_options, records)

    def _forget(self, name: str) -> None:
        self._kept.pop(name)[1].unpersist()

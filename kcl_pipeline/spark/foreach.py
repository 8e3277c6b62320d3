"""Send batches to the user's function **at least once**, with the identity of each batch.

If a worker dies after the function returned and before the checkpoint, the next owner of the lease
calls the function again. Its batches may have other ends: records repeat, not batches. For an
exactly-once result, write the rows and, per shard, the last position of `BatchIdentity.ranges` in
one transaction of your store, and skip records at or before the stored position. Or upsert by
(stream, shard id, sequence number, sub-sequence number), which every record has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcl_pipeline.arguments import (
    check_function,
    check_options,
    check_text,
    checked_arguments,
    function_name,
)
from kcl_pipeline.batch import (
    NOTHING_WRITTEN,
    Batch,
    DataFile,
    ShardRange,
    Written,
)
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.dead_letters.writer import DeadLetterTable
from kcl_pipeline.delta.settings import DeltaSink, check_address
from kcl_pipeline.delta.storage.options import StorageOptions
from kcl_pipeline.errors import SinkError
from kcl_pipeline.settings_errors import names_only, without_credentials
from kcl_pipeline.sinks.sink import CommitOutcome, Entry, Positions, check_entries
from kcl_pipeline.sinks.stored import NOTHING_STORED
from kcl_pipeline.spark.failures.job_errors import classified, spark_line
from kcl_pipeline.spark.failures.probes import SparkProbe
from kcl_pipeline.spark.schema import arrow_schema
from kcl_pipeline.spark.writer import SparkTransform, records_frame, transformed
from kcl_pipeline.transform.rejected import (
    ERROR_COLUMN,
    RejectedColumns,
    rejected_columns,
    split_rejected,
)

_BATCHES_KEPT: Final = 8
_FUNCTION: Final = "function"
"""In place of the id of a table."""


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """The identity of a batch. A range that is repeated may have another end."""

    batch_id: str
    """Name of the batch."""
    ranges: tuple[ShardRange, ...]
    """Its ranges (first position exclusive, last inclusive). They identify its records."""


@checked_arguments
@dataclass(frozen=True, slots=True)
class ForeachBatchSink:
    """Settings of a sink that calls the user's function.

    Raises:
        SettingsError: An argument is invalid.
    """

    function: Callable[[DataFrame, BatchIdentity], None]
    """Gets the transformed DataFrame and the identity, at least once. It must finish its work
    before it returns."""
    dead_letter_uri: str | None = None
    """Delta table for dead letters. Without one, a dead letter pauses its shard."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Options of delta-rs for the dead-letter table."""

    def __post_init__(self) -> None:
        check_function(
            "ForeachBatchSink function",
            self.function,
            ["frame", "identity"],
            "a function of a DataFrame and a BatchIdentity",
        )
        check_text(
            "ForeachBatchSink dead_letter_uri",
            self.dead_letter_uri,
            "Write the address of a Delta table, or None",
            optional=True,
        )
        check_options(
            "ForeachBatchSink storage_options",
            self.storage_options,
            "{'AWS_REGION': 'eu-central-1'}",
            hidden=True,
        )
        check_address("ForeachBatchSink dead_letter_uri", self.dead_letter_uri)
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))

    def __repr__(self) -> str:
        return (
            f"ForeachBatchSink(function={function_name(self.function)}, "
            f"dead_letter_uri={without_credentials(self.dead_letter_uri)!r}, "
            f"storage_options={names_only(self.storage_options)!r})"
        )


class ForeachBatch:
    """Both the `BatchWriter` and the `Sink` of a `ForeachBatchSink`.

    `write` runs the transform and keeps its result, so that failed records are found before the
    function is called by `commit`. No position is stored with what the function writes, so a batch
    that was not checkpointed is processed again.
    """

    stores_positions = False

    def __init__(
        self,
        session: SparkSession,
        sink: ForeachBatchSink,
        transform: SparkTransform | None = None,
        application_name: str = "",
    ) -> None:
        self._session = session
        self._sink = sink
        self._transform = transform
        self._application = application_name
        self._dead_letters: DeadLetterTable | None = None
        self._kept: dict[str, _Kept] = {}
        self._probe = SparkProbe(
            session, lambda frame, records: transformed(frame, transform, records)
        )
        self._written = self._version = 0

    def write(self, batch: Batch) -> Written:
        """Transform, and keep the result for `commit` (see `BatchWriter.write`).

        The returned `DataFile` is a placeholder for the result.
        """
        records = batch.records.num_rows
        if not records:
            return NOTHING_WRITTEN
        frame = transformed(records_frame(self._session, batch.records), self._transform, records)
        marked = rejected_columns(arrow_schema(frame.schema))
        try:
            rows = frame.persist().count()
            kept, rejected = (frame, None) if marked is None else _split(frame, marked)
            schema = arrow_schema(kept.schema)
        except Exception as error:
            frame.unpersist()
            raise classified(error, records) from error
        rows -= 0 if rejected is None else rejected.num_rows
        self._written += 1
        name = f"kept/{self._written}"
        self._kept[name] = _Kept(batch, kept, frame)
        for old in list(self._kept)[:-_BATCHES_KEPT]:
            self._kept.pop(old).persisted.unpersist()
        return Written((DataFile(name, batch.records.nbytes, rows),), schema, rows, rejected)

    def probe(self, parts: Sequence[pa.Table]) -> list[str | None]:
        """Evaluate the transform on each part (see `BatchWriter.probe`)."""
        return self._probe.errors(parts)

    def ensure(self, schema: pa.Schema) -> None:
        """Do nothing: the function has its own store."""

    def positions(self, keys: Sequence[str]) -> Positions:
        """Return nothing: the worker knows what it has committed since it took a lease."""
        return Positions(_FUNCTION, dict.fromkeys(keys, NOTHING_STORED))

    def commit(
        self,
        table_id: str | None,  # noqa: ARG002 (there is one function)
        written: Written,
        entries: Sequence[Entry],
    ) -> CommitOutcome:
        """Call the function with the rows, if there are any.

        Raises:
            SinkError: The function raised an error. The worker calls it again, although it may
                have written the rows.
        """
        check_entries(entries)
        if written.files:
            self._call(written.files[0].path)
        self._version += 1
        return CommitOutcome(self._version)

    def _call(self, name: str) -> None:
        if name not in self._kept:
            raise SinkError("the result of the batch was dropped; it must be written again")
        kept = self._kept[name]
        identity = BatchIdentity(kept.batch.batch_id, kept.batch.ranges)
        try:
            self._sink.function(kept.frame, identity)
        except Exception as error:
            raise SinkError(
                f"the foreach_batch function failed on batch {identity.batch_id}: "
                f"{spark_line(error)}"
            ) from error
        self._kept.pop(name).persisted.unpersist()

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records that are not in the dead-letter table yet.

        Raises:
            SinkError: The sink has no dead-letter table.
        """
        if self._sink.dead_letter_uri is None:
            raise SinkError(
                f"{records.num_rows} records failed and ForeachBatchSink has no "
                "dead_letter_uri; name one, or set failed_records to skip or fail"
            )
        if self._dead_letters is None:
            table = DeltaSink(
                self._sink.dead_letter_uri, storage_options=self._sink.storage_options
            )
            self._dead_letters = DeadLetterTable(
                table, self._application, SystemClock(), random.SystemRandom()
            )
        self._dead_letters.append(records)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A transformed batch: the function's DataFrame, and the one that Spark has cached."""

    batch: Batch
    frame: DataFrame
    persisted: DataFrame


def _split(frame: DataFrame, marked: RejectedColumns) -> tuple[DataFrame, pa.Table | None]:
    """The rows for the function, and the rejected ones (`batch.REJECTED_SCHEMA`)."""
    names = dict.fromkeys(marked.columns)
    marked_rows = frame.where(f"{ERROR_COLUMN} is not null").select(*names).toArrow()
    kept = frame.where(f"{ERROR_COLUMN} is null").drop(*marked.dropped)
    return kept, split_rejected(marked_rows)[1]

"""Write batches on the Spark path: apply the user's DataFrame function and write Parquet files.

On this machine, the result comes back as Arrow columns in memory (`arrow_memory.results`), and the
writer of the Arrow path writes the files. Otherwise, as on a cluster, the tasks write the files
(`mapInArrow`, pyarrow and the table's storage client), and only names and sizes return to the
driver. So executors need this package.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcl_pipeline.batch import (
    Batch,
    DataFile,
    PartFailure,
    is_failure,
    rejected_columns,
    split_rejected,
)
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.files import TableColumns, batch_folder, untyped, write_table
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import delta_options, is_local, table_root
from kcl_pipeline.errors import (
    BrokenTransformError,
    KclError,
    ResultMismatchError,
    SinkError,
    TransformFailedError,
)
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory.classes import can_share_memory
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.arrow_memory.results import ArrowResults, Pieces
from kcl_pipeline.spark.arrow_memory.types import reason_against
from kcl_pipeline.spark.failures.job_errors import classified, spark_line
from kcl_pipeline.spark.failures.probes import SparkProbe
from kcl_pipeline.spark.file_tasks import FileTask
from kcl_pipeline.spark.schema import arrow_schema

SparkTransform = Callable[[DataFrame], DataFrame]
_Files = tuple[tuple[DataFile, ...], pa.Table | None]
"""Files, and the rejected rows (`batch.REJECTED_SCHEMA`; None without any)."""

_BYTES_OF_A_TASK: Final = 8 * 1024 * 1024
_MEMORY_BYTES: Final = 512 * 1024 * 1024
_ZERO: Final[dict[pa.DataType, Any]] = {
    pa.string(): "",
    pa.binary(): b"",
    pa.int64(): 0,
    pa.timestamp("us", tz="UTC"): 0,
}


class SparkBatchWriter:
    """A `BatchWriter` that runs the user's function on a DataFrame.

    A batch becomes one file per 8 MiB of records, at most one per core (and combination of
    partition values).

    Args:
        session: The Spark session.
        transform: Gets the batch's records (`RECORD_SCHEMA`, possibly no rows) and returns a
            DataFrame; None writes the records unchanged. Its result must depend on its input
            alone, because a range that is read again must yield the same rows.
        table_uri: Address of the table.
        partition_by: Partition columns of the table.
        storage_options: Options of delta-rs for the table's store.
        events: Receives `ArrowMemorySkipped`.
        memory: Counts the records and results that are passed in memory. None: up to 512 MiB.
        columns: Returns the columns that a result must fit. None: it fits any table.
    """

    def __init__(
        self,
        session: SparkSession,
        transform: SparkTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        events: EventSink = ignore_events,
        memory: MemoryBudget | None = None,
        columns: Callable[[], TableColumns] | None = None,
    ) -> None:
        self._session = session
        self._memory = memory or MemoryBudget(_MEMORY_BYTES)
        self._arrow = ArrowMemory(session, self._memory, events)
        self._results = ArrowResults(session, self._arrow)
        self._transform = transform
        self._root = table_root(table_uri)
        # Tasks on other hosts do not have the environment of the driver.
        self._options = delta_options(self._root, storage_options)
        self._storage = open_storage(self._root, self._options)
        self._columns = columns or (lambda: TableColumns(partition_by=tuple(partition_by)))
        self._clock = SystemClock()
        # Whether the transform raised in the last write that failed: a probe need not check values.
        self._has_raised = False

    def prepare(self) -> None:
        """Load the Java classes that pass batches to Spark, before the first batch needs them."""
        self._results.prepare()

    def write(self, batch: Batch) -> Batch:
        """Transform and write a batch (see `BatchWriter.write`)."""
        if not batch.records.num_rows:
            return replace(batch, files=())
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        parts = min(1 + batch.records.nbytes // _BYTES_OF_A_TASK, cores)
        try:
            with self._arrow.frame(batch.records, parts) as arrow:
                if arrow is not None:
                    return self.write_frame(arrow, batch, parts)
        except KclError as error:
            if not self._arrow.caused(error):
                raise
        frame = records_frame(self._session, batch.records)
        return self.write_frame(frame, batch, parts)

    def write_frame(self, frame: DataFrame, batch: Batch, most_files: int | None) -> Batch:
        """Like `write`, for records that are in Spark already.

        Args:
            frame: The records.
            batch: Their batch. If it is not loaded, their number is not known.
            most_files: Most files; None for one per partition.
        """
        records = batch.records.num_rows if batch.loaded else None
        try:
            output = transformed(frame, self._transform, records)
        except KclError:
            self._has_raised = True
            raise
        columns = self._columns()
        output, for_table = _fitting(output, columns)
        try:
            schema = columns.fitted(for_table)
            files, rejected = self._write_files(output, columns, most_files, batch.batch_id)
        except KclError:
            self._has_raised = False
            raise
        except OSError as error:
            raise SinkError(f"cannot write the batch to {self._root}: {error}") from error
        except Exception as error:
            self._has_raised = True
            raise classified(error, records) from error
        if not files:
            return replace(batch, files=(), rejected=rejected)
        output_schema = pa.schema([*schema, *untyped(for_table, schema)])
        return replace(batch, files=files, output_schema=output_schema, rejected=rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Evaluate the transform on each part (see `BatchWriter.probe`)."""
        columns = self._columns()

        def fitting(frame: DataFrame, records: int) -> DataFrame:
            return _fitting(transformed(frame, self._transform, records), columns)[0]

        def check(result: pa.Table) -> None:
            columns.convert(split_rejected(result)[0], alone=True)

        # Made for the call: as an attribute it would refer back to this writer, whose memory files
        # would then stay open until a collection of cycles.
        probe = SparkProbe(self._session, fitting, None if self._has_raised else check)
        return probe.failures(slices)

    def _write_files(
        self, frame: DataFrame, columns: TableColumns, most_files: int | None, batch_id: str
    ) -> _Files:
        millis = int(self._clock.wall() * 1000)
        # A job of an executor fetch reads in the tasks. On a cluster this needs no event.
        if most_files is not None or can_share_memory(self._session):
            with self._folder(batch_id) as folder:
                found = self._results.each(
                    frame, most_files, partial(self._write_partition, columns, folder, millis)
                )
                if found is not None:
                    return _joined(found)
                self._remove(folder)
        if most_files is not None:
            frame = frame.coalesce(max(most_files, 1))
        # A new folder: tasks of the failed job may still write to theirs.
        with self._folder(batch_id) as folder:
            return FileTask(self._root, self._options, folder, columns, millis).run_on(frame)

    @contextmanager
    def _folder(self, batch_id: str) -> Iterator[str]:
        """A new folder, whose files are removed after an error."""
        folder = batch_folder(batch_id)
        try:
            yield folder
        except Exception:
            self._remove(folder)
            raise

    def _remove(self, folder: str) -> None:
        if is_local(self._root):  # in an object store, vacuum removes the files
            shutil.rmtree(Path(self._root) / folder, ignore_errors=True)

    def _write_partition(
        self, columns: TableColumns, folder: str, millis: int, number: int, pieces: Pieces
    ) -> _Files:
        """Write the rows of a partition that came back from Spark."""
        written = []
        for turn, piece in enumerate(pieces):
            kept, rejected = split_rejected(piece)
            files = write_table(
                self._storage,
                folder,
                columns.convert(kept),
                columns.partition_by,
                modified_millis=millis,
                part=f"part-{number}-{turn}",
            )
            written.append((files, rejected))
        return _joined(written)


def _fitting(output: DataFrame, columns: TableColumns) -> tuple[DataFrame, pa.Schema]:
    """Return the result without columns that are written nowhere, and its columns for the table.

    The types of a DataFrame do not depend on its rows, so what does not fit is no record's fault.

    Raises:
        BrokenTransformError: The columns do not fit the table.
    """
    reason = reason_against(output.schema)
    if reason is not None:
        raise BrokenTransformError(
            f"the transform's output has columns that a Delta table cannot hold ({reason}); cast "
            "them, to string for example"
        )
    given = arrow_schema(output.schema)
    rejects = rejected_columns(given)
    dropped = rejects.dropped if rejects else ()
    for_table = pa.schema([field for field in given if field.name not in dropped])
    try:
        schema = columns.fitted(for_table)
    except ResultMismatchError as error:
        raise BrokenTransformError(str(error)) from error
    names = list(dict.fromkeys([*schema.names, *(rejects.columns if rejects else ())]))
    if names != given.names:
        output = output.select(*[f"`{name.replace('`', '``')}`" for name in names])
    return output, for_table


def records_frame(session: SparkSession, records: pa.Table) -> DataFrame:
    """The records as a DataFrame, also without rows (which `createDataFrame` does not support).

    Raises:
        SinkError: The Spark session does not work any more.
    """
    try:
        if records.num_rows:
            return session.createDataFrame(without_empty_chunks(records))
        # Spark's optimizer removes this plan. An empty list would start Python tasks.
        return session.createDataFrame(one_row(records.schema)).where("false")
    except Exception as error:
        raise SinkError(
            f"cannot pass {records.num_rows} records to Spark: {spark_line(error)}"
        ) from error


def one_row(schema: pa.Schema) -> pa.Table:
    """A row of zeros, empty strings and nulls."""
    columns = [
        pa.nulls(1, field.type) if field.nullable else pa.array([_ZERO[field.type]], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def without_empty_chunks(records: pa.Table) -> pa.Table:
    """The same rows without empty record batches.

    Spark stops at an empty record batch, and the rows after it would be lost without an error.
    """
    return pa.Table.from_batches(
        [batch for batch in records.to_batches() if batch.num_rows], records.schema
    )


def transformed(
    frame: DataFrame, transform: SparkTransform | None, records: int | None
) -> DataFrame:
    """Apply the user's function to the DataFrame, without evaluating it.

    Raises:
        TransformFailedError: The function raised an error.
        BrokenTransformError: The function did not return a DataFrame, or uses unknown columns.
    """
    if transform is None:
        return frame
    try:
        result: Any = transform(frame)
    except TransformFailedError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise classified(error, records) from error
    if not isinstance(result, DataFrame):
        raise BrokenTransformError(
            f"the transform returned {type(result).__name__}; write a function that returns "
            "a DataFrame"
        )
    return result


def _joined(results: Sequence[_Files]) -> _Files:
    rejected = [rows for _, rows in results if rows is not None]
    files = tuple(file for some, _ in results for file in some)
    return files, pa.concat_tables(rejected) if rejected else None

"""The user's DataFrame function between an Arrow table and Parquet files.

Local tables are written by Spark's own Parquet writer. For object stores Spark would need jars that are not in its distribution, so there the tasks
write the files themselves (`mapInArrow`, pyarrow, the storage client of the table's log) and only names and sizes come back to the driver.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from kcl_pipeline.batch import Batch, DataFile, Written
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import KclError, SinkError, TransformFailed
from kcl_pipeline.spark.files import batch_folder, values_of_path, write_table
from kcl_pipeline.spark.handover import can_hand_over, handed_over
from kcl_pipeline.spark.schema import delta_schema, partition_misfit, to_delta
from kcl_pipeline.spark.storage import is_local, open_storage, table_root

SparkTransform = Callable[[DataFrame], DataFrame]

_LOG: Final = logging.getLogger(__name__)
_BYTES_OF_A_TASK: Final = 8 * 1024 * 1024
_BYTES_WORTH_A_FILE: Final = 4 * 1024 * 1024  # below it, planning to read a file takes longer than `createDataFrame`
_ZERO: Final[dict[pa.DataType, Any]] = {pa.string(): "", pa.binary(): b"", pa.int64(): 0, pa.timestamp("us", tz="UTC"): 0}
_FILES_WRITTEN: Final = "path string, size long, rows long, partition_values string"
_CRASHED: Final = "a Python worker of Spark crashed in it"
_WRITING_FAILED: Final = ("org.apache.hadoop.", "java.io.", "java.nio.file.", "java.net.", "java.lang.OutOfMemoryError")
_NOT_BY_RECORDS: Final = re.compile(  # how Spark says that a job died of its machines
    r"ExecutorLostFailure|Executor heartbeat timed out|FetchFailed|TaskResultLost|TaskKilled|failed to connect back|[Jj]ob \S*\s?cancelled"
    r"|SparkContext (was|has been) shut ?down|stopped SparkContext|removed our application|is closed"
)
_SINK_ERROR_IN_TASK: Final = f"{SinkError.__module__}.{SinkError.__name__}:"


class SparkBatchWriter:
    """A `BatchWriter` that runs the user's function on a DataFrame.

    `transform` gets the batch's records (`RECORD_SCHEMA`, possibly no rows) and returns a DataFrame; None writes them as they are. It must be a function
    of its input alone: a replay of a range has to yield the same rows. A batch becomes one file per 8 MiB of records, at most one per core (and
    combination of partition values).
    """

    def __init__(
        self,
        session: SparkSession,
        transform: SparkTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._session = session
        self._transform = transform
        self._root = table_root(table_uri)
        self._options = dict(storage_options or {})
        self._partition_by = tuple(partition_by)
        self._clock = clock or SystemClock()

    def write(self, batch: Batch) -> Written:
        """Transform and write (see `BatchWriter.write`)."""
        parts = max(min(1 + batch.records.nbytes // _BYTES_OF_A_TASK, self._session.sparkContext.defaultParallelism), 1)
        with batch_frame(self._session, batch.records, parts) as frame:
            return self.write_frame(frame, batch.batch_id, batch.records.num_rows, parts)

    def write_frame(self, frame: DataFrame, batch_id: str, records: int | None, parts: int | None) -> Written:
        """As `write`, of records that Spark has already, and how many if that is known. `parts`: at most so many files; None: one per partition."""
        with_result = transformed(frame, self._transform, records)
        given = to_arrow_schema(with_result.schema, timezone="UTC")
        schema = _with_nullability(delta_schema(given), given)
        reason = partition_misfit(schema, self._partition_by)
        if reason:
            raise SinkError(reason)
        if schema.names != given.names:
            with_result = with_result.select(*[f"`{name.replace('`', '``')}`" for name in schema.names])
        if parts is not None:
            with_result = with_result.coalesce(max(parts, 1))
        folder = batch_folder(batch_id)
        millis = int(self._clock.wall() * 1000)
        try:
            files = self._write_local(with_result, folder, millis) if is_local(self._root) else self._write_remote(with_result, folder, millis)
        except KclError:
            raise
        except OSError as error:
            raise SinkError(f"could not write the batch to {self._root}: {error}") from error
        except Exception as error:
            raise classified(error, records) from error
        return Written(files, schema, sum(file.rows for file in files))

    def _write_local(self, frame: DataFrame, folder: str, millis: int) -> tuple[DataFile, ...]:
        target = Path(self._root) / folder
        writer = frame.write.option("timeZone", "UTC").mode("error")
        (writer.partitionBy(*self._partition_by) if self._partition_by else writer).parquet(target.as_uri())
        files = []
        for path in sorted(target.rglob("*")):
            if path.is_dir():
                continue
            rows = pq.read_metadata(path).num_rows if path.suffix == ".parquet" and not path.name.startswith(".") else 0
            if not rows:  # check sums, and the file without rows that Spark writes for the schema's sake: vacuum would never find the former
                path.unlink()
                continue
            values = dict.fromkeys(self._partition_by) | dict(values_of_path(path.relative_to(target).as_posix(), self._partition_by))
            files.append(DataFile(path.relative_to(self._root).as_posix(), path.stat().st_size, rows, values, millis))
        return tuple(files)

    def _write_remote(self, frame: DataFrame, folder: str, millis: int) -> tuple[DataFile, ...]:
        task = _RemoteTask(self._root, self._options, folder, self._partition_by, millis)
        rows = frame.mapInArrow(task, _FILES_WRITTEN).collect()
        return tuple(DataFile(row.path, row.size, row.rows, json.loads(row.partition_values), millis) for row in rows)


class _RemoteTask:
    """One Spark task's share of a batch: its rows into files of their own, their names out."""

    def __init__(self, root: str, options: dict[str, str], folder: str, partition_by: tuple[str, ...], millis: int) -> None:
        self._root, self._options, self._folder, self._partition_by, self._millis = root, options, folder, partition_by, millis

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415 (only in the task)

        rows = [batch for batch in batches if batch.num_rows]
        if not rows:
            return
        context = TaskContext.get()
        part = f"part-{context.partitionId():05d}-{context.taskAttemptId()}" if context else "part"
        storage = open_storage(self._root, self._options)
        written = write_table(storage, self._folder, to_delta(pa.Table.from_batches(rows)), self._partition_by, modified_millis=self._millis, part=part)
        columns = {
            "path": [file.path for file in written],
            "size": [file.size for file in written],
            "rows": [file.rows for file in written],
            "partition_values": [json.dumps(dict(file.partition_values)) for file in written],
        }
        yield pa.RecordBatch.from_pydict(
            columns, schema=pa.schema([("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("partition_values", pa.string())])
        )


@contextmanager
def batch_frame(session: SparkSession, records: pa.Table, parts: int) -> Iterator[DataFrame]:
    """The records as a DataFrame, by the way that is faster for so many; it can be used while the context lasts. Raises `SinkError` when Spark is gone."""
    with ExitStack() as stack:
        frame = None
        if records.nbytes >= _BYTES_WORTH_A_FILE and can_hand_over(session):
            try:
                frame = stack.enter_context(handed_over(session, records, parts))
            except (OSError, PySparkException, Py4JError) as error:
                _LOG.info("records go to Spark value by value: %s", spark_line(error))
        yield records_frame(session, records) if frame is None else frame


def records_frame(session: SparkSession, records: pa.Table) -> DataFrame:
    """The records as a DataFrame, also when there are none (which `createDataFrame` cannot take from Arrow). Raises `SinkError` when Spark is gone."""
    try:
        if records.num_rows:
            return session.createDataFrame(without_empty_chunks(records))
        return session.createDataFrame(_one_row(records.schema)).where("false")  # planned away; an empty list would start Python tasks
    except Exception as error:
        raise SinkError(f"Spark could not take {records.num_rows} records: {spark_line(error)}") from error


def _one_row(schema: pa.Schema) -> pa.Table:
    """A row of zeros, empty texts and nulls."""
    columns = [pa.nulls(1, field.type) if field.nullable else pa.array([_ZERO[field.type]], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def without_empty_chunks(records: pa.Table) -> pa.Table:
    """The same rows. Spark stops reading at an empty record batch: the rows behind it would be lost without a word."""
    return pa.Table.from_batches([batch for batch in records.to_batches() if batch.num_rows], records.schema)


def transformed(frame: DataFrame, transform: SparkTransform | None, records: int | None) -> DataFrame:
    """What the user's function makes of the frame (nothing runs yet). Raises `TransformFailed` with its error, or when it does not return a DataFrame."""
    if transform is None:
        return frame
    try:
        result: Any = transform(frame)
    except KclError:
        raise
    except Exception as error:
        raise classified(error, records) from error
    if not isinstance(result, DataFrame):
        raise TransformFailed(f"the transform returned {type(result).__name__}; write a function that returns a DataFrame")
    return result


def _with_nullability(schema: pa.Schema, given: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(given.field(field.name).nullable) for field in schema])


def classified(error: Exception, records: int | None) -> KclError:
    """The user's fault or the table's? What shows in the Java causes as input/output, lost executors, or a dead JVM counts as the latter.

    In doubt it is not the records' fault: a good record that is set aside is lost to the table, a batch that is tried again is not.
    """
    line = spark_line(error)
    if _SINK_ERROR_IN_TASK in str(error):
        return SinkError(str(error).rpartition(_SINK_ERROR_IN_TASK)[2].strip().splitlines()[0])
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    gone = isinstance(error, ConnectionError) or (isinstance(error, Py4JError) and java is None)
    causes = [] if gone else _java_causes(java)
    crashed = any("Python worker exited unexpectedly" in text for _, text in causes)
    lost = any(_NOT_BY_RECORDS.search(text.partition("\n")[0]) for name, text in causes if name.startswith("org.apache.spark."))
    if gone or lost or (not crashed and any(name.startswith(_WRITING_FAILED) for name, _ in causes)):
        return SinkError(f"writing failed: {line}")
    return TransformFailed(f"the transform failed{'' if records is None else f' on {records} records'}: {_CRASHED if crashed else line}")


def _java_causes(java: Any) -> list[tuple[str, str]]:
    causes: list[tuple[str, str]] = []
    while java is not None and len(causes) < 20:  # noqa: PLR2004 (a chain of causes can be circular)
        causes.append((str(java.getClass().getName()), str(java.getMessage())))
        java = java.getCause()
    return causes


def spark_line(error: Exception) -> str:
    """The one line of a Spark error that says what happened: the innermost Python error, or Spark's first line, or the last Java cause."""
    java = getattr(error, "java_exception", None)
    if java is not None:
        name, text = _java_causes(java)[-1]
        return f"{name.rpartition('.')[2]}: {text.splitlines()[0] if text else ''}"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if "Traceback (most recent call last):" in lines:
        last = len(lines) - 1 - next(number for number, line in enumerate(reversed(lines)) if line.startswith(" "))
        return lines[min(last + 1, len(lines) - 1)]
    prefix = "" if isinstance(error, PySparkException) else f"{type(error).__name__}: "
    return prefix + (lines[0] if lines else "")

"""The user's DataFrame function between an Arrow table and Parquet files.

Local tables are written by Spark's own Parquet writer. For object stores Spark would need jars that
are not in its distribution, so there the tasks write the files themselves (`mapInArrow`, pyarrow,
the storage client of the table's log) and only names and sizes come back to the driver.
"""

from __future__ import annotations

import logging
import shutil
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

from kcl_pipeline.batch import NOTHING_WRITTEN, Batch, DataFile, Written
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.files import batch_folder, values_of_path
from kcl_pipeline.delta.schema import delta_schema, partition_misfit, untyped
from kcl_pipeline.delta.storage.storage import is_local, table_root
from kcl_pipeline.errors import BrokenTransformError, KclError, SinkError
from kcl_pipeline.spark.file_tasks import FileTask
from kcl_pipeline.spark.handover import can_hand_over, handed_over
from kcl_pipeline.spark.job_errors import classified, spark_line
from kcl_pipeline.spark.probes import SparkProbe
from kcl_pipeline.transform.rejected import rejected_columns

SparkTransform = Callable[[DataFrame], DataFrame]

_LOG: Final = logging.getLogger(__name__)
_BYTES_OF_A_TASK: Final = 8 * 1024 * 1024
_BYTES_WORTH_A_FILE: Final = (
    4 * 1024 * 1024
)  # below it, planning to read a file takes longer than `createDataFrame`
_ZERO: Final[dict[pa.DataType, Any]] = {
    pa.string(): "",
    pa.binary(): b"",
    pa.int64(): 0,
    pa.timestamp("us", tz="UTC"): 0,
}


class SparkBatchWriter:
    """A `BatchWriter` that runs the user's function on a DataFrame.

    `transform` gets the batch's records (`RECORD_SCHEMA`, possibly no rows) and returns a
    DataFrame; None writes them as they are. It must be a function of its input alone: a replay of a
    range has to yield the same rows. A batch becomes one file per 8 MiB of records, at most one per
    core (and combination of partition values).
    """

    def __init__(
        self,
        session: SparkSession,
        transform: SparkTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._transform = transform
        self._root = table_root(table_uri)
        self._options = dict(storage_options or {})
        self._partition_by = tuple(partition_by)
        self._clock = SystemClock()
        self._probe = SparkProbe(
            session, lambda frame, records: transformed(frame, transform, records), classified
        )

    def write(self, batch: Batch) -> Written:
        """Transform and write (see `BatchWriter.write`)."""
        if not batch.records.num_rows:
            return NOTHING_WRITTEN
        parts = max(
            min(
                1 + batch.records.nbytes // _BYTES_OF_A_TASK,
                self._session.sparkContext.defaultParallelism,
            ),
            1,
        )
        with batch_frame(self._session, batch.records, parts) as frame:
            return self.write_frame(frame, batch.batch_id, batch.records.num_rows, parts)

    def write_frame(
        self, frame: DataFrame, batch_id: str, records: int | None, parts: int | None
    ) -> Written:
        """As `write`, of records that Spark has already, and how many if that is known. `parts`: at
        most so many files; None: one per partition.
        """
        output = transformed(frame, self._transform, records)
        given = to_arrow_schema(output.schema, timezone="UTC")
        marked = rejected_columns(given)
        dropped = marked.dropped if marked else ()
        for_table = pa.schema([field for field in given if field.name not in dropped])
        schema = _with_nullability(delta_schema(for_table), for_table)
        reason = partition_misfit(schema, self._partition_by)
        if reason:
            raise SinkError(reason)
        wanted = list(dict.fromkeys([*schema.names, *(marked.columns if marked else ())]))
        if wanted != given.names:
            output = output.select(*[f"`{name.replace('`', '``')}`" for name in wanted])
        if parts is not None:
            output = output.coalesce(max(parts, 1))
        try:
            files, rejected = self._write_files(output, batch_id, by_tasks=marked is not None)
        except KclError:
            raise
        except OSError as error:
            raise SinkError(f"could not write the batch to {self._root}: {error}") from error
        except Exception as error:
            raise classified(error, records) from error
        told = pa.schema([*schema, *untyped(for_table)])
        return Written(files, told, sum(file.rows for file in files), rejected)

    def probe(self, parts: Sequence[pa.Table]) -> list[str | None]:
        """Evaluate the transform on each part (see `BatchWriter.probe`)."""
        return self._probe.errors(parts)

    def _write_files(
        self, frame: DataFrame, batch_id: str, *, by_tasks: bool
    ) -> tuple[tuple[DataFile, ...], pa.Table | None]:
        folder = batch_folder(batch_id)
        millis = int(self._clock.wall() * 1000)
        local = is_local(self._root)
        try:
            if local and not by_tasks:
                return self._write_local(frame, folder, millis)
            return self._write_remote(frame, folder, millis)
        except Exception:
            if local:  # elsewhere vacuum finds them
                shutil.rmtree(Path(self._root) / folder, ignore_errors=True)
            raise

    def _write_remote(
        self, frame: DataFrame, folder: str, millis: int
    ) -> tuple[tuple[DataFile, ...], pa.Table | None]:
        task = FileTask(self._root, self._options, folder, self._partition_by, millis)
        return task.run_on(frame)

    def _write_local(
        self, frame: DataFrame, folder: str, millis: int
    ) -> tuple[tuple[DataFile, ...], pa.Table | None]:
        target = Path(self._root) / folder
        writer = frame.write.option("timeZone", "UTC").mode("error")
        (writer.partitionBy(*self._partition_by) if self._partition_by else writer).parquet(
            target.as_uri()
        )
        files = []
        for path in sorted(target.rglob("*")):
            if path.is_dir():
                continue
            rows = (
                pq.read_metadata(path).num_rows
                if path.suffix == ".parquet" and not path.name.startswith(".")
                else 0
            )
            # check sums, and the file without rows that Spark writes for the schema's sake: vacuum
            # would never find the former
            if not rows:
                path.unlink()
                continue
            values = dict.fromkeys(self._partition_by) | dict(
                values_of_path(path.relative_to(target).as_posix(), self._partition_by)
            )
            files.append(
                DataFile(
                    path.relative_to(self._root).as_posix(),
                    path.stat().st_size,
                    rows,
                    values,
                    millis,
                )
            )
        return tuple(files), None


@contextmanager
def batch_frame(session: SparkSession, records: pa.Table, parts: int) -> Iterator[DataFrame]:
    """The records as a DataFrame, by the way that is faster for so many; it can be used while the
    context lasts. Raises `SinkError` when Spark is gone.
    """
    with ExitStack() as stack:
        frame = None
        if records.nbytes >= _BYTES_WORTH_A_FILE and can_hand_over(session):
            try:
                frame = stack.enter_context(handed_over(session, records, parts))
            except (OSError, PySparkException, Py4JError) as error:
                _LOG.info("records go to Spark value by value: %s", spark_line(error))
        yield records_frame(session, records) if frame is None else frame


def records_frame(session: SparkSession, records: pa.Table) -> DataFrame:
    """The records as a DataFrame, also when there are none (which `createDataFrame` cannot take
    from Arrow). Raises `SinkError` when Spark is gone.
    """
    try:
        if records.num_rows:
            return session.createDataFrame(without_empty_chunks(records))
        return session.createDataFrame(_one_row(records.schema)).where(
            "false"
        )  # planned away; an empty list would start Python tasks
    except Exception as error:
        raise SinkError(
            f"Spark could not take {records.num_rows} records: {spark_line(error)}"
        ) from error


def _one_row(schema: pa.Schema) -> pa.Table:
    """A row of zeros, empty texts and nulls."""
    columns = [
        pa.nulls(1, field.type) if field.nullable else pa.array([_ZERO[field.type]], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def without_empty_chunks(records: pa.Table) -> pa.Table:
    """The same rows. Spark stops reading at an empty record batch: the rows behind it would be lost
    without a word.
    """
    return pa.Table.from_batches(
        [batch for batch in records.to_batches() if batch.num_rows], records.schema
    )


def transformed(
    frame: DataFrame, transform: SparkTransform | None, records: int | None
) -> DataFrame:
    """What the user's function makes of the frame (nothing runs yet).

    Raises `TransformFailedError` with its error, `BrokenTransformError` when it does not return a
    DataFrame or asks for what the frame has not.
    """
    if transform is None:
        return frame
    try:
        result: Any = transform(frame)
    except KclError:
        raise
    except Exception as error:
        raise classified(error, records) from error
    if not isinstance(result, DataFrame):
        raise BrokenTransformError(
            f"the transform returned {type(result).__name__}; write a function that returns "
            "a DataFrame"
        )
    return result


def _with_nullability(schema: pa.Schema, given: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(given.field(field.name).nullable) for field in schema])

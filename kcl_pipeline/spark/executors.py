"""Run executor fetches: one Spark job reads, transforms and writes a batch.

A task reads several shards. Positions, counts and file names return to the driver.

*Arrow path* (`ArrowRangeJobs`): a task reads, applies the Arrow function and writes its Parquet
files. No record reaches a JVM. Only the attempt whose result Spark accepts counts; files of other
attempts are in no commit. *Spark path* (`FrameRangeJobs`): the transform gets a DataFrame whose
partitions read their shards when they are evaluated. `pins` makes every evaluation in a job read
the same ranges.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline.aws import KinesisSource
from kcl_pipeline.batch import NO_RECORDS, RECORD_SCHEMA, ArrowTransform, Batch
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.delta.files import ArrowBatchWriter, TableColumns, batch_folder, unique_name
from kcl_pipeline.delta.storage import StorageOptions, delta_options, table_root
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.kinesis.ranges import RangeReader, RangesWritten, ShardFetch
from kcl_pipeline.spark.failures.job_errors import spark_line
from kcl_pipeline.spark.pins.pins import PinAddress, Pins
from kcl_pipeline.spark.pins.server import PinServer
from kcl_pipeline.spark.task_process import settle, table_storage
from kcl_pipeline.spark.writer import SparkBatchWriter

FETCH_SECONDS: Final = 5.0
"""A task starts no call after this time, because handoffs and stops wait for the job."""


_PACKAGE: Final = Path(__file__).parents[1].resolve()
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The objects that a task needs to read shards. They are sent with every job."""

    kinesis: KinesisSource
    retrieval: RetrievalSettings
    initial_timestamp: datetime | None = None

    def reader(self, clock: Clock) -> RangeReader:
        """Create a reader in this process."""
        return RangeReader(self.kinesis.open(), self.retrieval, self.initial_timestamp, clock)


class ArrowRangeJobs:
    """`RangeJobs` of the Arrow path.

    `transform_arrow` is called once per task with the records of the task's shards. Its result for
    a shard must not depend on other shards.
    """

    def __init__(
        self,
        session: SparkSession,
        source: TaskSource,
        transform_arrow: ArrowTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        columns: Callable[[], TableColumns] | None = None,
    ) -> None:
        self._context = session.sparkContext
        self._source = source
        self._columns = columns or (lambda: TableColumns(partition_by=tuple(partition_by)))
        root = table_root(table_uri)
        self._open_writer = partial(
            _task_writer,
            transform_arrow,
            root,
            tuple(partition_by),
            # Executors do not have the environment of the driver.
            StorageOptions(delta_options(root, storage_options)),
        )

    def run(self, batch_id: str, fetches: Sequence[ShardFetch]) -> RangesWritten:
        """See `RangeJobs.run`."""
        groups = spread(fetches, self._context.defaultParallelism)
        open_writer = partial(self._open_writer, self._columns())
        task = partial(_arrow_task, self._source, open_writer, batch_id, batch_folder(batch_id))
        try:
            outcomes = self._context.parallelize(groups, len(groups)).map(task).collect()
        except Exception as error:
            raise SinkError(f"the job of batch {batch_id} failed: {spark_line(error)}") from error
        return joined(outcomes)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _task_writer(
    transform: ArrowTransform | None,
    uri: str,
    partition_by: tuple[str, ...],
    storage_options: StorageOptions,
    columns: TableColumns,
) -> ArrowBatchWriter:
    storage = table_storage(uri, storage_options)
    # One thread: the other cores run the other tasks.
    return ArrowBatchWriter(
        transform, uri, partition_by, storage=storage, threads=1, columns=lambda: columns
    )


def _arrow_task(
    source: TaskSource,
    open_writer: Callable[[], ArrowBatchWriter],
    batch_id: str,
    folder: str,
    fetches: Sequence[ShardFetch],
) -> RangesWritten:
    """One task of the Arrow path: read several shards, write files to a new folder in `folder`."""
    read = source.reader(SystemClock()).fetch(fetches, FETCH_SECONDS)
    shards = tuple(shard for shard, _ in read)
    if all(shard.after == shard.through for shard in shards):
        return RangesWritten(shards)
    batch = Batch(batch_id, (), pa.concat_tables([table for _, table in read]))
    try:
        written = open_writer().write_into(batch, f"{folder}/{unique_name()}")
    except TransformFailedError as error:
        return RangesWritten(shards, failure=str(error))
    settle("arrow")
    return RangesWritten(shards, written.files, written.output_schema, written.rejected)


class FrameRangeJobs:
    """`RangeJobs` of the Spark path.

    It starts a `PinServer` on the address of Spark's driver. `port` 0 chooses a free port.
    """

    def __init__(
        self, session: SparkSession, source: TaskSource, writer: SparkBatchWriter, port: int = 0
    ) -> None:
        self._session = session
        self._source = source
        self._writer = writer
        conf = session.sparkContext.getConf()
        host = conf.get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        self._pins = PinServer(conf.get("spark.driver.bindAddress", host) or host, host, port)

    def run(self, batch_id: str, fetches: Sequence[ShardFetch]) -> RangesWritten:
        """See `RangeJobs.run`."""
        groups = spread(fetches, self._session.sparkContext.defaultParallelism)
        # Unique per attempt: tasks of an earlier attempt at the batch may still be running.
        job = uuid.uuid4().hex
        self._pins.begin(job, [fetch.lease_key for fetch in fetches])
        try:
            task = partial(_frame_task, self._source, groups, self._pins.address, job)
            frame = self._session.range(0, len(groups), 1, len(groups)).mapInArrow(
                task, from_arrow_schema(RECORD_SCHEMA)
            )
            batch = Batch(batch_id, (), NO_RECORDS, loaded=False)
            written = self._writer.write_frame(frame, batch, None)
        except TransformFailedError as error:
            return RangesWritten(self._pins.end(job), failure=str(error))
        finally:
            shards = self._pins.end(job)
        return RangesWritten(shards, written.files, written.output_schema, written.rejected)

    def close(self) -> None:
        """Stop listening for tasks."""
        self._pins.close()


def _frame_task(
    source: TaskSource,
    groups: Sequence[tuple[ShardFetch, ...]],
    address: PinAddress,
    job: str,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """One partition of the records' DataFrame. It reads its shards, or their pinned ranges."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for table in _tables(source.reader(SystemClock()), address, job, groups[number]):
                yield from (one for one in table.to_batches() if one.num_rows)
    settle("frame")


def _tables(
    reader: RangeReader, address: PinAddress, job: str, fetches: Sequence[ShardFetch]
) -> list[pa.Table]:
    tables = []
    with closing(Pins(address, job)) as pins:
        pinned = {fetch.lease_key: pins.get(fetch.lease_key) for fetch in fetches}
        for shard, table in reader.fetch(
            [fetch for fetch in fetches if pinned[fetch.lease_key] is None], FETCH_SECONDS
        ):
            counts = pins.pin(shard)
            if (counts.through, counts.records) == (shard.through, shard.records):
                tables.append(table)
            else:
                pinned[shard.lease_key] = counts
    return tables + [
        reader.read_exactly(fetch, known.through, known.records)
        for fetch in fetches
        if (known := pinned[fetch.lease_key]) is not None
    ]


def ship_by_value(function: Callable[..., object] | None) -> None:
    """Let Spark send the function with its module's code, unless the module is installed.

    A pipeline's module is a file of the user's project. Executors do not have it, so they cannot
    import it by name.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is not None and file is not None and not _is_installed(Path(file).resolve()):
        # PySpark's copy of cloudpickle has no types
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _is_installed(file: Path) -> bool:
    # A project of a user may be in a folder that has the name of this package, such as a checkout
    return file.is_relative_to(_PACKAGE) or not _INSTALLED.isdisjoint(file.parts)


def spread(fetches: Sequence[ShardFetch], tasks: int) -> list[tuple[ShardFetch, ...]]:
    """Distribute the fetches over at most `tasks` tasks, none of them empty."""
    count = max(min(tasks, len(fetches)), 1)
    return [tuple(fetches[number::count]) for number in range(count)]


def joined(tasks: Sequence[RangesWritten]) -> RangesWritten:
    """Combine the results of the tasks.

    It is a failure if a task has failed, or if the tables differ in more than nullability. Tables
    without rows are not compared.
    """
    shards = tuple(shard for task in tasks for shard in task.shards)
    failure = next((task.failure for task in tasks if task.failure is not None), None)
    if failure is not None:
        return RangesWritten(shards, failure=failure)
    schemas = [task.output_schema for task in tasks if task.output_schema is not None]
    schema = schemas[0] if schemas else None
    for other in schemas[1:]:
        both = _both(schema, other)
        if both is None:
            return RangesWritten(
                shards,
                failure=f"tasks of one batch returned different tables: {schemas[0].names} and "
                f"{other.names}, or different types",
            )
        schema = both
    rejected = [task.rejected for task in tasks if task.rejected is not None]
    return RangesWritten(
        shards,
        tuple(file for task in tasks for file in task.files or ()),
        schema,
        pa.concat_tables(rejected) if rejected else None,
    )


def _both(first: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    """Return the common schema of two tables; None when they differ in more than nullability.

    If a column of one table has the null type, it gets the type of the other table.
    """
    if sorted(first.names) != sorted(other.names):
        return None
    fields = []
    for field, same in zip(first, map(other.field, first.names), strict=True):
        nullable = field.nullable or same.nullable
        if pa.types.is_null(field.type) or field.type == same.type:
            fields.append(same.with_nullable(nullable))
        elif pa.types.is_null(same.type):
            fields.append(field.with_nullable(nullable))
        else:
            return None
    return pa.schema(fields)

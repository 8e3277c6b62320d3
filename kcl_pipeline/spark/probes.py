"""Runs a Spark transform on many small parts of a batch, without writing anything, to find the
parts that it fails on.

A write per part costs a plan, files and a dozen log lines. Here one plan serves many parts: each
part is one partition of a DataFrame, and a job is run for one partition at a time. That needs a
transform whose output partitions come from one input partition each. One that shuffles (it groups,
joins or sorts) gets a plan for each part.

Spark evaluates nothing until something asks for every column: a hash of all columns does, and it
leaves no files, sends eight bytes per row and logs nothing when a task fails.

Jobs that run at the same time must not share an RDD: when one fails, Spark fails every job whose
lineage contains the failed stage's RDD, and good parts would count as bad. So each thread has a
DataFrame of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from kcl_pipeline.errors import KclError, TransformFailedError

MAX_JOBS_AT_ONCE: Final = 8
_MOST_STAGES: Final = 100
_ONE_TO_ONE: Final = "OneToOneDependency"
_LOCAL_RELATION_BYTES: Final = "spark.sql.execution.arrow.localRelationThreshold"
"""Below it Spark keeps Arrow rows in the plan, and evaluates them while it plans: all at once."""

Apply = Callable[[DataFrame, int], DataFrame]
"""The user's transform of a DataFrame of so many records. Raises `TransformFailedError`."""

Classify = Callable[[Exception, int], KclError]
"""Whether an error of a job is the transform's (`TransformFailedError`) or Spark's own."""


@dataclass(frozen=True, slots=True)
class _Job:
    """The evaluation of one part. `partition` of `rdd` holds its rows; None: all partitions."""

    part: int
    rdd: Any
    partition: int | None


class SparkProbe:
    """Evaluates a transform on parts of a batch.

    Used by one thread at a time. The transform is called in that thread only.
    """

    def __init__(self, session: SparkSession, apply: Apply, classify: Classify) -> None:
        self._session = session
        self._apply = apply
        self._classify = classify

    def errors(self, parts: Sequence[pa.Table]) -> list[str | None]:
        """The error of each part alone; None where the transform takes the part.

        Raises `SinkError` when Spark itself fails.
        """
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        threads = min(cores, MAX_JOBS_AT_ONCE, len(parts))
        found: list[str | None] = [None] * len(parts)
        planned: list[list[_Job]] = []
        for first in range(threads):
            numbers = range(first, len(parts), threads)
            planned.append(self._together(parts, numbers) or self._alone(parts, numbers, found))
        if not any(planned):
            return found
        with ThreadPoolExecutor(threads, thread_name_prefix="probe") as pool:
            for errors in pool.map(lambda jobs: self._run(parts, jobs), planned):
                for part, error in errors.items():
                    found[part] = error
        return found

    def _together(self, parts: Sequence[pa.Table], numbers: Sequence[int]) -> list[_Job]:
        """One plan for several parts; no job when the transform needs a plan for each."""
        batches = [batch for number in numbers for batch in _one_batch(parts[number])]
        with _rows_outside_the_plan(self._session):
            frame = self._session.createDataFrame(pa.Table.from_batches(batches))
            try:
                rdd = evaluated(self._apply(frame, sum(batch.num_rows for batch in batches)))
                whole = rdd.getNumPartitions() == len(numbers) and _is_narrow(rdd.rdd())
            except Exception:  # noqa: BLE001
                # which part it is about is not known: each is planned alone, and raises again
                return []
        return [_Job(number, rdd, place) for place, number in enumerate(numbers)] if whole else []

    def _alone(
        self, parts: Sequence[pa.Table], numbers: Sequence[int], found: list[str | None]
    ) -> list[_Job]:
        """A plan for each part; what cannot be planned is put into `found`."""
        jobs = []
        for number in numbers:
            part = pa.Table.from_batches(_one_batch(parts[number]))
            try:
                frame = self._apply(self._session.createDataFrame(part), part.num_rows)
                jobs.append(_Job(number, evaluated(frame), None))
            except Exception as error:  # noqa: BLE001 (classified, and raised if it is Spark's own)
                found[number] = self._text(error, part.num_rows)
        return jobs

    def _run(self, parts: Sequence[pa.Table], jobs: Sequence[_Job]) -> dict[int, str]:
        gateway: Any = self._session.sparkContext._gateway  # noqa: SLF001 (as pyspark itself)
        errors = {}
        for job in jobs:
            try:
                if job.partition is None:
                    job.rdd.count()
                else:
                    wanted = gateway.new_array(gateway.jvm.int, 1)
                    wanted[0] = job.partition
                    job.rdd.collectPartitions(wanted)
            except Exception as error:  # noqa: BLE001 (as above)
                errors[job.part] = self._text(error, parts[job.part].num_rows)
        return errors

    def _text(self, error: Exception, records: int) -> str:
        found = error if isinstance(error, KclError) else self._classify(error, records)
        if isinstance(found, TransformFailedError):
            return found.detail
        raise found from error


def evaluated(frame: DataFrame) -> Any:
    """A Java RDD of one number per row, for which Spark must compute every column."""
    named = frame.toDF(*[f"c{number}" for number in range(len(frame.columns))])
    columns = [
        f.col(field.name) if _can_hash(field.dataType) else f.col(field.name).cast("string")
        for field in named.schema.fields
    ]
    whole: Any = named.select(f.xxhash64(*columns)) if columns else named
    return whole._jdf.toJavaRDD()  # noqa: SLF001 (the only way to a job for one partition)


def _can_hash(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _can_hash(kind.elementType)
    if isinstance(kind, StructType):
        return all(_can_hash(field.dataType) for field in kind.fields)
    return not isinstance(kind, MapType | VariantType)


def _is_narrow(rdd: Any) -> bool:
    """Whether each partition is computed from one partition of one source, as far as it shows."""
    for _ in range(_MOST_STAGES):
        dependencies = rdd.dependencies()
        if dependencies.size() != 1:
            return bool(dependencies.size() == 0)
        dependency = dependencies.apply(0)
        if dependency.getClass().getSimpleName() != _ONE_TO_ONE:
            return False
        rdd = dependency.rdd()
    return False


def _one_batch(part: pa.Table) -> list[pa.RecordBatch]:
    """The rows in one record batch: Spark makes a partition of each."""
    batches: list[pa.RecordBatch] = part.combine_chunks().to_batches()
    return batches


@contextmanager
def _rows_outside_the_plan(session: SparkSession) -> Iterator[None]:
    before = session.conf.get(_LOCAL_RELATION_BYTES, None)
    session.conf.set(_LOCAL_RELATION_BYTES, "0")
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(_LOCAL_RELATION_BYTES)
        else:
            session.conf.set(_LOCAL_RELATION_BYTES, before)

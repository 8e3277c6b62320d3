"""Find the parts of a batch on which a Spark transform fails, without writing files.

A write per part would need a plan, files and a dozen log lines. Here one plan and one job serve
many parts: each part is one partition of a DataFrame. A task evaluates several partitions, one
after the other. This needs a transform whose output partitions each come from one input partition.
A transform that shuffles (it groups, joins or sorts) gets a plan and a job for each part.

The tasks return their errors (`outcomes`), so one job finds all parts on which the transform
raises, and how many rows it had returned before. A Python worker returns rows in batches, so the
failing record of most transforms is in the batch that follows. Long parts have `_BATCHES` batches.
Short ones have a batch per record, in a job of their own. An error that the tasks cannot return,
such as a lack of memory in the JVM, makes a task fail, and the first task that fails ends its job.
Then each part gets a plan and a job of its own, too.

Values that the table cannot hold are looked for only if the last write that failed did so because
of them: no record raised in it. The results of all parts come to the driver as Arrow columns, in
one job, and are checked there. A check in the tasks would need a Python process for each core, and
one more for each part that fails, because Spark ends a Python process whose task fails.

Concurrent jobs must not share an RDD: if one fails, Spark fails every job whose lineage contains
the failed stage's RDD, and valid parts would count as failed. Only jobs of parts that are planned
alone run at the same time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
from py4j.protocol import (
    CALL_COMMAND_NAME,
    END_COMMAND_PART,
    get_command_part,
    get_return_value,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from kcl_pipeline.batch import PartFailure
from kcl_pipeline.errors import KclError, TransformFailedError
from kcl_pipeline.spark.failures.job_errors import classified, spark_line
from kcl_pipeline.spark.failures.outcomes import errors_of, with_outcomes

_LOG = logging.getLogger(__name__)

MAX_JOBS_AT_ONCE: Final = 8
_PARTS_OF_A_TASK: Final = 16
"""A task costs 10 ms of CPU, and keeps the memory of its parts until it ends."""
_MOST_STAGES: Final = 100
_ONE_TO_ONE: Final = "OneToOneDependency"
_LOCAL_RELATION_BYTES: Final = "spark.sql.execution.arrow.localRelationThreshold"
"""Below this size Spark keeps Arrow rows in the plan and evaluates all of them while planning."""
_BATCH_RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
"""A longer record batch becomes several partitions. It also limits the batches of a Python UDF."""
_LIMITS: Final = (_BATCH_RECORDS, "spark.sql.execution.python.udf.maxRecordsPerBatch")
"""Limits of the batches of Python UDFs, with and without Arrow."""
_BATCHES: Final = 64
"""A batch costs a hundredth of a part that fails."""


class SparkProbe:
    """Evaluate a transform on parts of a batch.

    Not thread-safe. The transform is called only in the caller's thread.

    Args:
        session: The Spark session.
        apply: Applies the transform to a DataFrame with this many records, without evaluating it.
            Raises `TransformFailedError`.
        check: Looks at the result of a part. Raises `TransformFailedError`. None: only parts on
            which the transform raises are found.
    """

    def __init__(
        self,
        session: SparkSession,
        apply: Callable[[DataFrame, int], DataFrame],
        check: Callable[[pa.Table], object] | None = None,
    ) -> None:
        self._session = session
        self._apply = apply
        self._check = check

    def failures(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """The failure of each part; None for a part on which the transform succeeds.

        Raises:
            SinkError: Spark itself failed.
        """
        if not slices:
            return []
        refused = None if self._check is None else self._refused(slices, self._check)
        if refused is not None:
            return refused
        failures = self._raised(slices)
        # A job of the check that fails has a record on which the transform raises: it is found
        # first. Otherwise each part is checked alone.
        return failures if self._check is None or any(failures) else self._alone(slices)

    def _refused(
        self, slices: Sequence[pa.Table], check: Callable[[pa.Table], object]
    ) -> list[PartFailure | None] | None:
        """The refusal of the check for the result of each part, from one job.

        None: the job failed, or the transform needs a plan for each part.
        """
        planned = self._planned(slices)
        if planned is None:
            return None
        name = f"part-{uuid4().hex}"
        numbered = planned[0].withColumn(name, f.spark_partition_id())
        try:
            whole = numbered.coalesce(self._tasks(slices)).toArrow()
        except Exception as error:  # noqa: BLE001 (found again by the jobs that follow)
            _LOG.info("checking each part alone: %s", spark_line(error))
            return None
        # Rows come in the order of the tasks, and a task prefers partitions of its host.
        numbers = whole.column(name).to_numpy()
        order = np.argsort(numbers, kind="stable")
        rows = whole.drop_columns([name]).take(pa.array(order))
        edges = np.searchsorted(numbers[order], np.arange(len(slices) + 1)).tolist()
        return [_refusal(rows.slice(begin, end - begin), check) for begin, end in pairwise(edges)]

    def _raised(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """The failure of each part on which the transform fails."""
        failures: list[PartFailure | None] = [None] * len(slices)
        groups: tuple[list[int], list[int]] = ([], [])
        has_long = any(part.num_rows > _BATCHES for part in slices)
        for number, part in enumerate(slices):
            # A record alone is one batch in any plan, and needs no second one.
            fits_long = part.num_rows > _BATCHES or (has_long and part.num_rows == 1)
            groups[not fits_long].append(number)
        for group in filter(None, groups):
            some = [slices[number] for number in group]
            for number, failure in zip(
                group, self._reported(some) or self._alone(some), strict=True
            ):
                failures[number] = failure
        return failures

    def _reported(self, slices: Sequence[pa.Table]) -> list[PartFailure | None] | None:
        """Evaluate all parts in one job, in batches whose length fits the longest part.

        None: the job failed, or the transform needs a plan for each part.
        """
        batch_rows = max(max(part.num_rows for part in slices) // _BATCHES, 1)
        planned = self._planned(slices, batch_rows)
        if planned is None:
            return None
        gateway: Any = self._session.sparkContext._gateway  # noqa: SLF001 (as pyspark itself)
        context: Any = self._session.sparkContext._jsc.sc()  # noqa: SLF001 (as above)
        try:
            attempts = int(context.taskScheduler().maxTaskFailures())
            outcomes = with_outcomes(gateway, context, planned[1], attempts)
            errors = errors_of(_call(gateway, outcomes.coalesce(self._tasks(slices)), "collect"))
        except Exception as error:  # noqa: BLE001 (found again by the jobs that follow)
            _LOG.info("using a job for each part: %s", spark_line(error))
            return None
        failures: list[PartFailure | None] = [None] * len(slices)
        for number, task in errors.items():
            failure = self._failure(task, slices[number].num_rows)
            # In longer batches, a transform that returned no row may collect all rows first.
            if task.returned or batch_rows == 1:
                suspects = range(task.returned, task.returned + batch_rows)
                failure = replace(failure, suspects=suspects)
            failures[number] = failure
        return failures

    def _alone(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Evaluate and check each part with a plan and a job. The jobs run at the same time."""
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        jobs: list[Future[object] | Exception] = []
        with ThreadPoolExecutor(min(cores, MAX_JOBS_AT_ONCE), thread_name_prefix="probe") as pool:
            for part in slices:
                try:  # Planned in this thread, because a plan calls the user's function.
                    jobs.append(pool.submit(self._job_of(part)))
                except Exception as error:  # noqa: BLE001 (classified below)
                    jobs.append(error)
        errors = [job.exception() if isinstance(job, Future) else job for job in jobs]
        return [
            self._failure(error, part.num_rows) if isinstance(error, Exception) else None
            for error, part in zip(errors, slices, strict=True)
        ]

    def _job_of(self, part: pa.Table) -> Callable[[], object]:
        """Plan a part. The job raises an error if the transform or the check fails."""
        rows = pa.Table.from_batches(_one_batch(part))
        result = self._apply(self._session.createDataFrame(rows), part.num_rows)
        check = self._check
        if check is not None:
            return lambda: check(result.toArrow())
        gateway = self._session.sparkContext._gateway  # noqa: SLF001 (as pyspark)
        return partial(_call, gateway, evaluated(result), "count")

    def _tasks(self, slices: Sequence[pa.Table]) -> int:
        """In how many tasks one job evaluates these parts."""
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        return min(max(cores, math.ceil(len(slices) / _PARTS_OF_A_TASK)), len(slices))

    def _planned(
        self, slices: Sequence[pa.Table], batch_rows: int | None = None
    ) -> tuple[DataFrame, Any] | None:
        """Plan all parts together: the result, and the RDD that evaluates it.

        Partition n comes from part n. None: the transform needs a plan for each part.

        Args:
            slices: The parts.
            batch_rows: Most rows of a batch that a Python function gets. None: as in a write.
        """
        batches = [batch for part in slices for batch in _one_batch(part)]
        longest = max(batch.num_rows for batch in batches)
        # Not while the transform is called: it would get larger batches than in a write.
        with _settings(self._session, {_LOCAL_RELATION_BYTES: "0", _BATCH_RECORDS: str(longest)}):
            frame = self._session.createDataFrame(pa.Table.from_batches(batches))
        limits = self._limits(batch_rows) if batch_rows else {}
        try:
            with _settings(self._session, limits):
                result = self._apply(frame, sum(batch.num_rows for batch in batches))
                rdd = evaluated(result)
            whole = rdd.getNumPartitions() == len(slices) and _is_narrow(rdd.rdd())
        except Exception:  # noqa: BLE001
            # The failed part is not known. Each part is planned alone and raises again.
            return None
        return (result, rdd) if whole else None

    def _limits(self, batch_rows: int) -> dict[str, str]:
        """Settings for batches of so many rows, or of the configured number if that is smaller."""
        most = str(batch_rows)
        given = {key: int(self._session.conf.get(key, most) or most) for key in _LIMITS}
        # Of these two settings, the one for Arrow may be 0: then a write has no limit.
        return {key: str(rows) if 0 < rows < batch_rows else most for key, rows in given.items()}

    def _failure(self, error: Exception, records: int) -> PartFailure:
        found = error if isinstance(error, KclError) else classified(error, records)
        if isinstance(found, TransformFailedError):
            return PartFailure(found.detail)
        raise found from error


def _refusal(result: pa.Table, check: Callable[[pa.Table], object]) -> PartFailure | None:
    try:
        check(result)
    except TransformFailedError as error:
        return PartFailure(error.detail)
    return None


def _call(gateway: Any, target: Any, method: str, *arguments: Any) -> Any:
    """Call a Java method, and leave its error as it is.

    PySpark looks for a Python class for each error: it asks the JVM about 14 classes, and for the
    stack trace. This takes 100 ms, for each part that fails.
    """
    client, target_id = gateway._gateway_client, target._get_object_id()  # noqa: SLF001 (as above)
    given = "".join(get_command_part(argument) for argument in arguments)
    command = f"{CALL_COMMAND_NAME}{target_id}\n{method}\n{given}{END_COMMAND_PART}"
    return get_return_value(client.send_command(command), client, target_id, method)


def evaluated(frame: DataFrame) -> Any:
    """A Java RDD with the rows of a DataFrame, each with all of its columns.

    A job for a partition needs it. A count of the DataFrame would evaluate no column.
    """
    return frame._jdf.queryExecution().toRdd().toJavaRDD()  # noqa: SLF001 (as above)


def _is_narrow(rdd: Any) -> bool:
    """Whether the dependencies show that each partition comes from one partition of one source."""
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
    """The rows as one record batch, which becomes one partition in Spark."""
    return list(part.combine_chunks().to_batches())


@contextmanager
def _settings(session: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    before = {key: session.conf.get(key, None) for key in values}
    try:
        for key, value in values.items():
            session.conf.set(key, value)
        yield
    finally:
        for key, earlier in before.items():
            if earlier is None:
                session.conf.unset(key)
            else:
                session.conf.set(key, earlier)

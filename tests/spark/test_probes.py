"""Isolating the records that a Spark transform fails on: few jobs, no files, few log lines."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import functions as f

from kcl_pipeline.batch import Batch, Chunk
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.spark.failures import outcomes, probes
from kcl_pipeline.spark.failures.probes import SparkProbe
from kcl_pipeline.spark.writer import SparkBatchWriter, transformed
from kcl_pipeline.worker.batch_runner import WriteSteps
from kcl_pipeline.worker.failures import FailureLimits
from tests.spark.test_writer import batch, records
from tests.support.shortened import shortened

GOOD, BAD = b'{"amount": "1"}', b'{"amount": '


def failfast(frame):
    """Fails in the JVM."""
    parsed = f.from_json(f.col("data").cast("string"), "amount string", {"mode": "FAILFAST"})
    return frame.select(parsed.alias("order")).select("order.*")


def in_python(frame):
    """Fails in a Python worker."""
    amount = f.udf(lambda data: float(json.loads(data)["amount"]), "double")
    return frame.select(amount("data").alias("amount"))


def grouped(frame):
    """Fails before a shuffle."""
    return failfast(frame).groupBy("amount").count()


def with_maps(frame):
    """Has columns that Spark cannot hash."""
    return failfast(frame).select(
        f.create_map(f.lit("a"), "amount").alias("m"),
        f.array(f.create_map(f.lit("a"), "amount")).alias("a"),
        f.struct("amount").alias("s"),
        f.col("amount").alias("again"),
    )


def on_the_driver(frame):
    """Fails while it is called, depending on the records."""
    if frame.where(f.length("data") != len(GOOD)).count():
        raise ValueError("a record of another length")
    return frame


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (failfast, "Unexpected end-of-input"),
        (in_python, "JSONDecodeError"),
        (grouped, "Unexpected end-of-input"),
        (with_maps, "Unexpected end-of-input"),
        (on_the_driver, "ValueError: a record of another length"),
    ],
)
def test_the_parts_that_fail_are_told_from_the_others(spark, tmp_path: Path, transform, error):
    writer = SparkBatchWriter(spark, transform, str(tmp_path / "t"))
    parts = [records(*([GOOD] * 3)) for _ in range(6)]
    parts[2] = records(GOOD, BAD, GOOD)
    parts[4] = records(BAD)
    found = writer.probe(parts)
    assert [number for number, failure in enumerate(found) if failure is not None] == [2, 4]
    assert error in found[2].error
    assert "on 1 records" not in found[4].error
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_one_partition_and_the_setting_for_it_is_put_back(spark):
    seen = []

    def counted(frame):
        seen.append(frame.rdd.getNumPartitions())
        return frame

    keys = [
        "spark.sql.execution.arrow.localRelationThreshold",
        "spark.sql.execution.arrow.maxRecordsPerBatch",
    ]
    before = [spark.conf.get(key, None) for key in keys]
    probe = SparkProbe(spark, lambda frame, n: transformed(frame, counted, n))
    chunked = pa.concat_tables([records(GOOD), records(GOOD, GOOD)])
    assert probe.failures([chunked] * 10) == [None] * 10
    assert seen == [10]
    assert [spark.conf.get(key, None) for key in keys] == before
    assert probe.failures([]) == []


def test_a_part_longer_than_a_record_batch_of_spark_is_one_partition(spark):
    """Two partitions would need a plan and a job for each part, for each round of the search."""
    length = int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")) + 1
    partitions, batches = [], []

    def counted(frame):
        partitions.append(frame.rdd.getNumPartitions())
        batches.append(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
        return frame

    probe = SparkProbe(spark, lambda frame, n: transformed(frame, counted, n))
    assert probe.failures([records(*[GOOD] * length), records(*[GOOD] * 99)]) == [None, None]
    assert partitions == [2]
    assert all(0 < int(rows) < length for rows in batches), "no longer batches than in a write"


def test_the_transform_is_called_in_the_callers_thread_only(spark):
    threads = set()

    def noting(frame):
        threads.add(threading.get_ident())
        return grouped(frame)

    probe = SparkProbe(spark, lambda frame, n: transformed(frame, noting, n))
    assert probe.failures([records(GOOD)] * 4) == [None] * 4
    assert threads == {threading.get_ident()}


def jobs_of_a_round(spark, transform, folder: Path, count: int = 40) -> int:
    """Find three failing parts of `count` after a write; return the number of Spark jobs."""
    writer = SparkBatchWriter(spark, transform, str(folder / "t"))
    with pytest.raises(TransformFailedError):
        writer.write(batch(GOOD, BAD))
    parts = [records(GOOD, GOOD) for _ in range(count)]
    failing = [3, count // 2, count - 1]
    for number in failing:
        parts[number] = records(GOOD, BAD)
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.nextJobId()
    found = writer.probe(parts)
    assert [number for number, failure in enumerate(found) if failure is not None] == failing
    return scheduler.nextJobId() - before


@pytest.mark.parametrize("transform", [failfast, in_python])
def test_one_job_finds_all_parts_on_which_the_transform_raises(spark, tmp_path: Path, transform):
    assert jobs_of_a_round(spark, transform, tmp_path) == 1


def test_after_a_write_with_such_a_value_one_job_finds_all_parts_with_values_of_no_table(
    spark, tmp_path: Path
):
    def text(frame):
        return frame.selectExpr("cast(data AS string) AS text")

    writer = SparkBatchWriter(spark, text, str(tmp_path / "t"))
    with pytest.raises(TransformFailedError, match="is not UTF-8"):
        writer.write(batch(GOOD, b"\xff"))
    writer.write(batch(GOOD))  # of a healthy shard beside
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.nextJobId()
    found = writer.probe([records(GOOD), records(b"\xff"), records(GOOD)])
    assert [failure and failure.error for failure in found] == [
        None,
        r"column text: b'\xff' is not UTF-8",
        None,
    ]
    assert scheduler.nextJobId() - before == 1


def test_values_of_no_table_are_found_in_the_results_of_a_transform_that_shuffles(
    spark, tmp_path: Path
):
    def counted(frame):
        return frame.selectExpr("cast(data AS string) AS text").groupBy("text").count()

    writer = SparkBatchWriter(spark, counted, str(tmp_path / "t"))
    with pytest.raises(TransformFailedError, match="is not UTF-8"):
        writer.write(batch(GOOD, b"\xff"))
    found = writer.probe([records(GOOD), records(GOOD, b"\xff"), records(b"\xff")])
    error = r"column text: b'\xff' is not UTF-8"
    assert [failure and failure.error for failure in found] == [None, error, error]


def test_a_record_that_raises_among_values_of_no_table_is_found_first(spark, tmp_path: Path):
    def parsed(frame):
        raised = f.raise_error(f.lit("cannot parse")).cast("string")
        text = f.col("data").cast("string")
        return frame.select(f.when(f.col("data") == BAD, raised).otherwise(text).alias("text"))

    writer = SparkBatchWriter(spark, parsed, str(tmp_path / "t"))
    with pytest.raises(TransformFailedError, match="is not UTF-8"):
        writer.write(batch(GOOD, b"\xff"))
    found = writer.probe([records(GOOD), records(b"\xff"), records(GOOD, BAD)])
    assert [number for number, failure in enumerate(found) if failure is not None] == [2]
    assert "cannot parse" in found[2].error


def test_a_task_evaluates_many_parts(spark, tmp_path: Path):
    """A task for each part cost more than the parts, 3 s for each round of a search."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    jobs = jobs_of_a_round(spark, failfast, tmp_path)
    tracker = spark.sparkContext.statusTracker()
    last = scheduler.nextJobId()
    infos = [tracker.getJobInfo(number) for number in range(last - jobs, last)]
    tasks = [tracker.getStageInfo(stage).numTasks for info in infos for stage in info.stageIds]
    assert len(tasks) == 1
    assert max(tasks) <= max(spark.sparkContext.defaultParallelism, 3)


def test_without_outcomes_each_part_gets_a_job(
    spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another version of Spark may have other interfaces."""
    monkeypatch.setattr(probes, "with_outcomes", Mock(side_effect=Py4JError("no such class")))
    # One for each part but the three that fail while they are planned, because Spark keeps the rows
    # of one part in the plan.
    assert jobs_of_a_round(spark, failfast, tmp_path, count=10) == 7


def test_a_stack_overflow_fails_its_part_only(spark, tmp_path: Path):
    """Java's regular expressions recurse. Spark ends the JVM of an executor for this error."""

    def matched(frame):
        text = f.col("data").cast("string")
        return frame.select(f.regexp_extract(text, "(a|b)*", 0).alias("found"))

    long = b"ab" * 100_000
    writer = SparkBatchWriter(spark, matched, str(tmp_path / "t"))
    with pytest.raises(TransformFailedError, match="StackOverflowError"):
        writer.write(batch(GOOD, long))
    found = writer.probe([records(GOOD), records(GOOD, long), records(GOOD)])
    assert [failure and failure.error for failure in found] == [None, "StackOverflowError", None]


def pickled(frame):
    amount = f.udf(lambda data: float(json.loads(data)["amount"]), "double", useArrow=False)
    return frame.select(amount("data").alias("amount"))


def streamed(frame):
    def amounts(frames):
        for some in frames:
            yield some[["data"]].map(lambda data: json.loads(data)["amount"])

    return frame.mapInPandas(amounts, "data string")


@pytest.mark.parametrize(
    "transform", shortened([failfast, in_python, pickled, streamed], lambda one: one is not pickled)
)
def test_rows_that_were_returned_show_where_a_part_fails(spark, tmp_path: Path, transform):
    """The batch after them is a 64th of a long part, and a record of a short one."""
    writer = SparkBatchWriter(spark, transform, str(tmp_path / "t"))
    long = records(*[GOOD] * 400, BAD, *[GOOD] * 239)
    short = records(*[GOOD] * 20, BAD, *[GOOD] * 9)
    first = records(BAD, *[GOOD] * 9)
    found = writer.probe([long, first, short])
    assert [list(failure.suspects) for failure in found] == [[*range(400, 410)], [0], [20]]


def filtered(frame):
    """Returns fewer rows than it reads."""
    return in_python(frame.where(f.col("sub_sequence_number") % 3 == 0))


def repeated(frame):
    """Returns more rows than it reads."""
    rows = frame.select("data", f.explode(f.sequence(f.lit(1), f.lit(5))))
    return in_python(rows)


def turned(frame):
    """Reads all rows before it returns the last one first."""
    return in_python(frame.sortWithinPartitions(f.desc("sub_sequence_number")))


def at_the_end(frame):
    """Returns all rows, and then fails because of one of them."""

    def same(batches):
        bad = 0
        for some in batches:
            bad += sum(value == BAD for value in some["data"].to_pylist())
            yield some
        if bad:
            raise ValueError(f"{bad} bad records")

    return frame.mapInArrow(same, frame.schema)


@pytest.mark.parametrize(
    "transform",
    shortened([filtered, repeated, turned, at_the_end], {filtered, at_the_end}.__contains__),
)
def test_rows_that_show_another_place_change_no_result(spark, tmp_path: Path, transform):
    bad = {0, 90, 150, 151, 297}
    rows = records(*[BAD if row in bad else GOOD for row in range(300)])
    place = rows.schema.get_field_index("sub_sequence_number")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(range(300), pa.int64()))
    given = Batch("b", (Chunk("s1", rows, TRIM_HORIZON, Position("300"), 0),), rows)
    writer = SparkBatchWriter(spark, transform, str(tmp_path / "t"))
    steps = WriteSteps(
        writer, FailureLimits(BatchSettings()), lambda same: same, random.Random(1), lambda: False
    )
    paused: dict[str, str] = {}
    [part] = steps.run(given, paused.update)
    [failed] = part.failed.values()
    # The filter leaves 151 out; the other four are multiples of 3.
    expected = {row for row in bad if row % 3 == 0} if transform is filtered else bad
    assert set(failed["sub_sequence_number"].to_pylist()) == expected
    assert part.records.num_rows == 300 - len(expected)
    assert paused == {}


def test_records_that_fail_in_either_way_are_found_in_one_batch(spark, tmp_path: Path):
    """Values are searched after the records on which the transform raises are left out."""

    def parsed(frame):
        raised = f.raise_error(f.lit("cannot parse")).cast("string")
        text = f.col("data").cast("string")
        return frame.select(f.when(f.col("data") == BAD, raised).otherwise(text).alias("text"))

    data = [GOOD] * 200
    data[7] = data[150] = BAD
    data[8] = data[90] = b"\xff"
    rows = records(*data)
    place = rows.schema.get_field_index("sub_sequence_number")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(range(200), pa.int64()))
    given = Batch("b", (Chunk("s1", rows, TRIM_HORIZON, Position("200"), 0),), rows)
    writer = SparkBatchWriter(spark, parsed, str(tmp_path / "t"))
    steps = WriteSteps(
        writer, FailureLimits(BatchSettings()), lambda same: same, random.Random(1), lambda: False
    )
    paused: dict[str, str] = {}
    [part] = steps.run(given, paused.update)
    errors = part.failed["s1"]["error"].to_pylist()
    failed = dict(zip(part.failed["s1"]["sub_sequence_number"].to_pylist(), errors, strict=True))
    assert failed.keys() == {7, 8, 90, 150}
    assert all("cannot parse" in failed[row] for row in (7, 150))
    assert all("is not UTF-8" in failed[row] for row in (8, 90))
    assert (part.output_rows, part.records.num_rows, paused) == (196, 196, {})


def outcomes_of(spark, frame, attempts: int):
    context = spark.sparkContext
    rdd = probes.evaluated(frame)
    made = outcomes.with_outcomes(context._gateway, context._jsc.sc(), rdd, attempts)
    return outcomes.errors_of(made.collect())


def test_a_task_returns_its_error_in_its_last_attempt_only(spark):
    """Spark repeats a failed task on a cluster."""
    failing = spark.range(1).select(f.raise_error(f.lit("not this time")))
    [error] = outcomes_of(spark, failing, 1).values()
    assert "not this time" in error.causes[-1][1]
    with pytest.raises(Exception, match="not this time"):
        outcomes_of(spark, failing, 100)


def test_a_long_message_is_shortened(spark):
    failing = spark.range(1).select(f.raise_error(f.repeat(f.lit("x"), 1_000_000)))
    [error] = outcomes_of(spark, failing, 1).values()
    assert len(error.causes[-1][1]) < 70_000


@pytest.mark.parametrize(
    ("transform", "error"), [(failfast, "Unexpected end-of-input"), (in_python, "in <lambda>")]
)
def test_a_failing_part_does_not_ask_for_the_stack_traces_of_the_jvm(
    spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform, error
):
    """They are longer than a buffer of the JVM's socket, which costs 40 ms each time."""
    asked = []
    monkeypatch.setattr(Py4JJavaError, "__str__", lambda _error: asked.append(1) or "")
    writer = SparkBatchWriter(spark, transform, str(tmp_path / "t"))
    found = writer.probe([records(BAD), records(GOOD)])
    assert error in found[0].error
    assert found[1] is None
    assert asked == []


def test_an_error_of_spark_itself_is_raised(spark, monkeypatch: pytest.MonkeyPatch):
    def failing(error: Exception, _records: int) -> SinkError:
        return SinkError(f"Spark is gone: {type(error).__name__}")

    monkeypatch.setattr(probes, "classified", failing)
    probe = SparkProbe(spark, lambda frame, n: transformed(frame, failfast, n))
    with pytest.raises(SinkError, match="Spark is gone"):
        probe.failures([records(GOOD), records(BAD)])


@pytest.mark.parametrize("transform", ["jvm", "values"])
@pytest.mark.parametrize(
    ("count", "bad"), [(4_000, 6), pytest.param(50_000, 30, marks=pytest.mark.long)]
)
def test_thirty_bad_records_of_fifty_thousand_are_found_with_few_jobs(
    spark, transform: str, count: int, bad: int
):
    """The seconds depend on the machine; `python -m benchmarks.isolation` prints them."""
    from benchmarks.isolation import isolate  # noqa: PLC0415 (only here)

    result = isolate(spark, records=count, bad=bad, transform=transform, seed=7)
    assert result.found == result.expected
    assert result.jobs < 14
    assert result.files == 0


def test_a_failed_write_leaves_no_files(spark, tmp_path: Path):
    writer = SparkBatchWriter(spark, failfast, str(tmp_path / "t"))
    good = [GOOD] * 200
    random.Random(1).shuffle(good)
    with pytest.raises(TransformFailedError):
        writer.write(batch(*good, BAD))
    assert [path for path in (tmp_path / "t").rglob("*") if path.is_file()] == []


class TestRejectedRows:
    @staticmethod
    def typed(frame):
        order = f.from_json(f.col("data").cast("string"), "amount string")
        return frame.select(
            order.alias("order"),
            f.when(f.col("order.amount").isNull(), "not an order").alias("_error"),
            *[f.col(name).alias(f"_{name}") for name in POSITION],
        ).select("order.amount", "_error", *[f"_{name}" for name in POSITION])

    def test_one_job_gives_the_files_and_the_rejected_rows(self, spark, tmp_path: Path):
        evaluations = spark.sparkContext.accumulator(0)
        count = f.udf(lambda data: evaluations.add(1) or data, "binary").asNondeterministic()

        def counted(frame):
            return self.typed(frame.withColumn("data", count("data")))

        writer = SparkBatchWriter(spark, counted, str(tmp_path / "t"))
        given = batch(GOOD, BAD, GOOD, b"\xff")
        written = writer.write(given)
        assert written.output_schema.names == ["amount"]
        assert written.output_rows == 2
        assert evaluations.value == 4, "each record is evaluated once"
        rows = written.rejected.sort_by("sequence_number").to_pylist()
        numbers = given.records["sequence_number"].to_pylist()
        assert [row["sequence_number"] for row in rows] == [numbers[1], numbers[3]]
        assert {row["error"] for row in rows} == {"not an order"}
        tables = [pa.parquet.read_table(tmp_path / "t" / file.path) for file in written.files]
        assert pa.concat_tables(tables).to_pydict() == {"amount": ["1", "1"]}

    def test_partition_columns_and_positions_may_be_columns_of_the_table(
        self, spark, tmp_path: Path
    ):
        def by_shard(frame):
            return frame.select(
                *POSITION,
                "data",
                f.when(f.col("data") == f.lit(BAD), "bad").alias("_error"),
            )

        writer = SparkBatchWriter(spark, by_shard, str(tmp_path / "t"), ("shard_id",))
        written = writer.write(batch(GOOD, BAD))
        assert written.output_schema.names == [*POSITION, "data"]
        [file] = written.files
        assert file.partition_values == {"shard_id": "shardId-000000000001"}
        assert written.rejected.num_rows == 1

    def test_no_rejected_row_is_none_and_all_rejected_is_no_file(self, spark, tmp_path: Path):
        writer = SparkBatchWriter(spark, self.typed, str(tmp_path / "t"))
        assert writer.write(batch(GOOD, GOOD)).rejected is None
        none_good = writer.write(batch(BAD, BAD))
        assert (none_good.files, none_good.output_rows) == ((), 0)
        assert none_good.rejected.num_rows == 2
        assert none_good.output_schema is None, "a result without rows names no column of the table"

    def test_a_missing_position_is_told_before_anything_runs(self, spark, tmp_path: Path):
        writer = SparkBatchWriter(
            spark, lambda frame: self.typed(frame).drop("_shard_id"), str(tmp_path / "t")
        )
        with pytest.raises(TransformFailedError, match="_error without shard_id"):
            writer.write(batch(GOOD))
        assert list(tmp_path.iterdir()) == []


POSITION = ("shard_id", "sequence_number", "sub_sequence_number")

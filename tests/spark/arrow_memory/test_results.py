"""A result that comes back as Arrow columns in memory: the same files, rows and errors as by
Spark's own writer, one job for each batch, and nothing left behind.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Observation
from pyspark.sql import functions as f

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import KclError, SinkError, TransformFailedError
from kcl_pipeline.events import Event
from kcl_pipeline.spark import file_tasks
from kcl_pipeline.spark.arrow_memory import results
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.spark.test_writer_failures import _arrow_error, _crash, _python_error
from tests.support.result_files import contents, kept_bytes, schema_and_rows, writers
from tests.support.shortened import shortened
from tests.support.spark_batches import GIVEN, batch, open_files, records

pytestmark = pytest.mark.spark

BATCH = Batch("b", (), GIVEN)


def test_one_job_runs_and_observations_are_complete(
    spark, tmp_path: Path, events: list[Event]
) -> None:
    evaluated = spark.sparkContext.accumulator(0)
    seen: list[Observation] = []

    def counted(data):
        evaluated.add(1)
        return len(data)

    def observed(frame):
        seen.append(Observation())
        named = frame.select(f.udf(counted, "int")("data").alias("n"))
        return named.observe(seen[-1], f.count("*").alias("rows"), f.max("n").alias("most"))

    writer, _ = writers(spark, tmp_path, observed, (), events)
    writer.prepare()
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    spark.sparkContext.setJobGroup("one-job", "")
    try:
        assert writer.write(BATCH).output_rows == 1000
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert len(list(tracker.getJobIdsForGroup("one-job"))) == 1
    assert evaluated.value == 1000
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.extend(one.get for one in seen), daemon=True)
    waiting.start()
    waiting.join(60)
    assert found == [{"rows": 1000, "most": 6}]
    assert events == []


@pytest.mark.parametrize(
    "transform",
    shortened(
        [
            _python_error,
            _arrow_error,
            _crash,
            lambda frame: frame.selectExpr("cast(cast(data as string) as int) x"),
            lambda frame: frame.selectExpr("cast(raise_error('no good') as int) x"),
            lambda frame: frame.selectExpr("1 AS a", "2 AS A"),
            lambda frame: frame.selectExpr("interval 1 day gap"),
            lambda frame: frame.orderBy("data").selectExpr("assert_true(length(data) > 9) x"),
        ],
        lambda case: case is not _arrow_error,
    ),
)
def test_errors_are_those_of_python_tasks(ways, transform, events: list[Event]) -> None:
    arrow, own = (contents(writer, batch(b"bad", b"good")) for writer in ways(transform))
    assert arrow == own
    assert issubclass(arrow[0], KclError)
    assert events == [], "an error of the function does not change the way"


def test_a_failed_batch_leaves_no_file(ways, tmp_path: Path) -> None:
    def last_fails(frame):
        return frame.selectExpr("if(sequence_number LIKE '%99', raise_error('no good'), 'x') AS x")

    before = open_files()
    arrow, own = ways(last_fails)
    with pytest.raises(TransformFailedError, match="no good"):
        arrow.write(BATCH)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    del arrow, own
    assert open_files() == before


@pytest.mark.parametrize("zone", [pytest.param("UTC", marks=pytest.mark.long), "America/New_York"])
def test_types_and_partition_values(spark, ways, events: list[Event], zone: str) -> None:
    def many(frame):
        return frame.selectExpr(
            "if(length(data) % 3 = 0, null, sequence_number) AS text",
            "data",
            "explode(array('a', '', null, 'ü/=%', ' ')) AS k",
            "date'1999-12-31' + length(data) AS day",
            "timestamp'0099-01-01 00:00:00.5' + make_dt_interval(length(data)) AS at",
            "cast(length(data) AS decimal(12, 3)) / 8 AS amount",
            "timestamp_ntz'1582-10-10 03:04:05.000001' AS local",
            "array(array(1, null), null) AS lists",
            "map('k', map(1.5d, struct(1Y AS `a b`))) AS pairs",
            "cast('NaN' AS double) AS nan",
            "-0.0d AS zero",
            "length(data) > 3 AS `flag x`",
        )

    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        arrow, own = (
            contents(writer, BATCH) for writer in ways(many, ("k", "day", "amount", "flag x"))
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert arrow == own
    assert events == []


def test_no_rows_and_few_rows(ways, events: list[Event]) -> None:
    for text in ("false", "sequence_number LIKE '%1'"):
        arrow, own = (contents(w, BATCH) for w in ways(lambda fr, text=text: fr.where(text)))
        assert arrow == own
    assert events == []


def test_bytes_that_are_no_text_are_refused_in_both_ways(ways) -> None:
    """A table with such a text cannot be read."""
    given = Batch("b", (), records(b"\xff\xfe", b"ok"))
    for writer in ways(lambda frame: frame.selectExpr("cast(data AS string) AS text")):
        with pytest.raises(TransformFailedError, match="text"):
            writer.write(given)


def test_rejected_rows_are_dead_letters_and_the_others_are_written(ways) -> None:
    def marked(frame):
        return frame.selectExpr(
            "data",
            "shard_id AS _shard_id",
            "sequence_number AS _sequence_number",
            "sub_sequence_number AS _sub_sequence_number",
            "if(length(data) = 2, 'two', null) AS _error",
        )

    for writer in ways(marked):
        written = writer.write(BATCH)
        assert written.rejected is not None
        assert (written.output_rows, written.rejected.num_rows) == (857, 143)
        assert set(written.rejected.column("error").to_pylist()) == {"two"}
        assert written.output_schema.names == ["data"]
        assert {str(schema) for schema in schema_and_rows(writer, written)[0]} == {"data: binary"}


def test_big_rows_and_the_disk(ways, events: list[Event], monkeypatch) -> None:
    """More than the budget of a writer continues on the disk, in pieces."""
    monkeypatch.setattr(results, "_MOST_BYTES", 2**16)
    monkeypatch.setattr(file_tasks, "_PIECE_BYTES", 2**22)
    sizes: list[tuple[int, int, int]] = []
    each = results.ArrowResults._used

    def used(self, partitions, use):
        disk = sum(os.fstat(one.disk).st_size for one in partitions)
        sizes.append((arrow._memory.counts()["files"], disk, len(partitions)))
        return each(self, partitions, use)

    monkeypatch.setattr(results.ArrowResults, "_used", used)
    arrow, own = ways(lambda frame: frame.selectExpr("sequence_number", "repeat('x', 9000) w"))
    assert arrow._results.prepare()
    arrow._memory.max_bytes = 2**20
    wanted = schema_and_rows(own, own.write(BATCH))
    for _turn in range(3):
        written = arrow.write(BATCH)
        memory, disk, partitions = sizes[-1]
        assert 2**20 - 2**17 < memory <= 2**20, "records, results and what was kept"
        assert disk > 7 * 2**20
        assert len(written.files) > partitions, "a piece is a file"
        assert kept_bytes(arrow._arrow.pool) <= 2**20
        assert schema_and_rows(arrow, written) == wanted
    huge = Batch("b", (), records(*(bytes([n]) * (10 * 2**20 + n) for n in range(4))))
    rows = schema_and_rows(arrow, arrow.write(huge))
    assert len(rows[1]) == 4
    assert kept_bytes(arrow._arrow.pool) <= 2**20, "a large batch is not kept"
    assert events == []


def test_nothing_is_left_in_memory(ways) -> None:
    before, (arrow, own) = open_files(), ways(None)
    for _turn in range(3):
        arrow.write(BATCH)
    gc.collect()
    assert maps_of(arrow) == ""
    assert kept_bytes(arrow._arrow.pool) < 2**20
    del arrow, own
    assert open_files() == before
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:result" not in maps


def maps_of(writer: SparkBatchWriter) -> str:
    """Results that the JVM has open."""
    jvm = writer._session.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    found = []
    for link in Path(f"/proc/{jvm}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return "".join(name for name in found if "memfd:result" in name)


def test_a_job_that_is_cancelled_frees_its_memory(spark, ways) -> None:
    caught: list[BaseException] = []

    def slow(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield part
            time.sleep(60)

    before = open_files()
    (arrow, own) = ways(lambda frame: frame.mapInArrow(slow, frame.schema))
    arrow.prepare()
    writing = [arrow]

    def write() -> None:
        try:
            writing[0].write(BATCH)
        except BaseException as error:  # noqa: BLE001 (shown below)
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    tracker = spark.sparkContext.statusTracker()
    deadline = time.monotonic() + 30
    while not tracker.getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    spark.sparkContext.cancelAllJobs()
    thread.join(30)
    assert not thread.is_alive()
    assert [type(error) for error in caught] == [SinkError]
    kept = [file.name for file in arrow._arrow.pool._free]
    assert "result" not in kept, "a task may still write"
    caught.clear()
    writing.clear()
    del arrow, own
    assert open_files() == before

"""Batches use the memory of earlier batches, and nobody reads or writes that of another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kcl_pipeline.batch import Batch
from kcl_pipeline.events import Event
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.arrow_memory.results import ArrowResults
from tests.support.result_files import schema_and_rows
from tests.support.spark_batches import GIVEN, records

pytestmark = pytest.mark.spark


@pytest.fixture
def arrow(spark, events: list[Event]) -> ArrowMemory:
    memory = ArrowMemory(spark, MemoryBudget(2**29), events.append)
    assert memory.prepare(), events
    return memory


def large(byte: bytes) -> pa.Table:
    """More than the buffers between the JVM and Python."""
    return records(*(byte * 200_000 for _ in range(60)))


def test_batches_of_all_sizes_use_the_same_files(ways, events: list[Event]) -> None:
    arrow, own = ways(None)
    arrow.write(Batch("b", (), GIVEN))
    used = set(arrow._arrow.pool._free)
    for turn in range(3):
        given = Batch("b", (), records(*(b"%d-%d" % (turn, n) for n in range(300 - 100 * turn))))
        found = schema_and_rows(arrow, arrow.write(given))
        assert found == schema_and_rows(own, own.write(given))
        assert set(arrow._arrow.pool._free) == used
    assert events == []


def test_a_kept_frame_fails_although_its_file_is_used_again(arrow: ArrowMemory) -> None:
    with arrow.frame(GIVEN.slice(0, 500), 1) as kept:
        assert kept.count() == 500
        (first,) = arrow.pool._taken
    with pytest.raises(Exception, match="not in memory any more"):
        kept.count()
    with arrow.frame(GIVEN.slice(500), 1) as frame:
        assert arrow.pool._taken == [first]
        with pytest.raises(Exception, match="not in memory any more"):
            kept.count()
        assert frame.count() == 500


def test_a_task_that_still_reads_does_not_see_the_next_batch(
    arrow: ArrowMemory, tmp_path: Path
) -> None:
    go, started = str(tmp_path / "go"), tmp_path / "started"

    def slow(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            started.touch()
            while not Path(go).exists():
                time.sleep(0.01)
            yield part.select(["data"])

    found: list[pa.Table] = []
    with arrow.frame(large(b"a"), 1) as frame:
        files = list(arrow.pool._taken)
        job = frame.mapInArrow(slow, "data binary")
        thread = threading.Thread(target=lambda: found.append(job.toArrow()))
        thread.start()
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    try:
        with arrow.frame(large(b"b"), 1) as frame:
            assert not set(files) & set(arrow.pool._taken)
            assert {value[:1] for value in frame.toArrow().column("data").to_pylist()} == {b"b"}
            Path(go).touch()
            thread.join(60)
    finally:
        Path(go).touch()
        thread.join(60)
    values = found[0].column("data").to_pylist()
    assert [set(value) for value in values] == [{ord("a")}] * 60
    assert arrow._java.mappedBytes() == 0


def test_rows_that_are_kept_do_not_change(spark, arrow: ArrowMemory) -> None:
    """A caller keeps rejected rows longer than their batch."""
    results = ArrowResults(spark, arrow)
    kept = []
    for turn in range(3):
        with arrow.frame(records(b"%d" % turn), 1) as frame:
            kept += results.each(frame.select("data"), 1, lambda _, pieces: list(pieces)) or []
    rows = [table.column("data").to_pylist() for (table,) in kept]
    assert rows == [[b"0"], [b"1"], [b"2"]]


def test_files_of_a_failed_result_are_not_used_again(spark, arrow: ArrowMemory) -> None:
    results = ArrowResults(spark, arrow)
    with arrow.frame(GIVEN, 1) as frame:
        assert results.each(frame, 1, lambda number, _: number) == [0]
        before = [file for file in arrow.pool._free if file.name == "result"]
        assert before
        failing = frame.selectExpr("cast(raise_error('no good') AS string) AS x")
        with pytest.raises(Exception, match="no good"):
            results.each(failing, 1, lambda number, _: number)
        after = [file for file in arrow.pool._free if file.name == "result"]
    assert len(after) < len(before), "a task may still write"


def test_files_that_a_task_still_writes_are_not_used_again(
    spark, arrow: ArrowMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ArrowResults(spark, arrow)
    assert results.prepare()
    java = results._java

    class StillWriting:
        def run(self, *of: object) -> str:
            writing, _, rest = java.run(*of).partition(" ")
            assert writing == "0"
            return f"1 {rest}"

    monkeypatch.setattr(results, "_java", StillWriting())
    with arrow.frame(GIVEN, 1) as frame:
        assert results.each(frame, 1, lambda number, _: number) == [0]
    assert "result" not in [file.name for file in arrow.pool._free]

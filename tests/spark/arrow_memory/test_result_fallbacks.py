"""A result that cannot come back as Arrow is written in another way, and one event says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.events import ArrowMemorySkipped, Event
from kcl_pipeline.spark import file_tasks
from kcl_pipeline.spark.arrow_memory import classes, results
from kcl_pipeline.spark.arrow_memory.pool import HEADER_BYTES, MemoryFile
from kcl_pipeline.spark.arrow_memory.types import reason_against
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.result_files import contents, schema_and_rows
from tests.support.spark_batches import GIVEN, records

pytestmark = pytest.mark.spark

BATCH = Batch("b", (), GIVEN)


def test_a_value_that_no_table_holds_is_no_reason_for_another_way(
    ways, events: list[Event], tmp_path: Path
) -> None:
    given = Batch("b", (), records(b"\xff", b"ok"))
    arrow, tasks = ways(lambda frame: frame.selectExpr("cast(data AS string) t", "data"), ("t",))
    assert contents(arrow, given) == contents(tasks, given)
    assert contents(arrow, given)[0] is TransformFailedError
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert events == []


def test_types_that_are_not_equal(spark) -> None:
    frame = spark.range(1)
    for column, reason in [
        ("interval '1' day", "c: interval day"),
        ("array(interval '1' month)", "c: interval month"),
        ("map('a', named_struct('v', parse_json('1')))", "c: variant"),
        ("'a' COLLATE UNICODE_CI", "c: string collate UNICODE_CI"),
        ("array(null)", None),
        ("map('a', array(named_struct('t', current_timestamp(), 'x', 'y')))", None),
    ]:
        assert reason_against(frame.selectExpr(f"{column} AS c").schema) == reason


def falls_back(arrow: SparkBatchWriter, events: list[Event]) -> str:
    """Every row arrives, and one event says why not by Arrow."""
    for _ in range(2):
        written = arrow.write(BATCH)
        rows = schema_and_rows(arrow, written)[1]
        assert (written.output_rows, len(set(map(str, rows)))) == (1000, 1000)
        folders = {Path(file.path).parent for file in written.files}
        assert len(folders) == 1
    assert len(list(Path(arrow._root, "batches").iterdir())) == 2, "no folder of an attempt"
    (event,) = events
    assert isinstance(event, ArrowMemorySkipped)
    return event.reason


def test_a_class_that_does_not_compile(ways, events: list[Event], monkeypatch) -> None:
    def broken(jvm: Any, loader: Any, context: Any, name: str) -> None:
        jvm.org.codehaus.janino.SimpleCompiler().cook("package kclpipeline; class X extends Y {}")

    loads = classes._loads
    monkeypatch.setattr(
        classes, "_loads", lambda loader, name: name != classes.RESULT_CLASS and loads(loader, name)
    )
    monkeypatch.setattr(classes, "_add_classes", broken)
    arrow, _ = ways(None)
    assert "CompileException" in falls_back(arrow, events)


def test_a_session_that_writes_other_rows(ways, events: list[Event], monkeypatch) -> None:
    whole = results.sample_result
    monkeypatch.setattr(results, "sample_result", lambda session: whole(session).where("id > 0"))
    arrow, _ = ways(None)
    assert falls_back(arrow, events) == "Spark does not write the same rows"


def test_a_file_of_another_batch_is_not_written(ways, events: list[Event], monkeypatch) -> None:
    """The descriptor of an ended batch belongs to the next one."""
    arrow, _ = ways(None)
    arrow.prepare()
    start = MemoryFile.start
    seen: list[bytes] = []

    def other(file: MemoryFile, _token: str) -> None:
        start(file, "another batch")
        file.grow(1000)

    def seen_after(files: Any, *, is_ended: bool) -> None:
        seen.extend(os.pread(file.descriptor, 2000, 0) for file in files if file.name == "result")
        give_back(files, is_ended=is_ended)

    give_back = arrow._arrow.pool.give_back
    monkeypatch.setattr(MemoryFile, "start", other)
    monkeypatch.setattr(arrow._arrow.pool, "give_back", seen_after)
    for file in arrow._arrow.pool._free:
        os.ftruncate(file.descriptor, 0)
    assert "the batch of this result has ended" in falls_back(arrow, events)
    assert set(seen) == {b"another batch".ljust(HEADER_BYTES).ljust(1000, b"\0")}


def test_a_stream_without_all_rows(ways, events: list[Event], monkeypatch) -> None:
    arrow, _ = ways(None)
    arrow.prepare()
    whole = results._pieces
    monkeypatch.setattr(file_tasks, "_PIECE_BYTES", 1)  # a file is written before the count differs
    monkeypatch.setattr(results, "_pieces", lambda file, rows: whole(file, rows + 1))
    assert falls_back(arrow, events).endswith(" rows")


def test_no_memory(ways, events: list[Event], monkeypatch) -> None:
    def full(name: str) -> int:
        if name == "result":
            raise OSError(28, os.strerror(28))
        return create(name)

    arrow, _ = ways(None)
    arrow.prepare()
    create = os.memfd_create
    arrow._arrow.pool._free.clear()
    monkeypatch.setattr(results.os, "memfd_create", full)
    assert falls_back(arrow, events) == "[Errno 28] No space left on device"


def test_a_table_that_cannot_be_written_is_the_sinks_fault(spark, tmp_path: Path, events) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = SparkBatchWriter(spark, None, str(tmp_path / "file" / "t"), events=events.append)
    with pytest.raises(SinkError, match="could not write"):
        writer.write(BATCH)
    assert events == []

"""The memory of a batch: read only while the batch lasts, freed at every kind of stop, and a batch
that cannot be passed as Arrow arrives in another way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.events import ArrowMemorySkipped, Event
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory import classes, frames, pool
from kcl_pipeline.spark.arrow_memory.classes import can_share_memory
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.writer import SparkBatchWriter, records_frame
from tests.support.result_files import kept_bytes
from tests.support.spark_batches import GIVEN, open_files

pytestmark = pytest.mark.spark


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def arrow(spark, events: list[Event]) -> ArrowMemory:
    memory = ArrowMemory(spark, MemoryBudget(2**29), events.append)
    assert memory.prepare(), events
    return memory


def writer(spark, tmp_path: Path, transform, events: list[Event]) -> SparkBatchWriter:
    return SparkBatchWriter(spark, transform, str(tmp_path / "t"), events=events.append)


def rows(tmp_path: Path, written) -> list[str]:
    tables = [pq.read_table(tmp_path / "t" / file.path) for file in written.files]
    return sorted(pa.concat_tables(tables).column("sequence_number").to_pylist())


WANTED = sorted(GIVEN.column("sequence_number").to_pylist())


def test_schema_partitions_columns_and_size_are_those_of_the_batch(
    spark, arrow: ArrowMemory
) -> None:
    with arrow.frame(GIVEN, 3) as frame:
        assert frame is not None
        assert frame.schema == records_frame(spark, GIVEN).schema
        assert frame.rdd.getNumPartitions() == 3
        assert frame.toArrow().cast(GIVEN.schema).equals(GIVEN), "in order"
        plan = frame.select("data")._jdf.queryExecution().optimizedPlan()
        assert plan.output().length() == 1, "only the columns that are used"
        assert 0 < int(str(plan.stats().sizeInBytes())) < 10**6


def test_a_frame_that_is_kept_fails_and_never_reads_the_next_batch(
    spark, arrow: ArrowMemory
) -> None:
    with arrow.frame(GIVEN.slice(0, 400), 1) as frame:
        kept = frame
        assert kept.count() == 400
    with pytest.raises(Exception, match="not in memory any more"):
        kept.count()
    with arrow.frame(GIVEN.slice(400), 1) as frame:
        assert frame.count() == 600
        with pytest.raises(Exception, match="not in memory any more"):
            kept.count()
        with pytest.raises(Exception, match="not in memory any more"):
            kept.union(frame).count()


def test_a_file_with_another_token_is_not_read(spark, arrow: ArrowMemory) -> None:
    """The descriptor of an ended batch belongs to the next one."""
    with arrow._opened(GIVEN, 1) as frame:
        (file,) = arrow.pool._taken
        file.start("other")
        others = frame.sparkSession.read.format(classes.SOURCE_CLASS).schema(frame.schema)
        arrow._java.open("mine")
        try:
            mixed = others.options(token="mine", files=file.path, sizes=file.size, rows=1).load()
            with pytest.raises(Exception, match="batch mine are not in memory"):
                mixed.count()
        finally:
            arrow._java.release("mine")


def test_a_cached_frame_reads_its_own_rows(spark, tmp_path: Path, events: list[Event]) -> None:
    kept = []

    def keep(frame):
        kept.append(frame.cache())
        return kept[-1]

    one = writer(spark, tmp_path, keep, events)
    try:
        halves = [GIVEN.slice(0, 400), GIVEN.slice(400)]
        assert [one.write(Batch("b", (), half)).output_rows for half in halves] == [400, 600]
        assert [frame.count() for frame in kept] == [400, 600]
    finally:
        spark.catalog.clearCache()
    assert events == []


def test_a_transform_that_keeps_a_frame_stops_the_batch_and_loses_nothing(
    spark, tmp_path: Path, events: list[Event]
) -> None:
    """An error of the sink: the batch is repeated, and no record becomes a dead letter."""
    kept = []

    def union_of_all(frame):
        kept.append(frame)
        return kept[0].union(frame)

    one = writer(spark, tmp_path, union_of_all, events)
    assert one.write(Batch("b", (), GIVEN)).output_rows == 2000
    with pytest.raises(SinkError, match="Use a DataFrame only while its batch is processed"):
        one.write(Batch("b", (), GIVEN))


def test_memory_is_freed_after_a_batch_and_after_a_failure(
    spark, tmp_path: Path, arrow: ArrowMemory, events: list[Event]
) -> None:
    before = open_files()
    one = writer(spark, tmp_path, None, events)
    assert rows(tmp_path, one.write(Batch("b", (), GIVEN))) == WANTED
    failing = writer(
        spark,
        tmp_path,
        lambda f: f.selectExpr("cast(raise_error('no good') AS string) AS x"),
        events,
    )
    with pytest.raises(TransformFailedError, match="no good"):
        failing.write(Batch("b", (), GIVEN))
    assert events == [], "an error of the user's function does not change the transfer"
    assert arrow._java.mappedBytes() == 0
    assert kept_bytes(failing._arrow.pool) < 2**20, "only what the next batch can use"
    del one, failing
    assert open_files() == before


def test_memory_is_mapped_until_the_batch_ends(spark, arrow: ArrowMemory) -> None:
    with arrow.frame(GIVEN, 2) as frame:
        assert frame.count() == 1000
        assert arrow._java.mappedBytes() > 0, "values may be used after their task"
    assert arrow._java.mappedBytes() == 0


def test_a_file_that_ends_too_early_is_an_error_of_the_transfer(
    spark, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows arrive in another way, and one event says why."""
    one = writer(spark, tmp_path, None, events)
    one.prepare()
    write = frames._write

    def cut(file: pool.MemoryFile, *records: object) -> None:
        write(file, *records)
        os.ftruncate(file.descriptor, file.size - 8)

    monkeypatch.setattr(frames, "_write", cut)
    arrives_in_another_way(one, tmp_path, events)


def arrives_in_another_way(one: SparkBatchWriter, tmp_path: Path, events: list[Event]) -> None:
    for _ in range(2):
        assert rows(tmp_path, one.write(Batch("b", (), GIVEN))) == WANTED
    assert {type(event) for event in events} == {ArrowMemorySkipped}
    assert "end too early" in events[0].reason


def test_a_stream_that_ends_too_early_is_an_error_of_the_transfer(
    spark, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of an earlier batch after the stream are not read."""
    one = writer(spark, tmp_path, None, events)
    one.prepare()
    size = frames._file_bytes
    monkeypatch.setattr(frames, "_file_bytes", lambda *of: size(*of) - 8)
    monkeypatch.setattr(frames.MemoryFile, "target", longer_target)
    arrives_in_another_way(one, tmp_path, events)


def longer_target(file: pool.MemoryFile) -> pa.NativeFile:
    file.grow(file.size + 8)
    return pa.FixedSizeBufferWriter(pa.py_buffer(file._mapped(file.size)))


def test_a_batch_arrives_in_another_way_when_there_is_no_memory(
    spark, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    one = writer(spark, tmp_path, None, events)
    one.prepare()
    monkeypatch.setattr(pool.os, "posix_fallocate", full)
    for _ in range(2):
        assert rows(tmp_path, one.write(Batch("b", (), GIVEN))) == WANTED
    assert events == [ArrowMemorySkipped("[Errno 28] No space left on device")]


def test_large_partitions_and_other_types_take_another_way(
    spark, arrow: ArrowMemory, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MAX_FILE_BYTES", 1000)
    with arrow.frame(GIVEN, 2) as frame:
        assert frame is None
    monkeypatch.undo()
    with arrow.frame(pa.table({"x": pa.array([1], pa.int32())}), 1) as frame:
        assert frame is None
    assert [event.reason for event in events] == [
        "a partition of the batch has 2 GiB or more",
        "records with the types [DataType(int32)]",
    ]


def test_an_unknown_version_takes_another_way_with_one_event(
    spark, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes, "SUPPORTED_SPARK", ("3.5",))
    one = writer(spark, tmp_path, None, events)
    one.prepare()
    for _ in range(2):
        assert rows(tmp_path, one.write(Batch("b", (), GIVEN))) == WANTED
    assert [event.reason for event in events] == [
        f"Spark {spark.version} is not one of the versions 3.5"
    ]


def test_classes_that_do_not_compile_take_another_way_with_one_event(
    spark, tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Text:
        def joinpath(self, _: str) -> Text:
            return self

        def read_text(self, encoding: str) -> str:
            return "package kclpipeline; public class RecordsInMemory extends org.Missing {}"

    monkeypatch.setattr(classes, "_loads", lambda *_: False)
    monkeypatch.setattr(classes.resources, "files", lambda _: Text())
    one = writer(spark, tmp_path, None, events)
    for _ in range(2):
        assert rows(tmp_path, one.write(Batch("b", (), GIVEN))) == WANTED
    (event,) = events
    assert "CompileException" in event.reason


def test_a_session_that_reads_other_rows_takes_another_way(
    spark, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = frames._chunks
    monkeypatch.setattr(frames, "_chunks", lambda records: chunks(records)[:0])
    assert not ArrowMemory(spark, MemoryBudget(2**29), events.append).prepare()
    assert events == [ArrowMemorySkipped("Spark does not read the same rows")]


def test_a_cluster_takes_another_way() -> None:
    class Session:
        version = "4.3.0"

        class sparkContext:  # noqa: N801 (pyspark's name)
            master, _encryption_enabled = "spark://host:7077", False

    with pytest.raises(classes.UnsuitableSessionError, match="master=spark://host:7077"):
        classes.check_session(Session())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("master", "encrypted", "expected"),
    [
        ("local", False, True),
        ("local[*]", False, True),
        ("local[2,3]", False, True),
        ("local[2]", True, False),
        ("local-cluster[2,1,1024]", False, False),
        ("spark://host:7077", False, False),
        ("yarn", False, False),
    ],
)
def test_only_a_session_on_this_machine_is_handed_memory(
    master: str, encrypted: bool, expected: bool
) -> None:
    class Context:
        def __init__(self) -> None:
            self.master, self._encryption_enabled = master, encrypted

    class Session:
        sparkContext = Context()  # noqa: N815 (pyspark's name)

    assert can_share_memory(Session()) is expected  # type: ignore[arg-type]

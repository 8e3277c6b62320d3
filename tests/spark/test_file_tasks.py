"""Results of executor fetches are written by pyarrow in the tasks."""

from __future__ import annotations

import gc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcl_pipeline.batch import NO_RECORDS, Batch, PartFailure
from kcl_pipeline.delta.files import ArrowBatchWriter, TableColumns
from kcl_pipeline.errors import TransformFailedError
from kcl_pipeline.spark import file_tasks, task_process, writer
from kcl_pipeline.spark.writer import SparkBatchWriter, records_frame
from tests.support.result_files import schema_and_rows, writers
from tests.support.spark_batches import records


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks cannot read the memory of the driver."""
    monkeypatch.setattr(writer, "can_share_memory", lambda _session: False)


def fetched(spark, one: SparkBatchWriter, given: pa.Table) -> Batch:
    """Write as a job of an executor fetch does, with two tasks."""
    frame = records_frame(spark, given).repartition(2, "sequence_number")
    return one.write_frame(frame, Batch("b", (), NO_RECORDS, loaded=False), None)


def creators(one: SparkBatchWriter, written: Batch) -> set[str]:
    return {
        pq.read_metadata(f"{one._root}/{file.path}").created_by.split()[0] for file in written.files
    }


def same_rows(spark, tmp_path: Path, transform, by: tuple[str, ...] = ()) -> set[str]:
    """Who writes the files, whose rows are those of a result in memory."""
    given = records(*[f"r-{number}".encode() for number in range(20)], b"\xff")
    one, own = writers(spark, tmp_path, transform, by)
    written, expected = fetched(spark, one, given), own.write(Batch("b", (), given))
    assert written.output_rows == expected.output_rows
    assert written.output_schema == expected.output_schema
    assert schema_and_rows(one, written) == schema_and_rows(own, expected)
    return creators(one, written)


@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize("by", [(), ("shard_id", "approximate_arrival_timestamp")])
def test_tasks_write_the_rows_of_a_result_in_memory(spark, tmp_path: Path, by) -> None:
    def many(frame):
        return frame.selectExpr(
            "*", "length(data) size", "array(data) list", "map('k', 1.5d) pairs",
            "if(partition_key like '%1', cast(1.5 as decimal(10,2)), null) amount",
        )  # fmt: skip

    assert same_rows(spark, tmp_path, many, by) == {"parquet-cpp-arrow"}


@pytest.mark.usefixtures("on_cluster")
def test_a_setting_of_sparks_writer_has_no_effect(spark, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.parquet.compression.codec", "zstd")
    try:
        assert same_rows(spark, tmp_path, None) == {"parquet-cpp-arrow"}
    finally:
        spark.conf.unset("spark.sql.parquet.compression.codec")


@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize("by", [(), ("t",)])
def test_a_value_that_no_table_holds_fails_and_leaves_no_file(spark, tmp_path: Path, by) -> None:
    def text(frame):
        return frame.selectExpr("cast(data AS string) t", "sequence_number")

    one = SparkBatchWriter(spark, text, str(tmp_path / "t"), by)
    given = records(b"\xff\xfe", *[b"ok"] * 9)
    with pytest.raises(TransformFailedError) as caught:
        fetched(spark, one, given)
    assert caught.value.detail == r"column t: b'\xff\xfe' is not UTF-8"
    assert list((tmp_path / "t" / "batches").iterdir()) == []
    assert one.probe([given.slice(0, 1), given.slice(1)]) == [
        PartFailure(caught.value.detail),
        None,
    ]


def test_the_memory_of_a_task_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tasks, "_PIECE_BYTES", 1)
    monkeypatch.setattr(file_tasks, "settle", lambda _kind: None)
    batches = [pa.record_batch({"n": [number]}) for number in range(3)]
    empty = pa.record_batch({"n": pa.array([], pa.int64())})
    task = file_tasks.FileTask(str(tmp_path), {}, "f", TableColumns(), 0)
    reports = pa.Table.from_batches(list(task(iter([empty, *batches, empty]))))
    paths = reports.column("path").to_pylist()
    assert len(set(paths)) == 3
    assert [pq.read_table(tmp_path / path).column("n").to_pylist() for path in paths] == [
        [0],
        [1],
        [2],
    ]


def test_a_task_writes_one_file(tmp_path: Path) -> None:
    rows = pa.table({"data": [bytes(1024)] * 70_000})
    assert rows.nbytes > 64 * 1024 * 1024
    in_task = ArrowBatchWriter(None, str(tmp_path / "t"), threads=1)
    assert [file.rows for file in in_task.write(Batch("b", (), rows)).files] == [70_000]


def test_a_process_opens_a_table_once() -> None:
    storage = task_process.table_storage("s3://lake/orders", {"a": "1", "b": "2"})
    assert task_process.table_storage("s3://lake/orders", {"b": "2", "a": "1"}) is storage
    assert task_process.table_storage("s3://lake/orders", {"a": "3"}) is not storage


def test_the_objects_of_a_process_leave_garbage_collection_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    task_process.settle.cache_clear()
    try:
        for kind in ("a", "a", "b"):
            task_process.settle(kind)
    finally:
        task_process.settle.cache_clear()
    assert calls == ["collect", "freeze"] * 2

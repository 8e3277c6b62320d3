"""A batch through the user's DataFrame function into files, and what becomes of every kind of
failure; both writers where they must agree.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions

from kcl_pipeline.batch import RECORD_SCHEMA, Batch, BatchWriter
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import ResultMismatchError, SinkError, TransformFailedError
from kcl_pipeline.kinesis.ranges import RangesWritten
from kcl_pipeline.spark.executors import joined
from kcl_pipeline.spark.writer import SparkBatchWriter, records_frame
from tests.support.delta_tables import Committer, entry, seq
from tests.support.spark_batches import NOW, batch, records, spark_writer


@pytest.fixture(params=["spark", "spark by tasks", "arrow"])
def plain_writer(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., BatchWriter]:
    """A writer of the records as they are, by each of the three ways."""

    def build(partition_by: tuple[str, ...] = ()) -> BatchWriter:
        if request.param == "arrow":
            return ArrowBatchWriter(None, str(tmp_path / "t"), partition_by)
        writer = SparkBatchWriter(
            request.getfixturevalue("spark"), None, str(tmp_path / "t"), partition_by
        )
        if request.param != "spark":
            writer._arrow.prepare = lambda: False  # type: ignore[method-assign]
        return writer

    return build


def commit(
    tmp_path: Path, writer: BatchWriter, data: Batch, partition_by: tuple[str, ...] = ()
) -> pa.Table:
    written = writer.write(data)
    sink = Committer(DeltaSink(str(tmp_path / "t"), partition_by), "app")
    sink.ensure(written.output_schema)
    stored = sink.stored("a")
    assert sink.land(written, [entry("a", stored.number + 1, stored)]).version is not None
    return DeltaTable(str(tmp_path / "t")).to_pyarrow_table()


def test_records_arrive_unchanged_by_every_way(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    given = batch(b"\x00\xff", b"", b"text")
    table = commit(tmp_path, plain_writer(), given).sort_by("sequence_number")
    assert table.to_pylist() == given.records.to_pylist()


def test_partitioned_records_arrive_unchanged_by_every_way(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    by = ("partition_key", "approximate_arrival_timestamp")
    given = batch(b"1", b"2", b"3")
    table = (
        commit(tmp_path, plain_writer(by), given, by)
        .sort_by("sequence_number")
        .select(given.records.schema.names)
    )
    assert table.to_pylist() == given.records.to_pylist()


def test_a_chunk_without_rows_does_not_hide_what_comes_behind_it(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    nothing = RECORD_SCHEMA.empty_table()
    chunked = Batch(
        "orders/1",
        (),
        pa.concat_tables([nothing, records(b"1", b"2"), nothing, nothing, records(b"3"), nothing]),
    )
    assert chunked.records.column("data").num_chunks > 2, (
        "as it comes from shards whose records were all filtered out"
    )
    assert sorted(commit(tmp_path, plain_writer(), chunked).column("data").to_pylist()) == [
        b"1",
        b"2",
        b"3",
    ]


def test_create_data_frame_gets_the_rows_after_an_empty_record_batch(spark) -> None:
    """Spark stops at an empty one."""
    given = batch(b"1", b"2").records
    empty = pa.RecordBatch.from_pylist([], schema=given.schema)
    first, second = (given.slice(row, 1).to_batches() for row in range(2))
    parts = pa.Table.from_batches([*first, empty, *second], given.schema)
    assert records_frame(spark, parts).toArrow().column("data").to_pylist() == [b"1", b"2"]


def test_a_transform_is_not_called_for_an_empty_batch(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    written = plain_writer().write(batch())
    assert (written.files, written.output_rows) == ((), 0)
    assert written.output_schema is None or [
        (field.name, field.type) for field in written.output_schema
    ] == [(field.name, field.type) for field in RECORD_SCHEMA]
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_two_attempts_at_a_batch_share_no_path(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    writer = plain_writer()
    first, second = writer.write(batch(b"1")), writer.write(batch(b"1"))
    assert {file.path for file in first.files}.isdisjoint(file.path for file in second.files)
    for file in (*first.files, *second.files):
        path = tmp_path / "t" / file.path
        assert path.stat().st_size == file.size
        assert pq.read_metadata(path).num_rows == file.rows == 1
        assert not any(part.startswith(("_", ".")) for part in Path(file.path).parts), (
            "hidden folders are hidden from vacuum"
        )


def test_an_aggregation_is_what_the_function_says(spark, tmp_path: Path) -> None:
    def totals(frame):
        return frame.groupBy("stream").agg(
            functions.count("*").alias("n"), functions.sum(functions.length("data")).alias("bytes")
        )

    written = spark_writer(spark, tmp_path, totals).write(batch(b"1", b"22", b"333"))
    assert written.output_rows == 1
    assert len(written.files) == 1
    assert pq.read_table(tmp_path / "t" / written.files[0].path).to_pylist() == [
        {"stream": "orders", "n": 3, "bytes": 6}
    ]


def test_a_function_that_drops_all_rows_gives_no_file(spark, tmp_path: Path) -> None:
    written = spark_writer(
        spark, tmp_path, lambda frame: frame.where("false").select("stream")
    ).write(batch(b"1"))
    assert (written.files, written.output_rows, written.output_schema) == ((), 0, None)


def test_spark_types_are_read_back_through_the_table(spark, tmp_path: Path) -> None:
    def many(frame):
        return frame.selectExpr(
            "cast(12.34 as decimal(10,2)) amount", "array(1, 2) list", "map('k', 1.5d) pairs",
            "struct(1 as a, 'x' as b) inner_", "date'2026-01-02' day",
            "timestamp'2026-01-02 03:04:05' at", "timestamp_ntz'2026-01-02 03:04:05' local",
            "1Y tiny",
        )  # fmt: skip

    table = commit(tmp_path, spark_writer(spark, tmp_path, many), batch(b"1"))
    assert table.to_pylist() == [
        {
            "amount": Decimal("12.34"),
            "list": [1, 2],
            "pairs": [("k", 1.5)],
            "inner_": {"a": 1, "b": "x"},
            "day": dt.date(2026, 1, 2),
            "at": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
            "local": dt.datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 (a column without a zone)
            "tiny": 1,
        }
    ]


def test_arrow_types_become_deltas(tmp_path: Path) -> None:
    def foreign(_table: pa.Table) -> pa.Table:
        return pa.table(
            {
                "u": pa.array([2**31], pa.uint32()),
                "s": pa.array(["x"], pa.large_string()),
                "v": pa.array(["x"], pa.string_view()),
                "d": pa.array(["x"]).dictionary_encode(),
                "ns": pa.array([1_999], pa.timestamp("ns")),
                "tz": pa.array([NOW], pa.timestamp("ms", tz="Europe/Berlin")),
                "l": pa.array([["x"]], pa.large_list(pa.large_string())),
                "f": pa.array([1.5], pa.float16()),
            }
        )

    table = commit(tmp_path, ArrowBatchWriter(foreign, str(tmp_path / "t")), batch(b"1"))
    row = table.to_pylist()[0]
    assert (row["u"], row["s"], row["v"], row["d"], row["l"], row["f"]) == (
        2**31,
        "x",
        "x",
        "x",
        ["x"],
        1.5,
    )
    assert row["tz"] == NOW.replace(microsecond=123_000)
    assert table.schema.field("ns").type == pa.timestamp("us")
    with pytest.raises(ResultMismatchError, match=r"cannot hold gap \(duration"):
        ArrowBatchWriter(
            lambda _: pa.table({"gap": pa.array([1], pa.duration("us"))}), str(tmp_path)
        ).write(batch(b"1"))
    with pytest.raises(TransformFailedError, match="column big: 18446744073709551615 does not fit"):
        ArrowBatchWriter(
            lambda _: pa.table({"big": pa.array([2**64 - 1], pa.uint64())}), str(tmp_path)
        ).write(batch(b"1"))
    with pytest.raises(ResultMismatchError, match="A is there twice"):
        ArrowBatchWriter(lambda _: pa.table({"a": [1], "A": [2]}), str(tmp_path)).write(batch(b"1"))


def test_the_commit_protocol_over_spark_files(spark, tmp_path: Path) -> None:
    writer = spark_writer(spark, tmp_path, lambda frame: frame.select("partition_key"))
    sink = Committer(DeltaSink(str(tmp_path / "t")), "app")
    written = writer.write(batch(b"1", b"2"))
    sink.ensure(written.output_schema)
    assert sink.land(written, [entry("a", 1)]).version == 1
    late = writer.write(batch(b"3"))
    assert sink.move("a", 1, seq(1))
    assert sink.land(late, [entry("a", 2, seq(1))]).refused == ("a",)
    assert DeltaTable(str(tmp_path / "t")).to_pyarrow_table().num_rows == 2


def test_a_column_of_nulls_without_a_type_is_reported(spark, tmp_path: Path) -> None:
    """It cannot be in a file; the table's check refuses it or knows its type."""

    def void(frame):
        return frame.selectExpr("shard_id", "null nothing")

    written = spark_writer(spark, tmp_path, void).write(batch(b"1"))
    assert written.output_schema is not None
    assert dict(zip(written.output_schema.names, written.output_schema.types, strict=True)) == {
        "shard_id": pa.string(),
        "nothing": pa.null(),
    }
    with pytest.raises(SinkError, match="every value of nothing is null and without a type"):
        commit(tmp_path, spark_writer(spark, tmp_path, void), batch(b"1"))


def test_the_parts_of_tasks_are_joined_where_one_has_only_nulls() -> None:
    typed = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("n", pa.string())])
    nulls = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("n", pa.null())])
    for parts in ([typed, nulls], [nulls, typed]):
        found = joined([RangesWritten((), (), schema) for schema in parts])
        assert found.output_schema == typed
    other = pa.schema([pa.field("a", pa.string()), pa.field("n", pa.null())])
    assert joined([RangesWritten((), (), schema) for schema in (typed, other)]).files is None

"""A batch through the user's DataFrame function into files, and what becomes of every kind of
failure; both writers where they must agree.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions
from pyspark.sql.functions import udf

from kcl_pipeline.batch import Batch, BatchWriter, CommitEntry, TxnVersions, Written
from kcl_pipeline.delta.arrow_writer import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.kinesis.client import RECORD_SCHEMA
from kcl_pipeline.spark.executors import joined
from kcl_pipeline.spark.job_errors import classified
from kcl_pipeline.spark.writer import SparkBatchWriter

NOW = dt.datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=dt.UTC)


def records(*payloads: bytes) -> pa.Table:
    rows = [
        {
            "stream": "orders",
            "shard_id": "shardId-000000000001",
            "sequence_number": str(
                49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898 + number
            ),
            "sub_sequence_number": 0,
            "partition_key": f"key-{number}",
            "explicit_hash_key": None,
            "data": payload,
            "approximate_arrival_timestamp": NOW,
            "encryption_type": None,
        }
        for number, payload in enumerate(payloads)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


def batch(*payloads: bytes) -> Batch:
    return Batch("orders/1", (), records(*payloads))


@pytest.fixture(params=["spark", "spark without its own writer", "arrow"])
def plain_writer(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., BatchWriter]:
    """A writer of the records as they are, by each of the three ways."""

    def build(partition_by: tuple[str, ...] = ()) -> BatchWriter:
        if request.param == "arrow":
            return ArrowBatchWriter(None, str(tmp_path / "t"), partition_by)
        writer = SparkBatchWriter(
            request.getfixturevalue("spark"), None, str(tmp_path / "t"), partition_by
        )
        if request.param != "spark":
            writer._write_local = writer._write_remote  # type: ignore[method-assign]
        return writer

    return build


def commit(
    tmp_path: Path, writer: BatchWriter, data: Batch, partition_by: tuple[str, ...] = ()
) -> pa.Table:
    written = writer.write(data)
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "t"), partition_by), "app")
    sink.ensure_table(written.schema)
    number = sink.numbers(["a"])["a"]
    assert (
        sink.commit(written, [CommitEntry("a", (number.data or 0) + 1, number)]).version is not None
    )
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


def test_a_transform_is_not_called_for_an_empty_batch(
    tmp_path: Path, plain_writer: Callable[..., BatchWriter]
) -> None:
    written = plain_writer().write(batch())
    assert (written.files, written.rows) == ((), 0)
    assert written.schema is None or [(field.name, field.type) for field in written.schema] == [
        (field.name, field.type) for field in RECORD_SCHEMA
    ]
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


def spark_writer(spark, tmp_path: Path, transform) -> BatchWriter:
    return SparkBatchWriter(spark, transform, str(tmp_path / "t"))


def test_an_aggregation_is_what_the_function_says(spark, tmp_path: Path) -> None:
    def totals(frame):
        return frame.groupBy("stream").agg(
            functions.count("*").alias("n"), functions.sum(functions.length("data")).alias("bytes")
        )

    written = spark_writer(spark, tmp_path, totals).write(batch(b"1", b"22", b"333"))
    assert written.rows == 1
    assert len(written.files) == 1
    assert pq.read_table(tmp_path / "t" / written.files[0].path).to_pylist() == [
        {"stream": "orders", "n": 3, "bytes": 6}
    ]


def test_a_function_that_drops_all_rows_gives_no_file(spark, tmp_path: Path) -> None:
    written = spark_writer(
        spark, tmp_path, lambda frame: frame.where("false").select("stream")
    ).write(batch(b"1"))
    assert (written.files, written.rows, written.schema.names) == ((), 0, ["stream"])


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


def _python_error(frame):
    def refuse(data):
        if data == b"bad":
            raise ValueError("cannot take this\nsecond line")
        return 1

    return frame.select(udf(refuse, "int")("data").alias("x"))


def _arrow_error(frame):
    def refuse(batches):
        for _ in batches:
            raise OSError("the function's own")
        yield from ()

    return frame.mapInArrow(refuse, frame.schema)


def _crash(frame):
    return frame.select(udf(lambda _: os._exit(3), "int")("data").alias("x"))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (_python_error, "1 records: ValueError: cannot take this"),
        (_arrow_error, "OSError: the function's own"),
        (_crash, "a Python worker of Spark crashed in it"),
        (
            lambda frame: frame.selectExpr("cast(cast(data as string) as int) x"),
            "CAST_INVALID_INPUT",
        ),
        (lambda frame: frame.selectExpr("cast(raise_error('no good') as int) x"), "no good"),
        (lambda frame: frame.select("nope"), "nope"),
        (lambda frame: {}["k"], "KeyError: 'k'"),
        (lambda frame: None, "returned NoneType"),
    ],
)
def test_what_the_function_raises_is_its_own_fault_and_told_in_a_line(
    spark, tmp_path: Path, transform, message: str
) -> None:
    with pytest.raises(TransformFailedError) as caught:
        spark_writer(spark, tmp_path, transform).write(batch(b"bad"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "returned" in message or caught.value.__cause__ is not None
    assert spark.range(3).count() == 3, "the session goes on"


def test_what_cannot_be_written_is_the_sinks_fault(spark, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for transform, where, by, message in [
        (None, "file/table", (), "not a directory"),
        (None, "t", ("day",), "partition_by names day"),
        (lambda frame: frame.selectExpr("interval 1 day gap"), "t", (), "gap"),
        (lambda frame: frame.select(), "t", (), "no columns"),
    ]:
        with pytest.raises(SinkError, match=message) as caught:
            SparkBatchWriter(spark, transform, str(tmp_path / where), by).write(batch(b"1"))
        assert "\n" not in str(caught.value)
    remote = SparkBatchWriter(spark, None, str(tmp_path / "file" / "table"))
    remote._write_local = remote._write_remote  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="could not write"):
        remote.write(batch(b"1"))


class JavaError(Exception):
    """As pyspark gives it: an exception with its Java one, which has a class, a message and a
    cause.
    """

    def __init__(self, *chain: tuple[str, str]) -> None:
        super().__init__(chain[0][1])
        self.java_exception = _throwable(chain)


def _throwable(chain):
    (name, text), *causes = chain
    getters = {
        "getClass": lambda: SimpleNamespace(getName=lambda: name),
        "getMessage": lambda: text,
        "getCause": lambda: _throwable(causes) if causes else None,
    }
    return SimpleNamespace(**getters)


ABORTED = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent "
    "failure: Lost task 0.3 in stage 3.0 (TID 8) (10.0.0.7 executor 1): "
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            ABORTED + "ExecutorLostFailure (executor 1 exited unrelated to the running tasks) "
            "Reason: Command exited with code 137",
            SinkError,
        ),
        (
            ABORTED
            + "ExecutorLostFailure (executor 1 exited) Reason: Executor heartbeat timed out "
            "after 143023 ms",
            SinkError,
        ),
        (
            (
                "Job aborted due to stage failure: ResultStage 4 has failed the maximum "
                "allowable number of times: 4. Most recent failure reason: FetchFailed"
            ),
            SinkError,
        ),
        ("Job 7 cancelled because SparkContext was shut down", SinkError),
        ("Job aborted due to stage failure: Master removed our application: KILLED", SinkError),
        (
            ABORTED + "org.apache.spark.SparkException: Python worker failed to connect back.",
            SinkError,
        ),
        (
            ABORTED + "org.apache.spark.api.python.PythonException: Traceback (most recent call "
            "last):\nValueError: ExecutorLostFailure",
            TransformFailedError,
        ),
        (ABORTED + "java.lang.ArithmeticException: divide by zero", TransformFailedError),
    ],
)
def test_good_records_are_not_blamed_for_machines_that_are_lost(
    text: str, kind: type[Exception]
) -> None:
    assert type(classified(JavaError(("org.apache.spark.SparkException", text)), 3)) is kind


def test_arrow_functions_fail_in_the_same_words(tmp_path: Path) -> None:
    def failing(_table: pa.Table) -> pa.Table:
        raise ValueError("cannot take this\nsecond line")

    for transform, message in [
        (failing, "1 records: ValueError: cannot take this"),
        (lambda table: 3, "returned int"),
    ]:
        with pytest.raises(TransformFailedError, match=message) as caught:
            ArrowBatchWriter(transform, str(tmp_path)).write(batch(b"1"))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SinkError, match="could not write"):
        ArrowBatchWriter(None, str(tmp_path / "file")).write(batch(b"1"))


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
    with pytest.raises(SinkError, match=r"gap: duration"):
        ArrowBatchWriter(
            lambda _: pa.table({"gap": pa.array([1], pa.duration("us"))}), str(tmp_path)
        ).write(batch(b"1"))
    with pytest.raises(SinkError, match="column big"):
        ArrowBatchWriter(
            lambda _: pa.table({"big": pa.array([2**64 - 1], pa.uint64())}), str(tmp_path)
        ).write(batch(b"1"))
    with pytest.raises(SinkError, match="names a column twice"):
        ArrowBatchWriter(lambda _: pa.table({"a": [1], "A": [2]}), str(tmp_path)).write(batch(b"1"))


def test_the_commit_protocol_over_spark_files(spark, tmp_path: Path) -> None:
    writer = spark_writer(spark, tmp_path, lambda frame: frame.select("partition_key"))
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "t")), "app")
    written = writer.write(batch(b"1", b"2"))
    sink.ensure_table(written.schema)
    assert sink.commit(written, [CommitEntry("a", 1, TxnVersions())]).version == 1
    late = writer.write(batch(b"3"))
    assert sink.fence("a", TxnVersions(1)) == TxnVersions(1, 1)
    assert sink.commit(late, [CommitEntry("a", 2, TxnVersions(1))]).refused == ("a",)
    assert DeltaTable(str(tmp_path / "t")).to_pyarrow_table().num_rows == 2


def test_a_column_of_nulls_without_a_type_is_reported(spark, tmp_path: Path) -> None:
    """It cannot be in a file; the table's check refuses it or knows its type."""

    def void(frame):
        return frame.selectExpr("shard_id", "null nothing")

    written = spark_writer(spark, tmp_path, void).write(batch(b"1"))
    assert written.schema is not None
    assert dict(zip(written.schema.names, written.schema.types, strict=True)) == {
        "shard_id": pa.string(),
        "nothing": pa.null(),
    }
    with pytest.raises(SinkError, match="every value of nothing is null and without a type"):
        commit(tmp_path, spark_writer(spark, tmp_path, void), batch(b"1"))


def test_the_parts_of_tasks_are_joined_where_one_has_only_nulls() -> None:
    typed = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("n", pa.string())])
    nulls = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("n", pa.null())])
    for parts in ([typed, nulls], [nulls, typed]):
        found = joined((), [Written((), schema, 1) for schema in parts])
        assert found.written is not None
        assert found.written.schema == typed
    other = pa.schema([pa.field("a", pa.string()), pa.field("n", pa.null())])
    assert joined((), [Written((), schema, 1) for schema in (typed, other)]).written is None

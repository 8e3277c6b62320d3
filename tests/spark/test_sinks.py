"""Maintenance while batches wait, the user's own sink, and the same table in an object
store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from moto.server import ThreadedMotoServer

from kcl_pipeline.batch import Batch, Chunk, DataFile
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.maintenance import Compacted, compact, vacuum
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.errors import SettingsError, SinkError, TransformFailedError
from kcl_pipeline.foreach import BatchIdentity, ForeachBatchSink, ShardRange
from kcl_pipeline.position import NOTHING_STORED, TRIM_HORIZON, Position
from kcl_pipeline.sinks.announcements import FOLDER
from kcl_pipeline.sinks.sink import CommitOutcome
from kcl_pipeline.spark.foreach import ForeachBatch
from kcl_pipeline.spark.writer import SparkBatchWriter
from kcl_pipeline.testing.conformance import FunctionUnderTest, SinkCase, at_least_once_cases
from tests.support.announcing import announce
from tests.support.delta_tables import NONE, at, commit_entries, committer, entry, ids, seq, written

SCHEMA = pa.schema([("id", pa.int64())])


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


def test_compaction_keeps_rows_and_numbers_and_stops_nobody(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    sink = committer(uri)
    sink.ensure(SCHEMA)
    for turn in range(1, 6):
        sink.land(written(uri, turn), [entry("a", turn, seq(turn - 1))])
    prepared = written(uri, 6)
    assert compact(uri) == Compacted(5, 1)
    assert compact(uri) == Compacted(0, 0)
    assert sink.land(prepared, [entry("a", 6, seq(5))]).version is not None
    assert ids(uri) == [1, 2, 3, 4, 5, 6]


def test_vacuum_takes_old_rubbish_and_leaves_what_may_still_land(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    sink = committer(uri)
    sink.ensure(SCHEMA)
    sink.land(written(uri, 1), [entry("a", 1)])
    waiting, given_up, forgotten = written(uri, 2), written(uri, 3), written(uri, 4)
    young = announce(sink, written(uri, 5).files, entry("y", 1))
    old = announce(sink, forgotten.files, entry("o", 1))
    for batch in (given_up, forgotten):
        age(Path(uri) / batch.files[0].path, 50)
    age(Path(uri) / old.name, 50)
    doomed = sorted(batch.files[0].path for batch in (given_up, forgotten))
    assert sorted(vacuum(uri, 49, dry_run=True)) == doomed
    assert (Path(uri) / old.name).exists()
    assert sorted(vacuum(uri, 49)) == doomed
    assert [file.name for file in (Path(uri) / FOLDER).iterdir()] == [Path(young.name).name]
    sink._pace.lost(2)
    assert sink.land(waiting, [entry("a", 2, seq(1))]).version is not None
    assert ids(uri) == [1, 2, 5]
    with pytest.raises(SettingsError, match="retention_hours=0"):
        vacuum(uri, 0)
    with pytest.raises(SinkError, match="could not open"):
        compact(str(tmp_path / "none"))


def orders(*payloads: bytes) -> Batch:
    records = pa.table(
        {
            "id": pa.array(range(len(payloads)), pa.int64()),
            "data": pa.array(payloads, pa.binary()),
        }
    )
    return Batch("b1", (Chunk("shard-1", records, TRIM_HORIZON, Position("7"), 0),), records)


def test_the_users_function_gets_the_frame_and_the_identity(spark, tmp_path: Path) -> None:
    seen: list[tuple[list[int], BatchIdentity]] = []
    each = ForeachBatch(
        spark,
        ForeachBatchSink(
            lambda frame, identity: seen.append(([row.n for row in frame.collect()], identity))
        ),
        lambda f: f.selectExpr("count(*) n"),
    )
    batch = orders(b"x", b"y")
    written_ = each.write(batch)
    assert (written_.output_rows, written_.output_schema.names, seen) == (1, ["n"], [])
    each.ensure(written_.output_schema)
    found = each.positions(["shard-1"])
    assert found.shards == {"shard-1": NOTHING_STORED}
    assert not each.stores_positions
    entries = [entry("shard-1", 7)]
    assert commit_entries(each, found.table_id, written_, entries) == CommitOutcome(1)
    assert seen == [([2], BatchIdentity((ShardRange("shard-1", TRIM_HORIZON, Position("7")),)))]
    assert commit_entries(each, found.table_id, each.write(batch), entries) == CommitOutcome(2)
    assert len(seen) == 2, "at least once: a batch that is processed again is passed again"
    assert each.positions(["shard-1"]) == found


def test_failures_of_the_transform_and_of_the_function_are_told_apart(
    spark, tmp_path: Path
) -> None:
    calls = []

    def fails_once(frame, _identity) -> None:
        calls.append(frame.count())
        if len(calls) == 1:
            raise ConnectionError("store is down\nsecond line")

    each = ForeachBatch(
        spark,
        ForeachBatchSink(fails_once, str(tmp_path / "dead")),
        lambda f: f.selectExpr("cast(cast(data as string) as int) n"),
    )
    with pytest.raises(TransformFailedError, match="CAST_INVALID_INPUT"):
        each.write(orders(b"x"))
    batch = each.write(orders(b"5"))
    with pytest.raises(TransformFailedError, match=r"ConnectionError: store is down$"):
        commit_entries(each, "function", batch, [entry("shard-1", 4)])
    assert commit_entries(each, "function", batch, [entry("shard-1", 4)]) == CommitOutcome(1)
    assert calls == [1, 1]
    each.write_dead_letters(pa.table({"data": [b"x"], "error": ["no"]}))
    assert DeltaTable(str(tmp_path / "dead")).to_pyarrow_table().num_rows == 1
    with pytest.raises(SinkError, match="dead_letter_uri"):
        ForeachBatch(spark, ForeachBatchSink(lambda *_: None)).write_dead_letters(
            pa.table({"data": [b"x"]})
        )
    with pytest.raises(SettingsError, match="is not a function"):
        ForeachBatchSink("print")  # type: ignore[arg-type]


class FunctionInSpark:
    """`ForeachBatch` under test: the function collects the ids."""

    def __init__(self, spark) -> None:
        self._got: list[int] = []
        self._fails = False
        self._spark = spark

    def _function(self, frame, _identity: BatchIdentity) -> None:
        if self._fails:
            self._fails = False
            raise ConnectionError("the store is down on demand")
        self._got.extend(row.id for row in frame.collect())

    def open(self) -> ForeachBatch:
        self._sink = ForeachBatch(self._spark, ForeachBatchSink(self._function))
        return self._sink

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        return self._sink.write(Batch("b", (), rows)).written_files

    def ids(self) -> list[int]:
        return self._got

    def fail(self) -> None:
        self._fails = True


@pytest.mark.parametrize("case", at_least_once_cases(), ids=str)
def test_a_function_gets_every_batch_at_least_once(
    spark, case: SinkCase[FunctionUnderTest]
) -> None:
    case.run(lambda: FunctionInSpark(spark))


def test_plain_parquet_appends(spark, tmp_path: Path) -> None:
    def append(frame, _identity):
        frame.write.mode("append").partitionBy("id").parquet(str(tmp_path / "plain"))

    each = ForeachBatch(spark, ForeachBatchSink(append))
    for number in (1, 2):
        commit_entries(each, "function", each.write(orders(b"x", b"y")), [entry("shard-1", number)])
    assert spark.read.parquet(str(tmp_path / "plain")).count() == 4


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket of an S3 server on this machine, and the options to reach it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "region_name": "us-east-1",
    }
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="sinks")
    options = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    yield (
        "s3://sinks",
        options | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
    )
    server.stop()


def test_the_protocol_holds_in_an_object_store(bucket: tuple[str, dict[str, str]]) -> None:
    root, options = bucket
    uri = f"{root}/orders"
    writer = ArrowBatchWriter(None, uri, storage_options=options)

    def file(ident: int):
        return writer.write(Batch("b", (), pa.table({"id": pa.array([ident], pa.int64())})))

    sink, rival = (committer(uri, storage_options=options) for _ in range(2))
    assert sink.stored("a") == NONE
    sink.ensure(SCHEMA)
    rival.ensure(SCHEMA)
    assert sink.land(file(1), [entry("a", 1)]).version == 1
    assert rival.land(file(2), [entry("b", 1)]).version == 2
    assert rival.move("a", 1, seq(1))
    assert sink.land(file(3), [entry("a", 2, seq(1))]) == CommitOutcome(None, ("a",))
    announce(rival, file(4).files, entry("c", 9))
    sink._pace.lost(2)
    assert sink.land(file(5), [entry("a", 2, at(1, 2))]).version == 4
    assert rival.stored("c") == at(9)
    assert sorted(
        DeltaTable(uri, storage_options=options).to_pyarrow_table()["id"].to_pylist()
    ) == [1, 2, 4, 5]
    storage = open_storage(uri, options)
    assert storage.list(FOLDER) == []
    assert storage.size("nothing") is None
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    storage.delete("nothing")
    sink.write_dead_letters(pa.table({"error": ["no"]}))
    assert (
        DeltaTable(f"{uri}_dead_letters", storage_options=options).to_pyarrow_table().num_rows == 1
    )


def test_spark_writes_into_an_object_store_without_jars(
    spark, bucket: tuple[str, dict[str, str]]
) -> None:
    root, options = bucket
    uri = f"{root}/parted"
    batch = SparkBatchWriter(
        spark,
        lambda frame: frame.selectExpr("id", "cast(data as string) kind"),
        uri,
        ("kind",),
        options,
    ).write(orders(b"x", b"y", b"x"))
    assert sorted((file.rows, file.partition_values["kind"]) for file in batch.files) == [
        (1, "y"),
        (2, "x"),
    ]
    sink = committer(uri, partition_by=("kind",), storage_options=options)
    sink.ensure(batch.output_schema)
    assert sink.land(batch, [entry("a", 1)]).version == 1
    rows = DeltaTable(uri, storage_options=options).to_pyarrow_table().sort_by("id").to_pylist()
    assert rows == [{"id": 0, "kind": "x"}, {"id": 1, "kind": "y"}, {"id": 2, "kind": "x"}]

"""`format("kinesis")` in Spark, on the embedded AWS: batch reads, streams, triggers, stateful
operators, restarts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.spark.data_source.source import KinesisDataSource
from tests.support.kpl_encoder import aggregate_of
from tests.support.local_aws import ZERO, client, new_stream

pytestmark = pytest.mark.spark
streams = pytest.mark.skipif(
    find_spec("pyspark.sql.streaming.datasource") is None, reason="readStream needs PySpark 4.2"
)
MIDDLE = str(2**127)


class Kinesis:
    """One stream of the embedded AWS, and how to read it by Spark."""

    def __init__(self, aws: EmbeddedAws, spark: SparkSession, shards: int) -> None:
        self.aws = aws
        self.spark = spark
        self.boto = client(aws)
        self.name = new_stream(self.boto, shards)
        self.options = {
            "streamName": self.name,
            "region": aws.region,
            "endpointUrl": aws.endpoint_url,
            "accessKeyId": "local",
            "secretAccessKey": "local",
            "idleTimeBetweenReadsInMillis": "200",
        }

    def put(self, *values: bytes, key: str | None = None) -> None:
        records = [{"Data": v, "PartitionKey": key or f"key-{v[:8]!r}"} for v in values]
        assert (
            self.boto.put_records(StreamName=self.name, Records=records)["FailedRecordCount"] == 0
        )

    def batch(self, **options: str) -> DataFrame:
        return self.spark.read.format("kinesis").options(**(self.options | options)).load()

    def stream(self, **options: str) -> DataFrame:
        return self.spark.readStream.format("kinesis").options(**(self.options | options)).load()


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


@pytest.fixture(scope="module")
def registered(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(KinesisDataSource)
    return spark


@pytest.fixture
def make(aws: EmbeddedAws, registered: SparkSession) -> Iterator[Callable[[int], Kinesis]]:
    yield lambda shards: Kinesis(aws, registered, shards)
    for query in registered.streams.active:
        query.stop()


@pytest.fixture
def make_apart(registered: SparkSession) -> Iterator[Callable[[int], Kinesis]]:
    """Like `make`, on an embedded AWS of its own, whose clock the test moves."""
    with EmbeddedAws() as aws:
        yield lambda shards: Kinesis(aws, registered, shards)
        for query in registered.streams.active:
            query.stop()


class Batches:
    """A `foreachBatch` sink that keeps what it is given, by batch id; `hold` makes a batch wait in
    the middle.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[str, str, int, bytes]]] = {}
        self.hold: threading.Event | None = None
        self.holding = threading.Event()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        rows = frame.select("shard_id", "sequence_number", "sub_sequence_number", "data").collect()
        self.rows[batch_id] = sorted((r[0], r[1], r[2], bytes(r[3])) for r in rows)
        if self.hold is not None:
            self.holding.set()
            self.hold.wait(60)
            raise RuntimeError("stopped in the middle of a batch")

    def data(self) -> list[bytes]:
        return [row[3] for batch_id in sorted(self.rows) for row in self.rows[batch_id]]


def start(frame: DataFrame, sink: Batches, checkpoint: Path, **trigger: Any) -> Any:
    return (
        frame.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(**(trigger or {"processingTime": "100 milliseconds"}))
        .start()
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def offsets(checkpoint: Path, batch_id: int) -> dict[str, Any]:
    return json.loads((checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[2])


def numbered(count: int, begin: int = 0) -> list[bytes]:
    return [f"{i}".encode() for i in range(begin, begin + count)]


# -- spark.read
# ----------------------------------------------------------------------------


def test_batch_read(make: Callable[[int], Kinesis]) -> None:
    kinesis = make(2)
    kinesis.put(*numbered(20), aggregate_of([("a", None, b"x"), ("a", None, b"y")]))
    frame = kinesis.batch()
    assert frame.schema == from_arrow_schema(RECORD_SCHEMA)
    rows = frame.withColumn("task", f.spark_partition_id()).collect()
    assert sorted(bytes(r.data) for r in rows) == sorted([*numbered(20), b"x", b"y"])
    assert {(r.stream, r.encryption_type) for r in rows} == {
        (kinesis.name, rows[0].encryption_type)
    }
    assert [r.sub_sequence_number for r in rows if bytes(r.data) in (b"x", b"y")] == [0, 1]
    assert {r.partition_key for r in rows if bytes(r.data) == b"y"} == {"a"}
    by_shard = {(r.shard_id, r.task) for r in rows}
    assert len({task for _, task in by_shard}) == len(by_shard) == 2


@streams
def test_a_wrong_option_is_one_sentence(make: Callable[[int], Kinesis], tmp_path: Path) -> None:
    kinesis = make(1)
    with pytest.raises(
        AnalysisException,
        match=r"SettingsError: option maxrecordpertrigger='5' is not known. Did "
        r"you mean maxRecordsPerTrigger",
    ):
        kinesis.stream(maxRecordPerTrigger="5")
    stream = (
        kinesis.stream(endingPosition="LATEST")
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    with pytest.raises(
        StreamingQueryException,
        match=r"SettingsError: option endingPosition is for spark.read; remove it, or write",
    ):
        stream.awaitTermination(60)


# -- spark.readStream
# ----------------------------------------------------------------------------


@streams
def test_a_live_query_waits_for_records_follows_a_reshard_and_stops_at_once(
    make: Callable[[int], Kinesis], tmp_path: Path
) -> None:
    kinesis, sink = make(1), Batches()
    query = start(kinesis.stream(startingPosition="LATEST"), sink, tmp_path)
    query.processAllAvailable()
    kinesis.put(*numbered(10))
    wait_for(lambda: len(sink.data()) >= 10)
    assert sorted(sink.data(), key=int) == numbered(10)
    kinesis.boto.split_shard(StreamName=kinesis.name, ShardToSplit=ZERO, NewStartingHashKey=MIDDLE)
    kinesis.put(*numbered(20, 10))
    wait_for(lambda: len(sink.data()) >= 30)
    query.processAllAvailable()
    assert sorted(sink.data(), key=int) == numbered(30)
    last = max(sink.rows)
    logged = offsets(tmp_path, last)[kinesis.name]
    assert set(logged) == {"shardId-000000000001", "shardId-000000000002"}
    given = [row for rows in sink.rows.values() for row in rows]
    assert {entry["sequenceNumber"] for entry in logged.values()} == {
        max(row[1] for row in given if row[0] == shard) for shard in logged
    }
    began = time.monotonic()
    query.stop()
    assert time.monotonic() - began < 10
    assert query.exception() is None
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {
        "offsets",
        "commits",
        "metadata",
    }


@streams
def test_a_batch_that_was_stopped_comes_again_with_the_same_rows(
    make: Callable[[int], Kinesis], tmp_path: Path
) -> None:
    kinesis, sink = make(2), Batches()
    sink.hold = threading.Event()
    kinesis.put(*numbered(30))
    query = start(kinesis.stream(startingPosition="TRIM_HORIZON"), sink, tmp_path)
    assert sink.holding.wait(60)
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(2)
    sink.hold.set()
    stopping.join(60)
    assert not query.isActive
    assert not (tmp_path / "commits" / "0").exists()
    kinesis.put(*numbered(10, 30))
    again = Batches()
    query = start(kinesis.stream(), again, tmp_path)
    query.processAllAvailable()
    query.stop()
    assert again.rows[0] == sink.rows[0]
    assert sorted(again.data(), key=int) == numbered(40)


KILLED = """
import os, signal, sys, json
from kcl_pipeline.spark.session import build_session
from kcl_pipeline.spark.data_source.source import KinesisDataSource
options, checkpoint, seen = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
spark = build_session("killed", {"spark.master": "local[2]"})
spark.dataSource.register(KinesisDataSource)
def sink(frame, batch_id):
    data = frame.data.cast("string")
    rows = frame.select("shard_id", "sequence_number", "sub_sequence_number", data).collect()
    with open(f"{seen}/{batch_id}", "w") as out:
        json.dump(sorted(map(list, rows)), out)
    if batch_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
stream = spark.readStream.format("kinesis").options(**options).load()
query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
query.start().awaitTermination(200)
"""


@streams
@pytest.mark.long
def test_a_batch_that_was_killed_comes_again_with_the_same_rows(
    make: Callable[[int], Kinesis], tmp_path: Path
) -> None:
    """kill -9 of a driver in its second batch; another process, which holds nothing, reads the
    batch from Kinesis.
    """
    kinesis = make(2)
    kinesis.put(*numbered(30))
    seen, checkpoint = tmp_path / "seen", tmp_path / "checkpoint"
    seen.mkdir()
    options = kinesis.options | {"maxRecordsPerTrigger": "12", "startingPosition": "TRIM_HORIZON"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(options), str(checkpoint), str(seen)],
        check=False,
        timeout=240,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    first, second = (json.loads((seen / name).read_text()) for name in ("0", "1"))
    kinesis.put(*numbered(10, 30))
    again = Batches()
    query = start(kinesis.stream(maxRecordsPerTrigger="12"), again, checkpoint)
    query.processAllAvailable()
    query.stop()
    assert min(again.rows) == 1
    assert [[*row[:3], row[3].decode()] for row in again.rows[1]] == second
    assert sorted([row[3].encode() for row in first] + again.data(), key=int) == numbered(40)


@streams
@pytest.mark.parametrize("queries", [3, pytest.param(4, marks=pytest.mark.long)])
def test_available_now_reads_limited_batches_and_lost_records_end_the_query_with_one_sentence(
    make_apart: Callable[[int], Kinesis], tmp_path: Path, queries: int
) -> None:
    """Several queries with one checkpoint; each starts processes of Python."""
    kinesis, sink = make_apart(2), Batches()

    def read(given: Batches, **options: str) -> None:
        query = start(kinesis.stream(**options), given, tmp_path, availableNow=True)
        assert query.awaitTermination(60)

    kinesis.put(*numbered(50))
    read(sink, maxRecordsPerTrigger="20")
    assert sorted(sink.data(), key=int) == numbered(50)
    assert max(map(len, sink.rows.values())) <= 20
    assert len(sink.rows) >= 3
    if queries == 4:
        kinesis.put(*numbered(5, 50))
        again = Batches()
        read(again)
        assert sorted(again.data(), key=int) == numbered(5, 50)
        assert min(again.rows) == max(sink.rows) + 1
    kinesis.put(b"lost", key="a")  # its hash is in the first shard
    kinesis.aws.clock.advance(3 * 24 * 3600)  # type: ignore[attr-defined]
    kinesis.put(b"3")
    with pytest.raises(
        StreamingQueryException,
        match=rf"RecordsLostError: records of {ZERO} of {kinesis.name} after \d+ .* have left "
        r"retention.*failOnDataLoss=false",
    ):
        read(Batches())
    rest = Batches()
    read(rest, failOnDataLoss="false")
    assert rest.data() == [b"3"]


# -- stateful operators
# ----------------------------------------------------------------------------


def events(kinesis: Kinesis) -> DataFrame:
    """Records such as `7,a`: event time in seconds and a word."""
    parts = f.split(f.col("data").cast("string"), ",")
    return kinesis.stream().select(
        parts[0].cast("long").cast("timestamp").alias("at"), parts[1].alias("word")
    )


def run(frame: DataFrame, checkpoint: Path, name: str, mode: str) -> list[Any]:
    query = (
        frame.writeStream.format("memory")
        .queryName(name)
        .outputMode(mode)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    query.processAllAvailable()
    query.stop()
    return sorted(tuple(row) for row in frame.sparkSession.table(name).collect())


WORDS = (b"1,a", b"2,b", b"3,a", b"12,a", b"13,a", b"13,c")


@streams
@pytest.mark.long
def test_distinct_and_counted_words(make: Callable[[int], Kinesis], tmp_path: Path) -> None:
    kinesis = make(2)
    kinesis.put(*WORDS)
    at = events(kinesis)
    both = at.withWatermark("at", "1 hour").dropDuplicatesWithinWatermark(["word"]).select("word")
    assert run(both, tmp_path / "distinct", "distinct", "append") == [("a",), ("b",), ("c",)]
    assert run(at.groupBy("word").count(), tmp_path / "words", "words", "complete") == [
        ("a", 4),
        ("b", 1),
        ("c", 1),
    ]


@streams
@pytest.mark.long
def test_windows_with_a_watermark(make: Callable[[int], Kinesis], tmp_path: Path) -> None:
    kinesis = make(2)
    kinesis.put(*WORDS)
    at = events(kinesis)
    windows = (
        at.withWatermark("at", "5 seconds").groupBy(f.window("at", "10 seconds"), "word").count()
    )
    counted = windows.select(f.col("window.start").cast("long"), "word", "count")
    query = (
        counted.writeStream.format("memory")
        .queryName("windows")
        .outputMode("append")
        .option("checkpointLocation", str(tmp_path / "w"))
        .start()
    )
    query.processAllAvailable()
    kinesis.put(b"30,z")

    def are_written() -> bool:
        query.processAllAvailable()
        return kinesis.spark.table("windows").count() >= 4

    wait_for(are_written)
    query.stop()
    assert sorted(tuple(row) for row in kinesis.spark.table("windows").collect()) == [
        (0, "a", 2),
        (0, "b", 1),
        (10, "a", 2),
        (10, "c", 1),
    ]

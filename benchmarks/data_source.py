"""Cost of `format("kinesis")` in Spark: micro-batch times and records per second.

Small batches: a stream of 10 records per batch alternates with Spark's `rate-micro-batch` source of
as many rows. The result is the median of the times that Spark reports.

Throughput uses a replay server and a sink that discards its rows. In `stream`, the planner
prefetches records and passes them to the tasks. In `batch`, tasks read their ranges. In `driver`,
this process reads, and `createDataFrame` converts the Arrow table, as in a worker.

    python -m benchmarks.data_source [--json] [--seconds 15] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.replay_server import answer_records, replay_server, sequence_number
from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.spark.data_source.options import parse_options
from kcl_pipeline.spark.data_source.source import KinesisDataSource
from kcl_pipeline.spark.data_source.tasks import open_reading
from kcl_pipeline.spark.session import build_session

SHARDS = 16
SIZES = (1024, 100)
ANSWERS = 3


def options(url: str, size: int) -> dict[str, str]:
    return {
        "streamName": f"orders-{size}",
        "region": "us-east-1",
        "endpointUrl": url,
        "accessKeyId": "k",
        "secretAccessKey": "s",
    }


def run_stream(frame: DataFrame, seconds: float) -> list[Any]:
    """Return the progress reports of a streaming query, without the first quarter.

    The query runs for `seconds` after its first batch, and for at least three batches.
    """
    with tempfile.TemporaryDirectory() as folder:
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        progress: list[Any] = []
        began = time.monotonic()
        deadline = began + 120
        while (
            (len(progress) < 4 or time.monotonic() < began + seconds)
            and time.monotonic() < deadline
            and not query.awaitTermination(0.2)  # type: ignore[arg-type]  # the stub has int only
        ):
            progress = [p for p in query.recentProgress if p.numInputRows]
            began = time.monotonic() if len(progress) < 2 else began
        error = query.exception()
        query.stop()
    if error is not None:
        raise error
    return progress[len(progress) // 4 :]


def small_batches(spark: SparkSession, url: str, seconds: float) -> dict[str, dict[str, float]]:
    """Return median milliseconds of a batch of 10 rows: the total, and Spark's own phases."""
    kinesis = (
        spark.readStream.format("kinesis")
        .options(**options(url, 100), maxRecordsPerTrigger="10")
        .load()
    )
    rate = (
        spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch="10", numPartitions="1")
        .load()
    )
    reports: dict[str, list[Any]] = {"rate": [], "kinesis": []}
    for _ in range(2):
        for name, frame in (("rate", rate), ("kinesis", kinesis)):
            reports[name] += run_stream(frame, seconds)
    parts = (
        "triggerExecution",
        "latestOffset",
        "addBatch",
        "queryPlanning",
        "walCommit",
        "commitOffsets",
    )
    answer = {}
    for name, progress in reports.items():
        answer[name] = {
            part: statistics.median(p.durationMs.get(part, 0) for p in progress) for part in parts
        }
        answer[name] |= {
            "fastest": min(p.durationMs["triggerExecution"] for p in progress),
            "batches": len(progress),
        }
    return answer


def stream(spark: SparkSession, url: str, size: int, seconds: float) -> tuple[int, float]:
    progress = run_stream(
        spark.readStream.format("kinesis").options(**options(url, size)).load(), seconds
    )
    return sum(p.numInputRows for p in progress), sum(
        p.durationMs["triggerExecution"] for p in progress
    ) / 1000


def batch(spark: SparkSession, url: str, size: int, _seconds: float) -> tuple[int, float]:
    end = {
        f"shardId-{i:012d}": {"sequenceNumber": sequence_number(ANSWERS, 0)} for i in range(SHARDS)
    }
    frame = (
        spark.read.format("kinesis")
        .options(**options(url, size), endingPosition=json.dumps({f"orders-{size}": end}))
        .load()
    )
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    elapsed = time.perf_counter() - began
    return SHARDS * (ANSWERS * answer_records(size, 10_000) + 1), elapsed


def driver(spark: SparkSession, url: str, size: int, seconds: float) -> tuple[int, float]:
    """Read one shard after the other, with one DataFrame of about 40 MB at a time."""
    parsed = parse_options(options(url, size))
    opened, clock = ExitStack(), SystemClock()
    kinesis = opened.enter_context(open_reading(parsed, clock))
    name = kinesis.resolve_stream(f"orders-{size}", multi_stream=False)
    shards = kinesis.list_shards(name)
    readers = [
        ShardReader(
            kinesis,
            name,
            s.shard_id,
            s.shard_id,
            TRIM_HORIZON,
            s.hash_key_range,
            parsed.retrieval,
            clock,
        )
        for s in shards
    ]
    rows = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        chunks: list[Chunk] = [
            chunk
            for chunk in (reader.read() for reader in random.Random(rows).sample(readers, 4))
            if chunk is not None
        ]
        table = pa.concat_tables([chunk.records for chunk in chunks])
        spark.createDataFrame(table).write.format("noop").mode("overwrite").save()
        rows += table.num_rows
    elapsed = time.perf_counter() - began
    opened.close()
    return rows, elapsed


WAYS: dict[str, Callable[[SparkSession, str, int, float], tuple[int, float]]] = {
    "stream": stream,
    "batch": batch,
    "driver": driver,
}


def throughput(spark: SparkSession, url: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds; the modes alternate."""
    samples: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for size in SIZES:
            for name, way in WAYS.items():
                rows, elapsed = way(spark, url, size, seconds)
                samples.setdefault((size, name), []).append(rows / elapsed)
    return {
        f"{name}_{size}_records_per_s": round(statistics.median(taken))
        for (size, name), taken in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    spark = build_session(
        "data-source",
        {"spark.master": "local[2]", "spark.sql.streaming.numRecentProgressUpdates": "100000"},
    )
    spark.range(1).count()
    began = time.perf_counter()
    spark.dataSource.register(KinesisDataSource)
    answer: dict[str, Any] = {"register_ms": round((time.perf_counter() - began) * 1000)}
    with replay_server(10_000, SHARDS, SIZES) as url:
        spark.read.format("kinesis").options(
            **options(url, 100),
            endingPosition=json.dumps(
                {"orders-100": {"shardId-000000000000": sequence_number(0, 5)}}
            ),
        ).load().count()
        answer["small_batch_ms"] = small_batches(spark, url, chosen.seconds)
        answer |= throughput(spark, url, chosen.seconds, chosen.rounds)
    spark.stop()
    print(json.dumps(answer) if chosen.json else json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()

"""Cost of a micro-batch, and age of a record when its row is committed.

Batches of 1, 1,000 and 100,000 records use the Spark path (DataFrame function, Spark's Parquet
writer) and the Arrow path (Arrow function, pyarrow). Each batch ends with the exactly-once commit
into a local Delta table. The paths alternate with Spark's `range(n).write.parquet`.

Latency: records are put into the embedded AWS at a constant rate, and a worker with the Arrow path
commits them. The latency of a row is the time from before its PutRecords call to its commit. The
steps of the latency are the time until the read of the shard returned (polling only), until the
batch began, and the phases of the batch. The write includes the prepare that runs at the same time.

Results are medians in milliseconds. Ratios are medians of the ratios of each round, so that load in
one round has little effect.

    python -m benchmarks.microbatch [--json] [--rounds 15] [--seconds 10]

The benchmark takes two to three minutes on two idle cores. For a short run, use `--rounds 5
--seconds 3`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.batch import Batch, BatchWriter
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.events import BatchCommitted, Event, ReadFinished
from kcl_pipeline.kinesis.decode import records_table
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import NOTHING_STORED, Position
from kcl_pipeline.spark.session import build_session, warm_up
from kcl_pipeline.spark.writer import SparkBatchWriter

SIZES = (1, 1_000, 100_000)
RATES = (1, 100, 10_000)
RECORD_BYTES = 100
SETTLED_SECONDS = 120.0
WARM_UP_ROUNDS = 3


def records_of(count: int) -> pa.Table:
    data = np.random.default_rng(0).bytes(count * RECORD_BYTES)
    return records_table(
        "orders",
        "shardId-000000000000",
        sequence_numbers=[str(10**55 + i) for i in range(count)],
        partition_keys=[f"key-{i:08d}" for i in range(count)],
        data=[data[i * RECORD_BYTES : (i + 1) * RECORD_BYTES] for i in range(count)],
        arrival_micros=np.arange(count, dtype=np.int64) + 1_760_000_000_000_000,
        encryption_types=[None] * count,
    )


class Way:
    """Writer and sink that commit batches into a separate table.

    They do what a worker does.
    """

    def __init__(self, name: str, writer: BatchWriter, sink: DeltaCommitter) -> None:
        self._name, self._writer, self._sink = name, writer, sink
        self._stored = NOTHING_STORED
        self._turn = itertools.count(1)

    def __call__(self, records: pa.Table) -> None:
        """Write and commit one batch of Arrow records."""
        turn = next(self._turn)
        written = self._writer.write(Batch(f"{self._name}-{turn}", (), records))
        files, schema = written.written_files, written.output_schema
        if turn == 1:
            self._sink.ensure(schema)
            self._table_id = self._sink.positions([]).table_id
        key, becomes = "stream/0/shard", self._stored.moved(Position(str(turn)))
        expected = {key: self._stored}
        outcome = self._sink.commit(self._table_id, files, expected, {key: becomes}, schema)
        assert outcome.version is not None
        self._stored = becomes


def batches(folder: Path, rounds: int) -> dict[str, Any]:
    session = build_session("microbatch")
    warm_up(session)
    spark, arrow = f"{folder}/spark", f"{folder}/arrow"
    driver = Way(
        "driver",
        SparkBatchWriter(session, lambda frame: frame, spark),
        DeltaCommitter(DeltaSink(spark), "bench"),
    )
    arrow_path = Way(
        "arrow",
        ArrowBatchWriter(lambda table: table, arrow),
        DeltaCommitter(DeltaSink(arrow), "bench"),
    )
    numbers = itertools.count()
    tables = {size: records_of(size) for size in SIZES}

    def spark_write(size: int) -> None:
        session.range(size).write.parquet(f"{folder}/range-{next(numbers)}")

    def spark_empty_write(_size: int) -> None:
        session.range(0).write.parquet(f"{folder}/range-{next(numbers)}")

    ways: dict[str, Callable[[int], None]] = {
        "driver_ms": lambda size: driver(tables[size]),
        "arrow_ms": lambda size: arrow_path(tables[size]),
        "spark_write_ms": spark_write,
        "spark_empty_write_ms": spark_empty_write,
    }
    millis: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + WARM_UP_ROUNDS):
        for size, (name, way) in itertools.product(SIZES, ways.items()):
            began = time.perf_counter()
            way(size)
            if number >= WARM_UP_ROUNDS:  # the first rounds warm up
                millis.setdefault((name, size), []).append((time.perf_counter() - began) * 1000)
    session.stop()

    def ratio(name: str, of: str) -> float:
        """Median of the rounds' ratios: what slows a round slows both."""
        return round(
            statistics.median(
                a / b for a, b in zip(millis[name, 1_000], millis[of, 1_000], strict=True)
            ),
            2,
        )

    return {
        "batches": {
            str(size): {name: round(statistics.median(millis[name, size]), 1) for name in ways}
            for size in SIZES
        },
        "overhead_ratio_vs_spark_write": ratio("driver_ms", "spark_write_ms"),
        "overhead_ratio_vs_spark_empty_write": ratio("driver_ms", "spark_empty_write_ms"),
        "arrow_ratio_vs_spark_write": ratio("arrow_ms", "spark_write_ms"),
    }


@dataclass(frozen=True)
class Steps:
    """Times of one record, and durations of the steps of its batch in milliseconds."""

    read_at: float | None
    batch_at: float
    committed_at: float
    batch_millis: Mapping[str, float]

    def millis(self, put_at: float) -> dict[str, float]:
        """Return the milliseconds of each step. A read is known only with polling."""
        read_at = self.batch_at if self.read_at is None else self.read_at
        return {
            "until_read": (read_at - put_at) * 1000,
            "until_batch": (self.batch_at - read_at) * 1000,
            **self.batch_millis,
            "whole": (self.committed_at - put_at) * 1000,
        }


class Committed:
    """Steps of committed records, by the number that each record contains."""

    def __init__(self) -> None:
        self.at: dict[int, Steps] = {}
        self._waiting: dict[int, float | None] = {}
        self._read_at: dict[str, float] = {}
        self._batch_at = 0.0

    def transform(self, table: pa.Table) -> pa.Table:
        """Note the records of a batch."""
        self._batch_at = time.perf_counter()
        for shard, value in zip(
            table.column("shard_id").to_pylist(), table.column("data"), strict=True
        ):
            number = struct.unpack_from(">Q", value.as_buffer())[0]
            self._waiting[number] = self._read_at.get(shard)
        return table

    def __call__(self, event: Event) -> None:
        """Handle an event of the worker."""
        if isinstance(event, ReadFinished):
            self._read_at[event.lease_key] = time.perf_counter()
        if isinstance(event, BatchCommitted):
            now = time.perf_counter()
            for number, read_at in self._waiting.items():
                self.at[number] = Steps(read_at, self._batch_at, now, event.milliseconds)
            self._waiting.clear()


def put(aws: EmbeddedAws, rate: int, seconds: float, first: int) -> dict[int, float]:
    """Put records at a constant rate and return the start time of each record's put.

    The function makes at most ten boto3 calls per second.
    """
    client = boto3.client(
        "kinesis",
        endpoint_url=aws.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="k",
        aws_secret_access_key="s",
    )
    each, gap = max(rate // 20, 1), max(1 / rate, 0.05)
    put_at: dict[int, float] = {}
    began = time.perf_counter()
    for call in range(max(round(seconds / gap), 5)):
        time.sleep(max(began + call * gap - time.perf_counter(), 0))
        numbers = range(first + call * each, first + (call + 1) * each)
        now = time.perf_counter()
        for part in range(0, each, 500):
            entries: list[Any] = [
                {"Data": struct.pack(">Q", n) + bytes(RECORD_BYTES - 8), "PartitionKey": str(n)}
                for n in numbers[part : part + 500]
            ]
            assert (
                client.put_records(StreamName="orders", Records=entries)["FailedRecordCount"] == 0
            )
        put_at.update(dict.fromkeys(numbers, now))
    return put_at


def wait_for_rows(committed: Committed, wanted: dict[int, float]) -> None:
    deadline = time.monotonic() + SETTLED_SECONDS
    while not wanted.keys() <= committed.at.keys():
        assert time.monotonic() < deadline, (
            f"{len(wanted.keys() - committed.at.keys())} records are not in the table"
        )
        time.sleep(0.05)


def latency(folder: Path, rate: int, seconds: float, overrides: dict[str, Any]) -> dict[str, Any]:
    committed, stop = Committed(), threading.Event()
    with EmbeddedAws() as aws:
        aws.kinesis.call("CreateStream", StreamName="orders", ShardCount=4)
        sink = DeltaSink(f"{folder}/latency-{rate}-{len(list(folder.iterdir()))}")
        settings = {"assignment": {"lease_assignment_interval_millis": 1000}, **overrides}
        pipeline = KinesisPipeline(
            name="bench",
            streams=["orders"],
            sink=sink,
            transform_arrow=committed.transform,
            settings_overrides=settings,
        )
        options = SessionOptions(
            "us-east-1",
            endpoint_url=aws.endpoint_url,
            aws_access_key_id="k",
            aws_secret_access_key="s",
        )
        worker = pipeline.build_worker(
            "bench-1", clients=AwsClients(pipeline.settings, options), events=committed
        )
        thread = threading.Thread(target=worker.run, args=(stop,))
        thread.start()
        try:
            for first in range(0, 200, 20):  # every shard is read before the clock starts
                wait_for_rows(committed, put(aws, 200, 0.05, 10**9 + first * 1000))
            put_at = put(aws, rate, seconds, 0)
            wait_for_rows(committed, put_at)
        finally:
            stop.set()
            thread.join(60)
    steps = [committed.at[number].millis(at) for number, at in put_at.items()]
    return {
        "records": len(steps),
        **{f"put_to_commit_ms_{name}": of["whole"] for name, of in percentiles(steps).items()},
        "steps_ms": percentiles(steps),
        "commits_per_s": round(
            len({committed.at[number].committed_at for number in put_at})
            / (max(put_at.values()) - min(put_at.values()) + 1e-9),
            1,
        ),
    }


def percentiles(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median and the 99th percentile of each step."""

    def at(share: float, name: str) -> float:
        values = sorted(of.get(name, 0.0) for of in steps)
        return round(values[min(len(values) - 1, int(len(values) * share))], 1)

    return {
        label: {name: at(share, name) for name in sorted({*steps[0]})}
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def run(rounds: int, seconds: float) -> dict[str, Any]:
    pushed = {"retrieval": {"retrieval_mode": "fan_out"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        of = batches(folder, rounds)
        latencies = {str(rate): latency(folder, rate, seconds, {}) for rate in RATES}
        fan_out = {str(rate): latency(folder, rate, seconds, pushed) for rate in RATES}
    return {
        **of,
        "latency": latencies,
        "latency_fan_out": fan_out,
        "machine": {
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "load": round(os.getloadavg()[0], 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line instead of indented JSON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency run")
    options = parser.parse_args()
    print(json.dumps(run(options.rounds, options.seconds), indent=None if options.json else 2))


if __name__ == "__main__":
    main()

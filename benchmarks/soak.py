"""Memory, thread and file leaks of a worker over many batches.

The worker and the embedded AWS run in separate processes. Batches are small and are cut as soon as
data is available.

    python -m benchmarks.soak [--paths arrow spark] [--batches 2000] [--json]
    python -m benchmarks.soak --minutes 10 [--paths spark] [--json]

After every hundredth of the batches the benchmark samples resident memory of the driver, of the JVM
and of Spark's Python workers. It also samples the JVM heap after a collection, and threads and open
files of the driver and the JVM. The first quarter of the samples is warm-up.

A value is *flat* if the median of the last quarter exceeds that of the second quarter by at most
5 % or a fixed limit, whichever is greater. The limit is `--limit-mb` for memory and `LIMIT_COUNT`
for threads and files. delta-rs has a thread pool that grows to about 64 threads on demand, and the
connection pools of the AWS clients open a connection when more calls than before run at once: for
these the limit is the size of the pools. The JVM
heap is committed at the start, so growth of the JVM's resident memory is outside of the heap.

With `--minutes` all settings have their defaults, and the load is steady (`soak_minutes`). The
result then has the slope of each value in MB per minute.

The exit code is 1 when a value is not flat. `--leak-kb` leaks that much per batch, which tests the
detection.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import pyarrow as pa

from benchmarks.embedded import client, embedded_aws
from benchmarks.resources import look
from benchmarks.soak_minutes import soak_for_minutes
from benchmarks.trends import COUNT_LIMITS, trends
from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import BatchCommitted, Event
from kcl_pipeline.pipeline import KinesisPipeline

STREAM = "soak"
SHARDS = 8
RECORD_BYTES = 100
PUT_RECORDS = 10
PUT_SECONDS = 0.02
SAMPLES = 100
LIMIT_MB = 24.0
RETRY_LIMIT_SECONDS = 120.0
SPARK = {
    "spark.master": "local[2]",
    "spark.driver.memory": "640m",
    "spark.driver.extraJavaOptions": "-Xms640m -XX:+AlwaysPreTouch",
}


# -- the worker's process
# ----------------------------------------------------------------------------


def in_spark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches unchanged; this uses Spark's Python workers."""
    yield from batches


class Counter:
    """Event sink that reports every batch to the controller and stops the worker after the last."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stop = threading.Event()
        self.leaked: list[bytearray] = []
        self.done = 0
        self.every = max(options.batches // SAMPLES, 1)

    def __call__(self, event: Event) -> None:
        """Handle an event of the worker."""
        if not isinstance(event, BatchCommitted):
            return
        self.done += 1
        if self.options.leak_kb:
            self.leaked.append(bytearray(os.urandom(1024) * self.options.leak_kb))
        if self.done % self.every == 0:
            print(json.dumps({"batches": self.done, "heap_mb": self.heap_mb()}), flush=True)
            sys.stdin.readline()  # the controller looks at a process that stands still
        if self.done >= self.options.batches:
            self.stop.set()

    def heap_mb(self) -> float | None:
        """Return the JVM heap after a collection, or None without a JVM."""
        if self.options.worker != "spark":
            return None
        from pyspark.sql import SparkSession  # noqa: PLC0415 (the Arrow path has no Spark)

        session = SparkSession.builder.getOrCreate()  # an active one is known to its thread only
        jvm: Any = session.sparkContext._jvm  # noqa: SLF001 (the only way to the JVM's own figures)
        jvm.System.gc()
        runtime = jvm.Runtime.getRuntime()
        return float(round((runtime.totalMemory() - runtime.freeMemory()) / 1e6, 1))


def run_worker(options: argparse.Namespace) -> None:
    """Run one worker until the requested number of batches is committed."""
    counter = Counter(options)
    paths: dict[str, Any] = {
        "arrow": {"transform_arrow": lambda table: table},
        "spark": {
            "transform": lambda frame: frame.mapInArrow(in_spark, frame.schema),
            "spark_config": SPARK,
        },
    }
    overrides = {
        "batch": {"min_batch_interval_millis": 0},
        "retrieval": {"idle_time_between_reads_in_millis": 200},
        "assignment": {"lease_assignment_interval_millis": 1000},
    }
    pipeline = KinesisPipeline(
        name="soak-app",
        streams=[STREAM],
        sink=DeltaSink(options.table),
        settings_overrides=overrides,
        **paths[options.worker],
    )
    clients = AwsClients(
        pipeline.settings,
        SessionOptions(
            "us-east-1",
            endpoint_url=options.endpoint_url,
            aws_access_key_id="k",
            aws_secret_access_key="s",
        ),
    )
    pipeline.build_worker("soak-1", clients=clients, events=counter).run(counter.stop)


# -- the controller
# ----------------------------------------------------------------------------


def keep_putting(url: str, stop: threading.Event) -> None:
    """Put some records periodically, on all shards in turn."""
    kinesis = client(url)
    for number in itertools.count():
        entries = [
            {"Data": os.urandom(RECORD_BYTES), "PartitionKey": f"{number}-{i}"}
            for i in range(PUT_RECORDS)
        ]
        kinesis.put_records(StreamName=STREAM, Records=entries)
        if stop.wait(PUT_SECONDS):
            return


def samples_of(
    path: str, url: str, table: str, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Run a worker and return one sample per hundredth of its batches.

    Raises:
        RuntimeError: The worker ends early or prints nothing for two minutes.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--worker",
        path,
        "--endpoint-url",
        url,
        "--table",
        table,
    ]
    command += ["--batches", str(options.batches), "--leak-kb", str(options.leak_kb)]
    samples: list[dict[str, float]] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        driver = psutil.Process(process.pid)
        silence = Silence(process)
        for line in process.stdout:
            silence.broken()
            said = json.loads(line)
            samples.append(look(driver, said["heap_mb"]))
            process.stdin.write("\n")
            process.stdin.flush()
            if said["batches"] >= options.batches:
                break
        silence.broken()
        code = process.wait(RETRY_LIMIT_SECONDS)
        silence.end()
    if code != 0:
        raise RuntimeError(
            f"the worker of the {path} path ended with code {code} after {len(samples)} samples"
        )
    return samples


class Silence:
    """Watchdog that ends a process that prints nothing for two minutes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._timer = threading.Timer(RETRY_LIMIT_SECONDS, process.kill)
        self._timer.start()

    def broken(self) -> None:
        """Restart the time limit, because the process printed a line."""
        self.end()
        self._timer = threading.Timer(RETRY_LIMIT_SECONDS, self._process.kill)
        self._timer.start()

    def end(self) -> None:
        """Stop the watchdog."""
        self._timer.cancel()


def soak(path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one mode with an empty table."""
    stop = threading.Event()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, embedded_aws(STREAM, SHARDS) as url:
        putting = threading.Thread(target=keep_putting, args=(url, stop), daemon=True)
        putting.start()
        try:
            samples = samples_of(path, url, f"{folder}/table", options)
        finally:
            stop.set()
            putting.join(10)
    found = trends(samples, options.limit_mb)
    return {
        "batches": options.batches,
        "flat": all(one.flat for one in found.values()),
        "rss_mb": {name: asdict(one) for name, one in found.items() if name not in COUNT_LIMITS},
        "counts": {name: asdict(one) for name, one in found.items() if name in COUNT_LIMITS},
        "seconds": round(time.monotonic() - began, 1),
        "samples": samples,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all requested modes."""
    of = {
        path: soak(path, options)
        if options.minutes is None
        else soak_for_minutes(path, options.minutes, options.limit_mb)
        for path in options.paths
    }
    return {
        "batches": options.batches,
        "flat": all(one["flat"] for one in of.values()),
        "rss_mb": {path: one["rss_mb"] for path, one in of.items()},
        "paths": of,
    }


def print_table(result: dict[str, Any]) -> None:
    for path, of in result["paths"].items():
        print(f"{path}: {of['batches']} batches in {of['seconds']} s")
        slopes = of.get("mb_per_minute", {})
        for name, one in (of["rss_mb"] | of["counts"]).items():
            verdict = "flat" if one["flat"] else "GROWS"
            rate = f"   {slopes[name]:+.2f} MB/min" if name in slopes else ""
            print(
                f"  {name:<18} second quarter {one['first']:>8.1f}   last quarter "
                f"{one['last']:>8.1f}   limit +{one['limit']:<6.1f} {verdict}{rate}"
            )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--batches", type=int, default=2000, help="of each path")
    parser.add_argument(
        "--paths", nargs="+", choices=["arrow", "spark"], default=["arrow", "spark"]
    )
    parser.add_argument(
        "--minutes", type=float, help="instead of --batches: steady load, default settings"
    )
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB)
    parser.add_argument("--leak-kb", type=int, default=0)
    for name in ("--worker", "--endpoint-url", "--table"):  # of the worker's own process
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    if options.worker:
        run_worker(options)
        return 0
    result = run(options)
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0 if result["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())

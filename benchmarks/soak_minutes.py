"""Memory of a worker with default settings over some minutes of steady load.

`python -m benchmarks.soak --minutes 10` calls `soak_for_minutes`, which runs this module as the
process of the worker. The load is `PUT_RECORDS` records of `RECORD_BYTES` every `PUT_SECONDS`: one
megabyte per second. Samples are taken from outside every few seconds while the worker runs. The JVM
decides when it collects its garbage, except for `HEAPS` collections, after which its heap is
measured.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil
import pyarrow as pa

from benchmarks.embedded import client, embedded_aws
from benchmarks.resources import look
from benchmarks.trends import COUNT_LIMITS, slope, trend, trends
from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import BatchCommitted, Event
from kcl_pipeline.pipeline import KinesisPipeline

STREAM = "soak"
SHARDS = 4
RECORD_BYTES = 1000
PUT_RECORDS = 50
PUT_SECONDS = 0.05
SAMPLE_SECONDS = 5.0
MIN_SAMPLES = 24
HEAPS = 8
START_SECONDS = 120.0
STOP_SECONDS = 120.0


# -- the worker's process
# ----------------------------------------------------------------------------


def in_spark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches unchanged; this uses Spark's Python workers."""
    yield from batches


class Committed:
    """Event sink that counts batches and records."""

    def __init__(self) -> None:
        self.batches = self.records = 0

    def __call__(self, event: Event) -> None:
        """Count a committed batch."""
        if isinstance(event, BatchCommitted):
            self.batches += 1
            self.records += event.records


def answer(path: str, committed: Committed, stop: threading.Event) -> None:
    """Answer each line of the controller with the counts; stop when there are no more lines."""
    for line in sys.stdin:
        heap = heap_mb() if line.strip() == "collect" and path == "spark" else None
        told = {"batches": committed.batches, "records": committed.records, "heap_mb": heap}
        print(json.dumps(told), flush=True)
    stop.set()


def heap_mb() -> float:
    """Collect the garbage of the JVM; return its heap in MB. Only after the first batch."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 (the Arrow path has no Spark)

    jvm: Any = SparkSession.builder.getOrCreate().sparkContext._jvm  # noqa: SLF001 (the only way)
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    return float(round((runtime.totalMemory() - runtime.freeMemory()) / 1e6, 1))


def run_worker(options: argparse.Namespace) -> None:
    """Run one worker with default settings until the controller closes the input."""
    committed, stop = Committed(), threading.Event()
    threading.Thread(target=answer, args=(options.worker, committed, stop), daemon=True).start()
    functions: dict[str, Any] = {
        "arrow": {"transform_arrow": lambda table: table},
        "spark": {"transform": lambda frame: frame.mapInArrow(in_spark, frame.schema)},
    }
    pipeline = KinesisPipeline(
        name="soak-app",
        streams=[STREAM],
        sink=DeltaSink(options.table),
        **functions[options.worker],
    )
    session = SessionOptions(
        "us-east-1",
        endpoint_url=options.endpoint_url,
        aws_access_key_id="k",
        aws_secret_access_key="s",
    )
    clients = AwsClients(pipeline.settings, session)
    pipeline.build_worker("soak-1", clients=clients, events=committed).run(stop)


# -- the controller
# ----------------------------------------------------------------------------


def put_steadily(url: str, stop: threading.Event) -> None:
    """Put records at fixed times, so that a slow call does not reduce the load."""
    kinesis, began = client(url), time.monotonic()
    for number in itertools.count():
        entries = [
            {"Data": os.urandom(RECORD_BYTES), "PartitionKey": f"{number}-{i}"}
            for i in range(PUT_RECORDS)
        ]
        kinesis.put_records(StreamName=STREAM, Records=entries)
        if stop.wait(max(began + (number + 1) * PUT_SECONDS - time.monotonic(), 0)):
            return


class Controlled:
    """The process of a worker that answers lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.driver = psutil.Process(process.pid)
        self._input: IO[str] = process.stdin
        self._output: IO[str] = process.stdout

    def ask(self, what: str) -> dict[str, Any]:
        """Send a line and return the answer.

        Raises:
            RuntimeError: The worker has ended.
        """
        line = ""
        with suppress(BrokenPipeError):
            self._input.write(what + "\n")
            self._input.flush()
            line = self._output.readline()
        if not line:
            raise RuntimeError("the worker has ended early")
        answered: dict[str, Any] = json.loads(line)
        return answered

    def wait_for_batch(self) -> None:
        """Wait until the first batch is committed.

        Raises:
            RuntimeError: There was none in `START_SECONDS`.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.ask("count")["batches"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no batch was committed in {START_SECONDS} s")
            time.sleep(0.2)


@contextmanager
def worker_process(path: str, url: str, table: str) -> Iterator[Controlled]:
    """Run a worker in a process of its own.

    Raises:
        RuntimeError: It ended with an error.
    """
    command = [sys.executable, "-m", "benchmarks.soak_minutes", "--worker", path]
    command += ["--endpoint-url", url, "--table", table]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Controlled(process)
            assert process.stdin is not None
            process.stdin.close()
            code = process.wait(STOP_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
    if code != 0:
        raise RuntimeError(f"the worker of the {path} path ended with code {code}")


def samples_for(
    worker: Controlled, minutes: float
) -> tuple[list[dict[str, float]], list[tuple[float, float]]]:
    """Return the samples, and pairs of minute and MB of the heap after a collection."""
    worker.wait_for_batch()
    samples: list[dict[str, float]] = []
    heaps: list[tuple[float, float]] = []
    count = max(round(minutes * 60 / SAMPLE_SECONDS), MIN_SAMPLES)
    every = minutes * 60 / count
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(began + (number + 1) * every - time.monotonic(), 0))
        is_measured = number % (count // HEAPS) == count // HEAPS - 1
        sample = look(worker.driver, None)  # before the collection
        told = worker.ask("collect" if is_measured else "count")
        if is_measured and told["heap_mb"] is not None:
            heaps.append(((time.monotonic() - began) / 60, told["heap_mb"]))
        at = {"minute": (time.monotonic() - began) / 60}
        samples.append(at | sample | {"batches": told["batches"], "records": told["records"]})
    return samples, heaps


def soak_for_minutes(path: str, minutes: float, limit_mb: float) -> dict[str, Any]:
    """Run one path with an empty table."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, embedded_aws(STREAM, SHARDS) as url:
        putting = threading.Thread(target=put_steadily, args=(url, stop), daemon=True)
        putting.start()
        try:
            with worker_process(path, url, str(Path(folder) / "table")) as worker:
                samples, heaps = samples_for(worker, minutes)
        finally:
            stop.set()
            putting.join(10)
    return judged(samples, heaps, limit_mb) | {"samples": samples}


def judged(
    samples: Sequence[dict[str, float]], heaps: Sequence[tuple[float, float]], limit_mb: float
) -> dict[str, Any]:
    """Return the trend and the slope (MB per minute after the first quarter) of each value."""
    counted = ("minute", "batches", "records")
    found = trends(
        [{k: v for k, v in one.items() if k not in counted} for one in samples], limit_mb
    )
    if heaps:
        found["jvm_heap_mb"] = trend([size for _, size in heaps], limit_mb)
    points = {
        name: [(one["minute"], one[name]) for one in samples]
        for name in found
        if name in samples[0]
    } | {"jvm_heap_mb": list(heaps)}
    return {
        "batches": samples[-1]["batches"],
        "records": samples[-1]["records"],
        "flat": all(one.flat for one in found.values()),
        "rss_mb": {name: asdict(one) for name, one in found.items() if name not in COUNT_LIMITS},
        "counts": {name: asdict(one) for name, one in found.items() if name in COUNT_LIMITS},
        "mb_per_minute": {
            name: round(slope(points[name][len(points[name]) // 4 :]), 3)
            for name in found
            if name.endswith("_mb")
        },
        "seconds": round(samples[-1]["minute"] * 60, 1),
        "heaps": heaps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--worker", "--endpoint-url", "--table"):
        parser.add_argument(name, required=True)
    run_worker(parser.parse_args())


if __name__ == "__main__":
    main()

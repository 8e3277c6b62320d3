"""Throughput of consumers that read an endless stream from the replay server.

Compared are this project, boto3, async-kinesis, kclpy, the Java KCL, and Spark Structured
Streaming. Every consumer is a separate program (`benchmarks.peers`) that prints how many records it
has read. This program reads its output and the processor time of its processes. The measurement
starts `--warm-up` seconds after the first record, when a JIT has warmed up, and takes `--seconds`.
Consumers alternate in each round, with both record sizes. Results are medians of the rounds.

`ours_driver`, `ours_from_json`, `ours_executors`, `ours_executors_frame` and `ours_arrow` are whole
workers that commit exactly once into a Delta table. Their lease rows are in the embedded AWS, like
those of the Java peers. `ours_from_json` and `structured_streaming` parse JSON text by one Spark
function into the same four columns of a Delta table; the second reads the records from text files
in the page cache. `kclpy` and `ours_kclpy` run one record processor, under the MultiLangDaemon and
under a worker of this project.

A peer that cannot be set up has the result null, and `reasons` contains the reason. All processes
end with this process, even if it is killed.

    python -m benchmarks.throughput [--json] [--rounds 2] [--seconds 5] [--warm-up 4] [--only
    ours_arrow java_kcl] [--folder KEPT]

A round takes about sixteen minutes on two idle cores. For a short run, use `--rounds 1 --seconds 3
--warm-up 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.setup import (
    NotAvailable,
    async_kinesis_command,
    java_kcl_command,
    kclpy_command,
    ours_kclpy_command,
    structured_streaming_command,
)
from benchmarks.peers.tied import tied
from benchmarks.replay_server import SIZES, replay_server
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.demo.processes import session_members

ROOT = Path(__file__).parents[1]
FIRST_RECORD_SECONDS = 180.0
SILENCE_SECONDS = 60.0
OF_TEXT = ("ours_from_json", "structured_streaming")
ON_CLUSTER = ("ours_executors", "ours_executors_frame")
WITH_A_JVM = ("ours_driver", *ON_CLUSTER, "java_kcl", "kclpy", *OF_TEXT)
JIT_FACTOR = 2.5
"""Factor on the warm-up of a consumer with a JVM, because compiled code is compared."""
SHARDS = 32
"""Shards of the stream; enough for 1.6 million records per second.

Kinesis permits five reads of at most 10,000 records per second and shard.
"""


@dataclass(frozen=True)
class World:
    """Addresses and directories of one run of one consumer."""

    stream: str
    kinesis: str
    dynamodb: str
    folder: Path
    kept: Path


@dataclass(frozen=True)
class Sample:
    """Result of one run of one consumer.

    It has records, elapsed seconds, processor seconds of consumer and server, the machine's load,
    and the memory of all processes of the consumer at the end, in MB.
    """

    records: int
    seconds: float
    cpu_s: float
    server_cpu_s: float
    load: float
    memory_mb: float


Command = Callable[[World], list[str]]


def ours(way: str) -> Command:
    return lambda world: [
        sys.executable,
        "-m",
        "benchmarks.peers.ours",
        way,
        world.stream,
        str(world.folder),
    ]


WAYS: dict[str, Command] = {
    "ours_reader": ours("reader"),
    "boto3": lambda world: [sys.executable, "-m", "benchmarks.peers.boto3_loop", world.stream],
    "ours_driver": ours("driver"),
    "ours_executors": ours("executors"),
    "ours_executors_frame": ours("executors_frame"),
    "ours_from_json": ours("from_json"),
    "ours_arrow": ours("arrow"),
    "async_kinesis": lambda world: async_kinesis_command(world.kept, world.stream, world.kinesis),
    "java_kcl": lambda world: java_kcl_command(
        world.kept, world.stream, world.kinesis, world.dynamodb
    ),
    "structured_streaming": lambda world: structured_streaming_command(
        world.kept, world.folder, int(world.stream.rpartition("-")[2])
    ),
    "kclpy": lambda world: kclpy_command(
        world.kept, world.folder, world.stream, world.kinesis, world.dynamodb
    ),
    "ours_kclpy": lambda world: ours_kclpy_command(world.folder, world.stream),
}


@dataclass(frozen=True)
class Reading:
    """One output line of a consumer."""

    at: float
    records: int
    cpu_s: float
    server_cpu_s: float


def cpu_of(process: psutil.Process) -> float:
    """Return the processor seconds of a process and its descendants.

    Descendants that have ended count if their parent waited for them.
    """
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_of(process: psutil.Process) -> float:
    """Return the memory of a process and its descendants in MB. Shared pages count once."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            total += one.memory_full_info().pss / 1e6
    return total


def server_cpu(url: str) -> float:
    with urllib.request.urlopen(f"{url}/cpu", timeout=30) as answer:
        return float(json.load(answer)["cpu_s"])


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a consumer in its own session and stop all of its processes afterwards.

    Processes whose parent has ended are stopped too.
    """
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            tied(command),
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            for member in session_members(process.pid):
                with suppress(psutil.NoSuchProcess):
                    member.kill()


def observe(
    command: list[str], environment: dict[str, str], world: World, warm_up: float, seconds: float
) -> Sample:
    """Run a consumer until it is measured.

    Raises:
        NotAvailable: The consumer ends early or reads nothing.
    """
    log = world.folder / "stderr.txt"
    with running(command, environment, log) as process, ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        tree, began = psutil.Process(process.pid), time.perf_counter()
        first: float | None = None
        start: Reading | None = None
        while True:
            line = pool.submit(process.stdout.readline)
            try:
                text = line.result(timeout=SILENCE_SECONDS if first else FIRST_RECORD_SECONDS)
            except TimeoutError:
                process.kill()
                raise NotAvailable(
                    "it said nothing for "
                    f"{SILENCE_SECONDS if first else FIRST_RECORD_SECONDS:.0f} s: "
                    f"{last_line(log)}"
                ) from None
            now = time.perf_counter()
            if not text:
                raise NotAvailable(f"it ended: {last_line(log)}")
            if not text.strip().isdigit():
                continue
            records = int(text)
            if records == 0 and now - began > FIRST_RECORD_SECONDS:
                raise NotAvailable(f"no record in {FIRST_RECORD_SECONDS:.0f} s: {last_line(log)}")
            if records and first is None:
                first = now
            if first is None or now - first < warm_up:
                continue
            if start is None:
                start = Reading(now, records, cpu_of(tree), server_cpu(world.kinesis))
            elif now - start.at >= seconds:
                cpu, server = cpu_of(tree), server_cpu(world.kinesis)
                return Sample(
                    records - start.records,
                    now - start.at,
                    cpu - start.cpu_s,
                    server - start.server_cpu_s,
                    os.getloadavg()[0],
                    memory_of(tree),
                )


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a word"


def run_one(way: str, size: int, kept: Path, warm_up: float, seconds: float) -> Sample:
    """Run one consumer with new servers."""
    with (
        replay_server(10_000, SHARDS, text=way in OF_TEXT) as url,
        EmbeddedAws() as aws,
        tempfile.TemporaryDirectory() as folder,
    ):
        world = World(f"orders-{size}", url, aws.endpoint_url, Path(folder), kept)
        environment = (
            dict(os.environ)
            | aws.environment()
            | {"AWS_ENDPOINT_URL_KINESIS": url, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        )
        sample = observe(
            WAYS[way](world),
            environment,
            world,
            warm_up * (JIT_FACTOR if way in WITH_A_JVM else 1),
            seconds,
        )
    if not sample.records:
        raise NotAvailable(f"it read no record in {sample.seconds:.0f} s")
    return sample


def figures(samples: list[Sample], size: int) -> dict[str, float]:
    """Return the medians of the samples."""

    def median(of: Callable[[Sample], float], digits: int) -> float:
        return round(statistics.median(of(s) for s in samples), digits)

    return {
        "records_per_s": median(lambda s: s.records / s.seconds, 0),
        "mb_per_s": median(lambda s: s.records * size / s.seconds / 1e6, 1),
        "cpu_s_per_gb": median(lambda s: s.cpu_s / (s.records * size / 1e9), 2),
        "records_per_cpu_s": median(lambda s: s.records / s.cpu_s, 0),
        "cores": median(lambda s: s.cpu_s / s.seconds, 2),
        "server_cores": median(lambda s: s.server_cpu_s / s.seconds, 2),
        "load": median(lambda s: s.load, 1),
        "memory_mb": median(lambda s: s.memory_mb, 0),
    }


def ratio(of: dict[str, Any], ours_way: str, peer: str, figure: str) -> float | None:
    if of.get(ours_way) is None or of.get(peer) is None:
        return None
    return round(float(of[ours_way][figure]) / float(of[peer][figure]), 2)


def ratios(of: dict[str, Any]) -> dict[str, float | None]:
    """Return the ratios. Targets of the first six: 5, 5, 5, 3 (5 at 100 B), 1 and 1 (at 1 KB).

    Of `kclpy_vs_ours_kclpy_cpu_s_per_gb`: 5.
    """
    return {
        **{
            f"reader_vs_{peer}_records_per_s": ratio(of, "ours_reader", peer, "records_per_s")
            for peer in ("boto3", "async_kinesis", "kclpy")
        },
        "reader_vs_java_kcl_records_per_cpu_s": ratio(
            of, "ours_reader", "java_kcl", "records_per_cpu_s"
        ),
        "java_kcl_vs_arrow_cpu_s_per_gb": ratio(of, "java_kcl", "ours_arrow", "cpu_s_per_gb"),
        "java_kcl_vs_driver_cpu_s_per_gb": ratio(of, "java_kcl", "ours_driver", "cpu_s_per_gb"),
        "structured_streaming_vs_from_json_cpu_s_per_gb": ratio(
            of, "structured_streaming", "ours_from_json", "cpu_s_per_gb"
        ),
        "kclpy_vs_ours_kclpy_cpu_s_per_gb": ratio(of, "kclpy", "ours_kclpy", "cpu_s_per_gb"),
        "kclpy_vs_ours_kclpy_memory_mb": ratio(of, "kclpy", "ours_kclpy", "memory_mb"),
        "arrow_vs_driver_records_per_s": ratio(of, "ours_arrow", "ours_driver", "records_per_s"),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(options.folder or temporary).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        for _ in range(options.rounds):
            for size in SIZES:
                for way in options.only or WAYS:
                    if way in reasons:
                        continue
                    try:
                        sample = run_one(way, size, kept, options.warm_up, options.seconds)
                    except NotAvailable as reason:
                        reasons[way] = str(reason)
                        continue
                    samples.setdefault((way, size), []).append(sample)
                    if not options.json:
                        print(f"{size:>5} B {way:<14} {figures([sample], size)}", flush=True)
    large, small = (
        {way: figures(samples[way, size], size) if (way, size) in samples else None for way in WAYS}
        for size in SIZES
    )
    machine = {
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "java": shutil.which("java") is not None,
    }
    about = {
        "reasons": reasons,
        "machine": machine,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    return {**large, "small": {**small, "ratios": ratios(small)}, "ratios": ratios(large), **about}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=4.0)
    parser.add_argument("--only", nargs="+", choices=list(WAYS))
    parser.add_argument("--folder", help="keeps the peers' libraries from one run to the next")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # so that the consumers, which have sessions of their own, are ended too
    result = run(parser.parse_args())
    print(json.dumps(result))


if __name__ == "__main__":
    main()

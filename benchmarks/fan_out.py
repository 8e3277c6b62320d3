"""Resources of many enhanced fan-out subscriptions in one worker process.

HTTP/1.1 uses one connection and one thread per subscription. HTTP/2 uses shared connections and no
thread per subscription.

    python -m benchmarks.fan_out [--json] [--shards 32] [--records 20000]

The embedded AWS and each reader run in separate processes. The reader subscribes to every shard and
reads up to its end. Threads, connections and resident memory are the values at the end, minus those
before the subscriptions. CPU is the processor time of reading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import psutil

from benchmarks.embedded import client, embedded_aws
from kcl_pipeline.aws import AwsClients, SessionOptions, open_fan_out, open_kinesis
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.kinesis.fan_out.source import FanOutReader
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.threads import spawn_thread

STREAM = "many"
RECORD_BYTES = 1024
RETRY_LIMIT_SECONDS = 120.0


def read_all(url: str, http: Literal["1.1", "2"], records: int) -> dict[str, float]:
    """Subscribe to every shard, read `records` records in this process, and return the costs."""
    chosen = RetrievalSettings(
        retrieval_mode="fan_out", fan_out_http=http, consumer_name=f"reader-{http[0]}"
    )
    settings = ConsumerSettings(application_name="fan-out", streams=(STREAM,), retrieval=chosen)
    clients = AwsClients(
        settings,
        SessionOptions(
            "us-east-1", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s"
        ),
    )
    kinesis = open_kinesis(settings, clients, SystemClock())
    stream = kinesis.resolve_stream(STREAM, multi_stream=False)
    retrieval = Retrieval(
        settings,
        kinesis,
        open_fan_out(settings, clients),
        SystemClock(),
        lambda _: None,
        spawn_thread,
    )
    retrieval.register_consumers([stream])
    shards = [shard.shard_id for shard in kinesis.list_shards(stream)]
    port = int(url.rpartition(":")[2])
    process = psutil.Process()

    def taken() -> tuple[int, int, float]:
        connections = sum(
            c.status == psutil.CONN_ESTABLISHED and bool(c.raddr) and c.raddr.port == port
            for c in process.net_connections("tcp")
        )
        return threading.active_count(), connections, process.memory_info().rss / 1e6

    before = taken()
    began, cpu = time.perf_counter(), time.process_time()
    readers = [
        retrieval.reader(stream, shard, shard, TRIM_HORIZON, None, held_leases=1)
        for shard in shards
    ]
    read_to_the_tip(readers, records)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    after = taken()
    for reader in readers:
        assert isinstance(reader, FanOutReader)
        reader.close()
    names = ("threads", "connections", "rss_mb")
    return {name: round(b - a, 1) for name, a, b in zip(names, before, after, strict=True)} | {
        "cpu_s": round(cpu, 2),
        "records_per_s": round(records / seconds),
    }


def read_to_the_tip(readers: list[Any], records: int) -> None:
    """Take available records from each reader in turn, as the worker's fetch threads do."""
    deadline = time.monotonic() + RETRY_LIMIT_SECONDS
    got, begun = 0, 0
    while got < records or begun < len(readers):
        assert time.monotonic() < deadline, f"{got} of {records} records came"
        for reader in readers:
            try:
                chunk = reader.read()
            except ThrottledError:  # another subscription to the shard is younger than five seconds
                chunk = None
            got += chunk.records.num_rows if chunk is not None else 0
        begun = sum(reader.millis_behind_latest is not None for reader in readers)
        time.sleep(0.005)


def run(shards: int, records: int, rounds: int) -> dict[str, Any]:
    """Measure both HTTP versions in turn."""
    samples: dict[str, list[dict[str, float]]] = {"1.1": [], "2": []}
    with embedded_aws(STREAM, shards) as url:
        kinesis = client(url)
        for first in range(0, records, 500):
            entries = [
                {"Data": os.urandom(RECORD_BYTES), "PartitionKey": str(n)}
                for n in range(first, min(first + 500, records))
            ]
            assert kinesis.put_records(StreamName=STREAM, Records=entries)["FailedRecordCount"] == 0
        for _ in range(rounds):
            for http, found in samples.items():
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.fan_out",
                    "--read",
                    http,
                    "--url",
                    url,
                    "--records",
                    str(records),
                ]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, check=True, timeout=2 * RETRY_LIMIT_SECONDS
                )
                found.append(json.loads(done.stdout))
                time.sleep(5)  # the service lets a shard be subscribed to once in five seconds

    def median(found: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in found)

    return {
        "subscriptions": shards,
        **{
            f"http_{http}": {name: median(found, name) for name in found[0]}
            for http, found in samples.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line instead of indented JSON")
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    for name in ("--read", "--url"):  # of the process that reads
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_all(options.url, options.read, options.records)))
        return
    print(
        json.dumps(
            run(options.shards, options.records, options.rounds), indent=None if options.json else 2
        )
    )


if __name__ == "__main__":
    main()

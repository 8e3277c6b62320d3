"""Batches per second of a worker with many leases: serial and parallel prepares.

The lease rows are in the embedded AWS in a separate process. The table is in memory, so that only
the writes of the rows are measured. `latency_millis` is the delay before each request, like that of
a network. `concurrent` is the highest number of concurrent requests.

    python -m benchmarks.prepares [--leases 64] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.batch import Batch, ShardRange
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, LeaseSettings
from kcl_pipeline.leases.dynamodb.opening import lease_store
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.lease.rows import LeaseRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.batch_runner import CommitSteps
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.monitoring.activity import Activity

LATENCIES_MILLIS = (0.0, 5.0)
BATCHES = 5
NO_RECORDS = pa.table({"id": pa.array([], pa.int64())})


@dataclass
class Network:
    """Delay before each request, with a counter of concurrent requests."""

    latency_seconds: float = 0.0
    most: int = 0
    _now: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def around(self, client: Any) -> None:
        """Delay all requests of this client."""
        client.meta.events.register("before-send.dynamodb", self._begin)
        client.meta.events.register("needs-retry.dynamodb", self._end)

    def _begin(self, **_: Any) -> None:
        with self._guard:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.latency_seconds)

    def _end(self, **_: Any) -> None:
        with self._guard:
            self._now -= 1


class OneWorker:
    """Leases of one worker and their consumers on a separate lease table."""

    def __init__(
        self,
        clients: AwsClients,
        settings: ConsumerSettings,
        name: str,
        leases: int,
        map_calls: MapCallable,
    ) -> None:
        clock = SystemClock()
        table = LeaseRows(
            lease_store(clients.dynamodb, name, settings.lease_table, settings.lease, clock)
        )
        table.ensure_exists()
        for number in range(leases):
            create_lease(table, Lease(f"shardId-{number:012d}", TRIM_HORIZON, owner="w"))
        held = HeldLeases(table, "w", settings.lease, clock, lambda _event: None)
        rows = MemoryTable()
        self._writer = MemoryBatchWriter(rows)
        protocol = TwoPhaseCommit(
            held, InMemorySink(rows), clock, lambda _event: None, "w", map=map_calls
        )
        self._commit = CommitSteps(
            protocol, self._writer.write, held, clock, lambda _event: None, "w", Activity(clock)
        )
        self._consumers = {
            held.lease_key: ShardConsumer(held, StreamId("s")) for held in held.recover()
        }
        for consumer in self._consumers.values():
            protocol.resolve(consumer)
        self._turn = 0

    def batch(self) -> None:
        """Commit a batch with a range of every lease."""
        self._turn += 1
        end = Position(str(self._turn))
        ranges = tuple(
            ShardRange(key, consumer.committed or TRIM_HORIZON, end)
            for key, consumer in self._consumers.items()
        )
        batch = Batch(f"b{self._turn}", ranges, NO_RECORDS)
        done = self._commit.run(batch, self._consumers, self._writer.write(batch))
        if done is None or len(done.lease_keys) != len(ranges):
            raise AssertionError("a lease was lost")


def measure(endpoint: str, leases: int, rounds: int, latency_millis: float) -> dict[str, Any]:
    """Measure both modes in turn.

    Returns:
        Median batches per second, the ratio of each round, and the highest number of concurrent
        requests.
    """
    patience = LeaseSettings(failover_time_millis=600_000)  # one waits while the other is measured
    settings = ConsumerSettings(application_name="prepares", streams=("s",), lease=patience)
    network = Network()
    clients = AwsClients(settings, SessionOptions("us-east-1", None, endpoint, "k", "s"))
    network.around(clients.dynamodb)
    with ThreadPoolExecutor(settings.lease.max_lease_renewal_threads) as pool:
        ways: dict[str, MapCallable] = {
            "one_by_one": serial_map,
            "together": lambda call, items: list(pool.map(call, items)),
        }
        workers = {
            way: OneWorker(clients, settings, f"{way}-{latency_millis:.0f}", leases, chosen)
            for way, chosen in ways.items()
        }
        network.latency_seconds = latency_millis / 1000
        rates: dict[str, list[float]] = {way: [] for way in ways}
        most: dict[str, int] = {}
        for _ in range(rounds):
            for way, worker in workers.items():
                network.most = 0
                began = time.perf_counter()
                for _ in range(BATCHES):
                    worker.batch()
                rates[way].append(BATCHES / (time.perf_counter() - began))
                most[way] = network.most
    clients.close()
    figures = {
        way: {"batches_per_s": round(statistics.median(rates[way]), 2), "concurrent": most[way]}
        for way in ways
    }
    return figures | {
        "ratio": round(
            statistics.median(
                b / a for a, b in zip(rates["one_by_one"], rates["together"], strict=True)
            ),
            2,
        )
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the results, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    server = subprocess.Popen(
        [sys.executable, "-m", "kcl_pipeline.local", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        endpoint = server.stdout.readline().strip() if server.stdout else ""
        results = {
            f"{latency:.0f}": measure(endpoint, options.leases, options.rounds, latency)
            for latency in LATENCIES_MILLIS
        }
    finally:
        server.terminate()
        server.wait(30)
    if options.json:
        print(json.dumps({"leases": options.leases, "latency_millis": results}))
        return
    for latency, figures in results.items():
        print(f"{options.leases} leases, {latency} ms away: {figures}")


if __name__ == "__main__":
    main()

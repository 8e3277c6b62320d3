"""Publisher of the demonstration's events.

It publishes orders with a skewed key distribution, and telemetry measured on this host.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psutil

from kcl_pipeline.clock import Clock
from kcl_pipeline.shards import MAX_HASH_KEY

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

ORDERS = "orders"
TELEMETRY = "telemetry"
BATCH = 500
HOT_SHARE = 0.5


def users(rng: random.Random, shards: int, per_shard: int = 50) -> list[list[str]]:
    """Return user names, grouped by the shard that their hash key belongs to.

    Args:
        rng: Source of the names.
        shards: Number of shards, which divide the hash keys evenly.
        per_shard: Number of names per shard.
    """
    width = (MAX_HASH_KEY + 1) // shards
    by_shard: list[list[str]] = [[] for _ in range(shards)]
    while min(len(names) for names in by_shard) < per_shard:
        name = f"user-{rng.randrange(10**6):06d}"
        shard = min(
            int.from_bytes(hashlib.md5(name.encode(), usedforsecurity=False).digest(), "big")
            // width,
            shards - 1,
        )
        if len(by_shard[shard]) < per_shard:
            by_shard[shard].append(name)
    return by_shard


def orders(rng: random.Random, clock: Clock, count: int, shards: int) -> Iterator[dict[str, Any]]:
    """Yield `count` order records; the users of the first two shards place half of them."""
    by_shard = users(rng, shards)
    hot = [name for names in by_shard[:2] for name in names]
    cold = [name for names in by_shard[2:] for name in names]
    for number in range(count):
        user = rng.choice(hot if rng.random() < HOT_SHARE else cold)
        event = {
            "id": f"order-{number:07d}",
            "user": user,
            "amount": round(rng.lognormvariate(3, 1), 2),
            "time": _now(clock),
        }
        yield {"Data": json.dumps(event).encode(), "PartitionKey": user}


def telemetry(clock: Clock, round_number: int) -> list[dict[str, Any]]:
    """Return one record per metric of CPU, memory, load, disk and network of this host."""
    network = psutil.net_io_counters()
    disk = psutil.disk_io_counters()
    readings = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": psutil.virtual_memory().percent,
        "load_1m": psutil.getloadavg()[0],
        "net_bytes_sent": network.bytes_sent if network else 0,
        "net_bytes_received": network.bytes_recv if network else 0,
        "disk_bytes_read": disk.read_bytes if disk else 0,
        "disk_bytes_written": disk.write_bytes if disk else 0,
    }
    return [
        {
            "Data": json.dumps(
                {
                    "id": f"{metric}-{round_number:06d}",
                    "metric": metric,
                    "value": float(value),
                    "time": _now(clock),
                }
            ).encode(),
            "PartitionKey": metric,
        }
        for metric, value in readings.items()
    ]


def _now(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.wall(), UTC).isoformat()


@dataclass
class Publisher:
    """Publisher with one thread per stream.

    Attributes:
        client: Kinesis client.
        clock: Clock for event times and the rate.
        count: Number of orders to publish.
        per_second: Orders per second.
        shards: Number of shards of the order stream.
        seed: Seed of the orders.
        ids: Every id that Kinesis acknowledged.
        counts: Number of acknowledged events by stream.
        error: Exception that a publishing thread raised.
    """

    client: KinesisClient
    clock: Clock
    count: int
    per_second: int
    shards: int
    seed: int = 7
    ids: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True)
            for loop in (self._orders, self._telemetry)
        ]
        self.orders_done = False

    def start(self) -> None:
        """Start to publish."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Stop publishing, even if orders remain.

        An exception of a publishing thread is raised again.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self.error is not None:
            raise self.error

    @property
    def published(self) -> int:
        """Number of acknowledged events of both streams."""
        return len(self.ids)

    def _guarded(self, loop: Any) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 (shown by finish)
            self.error = error
            self._stop.set()

    def _orders(self) -> None:
        rng = random.Random(self.seed)
        batch: list[dict[str, Any]] = []
        began = self.clock.monotonic()
        sent = 0
        for record in orders(rng, self.clock, self.count, self.shards):
            batch.append(record)
            if len(batch) == BATCH:
                self._put(ORDERS, batch)
                sent += len(batch)
                batch = []
                self._stop.wait(max(began + sent / self.per_second - self.clock.monotonic(), 0))
            if self._stop.is_set():
                return
        self._put(ORDERS, batch)
        self.orders_done = True

    def _telemetry(self) -> None:
        round_number = 0
        while not self._stop.is_set() and not self.orders_done:
            self._put(TELEMETRY, telemetry(self.clock, round_number))
            round_number += 1
            self._stop.wait(1.0)

    def _put(self, stream: str, records: list[dict[str, Any]]) -> None:
        waiting = records
        for _ in range(100):
            if not waiting:
                return
            answer = self.client.put_records(
                StreamName=stream,
                Records=waiting,  # type: ignore[arg-type]
            )
            results = answer["Records"]
            done = [
                json.loads(r["Data"])["id"]
                for r, result in zip(waiting, results, strict=True)
                if "ErrorCode" not in result
            ]
            with self._lock:
                self.ids.extend(done)
                self.counts[stream] += len(done)
            waiting = [
                r for r, result in zip(waiting, results, strict=True) if "ErrorCode" in result
            ]
            if waiting:
                self._stop.wait(0.2)
        raise RuntimeError(f"{len(waiting)} records were refused a hundred times")

"""One worker's commits over twelve leases, on in-memory tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from kcl_pipeline.batch import Batch, Chunk
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from kcl_pipeline.threads import serial_map
from kcl_pipeline.worker.batch_runner import LandStep
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.watchdog import Activity

DEADLINE_SECONDS = 60
KEYS = tuple(f"shardId-{number:012d}" for number in range(12))
HUNDRED_KEYS = tuple(f"shardId-{number:012d}" for number in range(100))
STREAM = StreamId("s", arn="arn:aws:kinesis:eu-west-1:1:stream/s", created_millis=17_000)
NO_RECORDS = pa.table({"shard_id": pa.array([], pa.string())})


class World:
    """One worker's committer over `keys`; `trouble` maps a lease key to the errors that its next
    writes meet.
    """

    def __init__(self, map_calls=serial_map, sink=None, lineage=None, keys=KEYS, **options):
        self.clock = VirtualClock()
        self.table = InMemoryLeaseTable("app", clock=self.clock)
        for key in keys:
            create_lease(self.table, Lease(key, TRIM_HORIZON))
            self.table.assign(self.table.get(key), "w")
        self.events: list[object] = []
        self.leases = HeldLeases(self.table, "w", LeaseSettings(), self.clock, self.events.append)
        self.rows = MemoryTable()
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.sink = sink or InMemorySink(
            self.rows,
            clock=self.clock,
            faults=lambda operation, keys: self.asked.append((operation, keys)),
        )
        self.writer = MemoryBatchWriter(self.rows)
        self.map, self.options = map_calls, options
        self.lineage = lineage or {}
        self.committer = self.committer_of(self.leases, **options)
        self.steps = self.steps_of(self.committer)
        self.consumers = {
            held.lease_key: ShardConsumer(held, STREAM) for held in self.leases.discover()
        }
        self.start()
        self.trouble: dict[str, list[Exception]] = {}
        self.writes: list[str] = []
        self.table.hook(self._before, None)

    def committer_of(self, leases, sink=None, **options):
        return ProgressStore(
            leases,
            sink or self.sink,
            lambda consumer: self.lineage.get(consumer.lease_key, ()),
            self.clock,
            self.events.append,
            rng=random.Random(1),
            map=self.map,
            **options,
        )

    def start(self, consumers=None, committer=None):
        """Start shards; return the positions or errors by lease key."""
        committer = committer or self.committer
        wanted = list((consumers or self.consumers).values())
        return committer.start(wanted, committer.look_up(wanted))

    def steps_of(self, committer):
        return LandStep(
            committer,
            self.writer.write,
            self.clock,
            self.events.append,
            "w",
            Activity(self.clock),
        )

    def _before(self, called: str, key: str) -> None:
        if called == "UpdateItem":
            self.writes.append(key)
            if self.trouble.get(key):
                raise self.trouble[key].pop(0)

    def batch(self, through: int) -> Batch:
        ranges = tuple(
            Chunk(key, NO_RECORDS, consumer.committed, Position(str(through)), 0)
            for key, consumer in self.consumers.items()
        )
        return Batch(f"b{through}", ranges, NO_RECORDS)

    def commit(self, through: int):
        return self.steps.run(self.batch(through), self.consumers)


@pytest.fixture(name="world", params=["serial", "threads"])
def world_fixture(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "serial":
        yield World()
        return
    with ThreadPoolExecutor(4) as pool:
        yield World(lambda call, items: list(pool.map(call, items)))

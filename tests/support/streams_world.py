"""Several workers with different `streams=` in one application, in memory and in virtual time."""

from __future__ import annotations

import random

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AccessDeniedError
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.stored_shards import SinkShards
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker

STEP_SECONDS = 0.25
LEAD_SECONDS = 1.0
"""Shortest time between two leader ticks, which is a tenth of the failover time. A cycle costs more
than everything else of a step.
"""


class StreamsWorld:
    """Workers with default settings; each is its own standby leader."""

    def __init__(self, *streams, shards=2):
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock)
        for stream in streams:
            self.create(stream, shards)
        self.leases = InMemoryLeaseTable(clock=self.clock, exists=False)
        self.rows = InMemoryWorkerMetricsTable(clock=self.clock, exists=False)
        self.coordinator = InMemoryCoordinatorStateTable(clock=self.clock, exists=False)
        self.table = MemoryTable()
        self.events: list[object] = []
        self.workers: dict[str, Worker] = {}
        self.due: dict[object, float] = {}
        self.drains: dict[str, object] = {}
        self.sent: list[bytes] = []

    def create(self, stream, shards=2):
        self.model.create_stream(stream, shards)

    def delete(self, stream):
        self.model.call("DeleteStream", StreamName=stream)

    def put(self, stream, count, prefix):
        for number in range(count):
            value = f"{prefix}-{number}".encode()
            self.model.put(stream, [(f"key-{number}", value)])
            self.sent.append(value)

    def start(
        self,
        name,
        *streams,
        drain=False,
        kinesis=None,
        selection=None,
        select=None,
        **overrides,
    ):
        settings = ConsumerSettings(application_name="app", streams=streams, **overrides)
        kinesis = kinesis or InMemoryKinesis(self.model)
        sink = InMemorySink(self.table, clock=self.clock)
        leader = LeaderCycle(
            settings,
            self.leases,
            self.rows,
            self.coordinator,
            kinesis,
            self.clock,
            self.events.append,
            name,
            rng=random.Random(name),
            selection=selection,
            stored=SinkShards(lambda: sink),
        )
        worker = Worker(
            WorkerDependencies(
                worker_id=name,
                settings=settings,
                lease_table=self.leases,
                worker_table=self.rows,
                coordinator_table=self.coordinator,
                kinesis=kinesis,
                writer=MemoryBatchWriter(self.table),
                sink=sink,
                clock=self.clock,
                rng=random.Random(name),
                events=self.events.append,
                leader=leader,
                parallel=False,
                run_id=f"{name}-run",
                select=select,
            ),
        )
        worker.start_up()
        self.workers[name] = worker
        if drain:
            self.drains[name] = worker.drain_watch()
        return worker

    def run(self, seconds):
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            for worker in self.workers.values():
                self._tick(worker.lease_tick)
                self._tick(worker.lead_tick, LEAD_SECONDS)
                for _ in range(4):
                    worker.fetch_tick()
                worker.process_tick()
            self.clock.advance(STEP_SECONDS)

    def _tick(self, tick, shortest=0.0):
        now = self.clock.monotonic()
        if now >= self.due.get(tick, now):
            self.due[tick] = now + max(tick(), shortest)

    def run_until(self, condition, limit):
        began = self.clock.monotonic()
        while not condition():
            seconds = self.clock.monotonic() - began
            assert seconds < limit, f"not within {limit} s: {sorted(self.leases.rows())}"
            self.run(STEP_SECONDS)
        return self.clock.monotonic() - began

    def data(self):
        rows = self.table.rows()
        return [] if rows is None else sorted(rows.column("data").to_pylist())

    def has_all(self):
        return self.data() == sorted(self.sent)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


class ForbiddenStreams(InMemoryKinesis):
    """Every call about one of these streams is refused."""

    def __init__(self, model, *streams):
        super().__init__(model)
        self.streams = streams

    def resolve_stream(self, name_or_arn, *, multi_stream):
        if name_or_arn.rpartition("/")[2] in self.streams:
            raise AccessDeniedError("denied", operation="DescribeStreamSummary")
        return super().resolve_stream(name_or_arn, multi_stream=multi_stream)

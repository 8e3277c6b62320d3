"""A worker without Spark and threads: in-memory tables, a virtual clock, range jobs in this
process, and a table that shows every row.
"""

from __future__ import annotations

import random

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.foreach import ForeachArrow, ForeachArrowSink
from kcl_pipeline.kinesis.ranges import RangeReader
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.stored_shards import SinkShards
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.processors import ProcessorCalls, ProcessorSink
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.sink import (
    InMemorySink,
    MemoryBatchWriter,
    MemoryTable,
)
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker
from tests.support.memory_function import InMemoryFunction
from verification.simulation.environment.range_jobs import InlineRangeJobs


class Jobs(InlineRangeJobs):
    """Keeps what was asked for; `before` runs first, `after` may change what comes back."""

    def __init__(self, reader, writer):
        super().__init__(reader, writer)
        self.asked = []
        self.before = lambda: None
        self.after = lambda done: done

    def run(self, batch_id, fetches):
        self.asked.append(fetches)
        self.before()
        return self.after(super().run(batch_id, fetches))


LEAD_SECONDS = 1.0
"""Time between two leader ticks: a tenth of the failover time, as with up to 1,000 leases. A cycle
costs more than everything else of a tick.
"""


class World:
    """`buffered`: the worker's own fetch tick reads the shards, instead of range jobs.
    `is_function`: the sink is a function, which stores no positions. `function`: it is this one, by
    a `ForeachArrowSink`. `processor`: a class of record processors is in its place.
    """

    sink_address: str | None = None
    """As it is recorded. None: no sink is recorded."""
    memory: MemoryBudget | None = None

    def __init__(
        self,
        shards=2,
        transform=None,
        metric=None,
        parallel=False,
        buffered=False,
        is_function=False,
        function=None,
        processor=None,
        **settings,
    ):
        self.processor = processor
        self.is_function = is_function or function is not None or processor is not None
        self.function = function
        self.metric, self.parallel, self.buffered = metric, parallel, buffered
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock)
        self.model.call("CreateStream", StreamName="orders", ShardCount=shards)
        self.clock.advance(60)
        self.kinesis = InMemoryKinesis(self.model)
        shape = {"lease": {"failover_time_millis": 1000}} | settings
        self.settings = ConsumerSettings(application_name="orders", streams=("orders",), **shape)
        self.leases, self.rows, self.coordinator = self.make_tables()
        self.table = MemoryTable()
        self.writer = MemoryBatchWriter(self.table, transform)
        self.events: list[object] = []
        begin = self.settings.shard_sync.initial_timestamp
        reader = RangeReader(self.kinesis, self.settings.retrieval, begin, self.clock)
        self.jobs = Jobs(reader, self.writer)
        self.sent: list[bytes] = []
        self.worker = self.make_worker()
        self.worker.start_up()

    def make_tables(self):
        return (
            InMemoryLeaseTable(clock=self.clock, exists=False),
            InMemoryWorkerMetricsTable(clock=self.clock, exists=False),
            InMemoryCoordinatorStateTable(clock=self.clock, exists=False),
        )

    def make_leader(self, name):
        return LeaderCycle(
            self.settings,
            self.leases,
            self.rows,
            self.coordinator,
            self.kinesis,
            self.clock,
            self.events.append,
            name,
            rng=random.Random(name),
            stored=self.stored(),
        )

    def stored(self):
        if self.is_function:
            return None
        return SinkShards(self.make_sink)

    def make_sink(self):
        if self.is_function:
            return InMemoryFunction(self.table, clock=self.clock)
        return InMemorySink(self.table, clock=self.clock, application="orders")

    def make_worker(self, name="w-1", run_id=None, events=None):
        writer, sink = self.writer, self.make_sink()
        if self.function is not None:
            writer = sink = ForeachArrow(ForeachArrowSink(self.function))
        if self.processor is not None:
            skips = self.settings.batch.failed_records == "skip"
            most = self.settings.retrieval.max_records
            empty = self.settings.worker.call_process_records_even_for_empty_record_list
            calls = ProcessorCalls(
                ProcessorSink(self.processor), most, skips_failures=skips, calls_empty=empty
            )
            writer = sink = calls
        parts = WorkerDependencies(
            worker_id=name,
            settings=self.settings,
            lease_table=self.leases,
            worker_table=self.rows,
            coordinator_table=self.coordinator,
            kinesis=self.kinesis,
            writer=writer,
            sink=sink,
            clock=self.clock,
            rng=random.Random(name),
            events=events or self.events.append,
            leader=self.make_leader(name),
            metric=self.metric,
            parallel=self.parallel,
            range_jobs=None if self.buffered else self.jobs,
            run_id=run_id or f"{name}-run",
            sink_address=self.sink_address,
            memory=self.memory,
        )
        return Worker(parts)

    def put(self, *values: bytes, key=None):
        for value in values:
            self.model.call(
                "PutRecord",
                StreamName="orders",
                PartitionKey=key or f"key-{len(self.sent)}",
                Data=value,
            )
            self.sent.append(value)
        self.clock.advance(0.01)

    def run(self, seconds=10.0, step=0.2):
        step = min(step, seconds)
        began = self.clock.monotonic()
        led = began - LEAD_SECONDS
        while self.clock.monotonic() < began + seconds:
            self.worker.lease_tick()
            if self.clock.monotonic() - led >= LEAD_SECONDS:
                led = self.clock.monotonic()
                self.worker.lead_tick()
            self.worker.fetch_tick()
            self.worker.process_tick()
            self.clock.advance(step)

    def run_without_leader(self, seconds):
        step = min(0.2, seconds / 2)
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self.worker.lease_tick()
            self.worker.fetch_tick()
            self.worker.process_tick()
            self.clock.advance(step)

    def data(self) -> list[bytes]:
        rows = self.table.rows()
        return [] if rows is None else sorted(rows.column("data").to_pylist())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def numbered(count, prefix="r"):
    return [f"{prefix}{number:04}".encode() for number in range(count)]

"""A whole worker on its threads: reading continues while a commit waits."""

from __future__ import annotations

import random
import threading
import time

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import BatchCommitted
from kcl_pipeline.leader.cycle import LeaderCycle
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
from tests.support.commit_world import DEADLINE_SECONDS

MIB = 1024 * 1024


def wait_for(what: str, condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class Gate:
    """A sink's hook: commits wait while it is closed; a commit that comes is noted with the thread
    that makes it.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.threads: list[str] = []

    def __call__(self, operation: str, _keys: tuple[str, ...]) -> None:
        if operation == "commit":
            self.threads.append(threading.current_thread().name)
            if not self.open.is_set():
                self.waiting.set()
                assert self.open.wait(DEADLINE_SECONDS)


class Running:
    """A worker of an in-memory stream, on threads of its own and the real clock."""

    def __init__(self, gate: Gate, shards: int, **settings) -> None:
        clock = SystemClock()
        self.model = KinesisModel(clock)
        self.model.call("CreateStream", StreamName="orders", ShardCount=shards)
        shape = ConsumerSettings(application_name="orders", streams=("orders",), **settings)
        tables = [
            kind(clock=clock, exists=False)
            for kind in (
                InMemoryLeaseTable,
                InMemoryWorkerMetricsTable,
                InMemoryCoordinatorStateTable,
            )
        ]
        self.leases = tables[0]
        self.events: list[object] = []
        self.table = MemoryTable()
        kinesis, rng = InMemoryKinesis(self.model), random.Random(1)
        leader = LeaderCycle(shape, *tables, kinesis, clock, self.events.append, "w", rng=rng)
        sink = InMemorySink(self.table, clock=clock, faults=gate)
        parts = WorkerDependencies(
            "w",
            shape,
            *tables,
            kinesis,
            MemoryBatchWriter(self.table),
            sink,
            clock,
            rng,
            self.events.append,
            leader=leader,
        )
        self.worker = Worker(parts)
        self.stop = clock.signal()
        self._thread = threading.Thread(
            target=self.worker.run, args=(self.stop,), name="processing"
        )
        self._thread.start()

    def put(self, records: int, size: int) -> None:
        for number in range(records):
            self.model.call(
                "PutRecord", StreamName="orders", PartitionKey=f"k{number}", Data=bytes(size)
            )

    def batches(self) -> list[BatchCommitted]:
        return [event for event in self.events if isinstance(event, BatchCommitted)]

    def end(self, gate: Gate) -> None:
        gate.open.set()
        self.stop.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()


def test_a_commit_that_waits_holds_up_no_fetching_and_the_next_batch_is_bigger() -> None:
    gate = Gate()
    running = Running(
        gate,
        shards=4,
        retrieval={
            "idle_time_between_reads_in_millis": 200,
            "prefetch_max_bytes": MIB,
            "max_records": 10,
        },
        batch={"min_batch_interval_millis": 0, "max_batch_records": 60},
    )
    prefetcher, writers = running.worker.source._prefetcher, set()
    try:
        gate.open.clear()
        wait_for("the worker has its leases", lambda: len(running.worker.leases.held()) == 4)
        running.put(1, 10_000)
        wait_for("a commit waits", gate.waiting.is_set)
        assert running.batches() == []
        running.put(300, 10_000)
        wait_for("the buffer is full", lambda: prefetcher._bytes >= MIB)
        assert not gate.open.is_set()
        assert running.batches() == [], "all of that was read during one commit"
        assert prefetcher._bytes < MIB + 4 * 10 * 11_000, (
            "by the bytes of the setting, and one answer for each fetch thread"
        )
        counters = {lease.lease_key: lease.counter for lease in running.leases.list_leases().leases}
        wait_for(
            "leases are renewed",
            lambda: all(
                lease.counter > counters[lease.lease_key]
                for lease in running.leases.list_leases().leases
            ),
        )
        gate.open.set()
        running.leases.hook(
            lambda called, _key: (
                called == "UpdateItem"
                and writers.add(threading.current_thread().name.rpartition("-")[0])
            ),
            None,
        )
        wait_for(
            "everything is committed",
            lambda: sum(batch.records for batch in running.batches()) == 301,
        )
    finally:
        running.end(gate)
    first, second, *_ = sizes = [batch.records for batch in running.batches()]
    assert first < second == max(sizes) == 60, "the next batch is as big as a batch may be"
    assert set(gate.threads) == {"processing"}
    assert "leave" in writers, "leases are released on threads of their own"
    rows = running.table.rows()
    assert rows is not None
    assert rows.num_rows == 301

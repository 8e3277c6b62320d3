"""A worker of the interleaving explorer whose shards end: the production `Lifecycle`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.config import ConsumerSettings, InitialPosition
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leases.coordinator import CoordinatorStateTable, LeaderLock
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.stored_shards import SinkShards
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId
from kcl_pipeline.sinks.sink import Positions
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.batch_runner import LandStep
from kcl_pipeline.worker.commit import ProgressStore, ShardProgress
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.parents import ParentCheck, ParentRows
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.streams import LeaseStreams
from kcl_pipeline.worker.watchdog import Activity
from verification.interleavings.ranges import number_of
from verification.interleavings.stepping import SteppedSink, stepped_view
from verification.interleavings.world import STREAM

if TYPE_CHECKING:
    from verification.interleavings.lineage import LineageBench

DONE, PARENT, CHILD = (f"shardId-{number:012}" for number in range(3))
LOW, HIGH, ALL = HashKeyRange(0, 9), HashKeyRange(10, 19), HashKeyRange(0, 19)
_SHARDS: Final = (
    Shard(DONE, LOW, "1", "5"),
    Shard(PARENT, HIGH, "2", "5"),
    Shard(CHILD, ALL, "6", None, DONE, PARENT),
)
_CHILDREN: Final = {PARENT: (ChildShard(CHILD, (DONE, PARENT), ALL),), CHILD: ()}
RECORDS: Final = 1


@cache
def _settings(position: InitialPosition) -> ConsumerSettings:
    """Settings that delete finished leases at once, so that no worker depends on time."""
    sync = {"initial_position_in_stream": position, "completed_lease_cleanup_interval_millis": 0}
    return ConsumerSettings.model_validate(
        {"application_name": "app", "streams": ("orders",), "shard_sync": sync}
    )


def _java_leads() -> CoordinatorStateTable:
    """A Java worker leads: then the worker of a child creates the row of a deleted parent."""
    table = InMemoryCoordinatorStateTable()
    table.put_lock(LeaderLock("java", 120_000, "1"), replacing=None)
    return table


def _java_reports() -> WorkerMetricsTable:
    table = InMemoryWorkerMetricsTable()
    table.report(WorkerMetrics("java", 0))
    return table


class LineageKinesis:
    """The part of `KinesisClient` that the lifecycle of a consumer calls."""

    def list_shards(self, *_: object) -> tuple[Shard, ...]:
        """Return all shards."""
        return _SHARDS

    def resolve_stream(self, *_: object, **__: object) -> StreamId:
        """Return the stream."""
        return STREAM


class NoSource:
    """A batch source without prefetch: the process cuts its batches itself."""

    def begin(self, consumer: ShardConsumer) -> None:
        """Do nothing; no records are prefetched."""

    def end(self, lease_key: str) -> None:
        """Do nothing; no records are prefetched."""

    def state_of(self, lease_key: str) -> None:
        """Return None: no shard is read."""


class BlindParentCheck(ParentCheck):
    """A parent check that knows only the rows of a shard, as with a function as the sink."""

    def may_start(self, consumer: ShardProgress, rows: ParentRows, seen: Positions | None) -> bool:
        """See `ParentCheck`."""
        unseen = None if seen is None else Positions(seen.table_id)
        return super().may_start(consumer, rows, unseen)


class Never:
    """A stop signal that is never set."""

    def is_set(self) -> bool:
        """Return False."""
        return False


class LineageProcess:
    """A worker that runs a bounded number of passes.

    In each pass it discovers leases, advances its consumers and commits a batch. It waits for a
    change after a pass without one. It releases all leases at its end.
    """

    def __init__(self, bench: LineageBench, worker_id: str, number: int) -> None:
        scenario = bench.scenario
        table = stepped_view(bench.table, bench.turns, {} if number else scenario.lost_answers)
        settings = _settings(scenario.position)
        events, clock = bench.events.append, bench.clock
        self._bench = bench
        self._worker_id = worker_id
        self._leases = HeldLeases(table, worker_id, settings.lease, clock, events)
        sink = SteppedSink(bench.log, bench.turns, lambda *_: None)
        sink.ensure(pa.schema([("id", pa.int64())]))
        streams = LeaseStreams(settings)
        streams.open((STREAM,))
        kinesis = cast("KinesisClient", LineageKinesis())
        parts = WorkerDependencies(
            worker_id=worker_id,
            settings=settings,
            lease_table=table,
            worker_table=_java_reports(),
            coordinator_table=_java_leads(),
            kinesis=kinesis,
            writer=bench.writer,
            sink=sink,
            clock=clock,
            rng=random.Random(number),
            events=events,
        )
        source = cast("BatchSource", NoSource())
        stored = SinkShards(lambda: sink) if scenario.log_seen else None
        self._lifecycle = Lifecycle(
            parts,
            self._leases,
            source,
            lambda lineage: ProgressStore(
                self._leases, sink, lineage, clock, events, rng=random.Random(number)
            ),
            stored,
            streams,
            lambda: None,
            identity=StreamIdentityCheck(kinesis, clock),
        )
        if not scenario.log_seen:
            of = streams.shard_sync_of
            self._lifecycle.parents = BlindParentCheck(parts, self._leases, of, None)
        self._commit = LandStep(
            self._lifecycle.progress, bench.writer.write, clock, events, worker_id, Activity(clock)
        )

    def holds(self, key: str, worker_id: str) -> bool:
        """Whether this process has the worker id and believes that it holds the lease."""
        return self._worker_id == worker_id and self._leases.get(key) is not None

    def run(self) -> None:
        """Run passes until the bound is reached or no work is left for this worker."""
        for _ in range(self._bench.scenario.passes):
            if not self._has_work():
                if self._bench.turns.actor is None:
                    break
                self._bench.turns.wait_for(self._has_work)
            self._pass()
        self._lifecycle.release_all()

    def _has_work(self) -> bool:
        rows = {lease.lease_key: lease for lease in self._bench.rows()}
        held = {held.lease_key for held in self._leases.held()}
        if any(
            row.owner == self._worker_id and not row.ended and row.lease_key not in held
            for row in rows.values()
        ):
            return True
        return any(self._can_go_on(consumer, rows) for consumer in self._consumers())

    def _can_go_on(self, consumer: ShardConsumer, rows: Mapping[str, Lease]) -> bool:
        match consumer.state:
            case ConsumerState.BLOCKED:
                parents = [rows.get(one) for one in consumer.held.lease.parent_shard_ids]
                return None in parents or all(row is not None and row.ended for row in parents)
            case ConsumerState.READING:
                return number_of(consumer.committed or TRIM_HORIZON) < RECORDS
            case state:
                return state is not ConsumerState.ENDED

    def _consumers(self) -> Sequence[ShardConsumer]:
        return list(self._lifecycle.consumers.values())

    def _pass(self) -> None:
        self._leases.discover()
        self._lifecycle.sync_with_leases()
        for consumer in self._consumers():
            consumer.due = 0.0
        self._lifecycle.advance(cast("StopSignal", Never()))
        for consumer in self._consumers():
            if consumer.state is ConsumerState.READING:
                self._read(consumer)

    def _read(self, consumer: ShardConsumer) -> None:
        """Commit the records of the shard, and mark its end as the worker's processing does."""
        key, after = consumer.lease_key, consumer.committed or TRIM_HORIZON
        if number_of(after) < RECORDS:
            part = Chunk(key, NO_RECORDS, after, Position(str(RECORDS)), 0)
            batch = Batch(self._worker_id, (part,), NO_RECORDS)
            done = self._commit.run(batch, {key: consumer})
            if done is None:
                consumer.is_refused = True
                self._lifecycle.restart(consumer)
                return
        consumer.reach_end(_CHILDREN[key], shard_gone=False)

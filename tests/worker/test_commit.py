"""A batch of many leases: its rows are written beside each other, each outcome is answered on its
own, and reading goes on while a commit waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from kcl_pipeline.batch import Batch, CommitEntry, ShardRange, TxnVersions
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, LeaseSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    CommitStoppedError,
    InvalidRequestError,
    SinkError,
    TableMismatchError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import AwsTrouble, BatchCommitted, BatchRefused, PendingResolved
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.store import serial_map
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.batch_runner import CommitSteps
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker

DEADLINE_SECONDS = 60
KEYS = tuple(f"shardId-{number:012d}" for number in range(12))
MIB = 1024 * 1024
NO_RECORDS = pa.table({"shard_id": pa.array([], pa.string())})


class World:
    """One worker's committer over `KEYS`; `trouble` maps a lease key to the errors that its next
    writes meet.
    """

    def __init__(self, map_calls=serial_map, beside=None):
        self.clock = VirtualClock()
        self.table = InMemoryLeaseTable("app", clock=self.clock)
        for key in KEYS:
            self.table.create_lease(Lease(key, TRIM_HORIZON))
            self.table.assign(self.table.get(key), "w")
        self.events: list[object] = []
        self.leases = HeldLeases(self.table, "w", LeaseSettings(), self.clock, self.events.append)
        self.rows = MemoryTable()
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.sink = InMemorySink(
            self.rows,
            clock=self.clock,
            faults=lambda operation, keys: self.asked.append((operation, keys)),
        )
        self.writer = MemoryBatchWriter(self.rows)
        self.committer = TwoPhaseCommit(
            self.leases,
            self.sink,
            self.clock,
            self.events.append,
            "w",
            map=map_calls,
            beside=beside,
        )
        self.steps = self.steps_of(self.committer)
        self.consumers = {
            held.lease_key: ShardConsumer(held, StreamId("s")) for held in self.leases.discover()
        }
        for consumer in self.consumers.values():
            self.committer.resolve(consumer)
        self.trouble: dict[str, list[Exception]] = {}
        self.writes: list[str] = []
        self.table.hook(self._before, None)

    def steps_of(self, protocol):
        return CommitSteps(protocol, self.writer, self.leases, self.clock, self.events.append, "w")

    def _before(self, called: str, key: str) -> None:
        if called == "UpdateItem":
            self.writes.append(key)
            if self.trouble.get(key):
                raise self.trouble[key].pop(0)

    def batch(self, through: int) -> Batch:
        ranges = tuple(
            ShardRange(key, consumer.committed, Position(str(through)))
            for key, consumer in self.consumers.items()
        )
        return Batch(f"b{through}", ranges, NO_RECORDS)

    def commit(self, through: int):
        batch = self.batch(through)
        return self.steps.run(batch, self.consumers, self.writer.write(batch))

    def pending(self) -> set[Position | None]:
        return {self.table.get(key).pending_checkpoint for key in KEYS}


@pytest.fixture(params=["serial", "threads"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "serial":
        yield World()
        return
    with ThreadPoolExecutor(4) as pool:
        yield World(lambda call, items: list(pool.map(call, items)))


def test_the_rows_of_a_batch_are_written_beside_each_other() -> None:
    meeting = threading.Barrier(len(KEYS))
    with ThreadPoolExecutor(len(KEYS)) as pool:
        world = World(lambda call, items: list(pool.map(call, items)))
        world.table.hook(
            lambda called, _key: called == "UpdateItem" and meeting.wait(DEADLINE_SECONDS), None
        )
        done = world.commit(5)
        assert done is not None, "each write waited until all had begun"
        assert done.lease_keys == KEYS
        for consumer in world.consumers.values():
            assert (consumer.committed, consumer.prepared) == (Position("5"), None)
        assert world.commit(9) is not None
    assert {world.rows.numbers(key).data for key in KEYS} == {
        world.table.get(key).counter for key in KEYS
    }
    assert {world.table.get(key).checkpoint for key in KEYS} == {Position("5")}, (
        "the checkpoint rode on the next prepare"
    )
    assert [entry.data.keys() for entry in world.rows.log[1:]] == [set(KEYS), set(KEYS)]


def test_each_lease_has_the_outcome_of_its_own_write(world: World) -> None:
    lost, unreadable, too_large, throttled, unsure = KEYS[1], KEYS[4], KEYS[5], KEYS[7], KEYS[9]
    taken = world.table.view()
    taken.assign(taken.get(lost), "other")
    world.trouble = {
        unreadable: [UnreadableRowError("no counter")],
        too_large: [
            InvalidRequestError("Item size to update has exceeded the maximum allowed size")
        ],
        throttled: [ThrottledError("slow down", operation="UpdateItem")] * 2,
        unsure: [UnavailableError("no answer", operation="UpdateItem")],
    }
    done = world.commit(5)
    assert done is not None
    assert set(done.lease_keys) == set(world.consumers) == set(KEYS) - {lost, unreadable, too_large}
    assert {held.lease_key for held in world.leases.held()} == set(world.consumers)
    assert [event.lease_keys for event in world.events if isinstance(event, BatchRefused)] == [
        (lost, unreadable, too_large)
    ]
    assert (
        sorted(event.operation for event in world.events if isinstance(event, AwsTrouble))
        == ["UpdateItem"] * 3
    )
    assert {key: world.writes.count(key) for key in (*KEYS[:1], throttled, unsure)} == {
        KEYS[0]: 1,
        throttled: 3,
        unsure: 2,
    }, "only what failed is tried again"
    assert {world.rows.numbers(key).data for key in (lost, unreadable, too_large)} == {None}


class Refusing(InMemorySink):
    """A sink whose commits all fail; `stop` is set while the first one does."""

    def __init__(self, world: World, stop: threading.Event) -> None:
        super().__init__(world.rows, clock=world.clock)
        self.stop, self.commits = stop, 0

    def commit(self, written, entries):
        self.commits += 1
        self.stop.set()
        raise SinkError("int too large to convert")


@pytest.mark.parametrize("where", ["commit", "prepare"])
def test_a_stop_ends_the_attempts_of_a_batch(where: str) -> None:
    """Without it a worker went on for 117 seconds, 60 attempts of the same failure."""
    world, stop = World(), threading.Event()
    sink = Refusing(world, stop) if where == "commit" else world.sink
    committer = TwoPhaseCommit(world.leases, sink, world.clock, world.events.append, "w", stop=stop)
    if where == "prepare":
        stop.set()
        world.trouble = {KEYS[3]: [ThrottledError("slow down", operation="UpdateItem")] * 9}
    batch = world.batch(5)
    with pytest.raises(CommitStoppedError, match=r"batch b5 was not .*; the worker stops"):
        world.steps_of(committer).run(batch, world.consumers, world.writer.write(batch))
    assert world.clock.monotonic() == 0.0
    assert set(world.consumers) == set(KEYS), "no lease is dropped: they are released in good order"
    if where == "commit":
        assert sink.commits == 1
        assert world.pending() == {Position("5")}, "the next owner finds the batch"
    assert {world.rows.numbers(key).data for key in KEYS} == {None}


def test_a_row_that_stays_throttled_is_lost_with_its_lease_and_the_others_land(
    world: World,
) -> None:
    world.trouble = {KEYS[3]: [ThrottledError("slow down", operation="UpdateItem")] * 1000}
    sleep = world.clock.sleep

    def others_are_renewed(seconds: float) -> None:
        sleep(seconds)
        for consumer in world.consumers.values():
            if consumer.lease_key != KEYS[3]:
                consumer.held.renewed_at = world.clock.monotonic()

    world.clock.sleep = others_are_renewed  # type: ignore[method-assign]
    done = world.commit(5)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS) - {KEYS[3]}
    assert world.table.view().get(KEYS[3]).pending_checkpoint is None
    assert 3 < world.writes.count(KEYS[3]) < 60
    assert world.clock.monotonic() < 2 * LeaseSettings().failover_time_millis / 1000


def test_an_error_is_raised_when_all_have_been_tried(world: World) -> None:
    world.trouble = {KEYS[0]: [AccessDeniedError("dynamodb:UpdateItem is missing")]}
    with pytest.raises(AccessDeniedError, match="is missing"):
        world.commit(5)
    assert sorted(world.writes) == sorted(KEYS), "none is still under way"
    assert world.consumers[KEYS[0]].prepared is None
    assert {
        consumer.prepared[0]
        for key, consumer in world.consumers.items()
        if key != KEYS[0] and consumer.prepared
    } == {Position("5")}
    before = list(world.writes)
    assert world.commit(5) is not None
    assert world.writes == [*before, KEYS[0]], (
        "what is prepared for this range is not prepared again"
    )


@pytest.fixture
def beside() -> Iterator[World]:
    """A world whose table exists, and whose batches are prepared while they are written."""
    with ThreadPoolExecutor(1) as thread:
        world = World(beside=thread)
        batch = world.batch(5)
        with world.committer.preparing(batch, world.consumers):
            time.sleep(0)
        assert world.writes == [], "a fence would have no log to stand in"
        assert world.steps.run(batch, world.consumers, world.writer.write(batch)) is not None
        world.writes.clear()
        yield world


def test_a_table_that_takes_no_batch_is_not_tried_again_and_again(world: World) -> None:
    assert world.commit(1) is not None
    world.rows.schema = pa.schema([("other", pa.int64())])
    world.asked.clear()
    before = world.clock.monotonic()
    with pytest.raises(TableMismatchError, match="shard_id"):
        world.commit(2)
    assert [operation for operation, _ in world.asked] == ["commit"]
    assert world.clock.monotonic() - before < 1
    assert [event for event in world.events if isinstance(event, AwsTrouble)] == []


def test_a_number_that_no_log_can_hold_costs_its_lease_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the row's counter was allowed to be."""
    first, rest = KEYS[0], set(KEYS[1:])
    prepare = world.leases.prepare

    def too_large(held: Held, **options: Any) -> int:
        return prepare(held, **options) + (2**63 if held.lease_key == first else 0)

    monkeypatch.setattr(world.leases, "prepare", too_large)
    before = world.clock.monotonic()
    done = world.commit(1)
    assert done is not None
    assert set(done.lease_keys) == rest
    assert world.clock.monotonic() - before < 1
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (first,)
    assert "number" in refused.reason


def test_a_batch_is_prepared_while_it_is_written(beside: World) -> None:
    batch = beside.batch(9)
    with beside.committer.preparing(batch, beside.consumers):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while beside.pending() != {Position("9")}:
            assert time.monotonic() < deadline, (
                "the rows are written although the files are not there yet"
            )
            time.sleep(0.001)
        written = beside.writer.write(batch)
    done = beside.steps.run(batch, beside.consumers, written)
    assert done is not None
    assert done.lease_keys == KEYS
    assert sorted(beside.writes) == sorted(KEYS), "one write for each row"
    assert {beside.rows.numbers(key).data for key in KEYS} == {
        beside.table.get(key).counter for key in KEYS
    }


def test_a_batch_that_was_prepared_and_never_written_is_settled_and_read_again(
    beside: World,
) -> None:
    batch = beside.batch(9)
    with (
        pytest.raises(SinkError, match="disk"),
        beside.committer.preparing(batch, beside.consumers),
    ):
        raise SinkError("the disk is full")
    assert beside.pending() == {Position("9")}
    for consumer in beside.consumers.values():
        assert beside.committer.resolve(consumer) == Position("5")
    assert {event.landed for event in beside.events if isinstance(event, PendingResolved)} == {
        False
    }
    assert beside.commit(8) is not None
    assert {consumer.committed for consumer in beside.consumers.values()} == {Position("8")}


def test_a_lease_that_is_lost_while_its_batch_is_written_is_left_out_of_the_commit(
    beside: World,
) -> None:
    batch = beside.batch(9)
    taken = beside.table.view()
    taken.assign(taken.get(KEYS[2]), "other")
    beside.trouble = {KEYS[5]: [ThrottledError("slow down", operation="UpdateItem")]}
    with beside.committer.preparing(batch, beside.consumers):
        written = beside.writer.write(batch)
    done = beside.steps.run(batch, beside.consumers, written)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS) - {KEYS[2]}
    assert [event.lease_keys for event in beside.events if isinstance(event, BatchRefused)] == [
        (KEYS[2],)
    ]


def failing_commit(world: World, *, landed: bool, lost: str) -> list[tuple[str, ...]]:
    """The first commit fails, after it has landed or not, and a lease is lost meanwhile; returns
    the lease keys of every attempt.
    """
    commit, attempts = world.sink.commit, list[tuple[str, ...]]()

    def fail_once(written, entries):
        attempts.append(tuple(entry.lease_key for entry in entries))
        if len(attempts) > 1:
            return commit(written, entries)
        if landed:
            commit(written, entries)
        world.leases.drop(world.consumers[lost].held, "it was not renewed in time")
        raise SinkError("the answer was lost")

    world.sink.commit = fail_once
    return attempts


def test_a_batch_whose_lease_is_lost_is_not_committed_again_after_a_failure() -> None:
    """A sink without a log has no fence: it would get rows that the next owner has written, or
    rows that come out of order (seed 61200145).
    """
    world = World()
    attempts = failing_commit(world, landed=False, lost=KEYS[0])
    done = world.commit(100)
    assert attempts == [KEYS, KEYS[1:]]
    assert done.lease_keys == KEYS[1:]
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (KEYS[0],)


def test_a_commit_that_landed_before_its_lease_was_lost_has_landed() -> None:
    world = World()
    attempts = failing_commit(world, landed=True, lost=KEYS[0])
    assert world.commit(100).lease_keys == KEYS
    assert attempts == [KEYS]


def test_many_takeovers_read_the_tables_end_once(world: World) -> None:
    """Some batches of the old owner landed, some did not, and one lands between the look and the
    settling.
    """
    assert world.commit(5) is not None
    batch = Batch(
        "b9", tuple(ShardRange(key, Position("5"), Position("9")) for key in KEYS), NO_RECORDS
    )
    assert world.committer._prepare_all(batch, world.consumers) == {}
    entries = [
        CommitEntry(key, c.prepared[1], c.versions)
        for key, c in world.consumers.items()
        if c.prepared
    ]
    old, landed, late = InMemorySink(world.rows, clock=world.clock), entries[:4], entries[4]
    assert old.commit(world.writer.write(batch), landed).version is not None
    taker = HeldLeases(world.table.view(), "w", LeaseSettings(), world.clock, world.events.append)
    consumers = [ShardConsumer(held, StreamId("s")) for held in taker.discover()]
    committer = TwoPhaseCommit(taker, world.sink, world.clock, world.events.append, "w")
    world.asked.clear()
    seen = committer.look_up(consumers)
    assert world.asked == [("numbers", KEYS)]
    assert old.commit(world.writer.write(batch), [late]).version is not None
    positions = {
        consumer.lease_key: committer.resolve(consumer, seen[consumer.lease_key])
        for consumer in consumers
    }
    assert positions == {key: Position("9" if key in KEYS[:5] else "5") for key in KEYS}
    assert [event.landed for event in world.events if isinstance(event, PendingResolved)] == [
        True
    ] * 5 + [False] * 7
    assert [keys for operation, keys in world.asked[1:] if operation == "numbers"] == [
        (KEYS[4],)
    ], "the one whose fence was refused"
    for consumer in consumers:
        assert consumer.versions == world.rows.numbers(consumer.lease_key) != TxnVersions()
    for entry in entries[5:]:
        assert old.commit(world.writer.write(batch), [entry]).version is None, "fenced"


def test_a_sink_that_cannot_be_looked_at_is_asked_by_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_keys: object) -> None:
        raise SinkError("no route to the store")

    with monkeypatch.context() as patched:
        patched.setattr(world.sink, "numbers", broken)
        assert world.committer.look_up(world.consumers.values()) == {}
    assert [event.error for event in world.events if isinstance(event, AwsTrouble)] == [
        "no route to the store"
    ]
    assert world.committer.look_up([]) == {}


# -- a whole worker on its threads
# ----------------------------------------------------------------------------


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
        self.worker = Worker("w", parts)
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
        wait_for("the buffer is full", lambda: prefetcher.buffered_bytes >= MIB)
        assert not gate.open.is_set()
        assert running.batches() == [], "all of that was read during one commit"
        assert prefetcher.buffered_bytes < MIB + 4 * 10 * 11_000, (
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
                and writers.add(threading.current_thread().name.rpartition("_")[0])
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
    assert "commit" in writers, "rows are prepared on threads of their own"
    rows = running.table.rows()
    assert rows is not None
    assert rows.num_rows == 301

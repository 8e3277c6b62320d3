"""A function as the sink gets every record at least once, and only what a kill leaves repeats."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import HangStep, ShardPaused, ShardResumed, WorkerHung
from kcl_pipeline.foreach import BatchIdentity, ForeachArrow, ForeachArrowSink
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.summary import StopReason
from kcl_pipeline.worker.worker import Worker
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered


class KilledError(BaseException):
    """The process ends: nothing handles it."""


class Store:
    """The user's store. `kills` is called with each batch after it was stored."""

    def __init__(self):
        self.calls: list[tuple[list[bytes], BatchIdentity]] = []
        self.fails = lambda _data: False
        self.kills = lambda: False

    def __call__(self, rows, identity):
        data = rows["data"].to_pylist()
        if self.fails(data):
            raise ConnectionError("the store is down")
        self.calls.append((data, identity))
        if self.kills():
            raise KilledError

    def counts(self):
        return Counter(data for calls, _ in self.calls for data in calls)

    def data(self):
        return sorted(self.counts())


@pytest.fixture
def store():
    return Store()


def world_of(store, shards=2, **settings):
    return World(shards=shards, buffered=True, function=store, **settings)


def rows_of(world):
    return {lease.lease_key: lease for lease in world.leases.list_leases().leases}


def test_the_checkpoint_follows_each_batch(store):
    world = world_of(store, shards=1)
    world.put(*numbered(10))
    world.run(5)
    assert [data for data, _ in store.calls] == [numbered(10)]
    (row,) = rows_of(world).values()
    ((part,),) = (identity.ranges for _, identity in store.calls)
    assert (part.after, part.through) == (TRIM_HORIZON, row.checkpoint)
    world.put(*numbered(5, "s"))
    world.run(5)
    (_, first), (_, second) = store.calls
    assert second.ranges[0].after == first.ranges[0].through
    assert first.key == BatchIdentity(first.ranges).key != second.key


def test_the_shards_of_a_function_that_fails_pause_and_are_tried_again(store):
    world = world_of(store)
    world.run(5)
    store.fails = lambda _data: True
    world.put(*numbered(20))
    world.run(100)
    assert len(world.worker.paused()) == 2
    reasons = {event.reason for event in world.of(ShardPaused)}
    assert {reason.partition(" (")[0] for reason in reasons} == {
        "the function of the sink failed: ConnectionError: the store is down"
    }
    store.fails = lambda _data: False
    world.run(70)
    assert store.counts() == Counter(numbered(20)), "nothing is lost, nothing is repeated"
    assert len(world.of(ShardResumed)) == 2
    assert world.worker.paused() == {}


def test_a_shard_that_the_function_fails_on_does_not_stop_the_others(store):
    world = world_of(store, shards=3)
    world.run(5)
    store.fails = lambda data: b"r0007" in data
    world.put(*numbered(60))
    world.run(10)
    (paused,) = world.worker.paused()
    missing = set(numbered(60)) - set(store.counts())
    assert b"r0007" in missing
    assert set(store.counts().values()) == {1}, "the batch of all shards has not stored anything"
    world.put(*numbered(60, "s"))
    world.run(10)
    assert set(world.worker.paused()) == {paused}
    store.fails = lambda _data: False
    world.run(70)
    assert store.data() == sorted(world.sent)
    assert set(store.counts().values()) == {1}


def test_a_function_that_calls_exit_pauses_its_shards(store):
    def exits(data):
        if data:
            raise SystemExit(0)

    store.fails = exits
    world = world_of(store)
    world.put(*numbered(20))
    world.run(10)
    assert len(world.worker.paused()) == 2
    assert "the function of the sink failed: SystemExit: 0" in world.of(ShardPaused)[0].reason


def test_a_stop_ends_the_search_for_the_shards_that_fail(store):
    """The function is not called for the rest of the shards. The worker runs on real threads."""
    clock, tries = SystemClock(), []
    stop, model = clock.signal(), KinesisModel(clock)
    model.call("CreateStream", StreamName="orders", ShardCount=8)
    settings = ConsumerSettings(
        application_name="orders",
        streams=("orders",),
        # The first batch waits for the records of all shards: a smaller one is no search
        batch={"min_batch_interval_millis": 20_000, "max_batch_records": 80},
    )
    kinds = InMemoryLeaseTable, InMemoryWorkerMetricsTable, InMemoryCoordinatorStateTable
    tables = [kind(clock=clock, exists=False) for kind in kinds]

    def fails(data):
        tries.append(data)
        is_search = len(data) < len(tries[0])
        if is_search and len(tries) >= 3:
            stop.set()
        return True

    store.fails = fails
    for number in range(80):
        model.call(
            "PutRecord", StreamName="orders", PartitionKey=f"k{number}", Data=f"{number}".encode()
        )
    kinesis, both = InMemoryKinesis(model), ForeachArrow(ForeachArrowSink(store))
    rng, events = random.Random(1), []
    leader = LeaderCycle(settings, *tables, kinesis, clock, events.append, "w", rng=rng)
    parts = WorkerDependencies(
        "w", settings, *tables, kinesis, both, both, clock, rng, events.append, leader=leader
    )
    assert Worker(parts).run(stop).reason is StopReason.STOPPED
    assert stop.is_set()
    assert len(tries[0]) == 80
    assert len(tries[-1]) < len(tries[0])
    assert len(tries) < 8, "it is not called for the rest of the shards"
    assert {lease.owner for lease in tables[0].list_leases().leases} == {None}
    assert store.calls == []


def test_a_function_that_hangs_is_reported(store):
    began, release = threading.Event(), threading.Event()

    def hangs(rows, _identity):
        if rows.num_rows:
            began.set()
            assert release.wait(60)

    world = world_of(hangs, shards=1, worker={"hung_after_millis": 60_000})
    world.run(5)
    world.put(*numbered(3))
    thread = None
    for _ in range(200):
        world.worker.lease_tick()
        world.worker.fetch_tick()
        world.clock.advance(0.05)
        thread = threading.Thread(target=world.worker.process_tick, daemon=True)
        thread.start()
        while thread.is_alive() and not began.is_set():
            thread.join(0.005)
        if began.is_set():
            break
    for _ in range(700):
        world.worker.lease_tick()
        world.worker.fetch_tick()
        world.clock.advance(0.1)
    (event,) = world.of(WorkerHung)
    assert event.step is HangStep.COMMITTING
    release.set()
    thread.join(30)
    assert not thread.is_alive()
    world.run(1)
    (row,) = rows_of(world).values()
    assert row.checkpoint != TRIM_HORIZON


class Fleet:
    """Workers of one application that are killed, stopped and started, and leases that move."""

    def __init__(self, seed, store):
        self.rng = random.Random(seed)
        self.store = store
        self.world = world_of(store, shards=4)
        self.world.run(5)
        self.workers = {"w-1": self.world.worker}
        self.number = 1
        self.at_risk = 0
        store.kills = self._kills

    def _kills(self):
        if self.killing:
            self.at_risk += len(self.store.calls[-1][0])
        return self.killing

    def tick(self, seconds=0.05):
        for name, worker in list(self.workers.items()):
            try:
                worker.lease_tick()
                worker.lead_tick()
                worker.fetch_tick()
                worker.process_tick()
            except KilledError:
                del self.workers[name]
                self.killing = False
        self.world.clock.advance(seconds)

    def start(self):
        self.number += 1
        worker = self.world.make_worker(f"w-{self.number}")
        worker.start_up()
        self.workers[f"w-{self.number}"] = worker

    def stop(self):
        name = self.rng.choice(sorted(self.workers))
        worker = self.workers.pop(name)
        worker.shut_down(Background(self.world.clock), StopReason.STOPPED)

    def move(self):
        lease = self.rng.choice(sorted(rows_of(self.world).values(), key=lambda x: x.lease_key))
        to = self.rng.choice(sorted(self.workers))
        if lease.owner is not None and lease.owner != to and lease.checkpoint_owner is None:
            self.world.leases.view().initiate_handoff(lease, to)

    killing = False

    def run(self, incidents):
        for number in range(200):
            if number % 3 == 0:
                self.world.put(*numbered(3, f"{number:03}-"))
            if number % 25 == 0:
                incident = self.rng.choice(incidents)
                if incident == "kill" and len(self.workers) > 1:
                    self.killing = True
                elif incident == "stop" and len(self.workers) > 1:
                    self.stop()
                elif incident == "move":
                    self.move()
                if len(self.workers) < 3:
                    self.start()
            self.tick()
        for _ in range(4_000):
            if len(self.store.counts()) == len(self.world.sent):
                return
            self.tick()
        raise AssertionError("not every record arrived")


@pytest.mark.parametrize("seed", shortened(range(4), lambda seed: seed < 2))
def test_kills_stops_and_moves_lose_nothing(store, seed):
    fleet = Fleet(seed, store)
    fleet.run(["kill", "stop", "move"])
    counts = store.counts()
    assert set(counts) == set(fleet.world.sent)
    repeats = sum(counts.values()) - len(counts)
    assert repeats <= fleet.at_risk, "only the batch of a killed worker repeats"
    follow_each_other(store)


@pytest.mark.parametrize("seed", shortened(range(2), lambda seed: seed < 1))
def test_stops_and_moves_repeat_nothing(store, seed):
    fleet = Fleet(seed, store)
    fleet.run(["stop", "move"])
    assert store.counts() == Counter(fleet.world.sent)


def follow_each_other(store):
    """No range begins after the end of what was passed before: a store can skip what it has."""
    through = {}
    for _, identity in store.calls:
        for part in identity.ranges:
            at = through.get(part.lease_key, part.after)
            assert part.after <= at
            through[part.lease_key] = max(at, part.through)

"""A worker leads, or takes leases without a leader, as configured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import LeaderElected, LeaseMoved
from kcl_pipeline.leader.kcl2 import TAKE_AND_STEAL
from kcl_pipeline.leases.row import LEADER_KEY
from kcl_pipeline.worker.worker import Worker
from tests.support.worker_world import LEAD_SECONDS, World, numbered


class Fleet(World):
    """Two workers. The test decides which of them run."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.crew = {"w-1": self.worker}
        self.lead_at: dict[str, float] = {}

    def join(self, name: str, *, leads: bool = True) -> Worker:
        worker = self.make_worker(name)
        if not leads:
            worker = Worker(replace(worker._dependencies, leader=None))
        worker.start_up()
        self.crew[name] = worker
        return worker

    def run(self, seconds=10.0, step=0.2):
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            for name, worker in self.crew.items():
                worker.lease_tick()
                now = self.clock.monotonic()
                if now >= self.lead_at.get(name, now):
                    self.lead_at[name] = now + max(worker.lead_tick(), LEAD_SECONDS)
                worker.fetch_tick()
                worker.process_tick()
            self.clock.advance(step)

    def breaks(self) -> None:
        """From now on nobody can read or write the leader lock."""

        def fails(operation: str, key: str) -> None:
            if key == LEADER_KEY:
                raise UnavailableError(f"{operation} failed", code="x", operation=operation)

        self.coordinator.store.before_call = fails

    def heals(self) -> None:
        self.coordinator.store.before_call = lambda _operation, _key: None

    def owners(self) -> Counter[str | None]:
        return Counter(lease.owner for lease in self.leases.list_leases().leases)


def test_in_a_leaderless_application_workers_take_leases_and_one_creates_them():
    fleet = Fleet(shards=4, coordination="leaderless")
    fleet.put(*numbered(20))
    fleet.run(5)
    assert fleet.owners() == {"w-1": 4}
    fleet.join("w-2")
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "w-2": 2}
    moved = fleet.of(LeaseMoved)
    fleet.put(*numbered(20, "later"))
    fleet.run(60)
    assert fleet.of(LeaseMoved) == moved
    assert fleet.data() == sorted(fleet.sent)
    assert {one.owner_name for one in fleet.of(LeaderElected)} <= {"w-1", "w-2"}


def test_a_split_is_read_without_a_leader_that_assigns():
    fleet = Fleet(shards=1, coordination="leaderless")
    fleet.put(*numbered(5))
    fleet.run(5)
    fleet.model.split("orders", "shardId-000000000000")
    fleet.clock.advance(1)
    fleet.put(*numbered(20, "child"))
    fleet.run(40)
    assert fleet.data() == sorted(fleet.sent)


def test_any_worker_of_a_leaderless_application_can_get_the_lock():
    fleet = Fleet(shards=4, coordination="leaderless")
    fleet.run(5)
    fleet.join("w-2")
    fleet.run(60)
    first = fleet.coordinator.read_lock()
    assert first is not None
    (other,) = {"w-1", "w-2"} - {first.owner_name}
    del fleet.crew[first.owner_name]  # as kill -9
    fleet.run(60)
    now = fleet.coordinator.read_lock()
    assert now is not None
    assert now.owner_name == other


def test_the_leader_of_a_leaderless_application_assigns_nothing():
    fleet = Fleet(shards=4, coordination="leaderless")
    sensor = fleet.make_leader("sensor")
    fleet.clock.advance(60)
    report = sensor.run_once()
    assert report.led
    assert len(report.leases) == 4
    assert report.plan is not None
    assert report.plan.strategy == TAKE_AND_STEAL
    assert {lease.owner for lease in report.leases} == {None}


def test_while_nobody_can_lead_no_lease_is_assigned_and_then_all_are():
    fleet = Fleet(shards=4)
    fleet.put(*numbered(8))
    fleet.run(5)
    fleet.join("w-2")
    fleet.run(20)
    assert fleet.owners() == {"w-1": 2, "w-2": 2}
    fleet.breaks()
    del fleet.crew["w-2"]  # as kill -9
    fleet.run(200)
    assert fleet.owners() == {"w-1": 2, "w-2": 2}, "workers take no leases from each other"
    fleet.put(*numbered(20, "alone"))
    fleet.heals()
    fleet.run(60)
    assert fleet.owners() == {"w-1": 4}
    assert fleet.data() == sorted(fleet.sent)

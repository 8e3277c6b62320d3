"""Read the state of an application, and look at it twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AccessDeniedError, ThrottledError
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import Position
from kcl_pipeline.status.findings import FindingLevel, findings_of
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import READS, look_twice, read_snapshot
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


class World:
    """An application in memory with two leases, two workers and a leader."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.tables = SimpleNamespace(
            lease=InMemoryLeaseTable("orders", clock=self.clock),
            workers=InMemoryWorkerMetricsTable(clock=self.clock),
            coordinator=InMemoryCoordinatorStateTable(clock=self.clock),
        )
        for number in range(2):
            lease = Lease(f"shardId-{number}", Position(str(100 + number)), owner=f"w-{number}")
            assert create_lease(self.tables.lease, lease)
            self.report(number)
        lock = LeaderLock("w-0", 30_000, "v")
        assert self.tables.coordinator.put_lock(lock, replacing=None)

    def report(self, number: int) -> None:
        row = WorkerMetrics(f"w-{number}", int(self.clock.wall()), {"C": (1.0,)}, {"C": (80,)})
        self.tables.workers.report(row)

    def read(self):
        return read_snapshot(self.tables, SETTINGS, self.clock)

    def beat(self, *numbers: int) -> None:
        """The leader renews its lock, and these workers report and renew their leases."""
        lock = self.tables.coordinator.read_lock()
        assert self.tables.coordinator.heartbeat_lock(lock, f"{lock.version}+")
        for number in numbers:
            self.report(number)
            assert self.tables.lease.renew(self.tables.lease.get(f"shardId-{number}"))


def faults(snapshot) -> set[str]:
    return {one.name for one in findings_of(snapshot, CheckLimits()) if one.is_fault}


def twice(world: World, between, seconds: float = 31.0):
    looks = []

    def look():
        if looks:
            between()
        looks.append(world.read())
        return looks[-1]

    return look_twice(look, world.clock, seconds)


def test_a_snapshot_has_all_parts_in_order():
    found = World().read()
    assert [lease.lease_key for lease in found.leases] == ["shardId-0", "shardId-1"]
    assert [worker.worker_id for worker in found.workers] == ["w-0", "w-1"]
    assert (found.lock.owner_name, found.pause, found.failures) == ("w-0", None, ())


def test_two_looks_find_who_lives():
    world = World()
    assert faults(twice(world, lambda: world.beat(0, 1))) == set()
    dead = twice(world, lambda: world.beat(0))
    assert faults(dead) == {"lease_without_worker", "worker_silent"}
    assert dead.observed.waits == {"shardId-1": 31.0}
    assert dict(dead.silent) == {"w-1": 31.0}


def test_two_looks_find_a_leader_that_does_not_renew_its_lock():
    world = World()

    def go_on() -> None:
        for number in range(2):
            world.report(number)
            assert world.tables.lease.renew(world.tables.lease.get(f"shardId-{number}"))

    found = findings_of(twice(world, go_on), CheckLimits())
    (leader,) = [one for one in found if one.is_fault]
    assert (leader.name, leader.level) == ("no_leader", FindingLevel.PROBLEM)
    assert "w-0 has not renewed the leader lock for 31 s" in leader.sentence


def test_a_drain_request_is_not_a_sign_of_life():
    world = World()

    def drain() -> None:
        world.beat(0)
        assert world.tables.workers.request_drain("w-1")

    assert dict(twice(world, drain).silent) == {"w-1": 31.0}


def test_a_java_worker_is_not_judged_within_its_period():
    """It writes its row once in 30 s."""
    world = World()
    found = twice(world, lambda: world.beat(0), seconds=11.0)
    assert dict(found.silent) == {}
    assert faults(found) == {"lease_without_worker"}, "its lease is renewed more often"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ThrottledError("rate exceeded", operation="Scan"), "throttled"),
        (AccessDeniedError("not authorized", operation="Scan"), "no_permission"),
    ],
)
def test_what_cannot_be_read_is_a_finding_and_the_rest_is_shown(error, name):
    world = World()

    def refuse(operation: str, key: str) -> None:
        raise error

    world.tables.lease.hook(refuse, None)
    found = world.read()
    assert [one.part for one in found.failures] == ["the leases"]
    assert len(found.workers) == 2
    assert name in faults(found)


def test_nothing_can_be_read():
    world = World()

    def refuse(operation: str, key: str) -> None:
        raise ThrottledError("rate exceeded")

    for table in (world.tables.lease, world.tables.workers, world.tables.coordinator):
        table.hook(refuse, None)
    assert len(world.read().failures) == READS

"""Workers without a leader take leases by conditional writes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, LeaseMoved, MoveRefused, PlanMade
from kcl_pipeline.leader.kcl2 import LeaseTaker
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World

INTERVAL = 20
"""Time between two runs, with the default failover time of 10 s."""


class TakingFleet(World):
    """Workers that renew, and each take leases every 20 s; nobody leads."""

    def __init__(self, shards, **overrides):
        super().__init__(shards=shards, **overrides)
        self.takers: dict[str, LeaseTaker] = {}
        self.began: dict[str, int] = {}
        for number in range(shards):
            create_lease(self.leases, Lease(f"shardId-{number:012d}", TRIM_HORIZON))

    def taker(self, name: str, settings: ConsumerSettings | None = None) -> LeaseTaker:
        own = (settings or self.settings, self.leases, self.clock, self.events.append)
        return LeaseTaker(name, *own, Random(name))

    def join(self, *names, **options):
        super().join(*names, **options)
        for name in names:
            self.takers[name] = self.taker(name)
            self.began[name] = int(self.clock.monotonic())

    def run(self, seconds, tick=5):
        for _ in range(seconds):
            super().run(1, tick)
            for name, worker in list(self.workers.items()):
                if (int(self.clock.monotonic()) - self.began[name]) % INTERVAL == 1:
                    self.takers[name].run()
                    worker.discover()

    def counts(self) -> Counter[str]:
        return Counter(owner for owner in self.owners().values() if owner is not None)

    def by_cluster(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for owner, number in self.counts().items():
            found[owner.partition("-")[0]] += number
        return dict(found)


def test_new_leases_are_taken_at_once_and_shared_as_workers_join():
    fleet = TakingFleet(6)
    fleet.join("a")
    fleet.run(2)
    assert fleet.counts() == {"a": 6}
    fleet.join("b")
    fleet.run(80)
    assert fleet.counts() == {"a": 3, "b": 3}
    moved = fleet.happened(LeaseMoved)
    fleet.run(200)
    assert fleet.happened(LeaseMoved) == moved, "an even fleet rests"


def test_the_leases_of_a_worker_that_was_killed_are_taken():
    fleet = TakingFleet(6)
    fleet.join("a", "b", "c")
    fleet.run(120)
    assert fleet.counts() == {"a": 2, "b": 2, "c": 2}
    fleet.kill("a")
    fleet.run(2 * INTERVAL + 10)
    assert fleet.counts() == {"b": 3, "c": 3}
    reasons = [one.reason for one in fleet.happened(LeaseMoved) if one.from_worker == "a"]
    assert sum("a has not renewed it for" in reason for reason in reasons) == 2


def test_a_lease_that_was_renewed_since_the_scan_is_not_taken():
    fleet = TakingFleet(1)
    fleet.join("a")
    fleet.run(2)
    other = fleet.taker("b")
    other.run()
    fleet.clock.advance(11)  # nobody renews
    list_leases = fleet.leases.list_leases

    def then_renewed():
        found = list_leases()
        fleet.workers["a"].renew()
        return found

    fleet.leases.list_leases = then_renewed
    result = other.run()
    assert (result.taken, result.must_repeat) == ((), True)
    assert fleet.happened(MoveRefused)
    assert fleet.counts() == {"a": 1}


def test_a_lease_is_stolen_although_its_owner_renews_it_during_the_scan():
    fleet = TakingFleet(4)
    fleet.join("a")
    fleet.run(4)
    list_leases = fleet.leases.list_leases

    def then_renewed():
        found = list_leases()
        fleet.workers["a"].renew()
        return found

    fleet.leases.list_leases = then_renewed
    assert len(fleet.taker("b").run().taken) == 1
    fleet.workers["a"].renew()
    assert len(fleet.workers["a"].held) == 3, "the former owner notices at its next renewal"


def test_a_position_is_kept_and_the_owner_switch_counted():
    fleet = TakingFleet(2)
    fleet.join("a")
    fleet.run(4)
    fleet.workers["a"].checkpoint("shardId-000000000000", Position("7"))
    fleet.workers["a"].checkpoint("shardId-000000000001", Position("7"))
    before = fleet.table()
    fleet.taker("b").run()
    fleet.taker("b").run()
    (key,) = [key for key, owner in fleet.owners().items() if owner == "b"]
    row = fleet.table()[key]
    assert row.checkpoint == Position("7")
    assert row.counter == before[key].counter + 1
    assert row.owner_switches_since_checkpoint == 1


def test_an_error_of_one_lease_does_not_stop_the_others():
    fleet = TakingFleet(3)
    assign, calls = fleet.leases.assign, []

    def fails_once(lease, owner, **options):
        calls.append(lease.lease_key)
        if len(calls) == 1:
            raise ThrottledError("UpdateItem was throttled", code="x", operation="UpdateItem")
        return assign(lease, owner, **options)

    fleet.leases.assign = fails_once
    result = fleet.taker("a").run()
    assert len(result.taken) == 2
    assert result.must_repeat
    assert fleet.happened(AwsTrouble)


def test_a_scan_during_which_the_worker_was_paused_expires_nothing():
    fleet = TakingFleet(1)
    fleet.join("a")
    fleet.run(2)
    other = fleet.taker("b")
    other.run()
    list_leases = fleet.leases.list_leases

    def slow():
        found = list_leases()
        fleet.clock.advance(100)
        return found

    fleet.leases.list_leases = slow
    assert other.run().taken == ()


CLUSTERS = [f"{cluster}-{number}" for cluster in "ab" for number in range(4)]


@pytest.fixture(scope="module")
def two_clusters() -> TakingFleet:
    """Cluster a begins with twelve leases; cluster b, of the same size, joins later."""
    fleet = TakingFleet(12)
    fleet.join(*CLUSTERS[:4])
    fleet.run(300)
    fleet.join(*CLUSTERS[4:])
    fleet.run(400)
    return fleet


def test_two_clusters_of_workers_stay_uneven_without_a_leader(two_clusters):
    """The target is two: a worker that has one needs only one more, and steals nothing."""
    assert two_clusters.by_cluster() == {"a": 8, "b": 4}
    moved = two_clusters.happened(LeaseMoved)
    two_clusters.run(1000)
    assert two_clusters.happened(LeaseMoved) == moved
    assert two_clusters.by_cluster() == {"a": 8, "b": 4}


def test_the_strategy_balanced_evens_two_clusters(two_clusters):
    world = World(shards=12, assignment={"lease_assignment_strategy": "balanced"})
    for lease in two_clusters.table().values():
        create_lease(world.leases, Lease(lease.lease_key, TRIM_HORIZON, owner=lease.owner))
    world.join(*CLUSTERS)
    world.leader()
    world.run(400)
    owners = Counter(owner.partition("-")[0] for owner in world.owners().values() if owner)
    assert owners == {"a": 6, "b": 6}
    moved = world.happened(LeaseMoved)
    world.run(600)
    assert world.happened(LeaseMoved) == moved


def test_a_plan_without_moves_is_told_once():
    """The target is above the limit of the worker in every run."""
    fleet = TakingFleet(10, assignment={"max_leases_for_worker": 4})
    fleet.join("a-1")
    fleet.run(120)
    assert fleet.counts() == {"a-1": 4}
    plans = [event for event in fleet.events if isinstance(event, PlanMade)]
    assert [(plan.moves, plan.spilled) for plan in plans] == [(4, 6)]

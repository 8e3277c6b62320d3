"""Kinesis is throttled, hangs or fails for ever, or scans are throttled: what must go on does.

The times are those of the default settings: a lease lives for 10 s, the lock for 8 s, that of the
sensor for 15 s. Each call delays only the thread that makes it, in virtual time.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import CycleFinished, LeaderElected
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import Move, Plan
from tests.support.leader_fleet import FAULTS, LeaderFleet
from tests.support.leader_world import World

FAILOVER_SECONDS = 10.0
LOOK_SECONDS = {False: 1.0, True: 7.0}
"""Time between two assignments: in a worker, and in the sensor with the time of a tick."""


def running(*, is_sensor=False, workers=("a", "b"), **options):
    """A fleet whose leases all have owners; leaders are on hosts of their own."""
    fleet = LeaderFleet(**options)
    for name in workers:
        fleet.worker(name)
    for name in ["sensor"] if is_sensor else ["l1", "l2", "l3", "l4"]:
        fleet.leader(name, is_sensor=is_sensor)
    fleet.run_until(lambda: set(fleet.owners().values()) == set(workers), 60)
    fleet.run(20)
    return fleet


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_sensor", [False, True])
def test_the_leases_of_a_killed_worker_move_while_kinesis_is_in_trouble(fault, is_sensor):
    fleet = running(is_sensor=is_sensor)
    began, fleet.fault = fleet.scheduler.now, fault
    fleet.run(120)
    fleet.kill("a")
    seconds = fleet.run_until(
        lambda: set(fleet.owners().values()) == {"b"},
        FAILOVER_SECONDS + 3 + LOOK_SECONDS[is_sensor],
    )
    assert seconds >= FAILOVER_SECONDS - 4
    assert fleet.leader_changes(began) == [], "one leader all the time"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_leader_that_is_killed_is_replaced_while_kinesis_is_in_trouble(fault):
    fleet = LeaderFleet()
    for name in ("a", "b", "c"):
        fleet.worker(name)
        fleet.leader(name)
    fleet.run_until(lambda: set(fleet.owners().values()) == {"a", "b", "c"}, 60)
    fleet.run(20)
    fleet.fault = fault
    fleet.run(60)
    name = fleet.coordinator.read_lock().owner_name
    fleet.kill(name)
    fleet.run_until(lambda: name not in fleet.owners().values(), 8 + 2 + 3)


def test_a_sync_that_hangs_is_counted_as_skipped_once_a_second():
    fleet = running()
    began, fleet.fault = fleet.scheduler.now, "hangs for 30 s"
    fleet.run(60)
    cycles = [
        event for at, _, event in fleet.events if at >= began and type(event) is CycleFinished
    ]
    assert 20 <= sum(cycle.sync_skipped for cycle in cycles) <= 60


@pytest.mark.parametrize("is_sensor", [False, True])
def test_shards_get_leases_as_soon_as_kinesis_answers(is_sensor):
    fleet = LeaderFleet()
    fleet.fault = "hangs for 30 s"
    fleet.worker("a")
    fleet.leader("l1", is_sensor=is_sensor)
    fleet.run(45)
    assert fleet.owners() == {}
    fleet.fault = None
    # The rest of the call that hangs, a pause, and an assignment
    fleet.run_until(lambda: set(fleet.owners().values()) == {"a"}, 20 + 5 + 15)


def test_a_throttled_scan_delays_the_failover_and_no_heartbeat():
    """A scan may last for 15 s, nearly twice the lock."""
    fleet = running()
    began = fleet.scheduler.now

    def slow(clock, operation):
        if operation == "Scan":
            clock.sleep(14.0)

    fleet.slow_calls = slow
    fleet.run(120)
    assert fleet.leader_changes(began) == []
    fleet.kill("a")
    fleet.run_until(lambda: set(fleet.owners().values()) == {"b"}, 60)
    assert fleet.leader_changes(began) == []


@pytest.mark.parametrize(("error", "seconds"), [(ThrottledError, 15.0), (UnavailableError, 0.0)])
def test_three_failed_assignments_release_the_lock(error, seconds):
    """A throttled page is repeated for 15 s."""
    fleet = running()
    (name,) = {name for _, name, event in fleet.events if isinstance(event, LeaderElected)}
    began, broken = fleet.scheduler.now, fleet.hosts[name]

    def fail(clock, operation):
        if operation == "Scan" and fleet.scheduler.current().host is broken:
            raise error("no answer", operation="Scan")

    fleet.slow_calls = fail
    fleet.run_until(lambda: fleet.coordinator.read_lock() is None, 3 * (seconds + 1) + 2)
    fleet.run_until(
        lambda: any(isinstance(event, LeaderElected) for *_, event in fleet.leader_changes(began)),
        5,
    )
    assert fleet.coordinator.read_lock().owner_name != name


def test_a_plan_is_cut_off_after_a_third_of_the_lock(monkeypatch):
    """A plan for many leases takes seconds; the rest of its moves is planned in the next run."""
    world = World(shards=4)
    world.join("a")
    plans = []

    def slow(given):
        began = world.clock.monotonic()
        moves = []
        for lease in given.leases:
            if given.stop():
                break
            moves.append(Move(lease.lease_key, None, "a", "it has no owner"))
            world.clock.advance(1.0)
        plans.append((world.clock.monotonic() - began, len(moves)))
        return Plan("slow", tuple(moves))

    monkeypatch.setattr(strategies, "get", lambda _name: slow)
    leader = world.leader()
    leader.run_once()
    third = leader.lock_settings.leader_lease_duration_millis / 1000 / 3
    seconds, count = next(plan for plan in plans if plan[1])
    assert third <= seconds <= third + 1.0
    assert count < 4
    assert list(world.owners().values()).count("a") == count

"""In which cycles a leader scans the lease table, and that it notices every change as soon."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, CycleFailed, LeaseMoved
from kcl_pipeline.leases.application.control import NOTHING_WANTED, BalanceRequest, Pause
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import LATEST
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World

SAVING, SCANNING = 0, 10**9
"""Values of `leases_per_probe`: a scan in few cycles, and in every cycle."""


def calm(*workers, leases_per_probe=SAVING, shards=6, announces=True, **settings):
    """A fleet in which nothing happens; its leader runs a cycle every second."""
    world = World(shards=shards, **settings)
    world.leader(leases_per_probe=leases_per_probe)
    world.join(*workers, announces=announces)
    world.run(90, tick=1)
    assert all(world.held().values())
    world.events.clear()
    world.reports.clear()
    return world


def counted(world, seconds):
    """The calls to the lease table by leaders within this time, with a cycle every second."""
    calls, store = [], world.leases.store
    for _ in range(seconds):
        for worker in list(world.workers.values()):
            worker.second()
        store.before_call = lambda operation, key: calls.append((operation, key))
        world.reports += [cycle.run_once() for cycle in world.leaders.values()]
        store.before_call = lambda *_: None
        world.clock.advance(1)
    return calls


def scans(calls):
    return sum(operation == "Scan" for operation, _ in calls)


def test_a_calm_fleet_is_scanned_once_per_assignment_interval():
    world = calm("a", "b")
    calls = counted(world, 60)
    assert scans(calls) == 3
    probes = [key for operation, key in calls if operation == "GetItem"]
    assert 2 * 60 / 3 * 0.8 <= len(probes) <= 2 * 60 * 0.6, "per worker one or two for each renewal"
    assert {operation for operation, _ in calls} == {"Scan", "GetItem"}, "nothing is written"
    assert not world.happened(CycleFailed)


def test_another_lease_is_probed_after_each_scan():
    calls = counted(calm("a", "b"), 60)
    probes = {key for operation, key in calls if operation == "GetItem"}
    assert len(probes) == 6


def test_a_worker_that_processes_batches_is_probed_in_every_cycle():
    world = calm("a", shards=2)
    worker = world.workers["a"]
    second, renew = worker.second, worker.renew

    def busy():
        second()
        renew()
        renew()

    worker.second = busy
    world.run(5, tick=1)
    calls = counted(world, 18)
    assert sum(operation == "GetItem" for operation, _ in calls) >= 17


def test_the_report_of_a_cycle_without_a_scan_has_the_leases_of_the_last_scan():
    world = calm("a", "b")
    world.run(40, tick=1)
    ages = [one.scan_age_seconds for one in world.reports]
    assert ages.count(None) == 2
    assert max(age for age in ages if age is not None) == 19
    report = next(one for one in world.reports if one.scan_age_seconds == 10)
    assert report.led
    assert {lease.lease_key for lease in report.leases} == set(world.table())
    assert [row.worker_id for row in report.workers] == ["a", "b"]
    assert report.plan is not None
    assert report.plan.moves == ()
    assert report.plan_input is not None


@pytest.mark.parametrize("after", range(0, 20, 3))
def test_the_leases_of_a_killed_worker_move_as_soon_as_with_a_scan_in_every_cycle(after):
    seconds = {}
    for mode in (SAVING, SCANNING):
        world = calm("a", "b", "c", leases_per_probe=mode)
        world.run(after, tick=1)
        world.kill("b")
        began = world.clock.monotonic()
        while "b" in world.owners().values():
            world.run(1, tick=1)
            assert world.clock.monotonic() - began < 60
        seconds[mode] = world.clock.monotonic() - began
        last = [report.scan_age_seconds for report in world.reports[-4:]]
        assert last == [None] * 4, "each lease was read for some time before it expired"
    assert 9 <= seconds[SAVING] <= seconds[SCANNING] + 1


def test_a_worker_that_joins_gets_its_share_as_soon():
    took = {}
    for mode in (SAVING, SCANNING):
        world = calm("a", "b", leases_per_probe=mode)
        world.join("c", announces=True)
        began = world.clock.monotonic()
        while len(world.held()["c"]) < 2:
            world.run(1, tick=1)
        took[mode] = world.clock.monotonic() - began
    assert took[SAVING] <= took[SCANNING] + 1


def test_an_announced_release_is_noticed_in_the_next_cycle():
    world = calm("a", "b")
    worker = world.workers["b"]
    for key, lease in list(worker.held.items()):
        assert world.leases.evict(lease) is not None
        del worker.held[key]
    worker.announce()
    world.run(1, tick=1)
    assert None not in world.owners().values()


def test_a_stale_scan_after_an_announcement_is_repeated():
    """The scan does not show the release yet, and the row is not written again."""
    world = calm("a", "b")
    worker = world.workers["b"]
    key, lease = next(iter(worker.held.items()))
    assert world.leases.evict(lease) is not None
    del worker.held[key]
    worker.announce()
    world.leases.store.scan_lag_seconds = 1.5
    world.run(1, tick=1)
    world.leases.store.scan_lag_seconds = 0.0
    assert world.owners()[key] is None
    world.run(2, tick=1)
    assert world.owners()[key] is not None


def test_a_change_that_is_announced_during_a_scan_is_not_missed():
    """The lease is released after the leases were read, and before the rows are."""
    world = calm("a", "b")
    worker = world.workers["b"]
    key, lease = next(iter(worker.held.items()))
    scan_workers = world.rows.scan_workers
    store = world.leases.store

    def release():
        store.before_call = lambda *_: None
        if key in worker.held:
            assert world.leases.evict(lease) is not None
            del worker.held[key]
            worker.announce()
        return scan_workers()

    def scanned(operation, _key):
        if operation == "Scan":
            world.rows.scan_workers = release

    for _ in range(30):
        lease = worker.held.get(key, lease)
        store.before_call = scanned
        world.run(1, tick=1)
        store.before_call = lambda *_: None
        world.rows.scan_workers = scan_workers
        if key not in worker.held:
            break
    world.run(2, tick=1)
    assert world.owners()[key] is not None


def test_a_change_without_announcement_is_noticed_within_the_interval():
    world = calm("a", "b")
    key, lease = next(iter(world.workers["b"].held.items()))
    assert world.leases.evict(lease) is not None
    del world.workers["b"].held[key]
    assert world.run_until(lambda: world.owners()[key] is not None) <= 21


def test_a_row_that_disappears_is_noticed_in_the_next_cycle():
    world = calm("a", "b")
    world.workers["b"].stop()
    world.run(1, tick=1)
    assert set(world.owners().values()) == {"a"}


@pytest.mark.parametrize("announces", [False, True])
def test_workers_that_announce_no_changes_are_scanned_in_every_cycle(announces):
    world = calm("a", "b", announces=announces)
    world.workers["a"].announces = True
    world.run(40, tick=1)
    assert scans(counted(world, 20)) == (1 if announces else 20)


def test_a_small_table_is_scanned_in_every_cycle():
    """One scan costs less than a read for each worker."""
    world = World(shards=6)
    world.leader()
    world.join("a", "b", announces=True)
    world.run(90, tick=1)
    assert scans(counted(world, 20)) == 20


def test_a_lease_that_its_living_owner_does_not_renew_expires():
    """It is noticed by two scans, or by a probe. It never expires sooner than with every scan."""
    world = calm("a", "b")
    worker = world.workers["b"]
    key = max(worker.held)
    worker.silent.add(key)
    began = world.clock.monotonic()
    while world.owners()[key] == "b":
        world.run(1, tick=1)
    assert 7 <= world.clock.monotonic() - began <= 42


def test_no_lease_of_a_living_worker_expires():
    world = calm("a", "b", "c")
    world.run(600, tick=1)
    world.run(300, tick=7)
    assert not world.happened(LeaseMoved)
    assert all(report.expired == () for report in world.reports)


def test_a_paused_leader_takes_no_lease_from_a_living_worker():
    world = calm("a", "b")
    cycle = world.leaders.pop("leader")
    world.run(120)
    world.leaders["leader"] = cycle
    world.run(60, tick=1)
    assert not world.happened(LeaseMoved)


def test_an_error_of_a_check_is_an_event_and_the_tables_are_scanned():
    world = calm("a", "b")

    def fail(operation, _key):
        if operation == "GetItem":
            world.leases.store.before_call = lambda *_: None
            raise ThrottledError("slow down", operation="GetItem")

    cycle = world.leaders["leader"]
    for _ in range(10):
        world.leases.store.before_call = fail
        report = cycle.run_once()
        world.leases.store.before_call = lambda *_: None
        if world.happened(AwsTrouble):
            break
        world.run(1, tick=10**6)
    assert world.happened(AwsTrouble) == [
        AwsTrouble("check for changes by the leader", "slow down")
    ]
    assert report.scan_age_seconds is None
    assert report.error is None


def test_a_new_leader_begins_with_a_scan():
    world = calm("a", "b")
    world.leaders.pop("leader").release()
    world.leader("other", leases_per_probe=SAVING)
    world.run(2, tick=1)
    assert world.reports[-1].led
    assert world.reports[-1].scan_age_seconds is None


def test_a_requested_drain_is_noticed_in_the_next_cycle():
    world = calm("a", "b")
    assert world.rows.request_drain("b")
    assert scans(counted(world, 3)) == 3


def test_an_unassigned_lease_keeps_the_scans():
    world = calm("a")
    create_lease(world.leases, Lease("shardId-000000000099", LATEST, owner="dead", counter=3))
    world.run(21, tick=1)
    assert scans(counted(world, 5)) == 5


def test_a_lease_that_its_new_owner_does_not_renew_keeps_the_scans():
    world = calm("a", "b")
    worker, key = world.workers["b"], "shardId-000000000099"
    worker.silent.add(key)
    create_lease(world.leases, Lease(key, LATEST, owner="b", counter=3))
    worker.announce()
    world.run(4, tick=1)
    assert scans(counted(world, 4)) == 4


def test_a_leader_that_comes_back_begins_with_a_scan():
    world = calm("a", "b")
    leader = world.leaders["leader"]
    while world.reports[-1].scan_age_seconds != 3 if world.reports else True:
        world.run(1, tick=1)
    leader.release()
    report = leader.run_once()
    assert report.led
    assert report.scan_age_seconds is None


def test_a_request_to_balance_is_followed_in_the_next_cycle():
    world = calm("a", "b")
    request = BalanceRequest("request-1", "operator")
    assert world.coordinator.put_balance(request, replacing=NOTHING_WANTED)
    assert scans(counted(world, 1)) == 1
    assert world.coordinator.read_application().control.balance is None


def test_a_paused_application_is_scanned_in_every_cycle():
    world = calm("a", "b")
    assert world.coordinator.put_pause(Pause("operator"), replacing=NOTHING_WANTED)
    assert scans(counted(world, 3)) == 3
    assert all(row.drain_requested for row in world.rows.scan_workers().workers)

"""Drain a worker, hand a lease to a worker, and balance now."""

from __future__ import annotations

from uuid import UUID

import pytest

from kcl_pipeline.control.moving import Moving
from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.errors import ApplicationInUseError, NotFoundError, SettingsError
from kcl_pipeline.events import HandoffCompleted
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.worker.summary import StopReason
from tests.support.operator_world import OperatorWorld

REQUEST = UUID(int=1)


def two_workers(shards=4, **options):
    world = OperatorWorld(shards=shards, workers=("w-1", "w-2"), **options)
    world.put(*(b"%d" % n for n in range(20)))
    world.work_until(lambda: set(world.owners().values()) == {"w-1", "w-2"})
    world.work_until(lambda: all(not one.in_handoff for one in leases(world)))
    return world


def leases(world):
    return world.leases.list_leases().leases


def test_a_drained_worker_ends_and_another_one_reads_its_shards():
    world = two_workers()
    mine = {key for key, owner in world.owners().items() if owner == "w-2"}
    done = Moving(world.app).drain("w-2", wait_seconds=60)
    assert (done.ended, set(done.leases)) == (True, mine)
    assert world.ended == {"w-2": StopReason.DRAIN_REQUESTED}
    world.put(*(b"late-%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) >= len(world.sent))
    assert world.data() == sorted(world.sent)
    assert set(world.owners().values()) == {"w-1"}


def test_a_dry_run_of_a_drain_changes_nothing():
    world = two_workers()
    before = world.rows.rows()
    done = Moving(world.app).drain("w-2", wait_seconds=60, dry_run=True)
    assert (done.ended, len(done.leases)) == (False, 2)
    assert world.rows.rows() == before


def test_a_worker_that_does_not_end_in_time_is_reported():
    world = two_workers()
    world.crash("w-2")
    assert Moving(world.app).drain("w-2", wait_seconds=1).ended is False


def test_only_a_worker_of_this_package_is_drained():
    world = two_workers()
    with pytest.raises(NotFoundError, match="there is no worker w-7"):
        Moving(world.app).drain("w-7", wait_seconds=1)
    world.rows.report(WorkerMetrics("java-1", int(world.clock.wall())))
    with pytest.raises(SettingsError, match="worker of the Java KCL"):
        Moving(world.app).drain("java-1", wait_seconds=1)


def test_a_lease_is_handed_over_without_a_repeated_record():
    world = two_workers()
    key = next(key for key, owner in world.owners().items() if owner == "w-1")
    world.put(*(b"during-%d" % n for n in range(20)))
    done = Moving(world.app).move(key, "w-2", wait_seconds=60)
    assert (done.done, done.graceful, done.from_worker) == (True, True, "w-1")
    assert world.owners()[key] == "w-2"
    assert [(e.lease_key, e.forced) for e in world.of(HandoffCompleted)][-1] == (key, False)
    world.put(*(b"after-%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) >= len(world.sent))
    world.work(3)
    assert world.data() == sorted(world.sent)


def test_a_lease_without_an_owner_is_assigned_at_once():
    world = two_workers()
    world.crash("w-1")
    lease = next(one for one in leases(world) if one.owner == "w-1")
    assert world.leases.evict(lease)
    done = Moving(world.app).move(lease.lease_key, "w-2", wait_seconds=5)
    assert (done.done, done.graceful, done.from_worker) == (True, False, None)


def test_a_lease_that_changed_since_it_was_read_is_not_moved():
    world = two_workers()
    key = next(key for key, owner in world.owners().items() if owner == "w-1")
    get = world.leases.get

    def changed(lease_key, **options):
        found = get(lease_key, **options)
        world.leases.evict(get(lease_key))
        return found

    world.leases.get = changed
    with pytest.raises(ApplicationInUseError, match="changed at this moment"):
        Moving(world.app).move(key, "w-2", wait_seconds=5)
    assert get(key).checkpoint_owner is None


def test_a_dry_run_of_a_move_changes_nothing():
    world = two_workers()
    before = world.leases.rows()
    key = next(key for key, owner in world.owners().items() if owner == "w-1")
    done = Moving(world.app).move(key, "w-2", wait_seconds=5, dry_run=True)
    assert (done.done, done.from_worker) == (False, "w-1")
    assert world.leases.rows() == before


def test_a_move_that_is_not_possible_is_refused():
    world = two_workers()
    moving = Moving(world.app)
    first, other = min(world.owners().items()), "w-7"
    with pytest.raises(NotFoundError, match="there is no lease nothing"):
        moving.move("nothing", "w-1", wait_seconds=1)
    with pytest.raises(NotFoundError, match="there is no worker w-7"):
        moving.move(first[0], other, wait_seconds=1)
    with pytest.raises(SettingsError, match="has the lease"):
        moving.move(*first, wait_seconds=1)
    target = "w-2" if first[1] == "w-1" else "w-1"
    world.rows.request_drain(target)
    with pytest.raises(SettingsError, match="is requested to end"):
        moving.move(first[0], target, wait_seconds=1)
    world.crash(target)
    world.rows.deregister(target)
    world.rows.report(WorkerMetrics(target, int(world.clock.wall()) - 1000, run_id="old"))
    with pytest.raises(SettingsError, match="has not reported for 30 s"):
        moving.move(first[0], target, wait_seconds=1)
    lease = world.leases.get(first[0])
    started = world.leases.initiate_handoff(lease, "w-9")
    with pytest.raises(SettingsError, match="is in a handoff"):
        moving.move(first[0], "w-9", wait_seconds=1)
    world.leases.update_checkpoint(started, checkpoint=SHARD_END)
    with pytest.raises(SettingsError, match="is finished"):
        moving.move(first[0], "w-9", wait_seconds=1)


def test_nothing_moves_in_a_pause():
    world = two_workers()
    key = next(key for key, owner in world.owners().items() if owner == "w-1")
    world.coordinator.put_pause(
        Pausing(world.app).pause(wait_seconds=0).pause, replacing=world.coordinator.read_control()
    )
    with pytest.raises(ApplicationInUseError, match="resume it first"):
        Moving(world.app).balance(REQUEST, wait_seconds=1)
    with pytest.raises((ApplicationInUseError, SettingsError)):
        Moving(world.app).move(key, "w-2", wait_seconds=1)


def test_the_leader_balances_on_request_and_removes_it():
    """A fleet whose next balancing is an hour away."""
    world = two_workers(assignment={"variance_balancing_frequency": 360, "cool_down_seconds": 0.0})
    world.work(40)
    for lease in leases(world):
        if lease.owner == "w-2":
            Moving(world.app).move(lease.lease_key, "w-1", wait_seconds=60)
            break
    counts = list(world.owners().values())
    assert abs(counts.count("w-1") - counts.count("w-2")) == 2
    world.work(30)
    assert list(world.owners().values()) == counts, "without a request it stays"
    assert Moving(world.app).balance(REQUEST, wait_seconds=30)
    world.work(10)
    counts = list(world.owners().values())
    assert counts.count("w-1") == counts.count("w-2")
    assert "kclpBalance" not in world.coordinator.rows()["Migration3.0"]


def test_without_a_leader_the_request_stays():
    world = two_workers()
    world.running.clear()
    assert not Moving(world.app).balance(REQUEST, wait_seconds=2)
    assert world.coordinator.read_control().balance.by == "ann"

"""Drain a worker."""

from __future__ import annotations

import pytest

from kcl_pipeline.control.pausing import drain
from kcl_pipeline.errors import NotFoundError, SettingsError
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.worker.summary import StopReason
from tests.support.operator_world import OperatorWorld


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
    done = drain(world.app, "w-2", wait_seconds=60)
    assert (done.ended, set(done.leases)) == (True, mine)
    assert world.ended == {"w-2": StopReason.DRAIN_REQUESTED}
    world.put(*(b"late-%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) >= len(world.sent))
    assert world.data() == sorted(world.sent)
    assert set(world.owners().values()) == {"w-1"}


def test_a_dry_run_of_a_drain_changes_nothing():
    world = two_workers()
    before = world.rows.rows()
    done = drain(world.app, "w-2", wait_seconds=60, dry_run=True)
    assert (done.ended, len(done.leases)) == (False, 2)
    assert world.rows.rows() == before


def test_a_worker_that_does_not_end_in_time_is_reported():
    world = two_workers()
    world.crash("w-2")
    assert drain(world.app, "w-2", wait_seconds=1).ended is False


def test_only_a_worker_of_this_package_is_drained():
    world = two_workers()
    with pytest.raises(NotFoundError, match="there is no worker w-7"):
        drain(world.app, "w-7", wait_seconds=1)
    world.rows.report(WorkerMetrics("java-1", int(world.clock.wall())))
    with pytest.raises(SettingsError, match="worker of the Java KCL"):
        drain(world.app, "java-1", wait_seconds=1)

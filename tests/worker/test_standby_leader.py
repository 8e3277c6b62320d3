"""When a worker runs its next leader cycle, and how soon it notices handoffs."""

from __future__ import annotations

import pytest

from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import LATEST
from kcl_pipeline.testing.tables import create_lease
from tests.support.worker_world import World

DEFAULT = {"lease": {"failover_time_millis": 10_000}}


@pytest.mark.parametrize(
    ("scan_seconds", "pause"),
    [(0.0, 0.2), (0.1, 0.3), (0.5, 1.0), (2.0, 1.0), (3.0, 9.0), (15.0, 10.0)],
)
def test_the_pause_of_a_leader_follows_the_time_of_a_cycle(scan_seconds, pause):
    """Three times as long, at least 0.2 s, at most a tenth of the failover time; while scans are
    throttled, at most the failover time.
    """
    world = World(shards=2, leader={"leader_lease_duration_millis": 60_000}, **DEFAULT)
    world.worker.lead_tick()
    world.clock.advance(1)
    world.leases.store.before_call = lambda operation, _key: (
        world.clock.advance(scan_seconds) if operation == "Scan" else None
    )
    assert world.worker.lead_tick() == pytest.approx(pause)


def test_a_leader_of_many_leases_scans_less_often():
    world = World(shards=2, **DEFAULT)
    world.worker.lead_tick()
    for number in range(500):
        create_lease(world.leases, Lease(f"shardId-{number + 1000:012}", LATEST, owner="other"))
    world.clock.advance(1)
    assert world.worker.lead_tick() == pytest.approx(0.5, abs=0.01)


def test_an_interval_in_the_settings_is_kept():
    world = World(shards=2, assignment={"lease_assignment_interval_millis": 1_500}, **DEFAULT)
    assert world.worker.lead_tick() == 1.5


def test_a_standby_reads_the_lock_twice_a_second_while_it_watches():
    world = World(shards=2, **DEFAULT)
    world.coordinator.put_lock(LeaderLock("other", 30_000, "v"), replacing=None)
    assert world.worker.lead_tick() == 0.5


def test_discovery_notices_a_handoff_before_the_next_renewal():
    world = World(shards=2, **DEFAULT)
    world.worker.lead_tick()
    first, second = world.worker.leases.held()
    assert world.leases.view().initiate_handoff(first.lease, "w-2") is not None
    world.worker.leases.discover()
    assert [held.lease_key for held in world.worker.leases.handoffs()] == [first.lease_key]
    counter = second.lease.counter
    world.worker.leases.discover()
    assert second.lease.counter == counter, "only what the index has lost is written"


def test_a_leader_notices_a_handoff_from_its_own_worker_at_once():
    world = World(shards=2, **DEFAULT)
    world.worker.lead_tick()
    world.rows.report(WorkerMetrics("w-2", 1))
    world.clock.advance(1)
    world.worker.lead_tick()
    (leaving,) = world.worker.leases.handoffs()
    assert leaving.lease.owner == "w-2"


def test_the_row_of_a_leading_worker_has_the_streams_that_it_cannot_use():
    world = World(shards=1)
    world.run(40.0)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    assert row.status.unavailable == ()

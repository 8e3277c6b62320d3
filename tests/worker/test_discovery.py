"""How soon a worker has what it was given, and how often it asks (protocol §6.3)."""

from __future__ import annotations

import threading

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import BatchCommitted
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST
from kcl_pipeline.testing.tables import create_lease
from tests.support.worker_world import World

SLOW = {"lease": {"failover_time_millis": 60_000, "lease_discovery_interval_millis": 30_000}}


def watched(world):
    """The times of the queries for this worker's leases."""
    asked = []
    world.leases.hook(
        lambda operation, _key: (
            asked.append(round(world.clock.monotonic(), 1)) if operation == "Query" else None
        ),
        None,
    )
    return asked


def lease_ticks(world, seconds):
    until = world.clock.monotonic() + seconds
    while world.clock.monotonic() < until:
        world.clock.advance(max(world.worker.lease_tick(), 0.01))


def test_what_its_own_leader_gives_it_is_held_at_once_and_not_asked_for():
    world = World(shards=3, **SLOW)
    asked = watched(world)
    world.worker.lead_tick()
    assert len(world.worker.leases.held()) == 3
    assert asked == []


def test_nothing_is_taken_from_its_own_leader_by_a_worker_that_stops():
    world = World(shards=3, **SLOW)
    stop = world.clock.signal()
    world.worker._stop.signal = stop
    report = world.worker._dependencies.leader.run_once()
    stop.set()
    world.worker.coordination.standby._take(report)
    assert world.worker.leases.held() == ()


def test_what_is_on_its_way_to_it_is_not_taken_yet():
    world = World(shards=1, **SLOW)
    world.worker.lead_tick()
    (key,) = (held.lease_key for held in world.worker.leases.held())
    table = world.leases.view()
    table.assign(table.get(key), "w-2")
    table.initiate_handoff(table.get(key), "w-1")
    world.clock.advance(1)
    world.worker.leases.renew_all()
    world.worker.lead_tick()
    assert world.worker.leases.held() == ()


def test_a_worker_without_leases_asks_once_a_second_and_one_with_leases_at_the_interval():
    world = World(shards=2, **SLOW)
    asked = watched(world)
    lease_ticks(world, 5.5)
    assert len(asked) == 6
    world.make_leader("sensor").run_once()
    lease_ticks(world, 1.1)
    assert len(world.worker.leases.held()) == 2
    del asked[:]
    lease_ticks(world, 60)
    assert len(asked) == 2


def test_a_worker_whose_leases_change_asks_twice_a_second_for_half_a_minute():
    world = World(shards=2, lease={"failover_time_millis": 60_000})
    world.make_leader("sensor").run_once()
    lease_ticks(world, 1.1)
    assert len(world.worker.leases.held()) == 2
    asked = watched(world)
    lease_ticks(world, 10)
    assert len(asked) == 20
    lease_ticks(world, 25)
    del asked[:]
    lease_ticks(world, 60)
    assert len(asked) == 30
    world.worker.leases.drop(world.worker.leases.held()[0], "test")
    del asked[:]
    lease_ticks(world, 10)
    assert len(asked) == 20


def led_ticks(world, sensor, seconds):
    """As `lease_ticks`, while the sensor leads with a tick every five seconds."""
    until = world.clock.monotonic() + seconds
    while world.clock.monotonic() < until:
        if world.clock.monotonic() >= sensor.due:
            sensor.due += 5
            sensor.run_once()
        world.worker.lead_tick()
        world.worker.lease_tick()
        world.clock.advance(0.1)


def test_a_worker_that_sees_another_one_stop_asks_twice_a_second():
    """It is given the leases of that worker soon. Their owner was seen for the last time at 0."""
    world = World(shards=2, lease={"failover_time_millis": 10_000})
    sensor = world.make_leader("sensor")
    sensor.due = world.clock.monotonic()
    led_ticks(world, sensor, 40)
    asked = watched(world)
    led_ticks(world, sensor, 20)
    assert len(asked) in (10, 11)
    create_lease(world.leases, Lease("shardId-000000000077", LATEST, owner="dead", counter=3))
    del asked[:]
    led_ticks(world, sensor, 4)
    assert len(asked) <= 2
    led_ticks(world, sensor, 6)
    del asked[:]
    led_ticks(world, sensor, 8)
    assert 13 <= len(asked) <= 16


def test_an_interval_shorter_than_a_second_is_kept():
    world = World(
        shards=1, lease={"failover_time_millis": 60_000, "lease_discovery_interval_millis": 250}
    )
    asked = watched(world)
    lease_ticks(world, 2.1)
    assert len(asked) == 9


@pytest.mark.parametrize("way", ["own leader", "index", "recovery"])
def test_many_leases_are_read_side_by_side(way):
    """One after the other, a thousand of them would take longer than the first ones last."""
    world = World(shards=8, parallel=True, **SLOW)
    four = threading.Barrier(4, timeout=20)
    world.leases.hook(lambda operation, _key: four.wait() if operation == "GetItem" else None, None)
    if way == "own leader":
        world.worker.lead_tick()
    else:
        world.make_leader("sensor").run_once()
        world.worker.lease_tick() if way == "index" else world.worker.leases.recover(
            map=world.worker._pools.map_lookups
        )
    clock = SystemClock()
    end = clock.monotonic() + 20
    while len(world.worker.leases.held()) < 8 and clock.monotonic() < end:
        clock.sleep(0.01)
    assert len(world.worker.leases.held()) == 8


class Half:
    """A metric that can always be read."""

    short_name = "C"
    max_utilization_percent = 100

    def sample(self):
        return 50.0


def test_a_worker_with_metrics_is_given_leases_as_soon_as_it_is_there():
    """Its second report comes a whole period after the first: one without any capture before it
    would say that the worker is failing.
    """
    world = World(shards=2, metric=Half())
    world.run(0.2)
    assert len(world.worker.leases.held()) == 2
    (row,) = world.rows.scan_workers().workers
    assert row.stats == {"C": (50.0,)}
    world.run(world.settings.worker.worker_metrics_reporter_freq_in_millis / 1000)
    (row,) = world.rows.scan_workers().workers
    assert row.stats == {"C": (50.0, 50.0)}


@pytest.mark.parametrize("records", [0, 40])
def test_a_drain_ends_when_all_is_read_and_committed_and_waits_for_no_timer(records):
    world = World(shards=2, **SLOW)
    world.put(*(b"%d" % number for number in range(records)))
    began = world.clock.monotonic()
    drain = world.worker.drain_watch()
    while not drain.done():
        world.run(0.05)
    assert sum(batch.records for batch in world.of(BatchCommitted)) == records
    assert world.clock.monotonic() - began < 0.5


def test_a_drain_looks_at_the_table_once_a_second_while_others_are_not_through():
    world = World(shards=2, **SLOW)
    world.worker.lead_tick()
    (one, _) = world.leases.list_leases().leases
    table = world.leases.view()
    table.evict(table.get(one.lease_key))
    table.assign(table.get(one.lease_key), "w-2")
    world.worker.leases.renew_all()
    scans = []
    drain = world.worker.drain_watch()
    world.leases.hook(
        lambda operation, _key: (
            scans.append(world.clock.monotonic()) if operation == "Scan" else None
        ),
        None,
    )
    for _ in range(100):
        world.worker.process_tick()
        assert not drain.done()
        world.clock.advance(0.05)
    assert 4 <= len(scans) <= 6
    table.renew(table.get(one.lease_key))
    world.clock.advance(1)
    assert drain.done()


def test_a_worker_to_which_leases_are_handed_over_asks_five_times_a_second():
    world = World(shards=1, lease={"failover_time_millis": 60_000})
    world.make_leader("sensor").run_once()
    table = world.leases.view()
    (lease,) = table.list_leases().leases
    table.assign(lease, "w-2")
    handed = table.initiate_handoff(table.get(lease.lease_key), "w-1")
    lease_ticks(world, 1.1)
    asked = watched(world)
    lease_ticks(world, 2)
    assert len(asked) == 10
    table.assign(handed, "w-1")
    lease_ticks(world, 0.21)
    assert [held.lease_key for held in world.worker.leases.held()] == [lease.lease_key]
    lease_ticks(world, 30.5)
    del asked[:]
    lease_ticks(world, 10)
    assert len(asked) == 5, "nothing is handed over any more"

"""Outages of DynamoDB, and workers that may not write the lease table."""

from __future__ import annotations

import pytest

from kcl_pipeline.events import LeaseMoved
from tests.support.leader_fleet import LeaderFleet


def fleet_of(*workers, shards=6):
    fleet = LeaderFleet(shards=shards)
    for name in workers:
        fleet.worker(name)
        fleet.leader(name)
    fleet.run_until(lambda: set(fleet.owners().values()) == set(workers), 90)
    fleet.run(40)
    return fleet


def moves(fleet, since, to=None):
    return [
        event
        for at, _, event in fleet.events
        if at >= since
        and isinstance(event, LeaseMoved)
        and event.to_worker == (to or event.to_worker)
    ]


@pytest.mark.parametrize("seconds", [5, 15, 25])
def test_after_an_outage_every_worker_has_its_leases_at_once(seconds):
    """A worker cannot renew while DynamoDB fails. That is not its silence."""
    fleet = fleet_of("a", "b", "c")
    before = fleet.owners()
    fleet.outage(seconds)
    ended = fleet.scheduler.now
    fleet.run(60)
    assert fleet.owners() == before
    assert moves(fleet, ended) == []


def test_a_worker_that_stops_in_an_outage_is_found_after_it():
    fleet = fleet_of("a", "b", "c")
    name = min({"a", "b", "c"} - {fleet.coordinator.read_lock().owner_name})
    fleet.kill(name)
    fleet.outage(15)
    fleet.run_until(lambda: name not in fleet.owners().values(), 10 + 3)


def test_a_worker_that_may_not_update_the_lease_table_costs_one_lease_at_a_time():
    """It reports, so that it lives. Each lease that it gets is not read for a failover time."""
    fleet = fleet_of("a", "b")
    fleet.denied.add("c")
    fleet.worker("c")
    fleet.run(100)
    began = fleet.scheduler.now
    fleet.run(400)
    assert len(moves(fleet, began, to="c")) <= 4, "one in ten failover times"
    fleet.denied.clear()
    fleet.run_until(lambda: list(fleet.owners().values()).count("c") == 2, 180)

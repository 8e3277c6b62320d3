"""Half of all pages of scans and queries are throttled, and the fleet goes on."""

from __future__ import annotations

from random import Random

import pytest

from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import CycleFailed, LeadershipLost, LeaseMoved
from kcl_pipeline.leases.dynamodb import ATTEMPTS, TOTAL_SECONDS
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from tests.support.leader_world import World

PAGES = 20


def throttle(store, share, seed=1):
    rng = Random(seed)
    throttled = []

    def before(operation, _key):
        if operation in ("Scan", "Query") and rng.random() < share:
            throttled.append(operation)
            raise ThrottledError("slow down", operation=operation)

    store.before_call = before
    return throttled


def test_twenty_pages_of_leases_are_assigned_and_renewed():
    world = World(shards=200)
    world.leases.store.scan_page_rows = 200 // PAGES
    throttled = throttle(world.leases.store, 0.5)
    throttle(world.rows.store, 0.5, seed=2)
    world.join("a", "b")
    world.leader()
    # The fake workers of this test do not repeat a throttled query themselves
    world.leases.lease_keys_of = world.leases.view().lease_keys_of
    world.run_until(lambda: sum(map(len, world.held().values())) == 200, limit=300)
    moves = len(world.happened(LeaseMoved))
    world.run(120)
    assert len(throttled) > 10 * PAGES
    assert not world.happened(LeadershipLost)
    assert len(world.happened(CycleFailed)) <= 1
    assert len(world.happened(LeaseMoved)) == moves, "no lease expired"


@pytest.mark.parametrize("pages", [1, 3])
def test_a_page_that_was_read_is_not_read_again(pages):
    table = InMemoryLeaseTable("app", clock=World().clock)
    for number in range(6):
        create_lease(table, Lease(f"s{number}", TRIM_HORIZON))
    table.store.scan_page_rows = 6 // pages
    calls = []

    def before(operation, _key):
        calls.append(operation)
        if len(calls) % 2:
            raise ThrottledError("slow down", operation=operation)

    table.store.before_call = before
    assert len(table.list_leases().leases) == 6
    assert calls == ["Scan"] * 2 * pages


def test_pages_that_stay_throttled_fail_in_bounded_time():
    world = World()
    began = world.clock.monotonic()
    throttled = throttle(world.leases.store, 1.0)
    with pytest.raises(ThrottledError):
        world.leases.list_leases()
    assert len(throttled) <= ATTEMPTS
    assert world.clock.monotonic() - began <= TOTAL_SECONDS

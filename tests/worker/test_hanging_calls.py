"""Calls that hang or are throttled beside the renewals: the leases are renewed all the same."""

from __future__ import annotations

import threading

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import HandoffCompleted, LeaseLost
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import World

WAIT_SECONDS = 30.0


def until(condition) -> None:
    clock = SystemClock()
    end = clock.monotonic() + WAIT_SECONDS
    while not condition():
        assert clock.monotonic() < end
        clock.sleep(0.005)


class Held:
    """Calls that wait until `end` is set."""

    def __init__(self):
        self.end, self.entered = threading.Event(), threading.Event()

    def __call__(self, *_):
        self.entered.set()
        assert self.end.wait(WAIT_SECONDS)


def counters(world):
    return {one.lease_key: one.counter for one in world.leases.list_leases().leases}


def world_with_leases(**settings):
    world = World(shards=2, parallel=True, **settings)

    def holds_all():
        world.worker.lead_tick()
        world.clock.advance(0.1)
        world.worker.lease_tick()
        return len(world.worker.leases.held()) == 2

    until(holds_all)
    return world


def others(world, hung):
    return {key: counter for key, counter in counters(world).items() if key != hung}


@pytest.mark.parametrize("what", ["discovery", "report", "lookup", "renewal"])
def test_a_call_that_hangs_does_not_stop_the_other_calls(what):
    """`d_disc`: a throttled query of the index is repeated for 15 s; a lease lives for 10 s."""
    world = world_with_leases()
    hanging = Held()
    key = min(counters(world)) if what in ("lookup", "renewal") else None
    operation = {"discovery": "Query", "lookup": "GetItem"}.get(what, "UpdateItem")

    def hold(called, row):
        if called == operation and key in (None, row):
            hanging()

    if what == "lookup":  # the lease of the row is discovered again
        world.worker.leases.drop(world.worker.leases.get(key), "a test")
    (world.rows if what == "report" else world.leases).hook(hold, None)
    began = others(world, key)
    lives = world.settings.lease.failover_time_millis / 1000
    ends = world.clock.monotonic() + 30 * lives

    def are_renewed():
        world.worker.lease_tick()
        now = world.clock.monotonic()
        held = [one for one in world.worker.leases.held() if one.lease_key in began]
        return len(held) == len(began) and all(now - one.renewed_at < lives / 2 for one in held)

    while world.clock.monotonic() < ends or not hanging.entered.is_set():
        world.clock.advance(0.05)
        until(are_renewed)
    assert not world.of(LeaseLost) or key is not None
    hanging.end.set()


def test_a_renewal_that_is_due_during_a_slow_one_follows_it_at_once():
    """With the next interval a lease would expire: a call may last 1.1 intervals of 3."""
    world = world_with_leases()
    lives = world.settings.lease.failover_time_millis / 1000
    interval = world.settings.lease.renewal_interval_millis / 1000
    key, slow, begins = min(counters(world)), Held(), []

    def hold(operation, row):
        if operation == "UpdateItem" and row == key:
            begins.append(world.clock.monotonic())
            slow()

    world.leases.hook(hold, None)

    def began(times):
        world.worker.lease_tick()
        return len(begins) == times

    def pass_time(seconds):
        ends = world.clock.monotonic() + seconds
        while world.clock.monotonic() < ends:
            world.clock.advance(0.05)
            world.worker.lease_tick()

    while not began(1):
        world.clock.advance(0.05)
        SystemClock().sleep(0.01)
    pass_time(1.1 * interval)
    slow.end.set()
    until(lambda: began(2))
    assert begins[1] - begins[0] < 1.5 * interval < lives


def test_an_overdue_handoff_follows_a_slow_renewal():
    """Renewals that last longer than their interval left it no turn."""
    world = world_with_leases(lease={"graceful_lease_handoff_timeout_millis": 1000})
    interval = world.settings.lease.renewal_interval_millis / 1000
    key, rows, ends = min(counters(world)), world.leases.view(), []

    def last(operation, row):
        if operation == "UpdateItem" and row == key:
            end = world.clock.monotonic() + 1.1 * interval
            ends.append(end)
            until(lambda: world.clock.monotonic() >= end)

    def note_end(operation, row):
        if operation == "UpdateItem" and row == key:
            ends.clear()

    rows.initiate_handoff(rows.get(key), "w-2")
    world.leases.hook(last, note_end)
    deadline = world.clock.monotonic() + 10 * interval
    while not world.of(HandoffCompleted):
        assert world.clock.monotonic() < deadline
        world.clock.advance(0.05)
        until(lambda: not ends or ends[0] > world.clock.monotonic())
        SystemClock().sleep(0.005)
        world.worker.lease_tick()
    assert world.of(HandoffCompleted)[0].forced
    assert not world.of(LeaseLost)


def test_leases_are_renewed_until_they_are_released():
    """`d_join`: GetRecords hangs when SIGTERM arrives, and `join` waits for its thread."""
    background, fetch = Background(SystemClock()), Held()
    renewals = []
    background.start("leases", lambda: renewals.append(1) or 0.001, is_last=True)
    for number in range(4):
        background.start(f"fetch-{number}", lambda: fetch() or 0.0)
    assert fetch.entered.wait(WAIT_SECONDS)
    stopping = threading.Thread(target=background.join, args=(WAIT_SECONDS,))
    stopping.start()
    until(background.stop.is_set)
    before = len(renewals)
    until(lambda: len(renewals) > before + 10)
    fetch.end.set()
    stopping.join(WAIT_SECONDS)
    assert not stopping.is_alive()
    before = len(renewals)
    until(lambda: len(renewals) > before + 10)  # until the leases are released
    assert background.end(WAIT_SECONDS)


def test_the_wait_for_threads_that_hang_is_one_wait_for_all():
    background, fetch = Background(SystemClock()), Held()
    for number in range(4):
        background.start(f"fetch-{number}", lambda: fetch() or 0.0)
    assert fetch.entered.wait(WAIT_SECONDS)
    clock = SystemClock()
    began = clock.monotonic()
    assert not background.join(0.5)
    assert clock.monotonic() - began < 1.5
    fetch.end.set()


def test_a_report_that_hangs_does_not_write_the_row_again_after_a_stop():
    world = world_with_leases()
    hanging = Held()
    world.rows.hook(lambda operation, _: hanging() if operation == "UpdateItem" else None, None)

    def reports():
        world.clock.advance(0.5)
        world.worker.lease_tick()
        return hanging.entered.is_set()

    until(reports)
    stopping = threading.Thread(
        target=world.worker.shut_down, args=(Background(world.clock), StopReason.STOPPED)
    )
    stopping.start()
    hanging.end.set()
    stopping.join(WAIT_SECONDS)
    assert not stopping.is_alive()
    assert world.rows.scan_workers().workers == ()

"""A worker that can neither read, renew nor commit ends; one that can do one of these goes on."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import AccessDeniedError, UnavailableError
from kcl_pipeline.events import LeaseGained
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.worker.summary import StopReason
from tests.support import worker_world
from tests.support.worker_world import World

LIMIT_SECONDS = 60.0


def new_world(limit_seconds: float = LIMIT_SECONDS, **more) -> World:
    limit = {"useless_after_millis": round(1000 * limit_seconds)}
    world = World(shards=1, buffered=True, worker=limit, **more)
    world.put(b"a")
    world.run(5, step=0.05)
    assert world.data() == [b"a"]
    return world


def refuse(world: World, tables: bool = True, reads: bool = True) -> None:
    def refused(operation, _key):
        raise AccessDeniedError(f"{operation}: ExpiredTokenException: it has expired")

    if tables:
        for table in (world.leases, world.rows, world.coordinator):
            table.hook(refused, None)
    if reads:
        world.refused = world.kinesis.get_records
        world.kinesis.get_records = lambda *_, **__: refused("GetRecords", None)


def allow(world: World) -> None:
    for table in (world.leases, world.rows, world.coordinator):
        table.hook(None, None)
    world.kinesis.get_records = world.refused


def seconds_until_useless(world: World, limit: float = 3 * LIMIT_SECONDS) -> float | None:
    began = world.clock.monotonic()
    while world.clock.monotonic() < began + limit:
        world.run(1, step=0.05)
        if world.worker.watchdog.ending is not None:
            return world.clock.monotonic() - began
    return None


def test_a_worker_whose_calls_are_all_refused_ends_after_the_time():
    world = new_world()
    refuse(world)
    seconds = seconds_until_useless(world)
    assert seconds is not None
    assert LIMIT_SECONDS <= seconds <= LIMIT_SECONDS + 5
    summary = world.worker.summary(StopReason.USELESS)
    assert "could neither read, renew nor commit for 60 s" in summary.error
    assert "worker.useless_after_millis" in summary.error
    assert "ExpiredTokenException" in summary.error


def test_a_worker_that_only_finds_its_lease_again_and_again_ends():
    """It may read rows, and write none: the lease expires, and still names this worker."""
    world = new_world()
    refuse(world, tables=False)

    def refused(operation, _key):
        if operation not in ("Query", "GetItem"):
            raise AccessDeniedError(f"{operation}: not allowed")

    world.leases.hook(refused, None)
    world.rows.hook(refused, None)
    gained = len(world.of(LeaseGained))
    assert seconds_until_useless(world) is not None
    assert len(world.of(LeaseGained)) > gained + 2
    assert "UpdateItem: not allowed" in world.worker.summary(StopReason.USELESS).error


def test_a_refusal_that_passes_ends_nobody():
    world = new_world()
    for _ in range(3):
        refuse(world)
        assert seconds_until_useless(world, 0.8 * LIMIT_SECONDS) is None
        allow(world)
        world.put(b"b")
        world.run(15)
    assert world.worker.watchdog.ending is None
    assert world.data() == [b"a", b"b", b"b", b"b"]


def test_a_worker_that_can_still_renew_goes_on():
    world = new_world()
    refuse(world, tables=False)
    assert seconds_until_useless(world) is None


@pytest.mark.parametrize("can_read", [True, False])
def test_a_worker_that_can_still_read_goes_on_while_it_holds_its_lease(can_read):
    failover_seconds = 60
    lease = {"failover_time_millis": 1000 * failover_seconds}
    world = new_world(limit_seconds=10, lease=lease)
    refuse(world, reads=not can_read)
    seconds = seconds_until_useless(world, failover_seconds - 5)
    assert (seconds is None) == can_read


def test_a_worker_without_a_lease_goes_on_and_ends_if_it_can_do_nothing():
    world = new_world()
    idle = world.worker = world.make_worker("w-2")
    idle.start_up()
    world.run_without_leader(2 * LIMIT_SECONDS)
    assert idle.leases.held() == ()
    assert idle.watchdog.ending is None
    for table in (world.leases, world.rows, world.coordinator):

        def refused(operation, _key):
            raise UnavailableError(f"{operation}: no answer")

        table.hook(refused, None)
    world.run_without_leader(2 * LIMIT_SECONDS)
    assert "no answer" in idle.watchdog.ending.sentence


def test_a_pause_of_the_whole_process_does_not_count():
    world = new_world()
    world.clock.advance(20 * LIMIT_SECONDS)
    world.run(10)
    assert world.worker.watchdog.ending is None
    world.put(b"b")
    world.run(20)
    assert world.data() == [b"a", b"b"]


def test_run_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(worker_world, "VirtualClock", ShiftedClock)
    settings = {"useless_after_millis": 1_000}
    world = World(shards=1, buffered=True, parallel=True, worker=settings)
    world.worker.reporter.deregister()
    worker = world.make_worker("w-2")
    started = worker.start_up

    def start_up(stop=None):
        started(stop)
        refuse(world)

    monkeypatch.setattr(worker, "start_up", start_up)
    summary = worker.run(world.clock.signal())
    assert summary.reason is StopReason.USELESS
    assert "ExpiredTokenException" in summary.error

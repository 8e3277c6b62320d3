"""What a worker does when records leave retention before it reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kcl_pipeline.background import Background
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.kinesis.retention import FoundGaps, Gap
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.worker.shards.retention import RetentionLosses
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import World, numbered

ZERO = "shardId-000000000000"
HOUR = 3600


@pytest.fixture(params=[True, False], ids=["buffered", "executors"])
def world(request):
    world = World(shards=1, buffered=request.param)
    run(world, 3.0)
    world.put(*numbered(5))
    run(world, 40.0)
    assert len(world.data()) == 5
    return world


def run(world, seconds):
    """Run in steps of half a second, because hours pass in these tests."""
    world.run(seconds, step=0.5)


def stop(world):
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)


def start(world, name="w-2"):
    world.worker = world.make_worker(name)
    world.worker.start_up()
    run(world, 20.0)


def quiet_hours(world, hours, *, runs=True):
    for _ in range(0, hours, 12):
        world.clock.advance(12 * HOUR)
        if runs:
            run(world, 40.0)


def checkpoint(world) -> Position:
    (lease,) = world.leases.list_leases().leases
    return lease.checkpoint


def test_records_that_left_retention_while_no_worker_ran_are_reported_once(world):
    stop(world)
    read = checkpoint(world)
    stopped = world.clock.wall() * 1000
    world.clock.advance(HOUR)
    world.put(*numbered(3, "lost"))
    lost_at = world.clock.wall() * 1000
    quiet_hours(world, 30, runs=False)
    world.put(*numbered(2, "kept"))
    start(world)
    (lost,) = world.of(RecordsLost)
    assert (lost.reporter, lost.lease_key, lost.stream, lost.reason) == (
        "w-2",
        ZERO,
        "orders",
        LossReason.LEFT_RETENTION,
    )
    assert (lost.shard_id, lost.after) == (ZERO, read)
    assert lost.before is not None
    assert lost.before > read
    assert lost.before <= checkpoint(world)
    assert abs(lost.first_arrival_millis - stopped) < 61_000
    assert lost.first_arrival_millis < lost_at < lost.last_arrival_millis
    stop(world)
    start(world, "w-3")
    assert len(world.of(RecordsLost)) == 1


def test_a_shard_of_which_nothing_is_left_is_reported(world):
    stop(world)
    world.put(*numbered(3, "lost"))
    quiet_hours(world, 30, runs=False)
    start(world)
    (lost,) = world.of(RecordsLost)
    assert lost.before is None


def test_a_quiet_shard_whose_last_record_left_retention_has_lost_nothing(world):
    quiet_hours(world, 30)
    stop(world)
    world.clock.advance(HOUR)
    start(world)
    world.put(b"new")
    run(world, 20.0)
    assert b"new" in world.data()
    assert world.of(RecordsLost) == []


def test_a_position_that_is_still_retained_has_lost_nothing(world):
    extend(world, 72)
    stop(world)
    world.put(*numbered(3, "kept"))
    quiet_hours(world, 30, runs=False)
    start(world)
    assert len(world.data()) == 8
    assert world.of(RecordsLost) == []


def test_a_pause_shorter_than_the_retention_of_the_stream_loses_nothing(world):
    extend(world, 72)
    quiet_hours(world, 80)
    stop(world)
    quiet_hours(world, 30, runs=False)
    world.put(*numbered(1, "kept"))
    start(world)
    assert world.of(RecordsLost) == []


def test_a_paused_worker_does_not_report_what_another_has_read(world):
    paused = world.worker
    world.clock.advance(HOUR)
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    run(world, 60.0)
    world.put(*numbered(3, "read"))
    run(world, 20.0)
    assert len(world.data()) == 8
    quiet_hours(world, 30)
    world.put(*numbered(1, "new"))
    run(world, 20.0)
    world.worker = paused
    run(world, 60.0)
    assert world.of(RecordsLost) == []


def extend(world, hours):
    world.model.call(
        "IncreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=hours
    )
    world.clock.advance(60)


def test_a_gap_is_judged_after_the_next_renewal_of_the_lease():
    clock, events = VirtualClock(), []
    gaps = FoundGaps(clock)
    consumer = SimpleNamespace(held=SimpleNamespace(renewed_at=clock.monotonic()))
    identity = SimpleNamespace(retention_millis=lambda _: 24 * HOUR * 1000)
    parts = SimpleNamespace(worker_id="w-1", clock=clock, events=events.append)
    losses = RetentionLosses(parts, SimpleNamespace(gaps=gaps, identity=identity))
    clock.advance(1)
    gaps.note(ZERO, StreamId("orders"), Gap(Position("5"), None, None))
    losses.look({ZERO: consumer})
    assert events == []
    clock.advance(1)
    consumer.held.renewed_at = clock.monotonic()
    losses.look({ZERO: consumer})
    assert [event.after for event in events] == [Position("5")]

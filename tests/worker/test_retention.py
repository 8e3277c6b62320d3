"""What a worker does when records leave retention before it reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kcl_pipeline.events import LossReason, RecordsLost, ShardEnded
from kcl_pipeline.kinesis.reader import FoundGaps, Gap
from kcl_pipeline.planning.shard_sync import with_times_of_parents
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.losses import RetentionLosses
from kcl_pipeline.worker.summary import StopReason
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered

ZERO = "shardId-000000000000"
HOUR = 3600


BOTH = pytest.mark.parametrize("world", [True, False], ids=["buffered", "executors"], indirect=True)
"""Also where executors read. `make test-long` has all tests with both."""


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["buffered", "executors"]
)
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
            run(world, 20.0)


def checkpoint(world) -> Position:
    (lease,) = world.leases.list_leases().leases
    return lease.checkpoint


@BOTH
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


@BOTH
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


class Shifted:
    """The clock of a host that differs from the others by some hours."""

    def __init__(self, clock, hours):
        self._clock, self._hours = clock, hours

    def __getattr__(self, name):
        return getattr(self._clock, name)

    def wall(self):
        return self._clock.wall() + self._hours * HOUR


def start_with_clock(world, name, hours):
    """A worker whose host has another clock than Kinesis and the other hosts."""
    clock, world.clock = world.clock, Shifted(world.clock, hours)
    try:
        world.worker = world.make_worker(name)
        world.worker.start_up()
    finally:
        world.clock = clock


@pytest.mark.parametrize(
    ("buffered", "first", "second"),
    shortened(
        [
            (buffered, *hours)
            for hours in [(1, 0), (30, 0), (-30, 0), (0, 30), (0, -30)]
            for buffered in (True, False)
        ],
        {(True, 30, 0), (False, -30, 0), (True, 0, -30), (False, 0, 30)}.__contains__,
    ),
)
def test_a_loss_is_reported_whatever_the_clocks_of_the_hosts_show(buffered, first, second):
    world = World(shards=1, buffered=buffered)
    stop(world)
    start_with_clock(world, "w-2", first)
    run(world, 5.0)
    world.put(*numbered(5))
    run(world, 60.0)
    assert len(world.data()) == 5
    stop(world)
    stopped = world.clock.wall() * 1000
    world.put(*numbered(3, "lost"))
    world.clock.advance(40 * HOUR)
    world.put(*numbered(2, "kept"))
    start_with_clock(world, "w-3", second)
    run(world, 60.0)
    (lost,) = world.of(RecordsLost)
    assert lost.reason is LossReason.LEFT_RETENTION
    assert abs(lost.first_arrival_millis - stopped) < 70_000
    assert len(world.data()) == 7


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_quiet_shard_has_lost_nothing_whatever_the_clocks_show(hours):
    world = World(shards=1, buffered=True)
    stop(world)
    start_with_clock(world, "w-2", hours)
    run(world, 5.0)
    world.put(*numbered(2))
    run(world, 60.0)
    quiet_hours(world, 36)
    stop(world)
    world.clock.advance(HOUR)
    start_with_clock(world, "w-3", -hours)
    world.put(b"new")
    run(world, 30.0)
    assert b"new" in world.data()
    assert world.of(RecordsLost) == []


def split_and_stop_at_the_end(world):
    """Read the parent to its end; stop before a child has begun."""
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(1)
    deadline = world.clock.monotonic() + 60
    while not world.of(ShardEnded) and world.clock.monotonic() < deadline:
        world.run(0.05, step=0.05)
    assert world.of(ShardEnded)
    stop(world)


@BOTH
def test_records_of_children_that_nobody_has_begun_are_reported_when_they_left(world):
    split_and_stop_at_the_end(world)
    assert {str(row.checkpoint) for row in world.leases.list_leases().leases if not row.ended} == {
        "TRIM_HORIZON"
    }
    stopped = world.clock.wall() * 1000
    world.put(*numbered(20, "lost"))
    world.clock.advance(30 * HOUR)
    world.put(*numbered(4, "kept"))
    start(world)
    lost = world.of(RecordsLost)
    assert {one.shard_id for one in lost} == {"shardId-000000000001", "shardId-000000000002"}
    for one in lost:
        assert (one.reason, one.after) == (LossReason.LEFT_RETENTION, None)
        assert one.first_arrival_millis <= stopped
        assert one.last_arrival_millis >= stopped
    assert len(world.data()) == 9
    stop(world)
    start(world, "w-3")
    assert len(world.of(RecordsLost)) == len(lost)


def test_children_that_are_begun_in_time_have_lost_nothing(world):
    split_and_stop_at_the_end(world)
    world.put(*numbered(20, "late"))
    world.clock.advance(20 * HOUR)
    start(world)
    run(world, 20.0)
    assert len(world.data()) == 25
    assert world.of(RecordsLost) == []


def test_a_child_whose_lease_a_leader_creates_has_the_time_of_its_parent(world):
    split_and_stop_at_the_end(world)
    rows = {row.shard_id: row for row in world.leases.list_leases().leases}
    times = [row.read_up_to_millis for row in rows.values() if not row.ended]
    assert None not in times
    child = rows["shardId-000000000001"]
    (created,) = with_times_of_parents((child.with_(read_up_to_millis=None),), rows.values())
    assert created.read_up_to_millis == rows[ZERO].read_up_to_millis


def test_a_shard_that_was_paused_before_its_first_commit_reports_what_it_lost(world):
    def refuse(table):
        if table.num_rows and broken[0]:
            raise ValueError("a broken deploy")
        return table

    broken = [True]
    paused = World(shards=1, buffered=world.buffered, transform=refuse)
    run(paused, 3.0)
    paused.put(*numbered(30, "lost"))
    for _ in range(15):
        run(paused, 40.0)
        paused.clock.advance(2 * HOUR)
    assert checkpoint(paused) == TRIM_HORIZON
    assert paused.data() == []
    stop(paused)
    broken[0] = False
    paused.put(*numbered(2, "kept"))
    start(paused)
    run(paused, 20.0)
    assert paused.of(RecordsLost)
    assert set(paused.data()) >= set(numbered(2, "kept"))


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "LATEST"])
def test_a_first_shard_that_nobody_has_begun_is_reported_when_its_records_left(position):
    """Its lease was created, but no worker read the shard for longer than the retention."""
    world = World(shards=1, shard_sync={"initial_position_in_stream": position})
    deadline = world.clock.monotonic() + 60
    while not world.leases.list_leases().leases and world.clock.monotonic() < deadline:
        world.worker.lead_tick()
        world.clock.advance(0.5)
    created = world.clock.wall() * 1000
    stop(world)
    world.put(*numbered(3, "lost"))
    world.clock.advance(30 * HOUR)
    world.put(*numbered(2, "kept"))
    start(world)
    (lost,) = world.of(RecordsLost)
    assert (lost.reason, lost.after) == (LossReason.LEFT_RETENTION, None)
    assert abs(lost.first_arrival_millis - created) < 61_000
    assert world.data() == numbered(2, "kept")


def test_a_first_shard_that_is_begun_in_time_has_lost_nothing():
    world = World(shards=1)
    world.worker.lead_tick()
    stop(world)
    world.put(*numbered(3))
    world.clock.advance(20 * HOUR)
    start(world)
    assert len(world.data()) == 3
    assert world.of(RecordsLost) == []

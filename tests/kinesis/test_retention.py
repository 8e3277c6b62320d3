"""Reading a shard whose unread records leave retention: gaps, and what looking for them costs."""

from __future__ import annotations

import pytest

from kcl_pipeline.kinesis.reader import Gap
from kcl_pipeline.position import TRIM_HORIZON, Position
from tests.support.reader_world import World, values

HOUR = 3600


@pytest.fixture
def world():
    return World()


def put_hourly(world, count):
    numbers = []
    for hour in range(count):
        numbers += world.put(f"{hour}".encode())
        world.clock.advance(HOUR)
    return numbers


def reader(world, position, found, **more):
    return world.reader(position, max_records=1, on_gap=found.append, **more)


def test_a_reader_that_is_overtaken_by_retention_reports_the_gap(world):
    found: list[Gap] = []
    slow = reader(world, TRIM_HORIZON, found)
    numbers = put_hourly(world, 3)
    assert values([slow.read()]) == [b"0"]
    numbers += put_hourly(world, 24)
    chunk = slow.read()
    assert chunk.after == Position(numbers[0])
    (gap,) = found
    assert (gap.after, gap.before) == (Position(numbers[0]), chunk.through)
    assert int(chunk.through.sequence_number) > int(numbers[1])
    assert gap.before_millis > gap.read_up_to_millis


def test_a_reader_far_behind_whose_next_records_exist_has_no_gap_and_makes_one_more_call(world):
    world.model.call("IncreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=200)
    world.clock.advance(60)
    found: list[Gap] = []
    slow = reader(world, TRIM_HORIZON, found)
    put_hourly(world, 40)
    read = [chunk for _ in range(12) if (chunk := slow.read()) is not None]
    # The page that begins again at the last record has no other one.
    assert values(read) == [f"{n}".encode() for n in range(11)]
    assert [kind for kind, _, _ in world.kinesis.asked] == ["TRIM_HORIZON", "AT_SEQUENCE_NUMBER"]
    world.clock.advance(61)
    slow.read()
    slow.read()
    assert len(world.kinesis.asked) == 3
    assert found == []


def test_a_position_whose_record_is_gone_is_a_gap(world):
    numbers = put_hourly(world, 30)
    found: list[Gap] = []
    late = reader(world, Position(numbers[0]), found)
    chunk = late.read()
    assert [(gap.after, gap.before) for gap in found] == [(Position(numbers[0]), chunk.through)]
    assert found[0].read_up_to_millis is None
    late.read()
    assert len(found) == 1


def test_a_position_whose_record_exists_is_no_gap(world):
    numbers = put_hourly(world, 5)
    found: list[Gap] = []
    late = reader(world, Position(numbers[1]), found)
    read = [chunk for _ in range(4) if (chunk := late.read()) is not None]
    assert values(read) == [b"2", b"3", b"4"]
    assert found == []


def test_the_time_read_up_to_follows_the_lag(world):
    tip = reader(world, TRIM_HORIZON, [])
    assert tip.read_up_to_millis is None
    put_hourly(world, 2)
    tip.read()
    now = world.clock.wall() * 1000
    assert tip.read_up_to_millis == pytest.approx(now - 2 * HOUR * 1000, abs=1000)
    tip.read()
    assert tip.read_up_to_millis == pytest.approx(now, abs=1000)

"""A worker that begins at LATEST on a host whose clock is wrong."""

import pytest

from kcl_pipeline.errors import ExpiredIteratorError
from kcl_pipeline.events import ShardEnded
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered

SHARD = "shardId-000000000000"


class WrongClock:
    """The world's clock, with a wall clock that is some seconds off."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def __getattr__(self, name):
        return getattr(self._clock, name)

    def wall(self):
        return self._clock.wall() + self._seconds


def begun_at_latest(seconds):
    """A worker that has an iterator at LATEST, whose first use is refused as too old.

    The row has no time, as one of a Java leader.
    """
    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"})
    world.kinesis.service_time = lambda _stream: None
    world.put(b"before")
    world.clock.advance(5)
    clock, world.clock = world.clock, WrongClock(world.clock, seconds)
    world.worker = world.make_worker()
    world.worker.start_up()
    world.clock = clock
    read, expired = world.kinesis.get_records, []

    def get_records(*request):
        if not expired:
            expired.append(request)
            raise ExpiredIteratorError("the iterator expired")
        return read(*request)

    world.kinesis.get_records = get_records
    while not expired:
        world.run(0.05)
    return world


@pytest.mark.parametrize("seconds", shortened([-222.0, 222.0], lambda late: late < 0))
def test_an_expired_iterator_at_latest_loses_and_repeats_nothing(seconds):
    """Seed 9005499: the replacement was asked for at the host's time."""
    world = begun_at_latest(seconds)
    world.put(*numbered(4))
    world.run(300)
    assert world.data() == numbered(4)


def test_a_shard_that_closed_before_its_first_read_ends_whatever_the_hosts_clock_says():
    world = begun_at_latest(222.0)
    world.model.call(
        "UpdateShardCount",
        StreamName="orders",
        TargetShardCount=2,
        ScalingType="UNIFORM_SCALING",
    )
    world.run(60)
    assert [event.lease_key for event in world.of(ShardEnded)] == [SHARD]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("is_function", [True, False])
def test_a_shard_at_latest_begins_when_its_lease_is_created(buffered, is_function):
    """Seed 8400000993: the next owner read from a later LATEST than the first one.

    The first worker dies before its first commit.
    """
    world = World(
        shards=1,
        buffered=buffered,
        shard_sync={"initial_position_in_stream": "LATEST"},
        is_function=is_function,
    )
    world.put(b"before")
    world.clock.advance(5)
    while world.leases.get(SHARD) is None:
        world.worker.lead_tick()
        world.clock.advance(0.25)
    row = world.leases.rows()[SHARD]
    assert row["checkpoint"] == {"S": "LATEST"}, "as Java writes it"
    assert row["kclpInitialTimestamp"] == {"N": str(int(world.clock.wall()) * 1000)}
    world.clock.advance(3)
    world.put(*numbered(4))
    world.clock.advance(60)
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    world.run(30)
    assert world.data() == numbered(4)


def test_a_time_that_the_service_does_not_tell_is_left_out():
    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"})
    world.kinesis.service_time = lambda _stream: None
    world.put(b"before")
    world.clock.advance(5)
    world.run(5)
    world.put(*numbered(4))
    world.run(5)
    assert "kclpInitialTimestamp" not in world.leases.rows()[SHARD]
    assert world.data() == numbered(4)

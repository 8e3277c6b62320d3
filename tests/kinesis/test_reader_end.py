"""The end of a shard, and shards and streams that are gone."""

from __future__ import annotations

import pytest

from kcl_pipeline import errors
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.kinesis.reader import ARRIVAL_TOLERANCE_SECONDS
from kcl_pipeline.position import TRIM_HORIZON, Position
from tests.support.reader_world import SHARD, World, drain, values


def test_the_end_of_a_shard_comes_with_its_children() -> None:
    world = World()
    (number,) = world.put(b"0")
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=SHARD, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    reader = world.reader(TRIM_HORIZON)
    chunks = drain(reader)
    assert values(chunks) == [b"0"]
    assert chunks[-1].through == Position(number)
    assert {c.shard_id for c in chunks[-1].shard_end or ()} == {
        "shardId-000000000001",
        "shardId-000000000002",
    }
    assert all(c.shard_end is None for c in chunks[:-1])
    assert reader.ended
    assert reader.read() is None


def test_the_end_without_any_new_record_leaves_the_position() -> None:
    world = World()
    (number,) = world.put(b"0")
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=SHARD, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    (chunk,) = drain(world.reader(Position(number)))
    assert (chunk.after, chunk.through, chunk.records.num_rows, len(chunk.shard_end or ())) == (
        Position(number),
        Position(number),
        0,
        2,
    )


@pytest.mark.parametrize("before_first_read", [True, False])
@pytest.mark.parametrize("with_identity", [True, False])
def test_a_shard_of_a_deleted_stream_has_not_ended(
    before_first_read: bool, with_identity: bool
) -> None:
    world = World()
    (number,) = world.put(b"0")
    identity = StreamIdentityCheck(world.kinesis, world.clock) if with_identity else None
    reader = world.reader(TRIM_HORIZON, identity=identity)
    if not before_first_read:
        assert values([reader.read()]) == [b"0"]
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(60)
    for _ in range(3):
        with pytest.raises(errors.NotFoundError):
            reader.read()
    assert not reader.ended
    assert reader.position == (TRIM_HORIZON if before_first_read else Position(number))


def test_a_shard_of_a_stream_that_was_created_again_has_not_ended() -> None:
    """The new stream has a shard with this id, which may be closed."""
    world = World()
    world.put(b"0")
    reader = world.reader(TRIM_HORIZON, identity=StreamIdentityCheck(world.kinesis, world.clock))
    assert values([reader.read()]) == [b"0"]
    world.create_again()
    with pytest.raises(errors.StreamReplacedError, match="was deleted and created again"):
        drain(reader)
    assert not reader.ended


def test_an_end_is_not_believed_before_the_stream_is_proven_to_be_the_same() -> None:
    world = World()
    identity = StreamIdentityCheck(world.kinesis, world.clock)
    reader = world.reader(TRIM_HORIZON, identity=identity)
    old = world.stream
    world.create_again()
    world.put(b"of the new stream")
    world.split()
    with pytest.raises(errors.StreamReplacedError):
        drain(reader)
    assert (reader.ended, reader.position) == (False, TRIM_HORIZON)
    world.stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    assert world.stream.created_millis != old.created_millis
    (chunk,) = drain(world.reader(TRIM_HORIZON, identity=identity))
    assert values([chunk]) == [b"of the new stream"]
    assert chunk.shard_end
    assert not chunk.lost


def test_the_end_of_an_empty_shard_of_another_stream_is_not_believed() -> None:
    """Its page has no first record, which would be doubted, too."""
    world = World()
    reader = world.reader(TRIM_HORIZON, identity=StreamIdentityCheck(world.kinesis, world.clock))
    world.create_again()
    world.split()
    with pytest.raises(errors.StreamReplacedError):
        drain(reader)
    assert not reader.ended


def test_an_end_whose_proof_fails_is_read_again() -> None:
    world = World()
    world.put(b"0")
    world.split()
    reader = world.reader(TRIM_HORIZON, identity=StreamIdentityCheck(world.kinesis, world.clock))
    world.kinesis.describe_error = errors.ThrottledError("slow down")
    with pytest.raises(errors.ThrottledError):
        reader.read()
    world.kinesis.describe_error = None
    (chunk,) = drain(reader)
    assert values([chunk]) == [b"0"]
    assert chunk.shard_end


def test_a_shard_that_has_left_retention_is_lost_and_tells_what_follows_it() -> None:
    world = World()
    world.put(b"0")
    world.split()
    world.clock.advance(49 * 3600)
    reader = world.reader(TRIM_HORIZON, identity=StreamIdentityCheck(world.kinesis, world.clock))
    (chunk,) = drain(reader)
    assert chunk.lost
    assert (chunk.after, chunk.through, chunk.records.num_rows) == (TRIM_HORIZON, TRIM_HORIZON, 0)
    assert [c.shard_id for c in chunk.shard_end or ()] == [
        "shardId-000000000001",
        "shardId-000000000002",
    ]
    assert reader.ended


def test_a_listed_shard_that_is_not_found_is_asked_for_again() -> None:
    world = World()
    world.put(b"0")
    reader = world.reader(TRIM_HORIZON, identity=StreamIdentityCheck(world.kinesis, world.clock))
    world.kinesis.iterator_error = errors.NotFoundError("no such shard")
    with pytest.raises(errors.NotFoundError, match="no such shard"):
        reader.read()
    world.kinesis.iterator_error = None
    assert values(drain(reader)) == [b"0"]


def test_many_shards_of_a_missing_stream_share_one_description() -> None:
    world = World()
    identity = StreamIdentityCheck(world.kinesis, world.clock)
    world.create_again()
    world.kinesis.described = 0
    for _ in range(10):
        with pytest.raises(errors.StreamReplacedError):
            identity.confirm(world.stream, world.clock.monotonic())
    assert world.kinesis.described == 1
    world.clock.advance(6)
    with pytest.raises(errors.StreamReplacedError):
        identity.confirm(world.stream, world.clock.monotonic())
    assert world.kinesis.described == 2


def test_the_first_pages_of_all_shards_share_one_description() -> None:
    """DescribeStreamSummary is limited to 20 calls per second for an account."""
    world = World(shards=50)
    for number in range(2_000):
        world.put(b"%d" % number)
    world.clock.advance(ARRIVAL_TOLERANCE_SECONDS + 1)
    identity = StreamIdentityCheck(world.kinesis, world.clock)
    world.kinesis.described = 0
    shards = [f"shardId-{number:012}" for number in range(50)]
    readers = [world.reader(TRIM_HORIZON, shard=name, identity=identity) for name in shards]
    for reader in readers:
        assert reader.read() is not None
        world.clock.advance(1)
    assert world.kinesis.described == 1
    world.clock.advance(3600)
    for reader in readers:
        assert reader.read() is None
    assert world.kinesis.described == 1


@pytest.mark.parametrize("age", [0, ARRIVAL_TOLERANCE_SECONDS - 1])
def test_a_first_record_that_arrived_after_the_last_description_needs_another(age: float) -> None:
    world = World()
    identity = StreamIdentityCheck(world.kinesis, world.clock)
    world.put(b"before")
    world.clock.advance(2 * ARRIVAL_TOLERANCE_SECONDS)
    assert values(drain(world.reader(TRIM_HORIZON, identity=identity))) == [b"before"]
    world.create_again()
    world.put(b"of the new stream")
    world.clock.advance(age)
    with pytest.raises(errors.StreamReplacedError):
        world.reader(TRIM_HORIZON, identity=identity).read()

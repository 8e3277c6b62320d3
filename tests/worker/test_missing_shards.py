"""What a worker does with a shard that is not found: SHARD_END is only written for a shard that was
read to its end.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import (
    AwsTrouble,
    LeaseLost,
    LossReason,
    RecordsLost,
    ShardEnded,
    ShardStalled,
)
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import World, numbered

ZERO = "shardId-000000000000"
HALF = str(2**127)
DAY = 24 * 3600


BOTH = pytest.mark.parametrize("make", [True, False], ids=["buffered", "executors"], indirect=True)
"""Also where executors read. `make test-long` has all tests with both."""


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["buffered", "executors"]
)
def make(request):
    def made(**settings) -> World:
        world = World(shards=1, buffered=request.param, **settings)
        world.run(3.0)
        return world

    return made


def rows(world: World):
    return {lease.lease_key: lease for lease in world.leases.list_leases().leases}


def delete_stream(world: World) -> None:
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(0.1)


def split(world: World) -> None:
    world.model.call("SplitShard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey=HALF)


def stop(world: World) -> None:
    """No worker runs, and the lease is nobody's."""
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)


def start(world: World) -> None:
    world.worker = world.make_worker("w-2")
    world.worker.start_up()


@BOTH
def test_a_deleted_stream_ends_no_lease(make):
    world = make()
    world.put(*numbered(20))
    world.run(5.0)
    delete_stream(world)
    world.run(130.0)
    assert {key: row.ended for key, row in rows(world).items()} == {ZERO: False}
    assert world.of(ShardEnded) == []
    assert world.of(RecordsLost) == []
    assert any("not found" in event.error for event in world.of(AwsTrouble))
    assert world.of(ShardStalled), "a shard that stands still is reported"


def test_a_stream_that_is_created_again_ends_no_lease_and_is_reported(make):
    world = make()
    world.put(*numbered(20))
    world.run(5.0)
    delete_stream(world)
    world.clock.advance(60)
    world.model.call("CreateStream", StreamName="orders", ShardCount=2)
    world.clock.advance(60)
    world.run(30.0)
    assert not any(row.ended for row in rows(world).values())
    assert world.of(ShardEnded) == []
    assert any("was deleted and created again" in event.error for event in world.of(AwsTrouble))


@BOTH
def test_a_shard_that_left_retention_is_reported_deleted_and_its_children_go_on(make):
    world = make()
    world.put(*numbered(20))
    world.run(5.0)
    landed = rows(world)[ZERO].checkpoint
    stop(world)
    world.put(*numbered(30, "lost"))
    split(world)
    world.clock.advance(49 * 3600)
    world.sent = [value for value in world.sent if not value.startswith(b"lost")]
    world.put(*numbered(40, "after"))
    start(world)
    world.run(30.0)
    assert ZERO not in rows(world)
    assert sorted(rows(world)) == ["shardId-000000000001", "shardId-000000000002"]
    assert world.data() == sorted(world.sent)
    (lost,) = world.of(RecordsLost)
    assert (lost.lease_key, lost.reason, lost.after) == (
        ZERO,
        LossReason.SHARD_NOT_LISTED,
        landed,
    )
    assert world.of(ShardEnded) == []
    assert [e for e in world.of(LeaseLost) if e.lease_key == ZERO] == []


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "LATEST"])
def test_the_oldest_listed_descendants_go_on_from_their_beginning(make, position):
    """The child has left retention too. With LATEST the leader would begin its children at LATEST,
    and skip what they have.
    """
    world = make(shard_sync={"initial_position_in_stream": position})
    world.put(*numbered(5))
    world.run(5.0)
    stop(world)
    split(world)
    world.clock.advance(60)
    for shard, middle in (("1", 2**126), ("2", 2**127 + 2**126)):
        world.model.call(
            "SplitShard",
            StreamName="orders",
            ShardToSplit=f"shardId-00000000000{shard}",
            NewStartingHashKey=str(middle),
        )
        world.clock.advance(60)
    world.clock.advance(2 * DAY)
    world.put(*numbered(40, "after"))
    start(world)
    world.run(30.0)
    assert sorted(rows(world)) == [f"shardId-00000000000{n}" for n in (3, 4, 5, 6)]
    assert all(row.checkpoint > TRIM_HORIZON for row in rows(world).values())
    assert [v for v in world.data() if v.startswith(b"after")] == numbered(40, "after")


def test_losing_a_shard_survives_lost_answers(make):
    world = make()
    world.put(*numbered(20))
    world.run(5.0)
    stop(world)
    split(world)
    world.clock.advance(49 * 3600)
    start(world)
    failing = iter(["TransactWriteItems", "TransactWriteItems", "DeleteItem"])
    wanted = next(failing)

    def lose(operation, _key):
        nonlocal wanted
        if operation == wanted:
            wanted = next(failing, None)
            raise UnavailableError("the answer was lost")

    world.leases.hook(None, lose)
    world.run(30.0)
    assert ZERO not in rows(world)
    assert len(rows(world)) == 2
    assert len(world.of(RecordsLost)) == 1
    assert wanted is None, "each answer was lost"


@BOTH
def test_an_end_of_another_stream_of_the_same_name_ends_no_lease(make):
    """The position is TRIM_HORIZON, which fits every stream. The leader has not noticed it yet."""
    world = make()
    delete_stream(world)
    world.clock.advance(60)
    world.model.call("CreateStream", StreamName="orders", ShardCount=1)
    world.clock.advance(60)
    split(world)
    world.clock.advance(60)
    world.run_without_leader(60.0)
    assert {key: row.ended for key, row in rows(world).items()} == {ZERO: False}
    assert world.of(ShardEnded) == []
    assert any("was deleted and created again" in event.error for event in world.of(AwsTrouble))


@BOTH
def test_an_end_waits_for_its_proof(make):
    world = make()
    world.put(*numbered(20))
    world.run(5.0)
    split(world)
    world.clock.advance(60)
    resolve, refusals = world.kinesis.resolve_stream, iter(range(3))

    def throttled(name_or_arn, *, multi_stream):
        if next(refusals, None) is not None:
            raise ThrottledError("slow down")
        return resolve(name_or_arn, multi_stream=multi_stream)

    world.kinesis.resolve_stream = throttled
    world.run(60.0)
    assert next(refusals, "asked") == "asked"
    assert len(world.of(ShardEnded)) == 1
    assert world.data() == sorted(world.sent)

"""A worker that is paused between looking for the children of a shard and creating their leases."""

import pytest

from kcl_pipeline.events import LeaseLost, ShardEnded
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.testing.row_store import no_hook
from tests.support.worker_world import World, numbered

PARENT, LEFT, RIGHT, MERGED = (f"shardId-{number:012d}" for number in range(4))
CREATIONS = ("PutItem", "TransactWriteItems")


def split_world():
    """One shard with records, split before a worker reads them."""
    world = World(
        shards=1,
        shard_sync={
            "completed_lease_cleanup_interval_millis": 1_000,
            "garbage_lease_cleanup_interval_millis": 1_000,
        },
    )
    world.put(*numbered(3, "parent"))
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    return world


def pause_at_creation(world, meanwhile):
    """`meanwhile` happens before the first worker's first creation of a child is applied."""
    paused = []

    def hook(operation, key):
        if operation in CREATIONS and PARENT in world.leases.rows() and not paused:
            paused.append(key)
            meanwhile()

    world.leases.hook(hook, None)
    return paused


def run_until(world, condition):
    for _ in range(4_000):
        if condition():
            return
        world.run(0.05)
    raise AssertionError("it did not happen")


def test_a_shard_that_others_finished_meanwhile_is_not_created_and_read_again():
    """Seeds 7000208 and 9003081: the lease of a child came back, all of it was read again, and its
    own children were committed before it.
    """
    world = split_world()
    first, second = world.worker, world.make_worker("w-2")

    def others_go_on():
        world.worker = second
        second.start_up()
        run_until(world, lambda: LEFT in world.leases.rows())
        world.put(*numbered(6, "child"))
        world.model.call(
            "MergeShards", StreamName="orders", ShardToMerge=LEFT, AdjacentShardToMerge=RIGHT
        )
        run_until(world, lambda: MERGED in world.leases.rows())
        world.put(*numbered(3, "merged"))
        run_until(world, lambda: set(world.leases.rows()) == {MERGED})
        world.worker = first

    paused = pause_at_creation(world, others_go_on)
    run_until(world, lambda: paused)
    world.leases.hook(None, None)
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert set(world.leases.rows()) == {MERGED}


@pytest.mark.parametrize("found", ["no row", "its end"])
def test_children_are_created_for_an_unfinished_parent_alone(found):
    world = split_world()

    def meanwhile():
        row = world.leases.rows()[PARENT]
        if found == "no row":
            world.leases.erase(PARENT)
        else:
            world.leases.plant(row | {"checkpoint": {"S": SHARD_END.sequence_number}})

    paused = pause_at_creation(world, meanwhile)
    run_until(world, lambda: paused)
    assert not {LEFT, RIGHT}.intersection(world.leases.rows())
    assert world.of(ShardEnded) == []
    assert [event.lease_key for event in world.of(LeaseLost)] == [PARENT]


def test_a_child_that_the_other_parent_created_is_left_as_it_is():
    """A merge: both parents' workers find no row, and the slower one finds one when it writes."""
    world = World(shards=2)
    world.put(*numbered(3))
    world.model.call(
        "MergeShards",
        StreamName="orders",
        ShardToMerge=PARENT,
        AdjacentShardToMerge="shardId-000000000001",
    )
    world.clock.advance(60)
    child = "shardId-000000000002"
    before = []

    def hook(operation, _key):
        if operation in CREATIONS and world.leases.rows() and not before:
            before.append(operation)
            world.leases.hook(None, None)
            parent = world.leases.get(PARENT)
            row = {
                "leaseKey": {"S": child},
                "entityType": {"S": "LEASE"},
                "leaseCounter": {"N": "7"},
                "ownerSwitchesSinceCheckpoint": {"N": "0"},
                "checkpoint": {"S": "TRIM_HORIZON"},
                "parentShardId": {"SS": [PARENT, "shardId-000000000001"]},
                "startingHashKey": {"S": "0"},
                "endingHashKey": {"S": str(2**128 - 1)},
                "note": {"S": f"next to {parent.lease_key}"},
            }
            world.leases.plant(row)

    run_until(world, lambda: len(world.worker.leases.held()) == 2)
    world.leases.hook(hook, no_hook)
    run_until(world, lambda: len(world.of(ShardEnded)) == 2)
    assert before
    assert world.leases.rows()[child]["note"]["S"]
    assert int(world.leases.rows()[child]["leaseCounter"]["N"]) >= 7

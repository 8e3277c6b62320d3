"""A worker deletes the leases that it has finished, if the leader leaves them, as in Java."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble, LeaseDeleted, RecordsLost, ShardEnded
from tests.support.worker_world import World, numbered

PARENT = "shardId-000000000000"
CHILDREN = ("shardId-000000000001", "shardId-000000000002")
KEEP_SECONDS = 50.0


def split_world(*, children_begin=True, **settings):
    """A shard that was split and read to its end, and whose children have leases."""
    kept = {"completed_lease_cleanup_interval_millis": int(KEEP_SECONDS * 1000)} | settings
    world = World(shards=1, shard_sync=kept)
    world.put(*numbered(5))
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    for _ in range(100):
        world.run(0.5)
        if world.of(ShardEnded) and all(
            child in world.worker.lifecycle.consumers for child in CHILDREN
        ):
            break
    if children_begin:
        world.put(*(f"child-{n}".encode() for n in range(20)))
        world.run(2)
    return world


def test_a_finished_lease_is_deleted_after_twice_the_time_of_a_leader():
    world = split_world()
    world.run_without_leader(2 * KEEP_SECONDS - 10)
    assert world.leases.get(PARENT) is not None
    world.run_without_leader(130)
    assert world.leases.get(PARENT) is None
    assert [(e.lease_key) for e in world.of(LeaseDeleted)] == [PARENT]
    assert set(world.worker.lifecycle.consumers) == set(CHILDREN)
    assert all(world.leases.get(child) is not None for child in CHILDREN)
    world.put(b"later")
    world.run_without_leader(5)
    assert b"later" in world.data()
    assert not world.of(RecordsLost)


def test_a_lease_whose_children_have_not_begun_is_kept():
    world = split_world(children_begin=False)
    world.run_without_leader(2 * KEEP_SECONDS + 125)
    assert world.leases.get(PARENT).ended


def test_a_lease_is_kept_if_the_settings_say_so():
    world = split_world(cleanup_leases_upon_shard_completion=False)
    world.run_without_leader(2 * KEEP_SECONDS + 125)
    assert world.leases.get(PARENT).ended


def test_a_leader_of_this_package_deletes_it_first():
    world = split_world()
    world.run(KEEP_SECONDS + 15)
    assert world.leases.get(PARENT) is None
    assert [(e.lease_key) for e in world.of(LeaseDeleted)] == [PARENT]


@pytest.mark.parametrize("is_applied", [True, False], ids=["applied", "not applied"])
def test_a_deletion_without_an_answer_is_made_again(is_applied):
    world = split_world()
    delete, calls = world.leases.delete, []

    def failing(lease):
        calls.append(lease.lease_key)
        if len(calls) == 1:
            if is_applied:
                delete(lease)
            raise UnavailableError("no answer", operation="DeleteItem")
        return delete(lease)

    world.leases.delete = failing
    world.run_without_leader(2 * KEEP_SECONDS + 85)
    assert [e.operation for e in world.of(AwsTrouble) if "deletion" in e.operation] == [
        f"deletion of {PARENT}"
    ]
    world.run_without_leader(65)
    assert world.leases.get(PARENT) is None
    assert set(world.worker.lifecycle.consumers) == set(CHILDREN)
    assert not world.of(RecordsLost)

"""What a worker announces in its row, so that a leader does not have to scan for it."""

from __future__ import annotations

from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, ShardEnded
from tests.support.worker_world import World, numbered


def announced(world):
    (row,) = world.rows.scan_workers().workers
    return row.changes


def test_the_end_of_a_shard_is_announced_when_its_children_have_leases():
    world = World(shards=1)
    world.put(*numbered(3))
    world.run(5)
    assert announced(world) == 0
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    while not world.of(ShardEnded):
        world.run_without_leader(0.05)
    assert announced(world) == 1
    assert len(world.leases.list_leases().leases) == 3


def test_an_announcement_that_fails_is_in_the_next_report():
    world = World(shards=1)
    world.run(5)

    def fail(operation, _key):
        if operation == "UpdateItem":
            raise ThrottledError("slow down", operation="UpdateItem")

    world.rows.store.before_call = fail
    world.worker.reporter.note_change()
    world.worker.process_tick()
    world.rows.store.before_call = lambda *_: None
    assert announced(world) == 0
    assert world.of(AwsTrouble) == [AwsTrouble("announcement of changes", "slow down")]
    world.worker.process_tick()
    assert announced(world) == 0
    world.run(11)
    assert announced(world) == 1

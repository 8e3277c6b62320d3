"""Workers whose positions are in the table, in virtual time."""

import pytest

from kcl_pipeline.events import BatchCommitted, RecordsLost
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered

PARENT, CHILD = "shardId-000000000000", "shardId-000000000001"


def stored(world, shard_id):
    """What the table has for a shard."""
    return world.table.stored(shard_id)


def split(world):
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)


def test_a_shard_that_ends_is_ended_in_the_table_and_its_children_are_read():
    world = World(shards=1)
    world.put(*numbered(5))
    split(world)
    world.put(*numbered(9)[5:])
    world.run(20)
    assert world.data() == sorted(world.sent)
    assert world.leases.get(PARENT).checkpoint == SHARD_END
    assert stored(world, PARENT).ended
    assert not stored(world, "shardId-000000000001").ended


def test_a_shard_that_a_java_worker_ended_is_ended_before_its_children_are_read():
    world = World(shards=1)
    world.put(*numbered(5))
    world.run(5)
    assert not stored(world, PARENT).ended
    stop_worker(world)
    split(world)
    row = world.leases.rows()[PARENT]
    for number in (1, 2):  # as a Java worker creates them
        create_lease(
            world.leases,
            Lease(f"shardId-{number:012d}", TRIM_HORIZON, parent_shard_ids=frozenset({PARENT})),
        )
    world.leases.plant({**row, "checkpoint": {"S": "SHARD_END"}})
    world.put(*numbered(9)[5:])
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert stored(world, PARENT).ended


def test_many_shards_that_java_workers_have_read_are_taken_over_by_the_commit_of_a_batch():
    """`d_move`: no commit before the first batch, and no commit for each shard."""
    shards = 12
    world = World(shards=shards)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    for shard in world.kinesis.list_shards(stream):
        put = world.model.call(
            "PutRecord",
            StreamName="orders",
            PartitionKey="k",
            ExplicitHashKey=str(shard.hash_key_range.start),
            Data=b"java",
        )
        create_lease(
            world.leases,
            Lease(
                put["ShardId"],
                Position(put["SequenceNumber"]),
                hash_key_range=shard.hash_key_range,
            ),
        )
    world.run(10)
    assert len(world.worker.lifecycle.consumers) == shards
    assert world.table.version == -1, "no commit before reading"
    world.put(*numbered(5 * shards, "ours-"))
    world.run(5)
    assert world.data() == numbered(5 * shards, "ours-")
    assert len(world.of(BatchCommitted)) < shards / 2


def stop_worker(world):
    """End the worker without a checkpoint, and start another one."""
    for held in world.worker.leases.held():
        world.worker.leases.drop(held, "crashed")
    world.worker = world.make_worker("w-2")
    world.worker.start_up()


@pytest.mark.parametrize("again", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_a_worker_that_crashes_repeats_nothing(again):
    world = World(shards=2)
    for part in range(again + 2):
        world.put(*numbered(5, f"p{part}-"))
        world.run(2.0 + again / 7)
        for row in world.leases.rows().values():
            world.leases.plant({**row, "checkpoint": {"S": "TRIM_HORIZON"}})
        stop_worker(world)
    world.run(20)
    assert world.data() == sorted(world.sent)


def test_deleted_lease_rows_repeat_nothing():
    world = World(shards=2)
    world.put(*numbered(20))
    world.run(5)
    for key in list(world.leases.rows()):
        world.leases.erase(key)
    world.put(*numbered(30)[20:])
    world.run(30)
    assert world.data() == sorted(world.sent)


def test_a_busy_worker_writes_a_row_once_per_renewal():
    world = World(shards=1)
    world.run(5)
    writes = []
    world.leases.hook(lambda called, key: writes.append(called) if key == PARENT else None, None)
    began, since = world.leases.get(PARENT).counter, world.clock.monotonic()
    world.run(20)
    before, now = world.leases.get(PARENT).counter, world.clock.monotonic()
    idle_rate = (before - began) / (now - since)
    writes.clear()
    for part in range(20):
        world.put(*numbered(1, f"p{part}-"))
        world.run(1.0)
    written = world.leases.get(PARENT).counter - before
    assert written / (world.clock.monotonic() - now) == pytest.approx(idle_rate, rel=0.03)
    assert writes.count("UpdateItem") == written
    assert world.data() == sorted(world.sent)
    assert world.leases.get(PARENT).checkpoint == stored(world, PARENT).position


def erase_all(world):
    for key in list(world.leases.rows()):
        world.leases.erase(key)


each_position = pytest.mark.parametrize(
    "position", [pytest.param("TRIM_HORIZON", marks=pytest.mark.long), "LATEST", "AT_TIMESTAMP"]
)


def of_initial_position(position, **settings):
    sync = {"initial_position_in_stream": position}
    if position == "AT_TIMESTAMP":
        sync["initial_timestamp"] = "2020-01-01T00:00:00Z"
    return World(shards=1, shard_sync=sync, **settings)


@each_position
def test_deleted_rows_of_a_shard_that_was_split_meanwhile_lose_and_repeat_nothing(position):
    world = of_initial_position(position)
    world.run(5)
    world.put(*numbered(10))
    world.run(5)
    erase_all(world)
    stop_worker(world)
    world.put(*numbered(20)[10:])
    split(world)
    world.put(*numbered(30)[20:])
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert not world.of(RecordsLost)


@each_position
def test_the_deleted_row_of_a_parent_is_restored_before_its_children_begin(position):
    world = of_initial_position(position)
    world.run(5)
    world.put(*numbered(10))
    world.run(5)
    stop_worker(world)
    split(world)
    for number in (1, 2):  # as a Java leader creates them
        create_lease(
            world.leases,
            Lease(
                f"shardId-{number:012d}", Position(position), parent_shard_ids=frozenset({PARENT})
            ),
        )
    world.put(*numbered(20)[10:])
    world.leases.erase(PARENT)
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert not world.of(RecordsLost)


@pytest.mark.parametrize("ends", [True, False])
def test_an_ended_parent_without_a_row_is_not_reported_at_latest(ends):
    world = of_initial_position("LATEST")
    world.run(5)
    world.put(*numbered(10))
    world.run(5)
    split(world)
    if ends:
        world.run(5)
    erase_all(world)
    world.put(*numbered(20)[10:])
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert not world.of(RecordsLost)


@pytest.mark.parametrize("position", [LATEST, AT_TIMESTAMP])
def test_a_child_that_has_not_begun_waits_for_a_deleted_parent_without_a_leader(position):
    world = of_initial_position(str(position))
    world.run(5)
    world.put(*numbered(10))
    world.run(5)
    split(world)
    world.leases.erase(PARENT)
    create_lease(
        world.leases, Lease(CHILD, position, owner="w-1", parent_shard_ids=frozenset({PARENT}))
    )
    world.run_without_leader(0.05)
    world.worker.leases.discover()
    world.run_without_leader(3)
    assert world.leases.get(PARENT) is None
    assert world.worker.lifecycle.consumers[CHILD].state is ConsumerState.BLOCKED
    world.run(60)
    assert world.leases.get(PARENT).ended
    assert world.data() == sorted(world.sent)
    assert not world.of(RecordsLost)

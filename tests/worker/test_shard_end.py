"""The end of a shard while answers are lost, workers stop, and others are paused."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble, LeaseLost, ShardEnded
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import SHARD_END, Position, StoredPosition
from kcl_pipeline.testing.sink import LogEntry
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered

PARENT = "shardId-000000000000"


def ending_world(**settings):
    """One shard with records, split before a worker reads them: its last batch ends it."""
    world = World(shards=1, **settings)
    world.put(*numbered(5))
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    return world


def consumer_of(world):
    return world.worker.lifecycle.consumers[PARENT]


def fail_the_end(world, *, applied):
    """The first write of SHARD_END has no answer."""
    write = world.leases.update_checkpoint
    done = []

    def failing(lease, *, checkpoint, **rest):
        if checkpoint == SHARD_END and not done:
            done.append(lease)
            if applied:
                write(lease, checkpoint=checkpoint, **rest)
            raise UnavailableError("no answer", operation="UpdateItem")
        return write(lease, checkpoint=checkpoint, **rest)

    world.leases.update_checkpoint = failing
    return done


def run_until(world, condition):
    for _ in range(2_000):
        if condition():
            return
        world.run(0.05)
    raise AssertionError("it did not happen")


def test_the_table_has_the_end_before_the_row():
    world = ending_world()
    write, ended_in_table = world.leases.update_checkpoint, []

    def noting(lease, *, checkpoint, **rest):
        if checkpoint == SHARD_END:
            ended_in_table.append(world.table.stored(PARENT).ended)
        return write(lease, checkpoint=checkpoint, **rest)

    world.leases.update_checkpoint = noting
    run_until(world, lambda: world.of(ShardEnded))
    assert ended_in_table == [True]
    assert world.data() == numbered(5)


def test_a_worker_whose_end_is_refused_looks_at_its_row_before_it_tries_again():
    """Another worker got the lease and committed; the row says so, and no renewal is due."""
    world = ending_world(lease={"failover_time_millis": 10_000})
    get = world.leases.get

    def overtaking(key, **options):
        if key != PARENT and world.leases.get is not get:  # the children, right before the end
            world.leases.get = get
            world.leases.assign(get(PARENT), "w-2")
            ((name, stored),) = world.table.positions.items()
            by_the_other = StoredPosition(stored.number + 1, stored.position)
            assert world.table.append(LogEntry(len(world.table.log), (), {name: by_the_other}))
        return get(key, **options)

    world.leases.get = overtaking
    run_until(world, lambda: world.leases.get is get)
    for _ in range(40):
        world.worker.fetch_tick()
        world.worker.process_tick()
        world.clock.advance(0.05)
    assert [event.lease_key for event in world.of(LeaseLost)] == [PARENT]
    assert not world.table.stored(PARENT).ended


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not applied"])
def test_a_worker_that_stops_while_the_end_has_no_answer_does_not_move_it_back(applied):
    """Seed 7002791. The stop flushes what the table has, and the row is at the end by then.

    An end that was not applied cannot be applied any more: the next worker writes it.
    """
    world = ending_world()
    done = fail_the_end(world, applied=applied)
    run_until(world, lambda: done)
    consumer = consumer_of(world)
    assert consumer.flush_needed
    world.worker.lifecycle.release_all()
    row = world.leases.get(PARENT)
    assert row.checkpoint == (SHARD_END if applied else consumer.committed)
    assert row.owner is None


def test_a_shard_that_is_read_again_while_its_end_becomes_known_has_ended():
    world = ending_world()
    done = fail_the_end(world, applied=True)
    run_until(world, lambda: done)
    consumer = consumer_of(world)
    world.worker.lifecycle.restart(consumer)
    world.worker.leases.renew_all()
    assert consumer.held.lease.ended
    world.run(5)
    assert consumer.state is ConsumerState.ENDED
    assert consumer_of(world) is consumer
    assert world.data() == numbered(5)
    assert world.of(ShardEnded) == []


@pytest.mark.parametrize("number", [1, 2], ids=["first child", "second child"])
def test_a_shard_ends_after_the_row_of_a_former_stream_with_the_key_of_its_child_is_gone(number):
    """Simulation seed 9710000033: a child without a lease, because its key was in use."""
    world = World(shards=1)
    world.run(5)
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(60)
    world.model.call("CreateStream", StreamName="orders", ShardCount=1)
    world.run(120)
    assert world.leases.get(PARENT).recreated_millis is not None
    world.put(*numbered(5))
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**127)
    )
    former = Lease(f"shardId-{number:012d}", Position("49"), owner="other")
    assert create_lease(world.leases, former)
    world.run_without_leader(30)
    assert world.data() == numbered(5)
    assert not world.leases.get(PARENT).ended, "a child has no lease"
    assert any("former stream" in event.error for event in world.of(AwsTrouble))
    world.put(*numbered(40, "c"))
    world.run(60)
    assert world.leases.get(former.lease_key).recreated_millis is not None
    assert world.data() == numbered(40, "c") + numbered(5)

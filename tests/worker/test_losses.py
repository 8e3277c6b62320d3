"""What a worker reports when the row of a lease that it holds is deleted by hand."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import NotFoundError, UnavailableError
from kcl_pipeline.events import AwsTrouble, LossReason, RecordsLost
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered

PARENT = "shardId-000000000000"


def reading(position="TRIM_HORIZON", is_function=False, **sync):
    """A worker that has committed records of a shard, and holds its lease."""
    world = World(
        shards=1,
        shard_sync={
            "initial_position_in_stream": position,
            "leases_recovery_auditor_execution_frequency_millis": 10**9,
            **sync,
        },
        is_function=is_function,
    )
    world.run(2)
    world.put(*numbered(5))
    world.run(2)
    assert world.data() == numbered(5)
    return world


def split(world, begun):
    """The shard is split, and another worker, which is not of this package, holds a child."""
    world.model.split("orders", PARENT)
    first = world.model.open_shard_ids("orders")[0]
    create_lease(
        world.leases,
        Lease(first, begun, owner="java", counter=4, parent_shard_ids=frozenset({PARENT})),
    )


def delete(world):
    """Delete the row; the worker notices it at the next renewal."""
    consumer = world.worker.lifecycle.consumers[PARENT]
    world.leases.erase(PARENT)
    world.clock.advance(0.4)
    world.worker.lease_tick()
    world.worker.lifecycle.sync_with_leases()
    assert PARENT not in world.worker.lifecycle.consumers
    return consumer


def test_a_child_that_has_begun_leaves_the_rest_of_its_parent_unread():
    world = reading()
    split(world, Position("77"))
    consumer = delete(world)
    lost = RecordsLost("w-1", PARENT, LossReason.ROW_DELETED, consumer.committed, stream="orders")
    assert world.of(RecordsLost) == [lost]
    assert not lost.after.is_sentinel


def test_the_row_is_restored_for_a_child_that_has_not_begun():
    world = reading()
    split(world, TRIM_HORIZON)
    delete(world)
    assert not world.of(RecordsLost)


def test_shard_sync_finds_an_open_shard_and_reads_it_again():
    world = reading()
    delete(world)
    assert not world.of(RecordsLost)


def test_at_latest_the_shard_is_started_anew_behind_what_is_there():
    world = reading("LATEST", is_function=True)
    consumer = delete(world)
    lost = RecordsLost("w-1", PARENT, LossReason.ROW_DELETED, consumer.committed, stream="orders")
    assert world.of(RecordsLost) == [lost]


def test_at_latest_the_shard_is_read_on_where_the_table_ends():
    world = reading("LATEST")
    delete(world)
    assert not world.of(RecordsLost)


def test_at_latest_a_shard_of_which_nothing_was_read_yet_loses_nothing():
    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"})
    world.run(1)
    assert world.worker.lifecycle.consumers[PARENT].committed == LATEST
    delete(world)
    assert not world.of(RecordsLost)


def taken_by_another(world):
    row = world.leases.get(PARENT)
    world.leases.assign(row, "java")


def expired(world):
    world.clock.advance(5)


def finished(world):
    world.worker.lifecycle.consumers[PARENT].state = ConsumerState.ENDING


@pytest.mark.parametrize("before", [taken_by_another, expired, finished])
def test_a_lease_that_was_lost_otherwise_is_not_reported(before):
    """Another worker has read on, and a leader has deleted the finished lease."""
    world = reading()
    split(world, Position("77"))
    before(world)
    if before is not taken_by_another:
        world.leases.erase(PARENT)
    world.clock.advance(0.4)
    world.worker.lease_tick()
    world.worker.lifecycle.sync_with_leases()
    assert PARENT not in world.worker.lifecycle.consumers
    assert not world.of(RecordsLost)


def test_a_row_that_is_found_missing_after_a_pause_is_not_reported():
    world = reading()
    split(world, Position("77"))
    looks = []

    def pause(operation, key):
        if (operation, key) == ("GetItem", PARENT):
            looks.append(key)
            if len(looks) > 1:  # the first one is that of the refused renewal
                world.clock.advance(5)

    world.leases.store.before_call = pause
    delete(world)
    assert not world.of(RecordsLost)


def test_where_finished_leases_are_kept_for_less_than_the_failover_time_nothing_is_concluded():
    world = reading(completed_lease_cleanup_interval_millis=500)
    split(world, Position("77"))
    delete(world)
    assert not world.of(RecordsLost)


def test_a_stream_that_is_gone_has_nothing_to_lose():
    world = reading()

    def gone(*_):
        raise NotFoundError("no such stream")

    world.kinesis.list_shards = gone
    delete(world)
    assert not world.of(RecordsLost)
    assert not [e for e in world.of(AwsTrouble) if "look for the row" in e.operation]


def failing(world, operation, times):
    """Let the first calls of an operation for the row fail, after that of the refused renewal."""
    looks = []

    def fail(called, key):
        if (called, key) == (operation, PARENT):
            looks.append(key)
            if 1 < len(looks) <= 1 + times:
                raise UnavailableError("no answer", operation=called)

    world.leases.store.before_call = fail


def look_again(world, seconds):
    for _ in range(round(seconds / 0.1)):
        world.clock.advance(0.1)
        world.worker.lifecycle.sync_with_leases()


def failed_looks(world):
    return [e.operation for e in world.of(AwsTrouble) if PARENT in e.operation]


def test_a_loss_is_judged_again_after_a_look_that_failed():
    world = reading()
    split(world, Position("77"))
    failing(world, "GetItem", times=1)
    consumer = delete(world)
    assert not world.of(RecordsLost)
    assert failed_looks(world) == [f"look for the row of {PARENT}"]
    look_again(world, 0.5)
    lost = RecordsLost("w-1", PARENT, LossReason.ROW_DELETED, consumer.committed, stream="orders")
    assert world.of(RecordsLost) == [lost]
    look_again(world, 5)
    assert world.of(RecordsLost) == [lost]


def test_a_loss_is_judged_again_after_a_description_that_failed():
    world = reading()
    split(world, Position("77"))
    resolve = world.kinesis.resolve_stream

    def fail(*_request, **_more):
        raise UnavailableError("no answer", operation="DescribeStreamSummary")

    world.kinesis.resolve_stream = fail
    delete(world)
    assert not world.of(RecordsLost)
    world.kinesis.resolve_stream = resolve
    look_again(world, 0.5)
    assert [event.lease_key for event in world.of(RecordsLost)] == [PARENT]


def test_after_the_failover_time_a_look_that_fails_is_not_repeated():
    """Another worker may have finished the shard, and a leader has deleted its lease."""
    world = reading()
    split(world, Position("77"))
    failing(world, "GetItem", times=100)
    delete(world)
    look_again(world, 2)
    told = failed_looks(world)
    assert 2 <= len(told) <= 5
    world.leases.store.before_call = None
    look_again(world, 5)
    assert failed_looks(world) == told
    assert not world.of(RecordsLost)

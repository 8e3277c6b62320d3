"""A leader whose streams are not those of the application leads nobody and writes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.events import CycleFailed, LeaderElected
from kcl_pipeline.position import TRIM_HORIZON, Position
from tests.support.leader_world import World, settled


def record(world):
    return world.coordinator.read_application()


def other_settings(world, *streams):
    return world.settings.model_copy(update={"streams": streams})


def test_the_first_cycle_records_the_streams():
    world = World(shards=2)
    world.leader().run_once()
    identity = record(world).identity
    (stream,) = identity.streams
    assert (identity.mode, stream.name, identity.sink) == ("single_stream", "orders", None)
    assert (
        stream.created_millis
        == world.kinesis.resolve_stream("orders", multi_stream=False).created_millis
    )


def test_a_leader_of_another_stream_does_not_take_the_lock():
    world = World(shards=6)
    world.leader().run_once()
    world.leaders.clear()
    world.coordinator.erase("Leader")
    before = world.table()
    world.model.create_stream("other", 2)
    world.settings = other_settings(world, "other")
    other = world.leader("other")
    world.events.clear()
    for _ in range(5):
        report = other.run_once()
        assert not report.led
        assert "do accept" in (report.error or "")
        world.clock.advance(60)
    assert world.table() == before
    assert world.coordinator.read_lock() is None
    assert world.happened(LeaderElected) == []
    assert world.happened(CycleFailed)


def test_a_leader_gives_the_lock_up_when_the_record_is_changed_on_purpose():
    world = World(shards=2)
    leader = world.leader()
    leader.run_once()
    world.model.create_stream("other", 2)
    found = record(world)
    stream = replace(found.identity.streams[0], arn="arn:aws:kinesis:r:1:stream/other")
    assert world.coordinator.put_application(
        replace(found.identity, streams=(stream,)), replacing=found
    )
    report = leader.run_once()
    assert not report.led
    assert "do accept" in (report.error or "")
    assert world.coordinator.read_lock() is None


def create_again(world, shards):
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(60)
    world.model.create_stream("orders", shards)
    world.clock.advance(60)


def test_a_stream_that_is_created_again_under_a_running_leader_gets_new_leases():
    world = settled(World(shards=4), "a")
    for worker in world.workers.values():
        worker.start_reading()
    create_again(world, 8)
    world.events.clear()
    world.run(30)
    assert not world.happened(CycleFailed)
    created = world.kinesis.resolve_stream("orders", multi_stream=False).created_millis
    rows = world.table()
    assert sorted(rows) == [f"shardId-{n:012}" for n in range(8)]
    assert {lease.recreated_millis for lease in rows.values()} == {created}
    assert {lease.checkpoint for lease in rows.values()} == {TRIM_HORIZON}
    (recorded,) = record(world).identity.streams
    assert (recorded.created_millis, recorded.renewed) == (created, True)


def test_an_old_row_that_the_scan_does_not_show_yet_is_not_taken_for_a_new_one():
    world = settled(World(shards=2), "a")
    hidden = world.leases.rows()["shardId-000000000001"]
    create_again(world, 2)
    world.leases.erase("shardId-000000000001")
    planted = []

    def appear(operation, key):
        if operation == "TransactWriteItems" and not planted:
            planted.append(key)
            world.leases.plant(hidden)

    world.leases.store.before_call = appear
    world.run(60)
    recreated = {lease.recreated_millis for lease in world.table().values()}
    assert planted
    assert len(recreated) == 1
    assert None not in recreated
    assert len(world.table()) == 2


def test_an_old_description_of_a_stream_changes_nothing():
    """DescribeStreamSummary returns the former stream for a moment."""
    world = settled(World(shards=2), "a")
    resolve = world.kinesis.resolve_stream
    former = resolve("orders", multi_stream=False)
    create_again(world, 3)
    world.run(30)
    before = world.table().keys(), record(world).identity
    world.kinesis.resolve_stream = lambda *_, **__: former
    world.run(30)
    world.kinesis.resolve_stream = resolve
    world.run(30)
    assert (world.table().keys(), record(world).identity) == before


@pytest.mark.parametrize("leases", ["of this stream", "of another stream"])
def test_leases_without_a_record_are_compared_with_the_shards(leases):
    world = World(shards=2)
    world.leader().run_once()
    world.leaders.clear()
    world.coordinator.erase("Leader")
    world.coordinator.erase("Migration3.0")
    if leases == "of another stream":
        (row, *_) = world.table().values()
        world.leases.update_checkpoint(row, checkpoint=Position("1"))
    report = world.leader("second").run_once()
    assert report.led == (leases == "of this stream")
    assert (record(world) is not None) == report.led


def test_a_missing_stream_of_several_does_not_keep_the_others_from_being_recorded():
    world = World(shards=1, streams=("orders", "clicks"))
    world.model.call("DeleteStream", StreamName="orders")
    leader = world.leader()
    assert leader.run_once().led
    assert [stream.name for stream in record(world).identity.streams] == ["clicks"]
    world.clock.advance(60)
    world.model.create_stream("orders", 1)
    world.run(10)
    assert [stream.name for stream in record(world).identity.streams] == ["clicks", "orders"]

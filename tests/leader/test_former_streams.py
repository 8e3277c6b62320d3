"""Streams that the application does not read any more: strategies and the waiting time."""

from dataclasses import replace

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import LeaseDeleted, RecordsLost
from kcl_pipeline.leader.streams import ASK_SECONDS
from kcl_pipeline.leader.sync import MIN_ANSWERS
from tests.leader.test_selection import SelectingWorld
from tests.support.streams_world import StreamsWorld

AUTO = {
    "former_streams_leases_deletion_strategy": "FORMER_STREAMS_AUTO_DETECTION_DEFERRED_DELETION",
    "wait_period_to_delete_former_streams_millis": 60_000,
}
PROVIDED = AUTO | {
    "former_streams_leases_deletion_strategy": "PROVIDED_STREAMS_DEFERRED_DELETION",
    "former_streams": ("c",),
}


def streams_of_leases(world):
    return sorted({key.split(":")[1] for key in world.leases.rows()})


def recorded(world):
    return [one.name for one in world.coordinator.read_application().identity.streams]


def read_by(world, name, *streams, **shard_sync):
    """All records are read by a new worker with these streams; older workers crash."""
    world.workers.clear()
    world.due.clear()
    world.start(name, *streams, shard_sync=shard_sync)
    world.run_until(world.has_all, limit=90)


def world_of_three():
    world = StreamsWorld("a", "b", "c", shards=1)
    for stream in "abc":
        world.put(stream, 5, stream)
    read_by(world, "old", "a", "b", "c")
    return world


def forget_c(world):
    found = world.coordinator.read_application()
    streams = tuple(one for one in found.identity.streams if one.name != "c")
    assert world.coordinator.put_application(
        replace(found.identity, streams=streams), replacing=found
    )


def test_by_default_a_former_stream_is_read_on():
    world = world_of_three()
    read_by(world, "new", "a", "b")
    world.run(120)
    world.put("c", 5, "later")
    world.run_until(world.has_all, limit=20)
    assert recorded(world) == streams_of_leases(world) == ["a", "b", "c"]


@pytest.mark.parametrize("strategy", [AUTO, PROVIDED])
def test_a_former_stream_is_removed_after_the_waiting_time(strategy):
    world = world_of_three()
    read_by(world, "new", "a", "b", **strategy)
    world.put("c", 5, "while it waits")
    world.run_until(world.has_all, limit=20)
    assert streams_of_leases(world) == ["a", "b", "c"]
    world.run_until(lambda: streams_of_leases(world) == ["a", "b"], limit=90)
    assert recorded(world) == ["a", "b"]
    world.put("a", 5, "later")
    world.run_until(world.has_all, limit=20)
    world.run(60)
    assert streams_of_leases(world) == ["a", "b"], "nobody creates them again"
    reasons = {event.reason for event in world.of(LeaseDeleted)}
    assert reasons == {"its stream is not read any more"}
    assert world.of(RecordsLost) == []


def test_a_stream_that_is_not_provided_stays():
    world = world_of_three()
    read_by(world, "new", "a", "c", **PROVIDED | {"former_streams": ("x",)})
    world.run(120)
    assert recorded(world) == streams_of_leases(world) == ["a", "b", "c"]


def test_a_stream_that_comes_back_in_time_is_kept():
    world = world_of_three()
    read_by(world, "new", "a", "b", **AUTO)
    world.run(40)
    read_by(world, "newer", "a", "b", "c", **AUTO)
    world.run(120)
    assert recorded(world) == streams_of_leases(world) == ["a", "b", "c"]


def test_a_former_stream_that_does_not_exist_is_removed_at_once():
    world = world_of_three()
    read_by(
        world, "new", "a", "b", **AUTO | {"wait_period_to_delete_former_streams_millis": 3_600_000}
    )
    world.delete("c")
    world.run_until(lambda: streams_of_leases(world) == ["a", "b"], limit=60)
    assert recorded(world) == ["a", "b"]


def test_leases_without_a_record_are_removed_after_the_waiting_time_too():
    """A leader stopped between the two steps of a removal."""
    world = world_of_three()
    world.workers.clear()
    forget_c(world)
    read_by(world, "new", "a", "b", **AUTO)
    assert streams_of_leases(world) == ["a", "b", "c"]
    world.run_until(lambda: streams_of_leases(world) == ["a", "b"], limit=90)
    assert recorded(world) == ["a", "b"]


@pytest.mark.parametrize(("position", "is_read"), [("TRIM_HORIZON", True), ("LATEST", False)])
def test_a_missing_lease_of_an_orphaned_stream_begins_at_its_position(position, is_read):
    world = StreamsWorld("a", "b", shards=1)
    world.create("c", 2)
    world.start("old", "a", "b", "c")
    world.run(15)
    world.workers.clear()
    forget_c(world)
    lost = max(key for key in world.leases.rows() if ":c:" in key)
    world.leases.erase(lost)
    world.put("c", 10, "c")
    world.start(
        "new",
        "a",
        "b",
        shard_sync={
            "orphaned_stream_initial_position_in_stream": position,
            "leases_recovery_auditor_execution_frequency_millis": 5_000,
        },
    )
    world.run_until(lambda: lost in world.leases.rows(), limit=120)
    world.run(20)
    assert world.has_all() == is_read


def test_a_flapping_selection_removes_nothing():
    world = SelectingWorld("a", "b")
    world.start("w", shard_sync=AUTO | {"wait_period_to_delete_former_streams_millis": 0})
    world.run(10)
    world.selected = ("a",)
    world.run(ASK_SECONDS * (MIN_ANSWERS - 1))
    world.selected = ("a", "b")
    world.run(ASK_SECONDS + 10)
    assert streams_of_leases(world) == world.recorded() == ["a", "b"]
    assert world.of(LeaseDeleted) == []
    world.selected = ("a",)
    world.run(ASK_SECONDS * (MIN_ANSWERS + 2))
    assert streams_of_leases(world) == world.recorded() == ["a"]


def test_the_settings_are_checked():
    with pytest.raises(ValueError, match="does not fit former_streams_leases_deletion_strategy"):
        ConsumerSettings(
            application_name="app", streams=("a",), shard_sync={"former_streams": ("b",)}
        )

"""The commit protocol of a worker is that of the record of its application."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.seek.downgrade import Downgrade
from kcl_pipeline.errors import OtherApplicationError
from kcl_pipeline.events import LeaseLost, ShardPaused
from kcl_pipeline.leases.identity_check import protocol_of
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.sink import InMemorySink
from tests.support.operator_world import OperatorWorld

SINK = "delta:/lake/rows"


class RecordedWorld(OperatorWorld):
    sink_address = SINK


def batch(world, name, count=12):
    values = [f"{name}-{n}".encode() for n in range(count)]
    world.put(*values)
    world.work_until(lambda: set(values) <= set(world.data()))
    return values


def use(world, protocol):
    """Workers that start from now on have this setting."""
    given = world.settings
    wanted = given.batch.model_copy(update={"commit_protocol": protocol})
    world.settings = given.model_copy(update={"batch": wanted})


def recorded(world):
    return protocol_of(world.coordinator.read_application().identity)


def stored(world):
    """The shards whose position the table has."""
    return sum(one.position is not None for one in world.table._positions.values())


def prepared(world):
    """Return the rows that were written with a pending checkpoint, from now on."""
    found, update = [], world.leases.update_checkpoint

    def noting(lease, **changes):
        if changes.get("pending") is not None:
            found.append(lease.lease_key)
        return update(lease, **changes)

    world.leases.update_checkpoint = noting
    return found


def test_a_new_application_writes_no_row_before_a_commit():
    world = RecordedWorld(shards=2)
    assert recorded(world) == "positions"
    written = prepared(world)
    values = batch(world, "a")
    assert (written, stored(world)) == ([], 2)
    assert Counter(world.data()) == Counter(values)


def test_an_application_of_an_older_version_keeps_two_phase():
    """Its record has the plain address of the sink."""
    world = RecordedWorld(shards=2, batch={"commit_protocol": "two_phase"})
    assert recorded(world) == "two_phase"
    values = batch(world, "a")
    world.end("w-1")
    use(world, None)
    world.start("w-2")
    written = prepared(world)
    values += batch(world, "b")
    assert (len(set(written)), stored(world), recorded(world)) == (2, 0, "two_phase")
    assert Counter(world.data()) == Counter(values)


@pytest.mark.parametrize("crashed", [True, False])
def test_one_worker_with_the_setting_changes_the_record(crashed):
    world = RecordedWorld(shards=2, batch={"commit_protocol": "two_phase"})
    values = batch(world, "a")
    (world.crash if crashed else world.end)("w-1")
    use(world, "positions")
    world.start("w-2")
    assert recorded(world) == "positions"
    values += batch(world, "b")
    world.work(10)
    assert stored(world) == 2
    assert Counter(world.data()) == Counter(values)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("two_phase", "'two_phase' does not read"),
        (None, "changed from two_phase to positions"),
    ],
)
def test_a_running_worker_with_two_phase_ends_when_it_takes_a_lease_after_the_change(
    setting, sentence
):
    """It reads the record before it begins a lease. Without a setting it had followed the record.

    Otherwise it would stand still with each shard that it takes.
    """
    world = RecordedWorld(shards=2, batch={"commit_protocol": "two_phase"})
    values = batch(world, "a")
    world.end("w-1")
    use(world, setting)
    world.start("w-2")
    values += batch(world, "b")
    use(world, "positions")
    world.start("w-3")
    values += batch(world, "c")
    world.crash("w-3")
    with pytest.raises(OtherApplicationError, match=sentence):
        world.work(60)
    assert not world.of(ShardPaused)
    world.crash("w-2")
    use(world, None)
    world.start("w-4")
    values += batch(world, "d")
    world.work(20)
    assert Counter(world.data()) == Counter(values)


def test_a_running_worker_with_positions_ends_when_it_takes_a_lease_after_a_downgrade():
    """It may have been paused during the downgrade."""
    world = RecordedWorld(shards=2)
    values = batch(world, "a")
    record = world.coordinator.read_application()
    world.coordinator.put_application(replace(record.identity, positions=False), replacing=record)
    values += batch(world, "b")
    shard = world.kinesis.list_shards(StreamId("orders"))[0]
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit=shard.shard_id,
        NewStartingHashKey=str(2**126),
    )
    with pytest.raises(OtherApplicationError, match="changed from positions to two_phase"):
        world.work(60)
    assert Counter(world.data()) == Counter(values)


def test_a_worker_with_two_phase_does_not_start_and_leaves_the_others_alone():
    world = RecordedWorld(shards=2)
    use(world, "two_phase")
    with pytest.raises(OtherApplicationError, match="kcl-pipeline downgrade"):
        world.start("w-2")
    values = batch(world, "a")
    assert Counter(world.data()) == Counter(values)
    assert set(world.owners().values()) == {"w-1"}
    assert not [one for one in world.of(LeaseLost) if one.worker_id == "w-1"]


def test_after_a_downgrade_workers_without_the_setting_use_two_phase():
    world = RecordedWorld(shards=2)
    values = batch(world, "a")
    sink = InMemorySink(world.table, clock=world.clock)
    Downgrade(world.app, world.kinesis, sink).write(
        "token", pause=True, wait_seconds=60, stay_paused=True
    )
    assert (recorded(world), stored(world)) == ("two_phase", 0)
    Pausing(world.app).resume()
    world.start("w-2")
    written = prepared(world)
    values += batch(world, "b")
    world.work(10)
    assert len(set(written)) == 2
    assert Counter(world.data()) == Counter(values)
    assert not world.of(ShardPaused)


def test_deleted_tables_are_recorded_with_positions_again():
    """By the worker that runs, also if its settings name no protocol."""
    world = RecordedWorld(shards=2)
    values = batch(world, "a")
    for table in (world.leases, world.rows, world.coordinator):
        table.store.drop()
    values += batch(world, "b")
    world.work(30)
    assert recorded(world) == "positions"
    assert Counter(world.data()) == Counter(values)

"""Positions move from the table to the lease rows, and back with the next workers."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.seek.downgrade import Downgrade
from kcl_pipeline.control.seek.log import NoLog
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.testing.sink import InMemorySink
from tests.control.test_seek import TWO_PHASE, batch, counts, three_batches
from tests.control.test_seek_positions import POSITIONS, failing_moves, stored


def downgrade(world):
    return Downgrade(world.app, world.kinesis, InMemorySink(world.table, clock=world.clock))


def downgraded(world):
    return downgrade(world).write("token", pause=True, wait_seconds=60, stay_paused=True)


def use(world, protocol):
    """Workers that start from now on have this protocol."""
    given = world.settings
    wanted = given.batch.model_copy(update={"commit_protocol": protocol})
    world.settings = given.model_copy(update={"batch": wanted})


def start_two_phase(world):
    """A worker with the two-phase protocol goes on."""
    use(world, "two_phase")
    Pausing(world.app).resume()
    world.start("w-2")


def rows(world):
    return {one.lease_key: one for one in world.app.leases.list_leases().leases}


@pytest.mark.parametrize("crashed", [True, False])
def test_workers_with_two_phase_continue_and_repeat_nothing(crashed):
    world, _, old, new = three_batches(shards=3, **POSITIONS)
    ahead = [b"ahead-%d" % n for n in range(12)]
    world.put(*ahead)
    while not set(ahead) <= set(world.data()):
        world.work(0.1)
    if crashed:
        world.crash("w-1")
        assert any(rows(world)[key].checkpoint < one.position for key, one in stored(world).items())
    plan = downgrade(world).plan()
    assert {one.lease_key for one in plan.changes} == set(rows(world))
    done = downgraded(world)
    assert (len(done.written), done.refused, done.is_paused) == (3, (), True)
    assert {one.position for one in stored(world).values()} == {None}
    start_two_phase(world)
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + ahead + late)
    assert not world.of(ShardPaused)


def test_and_back_again():
    world, _, old, new = three_batches(shards=2, **POSITIONS)
    downgraded(world)
    start_two_phase(world)
    between = batch(world, "between")
    world.crash("w-2")
    use(world, "positions")
    world.start("w-3")
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + between + late)
    assert None not in {one.position for one in stored(world).values()}
    assert not world.of(ShardPaused)


@pytest.mark.parametrize("lands", [True, False])
def test_a_downgrade_that_stopped_halfway_is_run_again(lands, monkeypatch):
    world, _, old, new = three_batches(shards=2, **POSITIONS)
    with failing_moves(monkeypatch, lands=lands), pytest.raises(SinkError):
        downgraded(world)
    downgraded(world)
    assert {one.position for one in stored(world).values()} == {None}
    start_two_phase(world)
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + late)


def test_a_deleted_row_is_created_at_the_position_of_the_table():
    world, _, old, new = three_batches(shards=2, **POSITIONS)
    world.crash("w-1")
    key = min(rows(world))
    place = stored(world)[key].position
    world.leases.erase(key)
    downgraded(world)
    assert rows(world)[key].checkpoint == place
    start_two_phase(world)
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + late)


def test_ended_shards_stay_ended():
    world, _, old, new = three_batches(shards=1, **POSITIONS)
    (parent,) = rows(world)
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=parent, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(60)
    children = batch(world, "child")
    world.work_until(lambda: stored(world)[parent].ended)
    done = downgraded(world)
    assert parent not in {one.lease_key for one in done.written}
    assert rows(world).get(parent) is None or rows(world)[parent].checkpoint == SHARD_END
    start_two_phase(world)
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + children + late)


def test_a_shard_that_has_ended_only_in_the_table_is_read_on():
    """Its worker crashed between the two writes."""
    world, _, old, new = three_batches(shards=1, **POSITIONS)
    (key,) = rows(world)
    world.crash("w-1")
    sink = InMemorySink(world.table, clock=world.clock)
    (name,) = world.table._positions
    (versions,) = sink.txn_versions([f"{key} {name}"]).values()
    sink.move(f"{key} {name}", versions, versions.position, ended=True)
    downgraded(world)
    assert not stored(world)[key].ended
    assert rows(world)[key].checkpoint == versions.position
    start_two_phase(world)
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(old + new + late)


def test_a_prepared_batch_is_settled_by_workers_first():
    world, *_ = three_batches(shards=1, **POSITIONS)
    world.crash("w-1")
    (key,) = rows(world)
    item = world.leases.rows()[key]
    world.leases.plant({**item, "pendingCheckpoint": item["checkpoint"]})
    with pytest.raises(SettingsError, match="has a prepared batch; start workers with"):
        downgrade(world).plan()


def test_there_is_nothing_to_do_without_positions():
    world, *_ = three_batches(shards=2, **TWO_PHASE)
    assert downgrade(world).plan().changes == ()
    with pytest.raises(SettingsError, match="stores no positions"):
        Downgrade(world.app, world.kinesis, NoLog())

"""Seek with a table: the rows, one commit with all shards, and the rows again."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.control.seek import Seeking, seek_target
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.position import Position, StoredPosition
from kcl_pipeline.testing.sink import LogEntry, SinkFault
from tests.control.test_seek import batch, counts, seeking, sought, three_batches
from tests.support.operator_world import OperatorWorld


def stored(world):
    """What the table has, by lease key."""
    return {name.rsplit("/", 1)[-1]: found for name, found in world.table.positions.items()}


def test_each_record_after_the_time_lands_once_more():
    world, begin, old, new = three_batches(shards=3, workers=("w-1", "w-2"))
    done = sought(world, ago=f"{world.clock.wall() - begin:.3f}s")
    assert (len(done.written), done.refused) == (3, ())
    assert {one.position for one in stored(world).values()} == {None}
    world.start("w-3")
    late = batch(world, "late")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in new))
    world.work(5)
    assert counts(world) == Counter(old + new + new + late)


def test_the_oldest_records_and_the_newest_position():
    world, _, old, new = three_batches()
    sought(world, to="TRIM_HORIZON")
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(5)
    world.crash("w-2")
    world.work(30)
    world.put(b"skipped")
    sought(world, to="latest")
    world.start("w-3")
    world.work(10)
    late = batch(world, "late")
    assert counts(world) == Counter((old + new) * 2 + late)


def test_a_seek_after_one_record_sets_the_row_and_the_table():
    world, _, old, new = three_batches(shards=2)
    rows = world.table.rows().to_pylist()
    shard = rows[0]["shard_id"]
    mine = sorted((r for r in rows if r["shard_id"] == shard), key=lambda r: r["sequence_number"])
    before, row = stored(world)[shard], world.app.leases.get(shard)
    done = sought(world, after=mine[2]["sequence_number"], shards=[shard])
    assert len(done.written) == 1
    now, after = stored(world)[shard], world.app.leases.get(shard)
    assert (now.number, now.position) == (before.number + 1, after.checkpoint)
    assert after.checkpoint.sequence_number == mine[2]["sequence_number"]
    assert after.table_mark is None
    assert after.counter > row.counter + 1, "a worker that read the row before the table is refused"
    world.start("w-2")
    again = [r["data"] for r in mine[3:]]
    world.work_until(lambda: all(counts(world)[one] == 2 for one in again))
    world.work(5)
    assert counts(world) == Counter(old + new + again)


def test_a_seek_is_one_commit_for_all_shards():
    world, *_ = three_batches(shards=3)
    before = world.table.version
    sought(world, to="TRIM_HORIZON")
    (entry,) = world.table.log[before + 1 :]
    assert entry.files == ()
    assert len(entry.positions) == 3


@pytest.mark.parametrize("fault", [SinkFault.LAND_AND_FAIL, SinkFault.FAIL])
def test_a_seek_whose_write_to_the_table_fails_is_run_again(fault):
    world, _, old, new = three_batches(shards=2)
    failing = seeking(world, to="TRIM_HORIZON")
    failing._sink.faults = lambda called, _keys: fault if called == "commit" else None
    if fault is SinkFault.FAIL:
        with pytest.raises(SinkError):
            failing.write("token", pause=True, wait_seconds=60)
    else:
        failing.write("token", pause=True, wait_seconds=60)
    assert [row.table_mark for row in world.app.leases.list_leases().leases] == [None] * 2
    done = sought(world, to="TRIM_HORIZON")
    assert len(done.written) == 2, "rows that have the position already are written, too"
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(5)
    assert counts(world) == Counter((old + new) * 2)
    assert not world.of(ShardPaused)


def test_a_paused_worker_that_commits_during_a_seek_makes_it_read_again():
    world, _, old, new = three_batches(shards=2)
    shard = next(iter(stored(world)))
    seeks, rivals = seeking(world, to="TRIM_HORIZON"), []

    def rival(called, _keys):
        if called == "commit" and not rivals:
            name = next(one for one in world.table.positions if one.endswith(shard))
            now = world.table.positions[name]
            rivals.append(StoredPosition(now.number + 1, now.position))
            world.table.append(LogEntry(world.table.version + 1, (), {name: rivals[0]}))

    seeks._sink.faults = rival
    done = seeks.write("token", pause=True, wait_seconds=60)
    assert len(done.written) == 2
    assert stored(world)[shard] == StoredPosition(rivals[0].number + 1, None)
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(5)
    assert counts(world) == Counter((old + new) * 2)


def split(world):
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    world.clock.advance(60)


def test_a_seek_of_one_shard_reads_its_descendants_again_and_lists_them():
    """Else rows of an ancestor would land after rows of a descendant."""
    world = OperatorWorld(shards=1)
    old = batch(world, "old")
    split(world)
    new = batch(world, "new")
    world.work(60)
    world.leases.erase("shardId-000000000001")
    plan = seeking(world, to="TRIM_HORIZON", shards=["shardId-000000000000"]).plan()
    assert [one.lease_key for one in plan.changes] == [
        f"shardId-{number:012}" for number in range(3)
    ]
    assert [one.seek.exists for one in plan.changes] == [True, False, True]
    assert "follows a shard that is read again" in plan.changes[1].note
    done = sought(world, to="TRIM_HORIZON", shards=["shardId-000000000000"])
    assert len(done.written) == 3
    assert {(one.position, one.ended) for one in stored(world).values()} == {(None, False)}
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(20)
    assert counts(world) == Counter((old + new) * 2)
    assert stored(world)["shardId-000000000000"].ended


def test_a_shard_that_is_split_while_a_seek_reads_the_table_has_its_children_changed():
    """A child whose first commit is in the table is listed, because the list is the newer one."""
    world = OperatorWorld(shards=1)
    batch(world, "old")
    world.work(60)
    seeks, splits = seeking(world, to="TRIM_HORIZON"), []

    def reshard(called, _keys):
        if called == "positions" and not splits:
            splits.append(called)
            split(world)

    seeks._sink.faults = reshard
    plan = seeks.plan()
    assert [one.lease_key for one in plan.changes] == [
        f"shardId-{number:012}" for number in range(3)
    ]


def test_a_seek_forward_of_one_shard_leaves_the_others_alone():
    world = OperatorWorld(shards=1)
    batch(world, "old")
    split(world)
    batch(world, "new")
    world.work(60)
    child = "shardId-000000000001"
    before = stored(world)
    plan = seeking(world, to="LATEST", shards=[child]).plan()
    assert [one.lease_key for one in plan.changes] == [child]
    sought(world, to="LATEST", shards=[child])
    after = stored(world)
    assert {key for key, one in after.items() if one != before[key]} == {child}


def test_without_the_pipeline_a_seek_is_refused_if_a_row_has_a_mark():
    world, *_ = three_batches()
    wanted = seek_target("TRIM_HORIZON", None, None, world.clock.wall())
    with pytest.raises(SettingsError, match="write --pipeline"):
        Seeking(world.app, world.kinesis, wanted).plan()


def test_a_seek_accepts_a_table_that_was_put_back():
    world, _, old, new = three_batches(shards=1)
    (key,) = stored(world)
    name = next(iter(world.table.positions))
    world.table.positions[name] = StoredPosition(1, Position("1"))
    sought(world, to="TRIM_HORIZON")
    assert world.app.leases.get(key).table_mark is None
    assert stored(world)[key] == StoredPosition(2, None)
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    assert not world.of(ShardPaused)


def test_a_plan_writes_nothing():
    world, *_ = three_batches()
    before, rows = stored(world), world.app.leases.list_leases().leases
    assert seeking(world, to="TRIM_HORIZON").plan().changes
    assert stored(world) == before
    assert {r.lease_key: r.checkpoint for r in rows} == {
        r.lease_key: r.checkpoint for r in world.app.leases.list_leases().leases
    }

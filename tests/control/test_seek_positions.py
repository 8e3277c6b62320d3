"""Seek with positions in the table: the row, the table, and the row again."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kcl_pipeline.control.seek.run import Seeking
from kcl_pipeline.control.seek.target import seek_target
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.leases.lease.table_mark import TableMark
from kcl_pipeline.testing.sink import InMemorySink
from tests.control.test_seek import batch, counts, seeking, sought, three_batches

POSITIONS = {"batch": {"commit_protocol": "positions"}}


def stored(world):
    """What the table has, by lease key."""
    return {name.rsplit("/", 1)[-1]: found for name, found in world.table._positions.items()}


def tables(world):
    """What a worker reads of each shard."""
    sink = InMemorySink(world.table, clock=world.clock)
    names = sorted(world.table._positions)
    return list(sink.txn_versions([f"{one.rsplit('/', 1)[-1]} {one}" for one in names]).values())


def test_each_record_after_the_time_lands_once_more():
    world, begin, old, new = three_batches(shards=3, workers=("w-1", "w-2"), **POSITIONS)
    done = sought(world, ago=f"{world.clock.wall() - begin:.3f}s")
    assert (len(done.written), done.refused) == (3, ())
    assert {one.position for one in stored(world).values()} == {None}
    world.start("w-3")
    late = batch(world, "late")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in new))
    world.work(5)
    assert counts(world) == Counter(old + new + new + late)


def test_the_oldest_records_and_the_newest_position():
    world, _, old, new = three_batches(**POSITIONS)
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
    world, _, old, new = three_batches(shards=2, **POSITIONS)
    rows = world.table.rows().to_pylist()
    shard = rows[0]["shard_id"]
    mine = sorted((r for r in rows if r["shard_id"] == shard), key=lambda r: r["sequence_number"])
    before, row = stored(world)[shard], world.app.leases.get(shard)
    done = sought(world, after=mine[2]["sequence_number"], shards=[shard])
    assert len(done.written) == 1
    now, after = stored(world)[shard], world.app.leases.get(shard)
    assert (now.number, now.position) == (before.number + 1, after.checkpoint)
    assert after.checkpoint.sequence_number == mine[2]["sequence_number"]
    assert after.table_mark == TableMark(world.table.id, now.number, now.position)
    assert after.counter > row.counter + 1, "a worker that read the row before the table is refused"
    world.start("w-2")
    again = [r["data"] for r in mine[3:]]
    world.work_until(lambda: all(counts(world)[one] == 2 for one in again))
    world.work(5)
    assert counts(world) == Counter(old + new + again)


@contextmanager
def failing_moves(monkeypatch, *, lands):
    """Writes of positions to the table have no answer."""
    move = InMemorySink.move

    def failing(*args, **options):
        if lands:
            move(*args, **options)
        raise SinkError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(InMemorySink, "move", failing)
        yield


@pytest.mark.parametrize("lands", [True, False])
def test_a_seek_whose_write_to_the_table_fails_is_run_again(lands, monkeypatch):
    world, _, old, new = three_batches(shards=2, **POSITIONS)
    with failing_moves(monkeypatch, lands=lands), pytest.raises(SinkError):
        sought(world, to="TRIM_HORIZON")
    marks = [row.table_mark for row in world.app.leases.list_leases().leases]
    assert [(one.table, one.position) for one in marks] == [(world.table.id, None)] * 2
    assert not any(one.doubt(found) for one, found in zip(marks, tables(world), strict=True))
    done = sought(world, to="TRIM_HORIZON")
    assert len(done.written) == 2, "rows that have the position already are written, too"
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(5)
    assert counts(world) == Counter((old + new) * 2)
    assert not world.of(ShardPaused)


def test_without_the_pipeline_a_seek_is_refused_if_a_row_has_a_mark():
    world, *_ = three_batches(**POSITIONS)
    wanted = seek_target("TRIM_HORIZON", None, None, world.clock.wall())
    with pytest.raises(SettingsError, match="write --pipeline"):
        Seeking(world.app, world.kinesis, wanted).plan()


def test_a_seek_accepts_a_restored_table():
    world, _, old, new = three_batches(shards=1, **POSITIONS)
    (key,) = stored(world)
    name = next(iter(world.table._positions))
    world.table._positions[name] = replace(world.table._positions[name], number=1)
    sought(world, to="TRIM_HORIZON")
    assert world.app.leases.get(key).table_mark == TableMark(world.table.id, 2, None)
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    assert not world.of(ShardPaused)


def test_a_plan_writes_nothing():
    world, *_ = three_batches(**POSITIONS)
    before, rows = stored(world), world.app.leases.list_leases().leases
    assert seeking(world, to="TRIM_HORIZON").plan().changes
    assert stored(world) == before
    assert {r.lease_key: r.checkpoint for r in rows} == {
        r.lease_key: r.checkpoint for r in world.app.leases.list_leases().leases
    }

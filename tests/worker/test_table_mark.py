"""A table that was replaced or restored while the lease rows have checkpoints (`table_mark`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import CommitEntry, TxnVersions, shard_key
from kcl_pipeline.errors import LeaseLostError, OtherTableError
from kcl_pipeline.events import ShardPaused, ShardResumed
from kcl_pipeline.leases.lease.serialization import lease_from_item, lease_to_item
from kcl_pipeline.leases.lease.table_mark import TableMark
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.sink import LogEntry, MemoryTable
from kcl_pipeline.worker.commit.positions import PositionsCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from tests.support import commit_world
from tests.support.commit_world import KEYS, NO_RECORDS, STREAM
from tests.support.worker_world import World as Fleet
from tests.support.worker_world import numbered

KEY = KEYS[0]
NAME = shard_key(KEY, f"{STREAM.arn}/17/{KEY}")
POSITIONS = {"batch": {"commit_protocol": "positions"}}


class World(commit_world.World):
    protocol = PositionsCommit

    def row(self) -> Lease:
        row = self.table.get(KEY)
        assert row is not None
        return row

    def begun(self) -> World:
        """A world whose row has checkpoint and mark of one commit."""
        assert self.commit(5) is not None
        for consumer in self.consumers.values():
            self.committer.checkpoint(consumer)
        assert self.row().checkpoint == Position("5")
        return self

    def replaced(self, versions: TxnVersions | None = None, *, table: str = "table-1") -> None:
        """Replace the table by another one that has these versions of the shard."""
        self.rows = MemoryTable(schema=NO_RECORDS.schema, id=table)
        self.rows.append(LogEntry(0))
        if versions is not None:
            self.rows.append(LogEntry(1, positions={NAME: versions}))
        self.sink.table = self.rows

    def take(self) -> Position:
        self.consumer = ShardConsumer(self.consumers[KEY].held, STREAM)
        return self.committer.resolve(self.consumer)


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World().begun()


def test_the_row_has_the_table_of_its_checkpoint(world: World) -> None:
    assert world.row().table_mark == TableMark("table-0", 1, Position("5"))
    assert world.commit(7) is not None
    assert world.row().table_mark == TableMark("table-0", 1, Position("5"))
    world.clock.advance(3.4)
    world.leases.renew_all()
    assert world.row().checkpoint == Position("7")
    assert world.row().table_mark == TableMark("table-0", 2, Position("7"))


def test_a_checkpoint_of_another_position_has_no_new_mark(world: World) -> None:
    held = world.consumers[KEY].held
    world.leases.note_processed(held, Position("9"), TableMark("table-0", 4, Position("9")))
    world.leases.checkpoint(held, checkpoint=Position("7"))
    assert world.row().table_mark == TableMark("table-0", 1, Position("5"))


def test_a_taker_marks_a_row_that_has_no_mark_yet() -> None:
    world = World()
    assert world.commit(5) is not None
    for consumer in world.consumers.values():
        world.leases.note_processed(consumer.held, Position("5"))
        world.committer.checkpoint(consumer)
    assert world.row().table_mark is None
    assert world.take() == Position("5")
    world.clock.advance(3.4)
    world.leases.renew_all()
    counter = world.row().counter
    assert world.row().table_mark == TableMark("table-0", 1, Position("5"))
    world.clock.advance(3.4)
    world.leases.renew_all()
    assert world.row().counter == counter + 1


REFUSED = [
    ("replaced", TxnVersions(None, 1, 1, Position("5")), "table-1"),
    ("replaced", None, "table-1"),
    ("older", None, "table-0"),
    ("older", TxnVersions(None, 1, 1, Position("4")), "table-0"),
    ("older", TxnVersions(None, 1, 1, None), "table-0"),
]


@pytest.mark.parametrize(("why", "versions", "table"), REFUSED)
def test_a_replaced_or_restored_table_is_refused(
    world: World, why: str, versions: TxnVersions | None, table: str
) -> None:
    world.replaced(versions, table=table)
    version = world.rows.version
    with pytest.raises(
        OtherTableError, match=rf"{KEY} stands still: .*{why}.*delete the lease row"
    ):
        world.take()
    assert world.rows.version == version, "nothing is committed"
    assert world.row().checkpoint == Position("5")


def test_a_smaller_number_with_the_same_position_is_refused(world: World) -> None:
    world.leases.note_processed(
        world.consumers[KEY].held, Position("5"), TableMark("table-0", 3, Position("5"))
    )
    world.clock.advance(3.4)
    world.leases.renew_all()
    with pytest.raises(OtherTableError, match="number of the shard is 1, after it was 3"):
        world.take()


def test_a_table_that_does_not_exist_any_more_is_refused(world: World) -> None:
    world.sink.table = MemoryTable()
    with pytest.raises(OtherTableError, match="does not exist any more"):
        world.take()


def test_a_checkpoint_after_the_mark_was_written_by_java(world: World) -> None:
    assert world.table.update_checkpoint(world.row(), checkpoint=Position("8")) is not None
    world.consumers[KEY].held.lease = world.row()
    assert world.take() == Position("8")
    assert world.consumer.versions == TxnVersions(None, 1, 2, Position("8"))
    world.clock.advance(3.4)
    world.leases.renew_all()
    assert world.row().table_mark == TableMark("table-0", 2, Position("8"))


def test_a_table_is_refused_only_if_the_row_is_still_the_same(world: World) -> None:
    world.replaced()
    assert world.table.update_checkpoint(world.row(), checkpoint=Position("8")) is not None
    with pytest.raises(LeaseLostError):
        world.take()


def test_a_pending_batch_stays_in_the_row_of_a_refused_table(world: World) -> None:
    held = world.consumers[KEY].held
    world.leases.checkpoint(
        held, checkpoint=Position("5"), pending=Position("6"), pending_state=b"77"
    )
    world.replaced()
    with pytest.raises(OtherTableError):
        world.take()
    row = world.row()
    assert (row.pending_checkpoint, row.pending_checkpoint_state) == (Position("6"), b"77")
    assert world.rows.version == 0, "no fence is committed"


def test_a_child_ends_no_parent_in_a_refused_table(world: World) -> None:
    world.replaced()
    consumer = ShardConsumer(world.consumers[KEY].held, STREAM)
    with pytest.raises(OtherTableError):
        world.committer.begin(consumer, ["shardId-9"], world.committer.look_up([consumer])[KEY])
    assert world.rows.version == 0


def test_a_batch_of_another_table_is_refused(world: World) -> None:
    """Also if the other table has the same number and position."""
    world.replaced(TxnVersions(None, 1, 1, Position("5")))
    batch = world.batch(8)
    entry = CommitEntry.to(NAME, world.consumers[KEY].versions, Position("8"))
    outcome = world.sink.commit(world.writer.write(batch), [entry])
    assert outcome.refused == (NAME,)
    moved = world.sink.move(NAME, world.consumers[KEY].versions, Position("8"), ended=False)
    assert moved is None


def test_the_first_batch_belongs_to_the_table_that_it_was_created_for() -> None:
    world = World()
    batch = world.batch(5)
    written = world.writer.write(batch)
    assert world.consumers[KEY].versions.table is None
    assert world.committer.prepare(batch, world.consumers, written) == {}
    assert world.consumers[KEY].versions.table == "table-0"
    world.replaced()
    result = world.committer.commit(batch, world.consumers, written)
    assert sorted(result.lost) == sorted(KEYS)


def test_the_first_batch_is_refused_if_another_worker_was_faster() -> None:
    world = World()
    world.rows.schema = NO_RECORDS.schema
    world.rows.append(LogEntry(0, positions={NAME: TxnVersions(None, 1, 1, Position("2"))}))
    batch = world.batch(5)
    lost = world.committer.prepare(batch, world.consumers, world.writer.write(batch))
    assert list(lost) == [KEY]


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=40),
    st.integers(1, 2**62),
    st.none() | st.builds(Position, st.integers(0, 2**186).map(str), st.integers(0, 2**62)),
)
def test_a_mark_is_read_as_it_was_written(
    table: str, number: int, position: Position | None
) -> None:
    mark = TableMark(table, number, position)
    assert TableMark.parsed(str(mark)) == mark
    lease = Lease("shardId-000000000000", TRIM_HORIZON, table_mark=mark)
    assert lease_from_item(lease_to_item(lease)) == lease


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "1 2 3 ", "x 2 3 t", "1 x 3 t", "1 2 x t"])
def test_a_text_of_another_form_is_no_mark(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        TableMark.parsed(text)


def test_a_shard_of_a_restored_table_is_paused_and_the_others_go_on() -> None:
    fleet = Fleet(shards=2, **POSITIONS)
    fleet.put(*numbered(20))
    fleet.run(20)
    assert fleet.data() == sorted(fleet.sent)
    key, other = sorted(fleet.leases.rows())
    name = next(one for one in fleet.table._positions if one.endswith(f"/{key}"))
    before = fleet.table._positions[name]
    assert before.number is not None
    fleet.table._positions[name] = replace(before, number=before.number - 1)
    fleet.worker.lifecycle.restart(fleet.worker.lifecycle.consumers[key])
    sent = len(fleet.sent)
    fleet.put(*numbered(40)[20:])
    fleet.run(20)
    (event,) = {one.lease_key: one for one in fleet.of(ShardPaused)}.values()
    assert event.lease_key == key
    assert "restored to an older state" in event.reason
    assert fleet.worker.lifecycle.consumers[other].error is None
    assert sent < len(fleet.data()) < len(fleet.sent), "the other shard was read"
    status = fleet.worker._status()
    assert status is not None
    assert [one.lease_key for one in status.paused] == [key]
    fleet.table._positions[name] = before
    fleet.run(70)
    assert fleet.data() == sorted(fleet.sent)
    assert [one.lease_key for one in fleet.of(ShardResumed)] == [key]

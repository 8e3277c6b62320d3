"""A table that was put back or replaced while the lease rows have checkpoints (`table_mark`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import LeaseLostError, OtherTableError, UnavailableError
from kcl_pipeline.events import ShardPaused, ShardResumed
from kcl_pipeline.leases import row as rows
from kcl_pipeline.leases.row import Lease, lease_from_item, lease_to_item
from kcl_pipeline.leases.store import ConditionCheck
from kcl_pipeline.leases.writes import LeaseSeek
from kcl_pipeline.position import TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.sinks.sink import shard_key
from kcl_pipeline.testing.sink import InMemorySink, LogEntry, MemoryTable
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.consumer import ShardConsumer
from tests.support import commit_world
from tests.support.commit_world import KEYS, NO_RECORDS, STREAM
from tests.support.worker_world import World as Fleet
from tests.support.worker_world import numbered

KEY = KEYS[0]
NAME = f"app/{shard_key(STREAM, KEY)}"


class World(commit_world.World):
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

    def replace(self, stored: StoredPosition | None = None, *, table: str = "table-1") -> None:
        """Replace the table by another one that stores this of the shard."""
        self.rows = MemoryTable(schema=NO_RECORDS.schema, id=table)
        self.rows.append(LogEntry(0))
        if stored is not None:
            self.rows.append(LogEntry(1, positions={NAME: stored}))
        self.committer = self.committer_of(self.leases, InMemorySink(self.rows, clock=self.clock))

    def lose_answer(self) -> None:
        """Lose the answer of the next write of the row."""

        def applied(called: str, key: str) -> None:
            if (called, key) == ("UpdateItem", KEY):
                self.table.hook(None, None)
                raise UnavailableError("no answer")

        self.table.hook(None, applied)

    def take(self):
        self.consumer = ShardConsumer(self.consumers[KEY].held, STREAM)
        return self.start({KEY: self.consumer})[KEY]


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World().begun()


def test_the_row_has_the_checkpoint_that_the_table_has(world: World) -> None:
    assert world.row().table_mark == Position("5")
    assert world.commit(7) is not None
    assert world.row().table_mark == Position("5")
    world.clock.advance(3.4)
    world.leases.renew_all()
    assert (world.row().checkpoint, world.row().table_mark) == (Position("7"), Position("7"))


def test_a_checkpoint_that_the_table_does_not_have_has_no_mark(world: World) -> None:
    held = world.consumers[KEY].held
    world.leases.note_processed(held, Position("9"), in_table=True)
    world.leases.checkpoint(held, checkpoint=Position("7"))
    assert (world.row().checkpoint, world.row().table_mark) == (Position("7"), Position("5"))
    world.leases.note_processed(held, Position("8"), in_table=False)
    world.leases.checkpoint(held, checkpoint=Position("8"))
    assert (world.row().checkpoint, world.row().table_mark) == (Position("8"), Position("5"))


def test_a_taker_marks_a_row_that_has_no_mark_yet() -> None:
    world = World()
    assert world.commit(5) is not None
    for consumer in world.consumers.values():
        world.leases.note_processed(consumer.held, Position("5"), in_table=False)
        world.committer.checkpoint(consumer)
    assert world.row().table_mark is None
    assert world.take() == Position("5")
    world.clock.advance(3.4)
    world.leases.renew_all()
    counter = world.row().counter
    assert world.row().table_mark == Position("5")
    world.clock.advance(3.4)
    world.leases.renew_all()
    assert world.row().counter == counter + 1


@pytest.mark.parametrize(
    ("stored", "table"),
    [
        (None, "table-1"),
        (None, "table-0"),
        (StoredPosition(1, Position("4")), "table-0"),
        (StoredPosition(9, Position("4", 7)), "table-1"),
        (StoredPosition(1, None), "table-0"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["5", "8"])
def test_a_table_without_the_marked_position_stops_the_lease(
    world: World, stored: StoredPosition | None, table: str, checkpoint: str
) -> None:
    """Whatever the checkpoint is: a Java worker may have moved it."""
    assert world.table.update_checkpoint(world.row(), checkpoint=Position(checkpoint))
    world.consumers[KEY].held.lease = world.row()
    world.replace(stored, table=table)
    version = world.rows.version
    error = world.take()
    assert isinstance(error, OtherTableError)
    assert f"{KEY} stands still" in str(error)
    assert "delete the lease row" in str(error)
    assert world.rows.version == version, "nothing is committed"
    assert world.row().checkpoint == Position(checkpoint)


def test_another_table_that_has_the_position_is_continued(world: World) -> None:
    """A copy with all rows, which a person put in its place."""
    world.replace(StoredPosition(1, Position("5")))
    assert world.take() == Position("5")


def test_a_table_that_does_not_exist_any_more_stops_the_lease(world: World) -> None:
    world.committer = world.committer_of(
        world.leases, InMemorySink(MemoryTable(), clock=world.clock)
    )
    assert isinstance(world.take(), OtherTableError)


def test_a_checkpoint_after_the_mark_was_written_by_java(world: World) -> None:
    assert world.table.update_checkpoint(world.row(), checkpoint=Position("8")) is not None
    world.consumers[KEY].held.lease = world.row()
    assert world.take() == Position("8")
    assert world.consumer.stored == StoredPosition(1, Position("5"))


def test_a_mark_that_is_written_while_the_shard_starts_stops_the_lease(world: World) -> None:
    """A renewal wrote position 7, its response was lost, and the table was put back.

    The row is ahead of the table then, but no Java worker has processed the records between.
    """
    assert world.commit(7) is not None
    world.clock.advance(3.4)
    world.lose_answer()
    world.leases.renew_all()
    assert world.consumers[KEY].held.lease.table_mark == Position("5")
    assert world.row().table_mark == Position("7")
    world.replace(StoredPosition(1, Position("5")))
    world.consumers[KEY].is_refused = True
    error = world.start({KEY: world.consumers[KEY]})[KEY]
    assert isinstance(error, LeaseLostError), "the row was adopted after the table was read"
    (held,) = world.leases.discover([KEY])
    error = world.start({KEY: ShardConsumer(held, STREAM)})[KEY]
    assert isinstance(error, OtherTableError)
    assert world.row().table_mark == Position("7")


def test_a_lease_stops_only_if_the_row_is_still_the_same(world: World) -> None:
    world.replace()
    assert world.table.update_checkpoint(world.row(), checkpoint=Position("8")) is not None
    assert isinstance(world.take(), LeaseLostError)


def seek_to_the_begin(world: World, expected: Lease) -> Lease:
    """Take the lease from its worker, seek the shard, and give it back; return the row."""
    assert world.table.evict(world.row()) is not None
    nothing = ConditionCheck(world.table.store, "no row", ())
    assert world.table.seek([LeaseSeek(world.row(), expected.checkpoint)], "t", nothing) == ()
    operator = InMemorySink(world.rows, clock=world.clock)
    known = operator.positions([shard_key(STREAM, KEY)])
    becomes = {key: stored.moved(None) for key, stored in known.shards.items()}
    landed = operator.commit(known.table_id, (), known.shards, becomes)
    assert landed.version is not None
    assert world.table.assign(world.row(), "w") is not None
    row = world.row()
    assert (row.checkpoint, row.owner, row.table_mark) == (expected.checkpoint, "w", None)
    return row


@pytest.mark.parametrize("waited_seconds", [0.0, 3.4], ids=["renewal", "checkpoint"])
@pytest.mark.parametrize("answer", ["none", "arrived", "lost"])
def test_a_seek_before_the_lease_came_back_is_not_undone(
    waited_seconds: float, answer: str
) -> None:
    """Owner, checkpoint and mark are as this worker read them; the table has no position now."""
    world = World()
    begun, held = world.row(), world.consumers[KEY].held
    assert begun.table_mark is None
    assert world.commit(1) is not None
    if answer == "lost":
        world.trouble[KEY] = [UnavailableError("no answer")]
        with pytest.raises(UnavailableError):
            world.leases.renew(held)
    elif answer == "arrived":
        world.leases.renew(held)
    row = seek_to_the_begin(world, begun)
    world.clock.advance(waited_seconds)
    if waited_seconds:
        world.leases.renew_all()
    else:
        with pytest.raises(LeaseLostError):
            world.leases.renew(held)
    assert world.row() == row
    with pytest.raises(LeaseLostError):
        world.committer.checkpoint(world.consumers[KEY])
    assert world.row() == row
    (again,) = world.leases.discover([KEY])
    consumer = ShardConsumer(again, STREAM)
    assert world.start({KEY: consumer}) == {KEY: begun.checkpoint}
    assert consumer.stored == StoredPosition(2, None)


@pytest.mark.parametrize("renewals", range(4))
def test_a_seek_that_creates_a_deleted_row_is_not_undone(renewals: int) -> None:
    """The new row has the owner and the checkpoint that this worker read, but not its counter."""
    world = World()
    begun, held = world.row(), world.consumers[KEY].held
    for _ in range(renewals):
        world.leases.renew(held)
    assert world.commit(1) is not None
    assert world.table.delete(world.row())
    missing = replace(begun, owner=None, counter=0)
    nothing = ConditionCheck(world.table.store, "no row", ())
    seek = LeaseSeek(missing, begun.checkpoint, exists=False)
    assert world.table.seek([seek], "t", nothing) == ()
    assert world.table.assign(world.row(), "w") is not None
    while world.row().counter < held.lease.counter:
        assert world.table.renew(world.row()) is not None
    row = world.row()
    assert (row.checkpoint, row.owner) == (begun.checkpoint, "w")
    with pytest.raises(LeaseLostError):
        world.committer.checkpoint(world.consumers[KEY])
    assert world.row() == row


@pytest.mark.parametrize("exists", [False, True], ids=["created", "updated"])
def test_a_seek_sets_a_counter_that_no_former_holder_has(exists: bool) -> None:
    world = World()
    row = world.row()
    assert world.table.delete(row)
    missing = replace(row, owner=None, counter=0)
    if exists:
        create_lease(world.table, missing)
    counters = []
    for token in ("a", "b"):
        nothing = ConditionCheck(world.table.store, "no row", ())
        seek = LeaseSeek(missing, row.checkpoint, exists=exists)
        assert world.table.seek([seek], token, nothing) == ()
        counters.append(world.row().counter)
        assert world.table.delete(world.row())
        if exists:
            create_lease(world.table, missing)
    assert min(counters) > 1_000_000
    assert abs(counters[0] - counters[1]) > 1_000_000


@given(st.integers(0, 2**186).map(str), st.integers(0, 2**62))
def test_a_mark_is_read_as_it_was_written(number: str, sub: int) -> None:
    lease = Lease("shardId-000000000000", TRIM_HORIZON, table_mark=Position(number, sub))
    assert lease_from_item(lease_to_item(lease)) == lease


@pytest.mark.parametrize("text", ["1", "1 2 3", "1 ", "x 2", "1 x", "LATEST 0", "-1 0"])
def test_a_text_of_another_form_is_no_mark(text: str) -> None:
    item = lease_to_item(Lease("shardId-000000000000", TRIM_HORIZON))
    with pytest.raises(ValueError, match="another form"):
        lease_from_item({**item, rows.TABLE: {"S": text}})


def test_a_shard_of_a_table_that_was_put_back_is_paused_and_the_others_go_on() -> None:
    fleet = Fleet(shards=2)
    fleet.put(*numbered(20))
    fleet.run(20)
    assert fleet.data() == sorted(fleet.sent)
    key, other = sorted(fleet.leases.rows())
    name = next(one for one in fleet.table.positions if one.endswith(f"/{key}"))
    before = fleet.table.positions[name]
    fleet.table.positions[name] = StoredPosition(before.number - 1, Position("1"))
    fleet.worker.lifecycle.restart(fleet.worker.lifecycle.consumers[key])
    sent = len(fleet.sent)
    fleet.put(*numbered(40)[20:])
    fleet.run(20)
    (event,) = {one.lease_key: one for one in fleet.of(ShardPaused)}.values()
    assert event.lease_key == key
    assert "an older copy" in event.reason
    assert fleet.worker.lifecycle.consumers[other].error is None
    assert sent < len(fleet.data()) < len(fleet.sent), "the other shard was read"
    status = fleet.worker.status()
    assert status is not None
    assert [one.lease_key for one in status.paused] == [key]
    fleet.table.positions[name] = before
    fleet.run(70)
    assert fleet.data() == sorted(fleet.sent)
    assert [one.lease_key for one in fleet.of(ShardResumed)] == [key]

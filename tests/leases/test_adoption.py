"""A write is refused because of an earlier one whose answer was lost: the counter is adopted."""

import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import LeaseLostError, UnavailableError
from kcl_pipeline.events import LeaseLost
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import lease_to_item
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from tests.support.held_world import END, World, world_fixture  # noqa: F401

FIRST, SECOND = Position("10"), Position("20")

WRITES = {
    "renewal": lambda world, _: world.leases.renew_all(),
    "checkpoint": lambda world, held: world.leases.checkpoint(held, checkpoint=FIRST),
    "prepare": lambda world, held: world.leases.prepare(held, END, b"state"),
}


def _unanswered(world, held, name, *, applied):
    world.fail_once("UpdateItem", UnavailableError("no answer"), applied=applied)
    if name == "renewal":
        assert world.leases.renew_all() == 0
    else:
        with pytest.raises(UnavailableError):
            WRITES[name](world, held)


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not applied"])
@pytest.mark.parametrize("second", WRITES)
@pytest.mark.parametrize("first", WRITES)
def test_a_write_goes_on_after_one_without_an_answer(world, first, second, applied):
    held = world.gain()
    known = held.lease
    _unanswered(world, held, first, applied=applied)
    WRITES[second](world, held)
    row = world.table.get("s0")
    assert world.leases.get("s0") is held
    assert held.lease == row
    assert row.counter == known.counter + 1 + applied
    has_first = second == "checkpoint" or (first == "checkpoint" and applied)
    assert row.checkpoint == (FIRST if has_first else TRIM_HORIZON)
    pending = second == "prepare" or (first == "prepare" and applied and second == "renewal")
    assert row.pending_checkpoint == (END if pending else None)
    assert world.of(LeaseLost) == []


@pytest.mark.parametrize("first", WRITES)
def test_a_write_that_arrives_late_is_refused_after_the_next_one(world, first):
    """The next write has the same condition, so one of the two is applied."""
    held = world.gain()
    known = held.lease
    _unanswered(world, held, first, applied=False)
    world.leases.checkpoint(held, checkpoint=SECOND)
    late = world.table.view()
    assert late.renew(known) is None
    assert late.update_checkpoint(known, checkpoint=FIRST) is None
    assert late.update_checkpoint(known, checkpoint=TRIM_HORIZON, pending=END) is None
    assert world.table.get("s0").checkpoint == SECOND


def test_a_checkpoint_that_a_write_without_an_answer_has_passed_is_not_lowered(world):
    held = world.gain()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.checkpoint(held, checkpoint=SECOND)
    assert world.leases.checkpoint(held, checkpoint=FIRST).checkpoint == SECOND
    assert world.table.get("s0").checkpoint == SECOND
    assert world.leases.checkpoint(held, checkpoint=END).checkpoint == END


def _changed(world, **attributes):
    """The row as somebody else has written it."""
    row = world.table.get("s0")
    world.table.plant(lease_to_item(row.with_(**attributes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"counter": 3},
        {"counter": 2, "checkpoint": SECOND},
        {"counter": 2, "checkpoint": SHARD_END},
        {"counter": 2, "pending_checkpoint": END},
        {"counter": 2, "table_mark": None},
        {"counter": 2, "owner": "w2"},
        {"counter": 2, "checkpoint_owner": "w1"},
        {"counter": 2, "owner": None},
        {"counter": 2, "recreated_millis": 1_700_000_000_000},  # the row of a later stream
    ],
    ids=str,
)
@pytest.mark.parametrize("write", ["renewal", "checkpoint"])
def test_what_somebody_else_has_written_is_not_adopted(world, changes, write):
    """An assignment away and back, or a seek, raises the counter by two or more."""
    held = world.gain()
    _changed(world, table_mark=FIRST, checkpoint=FIRST)
    world.leases.drop(held, "test")
    (held,) = world.leases.discover()
    assert held.lease.counter == 1
    _changed(world, **changes)
    before = world.table.get("s0")
    if write == "renewal":
        assert world.leases.renew_all() == 0
    else:
        with pytest.raises(LeaseLostError):
            world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.held() == ()
    assert world.table.get("s0") == before


def test_a_lease_that_went_to_another_worker_and_came_back_is_taken_anew(world):
    """A function as a sink: the other worker may have processed, and written no checkpoint yet."""
    held = world.gain()
    _unanswered(world, held, "checkpoint", applied=False)
    for owner in ("w2", "w1"):
        world.leader.assign(world.leader.get("s0"), owner)
    with pytest.raises(LeaseLostError):
        world.leases.checkpoint(held, checkpoint=FIRST)
    (again,) = world.leases.discover()
    assert again is not held
    assert again.processed is None
    assert world.table.get("s0").checkpoint == TRIM_HORIZON


def test_another_process_with_this_worker_id_is_not_mistaken_for_this_one():
    world = World()
    leases = HeldLeases(
        world.table,
        "w1",
        LeaseSettings(),
        world.clock,
        world.events.append,
        verify_run=lambda: False,
    )
    world.assign("s0")
    (held,) = leases.discover()
    other = world.table.view()
    assert other.renew(other.get("s0")) is not None
    with pytest.raises(LeaseLostError):
        leases.checkpoint(held, checkpoint=FIRST)
    assert world.table.get("s0").checkpoint == TRIM_HORIZON


def test_a_lease_that_has_expired_is_not_adopted(world):
    held = world.gain()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.checkpoint(held, checkpoint=FIRST)
    before = world.table.get("s0")
    world.clock.advance(10)
    with pytest.raises(LeaseLostError):
        world.leases.checkpoint(held, checkpoint=SECOND)
    assert world.table.get("s0") == before


def test_a_renewal_after_the_table_was_read_adopts_nothing(world):
    """It shows that the row is the one that was read before the table."""
    held = world.gain()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.checkpoint(held, checkpoint=FIRST)
    with pytest.raises(LeaseLostError):
        world.leases.renew(held)
    (again,) = world.leases.discover()
    assert again.lease.checkpoint == FIRST


def test_a_handoff_that_began_after_a_write_without_an_answer(world):
    held = world.gain()
    world.lose_answer()
    assert world.leases.renew_all() == 0
    world.leader.initiate_handoff(world.leader.get("s0"), "w2")
    world.leases.checkpoint(held, checkpoint=FIRST)
    assert world.leases.handoffs() == (held,)
    assert world.leases.complete_handoff(held)
    assert world.table.get("s0").owner == "w2"


@pytest.mark.parametrize("first", WRITES)
def test_a_lease_is_released_after_a_write_without_an_answer(world, first):
    held = world.gain()
    _unanswered(world, held, first, applied=True)
    assert world.leases.release(held)
    assert world.table.get("s0").owner is None


def test_a_row_is_deleted_after_a_checkpoint_without_an_answer(world):
    held = world.gain()
    _unanswered(world, held, "checkpoint", applied=True)
    world.leases.delete(held)
    assert world.table.get("s0") is None
    assert world.leases.held() == ()

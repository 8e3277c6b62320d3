"""HeldLeases: the number of a prepare, its lost responses, and two processes of one worker id."""

import pytest

from kcl_pipeline.errors import LeaseLostError, UnavailableError
from kcl_pipeline.leases.held import INCARNATION_BITS, HeldLeases, pending_number
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from tests.support.held_world import END, SETTINGS, World, world_fixture  # noqa: F401 (a fixture)


def test_prepare_writes_the_number_that_it_makes(world):
    held = world.gain()
    number = world.leases.prepare(held, checkpoint=None, end=END, avoid_number=None)
    row = world.leader.get("s0")
    assert number == row.counter == pending_number(row) == 2
    assert (row.checkpoint, row.pending_checkpoint, row.pending_checkpoint_state) == (
        TRIM_HORIZON,
        END,
        b"2",
    )
    number = world.leases.prepare(held, checkpoint=END, end=Position("200"), avoid_number=2)
    row = world.leader.get("s0")
    assert number == row.counter == pending_number(row) == 3
    assert (row.checkpoint, row.pending_checkpoint) == (END, Position("200"))


def test_prepare_avoids_the_number_that_the_table_has(world):
    held = world.gain()
    assert world.leases.prepare(held, checkpoint=None, end=END, avoid_number=2) == 3
    assert pending_number(world.leader.get("s0")) == 3


@pytest.mark.parametrize(
    ("state", "number"),
    [
        (b"17", 17),
        (b"", None),
        (None, None),
        (b"x", None),
        (b"-1", None),
        (b"1.0", None),
        (b"\xff", None),
        (b"9" * 30, None),
    ],
)
def test_pending_number_of_foreign_states(state, number):
    assert (
        pending_number(
            Lease("s0", TRIM_HORIZON, pending_checkpoint=END, pending_checkpoint_state=state)
        )
        == number
    )


def test_pending_number_needs_a_pending_checkpoint():
    assert pending_number(Lease("s0", TRIM_HORIZON, pending_checkpoint_state=b"17")) is None


def test_a_lost_answer_to_prepare_and_the_same_call_again(world):
    held = world.gain()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.prepare(held, checkpoint=None, end=END, avoid_number=None)
    assert world.leases.prepare(held, checkpoint=None, end=END, avoid_number=None) == 2
    assert world.leader.get("s0").counter == 2


@pytest.mark.parametrize("between", ["nothing", "renewal"])
def test_a_lost_answer_to_prepare_and_another_write_after_it(world, between):
    """The second prepare finds out about the first, and has a number of its own."""
    held = world.gain()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.prepare(held, checkpoint=None, end=END, avoid_number=None)
    if between == "renewal":
        assert world.leases.renew_all() == 1
    number = world.leases.prepare(held, checkpoint=None, end=Position("50"), avoid_number=None)
    row = world.leader.get("s0")
    assert number == row.counter == pending_number(row) == 3
    assert row.pending_checkpoint == Position("50")


def test_the_same_prepare_of_another_process_is_not_taken_for_this_worker(world):
    """The other process may land that batch. A worker that adopted its row could prepare once
    more over it, and then nothing would say that it landed: the range would come
    twice (simulation 41230053).
    """
    held = world.gain()
    second = HeldLeases(
        world.leader, "w1", SETTINGS, world.clock, world.events.append, incarnation=7
    )
    (other,) = second.discover()
    same = {"checkpoint": None, "end": END, "avoid_number": None, "expects": "-,4"}
    number = second.prepare(other, **same)
    assert number == (7 << 32) + 2
    with pytest.raises(LeaseLostError):
        world.leases.prepare(held, **same)
    row = world.leader.get("s0")
    assert (row.counter, pending_number(row)) == (2, number)
    assert second.prepare(other, **same) == number + 1, "its own row it goes on with"


def test_a_number_has_at_most_eighteen_digits(world):
    world.gain()
    last = HeldLeases(
        world.leader,
        "w1",
        SETTINGS,
        world.clock,
        world.events.append,
        incarnation=2**INCARNATION_BITS - 1,
    )
    (held,) = last.discover()
    number = last.prepare(held, checkpoint=None, end=END, avoid_number=None)
    assert len(str(number)) == 18


def test_a_process_that_expects_another_table_is_not_taken_for_this_worker(world):
    """It prepares the same range on the same counter, may fence its number, and prepare again:
    adopting its row would land the range twice.
    """
    held = world.gain()
    second = HeldLeases(world.leader, "w1", SETTINGS, world.clock, world.events.append)
    (other,) = second.discover()
    assert second.prepare(other, checkpoint=None, end=END, avoid_number=None, expects="-,3") == 2
    with pytest.raises(LeaseLostError):
        world.leases.prepare(held, checkpoint=None, end=END, avoid_number=None, expects="-,4")
    row = world.leader.get("s0")
    assert (row.pending_checkpoint_state, pending_number(row)) == (b"2/-,3", 2)

"""A checkpoint never goes back: the condition of each write says so, on both row stores."""

import pytest

from kcl_pipeline.errors import LeaseLostError, ThrottledError, UnavailableError
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from tests.support.held_world import World, world_fixture  # noqa: F401
from tests.support.lease_tables import (
    KEY,
    aws_fixture,  # noqa: F401
    client_fixture,  # noqa: F401
    owned,
    row,
    tables_fixture,  # noqa: F401
)

SHORT, LONG = Position("999"), Position("1000")
IN_AGGREGATE = Position("1000", 7)


def _edited(tables, **attributes):
    """The row as another program left it on the same counter."""
    tables.plant(tables.leases, row(tables) | attributes)


@pytest.mark.parametrize("found", [SHARD_END, LONG, IN_AGGREGATE], ids=str)
def test_a_write_moves_only_from_the_checkpoint_that_its_author_saw(tables, found):
    """The counter alone would let it pass: a row made anew, or edited, can reach any counter."""
    seen = tables.leases.update_checkpoint(owned(tables), checkpoint=SHORT)
    _edited(
        tables,
        checkpoint={"S": found.sequence_number},
        checkpointSubSequenceNumber={"N": str(found.sub_sequence_number)},
    )
    before = row(tables)
    assert tables.leases.update_checkpoint(seen, checkpoint=Position("1001")) is None
    assert tables.leases.update_checkpoint(seen, checkpoint=SHARD_END, pending=None) is None
    prepared = tables.leases.update_checkpoint(
        seen, checkpoint=SHORT, pending=Position("2000"), pending_state=b"9"
    )
    assert prepared is None
    assert row(tables) == before


@pytest.mark.parametrize("in_handoff", [False, True])
def test_a_former_owner_writes_nothing_to_a_row_that_was_created_again(tables, in_handoff):
    """Counter and checkpoint of the new row can equal those that the former owner knows."""
    seen = owned(tables)
    handoff = {"checkpointOwner": {"S": "w2"}} if in_handoff else {}
    _edited(tables, leaseOwner={"S": seen.actual_owner if in_handoff else "w2"}, **handoff)
    before = row(tables)
    assert tables.leases.update_checkpoint(seen, checkpoint=SHORT) is None
    assert tables.leases.renew(seen) is None
    assert row(tables) == before


def test_an_owner_writes_during_a_handoff_that_it_does_not_know_of(tables):
    seen = owned(tables)
    tables.leases.initiate_handoff(seen, "w2")
    written = tables.leases.update_checkpoint(seen, checkpoint=SHORT)
    assert (written.checkpoint, written.owner, written.checkpoint_owner) == (
        SHORT,
        "w2",
        seen.actual_owner,
    )


def test_only_the_place_inside_of_an_aggregate_differs(tables):
    seen = tables.leases.update_checkpoint(owned(tables), checkpoint=Position("1000", 3))
    _edited(tables, checkpointSubSequenceNumber={"N": "7"})
    assert tables.leases.update_checkpoint(seen, checkpoint=Position("1000", 5)) is None
    assert row(tables)["checkpointSubSequenceNumber"] == {"N": "7"}


def test_a_row_without_a_sub_sequence_number_is_at_0(tables):
    """Rows of other programs may lack it."""
    lease = owned(tables)
    item = row(tables)
    del item["checkpointSubSequenceNumber"]
    tables.plant(tables.leases, item)
    assert tables.leases.get(KEY) == lease
    assert tables.leases.update_checkpoint(lease, checkpoint=SHORT).checkpoint == SHORT


def test_a_number_is_compared_as_it_stands_in_the_row(tables):
    """Leading zeros are another text for the same place: it is what the author read."""
    owned(tables)
    _edited(tables, checkpoint={"S": "0999"})
    seen = tables.leases.get(KEY)
    assert tables.leases.update_checkpoint(seen, checkpoint=LONG).checkpoint == LONG


@pytest.mark.parametrize(
    ("at", "asked"),
    [
        (SHARD_END, LONG),
        (LONG, SHORT),
        (IN_AGGREGATE, LONG),
        (SHORT, LATEST),
        (LATEST, TRIM_HORIZON),
        (TRIM_HORIZON, AT_TIMESTAMP),
    ],
    ids=str,
)
def test_a_step_back_is_refused_before_anything_is_sent(tables, at, asked):
    lease = owned(tables, checkpoint=AT_TIMESTAMP)
    lease = tables.leases.update_checkpoint(lease, checkpoint=at)
    before = row(tables)
    with pytest.raises(ValueError, match="go back"):
        tables.leases.update_checkpoint(lease, checkpoint=asked)
    with pytest.raises(ValueError, match="go back"):
        tables.leases.update_checkpoint(lease, checkpoint=asked, pending=SHARD_END)
    assert row(tables) == before


def test_a_checkpoint_behind_the_shards_end_whose_answer_was_lost(world):
    """Seed 7002791: the end was written a second time to learn its outcome, then the flush of a
    stopping worker moved the row back to its last record.
    """
    held = world.gain()
    world.leases.checkpoint(held, checkpoint=SHORT)
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.checkpoint(held, checkpoint=SHARD_END)
    assert world.leases.checkpoint(held, checkpoint=LONG).ended
    assert world.table.get("s0").ended
    assert world.leases.release(held)
    assert world.table.get("s0").ended


def test_an_end_that_arrives_after_the_next_checkpoint_is_refused(world):
    held = world.gain()
    world.leases.checkpoint(held, checkpoint=SHORT)
    known = held.lease
    world.fail_once("UpdateItem", UnavailableError("no answer"), applied=False)
    with pytest.raises(UnavailableError):
        world.leases.checkpoint(held, checkpoint=SHARD_END)
    assert world.leases.checkpoint(held, checkpoint=LONG).checkpoint == LONG
    assert world.table.view().update_checkpoint(known, checkpoint=SHARD_END) is None
    assert world.leases.checkpoint(held, checkpoint=SHARD_END).ended


def test_a_throttled_end_is_not_applied(world):
    held = world.gain()
    world.fail_once("UpdateItem", ThrottledError("slow down"), applied=False)
    with pytest.raises(ThrottledError):
        world.leases.checkpoint(held, checkpoint=SHARD_END)
    assert world.leases.checkpoint(held, checkpoint=LONG).checkpoint == LONG


def test_of_two_processes_under_one_worker_id_the_slower_one_moves_nothing_back():
    """The second process wrote the end; the first one knows the row as it was before."""
    world = World()
    first = world.gain()
    tables = World(clock=world.clock)
    tables.table = world.table.view()
    tables.leases._table = tables.table
    (second,) = tables.leases.recover()
    world.leases.drop(first, "the other process renewed it")
    (first,) = world.leases.discover()
    tables.leases.checkpoint(second, checkpoint=SHARD_END)
    with pytest.raises(LeaseLostError):
        world.leases.checkpoint(first, checkpoint=LONG)
    assert world.table.get("s0").ended

"""Leases that are created from the positions in the table."""

import pytest

from kcl_pipeline.planning.shard_sync import new_lease
from kcl_pipeline.planning.stored_shards import leases_with_stored
from kcl_pipeline.position import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    Position,
    StoredPosition,
)
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId

STREAM = StreamId("s")
A, B, C, D, E = (f"shardId-{number:012}" for number in range(5))
HALF = 2**127


def shard(number, parents=(), ended=True, low=True):
    keys = HashKeyRange(0, HALF - 1) if low else HashKeyRange(HALF, 2 * HALF - 1)
    return Shard(
        f"shardId-{number:012}",
        keys,
        str(number + 1),
        ending_sequence_number=str(number + 9) if ended else None,
        parent_shard_id=parents[0] if parents else None,
        adjacent_parent_shard_id=parents[1] if parents[1:] else None,
    )


# A → C → D; B is beside them; D and B are open.
SHARDS = (shard(0), shard(1, ended=False, low=False), shard(2, [A]), shard(3, [C], ended=False))


def initial_name(position):
    return "AT_TIMESTAMP" if position == AT_TIMESTAMP else "LATEST"


def created(stored, rows=(), wanted=(B, D), initial=LATEST):
    by_id = {one.shard_id: one for one in SHARDS}
    existing = {key: new_lease(STREAM, by_id[key], at) for key, at in dict(rows).items()}
    initials = [new_lease(STREAM, by_id[key], initial) for key in wanted]
    positions = {key: StoredPosition(1, Position("5"), ended) for key, ended in stored.items()}
    found = leases_with_stored(STREAM, initials, SHARDS, existing, positions, initial_name(initial))
    return [(one.lease_key, one.checkpoint) for one in found]


@pytest.mark.parametrize("initial", [LATEST, AT_TIMESTAMP])
def test_without_positions_the_initial_position_decides(initial):
    assert created({}, initial=initial) == [(B, initial), (D, initial)]


@pytest.mark.parametrize("initial", [LATEST, AT_TIMESTAMP])
def test_an_unfinished_shard_is_continued_and_its_descendants_follow(initial):
    start = AT_TIMESTAMP if initial == AT_TIMESTAMP else TRIM_HORIZON
    following = [(one, start) for one in (A, C, D)]
    assert created({A: False}, initial=initial) == [*following, (B, initial)]


def test_a_shard_after_an_ended_one_starts_at_its_beginning():
    assert created({A: True}) == [(C, TRIM_HORIZON), (D, TRIM_HORIZON), (B, LATEST)]
    assert created({C: True}) == [(D, TRIM_HORIZON), (B, LATEST)]


def test_a_shard_after_an_ended_one_gives_no_record_that_is_older_than_the_timestamp():
    """The ended one may have had no record since that time, and the child older ones."""
    at = AT_TIMESTAMP
    assert created({A: True}, initial=at) == [(C, at), (D, at), (B, at)]


@pytest.mark.parametrize("stored", [{A: False, C: False}, {A: False, C: True}])
def test_a_parent_of_a_begun_shard_has_ended(stored):
    """A Java worker ended it, and its row was deleted."""
    assert A not in dict(created(stored))


@pytest.mark.parametrize("reached", [Position("7"), SHARD_END])
@pytest.mark.parametrize("begun", [C, D])
def test_an_ancestor_of_a_row_that_has_begun_has_ended(begun, reached):
    found = created({A: False}, {begun: reached}, wanted=())
    assert A not in dict(found)
    assert C not in dict(found)


def test_a_row_that_has_not_begun_proves_no_end():
    assert created({A: False}, {C: LATEST, D: TRIM_HORIZON}, wanted=()) == [(A, TRIM_HORIZON)]


def test_a_finished_shard_is_left_out():
    assert created({B: True, A: True, C: True, D: True}) == []


def test_a_merge_of_a_known_shard_finds_the_row_of_its_other_parent():
    """A and B are split: A's child C is in the table, B's child D would get its row when B ends."""
    shards = (
        shard(0),
        shard(1, low=False),
        shard(2, [A]),
        shard(3, [B], low=False),
        shard(4, [C, D], ended=False),
    )
    initials = [new_lease(STREAM, shards[1], TRIM_HORIZON)]
    stored = {A: StoredPosition(1, Position("5"), ended=True), C: StoredPosition(1, Position("6"))}
    rows = leases_with_stored(STREAM, initials, shards, {}, stored, "TRIM_HORIZON")
    assert [row.lease_key for row in rows] == [C, D, E, B]


def test_a_closed_shard_that_no_unread_shard_leads_to_gets_no_row():
    """At LATEST its records may be older than the beginning of the application."""
    shards = (shard(2), shard(3, low=False), shard(4, [C, D], ended=False))
    stored = {C: StoredPosition(1, Position("6"))}
    initials = [new_lease(STREAM, shards[2], LATEST)]
    rows = leases_with_stored(STREAM, initials, shards, {}, stored, "LATEST")
    assert [row.lease_key for row in rows] == [C, E]

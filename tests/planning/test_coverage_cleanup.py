"""Holes in the hash range (protocol §7.1) and which finished leases may go (§8.2)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import (
    children_to_fill,
    completed_leases,
    garbage_leases,
    has_started,
)
from kcl_pipeline.planning.coverage import (
    Hole,
    find_hole,
    hole_in_leases,
    ranges_to_fill,
)
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, Shard, StreamId

STREAM = StreamId("orders")
MIDDLE = 2**127


def r(start, end):
    return HashKeyRange(start, end)


@pytest.mark.parametrize(
    ("ranges", "hole"),
    [
        ([r(0, MAX_HASH_KEY)], None),
        ([r(0, MIDDLE - 1), r(MIDDLE, MAX_HASH_KEY)], None),
        ([r(MIDDLE, MAX_HASH_KEY), r(0, MIDDLE - 1)], None),
        ([r(0, MIDDLE + 5), r(MIDDLE, MAX_HASH_KEY)], None),
        ([], Hole(0, MAX_HASH_KEY)),
        ([r(1, MAX_HASH_KEY)], Hole(0, 0)),
        ([r(0, MAX_HASH_KEY - 1)], Hole(MAX_HASH_KEY, MAX_HASH_KEY)),
        ([r(0, 9), r(11, MAX_HASH_KEY)], Hole(10, 10)),
        ([r(0, 9), r(20, 29), r(40, MAX_HASH_KEY)], Hole(10, 19)),
        # A wide range that begins first and ends last covers all, whatever the last one in order
        # covers.
        ([r(0, MAX_HASH_KEY), r(5, 9)], None),
        ([r(0, 99), r(5, 9), r(50, 60)], Hole(100, MAX_HASH_KEY)),
    ],
)
def test_holes(ranges, hole):
    assert find_hole(ranges) == hole


@given(st.lists(st.integers(1, MAX_HASH_KEY - 1), unique=True, max_size=12), st.data())
def test_a_partition_has_no_hole_and_without_one_part_exactly_that_one(cuts, data):
    points = [0, *sorted(c for c in cuts if c > 1), MAX_HASH_KEY + 1]
    parts = [r(a, b - 1) for a, b in itertools.pairwise(points) if b - a > 1]
    if sum(p.end - p.start + 1 for p in parts) == MAX_HASH_KEY + 1:
        shuffled = data.draw(st.permutations(parts))
        assert find_hole(shuffled) is None
        lost = data.draw(st.sampled_from(parts))
        rest = [p for p in shuffled if p != lost]
        assert find_hole(rest) == Hole(lost.start, lost.end)


def test_finished_leases_cover_nothing_and_a_hole_has_a_sentence():
    leases = [
        Lease("a", SHARD_END, hash_key_range=r(0, MAX_HASH_KEY)),
        Lease("b", LATEST, hash_key_range=r(0, 9)),
    ]
    assert str(hole_in_leases(leases)) == f"no lease covers the hash keys 10 to {MAX_HASH_KEY}"
    assert str(hole_in_leases([])) == "no lease covers any hash key"


def test_missing_ranges_are_taken_from_the_listing():
    leases = [
        Lease("s-1", LATEST),
        Lease("s-2", LATEST, hash_key_range=r(0, 9)),
        Lease("s-3", SHARD_END),
        Lease("s-4", LATEST),
    ]
    shards = [Shard(f"s-{n}", r(n, n + 10), "1") for n in (1, 2, 3)]
    assert ranges_to_fill(leases, shards, STREAM) == {"s-1": r(1, 11)}
    assert find_hole(shard.hash_key_range for shard in shards) == Hole(0, 0)


def ended(key, *, children=(), parents=()):
    return Lease(
        key, SHARD_END, child_shard_ids=frozenset(children), parent_shard_ids=frozenset(parents)
    )


def deleted(leases, ages=None, keep=300.0):
    ages = {lease.lease_key: 400.0 for lease in leases} if ages is None else ages
    return [d.lease.lease_key for d in completed_leases(leases, ages, keep)]


@pytest.mark.parametrize(
    ("checkpoint", "started"),
    [
        (TRIM_HORIZON, False),
        (AT_TIMESTAMP, False),
        (LATEST, True),
        (Position("5"), True),
        (SHARD_END, True),
    ],
)
def test_a_parent_goes_when_its_children_have_started(checkpoint, started):
    rows = [ended("p", children=["c", "d"]), Lease("c", checkpoint), Lease("d", Position("9"))]
    assert has_started(rows[1]) is started
    assert deleted(rows) == (["p"] if started else [])


def test_a_parent_stays_while_child_rows_are_missing_or_unknown_or_its_own_parent_is_there():
    assert deleted([ended("p", children=["c", "d"]), Lease("c", LATEST)]) == []
    assert deleted([ended("p")]) == []
    family = [
        ended("g", children=["p"]),
        ended("p", children=["c"], parents=["g"]),
        Lease("c", LATEST, parent_shard_ids=frozenset({"p"})),
    ]
    assert deleted(family) == ["g"], "one generation at a time, oldest first"
    assert deleted(family[1:]) == ["p"]


def test_a_parent_is_kept_for_the_interval_from_when_its_end_was_seen():
    rows = [ended("p", children=["c"]), Lease("c", LATEST)]
    assert deleted(rows, {"p": 299.9}) == []
    assert deleted(rows, {"p": 300.0}) == ["p"]
    assert deleted(rows, {}) == []
    assert deleted([Lease("p", Position("5"), child_shard_ids=frozenset("c")), rows[1]]) == []


def test_parents_and_children_are_looked_up_within_the_stream():
    one = Lease("1:a:5:p", SHARD_END, child_shard_ids=frozenset({"c"}), stream="1:a:5")
    other_child = Lease("1:b:5:c", LATEST, stream="1:b:5")
    assert deleted([one, other_child]) == []
    assert deleted([one, other_child, Lease("1:a:5:c", LATEST, stream="1:a:5")]) == ["1:a:5:p"]


def test_garbage_is_a_finished_lease_of_a_shard_that_left_retention():
    rows = [ended("gone"), ended("listed"), ended("young"), Lease("unfinished", LATEST)]
    ages = {"gone": 2000.0, "listed": 2000.0, "young": 10.0}
    shards = [Shard("listed", r(0, 9), "1")]
    assert [d.lease.lease_key for d in garbage_leases(rows, shards, STREAM, ages, 1800.0)] == [
        "gone"
    ]
    assert garbage_leases(rows, [], STREAM, ages, 1800.0) == (), "an empty listing proves nothing"


def test_unknown_children_are_taken_from_the_listing():
    rows = [ended("p"), ended("q", children=["x"]), Lease("o", LATEST)]
    shards = [
        Shard("d", r(0, 9), "2", parent_shard_id="p"),
        Shard("c", r(0, 9), "2", parent_shard_id="z", adjacent_parent_shard_id="p"),
    ]
    assert children_to_fill(rows, shards, STREAM) == {"p": ("c", "d")}

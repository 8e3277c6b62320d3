"""Which leases shard sync creates: protocol §7.4, §6.7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import ShardSyncError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import completed_leases
from kcl_pipeline.planning.shard_sync import (
    child_leases,
    has_not_begun,
    initial_filter,
    leases_after_loss,
    leases_for_missing_shards,
    leases_for_new_stream,
    new_lease,
    restored_parents,
    successors,
    unexpected_children,
)
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId

STREAM = StreamId("orders")
WHOLE = HashKeyRange(0, 2**128 - 1)


def shard(number, *parents, begin=None, closed=False):
    ids = [f"shardId-{p}" for p in parents] + [None, None]
    ending = "999" if closed else None
    return Shard(
        f"shardId-{number}", WHOLE, str(number if begin is None else begin), ending, ids[0], ids[1]
    )


def reference_tree():
    """0,1→6; 2,3→7; 6,7→8; 4; 5→9,10: the worked example of protocol §7.4."""
    return [
        *(shard(n, closed=True) for n in (0, 1, 2, 3, 5)),
        shard(4),
        shard(6, 0, 1, closed=True),
        shard(7, 2, 3, closed=True),
        shard(8, 6, 7),
        shard(9, 5),
        shard(10, 5),
    ]


def created(shards, rows, position, **options):
    existing = (
        {f"shardId-{r}": False for r in rows}
        if not isinstance(rows, dict)
        else {f"shardId-{k}": v for k, v in rows.items()}
    )
    leases = leases_for_missing_shards(STREAM, shards, existing, position, **options)
    return {
        int(lease.lease_key.removeprefix("shardId-")): lease.checkpoint.sequence_number
        for lease in leases
    }


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        ("LATEST", {6: "LATEST"}),
        ("TRIM_HORIZON", {0: "TRIM_HORIZON", 1: "TRIM_HORIZON"}),
        ("AT_TIMESTAMP", {0: "AT_TIMESTAMP", 1: "AT_TIMESTAMP"}),
    ],
)
def test_the_reference_example_with_leases_4_5_7(position, expected):
    assert created(reference_tree(), (4, 5, 7), position) == expected


@pytest.mark.parametrize(
    ("rows", "position", "expected"),
    [
        ((), "LATEST", {4: "LATEST", 8: "LATEST", 9: "LATEST", 10: "LATEST"}),
        ((), "TRIM_HORIZON", dict.fromkeys((0, 1, 2, 3, 4, 5), "TRIM_HORIZON")),
        ((), "AT_TIMESTAMP", dict.fromkeys((0, 1, 2, 3, 4, 5), "AT_TIMESTAMP")),
        ((4, 8, 9, 10), "TRIM_HORIZON", {}),
        ((4, 8, 9), "LATEST", {10: "LATEST"}),
        ((4, 8, 9), "TRIM_HORIZON", {5: "TRIM_HORIZON"}),
        ((0, 1, 2, 3, 4, 5), "LATEST", {}),
        ((0, 4, 5, 7), "LATEST", {1: "LATEST"}),
        ((0, 4, 5, 7), "AT_TIMESTAMP", {1: "AT_TIMESTAMP"}),
    ],
)
def test_other_rows_of_the_same_tree(rows, position, expected):
    assert created(reference_tree(), rows, position) == expected


def test_creation_order_is_by_sequence_number_as_a_number_then_id():
    shards = [shard(1, begin=100), shard(2, begin=9), shard(3, begin=9)]
    leases = leases_for_missing_shards(STREAM, shards, {}, "LATEST")
    assert [lease.lease_key for lease in leases] == ["shardId-2", "shardId-3", "shardId-1"]
    assert [lease.lease_key for lease in leases_for_new_stream(STREAM, shards, "LATEST")] == [
        "shardId-2",
        "shardId-3",
        "shardId-1",
    ]


def test_a_child_whose_finished_parent_did_not_create_it_is_created_from_the_horizon():
    shards = [shard(1, closed=True), shard(2, 1), shard(3, 1)]
    assert created(shards, {1: True, 2: False}, "LATEST") == {3: "TRIM_HORIZON"}
    assert created(shards, {1: False, 2: False}, "LATEST") == {}


def test_an_orphan_is_left_alone_when_its_children_have_rows_or_one_parent_is_unfinished():
    shards = [shard(1, closed=True), shard(2, 1, closed=True), shard(3, 2), shard(4, 2)]
    assert created(shards, {1: True, 3: False}, "LATEST") == {}
    merged = [shard(1, closed=True), shard(2, closed=True), shard(3, 1, 2)]
    assert created(merged, {1: True, 2: False}, "LATEST") == {}
    assert created(merged, {1: True, 2: True}, "LATEST") == {3: "TRIM_HORIZON"}
    assert created(merged, {1: True}, "LATEST") == {2: "LATEST"}, "which creates 3 at its end"
    assert created(merged[::2], {1: True}, "LATEST") == {3: "TRIM_HORIZON"}, "2 is not listed"


def test_a_list_from_the_middle_of_a_reshard_is_refused_or_its_children_are_left_out():
    shards = [shard(1), shard(2, 1), shard(3)]
    assert unexpected_children(shards) == ("shardId-2",)
    with pytest.raises(ShardSyncError, match="shardId-2"):
        leases_for_missing_shards(STREAM, shards, {}, "LATEST")
    assert created(shards, (), "LATEST", ignore_unexpected_child_shards=True) == {
        1: "LATEST",
        3: "LATEST",
    }


def test_a_closed_child_of_an_open_parent_makes_a_list_inconsistent_as_in_kcl():
    shards = [shard(1), shard(2, 1, closed=True), shard(3, 2)]
    assert unexpected_children(shards) == ("shardId-2",)
    with pytest.raises(ShardSyncError, match=r"shardId-2.* is open"):
        leases_for_missing_shards(STREAM, shards, {}, "TRIM_HORIZON")


def test_a_long_history_does_not_exhaust_the_stack():
    shards = [shard(0, closed=True), *(shard(n, n - 1, closed=n < 5_000) for n in range(1, 5_001))]
    assert created(shards, (), "TRIM_HORIZON") == {0: "TRIM_HORIZON"}
    assert created(shards, (0,), "LATEST") == {}


@pytest.mark.parametrize("position", ["LATEST", "TRIM_HORIZON", "AT_TIMESTAMP"])
def test_a_stream_without_leases_gets_one_for_every_listed_shard(position):
    stream = StreamId("orders", "123456789012", 1_700_000_000)
    leases = leases_for_new_stream(stream, [shard(7, 2, 3), shard(4)], position)
    assert initial_filter(position) in {"AT_LATEST", "AT_TRIM_HORIZON", "AT_TIMESTAMP"}
    assert leases[1] == Lease(
        lease_key="123456789012:orders:1700000000:shardId-7",
        checkpoint=Position(position),
        parent_shard_ids=frozenset({"shardId-2", "shardId-3"}),
        hash_key_range=WHOLE,
        stream="123456789012:orders:1700000000",
    )


@st.composite
def histories(draw):
    """A shard graph grown by splits and merges, some ancestors trimmed from the list, some shards
    with rows.
    """
    open_ids, graph = list(range(draw(st.integers(1, 4)))), {}
    for number in open_ids:
        graph[number] = ()
    for _ in range(draw(st.integers(0, 8))):
        count = len(graph)
        if len(open_ids) > 1 and draw(st.booleans()):
            first, second = draw(st.permutations(open_ids))[:2]
            graph[count] = (first, second)
            open_ids = [n for n in open_ids if n not in (first, second)] + [count]
        else:
            parent = draw(st.sampled_from(open_ids))
            graph[count], graph[count + 1] = (parent,), (parent,)
            open_ids = [n for n in open_ids if n != parent] + [count, count + 1]
    trimmed = draw(st.integers(0, len(graph) - 1))
    listed = [n for n in graph if n >= trimmed or n in open_ids]
    rows = draw(st.sets(st.sampled_from(listed)))
    position = draw(st.sampled_from(["LATEST", "TRIM_HORIZON", "AT_TIMESTAMP"]))
    return graph, open_ids, listed, rows, position


@given(histories())
def test_every_open_shard_is_reached_once_the_leases_are_there(history):
    graph, open_ids, listed, rows, position = history
    shards = [shard(n, *graph[n], closed=n not in open_ids) for n in listed]
    new = created(shards, rows, position)
    assert not set(new) & rows
    have = set(new) | rows

    def reached(number):
        return number in have or any(p in listed and reached(p) for p in graph[number])

    assert all(reached(n) for n in open_ids)
    assert created(list(reversed(shards)), rows, position) == new
    assert created(shards, rows | set(new), position) == {}, "a second sync finds nothing to do"


CHILD_RANGE = HashKeyRange(0, 100)


def child(number, *parents):
    return ChildShard(f"shardId-{number}", tuple(f"shardId-{p}" for p in parents), CHILD_RANGE)


def test_children_of_a_split_begin_at_the_horizon():
    parent = Lease("1:orders:5:shardId-1", SHARD_END, counter=7, owner="w", stream="1:orders:5")
    leases = child_leases(parent, [child(3, 1), child(2, 1)], existing={"shardId-1"})
    assert [lease.lease_key for lease in leases] == ["1:orders:5:shardId-2", "1:orders:5:shardId-3"]
    assert all(
        le.checkpoint == TRIM_HORIZON and le.owner is None and le.counter == 0 for le in leases
    )
    assert leases[0].parent_shard_ids == {"shardId-1"}
    assert leases[0].hash_key_range == CHILD_RANGE
    assert leases[0].stream == "1:orders:5"


def test_a_merge_waits_for_the_row_of_the_other_parent():
    parent = Lease("shardId-1", SHARD_END)
    with pytest.raises(ShardSyncError, match="shardId-2, which has no lease yet"):
        child_leases(parent, [child(3, 1, 2)], existing={"shardId-1"})
    assert len(child_leases(parent, [child(3, 1, 2)], existing={"shardId-1", "shardId-2"})) == 1
    assert len(child_leases(parent, [child(3, 1, 2)], existing=set())) == 1


def test_a_single_child_must_name_two_parents():
    with pytest.raises(ShardSyncError, match="instead of two"):
        child_leases(Lease("shardId-1", SHARD_END), [child(3, 1)], existing={"shardId-1"})


def test_a_shard_that_is_gone_has_no_children():
    assert child_leases(Lease("shardId-1", SHARD_END), [], existing=set()) == ()


def ranged(number, low, high, *parents):
    ids = [f"shardId-{p}" for p in parents] + [None, None]
    return Shard(f"shardId-{number}", HashKeyRange(low, high), str(number), None, ids[0], ids[1])


def test_the_successors_of_a_lost_shard_are_its_oldest_listed_descendants():
    """0 (0..9) was split into 1, 2; 2 into 3, 4; 1 and 3 were merged into 5; 6 is another branch.
    0 and 2 have left retention.
    """
    listed = [
        ranged(1, 0, 4, 0),
        ranged(3, 5, 7, 2),
        ranged(4, 8, 9, 2),
        ranged(5, 0, 7, 1, 3),
        ranged(6, 10, 20),
    ]
    found = successors(listed, "shardId-0", HashKeyRange(0, 9))
    assert [c.shard_id for c in found] == ["shardId-1", "shardId-3", "shardId-4"]
    assert found[1] == ChildShard("shardId-3", ("shardId-2",), HashKeyRange(5, 7))
    assert [c.shard_id for c in successors(listed, "shardId-0", None)] == ["shardId-1"]


def test_a_lost_parent_of_a_merge_does_not_need_the_row_of_the_other_one():
    lost = Lease("1:orders:5:shardId-1", TRIM_HORIZON, stream="1:orders:5")
    merged = ChildShard("shardId-3", ("shardId-1", "shardId-2"), WHOLE)
    (lease,) = leases_after_loss(lost, [merged])
    assert (lease.lease_key, lease.checkpoint, lease.stream, lease.hash_key_range) == (
        "1:orders:5:shardId-3",
        TRIM_HORIZON,
        "1:orders:5",
        WHOLE,
    )
    assert lease.parent_shard_ids == {"shardId-1", "shardId-2"}


# A parent without a row: a finished lease that was deleted, or a row that was deleted by hand.


@pytest.mark.parametrize(
    ("lease", "waits"),
    [
        (Lease("shardId-6", TRIM_HORIZON), True),
        (Lease("shardId-6", TRIM_HORIZON, pending_checkpoint=Position("7")), False),
        (Lease("shardId-6", Position("7")), False),
        (Lease("shardId-6", SHARD_END), False),
        (Lease("shardId-6", LATEST), False),
        (Lease("shardId-6", AT_TIMESTAMP), False),
    ],
)
def test_only_a_child_that_has_not_begun_proves_a_deletion(lease, waits):
    assert has_not_begun(lease) is waits


def test_no_cleanup_deletes_a_parent_while_a_child_proves_its_deletion():
    """Whatever a leader, or KCL's own cleanup by the same rule, deletes: `has_not_begun` is False
    for all children.
    """
    for checkpoint in (TRIM_HORIZON, LATEST, AT_TIMESTAMP, SHARD_END, Position("7")):
        child = Lease("shardId-6", checkpoint, parent_shard_ids=frozenset({"shardId-0"}))
        parent = Lease("shardId-0", SHARD_END, child_shard_ids=frozenset({"shardId-6"}))
        if completed_leases((parent, child), {"shardId-0": 1e9}, 0.0):
            assert not has_not_begun(child)


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "AT_TIMESTAMP"])
def test_deleted_parents_are_restored_as_shard_sync_makes_them(position):
    shards = reference_tree()
    missing = {"shardId-7", "shardId-6", "shardId-99"}
    found = restored_parents(STREAM, shards, missing, (), position)
    by_id = {s.shard_id: s for s in shards}
    expected = [
        new_lease(STREAM, by_id[one], Position(position)) for one in ("shardId-6", "shardId-7")
    ]
    assert list(found) == expected, "ancestors first, and none that is not listed"


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "AT_TIMESTAMP", "LATEST"])
def test_a_shard_that_the_table_knows_is_continued_from_its_beginning(position):
    (found,) = restored_parents(STREAM, reference_tree(), {"shardId-6"}, {"shardId-6"}, position)
    assert found.checkpoint == TRIM_HORIZON


def test_at_latest_nothing_is_restored():
    assert restored_parents(STREAM, reference_tree(), {"shardId-6"}, (), "LATEST") == ()


@given(st.data(), histories())
def test_what_shard_sync_creates_finds_the_rows_of_its_parents(data, history):
    """At TRIM_HORIZON a lease has the rows of all its listed parents. So no initial position, and
    none of LATEST and AT_TIMESTAMP, makes a child that has its parents restored.
    """
    graph, open_ids, listed, rows, position = history
    shards = [shard(n, *graph[n], closed=n not in open_ids) for n in listed]
    existing = {n: n not in open_ids and data.draw(st.booleans()) for n in sorted(rows)}
    new = created(shards, existing, position)
    for number, checkpoint in new.items():
        if checkpoint == "TRIM_HORIZON":
            assert {p for p in graph[number] if p in listed} <= {*rows, *new}

"""The leader creates the row of an unfinished shard that was deleted by hand while a child waits,
and brings nothing back that was finished (protocol §8.2).
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import SinkError, ThrottledError
from kcl_pipeline.events import LeadershipLost, LeasesCreated, RecordsLost
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World, settled

P0, P1, CHILD = (f"shardId-{number:012}" for number in range(3))
CREATION = ("TransactWriteItems", f"{CHILD},{P1}")


def merging(position="TRIM_HORIZON", **overrides):
    """Two shards are merged; the first has ended, the second is held and has not."""
    sync = {"initial_position_in_stream": position}
    if position == "AT_TIMESTAMP":
        sync["initial_timestamp"] = "2020-01-01T00:00:00Z"
    world = settled(World(shards=2, shard_sync=sync, **overrides), "a")
    world.workers["a"].start_reading()
    world.model.merge("orders", P0, P1)
    world.workers["a"].finish(P0)
    return world


def knows(stored):
    """A table that stores positions."""

    def ask(_stream, shard_ids):
        if isinstance(stored, Exception):
            raise stored
        return {one: stored[one] for one in shard_ids if one in stored}

    return ask


def count_listings(world):
    """The unfiltered and filtered listings from now on."""
    listings, list_shards = [], world.kinesis.list_shards

    def counted(*arguments):
        listings.append(arguments)
        return list_shards(*arguments)

    world.kinesis.list_shards = counted
    return listings


def restored(world):
    return [
        key
        for event in world.happened(LeasesCreated)
        if "deleted" in event.reason
        for key in event.lease_keys
    ]


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "AT_TIMESTAMP"])
def test_the_row_is_restored_before_the_child_is_assigned(position):
    world = merging(position)
    cycle = world.leaders["leader"]
    cycle.run_once()
    before = world.table()[P1]
    world.leases.erase(P1)
    report = cycle.run_once()
    row = world.leases.get(P1)
    assert restored(world) == [P1]
    assert P1 in report.created
    assert (row.checkpoint, row.parent_shard_ids) == (Position(position), before.parent_shard_ids)
    assert row.hash_key_range == before.hash_key_range
    assert not world.happened(RecordsLost)


def test_at_latest_a_shard_that_the_table_does_not_know_has_no_row():
    """After its end there is nothing to read. The worker of the child reports what is lost."""
    world = merging("LATEST")
    world.leaders["leader"].run_once()
    world.leases.erase(P1)
    world.run(120)
    assert world.leases.get(P1) is None


def test_a_child_that_has_begun_brings_nothing_back():
    """A Java worker may have finished the parent, and deleted its lease, since the last cycle."""
    world = merging()
    world.run(20)
    cycle = world.leaders["leader"]
    world.workers["a"].start_reading()
    assert world.table()[CHILD].checkpoint == Position("1000")
    cycle.run_once()
    world.leases.erase(P1)
    world.run(60)
    assert restored(world) == []
    assert world.leases.get(P1) is None


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "AT_TIMESTAMP"])
def test_a_child_that_begins_after_the_scan_brings_nothing_back(position):
    world = merging(position)
    cycle = world.leaders["leader"]
    world.run(15)
    world.leases.erase(P1)
    child = world.leases.rows()[CHILD]

    def begins(operation, key):
        if (operation, key) == CREATION:
            world.leases.plant(child | {"checkpoint": {"S": "77"}})

    world.leases.store.before_call = begins
    cycle.run_once()
    assert world.leases.get(CHILD).checkpoint == Position("77")
    assert P1 not in world.leases.rows()
    assert restored(world) == []
    assert not world.happened(RecordsLost)


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "LATEST"])
def test_a_scan_that_does_not_see_the_row_proves_nothing(position):
    world = merging(position)
    cycle = world.leaders["leader"]
    cycle.run_once()
    row = world.leases.rows()[P1]
    world.leases.erase(P1)
    world.clock.advance(1)
    world.leases.plant(row)
    world.leases.store.scan_lag_seconds = 0.5
    cycle.run_once()
    assert restored(world) == []
    assert not world.happened(RecordsLost)
    assert world.leases.rows()[P1] == row


def test_a_new_leader_creates_a_row_that_it_has_never_seen():
    """The row of the child proves that the parent's was deleted by hand."""
    world = merging()
    world.leases.erase(P1)
    world.clock.advance(60)
    world.leader("other").run_once()
    world.clock.advance(60)
    assert world.leaders["other"].run_once().led
    assert restored(world) == [P1]


@pytest.mark.parametrize("begun", ["its row", "the table"])
def test_an_ancestor_of_a_begun_shard_has_ended(begun):
    """A Java worker has read the parent and its child, whose row somebody creates again."""
    world = merging()
    world.model.split("orders", CHILD)
    grandchild = "shardId-000000000003"
    known = {P1: StoredPosition(1, Position("1"))}
    if begun == "the table":
        known[grandchild] = StoredPosition(1, Position("7"))
    create_lease(
        world.leases,
        Lease(
            grandchild,
            Position("7") if begun == "its row" else TRIM_HORIZON,
            parent_shard_ids=frozenset({CHILD}),
        ),
    )
    cycle = world.leader(stored=knows(known), resume_own_name=True)
    world.leases.erase(P1)
    assert cycle.run_once().error is None
    assert restored(world) == []


def test_the_parents_of_the_shards_at_which_a_stream_was_begun_get_no_rows():
    world = World(
        shards=2,
        shard_sync={
            "initial_position_in_stream": "AT_TIMESTAMP",
            "initial_timestamp": "2030-01-01T00:00:00Z",
        },
    )
    world.model.merge("orders", P0, P1)
    create_lease(world.leases, Lease(CHILD, AT_TIMESTAMP, parent_shard_ids=frozenset({P0, P1})))
    assert world.leader(stored=knows({})).run_once().error is None
    assert list(world.table()) == [CHILD]


def test_the_parents_of_a_begun_shard_are_not_looked_for():
    """Their rows are deleted five minutes after their ends."""
    world = merging()
    world.run(20)
    world.workers["a"].start_reading()
    world.leaders["leader"].run_once()
    world.leases.erase(P0)
    world.leases.erase(P1)
    listings = count_listings(world)
    assert world.leaders["leader"].run_once().error is None
    assert listings == []


def test_while_nothing_changes_the_stream_is_listed_once_per_audit():
    world = merging("LATEST")
    cycle = world.leader(stored=knows({}), resume_own_name=True)
    cycle.run_once()
    world.leases.erase(P1)
    listings = count_listings(world)
    began = world.clock.monotonic()
    while world.clock.monotonic() < began + 100:
        cycle.run_once()
        world.clock.advance(1)
    assert len(listings) == 1


def test_an_error_is_reported_and_the_row_is_restored_in_the_next_cycle():
    world = merging()
    cycle = world.leaders["leader"]
    cycle.run_once()
    world.leases.erase(P1)
    failures = iter([ThrottledError("slow down", operation="TransactWriteItems")])

    def fails_once(operation, key):
        if (operation, key) == CREATION:
            for error in failures:
                raise error

    world.leases.store.before_call = fails_once
    assert "slow down" in cycle.run_once().error
    assert restored(world) == []
    assert cycle.run_once().error is None
    assert restored(world) == [P1]


def test_a_leader_that_was_replaced_while_it_looked_creates_nothing():
    world = merging()
    cycle, list_shards = world.leaders["leader"], world.kinesis.list_shards
    cycle.run_once()
    world.leases.erase(P1)
    lock = world.coordinator.read_lock()

    def replaced(*arguments):
        world.kinesis.list_shards = list_shards
        other = LeaderLock("other", lock.lease_duration_millis, "other's")
        world.clock.advance(60)
        assert world.coordinator.put_lock(other, replacing=world.coordinator.read_lock())
        return list_shards(*arguments)

    world.kinesis.list_shards = replaced
    assert cycle.run_once().led is False
    assert restored(world) == []


def test_a_shard_that_the_stream_does_not_list_is_not_restored():
    """Its worker has reported the loss and deleted the lease (`Lifecycle._lose`)."""
    world = merging()
    cycle = world.leaders["leader"]
    cycle.run_once()
    world.leases.erase(P1)
    listed = world.kinesis.list_shards(world.kinesis.resolve_stream("orders", multi_stream=False))
    world.kinesis.list_shards = lambda *_: tuple(s for s in listed if s.shard_id != P1)
    world.run(60)
    assert restored(world) == []


def test_a_replaced_stream_restores_nothing():
    world = merging()
    cycle = world.leaders["leader"]
    cycle.run_once()
    world.leases.erase(P1)
    world.kinesis.resolve_stream = lambda *_, **__: StreamId("orders", created_millis=1)
    assert "created again" in cycle.run_once().error
    assert restored(world) == []


def test_an_open_shard_is_left_to_the_audit_for_holes():
    world = settled(World(shards=2), "a")
    lost = min(world.table())
    world.leases.erase(lost)
    world.leaders["leader"].run_once()
    assert restored(world) == []
    world.run_until(lambda: lost in world.table(), limit=500)
    assert restored(world) == []


def test_of_several_streams_only_the_one_concerned_is_restored():
    world = World(shards=2, streams=("orders", "clicks"))
    world.join("a")
    world.leader()
    world.run(30)
    key = next(k for k in world.table() if ":orders:" in k and k.endswith("01"))
    other = key.replace(":orders:", ":clicks:")
    child = key.rsplit(":", 1)[0] + ":" + CHILD
    create_lease(
        world.leases,
        Lease(
            child,
            TRIM_HORIZON,
            parent_shard_ids=frozenset({P0, P1}),
            stream=key.rsplit(":", 1)[0],
        ),
    )
    world.leases.erase(key)
    world.leases.erase(other)
    world.leaders["leader"].run_once()
    assert restored(world) == [key]
    (event,) = [e for e in world.happened(LeasesCreated) if "deleted" in e.reason]
    assert event.stream == "orders"


@pytest.mark.parametrize(("ends", "brought_back"), [(False, [P1]), (True, [])])
def test_at_latest_a_shard_with_a_position_in_the_table_is_continued(ends, brought_back):
    world = merging("LATEST")
    stored = StoredPosition(1, Position("1"), ended=ends)
    cycle = world.leader(stored=knows({P1: stored}), resume_own_name=True)
    cycle.run_once()
    world.leases.erase(P1)
    cycle.run_once()
    assert restored(world) == brought_back
    assert not world.happened(RecordsLost)
    if brought_back:
        assert world.leases.get(P1).checkpoint == TRIM_HORIZON


def test_a_table_that_cannot_be_read_decides_nothing():
    world = merging("LATEST")
    cycle = world.leader(stored=knows(SinkError("the table cannot be read")), resume_own_name=True)
    cycle.run_once()
    world.leases.erase(P1)
    assert "cannot be read" in cycle.run_once().error
    assert P1 not in world.table()
    assert not world.happened(RecordsLost)


def test_a_leader_does_not_depend_on_the_table_while_a_shard_at_latest_is_idle():
    """Its parents have no rows, which is normal there."""
    world = World(shards=2, shard_sync={"initial_position_in_stream": "LATEST"})
    world.clock.advance(60)
    world.model.merge("orders", P0, P1)
    is_away, listings = [], []

    def stored(_stream, _ids):
        if is_away:
            raise SinkError("the object store does not respond")
        return {}

    world.join("a")
    world.leader("one", stored=stored)
    world.run(400, tick=1)
    assert sorted(world.table()) == [CHILD]
    list_shards = world.kinesis.list_shards

    def counted(*arguments):
        listings.append(arguments)
        return list_shards(*arguments)

    world.kinesis.list_shards = counted
    is_away.append(True)
    world.run(300, tick=1)
    assert not world.happened(LeadershipLost)
    assert len(listings) <= 300 / 10 + 5

"""Checks of the simulation on shards that begin at LATEST, and on deleted rows."""

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from verification.simulation.checks.sink import Checks
from verification.simulation.environment.streams import Streams
from verification.simulation.environment.traffic import Published
from verification.simulation.scenario import Scenario


def missing_after_deleted_rows(*, positions=True, deleted=True, stored=()):
    """Two shards at LATEST are merged; their rows are deleted; the child begins at LATEST."""
    streams = Streams(VirtualClock(), is_multi=False)
    streams.create("events", 2)
    parents = [f"shardId-{number:012d}" for number in range(2)]
    checks = Checks(
        InMemoryLeaseTable(),
        streams,
        Scenario(initial_position="LATEST", exactly_once=positions),
        lambda: 0.0,
    )
    for key in parents:
        create_lease(checks.table, Lease(key, LATEST))
        checks.row_written(key, "leader", "sensor")
        row = checks.table.get(key)
        checks.table.assign(row, "w1")
        checks.row_written(key, "leader", "sensor")
        checks._settle(key, Position("1"))
        checks.table.update_checkpoint(checks.table.get(key), checkpoint=Position("1"))
        checks.row_written(key, "worker", "w1")
    streams.model.call(
        "MergeShards", StreamName="events", ShardToMerge=parents[0], AdjacentShardToMerge=parents[1]
    )
    checks.stored |= set(stored)
    for key in parents if deleted else ():
        checks.table.erase(key)
        checks.deleted_by_hand(key)
    child = "shardId-000000000002"
    begin = LATEST if deleted else TRIM_HORIZON
    create_lease(checks.table, Lease(child, begin, parent_shard_ids=frozenset(parents)))
    checks.row_written(child, "leader", "sensor")
    checks.published("event", Published(parents[0], Position("1000"), 1, poison=False))
    return checks.missing()


def test_a_shard_whose_row_was_deleted_before_a_commit_may_be_passed_over_at_latest():
    """Seed 8100001010: all rows were deleted before the table knew a shard, and 0 had closed."""
    assert missing_after_deleted_rows() == set()


def missing_at_latest(begin_millis, *, deleted=False, stored=()):
    """An event that arrived at 1,500, in a shard whose lease has begun at LATEST.

    Dead letters have moved the checkpoint past the event, but nothing was committed to the table.
    """
    streams = Streams(VirtualClock(), is_multi=False)
    streams.create("events", 1)
    (key,) = streams.model.open_shard_ids("events")
    scenario = Scenario(initial_position="LATEST")
    checks = Checks(InMemoryLeaseTable(), streams, scenario, lambda: 0.0)
    create_lease(checks.table, Lease(key, LATEST, initial_millis=begin_millis))
    checks.row_written(key, "leader", "sensor")
    checks.table.assign(checks.table.get(key), "w1")
    checks.row_written(key, "leader", "sensor")
    checks._settle(key, Position("2000"))
    checks.table.update_checkpoint(checks.table.get(key), checkpoint=Position("2000"))
    checks.row_written(key, "worker", "w1")
    checks.stored |= set(stored)
    if deleted:
        checks.table.erase(key)
        checks.deleted_by_hand(key)
        create_lease(checks.table, Lease(key, LATEST, initial_millis=3_000))
        checks.row_written(key, "leader", "sensor")
    checks.published("event", Published(key, Position("1500"), 1_500, poison=False))
    return checks.missing()


def test_at_latest_what_arrives_after_the_creation_of_the_lease_must_be_committed():
    """Also if no record of the shard was ever committed."""
    assert missing_at_latest(1_000) == {"event"}
    assert missing_at_latest(2_000) == set()


def test_the_time_goes_with_a_row_that_was_deleted_before_the_table_knew_the_shard():
    """Seed 8400000633: all records so far were dead letters, and no table existed."""
    assert missing_at_latest(1_000, deleted=True) == set()
    assert missing_at_latest(1_000, deleted=True, stored=["shardId-000000000000"]) == {"event"}


def test_with_a_commit_in_its_lineage_it_may_not():
    assert missing_after_deleted_rows(stored=["shardId-000000000001"]) == {"event"}
    assert missing_after_deleted_rows(stored=["shardId-000000000002"]) == {"event"}


def test_nor_without_a_deleted_row():
    assert missing_after_deleted_rows(deleted=False) == {"event"}


def test_nor_in_a_fleet_that_stores_no_positions():
    assert missing_after_deleted_rows(positions=False) == {"event"}


def missing_behind_a_known_parent(*, deleted=True, stored=(), returns=False):
    """Shards 0 and 1 are merged; the table knows 1; the child begins at TRIM_HORIZON.

    Args:
        deleted: Whether the rows of the parents are deleted before; the row of 1 is created again.
        stored: Shards, besides 1, of which the table stores a position.
        returns: Whether the row of 0 is created again, after the child.
    """
    streams = Streams(VirtualClock(), is_multi=False)
    streams.create("events", 2)
    parents = [f"shardId-{number:012d}" for number in range(2)]
    scenario = Scenario(initial_position="LATEST")
    checks = Checks(InMemoryLeaseTable(), streams, scenario, lambda: 0.0)

    def create(lease):
        create_lease(checks.table, lease)
        checks.row_written(lease.lease_key, "leader", "sensor")

    for key in parents:
        create(Lease(key, LATEST, initial_millis=0))
    streams.model.call(
        "MergeShards", StreamName="events", ShardToMerge=parents[0], AdjacentShardToMerge=parents[1]
    )
    checks.stored |= {parents[1], *stored}
    for key in parents if deleted else ():
        checks.table.erase(key)
        checks.deleted_by_hand(key)
    if deleted:
        create(Lease(parents[1], LATEST, initial_millis=0))
    child = "shardId-000000000002"
    create(Lease(child, TRIM_HORIZON, parent_shard_ids=frozenset(parents)))
    if returns:
        create(Lease(parents[0], LATEST, initial_millis=0))
    checks.published("event", Published(parents[0], Position("1000"), 1, poison=False))
    return checks.missing()


def test_an_unknown_shard_may_be_passed_over_behind_a_child_of_a_known_one():
    """Seed 9950007027: a merged shard followed a known parent, and one whose row was deleted."""
    assert missing_behind_a_known_parent() == set()


def test_a_known_shard_may_not():
    assert missing_behind_a_known_parent(stored=["shardId-000000000000"]) == {"event"}
    assert missing_behind_a_known_parent(returns=True) == {"event"}
    assert missing_behind_a_known_parent(deleted=False) == {"event"}

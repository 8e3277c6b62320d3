"""What is wrong with one lease, row or stream costs no more than itself: the others are placed,
balanced and cleaned up, and the leader goes on leading.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble, CycleFailed, LeadershipLost, LeaseDeleted
from kcl_pipeline.leader.assign import is_local
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import TRIM_HORIZON
from tests.support.leader_world import World, settled

BAD = "shardId-000000000000"


def failing(world, error, *, operations, key=BAD):
    """Every write of these kinds to one row fails."""

    def fail(operation, name):
        if operation in operations and key in name.split(","):
            raise error

    world.leases.store.before_call = fail


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("the row is too large", operation="UpdateItem"), True),
        (NotFoundError("no such stream", operation="ListShards"), True),
        (AccessDeniedError("kinesis:ListShards is denied", operation="ListShards"), True),
        (ValueError("an attribute means nothing"), True),
        (AccessDeniedError("dynamodb:UpdateItem is denied", operation="UpdateItem"), False),
        (ThrottledError("slow down", operation="UpdateItem"), False),
        (UnavailableError("server error", operation="ListShards"), True),
        (RuntimeError("a defect"), False),
    ],
)
def test_what_another_leader_could_do_no_better_is_local(error, expected):
    assert is_local(error) is expected


def test_a_lease_that_cannot_be_assigned_does_not_cost_the_lead_or_the_balance():
    world = settled(World(shards=4), "a")
    assign = world.leases.assign

    def fail(lease, worker_id, **options):
        if lease.lease_key == BAD:
            raise InvalidRequestError("the row is too large")
        return assign(lease, worker_id, **options)

    world.leases.assign = fail
    world.leases.evict(world.table()[BAD])
    world.events.clear()
    world.join("b")
    world.run_until(lambda: len(world.held()["b"]) > 0, limit=120)
    assert {event.consecutive for event in world.happened(CycleFailed)} == {0}
    assert not world.happened(LeadershipLost)


def test_a_stream_that_is_gone_does_not_cost_the_lead():
    world = World(streams=("orders", "returns"), shards=2)
    world.model.call("DeleteStream", StreamName="returns")
    world.join("a")
    leader = world.leader()
    world.run(60)
    assert len(world.held()["a"]) == 2
    assert world.happened(CycleFailed)
    assert not world.happened(LeadershipLost)
    report = leader.run_once()
    assert [one.stream for one in report.unavailable] == ["returns"]
    assert "returns" in report.unavailable[0].reason
    world.model.create_stream("returns", 2)
    world.run(60)
    assert leader.run_once().unavailable == ()


def finished(world, *keys):
    """These shards were read to their end, and their children have been started."""
    world.workers["a"].start_reading()
    for key in keys:
        world.model.call(
            "SplitShard",
            StreamName="orders",
            ShardToSplit=key,
            NewStartingHashKey=str(int(world.table()[key].hash_key_range.start) + 1000),
        )
        world.clock.advance(1)
        world.workers["a"].renew()
        world.workers["a"].finish(key)
    world.run(60)
    world.workers["a"].start_reading()


@pytest.mark.parametrize(
    "error", [InvalidRequestError("it cannot be deleted"), ThrottledError("slow down")]
)
def test_a_row_that_cannot_be_deleted_does_not_keep_the_others(error):
    world = settled(
        World(
            shards=3,
            assignment={"stale_worker_metrics_entry_cleanup_millis": 60_000},
            shard_sync={"completed_lease_cleanup_interval_millis": 1_000},
        ),
        "a",
    )
    other = "shardId-000000000001"
    world.rows.report(WorkerMetrics("gone", 1))
    failing(world, error, operations={"DeleteItem"})
    finished(world, BAD, other)
    world.run(120)
    assert [event.lease_key for event in world.happened(LeaseDeleted)] == [other]
    assert {row.worker_id for row in world.rows.scan_workers().workers} == {"a"}
    troubles = [t for t in world.happened(AwsTrouble) if t.operation == f"deletion of {BAD}"]
    assert troubles
    assert not world.happened(LeadershipLost)


def test_a_worker_row_that_cannot_be_deleted_does_not_keep_the_others():
    world = settled(World(assignment={"stale_worker_metrics_entry_cleanup_millis": 60_000}), "a")
    for name in ("0-gone", "1-gone"):
        world.rows.report(WorkerMetrics(name, 1))

    def fail(operation, name):
        if (operation, name) == ("DeleteItem", "0-gone"):
            raise InvalidRequestError("it cannot be deleted")

    world.rows.store.before_call = fail
    world.run(120)
    assert {row.worker_id for row in world.rows.scan_workers().workers} == {"a", "0-gone"}
    assert [t for t in world.happened(AwsTrouble) if t.operation == "deletion of the row of 0-gone"]
    assert not world.happened(LeadershipLost)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("the row is too large"), ThrottledError("slow down")]
)
def test_a_lease_that_cannot_be_created_does_not_keep_the_others_of_its_stream(error):
    world = World(shards=4)
    world.join("a")
    failing(world, error, operations={"TransactWriteItems"})
    world.leader()
    world.run_until(lambda: len(world.held()["a"]) == 3, limit=30)
    world.leases.store.before_call = lambda *_: None
    # A leader that was throttled three times has given up the lead; then the audit fills the hole
    world.run_until(lambda: len(world.held()["a"]) == 4, limit=900)
    (lease,) = [row for row in world.table().values() if row.lease_key == BAD]
    assert lease.checkpoint == TRIM_HORIZON

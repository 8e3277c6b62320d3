"""A child waits for a parent whose row was deleted by hand, and for no other parent without a row
(protocol §6.6, §8.2). A leader of this package creates the row; while a Java worker leads, the
worker of the child does.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from kcl_pipeline.errors import NotFoundError, SinkError, ThrottledError
from kcl_pipeline.events import (
    AwsTrouble,
    LeaseLost,
    LeasesCreated,
    LossReason,
    RecordsLost,
)
from kcl_pipeline.kinesis.identity import REFUSAL_KEPT_SECONDS
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import shard_key
from kcl_pipeline.testing.sink import InMemorySink
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered

P0, P1, CHILD = (f"shardId-{number:012}" for number in range(3))
LATER = numbered(5, prefix="later")
LONG_AGO = {"initial_timestamp": "2020-01-01T00:00:00Z"}
NEVER_AUDITED = {"leases_recovery_auditor_execution_frequency_millis": 10**9}


def merged(position="TRIM_HORIZON", **settings):
    """A world whose two shards were merged with records in them; no row is written yet."""
    world = World(
        shards=2,
        shard_sync={**NEVER_AUDITED, "initial_position_in_stream": position, **settings},
    )
    world.put(*numbered(20))
    world.model.merge("orders", P0, P1)
    world.put(*LATER)
    return world


def stream_of(world):
    return world.kinesis.resolve_stream("orders", multi_stream=False)


def plant(world, shard_id, checkpoint, **attributes):
    shard = next(s for s in world.kinesis.list_shards(stream_of(world)) if s.shard_id == shard_id)
    create_lease(
        world.leases,
        Lease(
            shard_id,
            checkpoint,
            parent_shard_ids=frozenset(shard.parents),
            hash_key_range=shard.hash_key_range,
            **attributes,
        ),
    )


def records_of(world, shard_id, column="data"):
    stream = stream_of(world)
    iterator = world.kinesis.get_shard_iterator(stream, shard_id, "TRIM_HORIZON")
    page = world.kinesis.get_records(stream, shard_id, iterator, 1000)
    return page.records.column(column).to_pylist()


def java_leads(world):
    """A Java worker has the lock and reports; it creates no row that was deleted."""
    world.rows.report(WorkerMetrics("java-1", 1_700_000_000))
    assert world.coordinator.put_lock(LeaderLock("java-1", 120_000, "v"), replacing=None)


def held_child(world, checkpoint=TRIM_HORIZON, **attributes):
    """The child's lease in the hands of the worker, which looks at it once."""
    plant(world, CHILD, checkpoint, owner="w-1", **attributes)
    world.worker.leases.discover()
    world.worker.process_tick()
    return world.worker.lifecycle.consumers[CHILD]


def created(world):
    return [key for event in world.of(LeasesCreated) for key in event.lease_keys]


def unfiltered_listings(world):
    """The unfiltered listings from now on."""
    calls = []
    list_shards = world.kinesis.list_shards

    def counted(stream, shard_filter=None, timestamp=None):
        if shard_filter is None:
            calls.append(stream)
        return list_shards(stream, shard_filter, timestamp)

    world.kinesis.list_shards = counted
    return calls


# The incident: one parent of a merge has ended, the row of the other one is deleted, and the child
# has not begun.


def test_a_parent_whose_row_was_deleted_is_read_before_its_child():
    world = merged()
    rest = records_of(world, P1)
    plant(world, P0, SHARD_END, child_shard_ids=frozenset({CHILD}))
    plant(world, CHILD, TRIM_HORIZON)
    world.run()
    assert len(rest) > 3
    assert world.data() == sorted([*rest, *LATER])
    in_order = world.table.rows().column("data").to_pylist()
    assert in_order.index(rest[-1]) < in_order.index(LATER[0])
    assert created(world) == [P1]
    assert world.leases.get(P1).ended
    assert not world.of(RecordsLost)


def test_a_worker_creates_no_row_while_no_java_worker_leads():
    """The leader does; a process without a worker row, such as the sensor, is of this package."""
    world = merged()
    assert world.coordinator.put_lock(LeaderLock("sensor", 15_000, "v"), replacing=None)
    consumer = held_child(world)
    assert created(world) == []
    assert consumer.state is ConsumerState.BLOCKED


@pytest.mark.parametrize("position", ["TRIM_HORIZON", "AT_TIMESTAMP"])
def test_the_restored_row_is_the_one_that_shard_sync_makes(position):
    world = merged(position, **(LONG_AGO if position == "AT_TIMESTAMP" else {}))
    java_leads(world)
    consumer = held_child(world)
    (shard,) = [s for s in world.kinesis.list_shards(stream_of(world)) if s.shard_id == P1]
    millis = world.settings.shard_sync.initial_millis
    assert (millis is not None) == (position == "AT_TIMESTAMP")
    assert world.leases.get(P1) == Lease(
        P1, Position(position), hash_key_range=shard.hash_key_range, initial_millis=millis
    )
    assert consumer.state is ConsumerState.BLOCKED


def test_a_deleted_row_is_restored_while_the_other_parent_is_still_read():
    """That may take days, and the records of this one leave retention meanwhile."""
    world = merged()
    java_leads(world)
    plant(world, P0, Position("7"), owner="somebody", counter=3)
    held_child(world)
    assert created(world) == [P1]


def test_both_parents_of_a_merge_are_restored():
    world = merged()
    plant(world, CHILD, TRIM_HORIZON)
    world.run()
    assert sorted(created(world)) == [P0, P1]
    assert world.data() == sorted(world.sent)


def test_a_row_that_is_deleted_again_is_restored_again():
    world = merged()
    plant(world, P0, SHARD_END, child_shard_ids=frozenset({CHILD}))
    plant(world, CHILD, TRIM_HORIZON)
    deleted = []

    def delete_once(_operation, _key):
        if world.leases.rows().get(P1) is not None and not deleted:
            deleted.append(world.leases.erase(P1))

    world.leases.store.after_call = delete_once
    world.run()
    assert deleted
    assert created(world) == [P1, P1]
    assert set(records_of(world, P1)) <= set(world.data())


def test_a_worker_that_sees_the_row_missing_a_little_late_leaves_the_new_one_alone():
    world = merged()
    java_leads(world)

    plant(world, P1, Position("5"), owner="somebody", counter=8)
    row = world.leases.rows()[P1]
    world.leases.erase(P1)

    def restored_by_another(operation, key):
        if operation == "TransactWriteItems" and world.leases.rows().get(P1) is None:
            world.leases.plant(row)

    world.leases.store.before_call = restored_by_another
    plant(world, P0, SHARD_END)
    consumer = held_child(world)
    assert world.leases.get(P1).checkpoint == Position("5")
    assert created(world) == []
    assert consumer.state is ConsumerState.BLOCKED


# No evidence of a deletion: no row is made, and the child starts.


@pytest.mark.parametrize("begun", ["its first record", LATEST, AT_TIMESTAMP])
def test_a_child_that_has_begun_or_starts_elsewhere_does_not_wait(begun):
    world = merged("AT_TIMESTAMP", **LONG_AGO) if begun == AT_TIMESTAMP else merged()
    if begun == "its first record":
        begun = Position(records_of(world, CHILD, "sequence_number")[0])
    calls = unfiltered_listings(world)
    consumer = held_child(world, begun)
    assert created(world) == []
    asked = len(calls) - 1  # once by this test
    assert asked == (begun != LATEST), "only by the first batch, which creates the table"
    assert consumer.state is not ConsumerState.BLOCKED


def test_a_child_with_a_prepared_batch_has_begun():
    world = merged()
    pending = {"pending_checkpoint": Position("9"), "pending_checkpoint_state": b"4"}
    consumer = held_child(world, counter=4, **pending)
    assert created(world) == []
    assert consumer.state is not ConsumerState.BLOCKED


def test_a_child_that_the_sink_knows_has_begun_whatever_its_row_says():
    """The row was created again late, or edited; the parents had ended when the shard began."""
    world = merged()
    sink = world.make_sink()
    sink.ensure(pa.schema([("data", pa.binary())]))
    found = sink.positions([shard_key(stream_of(world), CHILD)])
    becomes = {key: stored.moved(Position("9")) for key, stored in found.shards.items()}
    assert sink.commit(found.table_id, (), found.shards, becomes).version
    consumer = held_child(world)
    assert created(world) == []
    assert consumer.state is not ConsumerState.BLOCKED


def test_parents_that_have_left_retention_are_not_waited_for_and_asked_for_once():
    world = merged()
    listed = world.kinesis.list_shards(stream_of(world))
    world.kinesis.list_shards = lambda *_: tuple(s for s in listed if s.shard_id == CHILD)
    calls = unfiltered_listings(world)
    consumer = held_child(world)
    assert consumer.state is not ConsumerState.BLOCKED
    assert created(world) == []
    world.worker.lifecycle.consumers.clear()
    world.worker.process_tick()
    assert world.worker.lifecycle.consumers[CHILD].state is not ConsumerState.BLOCKED
    assert len(calls) == 2, "one of them by this test"


# What is not known is not decided.


@pytest.mark.parametrize(
    "begun",
    [
        {"checkpoint": {"S": "77"}, "leaseCounter": {"N": "9"}},
        {"pendingCheckpoint": {"S": "77"}, "leaseCounter": {"N": "9"}},
    ],
    ids=["a checkpoint", "a prepared batch"],
)
@pytest.mark.parametrize("position", ["TRIM_HORIZON", "LATEST"])
def test_a_child_whose_lease_was_lost_restores_and_reports_nothing(position, begun):
    """Another worker has begun the child since, and a leader has deleted its finished parents."""
    world = merged(position)
    java_leads(world)
    plant(world, CHILD, TRIM_HORIZON, owner="w-1")
    world.worker.leases.discover()
    last = "TransactWriteItems" if position == "TRIM_HORIZON" else "GetItem"

    def begun_by_another(operation, key):
        if operation == last and key.startswith(CHILD):
            world.leases.plant(world.leases.rows()[CHILD] | begun)

    world.leases.store.before_call = begun_by_another
    world.worker.process_tick()
    assert set(world.leases.rows()) == {CHILD}
    assert created(world) == []
    assert not world.of(RecordsLost)
    assert bool(world.of(LeaseLost)) is (position == "TRIM_HORIZON")


def test_a_child_whose_row_was_deleted_too_restores_nothing():
    world = merged()
    java_leads(world)
    plant(world, CHILD, TRIM_HORIZON, owner="w-1")
    world.worker.leases.discover()
    world.leases.erase(CHILD)
    world.worker.process_tick()
    assert world.leases.rows() == {}
    assert world.of(LeaseLost)


def throttled(*_):
    raise ThrottledError("slow down", operation="ListShards")


def gone(*_, **__):
    raise NotFoundError("no such stream")


def replaced(*_, **__):
    return StreamId("orders", created_millis=1)


def unreadable(*_):
    raise SinkError("the log cannot be read")


@pytest.mark.parametrize(
    ("place", "call", "answer"),
    [
        ("kinesis", "list_shards", throttled),
        ("kinesis", "list_shards", gone),
        ("kinesis", "resolve_stream", replaced),
        ("sink", "positions", unreadable),
    ],
)
def test_while_the_stream_or_the_sink_cannot_be_asked_the_child_waits(
    place, call, answer, monkeypatch
):
    world = merged()
    java_leads(world)
    plant(world, CHILD, TRIM_HORIZON, owner="w-1")
    world.worker.leases.discover()
    with monkeypatch.context() as patch:
        patch.setattr(world.kinesis if place == "kinesis" else InMemorySink, call, answer)
        world.worker.process_tick()
    consumer = world.worker.lifecycle.consumers[CHILD]
    assert consumer.state is ConsumerState.BLOCKED
    assert created(world) == []
    assert world.of(AwsTrouble)
    if answer is replaced:
        world.clock.advance(REFUSAL_KEPT_SECONDS)
        world.worker.leases.drop_expired()
        world.worker.leases.discover()
        world.worker.process_tick()
        consumer = world.worker.lifecycle.consumers[CHILD]
    consumer.due = 0.0
    world.worker.process_tick()
    assert sorted(created(world)) == [P0, P1]
    assert consumer.state is ConsumerState.BLOCKED


# LATEST: behind the end of a closed shard there is nothing to read.


def test_at_latest_the_loss_is_reported_once_and_the_child_starts():
    world = merged("LATEST")
    plant(world, P0, SHARD_END, child_shard_ids=frozenset({CHILD}))
    consumer = held_child(world)
    assert consumer.state is ConsumerState.READING
    assert created(world) == []
    assert world.of(RecordsLost) == [
        RecordsLost("w-1", P1, LossReason.ROW_DELETED, stream="orders")
    ]
    world.worker.lifecycle.consumers.clear()
    world.worker.process_tick()
    assert len(world.of(RecordsLost)) == 1


def test_at_latest_a_new_application_starts_without_its_parents_rows_and_reports_nothing():
    world = merged("LATEST")
    world.clock.advance(1)  # the time of Kinesis has whole seconds
    world.run(5)
    world.put(b"new")
    world.run(5)
    assert world.data() == [b"new"]
    assert list(world.leases.rows()) == [CHILD]
    assert not world.of(RecordsLost)

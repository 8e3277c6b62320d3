"""A drain that cannot be completed says why and ends; one beside a fleet says so, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kcl_pipeline.errors import AccessDeniedError, ThrottledError
from kcl_pipeline.events import AwsTrouble, DrainWaits, ShardsLeftToOthers
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.store import Changes
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import MAX_HASH_KEY
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.stopping.drain import (
    LOOK_SECONDS,
)
from kcl_pipeline.worker.summary import StopReason, owners_text
from tests.support.streams_world import StreamsWorld
from tests.support.worker_world import World

STANDSTILL_SECONDS = 123.0
"""With the default of `shard_stalled_after_millis`, and a failover time of one second."""


def refuse_scans(world: World, until: float) -> None:
    def refused(operation, _key):
        if operation == "Scan" and world.clock.monotonic() < until:
            raise AccessDeniedError("not allowed: dynamodb:Scan")

    world.leases.hook(refused, None)


def looks_until_done(world: World, drain, seconds: float) -> bool:
    until = world.clock.monotonic() + seconds
    while world.clock.monotonic() < until:
        if drain.done():
            return True
        world.worker.lease_tick()
        world.worker.fetch_tick()
        world.worker.process_tick()
        world.clock.advance(0.05)
    return False


def drained_world() -> World:
    world = World(shards=2)
    world.put(b"a", b"b")
    world.run(5)
    world.events.clear()
    return world


def error_of(world: World) -> str:
    reason = world.worker.reason_of_drain()
    assert reason is StopReason.FAILED
    return world.worker.summary(reason).error


def test_a_table_that_stays_unreadable_fails_the_drain_with_its_error():
    world = drained_world()
    refuse_scans(world, until=float("inf"))
    began = world.clock.monotonic()
    assert looks_until_done(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    seconds = world.clock.monotonic() - began
    assert STANDSTILL_SECONDS <= seconds <= STANDSTILL_SECONDS + 3 * LOOK_SECONDS
    assert "the lease table: AccessDeniedError: not allowed: dynamodb:Scan" in error_of(world)
    assert "dynamodb:Scan" in world.of(AwsTrouble)[0].error


def test_a_drain_says_every_half_minute_what_it_waits_for():
    world = drained_world()
    refuse_scans(world, until=float("inf"))
    assert looks_until_done(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    seconds = [event.seconds for event in world.of(DrainWaits)]
    assert len(seconds) == STANDSTILL_SECONDS // 30
    assert all(0 <= at - 30 * (n + 1) < 10 for n, at in enumerate(seconds)), seconds
    assert {event.reasons for event in world.of(DrainWaits)} == {
        "the lease table: AccessDeniedError: not allowed: dynamodb:Scan"
    }


def test_a_refusal_that_passes_is_an_event_and_the_drain_completes():
    world = drained_world()
    refuse_scans(world, until=world.clock.monotonic() + 0.9 * STANDSTILL_SECONDS)
    assert looks_until_done(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    assert any("for the drain" in event.operation for event in world.of(AwsTrouble))
    assert world.worker.reason_of_drain() is StopReason.DRAINED


def test_a_batch_that_takes_long_is_no_standstill():
    """Nothing can move before its end; the drain looks when it is over."""
    world = drained_world()
    refuse_scans(world, until=world.clock.monotonic() + STANDSTILL_SECONDS + 10)
    drain = world.worker.drain_watch()
    assert not looks_until_done(world, drain, 2)
    world.clock.advance(STANDSTILL_SECONDS)
    assert looks_until_done(world, drain, 30)
    assert world.worker.reason_of_drain() is StopReason.DRAINED


def test_shards_that_are_read_one_after_the_other_are_a_movement():
    """Each shard is read to its tip with one batch, after which it is not waited for any more."""
    shards, records = 8, 5
    world = World(shards=shards, buffered=True, batch={"max_batch_records": records})
    for shard in range(shards):
        for _ in range(records):
            world.model.call(
                "PutRecord",
                StreamName="orders",
                PartitionKey="x",
                ExplicitHashKey=str(MAX_HASH_KEY // shards * shard + shards),
                Data=b"x",
            )
    write = world.writer.write

    def slow(batch):
        for _ in range(round(STANDSTILL_SECONDS)):
            world.clock.advance(0.25)
            world.worker.lease_tick()
        return write(batch)

    world.writer.write = slow
    drain = world.worker.drain_watch()
    assert looks_until_done_with_leader(world, drain, 20 * STANDSTILL_SECONDS)
    assert len(world.data()) == shards * records
    assert world.worker.reason_of_drain() is StopReason.DRAINED


def test_the_shards_beside_an_unreadable_row_are_drained_and_the_drain_fails():
    """The row of a shard that nobody can read leaves a hole that no leader can fill."""
    world = World(shards=3)
    world.put(*(b"%d" % number for number in range(30)))
    key = "shardId-000000000001"
    world.make_leader("other").run_once()
    world.leases.store.put({"leaseKey": {"S": key}, "checkpoint": {"N": "1"}}, [])
    assert looks_until_done_with_leader(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    assert f"{key}: the row {key} is not a lease that can be read" in error_of(world)
    assert 0 < len(world.data()) < 30


def test_shards_that_wait_for_the_children_of_an_unreadable_row_do_not_hold_the_drain():
    """Their ends failed in turns, so that no look saw all of them settled."""
    world = StreamsWorld("a", shards=3)
    world.put("a", 10, "a")
    world.start("v", "a")
    world.run(20)
    del world.workers["v"]
    key = "shardId-000000000001"
    world.leases.store.put({"leaseKey": {"S": key}, "checkpoint": {"N": "1"}}, [])
    world.start("w", "a", drain=True)
    world.run(2)
    assert not world.drains["w"].done(), "it has listed the shards now"
    middle = str(MAX_HASH_KEY // 2)
    world.model.call("SplitShard", StreamName="a", ShardToSplit=key, NewStartingHashKey=middle)
    for seconds, (shard, adjacent) in ((1, "03"), (30, "42")):
        world.run(seconds)
        world.model.call(
            "MergeShards",
            StreamName="a",
            ShardToMerge=f"shardId-00000000000{shard}",
            AdjacentShardToMerge=f"shardId-00000000000{adjacent}",
        )
    world.run_until(world.drains["w"].done, 400)
    reason = world.workers["w"].reason_of_drain()
    assert reason is StopReason.FAILED
    assert (
        f"{key}: the row {key} is not a lease that can be read"
        in world.workers["w"].summary(reason).error
    )


def test_a_row_that_can_be_read_again_is_drained():
    """A person deletes it; then the leader creates it, after three audits of two minutes."""
    world = World(shards=2)
    world.put(b"a", b"b", b"c", b"d")
    key = "shardId-000000000001"
    world.make_leader("other").run_once()
    world.leases.store.put({"leaseKey": {"S": key}, "checkpoint": {"N": "1"}}, [])
    drain = world.worker.drain_watch()
    world.run(0.6 * STANDSTILL_SECONDS)
    assert not drain.done()
    world.leases.store.delete(key, [])
    assert looks_until_done_with_leader(world, drain, 600)
    assert world.worker.reason_of_drain() is StopReason.DRAINED
    assert world.data() == [b"a", b"b", b"c", b"d"]


def forbid(world: World, forbidden: str) -> None:
    """Let nobody read a shard."""
    read = world.kinesis.get_shard_iterator

    def refused(stream, shard_id, *args, **more):
        if shard_id == forbidden:
            raise AccessDeniedError("GetShardIterator: not allowed: kms:Decrypt")
        return read(stream, shard_id, *args, **more)

    world.kinesis.get_shard_iterator = refused


def looks_until_done_with_leader(world: World, drain, seconds: float) -> bool:
    until = world.clock.monotonic() + seconds
    while world.clock.monotonic() < until:
        if drain.done():
            return True
        world.run(0.5)
    return False


@pytest.mark.parametrize("buffered", [True, False])
def test_a_shard_that_nobody_may_read_fails_the_drain_with_its_error(buffered):
    world = World(shards=2, buffered=buffered)
    world.put(*(b"%d" % number for number in range(20)))
    forbid(world, "shardId-000000000001")
    drain = world.worker.drain_watch()
    began = world.clock.monotonic()
    assert looks_until_done_with_leader(world, drain, 2 * STANDSTILL_SECONDS)
    assert world.clock.monotonic() - began >= STANDSTILL_SECONDS
    error = error_of(world)
    assert "nothing that the drain waits for has moved for 12" in error
    assert "shardId-000000000001: AccessDeniedError: GetShardIterator" in error
    assert "kms:Decrypt" in error
    assert world.data(), "the other shard is drained"


def test_a_drain_goes_on_while_anything_moves_that_it_waits_for():
    """One shard is forbidden, and the other one is read for longer than a standstill may last."""
    world = World(shards=2, buffered=True, batch={"max_batch_records": 1})
    world.put(*(b"%d" % number for number in range(600)))
    forbid(world, "shardId-000000000001")
    write = world.writer.write

    def slow(batch):
        world.clock.advance(0.5)
        return write(batch)

    world.writer.write = slow
    drain, began = world.worker.drain_watch(), world.clock.monotonic()
    while not world.worker.status().totals.records:
        world.run(0.5)
        assert not drain.done()
    assert looks_until_done_with_leader(world, drain, 6 * STANDSTILL_SECONDS)
    assert world.clock.monotonic() - began >= 2 * STANDSTILL_SECONDS
    assert len(world.data()) > 2 * STANDSTILL_SECONDS, "all records of the other shard"
    assert "AccessDeniedError" in error_of(world)


def test_an_error_that_passes_is_waited_for():
    world = World(shards=2, buffered=True)
    world.put(*(b"%d" % number for number in range(20)))
    read, until = world.kinesis.get_shard_iterator, world.clock.monotonic() + 90

    def refused(*args, **more):
        if world.clock.monotonic() < until:
            raise ThrottledError("GetShardIterator: slow down")
        return read(*args, **more)

    world.kinesis.get_shard_iterator = refused
    assert looks_until_done_with_leader(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    assert world.worker.reason_of_drain() is StopReason.DRAINED
    assert len(world.data()) == 20


def test_an_unexpected_error_of_a_step_ends_the_drain_with_its_type(monkeypatch):
    world = World(shards=2)
    world.put(b"a", b"b", b"c")
    lookup = world.worker.lifecycle.parents.may_start

    def defect(consumer, *args):
        if consumer.lease_key == "shardId-000000000000":
            raise KeyError("a defect")
        return lookup(consumer, *args)

    monkeypatch.setattr(world.worker.lifecycle.parents, "may_start", defect)
    assert looks_until_done_with_leader(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    assert "shardId-000000000000: KeyError: 'a defect'" in error_of(world)


def test_rows_of_workers_that_nobody_replaces_fail_the_drain_and_are_named():
    """No leader is there that assigns them."""
    world = World(shards=4)
    world.put(*(b"%d" % number for number in range(20)))
    world.make_leader("other").run_once()
    rows = sorted(world.leases.rows())
    for key in rows:
        assert world.leases.assign(world.leases.get(key), "gone") is not None
    for key in rows[2:]:
        world.leases.store.update(key, [], Changes(remove=("leaseOwner",)))
    assert looks_until_done(world, world.worker.drain_watch(), 2 * STANDSTILL_SECONDS)
    error = error_of(world)
    gone = f"{rows[0]} and 1 more: its owner gone has not renewed it since the drain began"
    assert gone in error
    assert f"{rows[2]} and 1 more: it has no owner" in error


def test_a_missing_row_that_nobody_creates_fails_the_drain_and_is_named():
    audit = {"leases_recovery_auditor_execution_frequency_millis": 10_000}
    world = World(shards=2, buffered=True, shard_sync=audit)
    world.run(2)
    world.leases.store.delete("shardId-000000000001", [])
    drain, began = world.worker.drain_watch(), world.clock.monotonic()
    assert looks_until_done(world, drain, 2 * STANDSTILL_SECONDS)
    assert world.clock.monotonic() - began >= STANDSTILL_SECONDS + 3 * 10
    assert "the stream orders: no lease covers the hash keys" in error_of(world)


def read_everything_itself(world):
    assert world.workers["d"].summary(StopReason.DRAINED).elsewhere == {}
    assert world.of(ShardsLeftToOthers) == []


def beside_a_fleet(records: int = 10) -> StreamsWorld:
    """Two workers with two shards each, and a worker that drains."""
    world = StreamsWorld("a", shards=4)
    for name in ("w-1", "w-2"):
        world.start(name, "a")
    world.run(30)
    world.put("a", records, "a")
    world.start("d", "a", drain=True)
    return world


def test_a_drain_beside_a_fleet_says_which_workers_hold_how_many_shards():
    world = beside_a_fleet()
    world.run_until(world.drains["d"].done, 60)
    summary = world.workers["d"].summary(world.workers["d"].reason_of_drain())
    assert summary.reason is StopReason.DRAINED
    owners = Counter(row["leaseOwner"]["S"] for row in world.leases.rows().values())
    owners.pop("d", None)
    assert summary.elsewhere == owners
    assert sum(summary.elsewhere.values()) >= 3
    event = world.of(ShardsLeftToOthers)[-1]
    assert (event.worker_id, event.shards) == ("d", 4)
    assert event.elsewhere == sum(owners.values())
    assert event.owners == owners_text(owners)


def test_a_drain_alone_leaves_nothing_to_others():
    world = StreamsWorld("a", shards=4)
    world.put("a", 10, "a")
    world.start("d", "a", drain=True)
    world.run_until(world.drains["d"].done, 60)
    assert world.has_all()
    read_everything_itself(world)


def test_a_worker_that_is_dead_does_not_count():
    world = beside_a_fleet()
    for name in ("w-1", "w-2"):
        del world.workers[name]
    world.run_until(world.drains["d"].done, 120)
    assert world.has_all()
    read_everything_itself(world)


def test_rows_that_name_a_worker_that_was_killed_before_the_drain_began_are_drained():
    """All rows have an owner, and it has renewed them a moment before. Nobody reads its shards."""
    world = StreamsWorld("a", shards=4)
    world.start("w-1", "a")
    world.run(30)
    del world.workers["w-1"]
    world.put("a", 20, "a")
    world.start("d", "a", drain=True)
    assert {row["leaseOwner"]["S"] for row in world.leases.rows().values()} == {"w-1"}
    world.run_until(world.drains["d"].done, 120)
    assert world.has_all()
    assert world.workers["d"].reason_of_drain() is StopReason.DRAINED
    assert world.of(ShardsLeftToOthers) == []


@pytest.mark.parametrize("is_same", [True, False], ids=["same settings", "own default"])
def test_a_drain_waits_until_the_lock_of_a_leader_that_was_killed_has_expired(is_same):
    """Until then no leader can assign the leases of that worker."""
    world = StreamsWorld("a", shards=4)
    lock = {"leader_lease_duration_millis": 300_000, "leader_heartbeat_period_millis": 30_000}
    world.start("w-1", "a", leader=lock)
    world.run(90)
    del world.workers["w-1"]
    world.put("a", 20, "a")
    world.start("d", "a", drain=True, leader=lock if is_same else {})
    assert world.run_until(world.drains["d"].done, 600) > 240
    assert world.has_all()
    assert world.workers["d"].reason_of_drain() is StopReason.DRAINED


def test_a_shard_that_waits_for_one_of_another_worker_is_left_to_it():
    """The other worker renews its lease, and writes no checkpoint."""
    world = StreamsWorld("a", shards=1)
    world.start("w-1", "a")
    world.run(30)
    del world.workers["w-1"]
    table = world.leases.view()
    (parent,) = table.list_leases().leases
    world.model.split("a", parent.shard_id)
    stream = InMemoryKinesis(world.model).resolve_stream("a", multi_stream=False)
    _, *children = InMemoryKinesis(world.model).list_shards(stream)
    for child in children:
        row = Lease(child.shard_id, TRIM_HORIZON, parent_shard_ids=frozenset(child.parents))
        create_lease(world.leases, row.with_(hash_key_range=child.hash_key_range))
    world.start("d", "a", drain=True)
    for _ in range(60):
        parent = table.renew(parent)
        world.run(1)
        if len(world.workers["d"].leases.held()) == 2 and world.drains["d"].done():
            break
    else:
        pytest.fail("the drain waits for what another worker reads")
    summary = world.workers["d"].summary(world.workers["d"].reason_of_drain())
    assert summary.reason is StopReason.DRAINED
    assert summary.elsewhere == {"w-1": 3}


def test_an_assignment_by_the_leader_proves_nothing_about_the_owner():
    """A worker that was killed gets a lease: the counter grows, and nobody reads the shard."""
    world = StreamsWorld("a", shards=1)
    world.start("w-1", "a")
    world.run(30)
    del world.workers["w-1"]
    world.put("a", 5, "a")
    settings = {"lease": {"failover_time_millis": 60_000}}
    world.start("d", "a", drain=True, **settings)
    world.run(3)
    assert not world.drains["d"].done()
    table = world.leases.view()
    (lease,) = table.list_leases().leases
    assert table.assign(lease, "w-2") is not None
    for _ in range(10):
        world.run(1)
        assert not world.drains["d"].done()
    world.run_until(world.drains["d"].done, 300)
    assert world.has_all()


def test_a_drain_ends_although_records_keep_coming():
    """Each shard was at its tip since the drain began; what came later is not waited for."""
    world = World(shards=2, buffered=True)
    world.put(*(b"%d" % number for number in range(20)))
    first, drain = len(world.sent), world.worker.drain_watch()
    for _ in range(300):
        world.put(b"later")
        world.run(0.1)
        if drain.done():
            break
    else:
        pytest.fail("the drain waits for what comes later")
    assert set(world.sent[:first]) <= set(world.data())


@pytest.mark.parametrize("is_function", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_batch_whose_lease_is_lost_and_taken_again_is_waited_for(is_function, buffered):
    """Its records were read, and are not in the table."""
    world = World(shards=1, buffered=buffered, is_function=is_function)
    world.put(b"a")
    drain, write, lost = world.worker.drain_watch(), world.writer.write, []
    world.worker.lead_tick()

    def loses_the_lease(batch):
        for held in [] if lost else world.worker.leases.held():
            lost.append(held)
            world.worker.leases.drop(held, "it was not renewed in time")
            world.worker.leases.discover()
        return write(batch)

    world.writer.write = loses_the_lease
    assert looks_until_done(world, drain, 60)
    assert lost
    assert world.data() == [b"a"]


def test_a_row_that_was_deleted_is_waited_for():
    """The leader creates it again; until then nobody reads its shard."""
    audit = {"leases_recovery_auditor_execution_frequency_millis": 1000}
    world = World(shards=2, buffered=True, shard_sync=audit)
    world.run(2)
    world.put(*(b"%d" % number for number in range(20)))
    drain = world.worker.drain_watch()
    world.leases.store.delete("shardId-000000000001", [])
    assert not looks_until_done(world, drain, 5)
    assert len(world.data()) < 20
    world.run(15)
    assert looks_until_done(world, drain, 10)
    assert len(world.data()) == 20


def test_rows_without_hash_ranges_do_not_hold_a_drain():
    """A leader adds them at its next audit."""
    audit = {"leases_recovery_auditor_execution_frequency_millis": 1000}
    world = World(shards=2, buffered=True, shard_sync=audit)
    world.run(2)
    for key in world.leases.rows():
        world.leases.store.update(key, [], Changes(remove=("startingHashKey", "endingHashKey")))
    assert looks_until_done_with_leader(world, world.worker.drain_watch(), 10)
    assert world.worker.reason_of_drain() is StopReason.DRAINED


@pytest.mark.parametrize("buffered", [True, False])
def test_the_children_of_a_shard_whose_last_page_does_not_say_that_it_ends_are_drained(buffered):
    """The page with the last record of a closed shard may have an iterator, for an empty page."""
    world = World(shards=1, buffered=buffered)
    world.run(2)
    world.put(b"a", b"b")
    world.model.split("orders", "shardId-000000000000")
    world.put(*(b"%d" % number for number in range(20)))
    read = world.kinesis.get_records

    def without_end(stream, shard_id, *args, **more):
        page = read(stream, shard_id, *args, **more)
        if page.next_iterator is not None or not page.records.num_rows:
            return page
        iterator = world.kinesis.get_shard_iterator(
            stream,
            shard_id,
            "AFTER_SEQUENCE_NUMBER",
            sequence_number=page.records["sequence_number"][-1].as_py(),
        )
        return replace(page, next_iterator=iterator, child_shards=())

    world.kinesis.get_records = without_end
    assert looks_until_done_with_leader(world, world.worker.drain_watch(), 60)
    assert len(world.data()) == 22
    assert world.worker.reason_of_drain() is StopReason.DRAINED


def test_a_stream_that_cannot_be_listed_fails_the_drain_with_its_error():
    """Nobody knows whether a shard that was read to its tip has children."""
    world = drained_world()
    drain = world.worker.drain_watch()

    def refused(*_args, **_more):
        raise AccessDeniedError("not allowed: kinesis:ListShards")

    world.kinesis.list_shards = refused
    assert looks_until_done(world, drain, 2 * STANDSTILL_SECONDS)
    assert "the shards of orders: AccessDeniedError" in error_of(world)


def test_a_scan_older_than_the_end_of_a_shard_does_not_complete_a_drain():
    """It shows the shard as unfinished, and has no rows of the children that nobody reads.

    The listing of the stream is as old.
    """
    world = World(shards=1, buffered=True)
    world.put(b"a", b"b")
    world.run(5)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    before, listed = world.leases.list_leases(), world.kinesis.list_shards(stream)
    drain = world.worker.drain_watch()
    refuse_scans(world, until=world.clock.monotonic() + 5)
    assert not looks_until_done(world, drain, 4), "the shard is read to its tip"
    world.model.split("orders", "shardId-000000000000")
    world.put(*(b"%d" % number for number in range(20)))
    while not world.leases.get("shardId-000000000000").ended:
        world.run_without_leader(0.1)
    scan, world.leases.list_leases = world.leases.list_leases, lambda: before
    listing, world.kinesis.list_shards = world.kinesis.list_shards, lambda _stream: listed
    assert not looks_until_done(world, drain, 10)
    world.leases.list_leases, world.kinesis.list_shards = scan, listing
    assert looks_until_done_with_leader(world, drain, 60)
    assert len(world.data()) == 22

"""A drain ends although one of its streams is deleted meanwhile, and says what was not read."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import AccessDeniedError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, LossReason, RecordsLost
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.worker.summary import StopReason
from tests.support.streams_world import StreamsWorld

LIMIT = 60.0
ONE, SEVERAL = ("b",), ("a", "b")


class Kinesis(InMemoryKinesis):
    """Reads of the streams in `held` are throttled; `refusal` is raised for descriptions."""

    def __init__(self, world, *held):
        super().__init__(world.model)
        self.held, self.refusal = set(held), None

    def get_records(self, stream, *request):
        if stream.name in self.held:
            raise ThrottledError("slow down", operation="GetRecords")
        return super().get_records(stream, *request)

    def resolve_stream(self, name_or_arn, *, multi_stream):
        if self.refusal is not None:
            raise self.refusal
        return super().resolve_stream(name_or_arn, multi_stream=multi_stream)


def draining(streams, *held):
    """A worker that has read everything but the streams in `held`."""
    world = StreamsWorld(*streams)
    for stream in streams:
        world.put(stream, 10, stream)
    kinesis = Kinesis(world, *held)
    world.start("w", *streams, drain=True, kinesis=kinesis)
    world.run(8)
    assert not world.drains["w"].done()
    return world, kinesis


def delete(world, kinesis, stream):
    world.delete(stream)
    world.clock.advance(1)
    kinesis.held.clear()


def read_again(world, stream):
    """As after a batch that failed in the sink."""
    lifecycle = world.workers["w"].lifecycle
    for consumer in lifecycle.consumers.values():
        if consumer.stream.name == stream:
            lifecycle.restart(consumer)


def summary(world):
    return world.workers["w"].summary(world.workers["w"].reason_of_drain())


def keys_of(world, stream):
    return {
        lease.lease_key
        for lease in world.leases.list_leases().leases
        if lease.stream is None or f":{stream}:" in lease.lease_key
    }


@pytest.mark.parametrize("streams", [ONE, SEVERAL], ids=["one stream", "several"])
def test_a_deleted_stream_is_left_out_and_reported(streams):
    """Seed 9130001036: the drain waited for ever for the stream."""
    world, kinesis = draining(streams, "b")
    keys = keys_of(world, "b")
    delete(world, kinesis, "b")
    world.run_until(world.drains["w"].done, LIMIT)
    lost = world.of(RecordsLost)
    assert {event.lease_key for event in lost} == keys
    assert len(lost) == len(keys) == 2
    assert {(one.reporter, one.reason, one.stream, one.after) for one in lost} == {
        ("w", LossReason.STREAM_DELETED, "b", None)
    }
    assert summary(world).reason is StopReason.FAILED
    assert "the stream b was deleted before the drain had read all of it" in summary(world).error
    assert world.data() == sorted(one for one in world.sent if one.startswith(b"a-"))


def test_a_drain_that_is_stopped_before_its_end_has_reported_the_loss():
    """The next one does not wait for a stream that does not exist, and reports nothing."""
    world, kinesis = draining(SEVERAL, "a", "b")
    keys = keys_of(world, "b")
    world.delete("b")
    world.clock.advance(1)
    kinesis.held.discard("b")
    world.run(20)
    assert not world.drains["w"].done(), "the other stream is waited for"
    assert {event.lease_key for event in world.of(RecordsLost)} == keys
    assert len(world.of(RecordsLost)) == len(keys) == 2


def test_a_deleted_stream_that_a_worker_that_is_gone_had_not_read_fails_the_drain():
    """The leader deletes its leases with the former stream, before they expire."""
    world = StreamsWorld(*SEVERAL)
    for stream in SEVERAL:
        world.put(stream, 10, stream)
    world.start("v", *SEVERAL, kinesis=Kinesis(world, "b"))
    world.run(8)
    keys = keys_of(world, "b")
    del world.workers["v"]
    world.start("w", *SEVERAL, drain=True)
    world.run(2)
    world.drains["w"].done()
    world.delete("b")
    for key in keys:  # as the leader does when the stream was created again
        world.leases.store.delete(key, [])
    world.run_until(world.drains["w"].done, LIMIT)
    assert summary(world).reason is StopReason.FAILED
    assert "the stream b was deleted before the drain had read all of it" in summary(world).error


def test_the_loss_begins_after_the_last_committed_position():
    world, kinesis = draining(SEVERAL, "a")
    world.run(4)
    consumers = world.workers["w"].lifecycle.consumers.values()
    committed = {one.lease_key: one.committed for one in consumers if one.stream.name == "b"}
    world.drains["w"] = world.workers["w"].drain_watch()  # it has not seen the tip of a shard yet
    kinesis.held.add("b")
    read_again(world, "b")
    world.put("b", 10, "more")
    world.run(4)
    delete(world, kinesis, "b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert {event.lease_key: event.after for event in world.of(RecordsLost)} == committed
    assert len(committed) == 2
    assert all(not position.is_sentinel for position in committed.values())


def test_what_was_read_before_the_deletion_is_no_loss():
    world, kinesis = draining(SEVERAL, "a")
    world.delete("b")
    world.run(20)
    assert not world.drains["w"].done(), "the other stream is waited for"
    kinesis.held.clear()
    world.run_until(world.drains["w"].done, LIMIT)
    assert world.has_all()
    assert world.of(RecordsLost) == []
    assert summary(world).reason is StopReason.DRAINED
    assert summary(world).error is None


def test_what_came_after_a_shard_was_read_is_a_loss_and_does_not_fail_the_drain():
    """It is not waited for."""
    world, kinesis = draining(SEVERAL, "a")
    world.run(4)
    keys = keys_of(world, "b")
    kinesis.held.add("b")
    read_again(world, "b")
    world.put("b", 10, "later")
    delete(world, kinesis, "b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert {event.lease_key for event in world.of(RecordsLost)} == keys
    assert len(world.of(RecordsLost)) == len(keys)
    assert summary(world).reason is StopReason.DRAINED


def test_a_shard_that_was_read_to_its_end_before_the_deletion_is_no_loss():
    """Its records are in the table. Only SHARD_END could not be written yet."""
    world, kinesis = draining(SEVERAL, "a")
    world.run(4)

    def refuse(operation, _key):
        if operation == "TransactWriteItems":
            raise UnavailableError("the table does not answer")

    world.leases.hook(refuse, None)
    shard = "shardId-000000000000"
    world.model.call("SplitShard", StreamName="b", ShardToSplit=shard, NewStartingHashKey="9")
    world.run(5)
    delete(world, kinesis, "b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert world.has_all()
    assert world.of(RecordsLost) == []


def test_a_deleted_stream_of_which_a_row_is_missing_is_not_waited_for():
    """Nobody can create the row again."""
    world, kinesis = draining(SEVERAL, "a")
    world.run(4)
    world.delete("b")
    world.leases.store.delete(min(keys_of(world, "b")), [])
    kinesis.held.clear()
    world.run_until(world.drains["w"].done, LIMIT)
    assert world.has_all()


def test_an_unreadable_row_of_a_deleted_stream_is_not_waited_for():
    world, kinesis = draining(SEVERAL, "a")
    world.run(4)
    unreadable = {"leaseKey": {"S": min(keys_of(world, "b"))}, "checkpoint": {"N": "1"}}
    world.leases.store.put(unreadable, [])
    world.delete("b")
    kinesis.held.clear()
    world.run_until(world.drains["w"].done, LIMIT)
    assert world.has_all()
    assert summary(world).reason is StopReason.FAILED
    assert "the stream b was deleted before the drain had read all of it" in summary(world).error


@pytest.mark.parametrize(
    "refusal",
    [
        ThrottledError("slow down", operation="DescribeStreamSummary"),
        AccessDeniedError("denied", operation="DescribeStreamSummary"),
        UnavailableError("timed out", operation="DescribeStreamSummary"),
    ],
    ids=["throttled", "forbidden", "hung"],
)
def test_without_a_proof_the_stream_is_waited_for(refusal):
    world, kinesis = draining(SEVERAL, "b")
    kinesis.refusal = refusal
    delete(world, kinesis, "b")
    for _ in range(60):
        world.run(1)
        assert not world.drains["w"].done()
    assert world.of(RecordsLost) == []
    assert any(str(refusal) in event.error for event in world.of(AwsTrouble))
    kinesis.refusal = None
    world.run_until(world.drains["w"].done, LIMIT)
    assert len(world.of(RecordsLost)) == 2


def test_a_stream_whose_reads_fail_and_that_exists_is_waited_for():
    world, kinesis = draining(SEVERAL, "b")
    world.run(60)
    assert not world.drains["w"].done()
    kinesis.held.clear()
    world.run_until(world.drains["w"].done, LIMIT)
    assert world.has_all()
    assert summary(world).reason is StopReason.DRAINED


@pytest.mark.parametrize("streams", [ONE, SEVERAL], ids=["one stream", "several"])
@pytest.mark.parametrize("away_seconds", [0.1, 30.0])
def test_a_stream_that_is_created_again_is_another_one(streams, away_seconds):
    world, kinesis = draining(streams, "b")
    keys = keys_of(world, "b")
    delete(world, kinesis, "b")
    world.run(away_seconds)
    world.create("b", 3)
    world.run_until(world.drains["w"].done, LIMIT)
    lost = world.of(RecordsLost)
    assert {event.lease_key for event in lost} == keys
    assert len(lost) == len(keys)
    assert summary(world).reason is StopReason.FAILED


def test_a_stream_that_is_deleted_before_it_has_leases_is_reported():
    world = StreamsWorld("a", "b")
    world.put("a", 10, "a")
    kinesis = Kinesis(world)
    world.start("w", "a", "b", drain=True, kinesis=kinesis)
    world.delete("b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert summary(world).reason is StopReason.FAILED
    assert "the stream b was deleted before the drain had read all of it" in summary(world).error


def test_the_leases_of_another_worker_are_not_reported():
    world, kinesis = draining(SEVERAL, "b")
    table = world.leases.view()
    (first, *_) = sorted(keys_of(world, "b"))
    held = world.workers["w"].leases.get(first)
    world.workers["w"].leases.release(held)
    lease = table.assign(table.get(first), "w-2")

    delete(world, kinesis, "b")
    for _ in range(20):
        world.run(1)
        lease = table.renew(lease) or lease
        if world.drains["w"].done():
            break
    assert len(world.of(RecordsLost)) == 1
    assert first not in {event.lease_key for event in world.of(RecordsLost)}


def test_a_deleted_stream_that_another_worker_reads_is_described_because_it_cannot_be_listed():
    """This worker reads no shard of it, and only a description proves that it is deleted."""
    world = StreamsWorld(*SEVERAL)
    world.start("v", *SEVERAL)
    world.run(30)
    world.start("w", *SEVERAL, drain=True)
    world.delete("b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert summary(world).reason is StopReason.DRAINED
    assert world.of(RecordsLost) == []


def test_an_owner_that_is_seen_for_the_first_time_may_report_its_lease_itself():
    world, kinesis = draining(SEVERAL, "b")
    table = world.leases.view()
    first = min(keys_of(world, "b"))
    world.workers["w"].leases.release(world.workers["w"].leases.get(first))
    table.assign(table.get(first), "w-2")
    delete(world, kinesis, "b")
    world.run_until(world.drains["w"].done, LIMIT)
    assert {event.lease_key for event in world.of(RecordsLost)} == keys_of(world, "b") - {first}


def test_a_drain_without_errors_describes_no_stream():
    world = StreamsWorld("a", "b")
    kinesis = Kinesis(world)
    world.start("w", "a", "b", drain=True, kinesis=kinesis)
    described = []
    confirm = world.workers["w"]._retrieval.identity.confirm
    world.workers["w"]._retrieval.identity.confirm = lambda *a: described.append(a) or confirm(*a)
    world.run_until(world.drains["w"].done, LIMIT)
    assert described == []

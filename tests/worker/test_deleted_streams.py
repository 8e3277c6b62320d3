"""A worker that runs on reports what a deleted stream has lost, once for each of its leases."""

from __future__ import annotations

from itertools import product

import pytest

from kcl_pipeline.errors import SinkError, ThrottledError
from kcl_pipeline.events import LossReason, RecordsLost, StreamUnavailable
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.sink import InMemorySink
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.support.shortened import shortened
from tests.support.streams_world import StreamsWorld
from tests.support.worker_world import World

STREAMS = ("a", "b")


class Kinesis(InMemoryKinesis):
    """Reads of the streams in `held` are throttled."""

    def __init__(self, world):
        super().__init__(world.model)
        self.held = set()

    def get_records(self, stream, *request):
        if stream.name in self.held:
            raise ThrottledError("slow down", operation="GetRecords")
        return super().get_records(stream, *request)


class OneShard(InMemoryKinesis):
    """If `is_narrow`, all shards of `b` but the first are throttled."""

    is_narrow = False

    def get_records(self, stream, shard_id, *request):
        if self.is_narrow and stream.name == "b" and not shard_id.endswith("0"):
            raise ThrottledError("slow down", operation="GetRecords")
        return super().get_records(stream, shard_id, *request)


def reading():
    """A worker that has read all of two streams; then reads of `b` are throttled for a minute."""
    world = StreamsWorld(*STREAMS)
    for stream in STREAMS:
        world.put(stream, 10, stream)
    kinesis = Kinesis(world)
    world.start("w", *STREAMS, kinesis=kinesis)
    world.run_until(world.has_all, 30)
    kinesis.held.add("b")
    world.put("b", 10, "unread")
    world.run(60)
    return world, kinesis


def stop(world, name):
    world.workers.pop(name).shut_down(Background(world.clock), StopReason.STOPPED)


def positions_of(world, stream):
    return {
        lease.lease_key: lease.checkpoint
        for lease in world.leases.list_leases().leases
        if f":{stream}:" in lease.lease_key
    }


def losses(world):
    lost = world.of(RecordsLost)
    assert {one.reason for one in lost} <= {LossReason.STREAM_DELETED}
    assert len({one.lease_key for one in lost}) == len(lost), "once for each lease"
    return {one.lease_key: one.after for one in lost}


def test_what_was_not_read_is_reported_after_its_last_position():
    world, kinesis = reading()
    positions = positions_of(world, "b")
    world.delete("b")
    kinesis.held.clear()
    world.run(20)
    assert losses(world) == positions
    assert all(not position.is_sentinel for position in positions.values())
    assert any(event.reporter == "w" for event in world.of(StreamUnavailable))
    world.put("a", 10, "more")
    world.run(300)
    assert len(losses(world)) == 2
    assert sum(value.startswith(b"more") for value in world.data()) == 10


@pytest.mark.parametrize(
    ("away_seconds", "throttled_seconds"),
    shortened(product([0.1, 30.0], repeat=2), lambda both: both[0] != both[1]),
)
def test_what_was_not_read_of_a_stream_that_is_created_again_is_reported(
    away_seconds, throttled_seconds
):
    """The leader deletes the leases before a reader finds out, or after it."""
    world, kinesis = reading()
    positions = positions_of(world, "b")
    world.delete("b")
    world.clock.advance(1)
    world.run(away_seconds)
    world.create("b", 3)
    world.run(throttled_seconds)
    kinesis.held.clear()
    world.put("b", 10, "new")
    world.run(60)
    assert losses(world) == positions
    assert sum(value.startswith(b"new") for value in world.data()) == 10


def test_the_next_owner_and_the_next_start_report_nothing():
    """The former owner of these leases knew more of them."""
    world = StreamsWorld(*STREAMS)
    for stream in STREAMS:
        world.put(stream, 10, stream)
    world.start("w-1", *STREAMS)
    world.start("w-2", *STREAMS)
    world.run_until(world.has_all, 60)
    world.delete("b")
    world.run(20)
    stop(world, "w-1")
    world.run(60)
    world.start("w-3", *STREAMS)
    stop(world, "w-2")
    world.run(60)
    assert len(positions_of(world, "b")) == 2
    assert losses(world) == {}


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "executors"])
def test_a_batch_that_failed_before_the_deletion_is_lost(buffered, monkeypatch):
    world = World(shards=1, buffered=buffered)
    world.put(b"a")
    world.run(5)
    (consumer,) = world.worker.lifecycle.consumers.values()
    position = consumer.committed

    def failing(*_batch):
        raise SinkError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(InMemorySink, "commit", failing)
        world.put(b"b")
        world.run(1.5)
    assert world.data() == [b"a"]
    world.model.call("DeleteStream", StreamName="orders")
    world.run(60)
    assert list(losses(world).values()) == [position]


def test_shards_of_a_later_stream_that_were_never_read_are_reported_too():
    """The stream was created after the start of the worker, which has read one of its shards."""
    world = StreamsWorld(*STREAMS)
    kinesis = OneShard(world.model)
    world.start("w", *STREAMS, kinesis=kinesis)
    world.run(20)
    world.delete("b")
    world.run(10)
    world.create("b", 2)
    kinesis.is_narrow = True
    world.put("b", 10, "new")
    world.run(120)
    read = sum(value.startswith(b"new") for value in world.data())
    assert 0 < read < 10
    before = len(world.of(RecordsLost))
    world.delete("b")
    world.run(60)
    assert len(world.of(RecordsLost)) == before + 1

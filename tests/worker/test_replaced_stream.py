"""A stream that is deleted and created again under running workers: its records are in the table
soon after it is back, exactly once, with default settings.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from kcl_pipeline.events import LeaseDeleted, RecordsLost
from kcl_pipeline.leases.application import RecordedStream
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import former_leases
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.support.shortened import shortened
from tests.support.streams_world import StreamsWorld

NAME = ("orders",)
SEVERAL = ("orders", "other")


def recreated(world, shards, away_seconds=60):
    world.delete("orders")
    world.run(away_seconds)
    world.create("orders", shards)


SHORT = {
    (NAME, 1, "LATEST"),
    (NAME, 5, "TRIM_HORIZON"),
    (SEVERAL, 1, "TRIM_HORIZON"),
    (SEVERAL, 2, "LATEST"),
}
"""More and fewer shards than before, and as many; `make test-long` has all."""


@pytest.mark.parametrize(
    ("streams", "shards", "position"),
    shortened(product((NAME, SEVERAL), (1, 2, 5), ("TRIM_HORIZON", "LATEST")), SHORT.__contains__),
)
def test_its_records_are_in_the_table_within_a_minute(streams, shards, position):
    world = StreamsWorld(*streams)
    world.start("w", *streams, shard_sync={"initial_position_in_stream": position})
    world.run(20)
    world.put("orders", 1, "old")
    world.run_until(world.has_all, 30)
    recreated(world, shards)
    if len(streams) > 1 and position == "LATEST":
        # the leases of a further stream begin at the end of its shards
        world.run(60)
    world.put("orders", 40, "new")
    assert world.run_until(world.has_all, 60) <= 60
    world.put("orders", 40, "more")
    world.run_until(world.has_all, 20)
    world.run(60)
    assert world.has_all(), "and no row comes twice"
    rows = {lease.lease_key: lease for lease in world.leases.list_leases().leases}
    assert sum("orders" in key or len(streams) == 1 for key in rows) == shards
    assert len(world.of(LeaseDeleted)) == 2
    assert world.of(RecordsLost) == []


def test_a_stream_that_returns_at_once_is_noticed():
    """Positions in a table have the second of the creation time, as KCL's lease keys."""
    world = StreamsWorld(*NAME)
    world.put("orders", 20, "old")
    world.start("w", *NAME)
    world.run_until(world.has_all, 60)
    world.delete("orders")
    world.clock.advance(1.0)
    world.create("orders", 2)
    world.put("orders", 20, "new")
    world.run_until(world.has_all, 60)
    recreated(world, 3)
    world.put("orders", 20, "third")
    world.run_until(world.has_all, 60)


def test_a_worker_that_starts_after_the_return_begins_the_new_stream():
    world = StreamsWorld(*NAME)
    world.put("orders", 20, "old")
    world.start("w-1", *NAME)
    world.run_until(world.has_all, 60)
    world.workers.pop("w-1").shut_down(Background(world.clock), StopReason.STOPPED)
    recreated(world, 4)
    world.put("orders", 40, "new")
    world.start("w-2", *NAME)
    world.run_until(world.has_all, 60)
    world.model.split("orders", "shardId-000000000001")
    world.put("orders", 40, "after a split")
    world.run_until(world.has_all, 60)
    times = {lease.recreated_millis for lease in world.leases.list_leases().leases}
    (stream,) = world.coordinator.read_application().identity.streams
    assert stream.renewed
    assert times == {stream.created_millis}
    assert world.has_all()


def test_a_write_of_the_former_stream_does_not_reach_the_row_of_the_new_one():
    """Counter, owner and checkpoint are equal."""
    world = StreamsWorld(*NAME)
    world.leases.ensure_exists()
    old = Lease("shardId-0", TRIM_HORIZON, counter=7, owner="w")
    create_lease(world.leases, old.with_(recreated_millis=5_000))
    assert world.leases.renew(old) is None
    assert world.leases.update_checkpoint(old, checkpoint=TRIM_HORIZON) is None
    assert not world.leases.create_successors(old, [old.with_(lease_key="shardId-1")])
    assert not world.leases.delete(old)
    assert world.leases.renew(old.with_(recreated_millis=5_000)) is not None


@pytest.mark.parametrize(
    ("row", "stream", "is_former"),
    [
        (Lease("s-0", TRIM_HORIZON), StreamId("orders"), False),
        (Lease("s-0", TRIM_HORIZON, recreated_millis=5), StreamId("orders"), False),
        (Lease("s-0", TRIM_HORIZON), StreamId("orders", recreated_millis=5), True),
        (
            Lease("s-0", TRIM_HORIZON, recreated_millis=4),
            StreamId("orders", recreated_millis=5),
            True,
        ),
        (
            Lease("s-0", TRIM_HORIZON, recreated_millis=5),
            StreamId("orders", recreated_millis=5),
            False,
        ),
        (
            Lease("s-0", TRIM_HORIZON, recreated_millis=6),
            StreamId("orders", recreated_millis=5),
            False,
        ),
        (Lease("1:a:5:s", TRIM_HORIZON, stream="1:a:5"), StreamId("a", "1", 6), True),
        (Lease("1:a:6:s", TRIM_HORIZON, stream="1:a:6"), StreamId("a", "1", 6), False),
        (Lease("1:a:7:s", TRIM_HORIZON, stream="1:a:7"), StreamId("a", "1", 6), False),
        (Lease("2:a:5:s", TRIM_HORIZON, stream="2:a:5"), StreamId("a", "1", 6), False),
        (Lease("1:b:5:s", TRIM_HORIZON, stream="1:b:5"), StreamId("a", "1", 6), False),
    ],
)
def test_only_leases_of_an_older_stream_of_the_same_name_are_deleted(row, stream, is_former):
    assert bool(former_leases([row], [stream])) == is_former


def test_a_record_that_was_removed_by_hand_is_made_again_with_the_mark():
    world = StreamsWorld(*NAME)
    world.start("w-1", *NAME)
    world.run(20)
    recreated(world, 2)
    world.run(30)
    before = world.coordinator.read_application().identity
    world.workers.clear()
    world.coordinator.erase("Migration3.0")
    world.start("w-2", *NAME)
    assert world.coordinator.read_application().identity == before
    assert before.streams == (dataclasses.replace(before.streams[0], renewed=True),)
    assert RecordedStream("a", 5) != RecordedStream("a", 5, renewed=True)

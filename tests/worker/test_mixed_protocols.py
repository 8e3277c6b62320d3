"""Workers with different settings of `commit_protocol` on one table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.batch import Batch, CommitEntry, ShardRange, TxnVersions
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import OtherTableError
from kcl_pipeline.events import ShardPaused
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.sink import InMemorySink
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from tests.support import worker_world
from tests.support.commit_world import NO_RECORDS, STREAM
from tests.support.worker_world import numbered
from tests.worker.test_positions import KEY, NAME, World


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World()


def two_phase(world: World) -> tuple[TwoPhaseCommit, ShardConsumer]:
    """A worker with the two-phase protocol that takes the lease."""
    leases = HeldLeases(world.table.view(), "w", LeaseSettings(), world.clock, world.events.append)
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    protocol = TwoPhaseCommit(leases, world.sink, world.clock, world.events.append, "w")
    return protocol, ShardConsumer(held, STREAM)


@pytest.mark.parametrize("looked_up", [True, False])
def test_two_phase_does_not_read_a_shard_whose_position_the_table_stores(
    world: World, looked_up: bool
) -> None:
    assert world.commit(5) is not None
    protocol, consumer = two_phase(world)
    assert consumer.held.lease.checkpoint == TRIM_HORIZON, "the row is behind the table"
    seen = protocol.look_up([consumer])[KEY] if looked_up else None
    with pytest.raises(OtherTableError, match=r"commit_protocol=.two_phase. does not read"):
        protocol.resolve(consumer, seen)
    assert consumer.committed is None


def test_two_phase_does_not_read_a_shard_that_has_ended_in_the_table(world: World) -> None:
    assert world.commit(5) is not None
    assert world.sink.move(NAME, world.stored(), None, ended=True) is not None
    protocol, consumer = two_phase(world)
    with pytest.raises(OtherTableError, match="the table stores its position"):
        protocol.resolve(consumer)


@pytest.mark.parametrize("looked_up", [True, False])
def test_without_a_position_the_row_counts_and_a_paused_writer_is_refused(
    world: World, looked_up: bool
) -> None:
    """After a seek to the beginning."""
    assert world.commit(5) is not None
    moved = world.sink.move(NAME, world.stored(), None, ended=False)
    assert moved is not None
    protocol, consumer = two_phase(world)
    seen = protocol.look_up([consumer])[KEY] if looked_up else None
    assert protocol.resolve(consumer, seen) == TRIM_HORIZON
    assert consumer.versions == TxnVersions(None, (moved.fence or 0) + 1)
    batch = Batch("late", (ShardRange(KEY, TRIM_HORIZON, Position("9")),), NO_RECORDS)
    entry = CommitEntry.to(NAME, moved, Position("9"))
    late = InMemorySink(world.rows, clock=world.clock)
    assert late.commit(world.writer.write(batch), [entry]).refused == (NAME,)


def test_a_fence_that_loses_a_race_is_tried_again(world: World) -> None:
    assert world.commit(5) is not None
    assert world.sink.move(NAME, world.stored(), None, ended=False) is not None
    protocol, consumer = two_phase(world)
    seen = replace(world.stored(), fence=0)
    assert protocol.resolve(consumer, seen) == TRIM_HORIZON
    assert consumer.versions.fence == world.stored().fence


def test_a_shard_without_a_position_is_read_as_before(world: World) -> None:
    assert world.rows.version < 0
    protocol, consumer = two_phase(world)
    assert protocol.resolve(consumer) == TRIM_HORIZON
    assert consumer.versions == TxnVersions()
    assert [keys for operation, keys in world.asked if operation == "fence"] == []


def test_in_a_fleet_the_shard_stands_still_until_a_worker_with_positions_takes_it():
    world = worker_world.World(shards=2, batch={"commit_protocol": "positions"})
    world.put(*numbered(8))
    world.run(5)
    positions = world.settings
    crash(world)
    world.settings = positions.model_copy(
        update={"batch": positions.batch.model_copy(update={"commit_protocol": "two_phase"})}
    )
    world.put(*numbered(8, "late-"))
    start(world, "w-2")
    world.run(10)
    assert world.data() == numbered(8)
    paused = {event.lease_key: event.reason for event in world.of(ShardPaused)}
    assert len(paused) == 2
    assert all("the table stores its position" in reason for reason in paused.values())
    crash(world)
    world.settings = positions
    start(world, "w-3")
    world.run(10)
    assert world.data() == sorted(world.sent)


def crash(world):
    """End the worker without a checkpoint."""
    for held in world.worker.leases.held():
        world.worker.leases.drop(held, "crashed")


def start(world, name):
    world.worker = world.make_worker(name)
    world.worker.start_up()

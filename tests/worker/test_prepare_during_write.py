"""Leases are prepared while the files of their batch are written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kcl_pipeline.errors import (
    SinkError,
    ThrottledError,
)
from kcl_pipeline.events import BatchRefused, PendingResolved
from kcl_pipeline.position import Position
from tests.support.commit_world import DEADLINE_SECONDS, KEYS, World


@pytest.fixture
def world() -> Iterator[World]:
    """A world whose table exists, and whose batches are prepared while they are written."""
    with ThreadPoolExecutor(1) as thread:
        world = World(prepare_pool=thread)
        batch = world.batch(5)
        with world.committer.preparing(batch, world.consumers):
            time.sleep(0)
        assert world.writes == [], "a fence would have no log to stand in"
        assert world.steps.run(batch, world.consumers, world.writer.write(batch)) is not None
        world.writes.clear()
        yield world


def test_a_batch_is_prepared_while_it_is_written(world: World) -> None:
    batch = world.batch(9)
    with world.committer.preparing(batch, world.consumers):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while world.pending() != {Position("9")}:
            assert time.monotonic() < deadline, (
                "the rows are written although the files are not there yet"
            )
            time.sleep(0.001)
        written = world.writer.write(batch)
    done = world.steps.run(batch, world.consumers, written)
    assert done is not None
    assert done.lease_keys == KEYS
    assert sorted(world.writes) == sorted(KEYS), "one write for each row"
    assert {world.rows.txn_versions(key).data for key in KEYS} == {
        world.table.get(key).counter for key in KEYS
    }


def test_a_batch_that_was_prepared_and_never_written_is_settled_and_read_again(
    world: World,
) -> None:
    batch = world.batch(9)
    with (
        pytest.raises(SinkError, match="disk"),
        world.committer.preparing(batch, world.consumers),
    ):
        raise SinkError("the disk is full")
    assert world.pending() == {Position("9")}
    for consumer in world.consumers.values():
        assert world.committer.resolve(consumer) == Position("5")
    assert {event.landed for event in world.events if isinstance(event, PendingResolved)} == {False}
    assert world.commit(8) is not None
    assert {consumer.committed for consumer in world.consumers.values()} == {Position("8")}


def test_a_lease_that_is_lost_while_its_batch_is_written_is_left_out_of_the_commit(
    world: World,
) -> None:
    batch = world.batch(9)
    taken = world.table.view()
    taken.assign(taken.get(KEYS[2]), "other")
    world.trouble = {KEYS[5]: [ThrottledError("slow down", operation="UpdateItem")]}
    with world.committer.preparing(batch, world.consumers):
        written = world.writer.write(batch)
    done = world.steps.run(batch, world.consumers, written)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS) - {KEYS[2]}
    assert [event.lease_keys for event in world.events if isinstance(event, BatchRefused)] == [
        (KEYS[2],)
    ]

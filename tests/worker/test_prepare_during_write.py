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
def beside() -> Iterator[World]:
    """A world whose table exists, and whose batches are prepared while they are written."""
    with ThreadPoolExecutor(1) as thread:
        world = World(beside=thread)
        batch = world.batch(5)
        with world.committer.preparing(batch, world.consumers):
            time.sleep(0)
        assert world.writes == [], "a fence would have no log to stand in"
        assert world.steps.run(batch, world.consumers, world.writer.write(batch)) is not None
        world.writes.clear()
        yield world


def test_a_batch_is_prepared_while_it_is_written(beside: World) -> None:
    batch = beside.batch(9)
    with beside.committer.preparing(batch, beside.consumers):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while beside.pending() != {Position("9")}:
            assert time.monotonic() < deadline, (
                "the rows are written although the files are not there yet"
            )
            time.sleep(0.001)
        written = beside.writer.write(batch)
    done = beside.steps.run(batch, beside.consumers, written)
    assert done is not None
    assert done.lease_keys == KEYS
    assert sorted(beside.writes) == sorted(KEYS), "one write for each row"
    assert {beside.rows.numbers(key).data for key in KEYS} == {
        beside.table.get(key).counter for key in KEYS
    }


def test_a_batch_that_was_prepared_and_never_written_is_settled_and_read_again(
    beside: World,
) -> None:
    batch = beside.batch(9)
    with (
        pytest.raises(SinkError, match="disk"),
        beside.committer.preparing(batch, beside.consumers),
    ):
        raise SinkError("the disk is full")
    assert beside.pending() == {Position("9")}
    for consumer in beside.consumers.values():
        assert beside.committer.resolve(consumer) == Position("5")
    assert {event.landed for event in beside.events if isinstance(event, PendingResolved)} == {
        False
    }
    assert beside.commit(8) is not None
    assert {consumer.committed for consumer in beside.consumers.values()} == {Position("8")}


def test_a_lease_that_is_lost_while_its_batch_is_written_is_left_out_of_the_commit(
    beside: World,
) -> None:
    batch = beside.batch(9)
    taken = beside.table.view()
    taken.assign(taken.get(KEYS[2]), "other")
    beside.trouble = {KEYS[5]: [ThrottledError("slow down", operation="UpdateItem")]}
    with beside.committer.preparing(batch, beside.consumers):
        written = beside.writer.write(batch)
    done = beside.steps.run(batch, beside.consumers, written)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS) - {KEYS[2]}
    assert [event.lease_keys for event in beside.events if isinstance(event, BatchRefused)] == [
        (KEYS[2],)
    ]

"""The commit of a batch with many leases: each lease has the outcome of its own write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    CommitStoppedError,
    InvalidRequestError,
    SinkError,
    TableMismatchError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import AwsTrouble, BatchRefused
from kcl_pipeline.leases.held import Held
from kcl_pipeline.position import Position
from kcl_pipeline.testing.sink import InMemorySink
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from tests.support.commit_world import (
    DEADLINE_SECONDS,
    KEYS,
    World,
    world_fixture,  # noqa: F401 (a fixture)
)


def test_the_rows_of_a_batch_are_written_concurrently() -> None:
    meeting = threading.Barrier(len(KEYS))
    with ThreadPoolExecutor(len(KEYS)) as pool:
        world = World(lambda call, items: list(pool.map(call, items)))
        world.table.hook(
            lambda called, _key: called == "UpdateItem" and meeting.wait(DEADLINE_SECONDS), None
        )
        done = world.commit(5)
        assert done is not None, "each write waited until all had begun"
        assert done.lease_keys == KEYS
        for consumer in world.consumers.values():
            assert (consumer.committed, consumer.prepared) == (Position("5"), None)
        assert world.commit(9) is not None
    assert {world.rows.txn_versions(key).data for key in KEYS} == {
        world.table.get(key).counter for key in KEYS
    }
    assert {world.table.get(key).checkpoint for key in KEYS} == {Position("5")}, (
        "the checkpoint was combined with the next prepare"
    )
    assert [entry.data.keys() for entry in world.rows.log[1:]] == [set(KEYS), set(KEYS)]


def test_each_lease_has_the_outcome_of_its_own_write(world: World) -> None:
    lost, unreadable, too_large, throttled, unsure = KEYS[1], KEYS[4], KEYS[5], KEYS[7], KEYS[9]
    taken = world.table.view()
    taken.assign(taken.get(lost), "other")
    world.trouble = {
        unreadable: [UnreadableRowError("no counter")],
        too_large: [
            InvalidRequestError("Item size to update has exceeded the maximum allowed size")
        ],
        throttled: [ThrottledError("slow down", operation="UpdateItem")] * 2,
        unsure: [UnavailableError("no answer", operation="UpdateItem")],
    }
    done = world.commit(5)
    assert done is not None
    assert set(done.lease_keys) == set(world.consumers) == set(KEYS) - {lost, unreadable, too_large}
    assert {held.lease_key for held in world.leases.held()} == set(world.consumers)
    assert [event.lease_keys for event in world.events if isinstance(event, BatchRefused)] == [
        (lost, unreadable, too_large)
    ]
    assert (
        sorted(event.operation for event in world.events if isinstance(event, AwsTrouble))
        == ["UpdateItem"] * 3
    )
    assert {key: world.writes.count(key) for key in (*KEYS[:1], throttled, unsure)} == {
        KEYS[0]: 1,
        throttled: 3,
        unsure: 2,
    }, "only what failed is tried again"
    assert {world.rows.txn_versions(key).data for key in (lost, unreadable, too_large)} == {None}


class Refusing(InMemorySink):
    """A sink whose commits all fail; `stop` is set while the first one does."""

    def __init__(self, world: World, stop: threading.Event) -> None:
        super().__init__(world.rows, clock=world.clock)
        self.stop, self.commits = stop, 0

    def commit(self, written, entries):
        self.commits += 1
        self.stop.set()
        raise SinkError("int too large to convert")


@pytest.mark.parametrize("where", ["commit", "prepare"])
def test_a_stop_ends_the_attempts_of_a_batch(where: str) -> None:
    """Without it a worker went on for 117 seconds, 60 attempts of the same failure."""
    world, stop = World(), threading.Event()
    sink = Refusing(world, stop) if where == "commit" else world.sink
    committer = TwoPhaseCommit(world.leases, sink, world.clock, world.events.append, "w", stop=stop)
    if where == "prepare":
        stop.set()
        world.trouble = {KEYS[3]: [ThrottledError("slow down", operation="UpdateItem")] * 9}
    batch = world.batch(5)
    with pytest.raises(CommitStoppedError, match=r"batch b5 was not .*; the worker stops"):
        world.steps_of(committer).run(batch, world.consumers, world.writer.write(batch))
    assert world.clock.monotonic() == 0.0
    assert set(world.consumers) == set(KEYS), "no lease is dropped: they are released in good order"
    if where == "commit":
        assert sink.commits == 1
        assert world.pending() == {Position("5")}, "the next owner finds the batch"
    assert {world.rows.txn_versions(key).data for key in KEYS} == {None}


def test_a_row_that_stays_throttled_is_lost_with_its_lease_and_the_others_land(
    world: World,
) -> None:
    world.trouble = {KEYS[3]: [ThrottledError("slow down", operation="UpdateItem")] * 1000}
    sleep = world.clock.sleep

    def others_are_renewed(seconds: float) -> None:
        sleep(seconds)
        for consumer in world.consumers.values():
            if consumer.lease_key != KEYS[3]:
                consumer.held.renewed_at = world.clock.monotonic()

    world.clock.sleep = others_are_renewed  # type: ignore[method-assign]
    done = world.commit(5)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS) - {KEYS[3]}
    assert world.table.view().get(KEYS[3]).pending_checkpoint is None
    assert 3 < world.writes.count(KEYS[3]) < 60
    assert world.clock.monotonic() < 2 * LeaseSettings().failover_time_millis / 1000


def test_an_error_is_raised_when_all_have_been_tried(world: World) -> None:
    world.trouble = {KEYS[0]: [AccessDeniedError("dynamodb:UpdateItem is missing")]}
    with pytest.raises(AccessDeniedError, match="is missing"):
        world.commit(5)
    assert sorted(world.writes) == sorted(KEYS), "none is still under way"
    assert world.consumers[KEYS[0]].prepared is None
    assert {
        consumer.prepared[0]
        for key, consumer in world.consumers.items()
        if key != KEYS[0] and consumer.prepared
    } == {Position("5")}
    before = list(world.writes)
    assert world.commit(5) is not None
    assert world.writes == [*before, KEYS[0]], (
        "what is prepared for this range is not prepared again"
    )


def test_a_table_that_takes_no_batch_is_not_tried_again_and_again(world: World) -> None:
    assert world.commit(1) is not None
    world.rows.schema = pa.schema([("other", pa.int64())])
    world.asked.clear()
    before = world.clock.monotonic()
    with pytest.raises(TableMismatchError, match="shard_id"):
        world.commit(2)
    assert [operation for operation, _ in world.asked] == ["commit"]
    assert world.clock.monotonic() - before < 1
    assert [event for event in world.events if isinstance(event, AwsTrouble)] == []


def test_a_number_that_no_log_can_hold_costs_its_lease_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the row's counter was allowed to be."""
    first, rest = KEYS[0], set(KEYS[1:])
    prepare = world.leases.prepare

    def too_large(held: Held, **options: Any) -> int:
        return prepare(held, **options) + (2**63 if held.lease_key == first else 0)

    monkeypatch.setattr(world.leases, "prepare", too_large)
    before = world.clock.monotonic()
    done = world.commit(1)
    assert done is not None
    assert set(done.lease_keys) == rest
    assert world.clock.monotonic() - before < 1
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (first,)
    assert "number" in refused.reason


def failing_commit(world: World, *, landed: bool, lost: str) -> list[tuple[str, ...]]:
    """The first commit fails, after it has landed or not, and a lease is lost meanwhile; returns
    the lease keys of every attempt.
    """
    commit, attempts = world.sink.commit, list[tuple[str, ...]]()

    def fail_once(written, entries):
        attempts.append(tuple(entry.lease_key for entry in entries))
        if len(attempts) > 1:
            return commit(written, entries)
        if landed:
            commit(written, entries)
        world.leases.drop(world.consumers[lost].held, "it was not renewed in time")
        raise SinkError("the answer was lost")

    world.sink.commit = fail_once
    return attempts


def test_a_batch_whose_lease_is_lost_is_not_committed_again_after_a_failure() -> None:
    """A sink without a log has no fence: it would get rows that the next owner has written, or
    rows that come out of order (seed 61200145).
    """
    world = World()
    attempts = failing_commit(world, landed=False, lost=KEYS[0])
    done = world.commit(100)
    assert attempts == [KEYS, KEYS[1:]]
    assert done.lease_keys == KEYS[1:]
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (KEYS[0],)


def test_a_commit_that_landed_before_its_lease_was_lost_has_landed() -> None:
    world = World()
    attempts = failing_commit(world, landed=True, lost=KEYS[0])
    assert world.commit(100).lease_keys == KEYS
    assert attempts == [KEYS]

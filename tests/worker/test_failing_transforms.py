"""A worker whose transform fails: shards pause and are retried, and nothing else stops."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pyarrow as pa
import pytest

from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.events import (
    BatchCommitted,
    RecordsDeadLettered,
    ShardPaused,
    ShardResumed,
)
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.sink import SinkFault
from kcl_pipeline.worker import commit
from kcl_pipeline.worker.failures import GIVEN_SECONDS, LONGEST_RETRY_SECONDS
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import World, numbered

BAD = b"bad"


class Strict:
    """Fails on bad records; `broken`: on all of one shard."""

    def __init__(self):
        self.broken: str | None = None
        self.calls: list[int] = []

    def __call__(self, table: pa.Table) -> pa.Table:
        self.calls.append(table.num_rows)
        for data, shard in zip(
            table["data"].to_pylist(), table["shard_id"].to_pylist(), strict=True
        ):
            if data.startswith(BAD) or shard == self.broken:
                raise ValueError(f"cannot take {data!r}")
        return table


BOTH = pytest.mark.parametrize("world", ["driver", "executors"], indirect=True)
"""Also where executors read. `make test-long` has all tests with both."""


@pytest.fixture(params=["driver", pytest.param("executors", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest) -> World:
    return World(shards=2, transform=Strict(), buffered=request.param == "driver")


def letters(world: World) -> list[bytes]:
    return sorted(d for table in world.table.dead_letters for d in table["data"].to_pylist())


def key_of(world: World, number: int) -> str:
    return f"shardId-{number:012d}"


def shard_rows(world: World) -> set[str]:
    rows = world.table.rows()
    return set() if rows is None else set(rows["shard_id"].to_pylist())


@BOTH
def test_a_broken_transform_pauses_its_shard_and_the_others_go_on(world: World):
    broken, healthy = key_of(world, 0), key_of(world, 1)
    world.writer.transform.broken = broken
    world.put(*numbered(100))
    world.run(20)
    assert shard_rows(world) == {healthy}
    assert world.table.dead_letters == []
    assert world.worker.paused().keys() == {broken}
    first = world.of(ShardPaused)[0]
    assert (first.lease_key, first.attempts) == (broken, 1)
    assert "ValueError: cannot take b'r" in first.reason
    world.put(*numbered(50, "s"))
    world.run(10)
    healthy_records = sum(1 for d in world.data())
    world.writer.transform.broken = None
    world.run(LONGEST_RETRY_SECONDS + 10)
    assert len(world.data()) > healthy_records
    assert world.data() == sorted(world.sent), "nothing is lost, and nothing is there twice"
    assert world.table.dead_letters == []
    assert [event.lease_key for event in world.of(ShardResumed)] == [broken]
    assert world.worker.paused() == {}


class PanicException(BaseException):
    """As a library in Rust raises it."""


class SilentError(Exception):
    """Its message cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(0),
        asyncio.CancelledError(),
        PanicException("index out of bounds"),
        SilentError(),
        SinkError("raised by the transform"),
        SettingsError("raised by the transform"),
    ],
)
def test_an_error_of_any_kind_is_a_failure_of_its_record(world: World, error):
    def fails(table: pa.Table) -> pa.Table:
        if BAD in table["data"].to_pylist():
            raise error
        return table

    world.writer.transform = fails
    world.put(*numbered(40), BAD)
    world.run()
    assert world.data() == sorted(numbered(40))
    assert letters(world) == [BAD]
    [event] = world.of(RecordsDeadLettered)
    assert event.error.startswith(type(error).__name__)


def test_an_error_inside_of_pyarrow_names_the_line_of_the_transform(world: World):
    def converts(table: pa.Table) -> pa.Table:
        pa.array([1, *("x" if data == BAD else 1 for data in table["data"].to_pylist())])
        return table

    world.writer.transform = converts
    world.put(*numbered(40), BAD)
    world.run()
    [event] = world.of(RecordsDeadLettered)
    assert event.error.startswith("ArrowInvalid: ")
    assert "test_failing_transforms.py:" in event.error
    assert event.error.endswith(" in converts)")


def test_a_paused_shard_is_retried_ever_more_rarely_and_reported_less_often(world: World):
    world.writer.transform.broken = key_of(world, 0)
    world.put(*numbered(60))
    world.run(200)
    [pause] = world.worker.paused().values()
    assert 6 <= pause.attempts <= 9, "after 1, 2, 4, 8, 16, 32, 60, 60 seconds"
    assert [event.attempts for event in world.of(ShardPaused)] == [1, 2, 4, 8][
        : len(world.of(ShardPaused))
    ]


def test_a_retry_finds_new_records_and_keeps_their_order(world: World):
    world.writer.transform.broken = key_of(world, 0)
    world.put(*numbered(40))
    world.run(10)
    world.put(*numbered(40, "s"))
    world.writer.transform.broken = None
    world.run(70)
    rows = world.table.rows().filter(
        pa.compute.equal(world.table.rows()["shard_id"], key_of(world, 0))
    )
    assert rows["sequence_number"].to_pylist() == sorted(
        rows["sequence_number"].to_pylist(), key=int
    )
    assert world.data() == sorted(world.sent)


@pytest.mark.parametrize("buffered", [True, False])
def test_with_skip_failing_records_are_left_out(buffered: bool):
    world = World(shards=1, transform=Strict(), buffered=buffered, batch={"failed_records": "skip"})
    world.put(*[BAD if n % 50 == 0 else d for n, d in enumerate(numbered(1_000))])
    world.run()
    assert world.data() == sorted(d for d in world.sent if d != BAD)
    assert world.table.dead_letters == []
    assert sum(event.records for event in world.of(RecordsDeadLettered)) == 20
    assert all(event.skipped for event in world.of(RecordsDeadLettered))
    assert world.of(ShardPaused) == []


@pytest.mark.parametrize("buffered", [True, False])
def test_with_fail_the_first_failing_record_pauses_its_shard(buffered: bool):
    world = World(shards=2, transform=Strict(), buffered=buffered, batch={"failed_records": "fail"})
    world.put(*numbered(100), BAD)
    world.run(20)
    assert len(world.worker.paused()) == 1
    assert len(shard_rows(world)) == 1
    assert "failed_records is 'fail'" in world.of(ShardPaused)[0].reason
    assert "sequence_number=" in world.of(ShardPaused)[0].reason
    assert world.table.dead_letters == []


def test_a_drain_ends_as_failed_when_a_shard_stays_paused(world: World):
    world.writer.transform.broken = key_of(world, 0)
    world.put(*numbered(100))
    stop = world.clock.signal()
    worker = world.worker
    summary = run_drain(world, worker, stop)
    assert summary.reason is StopReason.FAILED
    assert summary.error is not None
    assert f"a shard is paused: {key_of(world, 0)}" in summary.error
    assert shard_rows(world) == {key_of(world, 1)}, "the other shard is drained"


def run_drain(world: World, worker, stop):
    """`Worker.run` without threads: the ticks of all of them, one after the other, for 50 s."""
    drain = worker.drain_watch()
    for _ in range(1_000):
        worker.lease_tick()
        worker.lead_tick()
        worker.fetch_tick()
        worker.process_tick()
        world.clock.advance(0.05)
        if drain.done():
            return worker.summary(worker.reason_of_drain())
    raise AssertionError("the drain does not end")


def test_records_handed_back_with_an_error_are_dead_letters(world: World):
    def marked(table: pa.Table) -> pa.Table:
        is_bad = [d.startswith(BAD) for d in table["data"].to_pylist()]
        return table.append_column(
            "_error", pa.array(["not good" if bad else None for bad in is_bad], pa.string())
        )

    world.writer.transform = marked
    world.put(*numbered(40), BAD, BAD + b"2")
    world.run()
    assert world.data() == sorted(numbered(40))
    assert letters(world) == [BAD, BAD + b"2"]
    assert "_error" not in world.table.rows().schema.names
    assert sum(batch.records for batch in world.of(BatchCommitted)) == 40


def test_the_transform_is_never_called_without_records(world: World):
    world.put(BAD)
    world.run()
    assert letters(world) == [BAD]
    assert world.table.schema is None, "no columns are known yet"
    rows = {lease.lease_key: lease for lease in world.leases.list_leases().leases}
    assert any(lease.checkpoint != TRIM_HORIZON for lease in rows.values())
    world.put(*numbered(20))
    world.run()
    assert world.data() == sorted(numbered(20))
    assert letters(world) == [BAD], "what is behind the checkpoint is not read again"
    assert all(world.writer.transform.calls)


@pytest.fixture
def failing_commits(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """After the first dead letters, five batches fail at their first commit."""
    monkeypatch.setattr(commit, "COMMIT", replace(commit.COMMIT, limit_seconds=0.0))
    failures, written = iter([True] * 5), []

    def fault(call: str, _keys: tuple[str, ...]) -> SinkFault | None:
        if call == "write_dead_letters":
            written.append(call)
        fails = call == "commit" and written and next(failures, False)
        return SinkFault.FAIL if fails else None

    world.worker._dependencies.sink.faults = fault
    return world


@BOTH
def test_a_failing_commit_does_not_write_the_dead_letters_again(failing_commits: World):
    world = failing_commits
    world.put(*numbered(20), BAD)
    world.run(60)
    assert len(world.of(RecordsDeadLettered)) == 1
    assert world.data() == sorted(numbered(20))
    assert letters(world) == [BAD]


def test_what_fails_later_is_set_aside_though_its_neighbours_were_before(failing_commits: World):
    """Only what was written is left out at a later attempt, not everything up to there."""
    world = failing_commits
    strict = world.writer.transform
    world.put(*numbered(9), BAD, key="same")
    world.run(2)
    assert world.data() == []
    assert letters(world) == [BAD]

    def stricter(table: pa.Table) -> pa.Table:
        if b"r0003" in table["data"].to_pylist():
            raise ValueError("now this one, too")
        return strict(table)

    world.writer.transform = stricter
    world.run(60)
    assert letters(world) == [BAD, b"r0003"]
    assert sorted(world.data() + letters(world)) == sorted(world.sent)


def test_a_stopping_worker_gives_up_a_search_and_loses_nothing():
    world = World(shards=1, transform=Strict(), buffered=True)
    world.put(*numbered(30), BAD)
    world.run(1)
    world.worker._stop.set()
    world.put(*numbered(30, "s"), BAD + b"2")
    before = world.data()
    world.run(2)
    assert world.data() == before
    world.worker._stop.signal = world.clock.signal()
    world.run(10)
    assert sorted(world.data() + letters(world)) == sorted(world.sent)


def test_a_dead_letter_table_that_cannot_be_written_holds_the_batch_back(world: World):
    sink = world.worker._dependencies.sink

    def refuse(_records: pa.Table) -> None:
        raise SinkError("no room")

    sink.write_dead_letters = refuse
    world.put(*numbered(10), BAD, key="same")
    world.run(3)
    assert world.data() == []
    del sink.write_dead_letters
    world.run(60)
    assert sorted(world.data() + letters(world)) == sorted(world.sent)


def test_a_worker_that_is_asked_to_end_names_the_shard_that_it_gave_away_while_it_was_paused():
    """The leader moves its leases before it knows that it was asked."""
    transform = Strict()
    transform.broken = "shardId-000000000000"
    world = World(shards=2, transform=transform)
    world.put(*numbered(100))
    world.run(20)
    assert set(world.worker.paused()) == {"shardId-000000000000"}
    row = world.leases.get("shardId-000000000000")
    world.leases.view().initiate_handoff(row, "successor")
    until = world.clock.monotonic() + 10
    while world.worker.paused() and world.clock.monotonic() < until:
        world.worker.lease_tick()
        world.worker.process_tick()
        world.clock.advance(0.05)
    assert world.leases.get("shardId-000000000000").owner == "successor"
    ended = world.worker.summary(StopReason.DRAIN_REQUESTED)
    (paused,) = ended.status.paused
    assert (paused.lease_key, "cannot take" in paused.reason) == ("shardId-000000000000", True)
    assert world.worker.summary(StopReason.STOPPED).status.paused == ()
    world.clock.advance(GIVEN_SECONDS + 1)
    assert world.worker.summary(StopReason.DRAIN_REQUESTED).status.paused == ()

"""The lag of a worker is that of committed data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.sink import SinkFault
from kcl_pipeline.worker import batch_runner, commit
from kcl_pipeline.worker.status import UNKNOWN_SECONDS, LagTracker
from tests.support.worker_world import World, numbered


@pytest.fixture(params=["driver", "executors"])
def world(request: pytest.FixtureRequest) -> World:
    return World(shards=1, buffered=request.param == "driver")


def test_nothing_to_commit_is_no_lag(world: World):
    world.put(*numbered(10))
    world.run()
    assert world.worker.lag().worst_millis == 0
    assert world.worker.lag().unknown == ()


def test_while_commits_fail_the_lag_grows(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_runner, "MAX_SINK_FAILURES", 10_000)
    world.put(*numbered(10))
    world.run()
    monkeypatch.setattr(commit, "COMMIT", replace(commit.COMMIT, limit_seconds=0.0))
    sink = world.worker._dependencies.sink
    sink.faults = lambda call, _keys: SinkFault.FAIL if call == "commit" else None
    arrived = world.clock.monotonic()
    world.put(*numbered(5, "s"))
    lags = []
    for _ in range(6):
        world.run(20)
        lags.append(world.worker.lag().worst_millis)
        expected = (world.clock.monotonic() - arrived) * 1000
        assert lags[-1] == pytest.approx(expected, abs=1_500)
    assert lags == sorted(lags)
    assert world.worker.status().lag_millis == pytest.approx(lags[-1], abs=1_500)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    assert row.status.failed_batches > 1
    assert row.status.failure is not None
    assert row.status.failure.startswith("SinkError: ")
    sink.faults = lambda _call, _keys: None
    world.run(20)
    assert world.worker.lag().worst_millis == 0
    world.run(40)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    assert (row.status.failed_batches, row.status.failure) == (0, None)
    assert world.data() == sorted(world.sent)


def test_a_paused_shard_is_behind(world: World):
    def broken(_table):
        raise ValueError("broken")

    world.writer.transform = broken
    world.put(*numbered(50))
    world.run(90)
    assert world.worker.lag().worst_millis == pytest.approx(90_000, abs=3_000)


def test_what_is_read_but_not_committed_counts_from_its_arrival():
    world = World(shards=1, buffered=True)
    world.put(*numbered(1))
    world.run()
    world.put(*numbered(3, "a"))
    world.clock.advance(7)
    world.put(*numbered(3, "b"))
    world.clock.advance(2)
    while world.worker.source.fetch() == 0.0:
        pass
    world.clock.advance(5)
    assert world.worker.lag().worst_millis == pytest.approx(12_000 + 2_000, abs=2_100)


def test_a_shard_that_cannot_be_read_is_unknown_and_then_behind(world: World):
    def refuse(*_arguments, **_named):
        raise UnavailableError("no answer", operation="GetRecords")

    real, world.kinesis.get_records = world.kinesis.get_records, refuse
    world.run(10)
    lag = world.worker.lag()
    assert (lag.worst_millis, lag.unknown) == (None, ("shardId-000000000000",))
    assert world.worker.status().unknown_lags == 1
    world.run(UNKNOWN_SECONDS + 10)
    assert world.worker.lag().worst_millis > UNKNOWN_SECONDS * 1000
    world.kinesis.get_records = real
    world.run(30)
    assert world.worker.lag().worst_millis == 0


class TestTracker:
    def test_the_oldest_of_all_attempts_counts(self):
        clock = VirtualClock()
        lag = LagTracker(clock)
        lag.track(["s1"])
        lag.took({"s1": clock.monotonic() - 5})
        lag.took({"s1": clock.monotonic()})
        clock.advance(1)
        assert lag.current({"s1": 0}).millis == {"s1": 6_000}
        assert lag.current({"s1": 9_000}).millis == {"s1": 9_000}
        lag.committed(["s1"])
        assert lag.current({"s1": 0}).millis == {"s1": 0}

    def test_leases_that_are_not_held_are_forgotten(self):
        lag = LagTracker(VirtualClock())
        lag.track(["s1", "s2"])
        lag.took({"s1": 0.0, "s2": 0.0})
        lag.track(["s2"])
        assert lag.current({"s1": 7}).millis.keys() == {"s2"}
        lag.track(["s1", "s2"])
        assert lag.current({}).unknown == ("s1",)

"""A hung worker releases its leases and ends, if the settings say so; real threads and time."""

from __future__ import annotations

import threading
import time

import pytest

from kcl_pipeline.events import BatchCommitted, HangStep, WorkerHung, WorkerStopped
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.worker.summary import StopReason
from tests.support import worker_world
from tests.support.worker_world import World, numbered
from tests.worker.test_hung import Blocking

KEY = "shardId-000000000000"
SETTINGS = {"hung_after_millis": 400, "stop_hung_after_millis": 800}


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(worker_world, "VirtualClock", ShiftedClock)
    blocking = Blocking()
    world = World(shards=1, buffered=True, transform=blocking, parallel=True, worker=SETTINGS)
    world.blocking = blocking
    world.worker.reporter.deregister()
    yield world
    blocking.release.set()


def run(world, name, **more):
    return world.make_worker(name).run(world.clock.signal(), **more)


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def processing_threads():
    return [one for one in threading.enumerate() if one.name == "processing"]


def test_it_ends_and_its_lease_is_free_and_the_thread_that_wakes_commits_nothing(world):
    world.put(*numbered(3))
    began = time.monotonic()
    summary = run(world, "w-2")
    assert time.monotonic() - began < 20
    assert summary.reason is StopReason.HUNG
    assert "hung in step writing" in summary.error
    assert [event.step for event in world.of(WorkerHung)][:1] == [HangStep.WRITING]
    assert world.of(WorkerStopped)[-1].reason == "hung"
    row = world.leases.get(KEY)
    assert (row.owner, row.checkpoint_owner) == (None, None)
    assert world.rows.scan_workers().workers == ()
    (thread,) = processing_threads()
    world.blocking.release.set()
    thread.join(30)
    assert not thread.is_alive()
    assert world.of(BatchCommitted) == []
    assert world.data() == []
    assert world.leases.get(KEY) == row, "it writes no lease row"
    assert run(world, "w-3", mode="drain").reason is StopReason.DRAINED
    assert world.data() == numbered(3)


def test_the_thread_that_wakes_after_another_worker_has_read_the_records_commits_nothing(world):
    world.put(*numbered(3))
    run(world, "w-2")
    (thread,) = processing_threads()
    assert run(world, "w-3", mode="drain").reason is StopReason.DRAINED
    world.blocking.release.set()
    thread.join(30)
    assert world.data() == numbered(3), "each record once"


def test_a_worker_that_is_not_hung_ends_as_before(world):
    world.blocking.began.set()
    world.put(*numbered(3))
    assert run(world, "w-2", mode="drain").reason is StopReason.DRAINED
    assert world.data() == numbered(3)
    assert processing_threads() == []


def test_an_error_of_the_loop_is_raised(world, monkeypatch):
    worker = world.make_worker("w-2")

    def broken():
        raise OSError("broken")

    monkeypatch.setattr(worker, "process_tick", broken)
    with pytest.raises(OSError, match="broken"):
        worker.run(world.clock.signal())
    assert world.of(WorkerStopped)[-1].reason == "failed"


def test_a_stop_while_nothing_hangs_ends_it(world):
    stop = world.clock.signal()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    assert world.make_worker("w-2").run(stop).reason is StopReason.STOPPED

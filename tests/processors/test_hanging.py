"""A call of a record processor that does not return holds up its own shard only."""

from __future__ import annotations

import threading
import time

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import ShardEnded, ShardPaused, WorkerHung, WorkerResumed
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.processors.thread import ProcessorThread
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.processors.log import Calls, row_of, rows_of, world_of
from tests.support.worker_world import numbered

STUCK = "shardId-000000000001"


class Hanging:
    """Lets a method of the processor of one shard wait until the test ends the wait."""

    def __init__(self, method):
        self.calls = Calls()
        self.began, self.release = threading.Event(), threading.Event()
        self.then = lambda: None
        self._method = method
        for name in ("initialize", "process_records", "shard_ended", "shutdown_requested"):
            self.calls.acts[name] = lambda given, name=name: self._act(name, given)

    def _act(self, name, given):
        if name == self._method and threading.current_thread().name.endswith(STUCK):
            self.began.set()
            assert self.release.wait(60)
            self.then()
        if name in ("process_records", "shard_ended"):
            given.checkpointer.checkpoint()

    def world(self, **settings):
        # Threads renew the leases, and the virtual clock does not wait for them.
        lease = {"failover_time_millis": 10_000}
        return world_of(self.calls, shards=3, parallel=True, lease=lease, **settings)


@pytest.fixture
def hang():
    made = []

    def make(method):
        made.append(Hanging(method))
        return made[-1]

    yield make
    for one in made:
        one.release.set()


def put_into(world, shard, *values):
    for value in values:
        world.model.call(
            "PutRecord",
            StreamName="orders",
            PartitionKey="k",
            ExplicitHashKey=str(row_of(world, shard).hash_key_range.start),
            Data=value,
        )
        world.sent.append(value)


def run_until(world, condition):
    """Run ticks until a condition holds. Threads of processors need real time between them."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold"
        run(world, 0.05)


def run(world, seconds):
    for _ in range(round(seconds / 0.05)):
        world.run(0.05)
        time.sleep(0.001)


def in_a_call(hang, **settings):
    """A world in which the processor of shard 1 hangs with one record, and the others wait."""
    hanging = hang("process_records")
    world, calls = hanging.world(**settings), hanging.calls
    run_until(world, lambda: len(calls.inputs("initialize")) == 3)
    put_into(world, 1, b"v")
    run_until(world, hanging.began.is_set)
    return hanging, world, calls


def test_the_other_shards_go_on(hang):
    hanging = hang("process_records")
    world, calls = hanging.world(), hanging.calls
    run_until(world, lambda: len(calls.inputs("initialize")) == 3)
    put_into(world, 1, *numbered(4, "1-"))
    run_until(world, hanging.began.is_set)
    for shard in (0, 2):
        put_into(world, shard, *numbered(20, f"{shard}-"))
    run_until(world, lambda: len(calls.data()) == 44)
    put_into(world, 1, *numbered(5, "later-"))
    run(world, 5)
    assert len(calls.data()) == 44, "the object is not called while its call runs"
    assert rows_of(world)[STUCK].checkpoint.is_sentinel
    assert world.worker.lag().millis[STUCK] >= 5000
    hanging.release.set()
    run_until(world, lambda: len(calls.data()) == 49)
    assert sorted(calls.data()) == sorted(world.sent), "each record once"
    assert (world.worker.paused(), len(calls.made)) == ({}, 3)
    run_until(world, lambda: world.worker.lag().millis[STUCK] == 0)


def test_a_call_that_fails_late_pauses_its_shard(hang):
    hanging, world, calls = in_a_call(hang)
    run(world, 2)

    def fails():
        hanging.then = lambda: None
        raise ValueError("boom")

    hanging.then = fails
    hanging.release.set()
    run_until(world, world.worker.paused)
    reason = world.worker.paused()[STUCK].reason
    assert reason.startswith("process_records failed: ValueError: boom")
    run_until(world, lambda: len(calls.data()) == 2)
    assert calls.data() == [b"v", b"v"]
    run_until(world, lambda: not world.worker.paused())


def test_a_hanging_initialize(hang):
    hanging = hang("initialize")
    world, calls = hanging.world(), hanging.calls
    run_until(world, hanging.began.is_set)
    world.put(*numbered(30))
    run_until(world, lambda: len({n for n, name, _ in calls.calls if name != "initialize"}) == 2)
    run(world, 3)
    assert len(calls.inputs("initialize")) == 3, "it is not called again"
    hanging.release.set()
    run_until(world, lambda: len(calls.data()) == 30)
    assert len(calls.made) == 3


def test_an_initialize_that_fails_just_after_the_worker_has_waited_is_called_again(
    hang, monkeypatch
):
    hanging, begin = hang("initialize"), ProcessorCalls.begin

    def fails():
        hanging.then = lambda: None
        raise ValueError("boom")

    def begin_then_fail(self, starts):
        outcomes = begin(self, starts)
        if hanging.began.is_set():
            hanging.release.set()
            deadline = time.monotonic() + 60
            while self.is_busy(STUCK):
                assert time.monotonic() < deadline
        return outcomes

    hanging.then = fails
    monkeypatch.setattr(ProcessorCalls, "begin", begin_then_fail)
    world, calls = hanging.world(), hanging.calls
    run_until(world, hanging.release.is_set)
    put_into(world, 1, b"v")
    run_until(world, lambda: calls.data() == [b"v"])
    assert len(calls.inputs("initialize")) == 4
    assert world.of(ShardPaused) == []


def test_a_hanging_shard_ended(hang):
    hanging = hang("shard_ended")
    world, calls = hanging.world(), hanging.calls
    run_until(world, lambda: len(calls.inputs("initialize")) == 3)
    for shard in (0, 1):
        start = row_of(world, shard).hash_key_range.start
        world.model.call(
            "SplitShard",
            StreamName="orders",
            ShardToSplit=f"shardId-{shard:012}",
            NewStartingHashKey=str(start + 1000),
        )
        world.clock.advance(30)
    run_until(world, lambda: hanging.began.is_set() and row_of(world, 0).ended)
    run(world, 3)
    assert not row_of(world, 1).ended
    assert len(calls.inputs("shard_ended")) == 2
    hanging.release.set()
    run_until(world, lambda: len(world.of(ShardEnded)) == 2)
    assert row_of(world, 1).ended
    assert len(calls.inputs("shard_ended")) == 2


def test_a_handoff_waits_for_its_call_and_no_other(hang):
    hanging, world, calls = in_a_call(hang)
    for shard in (0, 1):
        world.leases.view().initiate_handoff(row_of(world, shard), "w-9")
    deadline = time.monotonic() + 60
    while row_of(world, 0).owner != "w-9" or row_of(world, 0).in_handoff:
        assert time.monotonic() < deadline
        world.run_without_leader(0.1)
    assert row_of(world, 1).in_handoff, "the object is called"
    hanging.release.set()
    while row_of(world, 1).in_handoff:
        assert time.monotonic() < deadline
        world.run_without_leader(0.1)
        time.sleep(0.001)
    stuck = [name for number, name, _ in calls.calls if calls.shard_of(number) == STUCK]
    assert stuck == ["initialize", "process_records", "shutdown_requested", "lease_lost"]


def test_a_lease_that_comes_back_waits_for_the_former_call(hang):
    hanging, world, calls = in_a_call(hang)
    world.leases.view().assign(row_of(world, 1), "w-9")
    run_until(world, lambda: row_of(world, 1).owner == "w-1")
    run(world, 5)
    assert len(calls.made) == 3
    hanging.release.set()
    run_until(world, lambda: len(calls.data()) == 2)
    assert len(calls.made) == 4
    names = [name for number, name, _ in calls.calls if calls.shard_of(number) == STUCK]
    assert names[:4] == ["initialize", "process_records", "lease_lost", "initialize"]


def test_it_is_reported(hang):
    hanging, world, _calls = in_a_call(hang, worker={"hung_after_millis": 10_000})
    run(world, 15)
    (event,) = world.of(WorkerHung)
    assert event.lease_keys == (STUCK,)
    assert "_act" in event.stacks
    hanging.release.set()
    run_until(world, lambda: world.of(WorkerResumed))


def test_a_stop_releases_the_leases_of_the_others(hang):
    _hanging, world, calls = in_a_call(hang, worker={"stop_timeout_millis": 300})
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)
    assert {lease.owner for lease in rows_of(world).values()} == {None}
    assert len(calls.inputs("shutdown_requested")) == len(calls.inputs("lease_lost")) == 2


def test_a_drain_waits_for_its_call(hang):
    hanging = hang("process_records")
    world, calls = hanging.world(), hanging.calls
    run_until(world, lambda: len(calls.inputs("initialize")) == 3)
    put_into(world, 1, b"v")
    drain = world.worker.drain_watch()
    run_until(world, hanging.began.is_set)
    for _ in range(100):
        run(world, 0.05)
        assert not drain.done()
    hanging.release.set()
    run_until(world, drain.done)
    assert drain.unread() is None


def test_a_call_has_an_outcome_as_soon_as_its_thread_is_not_busy():
    thread, release = ProcessorThread(STUCK, SystemClock(), parallel=True), threading.Event()
    call = thread.add(lambda: release.wait(60))
    set_result = call.set_result

    def set_late(result):
        time.sleep(0.2)
        set_result(result)

    call.set_result = set_late
    release.set()
    deadline = time.monotonic() + 60
    while thread.is_busy:
        assert time.monotonic() < deadline
    assert call.done()

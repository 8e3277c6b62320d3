"""A worker whose processing thread blocks says so, although its leases are renewed."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import HangStep, WorkerHung, WorkerResumed
from kcl_pipeline.worker import watchdog as watch
from tests.support.worker_world import World, numbered

ZERO = "shardId-000000000000"
AFTER = 60.0
SECRET = "a-secret-in-a-variable"


class Blocking:
    """A transform that blocks in its first call with records, until `release` is set."""

    def __init__(self):
        self.began, self.release = threading.Event(), threading.Event()

    def __call__(self, records):
        password = SECRET
        if records.num_rows and not self.began.is_set():
            self.began.set()
            assert self.release.wait(60), password
        return records


class Hanging:
    """A world whose processing thread is in the transform; the test is the thread that renews."""

    def __init__(self, *, buffered=True, put=True, **settings):
        self.transform = Blocking()
        self.world = World(
            shards=1,
            buffered=buffered,
            transform=self.transform,
            worker={"hung_after_millis": round(AFTER * 1000)},
            **settings,
        )
        self.world.run(5)
        if put:
            self.world.put(*numbered(3))
        self.thread = None

    def block(self):
        """Run ticks, the processing tick on a thread of its own, until the transform blocks."""
        for _ in range(200):
            self.world.worker.lease_tick()
            self.world.worker.fetch_tick()
            self.world.clock.advance(0.05)
            self.thread = threading.Thread(
                target=self.world.worker.process_tick, name="processing", daemon=True
            )
            self.thread.start()
            while self.thread.is_alive() and not self.transform.began.is_set():
                self.thread.join(0.005)
            if self.transform.began.is_set():
                return
        raise AssertionError("the transform was not called")

    def renew(self, seconds):
        world = self.world
        end = world.clock.monotonic() + seconds
        while world.clock.monotonic() < end:
            world.worker.lease_tick()
            world.worker.lead_tick()
            world.worker.fetch_tick()
            world.clock.advance(0.2)

    def end(self):
        self.transform.release.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


BOTH = pytest.mark.parametrize(
    "hanging", [True, False], ids=["buffered", "executors"], indirect=True
)
"""Also where executors read. `make test-long` has all tests with both."""


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["buffered", "executors"]
)
def hanging(request):
    found = Hanging(buffered=request.param)
    yield found
    found.transform.release.set()


@BOTH
def test_a_transform_that_blocks_is_reported_while_its_leases_are_renewed(hanging):
    hanging.block()
    world = hanging.world
    # A job of executors reads and transforms in one.
    step = HangStep.WRITING if world.buffered else HangStep.READING
    hanging.renew(AFTER - 2)
    assert world.of(WorkerHung) == []
    (row,) = world.rows.scan_workers().workers
    assert row.status.hung is None
    hanging.renew(15)
    (told,) = world.of(WorkerHung)
    assert (told.worker_id, told.step, told.lease_keys) == ("w-1", step, (ZERO,))
    assert AFTER <= told.seconds < AFTER + 2
    (row,) = world.rows.scan_workers().workers
    assert (row.status.hung.step, row.status.hung.leases) == (step, 1)
    assert AFTER <= row.status.hung.seconds < AFTER + 15
    assert [held.lease_key for held in world.worker.leases.held()] == [ZERO], "it is renewed"


def test_the_event_has_the_stacks_without_variables_and_records(hanging):
    over = threading.Event()

    def wait_here():
        over.wait()

    threading.Thread(target=wait_here, name="waiting", daemon=True).start()
    hanging.block()
    hanging.renew(AFTER + 2)
    over.set()
    (told,) = hanging.world.of(WorkerHung)
    first, *others = told.stacks.split("\n\n")
    assert first.startswith("Thread processing (most recent call first):\n")
    assert "test_hung.py" in first
    assert " __call__" in first
    assert any(other.startswith("Thread waiting (") for other in others)
    assert SECRET not in told.stacks
    assert "password" not in told.stacks, "no source lines"
    assert "r0000" not in told.stacks
    assert len(told.stacks) <= watch.MAX_CHARACTERS


def test_it_is_repeated_at_a_bounded_rate_and_ends_with_the_step(hanging):
    hanging.block()
    hanging.renew(3 * AFTER + 5)
    assert len(hanging.world.of(WorkerHung)) == 3
    assert hanging.world.of(WorkerResumed) == []
    hanging.end()
    hanging.world.run(15)
    assert len(hanging.world.of(WorkerResumed)) == 1
    assert hanging.world.data() == numbered(3)
    (row,) = hanging.world.rows.scan_workers().workers
    assert row.status.hung is None


def test_a_step_that_begins_is_progress():
    """Isolation of bad records calls the transform again and again for one batch."""
    hanging = Hanging()
    hanging.block()
    for _ in range(5):
        hanging.renew(AFTER - 5)
        hanging.world.worker._activity.enter(HangStep.WRITING)
    assert hanging.world.of(WorkerHung) == []
    hanging.end()


def test_each_call_of_a_failing_transform_is_progress():
    world, calls = None, []

    def slow(records):
        calls.append(records.num_rows)
        for _ in range(30):
            world.clock.advance(0.2)
            world.worker.lease_tick()
        if b"bad" in records.column("data").to_pylist():
            raise ValueError("bad")
        return records

    world = World(
        shards=1,
        buffered=True,
        transform=slow,
        worker={"hung_after_millis": round(AFTER * 1000)},
    )
    world.run(5)
    world.put(*numbered(20), b"bad", *numbered(20, "s"))
    world.run(200)
    assert len(world.data()) == 40
    assert len(calls) * 6 > AFTER, "the batch takes longer than one step may"
    assert world.of(WorkerHung) == []


@pytest.mark.parametrize("buffered", [True, False])
def test_a_worker_without_records_is_not_hung(buffered):
    world = World(shards=1, buffered=buffered, worker={"hung_after_millis": round(AFTER * 1000)})
    world.run(3 * AFTER)
    assert world.of(WorkerHung) == []


def test_a_thread_that_blocks_while_all_shards_are_at_their_end_is_not_hung():
    world = World(shards=1, buffered=True, worker={"hung_after_millis": round(AFTER * 1000)})
    world.run(5)
    world.worker._activity.enter(HangStep.REPORTING)

    def renew(seconds):
        for _ in range(round(seconds / 0.1)):
            world.worker.lease_tick()
            world.worker.fetch_tick()
            world.clock.advance(0.1)

    renew(2 * AFTER)
    assert world.of(WorkerHung) == []
    world.put(b"r")
    renew(5)
    (told,) = world.of(WorkerHung)
    assert told.step is HangStep.REPORTING


def test_a_worker_that_was_paused_as_a_whole_is_not_hung():
    """After SIGSTOP the worker renews its leases, if no other worker has taken them."""
    hanging = Hanging()
    hanging.block()
    hanging.renew(1)
    hanging.world.clock.advance(10 * AFTER)
    hanging.renew(AFTER / 2)
    assert hanging.world.worker.leases.held()
    assert hanging.world.of(WorkerHung) == []
    hanging.renew(AFTER / 2)
    assert len(hanging.world.of(WorkerHung)) == 1
    hanging.end()


def test_the_default_is_five_minutes_and_nothing_is_stopped():
    settings = ConsumerSettings(application_name="orders", streams=("orders",)).worker
    assert settings.hung_after_millis == 300_000
    assert settings.stop_hung_after_millis is None


def test_a_stop_before_the_report_is_refused():
    with pytest.raises(ValueError, match="stop_hung_after_millis=10 is below"):
        ConsumerSettings(
            application_name="orders", streams=("orders",), worker={"stop_hung_after_millis": 10}
        )


def test_threads_that_wait_in_the_same_calls_are_shown_once():
    over, texts = threading.Event(), list[str]()

    def wait_here():
        over.wait()

    threads = [threading.Thread(target=wait_here, name=f"idle-{n}", daemon=True) for n in range(40)]
    # The newest thread, because `faulthandler` shows the newest 100 ones
    asking = threading.Thread(
        target=lambda: texts.append(watch.thread_stacks(threading.get_ident())), name="asking"
    )
    for thread in (*threads, asking):
        thread.start()
    asking.join(30)
    over.set()
    for thread in threads:
        thread.join(30)
    (text,) = texts
    assert text.startswith("Current thread asking (most recent call first):\n")
    (idle,) = (stack for stack in text.split("\n\n") if "hread idle-" in stack)
    assert " and 39 more (most recent call first):\n" in idle
    assert idle.count(" in wait_here\n") == 1


def test_stacks_are_bounded(monkeypatch):
    def deep(depth):
        return deep(depth - 1) if depth else watch.thread_stacks(threading.get_ident())

    assert deep(200).count(" in deep\n") < 100
    monkeypatch.setattr(watch, "MAX_CHARACTERS", 500)
    text = deep(200)
    assert len(text) == 500
    assert text.endswith("... (cut)")


def test_stacks_without_a_place_for_a_file_say_why(monkeypatch):
    def fail():
        raise OSError(28, "no space left")

    monkeypatch.setattr(watch.tempfile, "TemporaryFile", fail)
    text = watch.thread_stacks(threading.get_ident())
    assert text == "(the calls of the threads are not known: [Errno 28] no space left)"


CHANGING_STACKS = """
import sys, threading, time
from kcl_pipeline.worker.watchdog import thread_stacks

def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    yield depth

def calls(depth):
    if depth == 0:
        return list(numbers(10))
    try:
        sorted(range(5), key=lambda number: calls(0) and number)
        if depth == 3:
            raise ValueError
    except ValueError:
        pass
    return calls(depth - 1)

def change():
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        calls(20)

def start():
    while not over.is_set():
        threads = [threading.Thread(target=change) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

sys.setswitchinterval(1e-6)
over = threading.Event()
starting = threading.Thread(target=start)
starting.start()
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    thread_stacks(0)
over.set()
starting.join()
"""


@pytest.mark.long
def test_stacks_of_threads_that_run_do_not_end_the_process():
    """Frames of `sys._current_frames` ended it in one of three such runs of ten seconds."""
    command = [sys.executable, "-c", CHANGING_STACKS, "60"]
    subprocess.run(command, check=True, timeout=120)


def test_leases_are_released_without_their_consumers():
    hanging = Hanging()
    hanging.block()
    consumers = dict(hanging.world.worker.lifecycle.consumers)
    hanging.world.worker._leaving.leave(abandoned=True)
    assert hanging.world.worker.lifecycle.consumers == consumers
    assert hanging.world.leases.get(ZERO).owner is None
    assert hanging.world.rows.scan_workers().workers == ()
    hanging.end()
    assert hanging.world.data() == []


def test_a_lease_that_is_not_released_is_not_written_through_either():
    hanging = Hanging(lease={"release_leases_on_shutdown": False})
    hanging.block()
    hanging.world.worker._leaving.leave(abandoned=True)
    assert hanging.world.leases.get(ZERO).owner == "w-1", "it expires"
    hanging.end()
    assert hanging.world.data() == []

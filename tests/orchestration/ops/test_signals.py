"""SIGINT and SIGTERM ask a worker to stop; they never interrupt it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import kcl_pipeline
from kcl_pipeline.cli.worker import worker as run_worker
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals


def test_interrupts_survive_a_library_that_replaces_the_handler():
    stop = SystemClock().signal()
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(stop) as signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.install()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        assert signals.received
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_does_not_interrupt_the_wait_is_noticed():
    """The interpreter handles a signal of another thread as it handles one that arrives just before
    the main thread waits: nothing interrupts the wait.
    """
    stop = SystemClock().signal()
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with stop_on_signals(stop):
            threading.Timer(0.3, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
            assert stop.wait(20)
    finally:
        ended.set()
        other.join(10)


def test_a_wait_of_the_main_thread_ends_at_its_timeout():
    began = time.monotonic()
    assert not SystemClock().signal().wait(0.7)
    assert time.monotonic() - began >= 0.7


class BusyFlag:
    """A stop flag whose lock the interrupted thread may hold, as `threading.Event` has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: list[bool] = []
        self.answered = threading.Event()

    def set(self) -> None:
        got = self.lock.acquire(timeout=5)
        self.answers.append(got)
        if got:
            self.lock.release()
        self.answered.set()


def test_a_signal_that_interrupts_the_flag_itself_does_not_lock_up():
    stop = BusyFlag()
    with stop_on_signals(stop) as signals:
        with stop.lock:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not signals.received and time.monotonic() < deadline:
                time.sleep(0.01)
        assert stop.answered.wait(10)
    assert stop.answers == [True]


def test_outside_the_main_thread_no_handler_is_touched():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with stop_on_signals(SystemClock().signal()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert seen == [before]


def test_the_handler_of_the_command_line_does_not_set_the_flag_itself(monkeypatch, tmp_path):
    stop = BusyFlag()

    class Built:
        def run(self, given, **_):
            with given.lock:
                signal.raise_signal(signal.SIGTERM)
            assert given.answered.wait(10)
            return WorkerSummary("w-1", StopReason.STOPPED, WorkerStatus(totals=WorkerTotals(1.0)))

    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink(str(tmp_path / "table")))
    module = sys.modules["kcl_pipeline.cli.running"]
    monkeypatch.setattr(module, "load_pipeline", lambda _: pipeline)
    monkeypatch.setattr(KinesisPipeline, "build_worker", lambda *_, **__: Built())
    monkeypatch.setattr(SystemClock, "signal", lambda _: stop)
    run_worker(pipeline="somewhere:pipeline", worker_id="w-1")
    assert stop.answers == [True]


def test_one_module_of_the_product_installs_signal_handlers():
    root = Path(kcl_pipeline.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "signal.signal(" in path.read_text()
    }
    assert found - {"signals.py"} == set()

"""Losses are recorded outside the worker: never raising, never waiting, retried."""

from __future__ import annotations

import threading
import time

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.metrics import loss_recorder
from kcl_pipeline.metrics.loss_recorder import LossRecorder, recording_losses
from kcl_pipeline.position import Position
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from tests.support.dagster_fakes import ManualClock

OTHER = ev.LeaseGained("w-1", "s-1", 1)


def lost(number: int = 1) -> ev.RecordsLost:
    return ev.RecordsLost("w-1", f"s-{number}", ev.LossReason.ROW_DELETED, Position("7"))


class Stage:
    """A recorder whose thread runs at once, and a table that can be throttled."""

    def __init__(self) -> None:
        self.clock, self.seen = ManualClock(), []
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.table = InMemoryCoordinatorStateTable(before_call=self.before)
        ensure_client_version(self.table, "w-1", self.clock)
        self.calls.clear()
        self.recorder = LossRecorder(
            self.seen.append, self.table, self.clock, lambda _name, target: target()
        )

    def before(self, operation: str, *_: object) -> None:
        self.calls.append(operation)
        if self.error is not None:
            raise self.error

    def shards(self) -> list[str]:
        return [loss.shard_id for loss in self.table.read_losses().log.losses]


@pytest.fixture(name="parts")
def parts_fixture():
    return Stage()


def test_a_restore_of_the_table_is_recorded_once(parts):
    restored = ev.TableRestored(58, "version 12")
    parts.recorder(restored)
    parts.recorder(ev.TableRestored(58, "version 12"))
    parts.recorder(ev.TableRestored(61, "version 12"))
    log = parts.table.read_losses().log
    assert [(loss.reason, loss.after) for loss in log.losses] == [
        ("table_restored", "version 12")
    ] * 2
    assert parts.seen[0] == restored
    parts.table.change_losses(lambda found: found.with_acknowledged(log, 1_000))
    parts.recorder(restored)
    assert parts.table.read_losses().log.unacknowledged == 0, "a worker that starts finds it again"


def test_a_loss_is_recorded_and_passed_on(parts):
    parts.recorder(OTHER)
    assert parts.calls == []
    parts.recorder(lost())
    assert parts.calls == ["GetItem", "UpdateItem"]
    parts.recorder(lost())
    assert parts.shards() == ["s-1"]
    assert parts.seen == [OTHER, lost(), lost()]


def test_a_failed_write_is_told_and_tried_again_at_the_next_loss(parts):
    parts.error = ThrottledError("slow down", operation="UpdateItem")
    parts.recorder(lost(1))
    assert parts.seen == [ev.AwsTrouble("recording lost records", "slow down"), lost(1)]
    parts.error = None
    parts.recorder(lost(2))
    assert parts.shards() == ["s-1", "s-2"]


def test_without_a_further_loss_a_later_event_tries_again(parts):
    parts.error = ThrottledError("slow down", operation="UpdateItem")
    parts.recorder(lost())
    parts.error = None
    parts.recorder(OTHER)
    assert parts.shards() == []
    parts.clock.advance(loss_recorder.RETRY_SECONDS)
    parts.recorder(OTHER)
    assert parts.shards() == ["s-1"]


def test_a_worker_that_stops_tries_again_at_once(parts):
    parts.error = ThrottledError("slow down", operation="UpdateItem")
    parts.recorder(lost())
    parts.error = None
    parts.recorder(ev.WorkerStopped("w-1", "stopped"))
    assert parts.shards() == ["s-1"]


def test_no_error_reaches_the_worker_and_the_memory_is_bounded(parts, monkeypatch):
    monkeypatch.setattr(loss_recorder, "MAX_PENDING", 3)
    parts.error = ValueError("anything")
    for number in range(5):
        parts.recorder(lost(number))
    parts.error = None
    parts.recorder(lost(5))
    assert parts.shards() == ["s-3", "s-4", "s-5"]


def test_a_process_without_threads_tells_it(parts):
    def no_thread(_name, _target):
        raise RuntimeError("can't start new thread")

    parts.recorder._spawn = no_thread
    parts.recorder(lost())
    assert parts.seen[0] == ev.AwsTrouble("recording lost records", "can't start new thread")


def test_a_sink_that_fails_does_not_end_the_recorder(parts, caplog):
    def fail(event):
        if event == ev.AwsTrouble("recording lost records", "slow down"):
            raise OSError("full")

    parts.recorder._events = fail
    parts.error = ThrottledError("slow down", operation="UpdateItem")
    parts.recorder(lost())
    assert "cannot report" in caplog.text
    parts.error = None
    parts.recorder(lost())
    assert parts.shards() == ["s-1"]


def test_the_worker_does_not_wait_for_the_table():
    parts, answer = Stage(), threading.Event()
    table = parts.table.view(before_call=lambda *_: answer.wait(30) and None)
    recorder = LossRecorder(parts.seen.append, table, parts.clock)
    recorder(lost(1))
    recorder(lost(2))
    assert parts.seen == [lost(1), lost(2)]
    (thread,) = [t for t in threading.enumerate() if t.name == "records-lost"]
    assert not thread.daemon, "a process that ends waits for the write"
    answer.set()
    end = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
    assert parts.shards() == ["s-1", "s-2"]


def test_a_sink_is_wrapped_once(parts):
    assert recording_losses(parts.recorder, parts.table, parts.clock) is parts.recorder
    assert isinstance(recording_losses(print, parts.table, parts.clock), LossRecorder)

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


@pytest.fixture(name="stage")
def stage_fixture():
    return Stage()


def test_a_loss_is_recorded_and_passed_on(stage):
    stage.recorder(OTHER)
    assert stage.calls == []
    stage.recorder(lost())
    assert stage.calls == ["GetItem", "UpdateItem"]
    stage.recorder(lost())
    assert stage.shards() == ["s-1"]
    assert stage.seen == [OTHER, lost(), lost()]


def test_a_failed_write_is_told_and_tried_again_at_the_next_loss(stage):
    stage.error = ThrottledError("slow down", operation="UpdateItem")
    stage.recorder(lost(1))
    assert stage.seen == [ev.AwsTrouble("recording lost records", "slow down"), lost(1)]
    stage.error = None
    stage.recorder(lost(2))
    assert stage.shards() == ["s-1", "s-2"]


def test_without_a_further_loss_a_later_event_tries_again(stage):
    stage.error = ThrottledError("slow down", operation="UpdateItem")
    stage.recorder(lost())
    stage.error = None
    stage.recorder(OTHER)
    assert stage.shards() == []
    stage.clock.advance(loss_recorder.RETRY_SECONDS)
    stage.recorder(OTHER)
    assert stage.shards() == ["s-1"]


def test_a_worker_that_stops_tries_again_at_once(stage):
    stage.error = ThrottledError("slow down", operation="UpdateItem")
    stage.recorder(lost())
    stage.error = None
    stage.recorder(ev.WorkerStopped("w-1", "stopped"))
    assert stage.shards() == ["s-1"]


def test_no_error_reaches_the_worker_and_the_memory_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(loss_recorder, "MAX_PENDING", 3)
    stage.error = ValueError("anything")
    for number in range(5):
        stage.recorder(lost(number))
    stage.error = None
    stage.recorder(lost(5))
    assert stage.shards() == ["s-3", "s-4", "s-5"]


def test_a_process_without_threads_tells_it(stage):
    def no_thread(_name, _target):
        raise RuntimeError("can't start new thread")

    stage.recorder._spawn = no_thread
    stage.recorder(lost())
    assert stage.seen[0] == ev.AwsTrouble("recording lost records", "can't start new thread")


def test_a_sink_that_fails_does_not_end_the_recorder(stage, caplog):
    def fail(event):
        if event == ev.AwsTrouble("recording lost records", "slow down"):
            raise OSError("full")

    stage.recorder._events = fail
    stage.error = ThrottledError("slow down", operation="UpdateItem")
    stage.recorder(lost())
    assert "cannot report" in caplog.text
    stage.error = None
    stage.recorder(lost())
    assert stage.shards() == ["s-1"]


def test_the_worker_does_not_wait_for_the_table():
    stage, answer = Stage(), threading.Event()
    table = stage.table.view(before_call=lambda *_: answer.wait(30) and None)
    recorder = LossRecorder(stage.seen.append, table, stage.clock)
    recorder(lost(1))
    recorder(lost(2))
    assert stage.seen == [lost(1), lost(2)]
    (thread,) = [t for t in threading.enumerate() if t.name == "records-lost"]
    assert not thread.daemon, "a process that ends waits for the write"
    answer.set()
    end = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
    assert stage.shards() == ["s-1", "s-2"]


def test_a_sink_is_wrapped_once(stage):
    assert recording_losses(stage.recorder, stage.table, stage.clock) is stage.recorder
    assert isinstance(recording_losses(print, stage.table, stage.clock), LossRecorder)

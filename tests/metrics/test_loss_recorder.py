"""Losses are recorded outside the worker: never raising, never waiting, retried."""

from __future__ import annotations

import threading
import time

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.metrics import loss_recorder
from kcl_pipeline.metrics.loss_recorder import LossRecorder, recording_losses
from kcl_pipeline.position import Position
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from tests.support.dagster_fakes import ManualClock

OTHER = ev.LeaseGained("w-1", "s-1", 1)
TROUBLE = ev.AwsTrouble("recording lost records", "slow down")
THROTTLED = ThrottledError("slow down", operation="UpdateItem")


def lost(number: int = 1) -> ev.RecordsLost:
    return ev.RecordsLost("w-1", f"s-{number}", ev.LossReason.ROW_DELETED, Position("7"))


class Stage:
    """A recorder whose thread runs at once, and a table that can be throttled."""

    def __init__(self) -> None:
        self.clock, self.events = ManualClock(), []
        self.error: Exception | None = None
        self.lost_answers = 0
        self.calls: list[str] = []
        self.table = InMemoryCoordinatorStateTable(before_call=self.before, after_call=self.after)
        ensure_client_version(self.table, "w-1", self.clock)
        self.calls.clear()
        self.recorder = LossRecorder(
            self.events.append, self.table, self.clock, lambda _name, target: target()
        )

    def before(self, operation: str, *_: object) -> None:
        self.calls.append(operation)
        if self.error is not None:
            raise self.error

    def after(self, operation: str, *_: object) -> None:
        if operation == "UpdateItem" and self.lost_answers:
            self.lost_answers -= 1
            raise THROTTLED

    def recorded(self) -> tuple[int, str | None]:
        """The number of losses, and the shard of the last one."""
        losses = self.table.read_losses()
        return losses.count, losses.last and losses.last.shard


@pytest.fixture(name="stage")
def stage_fixture():
    return Stage()


def test_a_loss_is_recorded_and_passed_on(stage):
    stage.recorder(OTHER)
    assert stage.calls == []
    stage.recorder(lost())
    assert stage.calls == ["GetItem", "UpdateItem"]
    stage.recorder(lost())
    assert stage.recorded() == (1, "s-1")
    assert stage.events == [OTHER, lost(), lost()]


def test_a_restore_of_the_table_is_recorded_once(stage):
    restored = ev.TableRestored(58, "version 12", "t-1")
    for _ in range(2):
        stage.recorder(restored)
    assert stage.recorded() == (1, "version 58 of the table t-1")
    assert stage.events == [restored] * 2


def test_a_failed_write_is_reported_and_repeated_at_the_next_loss(stage):
    stage.error = THROTTLED
    stage.recorder(lost(1))
    assert stage.events == [TROUBLE, lost(1)]
    stage.error = None
    stage.recorder(lost(2))
    assert stage.recorded() == (2, "s-2")


def test_losses_that_are_reported_again_while_they_wait_count_once(stage):
    stage.error = THROTTLED
    for number in (1, 2, 1, 2):
        stage.recorder(lost(number))
    stage.error = None
    stage.recorder(ev.WorkerStopped("w-1", "stopped"))
    assert stage.recorded() == (2, "s-2"), "a worker that stops writes at once"


def test_losses_whose_write_was_applied_without_an_answer_count_once(stage):
    stage.error = THROTTLED
    for number in (1, 2):
        stage.recorder(lost(number))
    stage.error, stage.lost_answers = None, 2
    for number in (3, 4, 5):
        stage.recorder(lost(number))
    assert stage.recorded() == (5, "s-5")


def test_without_a_further_loss_a_later_event_repeats_the_write(stage):
    stage.error = THROTTLED
    stage.recorder(lost())
    stage.error = None
    stage.recorder(OTHER)
    assert stage.recorded() == (0, None)
    stage.clock.advance(loss_recorder.RETRY_SECONDS)
    stage.recorder(OTHER)
    assert stage.recorded() == (1, "s-1")


def test_no_error_reaches_the_worker(stage):
    stage.error = ValueError("anything")
    stage.recorder(lost(1))
    assert stage.events == [ev.AwsTrouble("recording lost records", "anything"), lost(1)]


def test_a_process_without_threads_reports_it(stage):
    def no_thread(_name, _target):
        raise RuntimeError("slow down")

    LossRecorder(stage.events.append, stage.table, stage.clock, no_thread)(lost())
    assert stage.events == [TROUBLE, lost()]


def test_the_worker_does_not_wait_for_the_table(stage):
    answer = threading.Event()
    table = stage.table.view(before_call=lambda *_: answer.wait(30) and None)
    recorder = LossRecorder(stage.events.append, table, stage.clock)
    recorder(lost(1))
    recorder(lost(2))
    assert stage.events == [lost(1), lost(2)]
    (thread,) = [t for t in threading.enumerate() if t.name == "records-lost"]
    assert not thread.daemon, "a process that ends waits for the write"
    answer.set()
    end = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
    assert stage.recorded() == (2, "s-2")


def test_a_sink_is_wrapped_once(stage):
    assert recording_losses(stage.recorder, stage.table, stage.clock) is stage.recorder
    assert isinstance(recording_losses(print, stage.table, stage.clock), LossRecorder)

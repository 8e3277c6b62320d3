"""The body of the output asset: one KCL worker for as long as the run lasts.

Signals only set a flag: an interrupt that is raised inside a Spark call ruins the session, and with it the clean end. A run that is terminated from
Dagster's page, SIGTERM and Ctrl-C therefore all finish or abandon the batch, checkpoint, release the leases and then end the run.
"""

import _thread
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import dagster as dg

from kcl_pipeline.assets import health
from kcl_pipeline.assets.contract import DagsterOptions, Mode, PipelineLike
from kcl_pipeline.assets.figures import ADDITIVE, final_metadata, period_metadata, table_rows
from kcl_pipeline.assets.names import APPLICATION_TAG, LAG_TAG, MODE_TAG, WORKER_TAG, worker_id_of
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.events import Event, EventSink
from kcl_pipeline.metrics.exporters import LoggingEvents, level_of, text_of
from kcl_pipeline.sensors.runs import active_runs, worst_lag_millis
from kcl_pipeline.worker.summary import StopReason, WorkerProgress, WorkerSummary

ORPHAN_POLL_SECONDS: Final = 1.0
CONTINUOUS_LEADER_PATIENCE_SECONDS: Final = 20.0
"""A continuous worker lets the sensor, whose ticks come every five seconds, lead first."""
SLOW_COUNT_SECONDS: Final = 0.5
_KEPT_EVENTS: Final = 50

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Interrupts:
    """Whether a signal has asked this process to stop."""

    stop: StopSignal
    received: bool = False
    _handler_installers: list[Callable[[], None]] = field(default_factory=list)

    def reinstall(self) -> None:
        """Put the handlers back after a library (pyspark, when it makes its context) replaced them."""
        for install in self._handler_installers:
            install()


@contextmanager
def deferred_interrupts(stop: StopSignal) -> Iterator[Interrupts]:
    """Until the end of the block SIGINT and SIGTERM only set `stop`. Does nothing outside the main thread, where no handler can be set."""
    interrupts = Interrupts(stop)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupts.received = True
        # The handler may have interrupted `stop` while it holds its own lock, so another thread has to set it.
        _thread.start_new_thread(stop.set, ())

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def install() -> None:
        for number in before:
            signal.signal(number, handle)

    interrupts._handler_installers.append(install)  # noqa: SLF001 (this is its only maker)
    install()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def orphan_guard(stop: StopSignal, clock: Clock, *, enabled: bool) -> Iterator[None]:
    """Sets `stop` when the parent process is gone: with Dagster's multiprocess executor a killed run leaves its step behind, consuming."""
    if not enabled or multiprocessing.parent_process() is None:
        yield
        return
    parent = os.getppid()
    over = clock.signal()

    def watch() -> None:
        while not over.wait(ORPHAN_POLL_SECONDS):
            if os.getppid() != parent:
                _log.warning("the run's process is gone; this worker stops")
                stop.set()
                return

    thread = threading.Thread(target=watch, name="orphan-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5 * ORPHAN_POLL_SECONDS)


@dataclass(slots=True)
class RunEvents:
    """Takes the worker's events from any thread at once, and gives them to the run's log once per period: writing that log may take a second."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    dropped: int = 0
    process_log: EventSink = field(default_factory=LoggingEvents)

    def __call__(self, event: Event) -> None:
        """Keep what is rare; batches are told by the figures."""
        self.process_log(event)
        if level_of(event) < logging.INFO:
            return
        if len(self.lines) == _KEPT_EVENTS:
            self.dropped += 1
        self.lines.append(text_of(event))

    def drain(self) -> str | None:
        """The lines since the last call as one text; None when there are none."""
        taken = [self.lines.popleft() for _ in range(len(self.lines))]
        dropped, self.dropped = self.dropped, 0
        if dropped:
            taken.insert(0, f"({dropped} earlier events are in the process's own log)")
        return "\n".join(taken) or None


class RunReporter:
    """Tells Dagster once per period how one worker is doing. Never raises: reporting must not stop consuming."""

    def __init__(
        self, context: dg.AssetExecutionContext, events: RunEvents, stop: StopSignal, clock: Clock, pipeline: PipelineLike, lag_threshold_seconds: float
    ) -> None:
        self._context = context
        self._events = events
        self._stop = stop
        self._clock = clock
        self._pipeline = pipeline
        self._lag_threshold_seconds = lag_threshold_seconds
        self._count_seconds = 0.0
        self.last: WorkerProgress | None = None
        self.reported = dict.fromkeys(ADDITIVE, 0)

    def __call__(self, progress: WorkerProgress) -> None:
        """One materialization with the period's figures, the events as one log entry, the lag as a tag for the leader sensor."""
        self.last = progress
        for name in self.reported:
            self.reported[name] += getattr(progress, name)
        try:
            self.flush_events()
            self._context.log_event(dg.AssetMaterialization(self._context.asset_key, metadata=period_metadata(progress) | self.row_count()))
            run_id = self._context.run.run_id
            if progress.lag_millis is not None:
                self._context.instance.add_run_tags(run_id, {LAG_TAG: str(progress.lag_millis)})
                self.check_lag(progress.lag_millis)
            run = self._context.instance.get_run_by_id(run_id)
            if run is not None and run.is_finished:
                _log.warning("run %s was closed from outside; this worker stops", run_id)
                self._stop.set()
        except Exception:  # noqa: BLE001 (whatever Dagster's storage raises, consuming goes on)
            _log.exception("this period's report did not reach Dagster")

    def nothing_behind(self) -> None:
        """After a drain: what was there when it began is in the table. The check that follows in the same run asks for this."""
        try:
            self._context.instance.add_run_tags(self._context.run.run_id, {LAG_TAG: "0"})
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("the lag after the drain did not reach Dagster")

    def check_lag(self, own_lag_millis: int) -> None:
        """The check beside the materialization: Dagster's page takes an evaluation that is not of the last materialization for none.

        Outside the run, like the sensor's: within a run Dagster keeps one row per check, which would count as older than any of the sensor's.
        """
        instance, key = self._context.instance, self._context.asset_key
        others = active_runs(instance, self._pipeline.name, self._pipeline.settings.worker.worker_group_separator)
        worst = max(own_lag_millis, worst_lag_millis(others) or 0)
        last = instance.fetch_materializations(key, limit=1).records
        evaluation = health.lag(worst, self._lag_threshold_seconds).evaluation(key, of=last[0] if last else None)
        instance.report_runless_asset_event(evaluation)

    def row_count(self) -> dict[str, int]:
        """The table's rows, as Dagster's page shows them; left out of a running worker's reports once counting takes longer than is good for its batches."""
        if self._count_seconds > SLOW_COUNT_SECONDS:
            return {}
        began = self._clock.monotonic()
        rows = table_rows(self._pipeline.sink)
        self._count_seconds = self._clock.monotonic() - began
        return {} if rows is None else {"dagster/row_count": rows}

    def flush_events(self) -> None:
        """Write the events so far as one entry of the run's log."""
        text = self._events.drain()
        if text:
            self._context.log.info(text)


def in_run_process(context: dg.AssetExecutionContext) -> bool:
    """Whether the step runs in the run's own process (in-process executor), so that it cannot outlive it."""
    return context.op_execution_context.job_def.executor_def.name in ("in_process", "execute_in_process")


def consume_shards(
    context: dg.AssetExecutionContext, pipeline: PipelineLike, options: DagsterOptions, mode: Mode, *, spark: Any, clients: Any
) -> dg.MaterializeResult[None]:
    """Run one worker. Drained (also on request of the leader): returns. Stopped by a signal: raises, and the run ends CANCELED.

    `spark` gives the session by `session()`; `clients` are the `aws.AwsClients`. Errors of the worker are raised as they are, after it has released everything.
    """
    clock = SystemClock()
    run_id = context.run.run_id
    worker_id = worker_id_of(pipeline.name, run_id, pipeline.settings.worker.worker_group_separator)
    context.instance.add_run_tags(run_id, {APPLICATION_TAG: pipeline.name, MODE_TAG: mode, WORKER_TAG: worker_id})
    stop = clock.signal()
    events = RunEvents()
    reporter = RunReporter(context, events, stop, clock, pipeline, options.lag_threshold_seconds)
    with deferred_interrupts(stop) as interrupts, orphan_guard(stop, clock, enabled=not in_run_process(context)):

        def make_session() -> Any:
            session = spark.session()
            interrupts.reinstall()
            return session

        worker = pipeline.build_worker(
            worker_id,
            session_factory=make_session,
            clients=clients,
            clock=clock,
            events=events,
            run_id=run_id,
            leads=True,
            leader_patience_seconds=CONTINUOUS_LEADER_PATIENCE_SECONDS if mode == "continuous" else 0.0,
        )
        context.log.info("worker %s of %s starts, mode %s", worker_id, pipeline.name, mode)
        try:
            summary = worker.run(stop, mode=mode, on_progress=reporter, progress_seconds=options.progress_seconds)
        finally:
            reporter.flush_events()
        return _end(context, summary, reporter, interrupted=interrupts.received)


def _end(context: dg.AssetExecutionContext, summary: WorkerSummary, reporter: RunReporter, *, interrupted: bool) -> dg.MaterializeResult[None]:
    total = summary.total
    context.log.info("worker %s has stopped (%s) after %d records in %d batches", total.worker_id, summary.reason, total.records, total.batches)
    metadata = final_metadata(summary, reporter.reported, reporter.last) | reporter.row_count()
    if summary.reason is StopReason.DRAINED:
        reporter.nothing_behind()
    if summary.reason in (StopReason.DRAINED, StopReason.DRAIN_REQUESTED):
        return dg.MaterializeResult(metadata=metadata)
    context.log_event(dg.AssetMaterialization(context.asset_key, metadata=metadata))
    if summary.reason is StopReason.STOPPED and interrupted:
        raise dg.DagsterExecutionInterruptedError("the worker was asked to stop and has released its leases")
    if summary.reason is StopReason.STOPPED:
        raise dg.Failure("the worker stopped because its run had been closed, or the run's process was gone", allow_retries=False)
    raise dg.Failure(f"the worker failed: {summary.error}", allow_retries=False)

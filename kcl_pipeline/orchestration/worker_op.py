"""Run a worker in a Dagster op.

In reading order: reports of a running worker, the body of the op, and the output asset and the job
that have it.
"""

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import ApplicationPausedError
from kcl_pipeline.events import Event, EventSink, WorkerHung
from kcl_pipeline.metrics.exporters import LoggingEvents, fan_out, level_of, text_of
from kcl_pipeline.metrics.repeats import RepeatFilter
from kcl_pipeline.orchestration.checks import last_checks
from kcl_pipeline.orchestration.names import (
    APPLICATION_TAG,
    CONTINUOUS,
    DRAIN,
    DRAINED_TAG,
    HANDED_OVER_TAG,
    LANDED_TAG,
    MODE_TAG,
    READ_TAG,
    REPLACES_TAG,
    VERSION_TAG,
    Names,
    PipelineResources,
    worker_id_of,
)
from kcl_pipeline.orchestration.options import DagsterOptions, Mode, PipelineLike
from kcl_pipeline.orchestration.runs import final_metadata, last_figures, period_text
from kcl_pipeline.orchestration.specs import OutputTable, column_lineage
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.text import counted
from kcl_pipeline.threads import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import UNFINISHED_DRAINS, StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals

# Report a running worker to Dagster: its events, and when a drain has ended.
#
# A worker materializes the output once, at its end. While workers run, the leader sensor reports
# the output of the whole fleet, so that the plots of the asset are one series.

_KEPT_EVENTS: Final = 50

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunEvents:
    """Collect the worker's events, for one log entry per period.

    Thread-safe. Callers do not wait for the run's log, where a write may take a second.

    Attributes:
        lines: The newest events, one line each.
        dropped: How many older events did not fit.
        process_log: Receives every event at once.
    """

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    dropped: int = 0
    process_log: EventSink = field(default_factory=LoggingEvents)
    repeats: RepeatFilter = field(default_factory=RepeatFilter)

    def __call__(self, told: Event) -> None:
        """Log the event, and keep it unless its level is below INFO (as for each batch), or the
        same error was kept less than a minute ago.
        """
        self.process_log(told)
        event = self.repeats(told)
        if event is None or level_of(event) < logging.INFO:
            return
        if len(self.lines) == _KEPT_EVENTS:
            self.dropped += 1
        self.lines.append(text_of(event))

    def drain(self) -> str | None:
        """The lines since the last call as one string; None without lines."""
        taken = [self.lines.popleft() for _ in range(len(self.lines))]
        dropped, self.dropped = self.dropped, 0
        if dropped:
            taken.insert(0, f"({dropped} earlier events are only in the log of the process)")
        return "\n".join(taken) or None


def hang_log(context: dg.OpExecutionContext) -> EventSink:
    """Return an event sink that writes the stacks of a hung worker to the log of the run.

    Each entry has a thread of its own: a write to Dagster's storage may take a second, an event
    sink must not wait, and the thread that writes the other events is the one that hangs.
    """

    def log(event: Event) -> None:
        if isinstance(event, WorkerHung):
            texts = ("%s\n%s", text_of(event), event.stacks)
            thread = threading.Thread(target=context.log.error, args=texts, daemon=True)
            thread.start()

    return log


class RunReporter:
    """Report the progress of one worker to Dagster once per period.

    It never raises: a failed report must not stop the worker.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        events: RunEvents,
        stop: StopSignal,
        clock: Clock,
        pipeline: PipelineLike,
        *,
        continuous: bool = False,
    ) -> None:
        self._context = context
        self._events = events
        self._stop = stop
        self._clock = clock
        self._pipeline = pipeline
        self._continuous = continuous
        self.last: WorkerStatus | None = None

    def __call__(self, progress: WorkerStatus) -> None:
        """Report one period.

        Writes one log entry with the period's events. A drain, which no sensor reports, also logs
        its counters.
        """
        self.last = progress
        try:
            self.flush_events()
            if not self._continuous:
                self._context.log.info(period_text(progress))
            run_id = self._context.run.run_id
            run = self._context.instance.get_run_by_id(run_id)
            if run is not None and run.is_finished:
                _log.warning("stopping the worker: its run %s was closed in Dagster", run_id)
                self._stop.set()
        except Exception:  # noqa: BLE001 (an error of Dagster's storage must not stop the worker)
            _log.exception("cannot report this period to Dagster")

    def report_totals(self, total: WorkerTotals) -> None:
        """Tag the run with what its worker read, landed and handed over."""
        landed = f"{counted(total.rows, 'row')} in {counted(total.batches, 'batch', 'batches')}"
        if total.dead_letters:
            landed += f", {counted(total.dead_letters, 'dead letter')}"
        tags = {
            READ_TAG: counted(total.records, "record"),
            LANDED_TAG: landed,
            HANDED_OVER_TAG: counted(total.handoffs, "shard"),
        }
        try:
            self._context.instance.add_run_tags(self._context.run.run_id, tags)
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("cannot tag the run with its totals in Dagster")

    def report_drained(self, *, is_alone: bool) -> None:
        """Tag the run of a drain with its time.

        All records that existed when the drain started are in the table, if no other worker holds
        shards (`is_alone`). The lag reads this tag for leases without a worker.
        """
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        tags = {DRAINED_TAG: now.isoformat(timespec="seconds")} if is_alone else {}
        try:
            self._context.instance.add_run_tags(self._context.run.run_id, tags)
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("cannot tag the run of the drain in Dagster")

    def dead_letter_table(self, dead_letters: int) -> dict[str, dg.MetadataValue]:
        """Return the address of the dead-letter table for a materialization with dead letters."""
        uri = dead_letter_address(self._pipeline.sink)
        if not dead_letters or uri is None:
            return {}
        return {"dead_letter_table": dg.MetadataValue.path(uri)}

    def flush_events(self) -> None:
        """Write the collected events as one entry of the run's log."""
        text = self._events.drain()
        if text:
            self._context.log.info(text)


# Run one KCL worker for as long as a Dagster run lasts: the body of the op and of the asset.
#
# Signal handlers only set a flag, because an interrupt that is raised inside a Spark call breaks
# the session, and the worker could not stop cleanly. A termination from the Dagster UI, SIGTERM
# and Ctrl-C all have the same effect: the worker finishes or abandons its batch, checkpoints,
# releases its leases, and the run ends. Only a terminated run is Canceled; another planned end is
# a success.

ORPHAN_POLL_SECONDS: Final = 1.0
CONTINUOUS_LEADER_PATIENCE_SECONDS: Final = 20.0
"""A continuous worker waits this long before it leads, so that the sensor can take the lock."""

_TERMINATED: Final = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


@contextmanager
def stop_when_orphaned(stop: StopSignal, clock: Clock, *, enabled: bool) -> Iterator[None]:
    """Set `stop` when the parent process has ended.

    With Dagster's multiprocess executor, the step of a killed run keeps running otherwise.
    """
    if not enabled or multiprocessing.parent_process() is None:
        yield
        return
    parent = os.getppid()
    finished = clock.signal()

    def watch() -> None:
        while not finished.wait(ORPHAN_POLL_SECONDS):
            if os.getppid() != parent:
                _log.warning("stopping the worker: the process of its run has ended")
                stop.set()
                return

    thread = threading.Thread(target=watch, name="orphan-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(5 * ORPHAN_POLL_SECONDS)


def in_run_process(context: dg.OpExecutionContext) -> bool:
    """Whether the step runs in the process of the run (in-process executor).

    Such a step cannot outlive its run.
    """
    return context.job_def.executor_def.name in ("in_process", "execute_in_process")


def run_worker(
    context: dg.OpExecutionContext,
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
    mode: Mode,
    *,
    version: str | None = None,
) -> dict[str, Any] | None:
    """Run one worker until it is drained or stopped.

    A drain whose run succeeds leaves the report of what it committed to the caller.

    Args:
        context: The run's context.
        pipeline: The application.
        names: Names the output.
        options: Reporting intervals and thresholds.
        mode: `drain` or `continuous`.
        version: The version of the code. None: not known.

    Returns:
        The metadata of the materialization that the caller reports. None: there is none to report.

    Raises:
        dagster.DagsterExecutionInterruptedError: The run was terminated, and ends as CANCELED.
        dagster.Failure: The worker hung, or was asked to end while it had a paused shard. The run
            was closed, or its process has ended. A signal or a pause kept a drain from its end.
        Exception: Errors of the worker, after it has released its leases.
    """
    clock, resources = SystemClock(), PipelineResources(names, context)
    run_id = context.run.run_id
    worker_id = worker_id_of(pipeline.name, run_id, pipeline.settings.worker.worker_group_separator)
    tags = {APPLICATION_TAG: pipeline.name, MODE_TAG: mode}
    if version is not None:  # that of the code which this process has loaded
        tags[VERSION_TAG] = version
    context.instance.add_run_tags(run_id, tags)
    stop = clock.signal()
    events = RunEvents()
    period, is_continuous = options.progress_seconds, mode == CONTINUOUS
    reporter = RunReporter(context, events, stop, clock, pipeline, continuous=is_continuous)
    with (
        stop_on_signals(stop) as signals,
        stop_when_orphaned(stop, clock, enabled=not in_run_process(context)),
    ):
        try:
            worker = pipeline.build_worker(
                worker_id,
                session_factory=resources.session_factory(signals),
                clients=resources.aws.clients(pipeline.settings),
                clock=clock,
                events=fan_out(events, hang_log(context)),
                stop=stop,
                run_id=run_id,
                replaces=context.run.tags.get(REPLACES_TAG) if is_continuous else None,
                leads=True,
                leader_patience_seconds=CONTINUOUS_LEADER_PATIENCE_SECONDS
                if is_continuous
                else 0.0,
            )
            context.log.info("starting worker %s of %s in mode %s", worker_id, pipeline.name, mode)
            summary = worker.run(stop, mode=mode, on_progress=reporter, progress_seconds=period)
        except StoppedWhileRetryingError as error:
            stopped = _stopped(context, mode, interrupted=signals.received)
            if stopped is None:
                return None
            raise stopped from error
        except ApplicationPausedError as error:
            _not_started(context, error, mode)
            return None
        finally:
            reporter.flush_events()
        return _end(context, pipeline, names, summary, reporter, mode, interrupted=signals.received)


def _not_started(context: dg.OpExecutionContext, error: ApplicationPausedError, mode: Mode) -> None:
    """End a run that the sensor started at the moment of a pause; fail a drain."""
    if mode != CONTINUOUS:
        raise dg.Failure(str(error), allow_retries=False) from error
    context.log.warning("%s", error)


def _stopped(
    context: dg.OpExecutionContext, mode: Mode, *, interrupted: bool
) -> BaseException | None:
    """The error that ends the run of a worker that was stopped and has released its leases.

    None: a signal that is not a termination stopped a continuous worker, such as the end of
    `dagster dev` or of a container. That is a planned end.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status in _TERMINATED:
        return dg.DagsterExecutionInterruptedError("the run was terminated; its leases are free")
    if interrupted and mode == CONTINUOUS:
        return None
    text = "the worker stopped because its run was closed in Dagster, or the run's process ended"
    if interrupted:
        text = "a signal stopped the worker before all records were read; its leases are free"
    return dg.Failure(text, allow_retries=False)


def _end(
    context: dg.OpExecutionContext,
    pipeline: PipelineLike,
    names: Names,
    summary: WorkerSummary,
    reporter: RunReporter,
    mode: Mode,
    *,
    interrupted: bool,
) -> dict[str, Any] | None:
    total = summary.total
    context.log.info(
        "worker %s stopped (%s) after %s in %s",
        summary.worker_id,
        summary.reason,
        counted(total.records, "record"),
        counted(total.batches, "batch", "batches"),
    )
    reporter.report_totals(total)
    if summary.elsewhere_sentence is not None:
        context.log.info(summary.elsewhere_sentence)
    if summary.reason is StopReason.DRAINED:
        reporter.report_drained(is_alone=not summary.elsewhere)
    metadata = (
        final_metadata(summary, reporter.last, sensor_counts=mode == CONTINUOUS)
        | reporter.dead_letter_table(total.dead_letters)
        | OutputTable(pipeline.sink, SystemClock(), column_lineage(pipeline, names)).metadata()
    )
    failure = _failure(context, summary, mode, interrupted=interrupted)
    if not total.batches:
        # Downstream assets have nothing to do.
        context.log_event(dg.AssetObservation(names.output, metadata=metadata))
    elif failure is not None or mode == CONTINUOUS:
        if mode == CONTINUOUS:
            metadata = last_figures(context.instance, names.output) | metadata
        context.log_event(dg.AssetMaterialization(names.output, metadata=metadata))
    if total.batches:
        for check in last_checks(context.instance, names.output):
            # Its annotation does not name checks, which it logs, too.
            context.log_event(check)  # type: ignore[arg-type]
    if failure is not None:
        raise failure
    return metadata if total.batches and mode == DRAIN else None


def _failure(
    context: dg.OpExecutionContext, summary: WorkerSummary, mode: Mode, *, interrupted: bool
) -> BaseException | None:
    """The error that ends the run. None: the worker ended as planned."""
    reason = summary.reason
    if reason is StopReason.STOPPED:
        return _stopped(context, mode, interrupted=interrupted)
    if mode != CONTINUOUS and reason in UNFINISHED_DRAINS:
        return dg.Failure(UNFINISHED_DRAINS[reason], allow_retries=False)
    if reason is StopReason.DRAIN_REQUESTED:
        if not summary.status.paused:
            return None
        first = min(summary.status.paused, key=lambda pause: pause.lease_key)
        text = f"the worker was asked to end, and {first.lease_key} was paused: {first.reason}"
        return dg.Failure(text, allow_retries=False)
    if reason in {StopReason.DRAINED, StopReason.APPLICATION_PAUSED}:
        return None
    return dg.Failure(f"the worker failed: {summary.error}", allow_retries=False)


# Define the output asset and the job of the workers.
#
# Materializing the asset reads what is there now. A run of the job is one continuous worker.


def build_output_asset(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, spec: dg.AssetSpec
) -> dg.AssetsDefinition:
    """The table. Its computation is one KCL worker that drains the streams."""

    @dg.multi_asset(
        name=names.output.to_python_identifier(),
        specs=[spec],
        required_resource_keys=names.sessions,
    )
    def drain(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        landed = run_worker(context.op_execution_context, pipeline, names, options, DRAIN)
        # A generator, because a returned value is always a materialization.
        if landed is not None:
            yield dg.MaterializeResult(metadata=landed)

    return drain


def build_consume_job(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, version: str | None
) -> dg.JobDefinition:
    """The job that the leader sensor starts: one continuous worker.

    A plain op job, not a job of the output asset. As long as a run targets an asset, Dagster holds
    the asset to be in progress, and `AutomationCondition.eager()` of the assets downstream waits.

    The worker runs in the process of the run, so that it cannot outlive a killed run.
    """

    @dg.op(
        name=f"{names.prefix}_worker",
        required_resource_keys=names.sessions,
        pool=names.pool,
        description=f"One worker of `{names.application}`. It consumes until another worker has "
        "taken its leases, the run is terminated, or the application is paused.",
    )
    def work(context: dg.OpExecutionContext) -> None:
        run_worker(context, pipeline, names, options, CONTINUOUS, version=version)

    @dg.job(
        name=names.consume_job,
        executor_def=dg.in_process_executor,
        tags=names.worker_run_tags,
        description=f"One continuous worker of {names.application}. A manual run adds one "
        "worker. A terminated run releases its leases.",
    )
    def consume() -> None:
        work()

    return consume

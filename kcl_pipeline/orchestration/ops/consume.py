"""Run one KCL worker for as long as a Dagster run lasts: the body of the op and of the asset.

Signal handlers only set a flag, because an interrupt that is raised inside a Spark call breaks the
session, and the worker could not stop cleanly. A termination from the Dagster UI, SIGTERM and
Ctrl-C all have the same effect: the worker finishes or abandons its batch, checkpoints, releases
its leases, and the run ends. Only a terminated run is Canceled; another planned end is a success.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import dagster as dg

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import ApplicationPausedError
from kcl_pipeline.metrics.exporters import fan_out
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, Mode, PipelineLike
from kcl_pipeline.orchestration.assets.names import (
    APPLICATION_TAG,
    CONTINUOUS,
    MODE_TAG,
    REPLACES_TAG,
    VERSION_TAG,
    Names,
    worker_id_of,
)
from kcl_pipeline.orchestration.assets.runs.metadata import final_metadata
from kcl_pipeline.orchestration.assets.table import OutputTable, column_lineage
from kcl_pipeline.orchestration.ops.reporting import RunEvents, RunReporter, hang_log
from kcl_pipeline.orchestration.resources import SparkSource
from kcl_pipeline.orchestration.resources.spark import open_session
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.worker.retry import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary

ORPHAN_POLL_SECONDS: Final = 1.0
CONTINUOUS_LEADER_PATIENCE_SECONDS: Final = 20.0
"""A continuous worker waits this long before it leads, so that the sensor can take the lock."""

_TERMINATED: Final = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
_log = logging.getLogger(__name__)


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
    spark: SparkSource,
    clients: AwsClients,
    version: str | None = None,
) -> dict[str, Any] | None:
    """Run one worker until it is drained or stopped.

    A worker that has committed nothing, and one whose run fails or is canceled, reports its end to
    the output by itself.

    Args:
        context: The run's context.
        pipeline: The application.
        names: Names the output.
        options: Reporting intervals and thresholds.
        mode: `drain` or `continuous`.
        spark: The resource with the Spark session.
        clients: The boto3 clients.
        version: The version of the code. None: not known.

    Returns:
        The metadata of the materialization that the caller reports. None: there is none to report.

    Raises:
        dagster.DagsterExecutionInterruptedError: The run was terminated, and ends as CANCELED.
        dagster.Failure: The worker hung, or was asked to end while it had a paused shard. The run
            was closed, or its process has ended. A signal or a pause kept a drain from its end.
        Exception: Errors of the worker, after it has released its leases.
    """
    clock = SystemClock()
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
                session_factory=signals.reinstalled_after(lambda: open_session(spark)),
                clients=clients,
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
        "worker %s stopped (%s) after %d records in %d batches",
        total.worker_id,
        summary.reason,
        total.records,
        total.batches,
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
    elif failure is not None:
        context.log_event(dg.AssetMaterialization(names.output, metadata=metadata))
    if failure is not None:
        raise failure
    return metadata if total.batches else None


def _failure(
    context: dg.OpExecutionContext, summary: WorkerSummary, mode: Mode, *, interrupted: bool
) -> BaseException | None:
    """The error that ends the run. None: the worker ended as planned."""
    reason = summary.reason
    if reason is StopReason.DRAIN_REQUESTED:
        if not summary.total.paused:
            return None
        key, why = next(iter(sorted(summary.total.paused.items())))
        text = f"the worker was asked to end, and {key} was paused: {why}"
        return dg.Failure(text, allow_retries=False)
    if reason is StopReason.DRAINED:
        return None
    if reason is StopReason.STOPPED:
        return _stopped(context, mode, interrupted=interrupted)
    if reason is StopReason.APPLICATION_PAUSED:
        if mode == CONTINUOUS:
            return None
        return dg.Failure(
            "the application was paused before all records were read", allow_retries=False
        )
    return dg.Failure(f"the worker failed: {summary.error}", allow_retries=False)

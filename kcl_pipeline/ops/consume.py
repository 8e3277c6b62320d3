"""The body of the output asset: one KCL worker for as long as the run lasts.

Signals only set a flag: an interrupt that is raised inside a Spark call ruins the session, and with
it the clean end. A run that is terminated from the Dagster UI, SIGTERM and Ctrl-C therefore all
finish or abandon the batch, checkpoint, release the leases and then end the run.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import dagster as dg

from kcl_pipeline.assets.contract import DagsterOptions, Mode, PipelineLike
from kcl_pipeline.assets.names import (
    APPLICATION_TAG,
    MODE_TAG,
    WORKER_TAG,
    worker_id_of,
)
from kcl_pipeline.assets.run_metadata import final_metadata
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.ops.reporting import RunEvents, RunReporter
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.worker.retry import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary

ORPHAN_POLL_SECONDS: Final = 1.0
CONTINUOUS_LEADER_PATIENCE_SECONDS: Final = 20.0
"""A continuous worker lets the sensor, whose ticks come every five seconds, lead first."""

_log = logging.getLogger(__name__)


@contextmanager
def orphan_guard(stop: StopSignal, clock: Clock, *, enabled: bool) -> Iterator[None]:
    """Sets `stop` when the parent process is gone: with Dagster's multiprocess executor a killed
    run leaves its step behind, consuming.
    """
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


def in_run_process(context: dg.AssetExecutionContext) -> bool:
    """Whether the step runs in the run's own process (in-process executor), so that it cannot
    outlive it.
    """
    return context.op_execution_context.job_def.executor_def.name in (
        "in_process",
        "execute_in_process",
    )


def consume_shards(
    context: dg.AssetExecutionContext,
    pipeline: PipelineLike,
    options: DagsterOptions,
    mode: Mode,
    *,
    spark: Any,
    clients: Any,
) -> dg.MaterializeResult[None]:
    """Run one worker. Drained (also on request of the leader): returns. Stopped by a signal:
    raises, and the run ends CANCELED.

    `spark` gives the session by `session()`; `clients` are the `aws.AwsClients`. Errors of the
    worker are raised as they are, after it has released everything.
    """
    clock = SystemClock()
    run_id = context.run.run_id
    worker_id = worker_id_of(pipeline.name, run_id, pipeline.settings.worker.worker_group_separator)
    context.instance.add_run_tags(
        run_id, {APPLICATION_TAG: pipeline.name, MODE_TAG: mode, WORKER_TAG: worker_id}
    )
    stop = clock.signal()
    events = RunEvents()
    reporter = RunReporter(context, events, stop, clock, pipeline, options.lag_threshold_seconds)
    with (
        stop_on_signals(stop) as signals,
        orphan_guard(stop, clock, enabled=not in_run_process(context)),
    ):
        try:
            worker = pipeline.build_worker(
                worker_id,
                session_factory=signals.reinstalled_after(spark.session),
                clients=clients,
                clock=clock,
                events=events,
                stop=stop,
                run_id=run_id,
                leads=True,
                leader_patience_seconds=CONTINUOUS_LEADER_PATIENCE_SECONDS
                if mode == "continuous"
                else 0.0,
            )
            context.log.info("worker %s of %s starts, mode %s", worker_id, pipeline.name, mode)
            summary = worker.run(
                stop, mode=mode, on_progress=reporter, progress_seconds=options.progress_seconds
            )
        except StoppedWhileRetryingError as error:
            raise _stopped(interrupted=signals.received) from error
        finally:
            reporter.flush_events()
        return _end(context, summary, reporter, interrupted=signals.received)


def _stopped(*, interrupted: bool) -> BaseException:
    """The error that ends a run whose worker was stopped and has released everything."""
    if interrupted:
        return dg.DagsterExecutionInterruptedError(
            "the worker was asked to stop and has released its leases"
        )
    return dg.Failure(
        "the worker stopped because its run had been closed, or the run's process was gone",
        allow_retries=False,
    )


def _end(
    context: dg.AssetExecutionContext,
    summary: WorkerSummary,
    reporter: RunReporter,
    *,
    interrupted: bool,
) -> dg.MaterializeResult[None]:
    total = summary.total
    context.log.info(
        "worker %s has stopped (%s) after %d records in %d batches",
        total.worker_id,
        summary.reason,
        total.records,
        total.batches,
    )
    metadata = final_metadata(summary, reporter.reported, reporter.last) | reporter.row_count()
    if summary.reason is StopReason.DRAINED:
        reporter.nothing_behind()
    if summary.reason in (StopReason.DRAINED, StopReason.DRAIN_REQUESTED):
        return dg.MaterializeResult(metadata=metadata)
    context.log_event(dg.AssetMaterialization(context.asset_key, metadata=metadata))
    if summary.reason is StopReason.STOPPED:
        raise _stopped(interrupted=interrupted)
    raise dg.Failure(f"the worker failed: {summary.error}", allow_retries=False)

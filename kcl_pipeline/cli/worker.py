"""`kcl-pipeline worker`: run one worker without Dagster."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED, HUNG, ID_TAKEN, USELESS
from kcl_pipeline.cli.pipes import Report, reporting
from kcl_pipeline.cli.running import (
    processor_pipeline,
    progress_line,
    runnable,
    session,
    show_log,
)
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import (
    ApplicationPausedError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.metrics.exporters import LoggingEvents
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.text import counted
from kcl_pipeline.threads import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import UNFINISHED_DRAINS, StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus

if TYPE_CHECKING:
    from kcl_pipeline.pipeline import KinesisPipeline
    from kcl_pipeline.worker.worker import Worker

POLL_SECONDS: Final = 2.0


def worker(
    application: Application = None,
    streams: Streams = None,
    pipeline: Pipeline = None,
    *,
    processor: Annotated[
        str | None,
        typer.Option(
            help="module:class of a RecordProcessor, or a script of kclpy, with --application and "
            "--stream, instead of --pipeline.",
            show_default=False,
        ),
    ] = None,
    properties: Annotated[
        Path | None,
        typer.Option(
            help="Properties file of an application of kclpy. It names the application, its "
            "stream, its script and its settings.",
            show_default=False,
        ),
    ] = None,
    worker_id: Annotated[
        str | None,
        typer.Option(
            help="Name of this worker. Must be unique in the application. Use the same name after "
            "a restart to keep its leases.",
            show_default="host-pid",
        ),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="Read up to the current end of every shard, commit, and exit."
        ),
    ] = False,
    lead: Annotated[
        bool, typer.Option("--lead/--no-lead", help="Become leader if there is no other leader.")
    ] = True,
    leader_patience_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds to wait before taking an absent leader lock.")
    ] = 0.0,
    progress_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two lines with progress counters.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Run a worker until SIGTERM, Ctrl-C or `kcl-pipeline do drain`.

    It then finishes its batch, checkpoints, and releases its leases. While the application is
    paused, it waits without leases; with --drain it fails instead. With --json the last line of
    standard output is the summary.
    """
    show_log()
    if processor is None and properties is None:
        if streams:
            raise SettingsError("--stream names a stream of a processor; write --processor, too")
        found = runnable(application, pipeline)
    elif pipeline is not None:
        raise SettingsError("--pipeline has its own processor; remove --processor and --properties")
    else:
        found, of_file = processor_pipeline(application, streams, processor, properties)
        worker_id = worker_id or of_file
    name = worker_id or _own_name(found)
    clock = SystemClock()
    stop = clock.signal()
    with stop_on_signals(stop) as signals, reporting() as report:

        def build(run_id: str) -> Worker:

            return found.build_worker(
                name,
                session_factory=signals.reinstalled_after(lambda: session(found)),
                events=LoggingEvents(),
                clock=clock,
                stop=stop,
                run_id=run_id,
                leads=lead,
                leader_patience_seconds=leader_patience_seconds,
            )

        period = progress_seconds
        summary = _run(
            build, found, name, clock, stop, report, is_drain=drain, progress_seconds=period
        )
        if report is not None:
            outcome = as_dict(name, found.name, summary, is_drain=drain)
            report(f"worker {name} {summary.reason}", outcome)
    if as_json:
        show.print_json_line(as_dict(name, found.name, summary, is_drain=drain))
    _report(name, summary, is_drain=drain)


def _run(
    build: Callable[[str], Worker],
    pipeline: KinesisPipeline,
    name: str,
    clock: Clock,
    stop: StopSignal,
    report: Report | None,
    *,
    is_drain: bool,
    progress_seconds: float,
) -> WorkerSummary:
    """Build and run the worker, again after each pause unless it drains."""

    def on_progress(progress: WorkerStatus) -> None:
        line = f"{name}: {progress_line(progress)}"
        show.echo(line, err=True)
        if report is not None:
            report(line, None)

    def run_once() -> WorkerSummary:
        # A new run id: a drain request for an earlier run does not apply to this one. A container
        # that is started again has the same host name and process id.
        built = build(f"{socket.gethostname()}:{os.getpid()}@{uuid.uuid4().hex[:12]}")
        show.echo(f"worker {name} of {pipeline.name} started", err=True)
        return built.run(
            stop,
            mode="drain" if is_drain else "continuous",
            progress_seconds=progress_seconds,
            on_progress=on_progress,
        )

    try:
        return run_once() if is_drain else run_between_pauses(run_once, pipeline, clock, stop)
    except StoppedWhileRetryingError as error:
        return WorkerSummary(name, StopReason.STOPPED, WorkerStatus(), str(error))


def run_between_pauses(
    run_once: Callable[[], WorkerSummary], pipeline: KinesisPipeline, clock: Clock, stop: StopSignal
) -> WorkerSummary:
    """Run the worker, and run it again after each pause. Returns the summary of the last run.

    Args:
        run_once: Builds and runs the worker.
        pipeline: The pipeline of the worker.
        clock: The clock.
        stop: Ends the run or the wait.

    Raises:
        StoppedWhileRetryingError: `stop` was set during a pause before the first run.
        KclError: An error of the worker.
    """
    last: WorkerSummary | None = None
    while True:
        try:
            last = run_once()
        except ApplicationPausedError as error:
            show.echo(f"waiting: {error}", err=True)
        else:
            if last.reason is not StopReason.APPLICATION_PAUSED:
                return last
        if _is_resumed(pipeline, clock, stop):
            continue
        if last is None:
            raise StoppedWhileRetryingError("stopped while the application was paused")
        return last


def _is_resumed(pipeline: KinesisPipeline, clock: Clock, stop: StopSignal) -> bool:
    """Wait while the application is paused. False: a stop, or its tables were deleted."""
    from kcl_pipeline.aws import AwsClients, open_tables  # noqa: PLC0415 (AWS only here)

    table = open_tables(pipeline.settings, AwsClients(pipeline.settings), clock).coordinator
    shown: Pause | None = None
    while not stop.is_set():
        try:
            pause = table.read_control().pause
        except NotFoundError:  # another start would create them again
            show.echo("the tables of the application were deleted", err=True)
            return False
        except (ThrottledError, UnavailableError) as error:
            show.echo(f"the pause cannot be read: {error}", err=True)
            stop.wait(POLL_SECONDS)
            continue
        if pause is None:
            return True
        if pause != shown:
            show.echo(f"the worker has no leases and waits: {pause.sentence}", err=True)
            shown = pause
        stop.wait(POLL_SECONDS)
    return False


def _own_name(pipeline: KinesisPipeline) -> str:
    separator = pipeline.settings.worker.worker_group_separator
    return f"{socket.gethostname().replace(separator, '_')}{separator}{os.getpid()}"


def _report(name: str, summary: WorkerSummary, *, is_drain: bool = False) -> None:
    """Print how the worker ended.

    Exits with 1 when it failed, or a drain ended before it had read all records; with 3 when it
    was hung, with 4 when another process has taken its worker id, and with 5 when it was useless.
    """
    total = summary.total
    batches = counted(total.batches, "batch", "batches")
    result = f"{total.records:,} records in {batches}"
    if summary.reason is StopReason.STOPPED and summary.error is not None:
        result = summary.error  # it was stopped before it began
    show.echo(f"worker {name} {summary.reason}: {result}", err=True)
    if summary.elsewhere_sentence is not None:
        show.echo(summary.elsewhere_sentence, err=True)
    is_unfinished = is_drain and summary.reason in UNFINISHED_DRAINS
    if summary.reason is StopReason.FAILED or is_unfinished:
        show.echo(f"Error: {_error(summary, is_drain=is_drain)}", err=True)
        raise typer.Exit(FAILED)
    if summary.reason is StopReason.HUNG:
        show.echo(f"Error: {summary.error}", err=True)
        raise typer.Exit(HUNG)
    if summary.reason is StopReason.ID_TAKEN:
        show.echo(f"Error: {summary.error}", err=True)
        raise typer.Exit(ID_TAKEN)
    if summary.reason is StopReason.USELESS:
        show.echo(f"Error: {summary.error}", err=True)
        raise typer.Exit(USELESS)


def _error(summary: WorkerSummary, *, is_drain: bool) -> str | None:
    return (UNFINISHED_DRAINS.get(summary.reason) if is_drain else None) or summary.error


def as_dict(
    name: str, application: str, summary: WorkerSummary, *, is_drain: bool = False
) -> dict[str, object]:
    """How the worker ended, and the totals of its lifetime, for JSON output."""
    total = summary.total
    return {
        "worker_id": name,
        "application": application,
        "reason": str(summary.reason),
        "error": _error(summary, is_drain=is_drain),
        "seconds": round(total.seconds, 1),
        "records": total.records,
        "bytes": total.bytes,
        "rows_written": total.rows,
        "batches": total.batches,
        "dead_letters": total.dead_letters,
        "handoffs": total.handoffs,
        "table_version": summary.status.table_version,
        "elsewhere": dict(summary.elsewhere),
    }

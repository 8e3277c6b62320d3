"""Run a worker again and again, and wait while its application is paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kcl_pipeline.cli import show
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import (
    ApplicationPausedError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.worker.retry import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary

if TYPE_CHECKING:
    from kcl_pipeline.pipeline import KinesisPipeline

POLL_SECONDS: Final = 2.0


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
    from kcl_pipeline.aws import AwsClients, open_tables  # noqa: PLC0415 (as in the other commands)

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

"""`kcl-pipeline pause` and `kcl-pipeline resume`."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import operated, report
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.control import texts
from kcl_pipeline.control.pausing import WAIT_SECONDS, Pausing
from kcl_pipeline.text import counted


def pause(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Shown wherever the pause is shown.")
    ] = "",
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, help="Seconds to wait until no lease is held. 0: do not wait."
        ),
    ] = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Pause an application: its workers commit, release their leases and end.

    No lease is assigned and no worker starts until `kcl-pipeline resume`. Workers of the Java KCL
    go on. The exit code is 1 if leases are still held after the wait.
    """
    app = target(application, stream, pipeline)
    done = Pausing(operated(app), _progress(as_json=as_json)).pause(reason, wait_seconds=wait)
    report(asdict(done), texts.paused(done), as_json=as_json, ok=not done.held or wait == 0)


def _progress(*, as_json: bool) -> Callable[[int], None]:
    last = -1

    def note(held: int) -> None:
        nonlocal last
        if held and held != last and not as_json:
            show.echo(f"waiting for {counted(held, 'lease')}", err=True)
        last = held

    return note


def resume(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    as_json: AsJson = False,
) -> None:
    """Resume a paused application. Workers that wait start within seconds."""
    app = target(application, stream, pipeline)
    was = Pausing(operated(app)).resume().pause
    result = {"was": None if was is None else asdict(was)}
    report(result, [texts.resumed(was)], as_json=as_json, ok=True)

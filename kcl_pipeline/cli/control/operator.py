"""The options and the results that the commands of an operator share."""

import getpass
import socket
from typing import Annotated, Any

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.target import Target
from kcl_pipeline.control.application import ApplicationControl

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would happen.")]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="Seconds to wait for the result. 0: do not wait."),
]


def operated(app: Target) -> ApplicationControl:
    """The application of a command, changed by the user of this process."""
    tables = app.tables
    return ApplicationControl(
        app.settings, tables.lease, tables.workers, tables.coordinator, app.clock, _user()
    )


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user id
        user = "user"
    return f"{user}@{socket.gethostname()}"


def report(result: dict[str, Any], sentences: list[str], *, as_json: bool, ok: bool) -> None:
    """Print the result as JSON or as sentences. Exits with 1 unless `ok`."""
    if as_json:
        show.print_json(result)
    else:
        for sentence in sentences:
            show.echo(sentence)
    if not ok:
        raise typer.Exit(FAILED)

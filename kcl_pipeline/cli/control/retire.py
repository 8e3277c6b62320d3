"""`kcl-pipeline retire`: end an application."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import DryRun, operated, report
from kcl_pipeline.cli.target import (
    NO_STREAM,
    Application,
    AsJson,
    Pipeline,
    Streams,
    Target,
    target,
)
from kcl_pipeline.control import texts
from kcl_pipeline.errors import SettingsError

if TYPE_CHECKING:
    from kcl_pipeline.control.retire.run import Retiring


def retire(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    confirm: Annotated[
        str | None,
        typer.Option(
            "--confirm",
            help="Name of the application: delete. Without it, a terminal asks for the name.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """End an application: delete its three tables, its announcements and its fan-out consumers.

    Without a confirmation, it only shows what would be deleted. It is refused while a worker or a
    leader is alive. The output table, the dead letters and the streams stay.
    """
    if dry_run and confirm is not None:
        raise SettingsError("--dry-run and --confirm contradict each other; remove one of them")
    app = target(application, stream, pipeline)
    retiring = _retiring(app, as_json=as_json)
    if confirm is None:
        plan = retiring.plan()
        asks = not dry_run and not as_json and is_interactive()
        lines = texts.retire_plan(plan)
        if not asks:
            hint = f"dry run; add --confirm {app.settings.application_name} to delete"
            ok = not plan.resources.problems
            report(texts.retire_plan_as_dict(plan), [*lines, hint], as_json=as_json, ok=ok)
            return
        for line in lines:
            show.echo(line)
        confirm = typer.prompt("Type the name of the application to delete it")
    done = retiring.retire(confirm)
    report(texts.retired_as_dict(done), texts.retired(done), as_json=as_json, ok=done.is_complete)


def is_interactive() -> bool:
    """Whether a person can answer a question."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _retiring(app: Target, *, as_json: bool) -> Retiring:
    from kcl_pipeline.aws import open_removals  # noqa: PLC0415 (AWS only here)
    from kcl_pipeline.control.retire.resources import ResourceFinder  # noqa: PLC0415 (likewise)
    from kcl_pipeline.control.retire.run import Retiring  # noqa: PLC0415 (likewise)

    settings = app.settings
    operator = operated(app)
    finder = ResourceFinder(
        operator,
        open_removals(settings, app.clients, app.clock),
        getattr(app.pipeline, "sink", None),
        tuple(one for one in settings.streams if one != NO_STREAM),
    )
    return Retiring(operator, finder, _progress(as_json=as_json))


def _progress(*, as_json: bool) -> Callable[[float], None]:
    def note(seconds: float) -> None:
        if not as_json:
            show.echo(f"observing the rows of workers and leader for {seconds:.0f} s", err=True)

    return note

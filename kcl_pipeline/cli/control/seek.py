"""`kcl-pipeline seek`: set positions by time or position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import Wait, operated, report
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, Target, target
from kcl_pipeline.control import texts
from kcl_pipeline.control.seek.plan import PositionChange
from kcl_pipeline.control.seek.target import seek_target

if TYPE_CHECKING:
    from kcl_pipeline.control.seek.run import SeekPlan, Sought
    from kcl_pipeline.sinks.sink import Sink

WAIT_SECONDS = 120.0
COLUMNS = ("lease", "from", "to", "what happens")


def seek(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", help="TRIM_HORIZON, LATEST, or a time such as 2026-11-23T09:00:00Z."),
    ] = None,
    ago: Annotated[
        str | None, typer.Option("--ago", help="A time before now, such as 90s, 10m, 2h or 1d.")
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", help="Sequence number of a record; the next one is read first."),
    ] = None,
    only_stream: Annotated[
        str | None, typer.Option("--only-stream", help="Name or ARN. Default: all streams.")
    ] = None,
    shard: Annotated[
        list[str] | None,
        typer.Option("--shard", help="Shard id or lease key; repeat per shard. Default: all."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Write. Without it, the changes are only shown.")
    ] = False,
    pause: Annotated[
        bool,
        typer.Option("--pause", help="Pause the application for the seek, and resume it after."),
    ] = False,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Set the positions of an application, a stream or a shard; by default only show the changes.

    After a seek back, each record of the range lands in the table once more. A seek forward skips
    records. It is refused while a worker holds a lease, unless --pause is given.
    """
    from kcl_pipeline.control.seek.run import Seeking  # noqa: PLC0415 (it needs pyarrow)

    app = target(application, stream, pipeline)
    wanted = seek_target(to, ago, after, app.clock.wall())
    seeking = Seeking(
        operated(app),
        app.kinesis,
        wanted,
        stream=only_stream,
        shards=shard or (),
        sink=sink_of(app),
    )
    title = f"Positions at {wanted}"
    if yes:
        done = seeking.write(str(uuid4()), pause=pause, wait_seconds=wait)
        report_sought(title, done, as_json=as_json)
    else:
        report_plan(title, seeking.plan(), as_json=as_json)


def report_plan(title: str, plan: SeekPlan, *, as_json: bool) -> None:
    """Print the positions that would change."""
    if not as_json:
        _print_changes(title, plan.changes)
    report(texts.plan_as_dict(plan), texts.seek_plan(plan), as_json=as_json, ok=True)


def report_sought(title: str, done: Sought, *, as_json: bool) -> None:
    """Print the positions that have changed. Exits with 1 if some were refused."""
    if not as_json:
        _print_changes(title, done.written)
    report(texts.sought_as_dict(done), texts.sought(done), as_json=as_json, ok=not done.refused)


def sink_of(app: Target) -> Sink | None:
    """The sink of a pipeline, if it stores positions. None: it does not, or is not named."""
    from kcl_pipeline.control.sinks import position_sink  # noqa: PLC0415 (as above)

    if app.pipeline is None:
        return None
    return position_sink(getattr(app.pipeline, "sink", None), app.settings.application_name)


def _print_changes(title: str, changes: tuple[PositionChange, ...]) -> None:
    rows = [
        (one.lease_key, str(one.seek.lease.checkpoint), str(one.seek.position), one.note)
        for one in changes
    ]
    show.print_table(title, COLUMNS, rows)

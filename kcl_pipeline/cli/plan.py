"""`kcl-pipeline plan`: show the moves that the leader would make now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.status import NO_OWNER
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.planning.explain import LoadRow, explain

if TYPE_CHECKING:
    from kcl_pipeline.leader.preview import Preview


def plan(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    observe_seconds: Annotated[
        float,
        typer.Option(
            "--observe-seconds",
            min=0,
            help="Observe the leases this long to find expired ones; with 0 every owner counts "
            "as alive.",
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Show the moves that the leader would make now.

    Prints each move with its reason, and the load of every worker before and after. Changes
    nothing: only the leader moves leases.
    """
    app = target(application, stream, pipeline, needs_streams=True)
    # Loaded here: only this command needs pyarrow and the planners.
    from kcl_pipeline.leader.preview import preview  # noqa: PLC0415

    tables = app.tables
    found = preview(
        app.settings,
        tables.lease,
        tables.workers,
        app.kinesis,
        app.clock,
        record=tables.coordinator.read_application() if app.settings.is_multi_stream else None,
        observe_seconds=observe_seconds,
    )
    if as_json:
        show.print_json(as_dict(found))
    else:
        _print(found)


def as_dict(preview: Preview) -> dict[str, Any]:
    """The preview for JSON output."""
    table = explain(preview.plan_input, preview.plan)
    return {
        "strategy": preview.plan.strategy,
        "moves": [asdict(move) for move in preview.plan.moves],
        "spilled": list(preview.plan.spilled),
        "notes": list(preview.plan.notes),
        "workers": [asdict(row) for row in table.workers],
        "groups": [asdict(row) for row in table.groups],
        "max_over_mean_before": table.max_over_mean_before,
        "max_over_mean": table.max_over_mean,
        "create": [
            {"lease_key": lease.lease_key, "checkpoint": str(lease.checkpoint)}
            for lease in preview.create
        ],
        "delete": [
            {"lease_key": deletion.lease.lease_key, "reason": deletion.reason}
            for deletion in preview.delete
        ],
        "expired": list(preview.expired),
        "bad_rows": [asdict(row) for row in preview.bad_rows],
        "coverage": [asdict(coverage) for coverage in preview.coverage],
        "unavailable": [
            {"stream": one.stream, "reason": one.reason} for one in preview.unavailable
        ],
        "observed_seconds": preview.observed_seconds,
    }


def _print(preview: Preview) -> None:
    show.print_bad_rows(preview.bad_rows)
    for stream in preview.unavailable:
        show.echo(f"stream {stream.stream} is not read: {stream.reason}")
    for hole in (c for c in preview.coverage if not c.complete):
        show.echo(f"stream {hole.stream}: {hole.hole}")
    _print_if(
        "Leases to create",
        ["lease", "from"],
        [[lease.lease_key, str(lease.checkpoint)] for lease in preview.create],
    )
    _print_if(
        "Leases to delete after their retention time",
        ["lease", "reason"],
        [[d.lease.lease_key, d.reason] for d in preview.delete],
    )
    table = explain(preview.plan_input, preview.plan)
    moves = [
        [move.lease_key, move.from_worker or NO_OWNER, move.to_worker, move.reason]
        for move in preview.plan.moves
    ]
    show.print_table(f"Moves by {preview.plan.strategy}", ["lease", "from", "to", "reason"], moves)
    columns = ["leases", "after", "KiB/s", "after KiB/s", "utilization", "after utilization"]
    for title, kind, loads in (
        ("Load per worker", "worker", table.workers),
        ("Load per group", "group", table.groups),
    ):
        show.print_table(title, [kind, *columns], [_cells(row) for row in loads], numbers=columns)
    show.echo(table.summary)
    for text in preview.plan.notes:
        show.echo(f"note: {text}")
    if preview.plan.spilled:
        show.echo(f"no worker can take: {', '.join(preview.plan.spilled)}")
    if preview.expired:
        show.echo(f"expired: {', '.join(preview.expired)}")
    elif not preview.observed_seconds:
        show.echo("every owner counts as alive; use --observe-seconds 30 to find expired leases")


def _cells(row: LoadRow) -> list[str]:
    values = (row.kbps_before, row.kbps_after, row.utilization_before, row.utilization_after)
    return [
        row.name,
        str(row.leases_before),
        str(row.leases_after),
        *(show.number(value) for value in values),
    ]


def _print_if(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        show.print_table(title, columns, rows)

"""`kcl-pipeline compact` and `kcl-pipeline vacuum`: maintain the tables of a pipeline."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from kcl_pipeline.cli.control.operator import DryRun, report
from kcl_pipeline.cli.inspection.dead_letters import dead_letter_table
from kcl_pipeline.cli.target import AsJson, OnlyPipeline, Pipeline, load_pipeline
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.text import counted

MOST_FILES = 20
"""Files that a vacuum without `--json` names."""

Tables = Annotated[
    Literal["output", "dead-letters", "all"],
    typer.Option("--table", help="Which tables of the pipeline."),
]
Uri = Annotated[
    str | None,
    typer.Option("--uri", help="Address of a table, instead of --pipeline.", show_default=False),
]
Retention = Annotated[
    int | None,
    typer.Option(
        "--retention-hours",
        help="Remove files that no version of the last so many hours uses. At least 1.",
        show_default="168",
    ),
]
Table = tuple[str, Mapping[str, str]]


def compact(
    application: OnlyPipeline = None,
    pipeline: Pipeline = None,
    uri: Uri = None,
    table: Tables = "output",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Merge small files of a table. Workers may write meanwhile; no row changes."""
    from kcl_pipeline.delta import maintenance  # noqa: PLC0415 (it needs the Delta library)

    tables, result, lines = _tables(application, pipeline, uri, table)
    for address, options in tables:
        if dry_run:
            small = maintenance.small_files(address, options)
            lines.append(
                f"{address}: dry run: would merge up to {counted(small.files, 'file')} "
                f"({small.bytes:,} bytes)"
            )
            result.append({"table": address, "files": small.files, "bytes": small.bytes})
        else:
            done = maintenance.compact(address, options)
            lines.append(
                f"{address}: merged {counted(done.files_removed, 'file')} into {done.files_added}"
            )
            result.append(
                {"table": address, "removed": done.files_removed, "added": done.files_added}
            )
    report({"dry_run": dry_run, "tables": result}, lines, as_json=as_json, ok=True)


def vacuum(
    application: OnlyPipeline = None,
    pipeline: Pipeline = None,
    uri: Uri = None,
    table: Tables = "output",
    retention_hours: Retention = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no recent version of a table uses. With --dry-run, list them.

    Files of batches that are not committed yet are protected by their age, so the retention must be
    longer than any pause of a worker, and than any query.
    """
    from kcl_pipeline.delta import maintenance  # noqa: PLC0415 (it needs the Delta library)

    hours = maintenance.DEFAULT_RETENTION_HOURS if retention_hours is None else retention_hours
    tables, result, lines = _tables(application, pipeline, uri, table)
    for address, options in tables:
        done = maintenance.measured_vacuum(address, hours, options, dry_run=dry_run)
        verb = "dry run: would remove" if dry_run else "removed"
        lines.append(
            f"{address}: {verb} {counted(len(done.files), 'file')} ({done.bytes:,} bytes) that no "
            f"version of the last {done.retention_hours} hours uses"
        )
        if dry_run and not as_json:
            lines += [f"  {path}" for path in done.files[:MOST_FILES]]
            if len(done.files) > MOST_FILES:
                lines.append(f"  and {len(done.files) - MOST_FILES} more; --json names them")
        result.append(
            {
                "table": address,
                "files": len(done.files),
                "bytes": done.bytes,
                "retention_hours": done.retention_hours,
                "paths": list(done.files),
            }
        )
    report({"dry_run": dry_run, "tables": result}, lines, as_json=as_json, ok=True)


def _tables(
    application: str | None, pipeline: str | None, uri: str | None, which: str
) -> tuple[list[Table], list[dict[str, Any]], list[str]]:
    """The tables that exist; for the others, the beginning of the result and of the lines."""
    from kcl_pipeline.delta import maintenance  # noqa: PLC0415 (it needs the Delta library)

    named = _named(application, pipeline, uri, which)
    missing = [
        address for address, options in named if not maintenance.table_exists(address, options)
    ]
    return (
        [one for one in named if one[0] not in missing],
        [{"table": address, "exists": False} for address in missing],
        [f"{address}: there is no table" for address in missing],
    )


def _named(
    application: str | None, pipeline: str | None, uri: str | None, which: str
) -> list[Table]:
    if application is not None:
        raise SettingsError(
            "--application names no table; write --pipeline module:attribute, or --uri ADDRESS"
        )
    if (pipeline is None) == (uri is None):
        raise SettingsError("write either --pipeline module:attribute or --uri ADDRESS")
    if uri is not None:
        return [(uri, {})]
    found = load_pipeline(str(pipeline))
    sink = getattr(found, "sink", None)
    output = getattr(sink, "uri", None)
    tables: list[Table] = []
    if which != "dead-letters" and output:
        tables.append((str(output), dict(getattr(sink, "storage_options", None) or {})))
    dead_letters = dead_letter_table(found) if which != "output" else None
    tables += [dead_letters] if dead_letters else []
    if not tables:
        raise SettingsError(f"the sink of --pipeline {pipeline} has no such table")
    return tables

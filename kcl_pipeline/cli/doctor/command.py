"""`kcl-pipeline doctor`: run the checks, and print the findings."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.status import finding_text, period_seconds
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.text import counted

if TYPE_CHECKING:
    from kcl_pipeline.status.findings import Finding


def doctor(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    watch_seconds: Annotated[
        float | None,
        typer.Option(
            "--watch-seconds",
            min=0,
            help="Time between the two looks. 0: look once. [default: the failover time, or a "
            "period of the workers' reports]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the whole set-up of an application, without changing it.

    Checks settings, Java, credentials, permissions, tables, metrics, layout, leader, workers,
    shard coverage, stuck leases, paused shards, failing batches, dead letters, lost records and
    lag. With --pipeline also the output table: in an object store, a small object is written twice
    and deleted. With DAGSTER_HOME, too, the run limit of dagster.yaml.
    The exit code is 1 if there is a problem.
    """
    app = target(application, stream, pipeline, needs_streams=True)
    needs_java = getattr(app.pipeline, "transform", None) is not None
    watch = period_seconds(app) if watch_seconds is None else watch_seconds
    # Loaded here: other commands do not need botocore.
    from kcl_pipeline.cli.doctor.run import run_checks  # noqa: PLC0415
    from kcl_pipeline.status.findings import STILL, FindingLevel  # noqa: PLC0415 (likewise)

    found: list[Finding] = []
    for finding in run_checks(app, needs_java=needs_java, watch_seconds=watch):
        if not as_json:
            text = finding_text(finding, found[-1] if found else None)
            show.console().print(text, soft_wrap=True)
        found.append(finding)
    problems = sum(f.level is FindingLevel.PROBLEM for f in found)
    if as_json:
        show.print_json([asdict(f) for f in found])
    else:
        warnings = sum(f.level is FindingLevel.WARNING for f in found)
        waits = dict.fromkeys(f.name for f in found if f.check in STILL and f.is_fault)
        summary = f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
        typer.echo(summary + (f"; records wait: {', '.join(waits)}" if waits else ""))
    if problems:
        raise typer.Exit(FAILED)

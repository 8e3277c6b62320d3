"""`kcl-pipeline doctor`: run the checks, and print the findings."""

from dataclasses import asdict
from shlex import quote
from typing import Annotated, Final

import typer
from rich.text import Text

from kcl_pipeline.cli import show
from kcl_pipeline.cli.doctor.finding import Finding, Severity
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.target import (
    Application,
    AsJson,
    Pipeline,
    Streams,
    target,
)
from kcl_pipeline.text import counted

MARGIN_SECONDS: Final = 1.0
_STYLES: Final = {
    Severity.OK: "green",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "red",
    Severity.UNKNOWN: "dim",
}
_LEVEL_WIDTH: Final = 8


def doctor(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    watch_seconds: Annotated[
        float | None,
        typer.Option(
            "--watch-seconds",
            min=0,
            help="How long to observe the leases for renewals. [default: the failover time]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the whole set-up of an application, without changing it.

    Checks settings, Java, credentials, permissions, tables, metrics, layout, leader, workers,
    shard coverage, stuck leases, paused shards, failing batches, dead letters, lost records and
    lag. With --pipeline also the output table: in an object store, a small object is written twice
    and deleted. With DAGSTER_HOME, too, the run limits and grace periods of dagster.yaml.
    The exit code is 1 if there is a problem.
    """
    app = target(application, stream, pipeline, needs_streams=True)
    needs_java = getattr(app.pipeline, "transform", None) is not None
    watch = (
        app.settings.lease.failover_time_millis / 1000 + MARGIN_SECONDS
        if watch_seconds is None
        else watch_seconds
    )
    # Loaded here: other commands do not need botocore.
    from kcl_pipeline.cli.doctor.run import run_checks  # noqa: PLC0415

    found: list[Finding] = []
    named = f"-a {quote(application or '')}" if pipeline is None else f"-p {quote(pipeline)}"
    for finding in run_checks(app, needs_java=needs_java, watch_seconds=watch, named=named):
        found.append(finding)
        if not as_json:
            print_finding(finding)
    problems = sum(f.level is Severity.PROBLEM for f in found)
    if as_json:
        show.print_json([asdict(f) for f in found])
    else:
        warnings = sum(f.level is Severity.WARNING for f in found)
        typer.echo(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    if problems:
        raise typer.Exit(FAILED)


def print_finding(finding: Finding) -> None:
    """Print the finding, and its advice on a second line."""
    out = show.console()
    line = Text.assemble(
        (finding.level.value, _STYLES[finding.level]),
        " " * (_LEVEL_WIDTH - len(finding.level.value)),
        show.plain(f"{finding.subject}: {finding.text}"),
    )
    out.print(line, soft_wrap=True)
    if finding.advice:
        out.print(Text.assemble(" " * 9 + "→ ", show.plain(finding.advice)), soft_wrap=True)

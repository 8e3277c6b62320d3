"""`kcl-pipeline replay`: replay a time range of the streams, or dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import DryRun, operated, report
from kcl_pipeline.cli.running import progress_line, runnable, session, show_log
from kcl_pipeline.cli.target import AsJson, OnlyPipeline, Pipeline, Target, target
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.control.replay import texts
from kcl_pipeline.control.replay.request import ReplayRequest
from kcl_pipeline.metrics.exporters import LoggingEvents
from kcl_pipeline.signals import stop_on_signals

if TYPE_CHECKING:
    from kcl_pipeline.control.replay.run import Replayed, Replaying, ReplayPlan
    from kcl_pipeline.pipeline import KinesisPipeline


DeadLetters = Annotated[
    bool,
    typer.Option(
        "--dead-letters",
        help="Replay the dead letters that are not marked as replayed, all or those that failed in "
        "the time range. With --in-place they are marked.",
    ),
]


def replay(
    *,
    application: OnlyPipeline = None,
    pipeline: Pipeline = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="First arrival time (inclusive), such as 2026-11-23T09:00:00Z, or a time before "
            "now, such as 10m. With --dead-letters: first time of a failure.",
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--to", help="Last arrival time (exclusive), likewise. Default: now."),
    ] = None,
    into: Annotated[
        str | None, typer.Option("--into", help="Address of a side table. It is created.")
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Write to the table of the pipeline: rows are repeated."),
    ] = False,
    only_stream: Annotated[
        str | None, typer.Option("--only-stream", help="Name or ARN. Default: all streams.")
    ] = None,
    dead_letters: DeadLetters = False,
    replay_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="Identity of the replay. With the id of a replay that is not complete, it is "
            "continued; the other options are then not needed.",
            show_default="drawn and printed",
        ),
    ] = None,
    dry_run: DryRun = False,
    progress_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two lines with progress counters.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Replay a time range, or dead letters, into a side table or the table of the pipeline.

    Each record of the range lands exactly once more. The replay is an application of its own, with
    its own tables, which are deleted at its end. The workers of the pipeline go on. The exit code
    is 1 if the replay is not complete; continue it with --id.
    """
    from kcl_pipeline.aws import AwsClients  # noqa: PLC0415 (AWS only here)
    from kcl_pipeline.control.replay.run import Replaying  # noqa: PLC0415 (likewise)

    found = runnable(application, pipeline)
    app: Target = target(None, None, pipeline)
    replaying = Replaying(operated(app), found, AwsClients)
    request = ReplayRequest(replay_id, begin, end, into, in_place, only_stream, dead_letters)
    plan = replaying.plan(request)
    if dry_run:
        shards = replaying.shards(plan)
        result, sentences = texts.dry_run_as_dict(plan, shards), texts.dry_run(plan, shards)
        report(result, sentences, as_json=as_json, ok=True)
        return
    for line in texts.plan(plan):
        show.echo(line, err=True)
    done = _run(replaying, plan, found, progress_seconds)
    result, sentences = texts.replayed_as_dict(done), texts.replayed(done)
    report(result, sentences, as_json=as_json, ok=done.is_complete)


def _run(
    replaying: Replaying, plan: ReplayPlan, pipeline: KinesisPipeline, progress_seconds: float
) -> Replayed:

    show_log()
    stop = SystemClock().signal()
    with stop_on_signals(stop) as signals:
        return replaying.run(
            plan,
            stop,
            session_factory=signals.reinstalled_after(lambda: session(pipeline)),
            events=LoggingEvents(),
            on_progress=lambda progress: show.echo(
                f"{plan.name}: {progress_line(progress)}", err=True
            ),
            progress_seconds=progress_seconds,
        )

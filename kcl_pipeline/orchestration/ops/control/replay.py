"""Define the job that replays a time range or dead letters, as `kcl-pipeline replay` does."""

from functools import partial
from typing import cast

import dagster as dg
from pydantic import Field

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.replay import texts
from kcl_pipeline.control.replay.request import ReplayRequest
from kcl_pipeline.control.replay.run import Replayed, Replaying, ReplayPlan
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import REPLAY_TAG, Names
from kcl_pipeline.orchestration.ops.control.operation import Outcome, operation_job
from kcl_pipeline.orchestration.ops.reporting import RunEvents
from kcl_pipeline.orchestration.resources.spark import open_session
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.worker.summary import WorkerProgress


class ReplayConfig(dg.Config):
    """Replay a time range, or dead letters. To continue a replay, only its id is needed."""

    from_time: str | None = Field(
        default=None,
        description="First arrival time (inclusive), such as 2026-11-23T09:00:00Z, or a time "
        "before now, such as 10m. With dead_letters: first time of a failure, or None",
    )
    to_time: str | None = Field(
        default=None, description="Last arrival time (exclusive), likewise. None: now"
    )
    into: str | None = Field(
        default=None, description="Address of a side table, which is created. Or set in_place"
    )
    in_place: bool = Field(
        default=False, description="Write to the table of the pipeline: its rows are repeated"
    )
    only_stream: str | None = Field(default=None, description="Name or ARN. None: all streams")
    dead_letters: bool = Field(
        default=False,
        description="Replay the dead letters that are not marked as replayed. In place marks them",
    )
    replay_id: str | None = Field(
        default=None,
        description="Identity of the replay: that of one that is not complete, to continue it, or "
        "a new one. None: from the run; a re-execution of the run continues its replay",
    )
    dry_run: bool = Field(
        default=True, description="Only show what would be replayed. Off: replay it"
    )
    progress_seconds: float = Field(
        default=60.0, ge=1, description="Seconds between two log entries with progress counters"
    )


def replay_job(pipeline: PipelineLike, names: Names, clock: Clock | None) -> dg.JobDefinition:
    """Build the job of one pipeline."""
    return operation_job(
        pipeline,
        names,
        "replay",
        ReplayConfig,
        f"Replays a time range of the streams of {names.application}, or its dead letters, into a "
        "side table or its own table; by default only shows what it would do.",
        partial(_replay, pipeline),
        clock,
        needs_spark=True,
    )


def _replay(
    pipeline: PipelineLike,
    app: ApplicationControl,
    config: ReplayConfig,
    resources: PipelineResources,
) -> Outcome:
    context = cast("dg.OpExecutionContext", resources.context)
    root = context.run.root_run_id or context.run_id
    replaying = Replaying(app, pipeline, resources.aws.clients)
    wanted = ReplayRequest(
        config.replay_id or root[:8],
        config.from_time,
        config.to_time,
        config.into,
        config.in_place,
        config.only_stream,
        config.dead_letters,
    )
    plan = replaying.plan(wanted)
    if config.dry_run:
        shards = replaying.shards(plan)
        return texts.dry_run_as_dict(plan, shards), texts.dry_run(plan, shards), True
    context.instance.add_run_tags(context.run_id, {REPLAY_TAG: plan.name})
    context.log.info("\n".join(texts.plan(plan)))
    done = _run(context, replaying, plan, resources, config.progress_seconds)
    return texts.replayed_as_dict(done), texts.replayed(done), done.is_complete


def _run(
    context: dg.OpExecutionContext,
    replaying: Replaying,
    plan: ReplayPlan,
    resources: PipelineResources,
    progress_seconds: float,
) -> Replayed:
    def note(progress: WorkerProgress) -> None:
        context.log.info(
            "%s: %d records, %d rows in %.0f s; %d leases",
            plan.name,
            progress.records,
            progress.rows_written,
            progress.seconds,
            len(progress.leases),
        )

    events = RunEvents()
    stop = SystemClock().signal()
    with stop_on_signals(stop) as signals:
        done = replaying.run(
            plan,
            stop,
            session_factory=signals.reinstalled_after(lambda: open_session(resources.spark)),
            events=events,
            on_progress=note,
            progress_seconds=progress_seconds,
        )
    if text := events.drain():
        context.log.info(text)
    if signals.received and not done.is_complete:
        raise dg.DagsterExecutionInterruptedError("\n".join(texts.replayed(done)))
    return done

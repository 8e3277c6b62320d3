"""Define the jobs of an operator. Each does what the command of the same name does."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from uuid import uuid4

import dagster as dg
from pydantic import Field

from kcl_pipeline.aws import open_kinesis, open_removals
from kcl_pipeline.clock import Clock
from kcl_pipeline.control import texts
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.moving import Moving
from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.retire.resources import ResourceFinder
from kcl_pipeline.control.retire.run import Retiring
from kcl_pipeline.control.seek.run import Seeking
from kcl_pipeline.control.seek.target import seek_target
from kcl_pipeline.control.sinks import position_sink
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.ops.control.operation import C, Outcome, operation_job
from kcl_pipeline.orchestration.ops.control.replay import replay_job

_WAIT = "Seconds to wait for the result. 0: do not wait"
_DRY_RUN = "Change nothing; say what would happen"


class PauseConfig(dg.Config):
    """Pause the application."""

    reason: str = Field(default="", description="Shown wherever the pause is shown")
    wait_seconds: float = Field(default=120.0, ge=0, description=_WAIT)


class ResumeConfig(dg.Config):
    """Resume the application."""


class DrainConfig(dg.Config):
    """Request a worker to end."""

    worker_id: str = Field(description="The worker, as the worker metrics table shows it")
    wait_seconds: float = Field(default=120.0, ge=0, description=_WAIT)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class MoveConfig(dg.Config):
    """Hand a lease to a worker."""

    lease_key: str = Field(description="Key of the lease, such as shardId-000000000007")
    to_worker: str = Field(description="The worker that gets the lease")
    wait_seconds: float = Field(default=60.0, ge=0, description=_WAIT)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class RebalanceConfig(dg.Config):
    """Balance the leases now."""

    wait_seconds: float = Field(default=30.0, ge=0, description=_WAIT)


class SeekConfig(dg.Config):
    """Set positions. Exactly one of `to`, `ago` and `after` is needed."""

    to: str | None = Field(
        default=None, description="TRIM_HORIZON, LATEST, or a time such as 2026-11-23T09:00:00Z"
    )
    ago: str | None = Field(
        default=None, description="A time before now, such as 90s, 10m, 2h or 1d"
    )
    after: str | None = Field(
        default=None, description="Sequence number of a record; the next one is read first"
    )
    only_stream: str | None = Field(default=None, description="Name or ARN. None: all streams")
    shards: list[str] = Field(default=[], description="Shard ids or lease keys. Empty: all shards")
    dry_run: bool = Field(
        default=True, description="Only show the positions that would change. Off: write them"
    )
    pause: bool = Field(
        default=True,
        description="Pause the application for the seek, and resume it after. Off: the seek is "
        "refused while a lease is held",
    )
    wait_seconds: float = Field(default=120.0, ge=0, description=_WAIT)


class RetireConfig(dg.Config):
    """End the application."""

    dry_run: bool = Field(
        default=True, description="Only show what would be deleted. Off: delete it"
    )
    confirm: str = Field(
        default="", description="Name of the application, typed by hand. Needed to delete"
    )


def build_operator_jobs(
    pipeline: PipelineLike, names: Names, clock: Clock | None = None
) -> list[dg.JobDefinition]:
    """Build the jobs of one pipeline."""
    who = names.application

    def job(
        name: str,
        config: type[C],
        run: Callable[[ApplicationControl, C, PipelineResources], Outcome],
        description: str,
    ) -> dg.JobDefinition:
        return operation_job(pipeline, names, name, config, description, run, clock)

    return [
        job(
            "pause",
            PauseConfig,
            _pause,
            f"Pauses {who}: its workers commit, release their leases and end, and none starts.",
        ),
        job("resume", ResumeConfig, _resume, f"Ends the pause of {who}."),
        job(
            "drain_worker",
            DrainConfig,
            _drain,
            f"Requests a worker of {who} to end; its leases go to others.",
        ),
        job(
            "move_lease",
            MoveConfig,
            _move,
            f"Hands a lease of {who} to a worker. The former owner commits first.",
        ),
        job(
            "rebalance",
            RebalanceConfig,
            _rebalance,
            f"Lets the leader of {who} balance the leases now.",
        ),
        job(
            "seek",
            SeekConfig,
            partial(_seek, pipeline),
            f"Sets the positions of {who} by time or sequence number; by default only shows them.",
        ),
        job(
            "retire",
            RetireConfig,
            partial(_retire, pipeline),
            f"Ends {who}: deletes its tables, announcements and fan-out consumers; by default only "
            "shows them. The output table stays.",
        ),
        replay_job(pipeline, names, clock),
    ]


def _pause(app: ApplicationControl, config: PauseConfig, _: PipelineResources) -> Outcome:
    done = Pausing(app).pause(config.reason, wait_seconds=config.wait_seconds)
    return asdict(done), texts.paused(done), not done.held or not config.wait_seconds


def _resume(app: ApplicationControl, _: ResumeConfig, __: PipelineResources) -> Outcome:
    was = Pausing(app).resume().pause
    return {"was": None if was is None else asdict(was)}, [texts.resumed(was)], True


def _drain(app: ApplicationControl, config: DrainConfig, _: PipelineResources) -> Outcome:
    done = Moving(app).drain(
        config.worker_id, wait_seconds=config.wait_seconds, dry_run=config.dry_run
    )
    is_complete = done.ended or config.dry_run or not config.wait_seconds
    return asdict(done), [texts.drained(done, dry_run=config.dry_run)], is_complete


def _move(app: ApplicationControl, config: MoveConfig, _: PipelineResources) -> Outcome:
    done = Moving(app).move(
        config.lease_key,
        config.to_worker,
        wait_seconds=config.wait_seconds,
        dry_run=config.dry_run,
    )
    is_complete = done.done or config.dry_run or not config.wait_seconds
    return asdict(done), [texts.moved(done, dry_run=config.dry_run)], is_complete


def _rebalance(app: ApplicationControl, config: RebalanceConfig, _: PipelineResources) -> Outcome:
    taken = Moving(app).balance(uuid4(), wait_seconds=config.wait_seconds)
    return {"taken": taken}, [texts.balanced(taken=taken)], taken or not config.wait_seconds


def _seek(
    pipeline: PipelineLike,
    app: ApplicationControl,
    config: SeekConfig,
    resources: PipelineResources,
) -> Outcome:
    seeking = Seeking(
        app,
        open_kinesis(app.settings, resources.aws.clients(app.settings), app.clock),
        seek_target(config.to, config.ago, config.after, app.clock.wall()),
        stream=config.only_stream,
        shards=config.shards,
        sink=position_sink(pipeline.sink, pipeline.name),
    )
    if config.dry_run:
        plan = seeking.plan()
        lines = [texts.change(one) for one in plan.changes]
        return texts.plan_as_dict(plan), [*lines, *texts.seek_plan(plan)], True
    done = seeking.write(str(uuid4()), pause=config.pause, wait_seconds=config.wait_seconds)
    lines = [texts.change(one) for one in done.written]
    return texts.sought_as_dict(done), [*lines, *texts.sought(done)], not done.refused


def _retire(
    pipeline: PipelineLike,
    app: ApplicationControl,
    config: RetireConfig,
    resources: PipelineResources,
) -> Outcome:
    finder = ResourceFinder(
        app,
        open_removals(app.settings, resources.aws.clients(app.settings), app.clock),
        pipeline.sink,
        tuple(app.settings.streams),
    )
    retiring = Retiring(app, finder)
    if config.dry_run:
        plan = retiring.plan()
        lines = ["dry run", *texts.retire_plan(plan)]
        return texts.retire_plan_as_dict(plan), lines, not plan.resources.problems
    done = retiring.retire(config.confirm)
    return texts.retired_as_dict(done), texts.retired(done), done.is_complete

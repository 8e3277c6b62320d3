"""Decide in one tick which runs start and which workers end, and say what keeps them from running.

The autoscaler comes first. Workers are replaced while it has nothing to do.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, FleetLike, PipelineLike
from kcl_pipeline.orchestration.assets.names import APPLICATION_TAG, CONTINUOUS, MODE_TAG, Names
from kcl_pipeline.orchestration.assets.runs.problems import failure_problem
from kcl_pipeline.orchestration.assets.runs.queue import queue_problem
from kcl_pipeline.orchestration.assets.runs.runs import (
    ACTIVE,
    RunView,
    recent_runs,
    runs_of_version,
    silence_limit_seconds,
)
from kcl_pipeline.orchestration.sensors.scaling.autoscaler import (
    AutoscalerMemory,
    ScalingDecision,
    decide,
)
from kcl_pipeline.orchestration.sensors.scaling.load import (
    Load,
    LoadLimits,
    cpu_limit,
    shares_machine,
)
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.scaling.replacement import (
    Code,
    Step,
    is_blocked,
    paused_shards,
    replace,
)
from kcl_pipeline.orchestration.sensors.scaling.workers import CountedWorkers
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.text import counted

HOUR_SECONDS: Final = 3_600.0
REPLAY_COMMAND: Final = "kcl-pipeline do replay -p MODULE:PIPELINE --dead-letters --in-place"
START_GAP_SECONDS: Final = 30.0
"""On a machine that all runs share, a successor starts so long after the start of a
worker of another application."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The decision of a tick.

    Attributes:
        decision: How many runs to start, and which workers to drain.
        problems: What keeps workers from running, as sentences without a period.
        replacing: What happens to workers that are replaced. None: nothing.
        succeeds: Id of the worker for which a successor starts. None: none does.
        elsewhere: Number of workers without a run of this Dagster instance.
    """

    decision: ScalingDecision
    problems: tuple[str, ...] = ()
    replacing: str | None = None
    succeeds: str | None = None
    elsewhere: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the sentence of the tick says in addition."""
        others = counted(self.elsewhere, "worker")
        elsewhere = f"{others} without a run here" if self.elsewhere else None
        found = (elsewhere, self.replacing, self.decision.limit, *self.problems)
        return tuple(one for one in found if one is not None)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the decision of a tick is made from.

    Attributes:
        active: The active runs.
        heartbeats: The rows of the workers.
        leases: All leases. None: the tables could not be read, so no worker is replaced.
        shards: Number of open shards; None if it is not known.
        load: The load of the workers.
        lock_owner: The leader. None: nobody leads.
        location: This code location; None if it is not known.
        version: The version of the code; None if it is not known.
        now: Epoch seconds.
    """

    active: tuple[RunView, ...]
    heartbeats: Heartbeats
    leases: tuple[Lease, ...] | None
    shards: int | None
    load: Load
    lock_owner: str | None
    location: str | None
    version: str | None
    now: float


def scale(
    instance: dg.DagsterInstance,
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
    observed: Observed,
    memory: AutoscalerMemory,
) -> Scaling:
    """Read what else the decision needs, and decide."""
    fleet, settings, now = pipeline.workers, pipeline.settings, observed.now
    limit = silence_limit_seconds(settings)
    workers = CountedWorkers.of(observed.active, observed.heartbeats, limit)
    code = code_of(fleet, observed.version, observed.location)
    recent = recent_runs(instance, names.application, settings.worker.worker_group_separator)
    own = runs_of_version(recent, observed.version)  # a corrected version starts without a delay
    decision = decide(
        workers,
        own,
        memory,
        minimum=fleet.min,
        maximum=fleet.max,
        now=now,
        load=observed.load,
        limits=LoadLimits(
            options.scale_up_lag_seconds, cpu_limit(options.scale_up_cpu_percent, instance)
        ),
        shards=observed.shards,
        max_starting=fleet.max_starting,
    )
    if decision.start and is_blocked(memory.failed, workers, code):
        state, _, _ = decision.reason.partition(": ")
        decision = decision.model_copy(update={"start": 0, "reason": state})
    step = Step(failed=memory.failed)
    if observed.leases is not None and not (decision.start or decision.drain or decision.cancel):
        step = replace(
            workers,
            recent,
            observed.leases,
            code,
            memory.failed,
            paused_before=memory.paused_before,
            batch_seconds=settings.batch.min_batch_interval_millis / 1000,
            follows_succession=settings.coordination == "leader"
            and not _is_java(observed.lock_owner, workers),
            now=now,
        )
    if (
        step.start is not None
        and shares_machine(instance)
        and _has_just_started(instance, names, now)
    ):
        step = Step(failed=step.failed, text="a worker has just started on this machine")
    runs = tuple(workers.runs.values())
    problems = (
        queue_problem(runs, instance, {**fleet.run_tags, **names.worker_run_tags}, now),
        failure_problem(own, decision.memory.desired, now),
        None
        if step.failed is None
        else RunProblem("replacement_stopped", step.failed.sentence(REPLAY_COMMAND)),
    )
    changes: dict[str, object] = {"failed": step.failed}
    if step.start is not None:
        changes["paused_before"] = paused_shards(workers)
    return Scaling(
        decision.model_copy(
            update={
                "memory": decision.memory.model_copy(update=changes),
                "drain": (*decision.drain, *step.drain),
            }
        ),
        tuple(one for one in problems if one is not None),
        step.text,
        step.start,
        len(workers.moving - workers.runs.keys()),
    )


def code_of(fleet: FleetLike, version: str | None, location: str | None) -> Code:
    """Return the code of this code location."""
    return Code(
        version,
        location,
        None if fleet.run_hours is None else fleet.run_hours * HOUR_SECONDS,
        fleet.rolling_replacement,
    )


def _is_java(lock_owner: str | None, workers: CountedWorkers) -> bool:
    """Whether a worker of Java leads, which moves no leases to a successor."""
    row = workers.rows.get(lock_owner or "")
    return row is not None and row.run_id is None


def _has_just_started(instance: dg.DagsterInstance, names: Names, now: float) -> bool:
    """Whether a worker of another application was started a moment ago."""
    statuses = sorted(ACTIVE, key=lambda status: status.value)
    since = datetime.fromtimestamp(now - START_GAP_SECONDS, UTC)
    new = dg.RunsFilter(tags={MODE_TAG: CONTINUOUS}, statuses=statuses, created_after=since)
    return any(run.tags.get(APPLICATION_TAG) != names.application for run in instance.get_runs(new))

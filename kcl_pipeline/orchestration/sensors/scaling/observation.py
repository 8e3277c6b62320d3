"""Observe what the autoscaler decides on in one tick, and what keeps workers from running."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.problems import (
    EARLY_FAILURE_SECONDS,
    failure_problem,
    outdated_runs,
    refusal,
)
from kcl_pipeline.orchestration.assets.runs.queue import (
    Places,
    observe_places,
    places_problem,
    queue_problem,
)
from kcl_pipeline.orchestration.assets.runs.runs import (
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
from kcl_pipeline.orchestration.sensors.scaling.load import Load, LoadLimits, cpu_limit
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.scaling.replacement import Replacement, replace, rows_view


@dataclass(frozen=True, slots=True)
class Scaling:
    """The decision of a tick.

    Attributes:
        decision: How many runs to start, and which workers to drain.
        problems: What keeps workers from running, as sentences without a period.
        replacing: What happens to outdated workers. None: nothing.
        refused: A run and why the sensor ends it. None: no run.
    """

    decision: ScalingDecision
    problems: tuple[str, ...] = ()
    replacing: str | None = None
    refused: tuple[str, str] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the sentence of the tick says in addition."""
        found = (self.replacing, self.decision.limit, *self.problems)
        return tuple(one for one in found if one is not None)


def reporting_workers(
    heartbeats: Heartbeats, active: tuple[RunView, ...], limit_seconds: float
) -> frozenset[str]:
    """Ids of the workers of these runs whose row has changed within the limit."""
    return frozenset(
        run.worker_id
        for run in active
        if (silent := heartbeats.silent_seconds(run.worker_id)) is not None
        and silent <= limit_seconds
    )


def replaced_elsewhere(workers: Sequence[RunView], location: str | None) -> bool:
    """Whether another code location replaces its workers: they have two versions."""
    if location is None:
        return False
    versions: dict[str, set[str | None]] = {}
    for run in workers:
        if run.location not in (None, location):
            versions.setdefault(str(run.location), set()).add(run.version)
    return any(len(found) > 1 for found in versions.values())


def scale(
    instance: dg.DagsterInstance,
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
    active: tuple[RunView, ...],
    memory: AutoscalerMemory,
    heartbeats: Heartbeats,
    *,
    load: Load,
    shards: int | None,
    now: float,
    version: str,
    location: str | None,
) -> Scaling:
    """Read what the decision needs, and decide.

    Args:
        instance: The Dagster instance.
        pipeline: The pipeline, with its `names` and `options`.
        names: Names in Dagster.
        options: Thresholds.
        active: The active runs.
        memory: The state of the last decision.
        heartbeats: Which workers report.
        load: The load of the workers.
        shards: Number of open shards; None if it is not known.
        now: Epoch seconds.
        version: The version of the pipeline.
        location: This code location; None if it is not known.
    """
    fleet, separator = pipeline.workers, pipeline.settings.worker.worker_group_separator
    limit = silence_limit_seconds(pipeline.settings)
    outdated = outdated_runs(active, version, location) if fleet.rolling_replacement else ()
    workers = [run for run in active if run.continuous]
    # The failures are read until a worker has lived for long enough, so that the check is steady.
    is_needed = len(workers) < max(memory.desired, fleet.min) or _has_young(workers, now)
    recent = recent_runs(instance, names.application, separator) if is_needed or outdated else ()
    own = runs_of_version(recent, version)  # a corrected version starts without a delay
    decision = decide(
        active,
        own,
        memory,
        minimum=fleet.min,
        maximum=fleet.max,
        now=now,
        load=load,
        limits=_limits(options, instance),
        shards=shards,
        max_starting=fleet.max_starting,
        ready=reporting_workers(heartbeats, active, limit),
        outdated=outdated,
        spare=replaced_elsewhere(workers, location),
    )
    refused = bool(outdated) and refusal(recent, version) is not None
    decision = _starting(decision, 0) if refused else decision
    decision, desired, unplaced = _placed(instance, decision, len(workers))
    replacement = replace(
        active,
        recent,
        () if decision.start or decision.drain or decision.cancel else outdated,
        rows_view(heartbeats, limit),
        version=version,
        desired=desired,
        most_runs=fleet.max + 1,
        now=now,
    )
    queued = queue_problem(workers, instance, {**fleet.run_tags, **names.worker_run_tags}, now)
    failed = failure_problem(own, decision.memory.desired, now)
    return _scaling(decision, replacement, (queued, unplaced, failed, replacement.problem))


def _limits(options: DagsterOptions, instance: dg.DagsterInstance) -> LoadLimits:
    cpu_percent = cpu_limit(options.scale_up_cpu_percent, instance)
    return LoadLimits(options.scale_up_lag_seconds, cpu_percent)


def _has_young(workers: list[RunView], now: float) -> bool:
    """Whether one of the runs may still fail early."""
    return any(run.started is None or now - run.started < EARLY_FAILURE_SECONDS for run in workers)


def _scaling(
    decision: ScalingDecision, replacement: Replacement, problems: tuple[str | None, ...]
) -> Scaling:
    known = tuple(problem for problem in problems if problem is not None)
    return Scaling(
        _with_replacement(decision, replacement), known, replacement.text, replacement.refused
    )


def _placed(
    instance: dg.DagsterInstance, decision: ScalingDecision, workers: int
) -> tuple[ScalingDecision, int, str | None]:
    """Start only the runs that have a place in Dagster's run limit.

    Returns:
        The decision, the number of workers that a replacement keeps, and why some do not start.
    """
    desired = decision.memory.desired
    places = observe_places(instance) if decision.start else Places()
    placed = _starting(decision, places.limited(decision.start))
    if placed.start < decision.start:  # a replacement must not wait for them
        desired = min(desired, max(workers + places.free, 1))
    return placed, desired, places_problem(decision.start, places)


def _starting(decision: ScalingDecision, start: int) -> ScalingDecision:
    """The decision with another number of runs to start."""
    if start == decision.start:
        return decision
    state, _, _ = decision.reason.partition(": ")
    reason = f"{state}: starting {start}" if start else state
    return decision.model_copy(update={"start": start, "reason": reason})


def _with_replacement(decision: ScalingDecision, replacement: Replacement) -> ScalingDecision:
    if not (replacement.start or replacement.drain):
        return decision
    return decision.model_copy(update={"start": replacement.start, "drain": replacement.drain})

"""Find out for how long runs of workers wait in Dagster's run queue, and why."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.text import counted, duration_text, printable

QUEUED_LONG_SECONDS: Final = 60.0
"""A run that waits longer is reported. Dagster takes runs from its queue every 5 seconds."""
_NO_LIMIT_REACHED: Final = (
    "no run limit or tag limit is reached now; if it stays queued, a pool limit or Dagster's "
    "daemon holds it back"
)
IN_PROGRESS: Final = (
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
)
"""Statuses of the runs that count against the limits of Dagster's run queue."""


def queued_long(active: Sequence[RunView], now: float) -> tuple[RunView, ...]:
    """The runs that have been queued for longer than `QUEUED_LONG_SECONDS`, oldest first."""
    waiting = (
        run
        for run in active
        if run.status is DagsterRunStatus.QUEUED and now - run.created > QUEUED_LONG_SECONDS
    )
    return tuple(sorted(waiting, key=lambda run: run.created))


def queue_problem(
    active: Sequence[RunView], instance: DagsterInstance, tags: Mapping[str, str], now: float
) -> RunProblem | None:
    """Say that runs wait in the queue for long, and which limit keeps them there.

    Args:
        active: The active runs.
        instance: The Dagster instance. Its limits are read only if a run waits for long.
        tags: Tags of the runs of workers.
        now: Epoch seconds.

    Returns:
        A sentence without a period. None: no run waits for long.
    """
    waiting = queued_long(active, now)
    if not waiting:
        return None
    seconds = now - waiting[0].created
    verb = "has" if len(waiting) == 1 else "have"
    reason = " and ".join(reached_limits(instance, tags)) or _NO_LIMIT_REACHED
    return RunProblem(
        "runs_queued",
        f"{counted(len(waiting), 'worker run')} {verb} been queued for up to "
        f"{duration_text(seconds)}: {reason}",
    )


def reached_limits(instance: DagsterInstance, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the limits of the run queue that are reached, as phrases.

    Args:
        instance: The Dagster instance.
        tags: Tags of the runs of workers.
    """
    limits = _limits(instance)
    if limits is None:
        return ()
    found = []
    most, running = int(limits.max_concurrent_runs), _running(instance, {})
    if 0 <= most <= running:
        found.append(
            f"the run limit {most} (max_concurrent_runs) is reached by {counted(running, 'run')} "
            "in progress"
        )
    for key, value, limit in tag_limits_of(limits.tag_concurrency_limits, tags):
        if _running(instance, {key: value} if value else {}, key) >= limit:
            tag = key if value is None else f"{key}: {printable(value)}"
            found.append(f"the tag limit {limit} of {tag} is reached")
    return tuple(found)


def _limits(instance: DagsterInstance) -> Any:
    try:
        return instance.get_concurrency_config().run_queue_config
    except Exception:  # noqa: BLE001 (an agent of Dagster+ may not know it; then no limit is seen)
        return None


def tag_limits_of(
    limits: Sequence[Mapping[str, Any]], tags: Mapping[str, str]
) -> list[tuple[str, str | None, int]]:
    """The limits that apply to a run with these tags: key, value and number of runs."""
    found = []
    for one in limits:
        key, value = str(one["key"]), one.get("value")
        if key not in tags:
            continue
        if isinstance(value, Mapping) and value.get("applyLimitPerUniqueValue"):
            value = tags[key]
        elif isinstance(value, Mapping):
            value = None
        if value is None or value == tags[key]:
            found.append((key, value, int(one["limit"])))
    return found


def _running(instance: DagsterInstance, tags: dict[str, str], key: str | None = None) -> int:
    """Count the runs in progress with these tags. Dagster cannot filter by a key without value."""
    runs = RunsFilter(statuses=list(IN_PROGRESS), tags=tags)
    if key is None or tags:
        return instance.get_runs_count(runs)
    return sum(key in run.tags for run in instance.get_runs(runs))

"""Evaluate and define the check `workers_running`."""

from collections.abc import Sequence
from typing import Final

import dagster as dg

from kcl_pipeline.assets.contract import PipelineLike
from kcl_pipeline.assets.health import Health
from kcl_pipeline.assets.names import Names
from kcl_pipeline.assets.run_queue import observe_queue, queue_problem
from kcl_pipeline.assets.runs import RunView, active_runs, recent_runs
from kcl_pipeline.clock import Clock
from kcl_pipeline.text import counted

WORKERS: Final = "workers_running"
WORKERS_ADVICE: Final = (
    "Raise the limit of the run queue, or lower Fleet.min; for runs that fail, read the log of the "
    "newest one. See docs/checks-and-events.md"
)
EARLY_FAILURE_SECONDS: Final = 60.0


def early_failures(recent: Sequence[RunView], now: float) -> tuple[RunView, ...]:
    """Consecutive failures, from the newest run back, of runs that lived less than a minute.

    Active runs younger than a minute are ignored: they may still fail early.
    """
    failures: list[RunView] = []
    for run in sorted(recent, key=lambda r: r.created, reverse=True):
        lived = run.lived_seconds
        if run.active:
            if run.started is not None and now - run.started >= EARLY_FAILURE_SECONDS:
                break
            continue
        if run.status.value != "FAILURE" or lived is None or lived >= EARLY_FAILURE_SECONDS:
            break
        failures.append(run)
    return tuple(failures)


def failure_problem(recent: Sequence[RunView], desired: int, now: float) -> str | None:
    """Say that workers keep failing soon after their start. None: they do not.

    Args:
        recent: The newest continuous runs in any status.
        desired: Number of workers that should run. So many failures in a row are a problem.
        now: Epoch seconds.
    """
    failures = early_failures(recent, now)
    if len(failures) < max(desired, 1):
        return None
    return f"the last {counted(len(failures), 'worker run')} failed within a minute of the start"


def workers_running(problems: Sequence[str], running: int) -> Health:
    """Whether nothing keeps workers from running.

    Args:
        problems: Sentences without a period.
        running: Number of continuous workers that run.
    """
    text = "; ".join(problems)
    return Health(
        WORKERS,
        not problems,
        f"{text}. {WORKERS_ADVICE}"
        if problems
        else f"{counted(running, 'continuous worker')} {'runs' if running == 1 else 'run'}",
        dg.AssetCheckSeverity.WARN,
        {"running": running, "problems": len(problems)},
    )


def running_workers(active: Sequence[RunView]) -> int:
    """Count the continuous workers whose run has started."""
    return sum(run.continuous and run.status.value == "STARTED" for run in active)


def build_worker_run_check(
    pipeline: PipelineLike, names: Names, clock: Clock
) -> dg.AssetChecksDefinition:
    """Build the check of the runs of workers. It reads Dagster's runs only."""
    separator = pipeline.settings.worker.worker_group_separator

    @dg.asset_check(
        asset=names.worker_metrics_table,
        name=WORKERS,
        description="No run of a worker waits in Dagster's queue for more than a minute, and the "
        "runs do not keep failing within a minute of their start.",
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        instance, now = context.instance, clock.wall()
        active = active_runs(instance, names.application, separator)
        recent = recent_runs(instance, names.application, separator)
        queue = observe_queue(instance, {**pipeline.workers.run_tags, **names.worker_run_tags})
        found = (
            queue_problem([run for run in active if run.continuous], queue, now),
            failure_problem(recent, pipeline.workers.min, now),
        )
        problems = [one for one in found if one is not None]
        return workers_running(problems, running_workers(active)).result()

    return check

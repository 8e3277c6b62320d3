"""Say what keeps the runs of workers from running."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import dagster as dg

from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.queue import queue_problem
from kcl_pipeline.orchestration.assets.runs.runs import (
    RunView,
    active_runs,
    recent_runs,
    runs_of_version,
)
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.text import counted, printable

EARLY_FAILURE_SECONDS: Final = 60.0
NO_ROW_SECONDS: Final = 120.0
"""A starting worker writes its row after its Spark session exists."""


def early_failures(
    recent: Iterable[RunView], now: float, limit_seconds: float = EARLY_FAILURE_SECONDS
) -> tuple[RunView, ...]:
    """Consecutive failures, from the newest run back, of runs that lived less than the limit.

    Active runs younger than the limit are ignored: they may still fail early. An older one ends the
    list.
    """
    failures: list[RunView] = []
    for run in sorted(recent, key=lambda r: r.created, reverse=True):
        lived = run.lived_seconds
        if run.active:
            if run.started is not None and now - run.started >= limit_seconds:
                break
            continue
        if run.status.value != "FAILURE" or lived is None or lived >= limit_seconds:
            break
        failures.append(run)
    return tuple(failures)


def failure_problem(recent: Sequence[RunView], desired: int, now: float) -> RunProblem | None:
    """Say that workers keep failing soon after their start. None: they do not.

    Args:
        recent: The newest continuous runs in any status.
        desired: Number of workers that should run. So many failures in a row are a problem.
        now: Epoch seconds.
    """
    failures = early_failures(recent, now)
    if len(failures) < max(desired, 1):
        return None
    return RunProblem(
        "runs_failing",
        f"the last {counted(len(failures), 'worker run')} failed within a minute of the start",
    )


def silent_runs(
    active: Sequence[RunView], living: Collection[str], now: float
) -> RunProblem | None:
    """Say that started runs have no worker that reports. None: all report, or are new.

    Dagster does not notice that the host of a run is gone; the leader sensor closes such runs.

    Args:
        active: The active runs.
        living: Ids of the workers whose row changes.
        now: Epoch seconds.
    """
    silent = [
        run.worker_id
        for run in active
        if run.continuous
        and run.status.value == "STARTED"
        and run.started is not None
        and now - run.started > NO_ROW_SECONDS
        and run.worker_id not in living
    ]
    if not silent:
        return None
    return RunProblem(
        "runs_silent",
        f"the workers of {counted(len(silent), 'run')} do not report; the first is "
        f"{printable(min(silent))}",
    )


def observe_run_problems(
    pipeline: PipelineLike,
    names: Names,
    instance: dg.DagsterInstance,
    living: Collection[str],
    version: str | None,
    now: float,
) -> tuple[str, ...]:
    """Observe the runs and the run queue. Returns sentences without a period.

    Args:
        pipeline: The pipeline.
        names: Its names in Dagster.
        instance: The Dagster instance.
        living: Ids of the workers whose row changes.
        version: The version of the code. None: not known.
        now: Epoch seconds.
    """
    fleet, separator = pipeline.workers, pipeline.settings.worker.worker_group_separator
    active = active_runs(instance, names.application, separator)
    recent = recent_runs(instance, names.application, separator)
    workers = [run for run in active if run.continuous]
    found = (
        queue_problem(workers, instance, {**fleet.run_tags, **names.worker_run_tags}, now),
        failure_problem(runs_of_version(recent, version), fleet.min, now),
        silent_runs(active, living, now),
    )
    return tuple(one for one in found if one is not None)

"""Decide how outdated workers are replaced one by one.

`replace` is a pure function of Dagster's runs, of the workers' rows and of the version. Nothing is
remembered between ticks, so that a sensor that was restarted continues.

1. One run of the new version is started in addition.
2. When its worker has reported for `PROVEN_SECONDS`, the oldest outdated worker is asked to drain.
3. When that run has ended, the next one follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dagster import DagsterRunStatus

from kcl_pipeline.assets.runs import RunView
from kcl_pipeline.assets.worker_runs import replacement_problem
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.state import is_failing, is_hung, is_valid
from kcl_pipeline.sensors.reconcile import Heartbeats
from kcl_pipeline.text import counted

PROVEN_SECONDS: Final = 30.0
"""A new worker must report for this time. It then holds leases, or the leader can assign some."""


@dataclass(frozen=True, slots=True)
class WorkerRowsView:
    """The workers' rows, as far as a replacement needs them.

    Attributes:
        reporting: Ids of the workers whose row is there.
        proven: Ids of the workers that have reported for `PROVEN_SECONDS`, and to which the leader
            would assign leases.
        draining: Ids of the workers that were asked to drain.
    """

    reporting: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Replacement:
    """What to do about outdated workers.

    Attributes:
        start: Number of runs to start: 0 or 1.
        drain: The worker to drain. Empty: none.
        text: What happens, for the sentence of the tick. None: nothing.
        problem: Why the replacement has stopped. None: it has not.
    """

    start: int = 0
    drain: tuple[str, ...] = ()
    text: str | None = None
    problem: str | None = None


def rows_view(heartbeats: Heartbeats, limit_seconds: float) -> WorkerRowsView:
    """Return the view of the last observation. Rows that cannot be read count as reporting."""
    rows = {key: row for key, (row, _) in heartbeats.rows.items() if isinstance(row, WorkerMetrics)}
    return WorkerRowsView(
        reporting=frozenset(heartbeats.rows),
        proven=frozenset(
            key
            for key, row in rows.items()
            if heartbeats.proven_seconds(key, limit_seconds) >= PROVEN_SECONDS
            and is_valid(row)
            and not (row.drain_requested or is_failing(row) or is_hung(row))
        ),
        draining=frozenset(key for key, row in rows.items() if row.drain_requested),
    )


def replace(
    active: Sequence[RunView],
    recent: Sequence[RunView],
    outdated: Sequence[RunView],
    rows: WorkerRowsView,
    *,
    version: str,
    desired: int,
    most_runs: int,
    now: float,
) -> Replacement:
    """Decide the next step.

    Args:
        active: All active runs.
        recent: The newest continuous runs in any status.
        outdated: Those of the active runs that are to be replaced.
        rows: The workers' rows.
        version: The version of the pipeline.
        desired: Number of workers.
        most_runs: Largest number of worker runs while one is replaced.
        now: Epoch seconds.
    """
    if not outdated:
        return Replacement()
    workers = [run for run in active if run.continuous]
    new = [run for run in workers if run.version == version]
    problem = replacement_problem(outdated, recent, version, now)
    if problem is not None:
        return Replacement(problem=problem)
    text = f"replacing {counted(len(outdated), 'outdated worker')} by version {version}"
    if any(_is_stopping(run, outdated, rows) for run in workers):
        return Replacement(text=f"{text}, one is stopping")
    if len(workers) < desired:  # the autoscaler starts these, and delays them after failures
        return Replacement(text=f"{text}, when {desired} run")
    unproven = [run for run in new if run.worker_id not in rows.proven]
    if unproven:
        return Replacement(text=f"{text}, a new one {_state(unproven[0])}")
    started = [run for run in outdated if run.status is DagsterRunStatus.STARTED]
    if new and started and len(workers) > desired:
        oldest = min(started, key=lambda run: (run.created, run.run_id))
        return Replacement(drain=(oldest.worker_id,), text=f"{text}: draining {oldest.worker_id}")
    if len(workers) < most_runs:
        return Replacement(start=1, text=f"{text}: starting 1")
    return Replacement(text=f"{text}, waiting for one of {len(workers)} runs to end")


def _is_stopping(run: RunView, outdated: Sequence[RunView], rows: WorkerRowsView) -> bool:
    """Whether the run ends, or may end: an outdated worker without a row has deleted it."""
    if run.status is DagsterRunStatus.CANCELING or run.worker_id in rows.draining:
        return True
    is_started = run.status is DagsterRunStatus.STARTED
    return run in outdated and is_started and run.worker_id not in rows.reporting


def _state(run: RunView) -> str:
    return "is queued" if run.status is DagsterRunStatus.QUEUED else "is starting"

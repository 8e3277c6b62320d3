"""Decide how outdated workers are replaced one by one.

`replace` is a pure function of Dagster's runs, of the workers' rows and of the version. Nothing is
remembered between ticks, so that a sensor that was restarted continues.

1. One run of the new version is started in addition.
2. When its worker has reported for `PROVEN_SECONDS` and has committed a batch, the oldest outdated
   worker is asked to drain.
3. When that run has ended, the next one follows.

A new worker that pauses shards, while no outdated one does, is refused: it is drained, and no other
worker of its version is started while outdated ones run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Final

from dagster import DagsterRunStatus

from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.runs.problems import replacement_problem
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.planning.state import is_failing, is_hung, is_valid
from kcl_pipeline.text import counted, printable

PROVEN_SECONDS: Final = 30.0
"""A new worker must report for this time. It then holds leases, or the leader can assign some."""
COMMITTED_SECONDS: Final = 120.0
"""For so long a new worker is expected to commit a batch, if others do. It may get no lease."""
RECENT_BATCH_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerRowsView:
    """The workers' rows, as far as a replacement needs them.

    Attributes:
        reporting: Ids of the workers whose row is there.
        proven: Ids of the workers that have reported for `PROVEN_SECONDS`, to which the leader
            would assign leases, and that have committed a batch if others do.
        draining: Ids of the workers that were asked to drain.
        paused: By worker id, why the worker has paused shards.
    """

    reporting: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    paused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What to do about outdated workers.

    Attributes:
        start: Number of runs to start: 0 or 1.
        drain: The worker to drain. Empty: none.
        text: What happens, for the sentence of the tick. None: nothing.
        problem: Why the replacement has stopped. None: it has not.
        refused: The run of the drained worker and why its version is refused. None: it is not.
    """

    start: int = 0
    drain: tuple[str, ...] = ()
    refused: tuple[str, str] | None = None
    text: str | None = None
    problem: str | None = None


def rows_view(heartbeats: Heartbeats, limit_seconds: float) -> WorkerRowsView:
    """Return the view of the last observation. Rows that cannot be read count as reporting."""
    rows = {key: row for key, row in heartbeats.rows.items() if isinstance(row, WorkerMetrics)}
    is_busy = any(_has_committed(row, RECENT_BATCH_SECONDS) for row in rows.values())
    paused = {key: reason for key, row in rows.items() if (reason := _paused(row)) is not None}
    return WorkerRowsView(
        reporting=frozenset(heartbeats.rows),
        proven=frozenset(
            key
            for key, row in rows.items()
            if (seconds := heartbeats.proven_seconds(key, limit_seconds)) >= PROVEN_SECONDS
            and (not is_busy or _has_committed(row) or seconds >= COMMITTED_SECONDS)
            and is_valid(row)
            and not (row.drain_requested or is_failing(row) or is_hung(row))
            and key not in paused
            and not (row.status is not None and row.status.failed_batches)  # refused by the sink
        ),
        draining=frozenset(key for key, row in rows.items() if row.drain_requested),
        paused=paused,
    )


def _has_committed(row: WorkerMetrics, within_seconds: float | None = None) -> bool:
    totals = None if row.status is None else row.status.totals
    if totals is None or not totals.batches:
        return False
    age = totals.last_batch_seconds
    return within_seconds is None or (age is not None and age <= within_seconds)


def _paused(row: WorkerMetrics) -> str | None:
    if row.status is None or not row.status.paused_leases:
        return None
    reasons = [printable(one.reason) for one in row.status.paused[:1]]
    return ": ".join([f"has paused {counted(row.status.paused_leases, 'shard')}", *reasons])


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
        return Replacement(problem=problem, drain=_refused_workers(new, rows))
    refused = _refused(new, outdated, rows)
    if refused is not None:
        return refused
    text = f"replacing {counted(len(outdated), 'outdated worker')} by version {version}"
    if any(_is_stopping(run, outdated, rows) for run in workers):
        return Replacement(text=f"{text}, one is stopping")
    if len(workers) < desired:  # the autoscaler starts these, and delays them after failures
        return Replacement(text=f"{text}, when {desired} run")
    unproven = [run for run in new if run.worker_id not in rows.proven]
    if unproven:
        return Replacement(text=f"{text}, a new one {_state(unproven[0], rows)}")
    started = [run for run in outdated if run.status is DagsterRunStatus.STARTED]
    if new and started and len(workers) > desired:
        oldest = min(started, key=lambda run: (run.created, run.run_id))
        return Replacement(drain=(oldest.worker_id,), text=f"{text}: draining {oldest.worker_id}")
    if len(workers) < most_runs:
        return Replacement(start=1, text=f"{text}: starting 1")
    return Replacement(text=f"{text}, waiting for one of {len(workers)} runs to end")


def _refused_workers(new: Sequence[RunView], rows: WorkerRowsView) -> tuple[str, ...]:
    """Refused workers that were not asked to drain: the sensor was killed in between."""
    return tuple(
        run.worker_id
        for run in new
        if run.refused and run.worker_id in rows.reporting - rows.draining
    )


def _refused(
    new: Sequence[RunView], outdated: Sequence[RunView], rows: WorkerRowsView
) -> Replacement | None:
    """Refuse a version that pauses shards, unless the version before does so, too."""
    paused = [run for run in new if run.worker_id in rows.paused]
    if not paused or any(run.worker_id in rows.paused for run in outdated):
        return None
    run = paused[0]
    reason = f"worker {run.worker_id} of version {run.version} {rows.paused[run.worker_id]}"
    stopped = changed(run, refused=reason)
    return Replacement(
        drain=(run.worker_id,),
        refused=(run.run_id, reason),
        problem=replacement_problem(outdated, [stopped], run.version or "", 0.0),
    )


def _is_stopping(run: RunView, outdated: Sequence[RunView], rows: WorkerRowsView) -> bool:
    """Whether the run ends, or may end: an outdated worker without a row has deleted it."""
    if run.status is DagsterRunStatus.CANCELING or run.worker_id in rows.draining:
        return True
    is_started = run.status is DagsterRunStatus.STARTED
    return run in outdated and is_started and run.worker_id not in rows.reporting


def _state(run: RunView, rows: WorkerRowsView) -> str:
    if run.worker_id in rows.paused:
        return rows.paused[run.worker_id]
    if run.worker_id in rows.reporting:
        return "runs, but has not committed for long enough"
    return "is queued" if run.status is DagsterRunStatus.QUEUED else "is starting"

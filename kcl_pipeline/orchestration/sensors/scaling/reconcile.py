"""Report the runs whose worker does not report any more.

Dagster's default launcher does not notice a dead worker after the code server that started it has
ended, and its run monitoring is off by default. A run can also stay in CANCELING while its worker
never received the signal. Both are detected with the monotonic clock of this process alone: a
worker is alive if its row *changes*. The time in the row is not used.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dagster import DagsterInstance, DagsterRunStatus

from kcl_pipeline.changes import LastChanges
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.tables import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.orchestration.assets.runs.runs import RunView

MISSING_ROW_SECONDS: Final = 120.0
"""How long a run may have no worker metrics row.

A starting worker writes its row after its Spark session exists. A stopping worker deletes it.
"""
STUCK_CANCELING_SECONDS: Final = 30.0
LONGEST_GAP_SECONDS: Final = 10.0

Action = Literal["report_failed", "report_canceled", "request_drain"]


@dataclass(frozen=True, slots=True)
class RunMismatch:
    """A run whose status does not match its worker, and the action that corrects it."""

    run_id: str
    worker_id: str
    action: Action
    reason: str


@dataclass(slots=True)
class Heartbeats:
    """How long each worker's row has not changed. Can be built again at any time.

    Only observed time counts: the time between two observations adds at most
    `LONGEST_GAP_SECONDS`. During an outage of the table no worker can report. Afterwards every
    worker has its full time again.

    Attributes:
        rows: By worker id, its last row.
    """

    rows: dict[str, WorkerMetrics | BadRow] = field(default_factory=dict)
    _reported: frozenset[str] = frozenset()
    _observed_at: float = -math.inf
    _heartbeats: LastChanges[str] = field(default_factory=LastChanges)
    _absent: LastChanges[str] = field(default_factory=LastChanges)
    _canceling: LastChanges[str] = field(default_factory=LastChanges)

    def observe(
        self,
        rows: Iterable[WorkerMetrics],
        runs: Sequence[RunView],
        now: float,
        *,
        unreadable: Iterable[BadRow] = (),
    ) -> None:
        """Add one observation of the table and of Dagster's runs at `now` (monotonic seconds).

        A row that cannot be read shows in the same way whether its worker reports.
        """
        observed = (self._heartbeats, self._absent, self._canceling)
        gap = max(now - self._observed_at - LONGEST_GAP_SECONDS, 0.0)
        if math.isfinite(gap):
            for changes in observed:
                changes.shift(gap)
        self._observed_at = now
        self.rows = {row.worker_id: row for row in rows} | {row.key: row for row in unreadable}
        self._reported = (self._reported | self.rows.keys()) & {run.worker_id for run in runs}
        started = [
            r for r in runs if r.status in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
        ]
        canceling = [r for r in started if r.status is DagsterRunStatus.CANCELING]
        absent = [r for r in started if r.worker_id not in self.rows]
        self._heartbeats.observe({key: _heartbeat(row) for key, row in self.rows.items()}, now)
        self._absent.observe({r.run_id: True for r in absent}, now)
        self._canceling.observe({r.run_id: True for r in canceling}, now)

    @property
    def ended(self) -> frozenset[str]:
        """Workers that have deleted their row, and whose run is still active."""
        return self._reported - self.rows.keys()

    def silent_seconds(self, worker_id: str) -> float | None:
        """For how many seconds the row has not changed; None without a row."""
        return self._seconds(self._heartbeats, worker_id)

    def absent_seconds(self, run_id: str) -> float:
        """For how many seconds the worker of a run has had no row."""
        return self._seconds(self._absent, run_id) or 0.0

    def canceling_seconds(self, run_id: str) -> float:
        """For how many seconds a run has been in CANCELING."""
        return self._seconds(self._canceling, run_id) or 0.0

    def _seconds(self, changes: LastChanges[str], key: str) -> float | None:
        return self._observed_at - changes.since(key) if key in changes else None


def _heartbeat(row: WorkerMetrics | BadRow) -> object:
    """What only the worker writes. A drain request is written by others."""
    return row.heartbeat if isinstance(row, BadRow) else (row.last_update_seconds, row.stats)


def find_mismatches(
    heartbeats: Heartbeats, runs: Sequence[RunView], limit_seconds: float
) -> tuple[RunMismatch, ...]:
    """Find runs without a live worker, and runs in CANCELING whose worker keeps running."""
    findings = []
    for run in runs:
        if run.status not in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING):
            continue
        canceling = run.status is DagsterRunStatus.CANCELING
        silent = heartbeats.silent_seconds(run.worker_id)
        action: Action = "report_canceled" if canceling else "report_failed"
        if silent is not None and silent > limit_seconds:
            reason = f"has not reported for {silent:.0f} s"
        elif silent is None and heartbeats.absent_seconds(run.run_id) > MISSING_ROW_SECONDS:
            reason = f"has had no row for {MISSING_ROW_SECONDS:.0f} s"
        elif (
            silent is not None
            and canceling
            and heartbeats.canceling_seconds(run.run_id) > STUCK_CANCELING_SECONDS
        ):
            action, reason = "request_drain", "keeps running while its run is being cancelled"
        else:
            continue
        reason = f"worker {run.worker_id} {reason}"
        findings.append(RunMismatch(run.run_id, run.worker_id, action, reason))
    return tuple(findings)


def apply_findings(
    findings: Sequence[RunMismatch], instance: DagsterInstance, table: WorkerMetricsTable
) -> tuple[str, ...]:
    """Apply the findings and return a log line for each action taken.

    A worker whose run is reported dead also receives a drain request. If it was only paused, it
    must not continue without a run.
    """
    done = []
    for finding in findings:
        requested = table.request_drain(finding.worker_id)
        if finding.action == "request_drain":
            if requested:
                done.append(f"{finding.reason}: requested a drain")
            continue
        run = instance.get_run_by_id(finding.run_id)
        if run is None or run.is_finished:
            continue
        message = f"kcl_pipeline leader: {finding.reason}"
        if finding.action == "report_canceled":
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        done.append(f"{finding.reason}: closed run {finding.run_id[:8]}")
    return tuple(done)


def cancel_queued(instance: DagsterInstance, run_ids: Iterable[str]) -> None:
    """Cancel these runs, unless Dagster has taken them from its queue meanwhile."""
    for run_id in run_ids:
        run = instance.get_run_by_id(run_id)
        if run is not None and run.status is DagsterRunStatus.QUEUED:
            message = "kcl_pipeline leader: there are enough workers without this queued run"
            instance.report_run_canceled(run, message)

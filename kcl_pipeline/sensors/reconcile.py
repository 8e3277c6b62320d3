"""Dagster's runs against the workers' heartbeats.

Dagster's default launcher does not notice a dead worker after the code server that started it is
gone, and a run can be stuck in CANCELING with a worker that never got the signal. Both are judged
on this process's monotonic clock alone: what counts is whether a worker's row *moved*, never what
time it says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dagster import DagsterInstance, DagsterRunStatus

from kcl_pipeline.assets.runs import RunView
from kcl_pipeline.leases.tables import WorkerMetrics, WorkerMetricsTable

NO_ROW_SECONDS: Final = 120.0
"""A starting worker has no row until its Spark session stands, a finishing one has deleted it: both
are given this long.
"""
STUCK_CANCELING_SECONDS: Final = 30.0
LONGEST_GAP_SECONDS: Final = 10.0

Action = Literal["report_failed", "report_canceled", "request_drain"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A run that does not agree with its worker, and what to do about it."""

    run_id: str
    worker_id: str
    action: Action
    reason: str


@dataclass(slots=True)
class Heartbeats:
    """For how long each worker's row has stood still, and each run has been in its present state;
    may be rebuilt at any time.

    Only time that was watched counts: a gap between two looks adds at most `LONGEST_GAP_SECONDS`.
    After an outage of the table, in which nobody could report, workers therefore have their full
    time again.
    """

    looked: float | None = None
    rows: dict[str, tuple[WorkerMetrics, float]] = field(default_factory=dict)
    absent: dict[str, float] = field(default_factory=dict)
    canceling: dict[str, float] = field(default_factory=dict)

    def observe(self, rows: Iterable[WorkerMetrics], runs: Sequence[RunView], now: float) -> None:
        """Take in one look at the table and at Dagster, at `now` of a monotonic clock."""
        step = 0.0 if self.looked is None else min(now - self.looked, LONGEST_GAP_SECONDS)
        self.looked = now
        seen = {row.worker_id: row for row in rows}
        self.rows = {
            worker_id: (
                row,
                before[1] + step
                if (before := self.rows.get(worker_id)) and _same_beat(before[0], row)
                else 0.0,
            )
            for worker_id, row in seen.items()
        }
        started = [
            r for r in runs if r.status in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
        ]
        canceling = [r for r in started if r.status is DagsterRunStatus.CANCELING]
        self.absent = {
            r.run_id: self.absent.get(r.run_id, -step) + step
            for r in started
            if r.worker_id not in seen
        }
        self.canceling = {r.run_id: self.canceling.get(r.run_id, -step) + step for r in canceling}

    def silent_seconds(self, worker_id: str) -> float | None:
        """How long the row was seen standing still; None when there is no row."""
        beat = self.rows.get(worker_id)
        return None if beat is None else beat[1]


def _same_beat(before: WorkerMetrics, after: WorkerMetrics) -> bool:
    """Whether the worker wrote nothing in between; a drain request is somebody else's write."""
    return before.last_update_seconds == after.last_update_seconds and before.stats == after.stats


def judge(beats: Heartbeats, runs: Sequence[RunView], limit_seconds: float) -> tuple[Finding, ...]:
    """Runs without a living worker, and runs that are being cancelled while their worker
    lives on.
    """
    findings = []
    for run in runs:
        if run.status not in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING):
            continue
        canceling = run.status is DagsterRunStatus.CANCELING
        silent = beats.silent_seconds(run.worker_id)
        gone: Action = "report_canceled" if canceling else "report_failed"
        if silent is not None and silent > limit_seconds:
            findings.append(
                Finding(
                    run.run_id,
                    run.worker_id,
                    gone,
                    f"worker {run.worker_id} has not reported for {silent:.0f} s",
                )
            )
        elif silent is None and beats.absent.get(run.run_id, 0.0) > NO_ROW_SECONDS:
            findings.append(
                Finding(
                    run.run_id,
                    run.worker_id,
                    gone,
                    f"worker {run.worker_id} has had no row for {NO_ROW_SECONDS:.0f} s",
                )
            )
        elif (
            silent is not None
            and canceling
            and beats.canceling.get(run.run_id, 0.0) > STUCK_CANCELING_SECONDS
        ):
            findings.append(
                Finding(
                    run.run_id,
                    run.worker_id,
                    "request_drain",
                    f"worker {run.worker_id} goes on though its run is being cancelled",
                )
            )
    return tuple(findings)


def act(
    findings: Sequence[Finding], instance: DagsterInstance, table: WorkerMetricsTable
) -> tuple[str, ...]:
    """Carry the findings out; returns a sentence for each that was.

    A worker whose run is reported dead is also told to drain: should it only have been paused, it
    must not go on outside any run.
    """
    done = []
    for finding in findings:
        asked = table.request_drain(finding.worker_id)
        if finding.action == "request_drain":
            if asked:
                done.append(f"{finding.reason}: asked to drain")
            continue
        run = instance.get_run_by_id(finding.run_id)
        if run is None or run.is_finished:
            continue
        message = f"kcl_pipeline leader: {finding.reason}"
        if finding.action == "report_canceled":
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        done.append(f"{finding.reason}: run {finding.run_id[:8]} closed")
    return tuple(done)

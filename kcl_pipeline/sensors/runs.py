"""Dagster's runs of one application, as plain values."""

from dataclasses import dataclass

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from kcl_pipeline.assets.names import APPLICATION_TAG, CONTINUOUS, LAG_TAG, MODE_TAG, worker_id_of

ACTIVE = frozenset(
    {
        DagsterRunStatus.QUEUED,
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.MANAGED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    }
)
"""CANCELING counts: its worker still holds leases, and a replacement that starts beside it would be one too many."""

_RECENT = 20


@dataclass(frozen=True, slots=True)
class RunView:
    """One worker run. Times are epoch seconds as Dagster recorded them; `lag_millis` is what the worker reported last."""

    run_id: str
    status: DagsterRunStatus
    worker_id: str
    continuous: bool
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    lag_millis: int | None = None

    @property
    def active(self) -> bool:
        """Whether the run may have, or get, a living worker."""
        return self.status in ACTIVE

    @property
    def lived_seconds(self) -> float | None:
        """From start to end; 0.0 when it ended without having started, None while it is active."""
        if self.ended is None:
            return None
        return 0.0 if self.started is None else max(self.ended - self.started, 0.0)


def _view(record: RunRecord, application: str, separator: str) -> RunView:
    run = record.dagster_run
    lag = run.tags.get(LAG_TAG, "")
    return RunView(
        run_id=run.run_id,
        status=run.status,
        worker_id=worker_id_of(application, run.run_id, separator),
        continuous=run.tags.get(MODE_TAG) == CONTINUOUS,
        created=record.create_timestamp.timestamp(),
        started=record.start_time,
        ended=record.end_time,
        lag_millis=int(lag) if lag.isdigit() else None,
    )


def active_runs(instance: DagsterInstance, application: str, separator: str) -> tuple[RunView, ...]:
    """All runs that may have a living worker, newest first."""
    runs = RunsFilter(tags={APPLICATION_TAG: application}, statuses=sorted(ACTIVE, key=lambda s: s.value))
    return tuple(_view(r, application, separator) for r in instance.get_run_records(runs))


def recent_runs(instance: DagsterInstance, application: str, separator: str) -> tuple[RunView, ...]:
    """The newest continuous runs in any status, newest first."""
    runs = RunsFilter(tags={APPLICATION_TAG: application, MODE_TAG: CONTINUOUS})
    return tuple(_view(r, application, separator) for r in instance.get_run_records(runs, limit=_RECENT))


def worst_lag_millis(runs: tuple[RunView, ...]) -> int | None:
    """The largest lag that a started worker reported; None when none did."""
    return max((r.lag_millis for r in runs if r.status is DagsterRunStatus.STARTED and r.lag_millis is not None), default=None)

"""Read the Dagster runs of one application as plain values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.names import (
    APPLICATION_TAG,
    CONTINUOUS,
    DRAIN,
    DRAINED_TAG,
    LAG_AT_TAG,
    LAG_TAG,
    LOCATION_TAG,
    MODE_TAG,
    PAUSED_TAG,
    REFUSED_TAG,
    REPOSITORY_TAG,
    STALLED_TAG,
    VERSION_TAG,
    worker_id_of,
)

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
"""Statuses of a run that has, or will have, a worker.

CANCELING is included, because the worker still holds leases. A replacement would be one worker
too many.
"""

_RECENT = 20
MIN_SILENCE_SECONDS: Final = 20.0
LEAST_SILENT_SECONDS: Final = 180.0


@dataclass(frozen=True, slots=True)
class RunView:
    """One worker run.

    Attributes:
        run_id: Id of the run in Dagster.
        status: Status of the run in Dagster.
        worker_id: The worker of the run.
        continuous: Whether the run consumes until it is terminated.
        created: Epoch seconds as Dagster recorded them, as are `started` and `ended`.
        started: When the run started; None before.
        ended: When the run ended; None before.
        lag_millis: The lag that the worker reported last.
        stalled_shards: Number of stalled shards in the last report.
        paused_shards: Number of paused shards in the last report.
        lag_at: Time of the last report by the worker's clock, in epoch seconds.
        version: Version of the pipeline that the run was started with. None: not known.
        location: Code location that the run was started in. None: not known.
        refused: Why the sensor has ended the worker, because its version does not work. None: it
            has not.
    """

    run_id: str
    status: DagsterRunStatus
    worker_id: str
    continuous: bool
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    lag_millis: int | None = None
    stalled_shards: int = 0
    paused_shards: int = 0
    lag_at: float | None = None
    version: str | None = None
    location: str | None = None
    refused: str | None = None

    @property
    def active(self) -> bool:
        """Whether the run may have, or get, a live worker."""
        return self.status in ACTIVE

    @property
    def lived_seconds(self) -> float | None:
        """From start to end; 0.0 for a run that never started, None for an active run."""
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
        stalled_shards=_count_of(run.tags.get(STALLED_TAG, "")),
        paused_shards=_count_of(run.tags.get(PAUSED_TAG, "")),
        lag_at=_seconds_of(run.tags.get(LAG_AT_TAG, "")),
        version=run.tags.get(VERSION_TAG),
        location=run.tags.get(LOCATION_TAG)
        or run.tags.get(REPOSITORY_TAG, "").partition("@")[2]
        or None,
        refused=run.tags.get(REFUSED_TAG),
    )


def _count_of(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _seconds_of(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def active_runs(instance: DagsterInstance, application: str, separator: str) -> tuple[RunView, ...]:
    """All runs that may have a live worker, newest first."""
    runs = RunsFilter(
        tags={APPLICATION_TAG: application}, statuses=sorted(ACTIVE, key=lambda s: s.value)
    )
    return tuple(_view(r, application, separator) for r in instance.get_run_records(runs))


def recent_runs(instance: DagsterInstance, application: str, separator: str) -> tuple[RunView, ...]:
    """The newest continuous runs in any status, newest first."""
    runs = RunsFilter(tags={APPLICATION_TAG: application, MODE_TAG: CONTINUOUS})
    return tuple(
        _view(r, application, separator) for r in instance.get_run_records(runs, limit=_RECENT)
    )


def runs_of_version(recent: Sequence[RunView], version: str) -> tuple[RunView, ...]:
    """The runs of this version. Failures of another one say nothing about it.

    A run without a version counts, because it may be of this one.
    """
    return tuple(run for run in recent if run.version in (None, version))


def last_drain(instance: DagsterInstance, application: str) -> float | None:
    """When the newest drain had all records in the table, in epoch seconds; None without one.

    Drains beside workers that held leases do not count.
    """
    runs = RunsFilter(
        tags={APPLICATION_TAG: application, MODE_TAG: DRAIN},
        statuses=[DagsterRunStatus.STARTED, DagsterRunStatus.SUCCESS],
    )
    tags = (record.dagster_run.tags for record in instance.get_run_records(runs, limit=_RECENT))
    found = (_seconds_of(one.get(DRAINED_TAG, "")) for one in tags)
    return max((at for at in found if at is not None), default=None)


def worst_lag_millis(runs: tuple[RunView, ...]) -> int | None:
    """The largest lag that a started worker reported; None without a report.

    A worker that hangs leaves its last report as it is.
    """
    return max(
        (
            r.lag_millis
            for r in runs
            if r.status is DagsterRunStatus.STARTED and r.lag_millis is not None
        ),
        default=None,
    )


def silent_lag_millis(runs: tuple[RunView, ...], now: float, progress_seconds: float) -> int | None:
    """How large the lag of started workers can be that have stopped to report; None: all report.

    It is the last reported lag and the time since. A worker that hangs does not report its lag, so
    its last one says nothing about now.

    Args:
        runs: The active runs.
        now: Epoch seconds. They are compared with the clocks of the workers, so a report counts as
            missing only after three periods and three minutes.
        progress_seconds: Time between two reports of a worker.
    """
    limit = max(3 * progress_seconds, LEAST_SILENT_SECONDS)
    ages = [
        (run.lag_millis or 0) + round(1000 * (now - run.lag_at))
        for run in runs
        if run.status is DagsterRunStatus.STARTED
        and run.lag_at is not None
        and now - run.lag_at > limit
    ]
    return max(ages, default=None)


def fleet_lag_millis(workers: Sequence[WorkerMetrics], ages: Iterable[float]) -> int | None:
    """The largest lag in the rows of these workers, or of leases without a live worker.

    Workers write their row even while a batch hangs.

    Args:
        workers: The live workers.
        ages: How old the oldest unread records of the leases can be, in seconds.
    """
    lags = [
        worker.status.lag_millis
        for worker in workers
        if worker.status is not None and worker.status.lag_millis is not None
    ]
    lags += [round(age * 1000) for age in ages]
    return max(lags, default=None)


def fleet_lag_age_seconds(
    workers: Sequence[WorkerMetrics], runs: tuple[RunView, ...], now: float
) -> float | None:
    """Age of the oldest row that `fleet_lag_millis` uses, or else of the oldest report of a run.

    For display only, because it compares the clocks of two hosts.
    """
    reported: list[float] = [
        worker.last_update_seconds
        for worker in workers
        if worker.status is not None and worker.status.lag_millis is not None
    ]
    reported = reported or [
        r.lag_at
        for r in runs
        if r.status is DagsterRunStatus.STARTED
        and r.lag_millis is not None
        and r.lag_at is not None
    ]
    return max(now - min(reported), 0.0) if reported else None


def stalled_shards(runs: tuple[RunView, ...]) -> int:
    """Number of stalled shards of started workers."""
    return sum(r.stalled_shards for r in runs if r.status is DagsterRunStatus.STARTED)


def silence_limit_seconds(settings: ConsumerSettings) -> float:
    """After how long without a change of its row a worker counts as dead.

    Three reporting intervals, at least `MIN_SILENCE_SECONDS`.
    """
    return max(
        3 * settings.worker.worker_metrics_reporter_freq_in_millis / 1000, MIN_SILENCE_SECONDS
    )


def paused_shards(runs: tuple[RunView, ...]) -> int:
    """Count the shards of started workers that are paused."""
    return sum(r.paused_shards for r in runs if r.status is DagsterRunStatus.STARTED)

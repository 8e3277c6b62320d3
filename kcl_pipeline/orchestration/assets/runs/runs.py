"""Read the Dagster runs of one application as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.orchestration.assets.names import (
    APPLICATION_TAG,
    CONTINUOUS,
    DRAIN,
    DRAINED_TAG,
    LOCATION_TAG,
    MODE_TAG,
    REPLACES_TAG,
    REPOSITORY_TAG,
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
        version: Version of the code that the run was started with. None: not known.
        location: Code location that the run was started in. None: not known.
        replaces: Id of the worker that the worker of this run replaces. None: of no worker.
    """

    run_id: str
    status: DagsterRunStatus
    worker_id: str
    continuous: bool
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    version: str | None = None
    location: str | None = None
    replaces: str | None = None

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
    return RunView(
        run_id=run.run_id,
        status=run.status,
        worker_id=worker_id_of(application, run.run_id, separator),
        continuous=run.tags.get(MODE_TAG) == CONTINUOUS,
        created=record.create_timestamp.timestamp(),
        started=record.start_time,
        ended=record.end_time,
        version=run.tags.get(VERSION_TAG),
        location=run.tags.get(LOCATION_TAG)
        or run.tags.get(REPOSITORY_TAG, "").partition("@")[2]
        or None,
        replaces=run.tags.get(REPLACES_TAG),
    )


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


def runs_of_version(recent: Sequence[RunView], version: str | None) -> tuple[RunView, ...]:
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


def silence_limit_seconds(settings: ConsumerSettings) -> float:
    """After how long without a change of its row a worker counts as dead.

    Three reporting intervals, at least `MIN_SILENCE_SECONDS`.
    """
    return max(
        3 * settings.worker.worker_metrics_reporter_freq_in_millis / 1000, MIN_SILENCE_SECONDS
    )

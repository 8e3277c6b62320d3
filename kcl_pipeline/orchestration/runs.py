"""Read and describe the Dagster runs of workers.

In reading order: metadata of a worker's counters, runs as plain values, waits in the run queue, and
what keeps runs from running.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import dagster as dg
from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.orchestration.names import (
    APPLICATION_TAG,
    CONTINUOUS,
    DRAIN,
    DRAINED_TAG,
    LOCATION_TAG,
    MODE_TAG,
    REPLACES_TAG,
    REPOSITORY_TAG,
    VERSION_TAG,
    Names,
    worker_id_of,
)
from kcl_pipeline.orchestration.options import PipelineLike
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.text import counted, duration_text, printable
from kcl_pipeline.worker.summary import WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus

# Convert a worker's counters to Dagster metadata.
#
# Dagster plots numbers. Only values that add up over periods and runs are numbers. A value of one
# worker or one moment is text or a table, because several workers materialize the same asset and
# their values would alternate in the plot.

MAX_ROWS: Final = 50
ADDITIVE: Final = (
    "records",
    "bytes",
    "rows",
    "batches",
    "dead_letters",
    "refused_batches",
    "handoffs",
)
"""The counters of a worker that add up over periods and workers."""
_NUMBERS: Final = (dg.IntMetadataValue, dg.FloatMetadataValue)


def known(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without values that are None."""
    return {name: value for name, value in metadata.items() if value is not None}


def lag_text(millis: int | None) -> str:
    """A lag as text."""
    return "unknown" if millis is None else f"{millis / 1000:.1f} s"


def table_of(
    rows: list[dict[str, Any]], most: int = MAX_ROWS
) -> dg.TableMetadataValue | dg.TextMetadataValue:
    """Convert the first rows to a metadata table, or to the text "none" without rows.

    Values are strings and numbers; None becomes an empty cell.
    """
    if not rows:
        return dg.MetadataValue.text("none")
    records = [
        dg.TableRecord({key: "" if value is None else value for key, value in row.items()})
        for row in rows[:most]
    ]
    columns = [dg.TableColumn(name, _type_of(rows, name)) for name in rows[0]]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))


def _type_of(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    if all(isinstance(v, int) for v in values):
        return "int"
    return "float" if all(isinstance(v, int | float) for v in values) else "string"


def period_text(progress: WorkerStatus) -> str:
    """One reporting period of one worker as a sentence."""
    unknown, done = progress.unknown_lags, progress.totals
    parts = [
        f"{counted(done.records, 'record')} in {done.seconds:.0f} s",
        f"lag {lag_text(progress.lag_millis)}"
        + (f" (of {counted(unknown, 'shard')} not known yet)" if unknown else ""),
        *sorted(f"{one.lease_key} does not advance: {one.step}" for one in progress.stalled),
        *sorted(f"{one.lease_key} is paused: {one.reason}" for one in progress.paused),
    ]
    return "; ".join(parts)


def _text(value: object) -> dg.TextMetadataValue | None:
    return None if value is None else dg.MetadataValue.text(str(value))


def final_metadata(
    summary: WorkerSummary, last: WorkerStatus | None, *, sensor_counts: bool
) -> dict[str, Any]:
    """Metadata of a worker that has stopped.

    The totals of the run are text; `run_records` and `run_handoffs` are also numbers, one per run.

    Args:
        summary: The summary.
        last: The last report.
        sensor_counts: Whether the reports of the sensor have the counters of this worker. If not,
            they are numbers here, too.
    """
    total, status = summary.total, summary.status
    positions = status.positions or (last.positions if last else {})
    version = (
        status.table_version
        if status.table_version is not None
        else (last.table_version if last else None)
    )
    metadata = {name: getattr(total, name) for name in (() if sensor_counts else ADDITIVE)} | {
        "run_records": total.records,
        "run_handoffs": total.handoffs,
        "worker": dg.MetadataValue.text(summary.worker_id),
        "stopped": dg.MetadataValue.text(str(summary.reason)),
        "whole_run": dg.MetadataValue.text(
            f"{counted(total.records, 'record')}, {counted(total.bytes, 'byte')}, "
            f"{counted(total.rows, 'row')}, {counted(total.batches, 'batch', 'batches')}, "
            f"{counted(total.dead_letters, 'dead letter')}, {counted(total.handoffs, 'handoff')} "
            f"in {total.seconds:.0f} s"
        ),
        "positions": table_of(
            [{"lease": key, "position": positions[key]} for key in sorted(positions)]
        ),
        "left_to_others": _text(summary.elsewhere_sentence),
        "table_version": _text(version),
    }
    return known(metadata)


def last_figures(instance: DagsterInstance, output: dg.AssetKey) -> dict[str, Any]:
    """The figures of the output as they were last reported, for the end of a continuous worker.

    The Dagster UI shows the metadata of the latest materialization only. Numbers become text,
    because they are in the plots already. `figures_of` is the time of the report.
    """
    entry = instance.get_latest_materialization_event(output)
    if entry is None or entry.asset_materialization is None:
        return {}
    return {"figures_of": dg.MetadataValue.timestamp(entry.timestamp)} | {
        name: _text(one.value) if isinstance(one, _NUMBERS) else one
        for name, one in entry.asset_materialization.metadata.items()
    }


# Read the Dagster runs of one application as plain values.

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


# Find out for how long runs of workers wait in Dagster's run queue, and why.

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


# Say what keeps the runs of workers from running.

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


def starting_workers(active: Sequence[RunView], reported: Collection[str], now: float) -> int:
    """The number of continuous workers whose run is active and that may report soon.

    Args:
        active: The active runs.
        reported: Ids of the workers that have a row.
        now: Epoch seconds.
    """
    return sum(
        run.continuous
        and run.status is not DagsterRunStatus.CANCELING
        and run.worker_id not in reported
        and (run.started is None or now - run.started <= NO_ROW_SECONDS)
        for run in active
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

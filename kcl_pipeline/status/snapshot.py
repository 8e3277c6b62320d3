"""Read the state of an application as one value, and compare two of them.

A row has the time of its writer's clock. One look at the tables cannot tell whether the writer
lives. A `LifeObservation` can: two looks, one period apart, or what the leader sensor has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Protocol, Self, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import STREAM_ERRORS, AwsError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leases.application import ApplicationRecord, Losses, Pause, streams_to_read
from kcl_pipeline.leases.coordinator import CoordinatorStateTable, LeaderLock, UnreadableLock
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker_status import UnavailableStream

JAVA_PERIOD_SECONDS: Final = 30.0
"""A worker of the Java KCL writes its row once per this time."""
REPORTS: Final = 3.0
"""A worker that has not reported for so many periods counts as dead."""
MIN_SILENCE_SECONDS: Final = 20.0
READS: Final = 6
"""So many parts of the tables `read_snapshot` reads, each with a failure of its own."""

_T = TypeVar("_T")


class TablesLike(Protocol):
    """The three tables."""

    @property
    def lease(self) -> LeaseTable:
        """The lease table."""

    @property
    def workers(self) -> WorkerMetricsTable:
        """The worker-metrics table."""

    @property
    def coordinator(self) -> CoordinatorStateTable:
        """The coordinator-state table."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A part of the state that could not be read.

    Attributes:
        part: What was read.
        error: Why it failed.
    """

    part: str
    error: AwsError


class RunProblem(str):
    """A sentence about runs of workers, with the name of its finding.

    Attributes:
        name: The name, such as `runs_queued`.
    """

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str, sentence: str) -> Self:
        """Return the sentence."""
        made = super().__new__(cls, sentence)
        made.name = name
        return made


@dataclass(frozen=True, slots=True)
class LifeObservation:
    """What several looks show and one cannot.

    Attributes:
        seconds: How long the observation has lasted.
        limit_seconds: A lease without a live owner is a finding after this time.
        silent: By worker id, for how many seconds the row of a dead worker has not changed.
        waits: By lease key, for how many seconds it has not been renewed by a live owner.
        unchanged: By lease key, for how many seconds its checkpoint has not changed.
        leader_absent: For how many seconds nobody has led.
        leader_reason: Why nobody leads. None: not known.
        goes_on: Whether the observer goes on, as the sensor does. It reports a leader that is
            absent after a limit, and two looks report it at once.
    """

    seconds: float
    limit_seconds: float
    silent: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    unchanged: Mapping[str, float] = field(default_factory=dict)
    leader_absent: float = 0.0
    leader_reason: str | None = None
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of an application at one moment. The reads are eventually consistent.

    Attributes:
        application: Its name.
        at: Epoch seconds of the reader's clock.
        period_seconds: How often our workers report.
        streams: Names or ARNs of all streams. Empty: not known.
        leases: All leases, sorted by key.
        workers: All worker metrics rows, sorted by id. Dead workers leave theirs.
        bad_rows: Rows that cannot be parsed.
        lock: The leader lock. None: there is none.
        pause: The pause. None: not paused.
        losses: The recorded losses.
        failures: The parts that could not be read.
        observed: What several looks show. None: there was one look.
        unavailable: Streams that are missing or forbidden. None: not known.
        resolved: The streams that could be described, with their retention periods.
        listed: Keys of the leases of all shards that Kinesis lists. None: not known.
        dead_letters: Records that became dead letters in the last hour. None: not known.
        run_problems: What keeps the runs of workers from running, as sentences. A `RunProblem` has
            the name of its finding.
        drained_at: When a drain had all records in the table, in epoch seconds. None: not known.
        starting: Number of workers whose runs are active and that have not reported yet. Only
            Dagster knows it.
    """

    application: str
    at: float
    period_seconds: float = 10.0
    streams: tuple[str, ...] = ()
    leases: tuple[Lease, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    lock: LeaderLock | UnreadableLock | None = None
    pause: Pause | None = None
    losses: Losses = field(default_factory=Losses)
    failures: tuple[Failure, ...] = ()
    observed: LifeObservation | None = None
    unavailable: tuple[UnavailableStream, ...] | None = None
    resolved: tuple[StreamId, ...] = ()
    listed: frozenset[str] | None = None
    dead_letters: int | None = None
    run_problems: tuple[str, ...] = ()
    drained_at: float | None = None
    starting: int = 0

    @cached_property
    def unfinished(self) -> tuple[Lease, ...]:
        """The leases whose shards have not ended."""
        return tuple(lease for lease in self.leases if not lease.ended)

    def age(self, worker: WorkerMetrics) -> float:
        """How old a row is, in seconds, as its writer's clock says."""
        return max(self.at - worker.last_update_seconds, 0.0)

    @cached_property
    def silent(self) -> Mapping[str, float]:
        """By worker id, for how many seconds a dead worker has not reported."""
        if self.observed is not None:
            return self.observed.silent
        limits = {w.worker_id: silence_seconds(w, self.period_seconds) for w in self.workers}
        return {w.worker_id: self.age(w) for w in self.workers if self.age(w) > limits[w.worker_id]}

    @cached_property
    def live(self) -> tuple[WorkerMetrics, ...]:
        """The workers that report."""
        return tuple(w for w in self.workers if w.worker_id not in self.silent)

    @cached_property
    def unowned(self) -> Mapping[str, float]:
        """By lease key, for how many seconds it has had no live owner; 0.0: not observed."""
        live = {worker.worker_id for worker in self.live}
        waits = {} if self.observed is None else self.observed.waits
        return {
            lease.lease_key: waits.get(lease.lease_key, 0.0)
            for lease in self.unfinished
            if lease.actual_owner not in live or lease.lease_key in waits
        }

    @cached_property
    def unread(self) -> Mapping[str, float]:
        """By lease key, how old the oldest unread record can be, in seconds.

        It is the lag in the row of the lease's worker. Without one it is the time since all records
        of the shard were in the table, which our workers write to the lease row, and at most the
        smallest lag that the worker lists. Leases for which all are unknown are left out.
        """
        live = {worker.worker_id: worker for worker in self.live}
        lags = {
            (w.worker_id, lag.lease_key): lag.millis / 1000
            for w in self.live
            if w.status is not None
            for lag in w.status.lags
        }
        ages: dict[str, float] = {}
        for lease in self.unfinished:
            worker = live.get(lease.actual_owner or "")
            if worker is not None and worker.status is None:
                continue  # a worker of another implementation leaves the time in the row as it is
            key = (lease.actual_owner or "", lease.lease_key)
            if key in lags:
                ages[lease.lease_key] = lags[key]
                continue
            limits = [] if worker is None else unlisted_lags(worker)
            if lease.read_up_to_millis is not None:
                limits.append(max(self.at - lease.read_up_to_millis / 1000, 0.0))
            if self.drained_at is not None and worker is None:
                limits.append(max(self.at - self.drained_at, 0.0))
            if limits:
                ages[lease.lease_key] = min(limits)
        return ages

    @property
    def lag_seconds(self) -> float | None:
        """The largest lag of the application. None: nothing is known."""
        lags = [
            w.status.lag_millis / 1000
            for w in self.live
            if w.status is not None and w.status.lag_millis is not None
        ]
        return max([*lags, *self.unread.values()], default=None)


def silence_seconds(worker: WorkerMetrics, period_seconds: float) -> float:
    """After how many seconds without a report a worker counts as dead."""
    period = JAVA_PERIOD_SECONDS if worker.run_id is None else period_seconds
    return max(REPORTS * period, MIN_SILENCE_SECONDS)


def unlisted_lags(worker: WorkerMetrics) -> list[float]:
    """The upper bound, in seconds, of the lags that a worker's row does not list; or nothing."""
    status = worker.status
    if status is None or not status.lags or not status.more_lags:
        return []
    return [min(lag.millis for lag in status.lags) / 1000]


def read_snapshot(
    tables: TablesLike,
    settings: ConsumerSettings,
    clock: Clock,
    kinesis: KinesisClient | None = None,
) -> Snapshot:
    """Read the state of an application. A part that cannot be read is in `failures`.

    Args:
        tables: The three tables.
        settings: The settings of the application.
        clock: The time.
        kinesis: Describes and lists the streams. None: they are not looked at.
    """
    failures: list[Failure] = []

    def read(part: str, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except AwsError as error:
            failures.append(Failure(part, error))
            return None

    leases = read("the leases", tables.lease.list_leases)
    if leases is not None:
        leases = leases.of_form(tables.lease.name, multi_stream=settings.is_multi_stream)
    workers = read("the worker metrics", tables.workers.scan_workers)
    lock = read("the leader lock", tables.coordinator.observe_lock)
    control = read("the pause", tables.coordinator.read_control)
    losses = read("the record of losses", tables.coordinator.read_losses)
    record = read("the record of the application", tables.coordinator.read_application)
    found = Snapshot(
        application=settings.application_name,
        at=clock.wall(),
        period_seconds=settings.worker.worker_metrics_reporter_freq_in_millis / 1000,
        streams=_streams(settings, record),
        leases=() if leases is None else _sorted(leases.leases),
        workers=() if workers is None else tuple(sorted(workers.workers, key=_worker_id)),
        bad_rows=tuple(row for one in (leases, workers) if one is not None for row in one.bad_rows),
        lock=lock,
        pause=None if control is None else control.pause,
        losses=losses or Losses(),
        failures=tuple(failures),
    )
    return found if kinesis is None else _with_streams(found, settings, kinesis)


def all_streams(settings: ConsumerSettings, table: CoordinatorStateTable) -> tuple[str, ...]:
    """Return names or ARNs: the streams of the settings and the other recorded ones.

    Raises:
        UnreadableRowError: The record cannot be read.
        AwsError: The call failed.
    """
    return _streams(settings, table.read_application() if settings.is_multi_stream else None)


def _streams(settings: ConsumerSettings, record: ApplicationRecord | None) -> tuple[str, ...]:
    return streams_to_read(
        settings.streams,
        () if record is None else record.identity.streams,
        is_multi_stream=settings.is_multi_stream,
    )


def _sorted(leases: Iterable[Lease]) -> tuple[Lease, ...]:
    return tuple(sorted(leases, key=lambda lease: lease.lease_key))


def _worker_id(row: WorkerMetrics) -> str:
    return row.worker_id


def _with_streams(
    snapshot: Snapshot, settings: ConsumerSettings, kinesis: KinesisClient
) -> Snapshot:
    """Describe and list every stream."""
    unavailable: list[UnavailableStream] = []
    failures: list[Failure] = []
    resolved: list[StreamId] = []
    listed: set[str] = set()
    for name in snapshot.streams:
        try:
            stream = kinesis.resolve_stream(name, multi_stream=settings.is_multi_stream)
            listed |= {stream.lease_key(one.shard_id) for one in kinesis.list_shards(stream)}
            resolved.append(stream)
        except STREAM_ERRORS as error:
            unavailable.append(UnavailableStream(name, str(error)))
        except AwsError as error:
            failures.append(Failure(f"the stream {name}", error))
    return replace(
        snapshot,
        unavailable=tuple(unavailable),
        resolved=tuple(resolved),
        listed=frozenset(listed) if len(resolved) == len(snapshot.streams) else None,
        failures=(*snapshot.failures, *failures),
    )


def look_twice(read: Callable[[], Snapshot], clock: Clock, seconds: float) -> Snapshot:
    """Return a second snapshot with what has not changed since the first."""
    first, began = read(), clock.monotonic()
    clock.sleep(seconds)
    return compared(first, read(), max(clock.monotonic() - began, seconds))


def compared(first: Snapshot, second: Snapshot, seconds: float) -> Snapshot:
    """Return the second snapshot with what has not changed for these seconds."""
    leases = {lease.lease_key: lease for lease in first.leases}
    rows = {row.worker_id: row for row in first.workers}
    pairs = [(leases[le.lease_key], le) for le in second.unfinished if le.lease_key in leases]
    observed = LifeObservation(
        seconds,
        seconds,
        silent={
            row.worker_id: seconds
            for row in second.workers
            if row.worker_id in rows
            and not has_reported(rows[row.worker_id], row)
            # A worker of the Java KCL may report less often than this command looks.
            and (row.run_id is not None or seconds >= JAVA_PERIOD_SECONDS)
        },
        waits={le.lease_key: seconds for old, le in pairs if old.counter == le.counter},
        unchanged={le.lease_key: seconds for old, le in pairs if old.checkpoint == le.checkpoint},
        leader_absent=seconds if first.lock == second.lock else 0.0,
    )
    return replace(second, observed=observed)


def has_reported(before: WorkerMetrics, after: WorkerMetrics) -> bool:
    """Whether the worker wrote its row in between. A drain request is written by others."""
    return (before.last_update_seconds, before.stats) != (after.last_update_seconds, after.stats)


def group_by_stream(leases: Sequence[Lease]) -> dict[str | None, list[Lease]]:
    """Divide leases by serialized stream. Leases of a single stream have None."""
    groups: dict[str | None, list[Lease]] = {}
    for lease in leases:
        groups.setdefault(lease.stream, []).append(lease)
    return groups

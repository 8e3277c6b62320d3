"""Report an application to Dagster: assets, tables, plots and checks.

In reading order: one observation of the fleet, the output, the streams, tables of leases, workers
and moves, and when each report is made.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.clock import LastChanges
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.orchestration.checks import CheckVerdict, asset_of, verdicts
from kcl_pipeline.orchestration.names import Names, partition_key, stream_keys
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.runs import MAX_ROWS, RunView, known, lag_text, table_of
from kcl_pipeline.planning.explain import LoadRow, explain
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.status.findings import CheckName, Finding, findings_of, idle_text
from kcl_pipeline.status.rows import OwnerChange, cpu_of, lease_rows, worker_rows
from kcl_pipeline.status.snapshot import Snapshot, group_by_stream
from kcl_pipeline.status.streams import is_lease_stream
from kcl_pipeline.text import counted, duration_text
from kcl_pipeline.worker_status import WorkerTotals

# Define one observation of the application, from which the sensor makes its reports.


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """One observation of the application.

    Attributes:
        snapshot: Its state, with what the sensor has observed.
        lock_owner: The leader; None without one.
        leads: Whether this sensor is the leader.
        plan: The last plan, if this sensor leads.
        plan_input: What the plan was computed from.
        cycle_seconds: Duration of the leader cycle.
        runs: The active runs.
        moves: The last moves, newest first.
    """

    snapshot: Snapshot
    lock_owner: str | None
    leads: bool
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    cycle_seconds: float = 0.0
    runs: tuple[RunView, ...] = ()
    moves: tuple[OwnerChange, ...] = ()


# Report the output of the whole fleet to Dagster: with the first rows, then once per period.
#
# Every worker writes its totals since its start to its worker metrics row. The sensor subtracts
# them, so that the figures of all workers are one series. They are computed without an additional
# call.

FORGET_SECONDS: Final = 3600.0
"""A worker without a row is forgotten after this time."""
_MEGABYTE: Final = 1_000_000


@dataclass(slots=True)
class _Process:
    """One process of a worker: its totals at the last report and now.

    `written_seconds` is the time of its row, by its own clock.
    """

    base: WorkerTotals
    latest: WorkerTotals
    reported_at: float
    written_seconds: int

    @property
    def per_second(self) -> tuple[float, float]:
        """Records and bytes per second, by the worker's own clock."""
        done = self.latest - self.base
        if done.seconds <= 0:
            return 0.0, 0.0
        return done.records / done.seconds, done.bytes / done.seconds


@dataclass(frozen=True, slots=True)
class Period:
    """What the fleet committed between two reports.

    Attributes:
        done: The sums.
        records_per_second: The sum of the workers' rates.
        bytes_per_second: As above.
        seconds: Length of the period.
    """

    done: WorkerTotals
    records_per_second: float
    bytes_per_second: float
    seconds: float


@dataclass(slots=True)
class FleetTotals:
    """Subtract the totals of the workers.

    A process that started after the first observation counts from zero. Every other process counts
    from its first observation, so that a new sensor counts nothing twice. What a worker commits
    after its last row is only in the log of its run.
    """

    watched_since: float | None = None
    reported_at: float = 0.0
    processes: dict[tuple[str, str | None], _Process] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)
    ended: WorkerTotals = field(default_factory=WorkerTotals)
    was_idle: bool = True

    def observe(
        self, rows: Sequence[WorkerMetrics], now: float, left_out: Collection[str] = ()
    ) -> None:
        """Add one observation.

        Args:
            rows: The rows of all workers.
            now: Monotonic seconds.
            left_out: Ids of workers whose runs report their own figures.
        """
        if self.watched_since is None:
            self.watched_since = self.reported_at = now
        self.left_out.update(dict.fromkeys(left_out, now))
        for row in rows:
            if row.status is None or row.worker_id in self.left_out:
                continue
            totals, key = row.status.totals, (row.worker_id, row.run_id)
            known = self.processes.get(key)
            if known is not None and row.last_update_seconds < known.written_seconds:
                continue  # an older row: a scan is eventually consistent
            if known is not None and not totals.is_below(known.latest):
                known.latest, known.reported_at = totals, now
                known.written_seconds = row.last_update_seconds
                continue
            if known is not None:
                self.ended += known.latest - known.base
            is_new = totals.seconds <= now - self.watched_since
            base = WorkerTotals() if is_new else totals
            self.processes[key] = _Process(base, totals, now, row.last_update_seconds)

    def is_due(self, now: float, period_seconds: float) -> bool:
        """Whether a period has passed since the last report, or the first rows have come.

        They are the first ones if the last report had none.
        """
        if self.watched_since is None:
            return False
        return now - self.reported_at >= period_seconds or (self.was_idle and self._has_rows())

    def _has_rows(self) -> bool:
        news = (one.latest.batches - one.base.batches for one in self.processes.values())
        return self.ended.batches + sum(news) > 0

    def close_period(self, now: float) -> Period:
        """Return what was committed since the last call, and begin the next period."""
        done, records, size = self.ended, 0.0, 0.0
        for one in self.processes.values():
            done += one.latest - one.base
            per_second = one.per_second
            records, size = records + per_second[0], size + per_second[1]
            one.base = one.latest
        period = Period(done, records, size, now - self.reported_at)
        self.ended, self.reported_at, self.was_idle = WorkerTotals(), now, not done.batches
        self.processes = {
            key: one
            for key, one in self.processes.items()
            if now - one.reported_at < FORGET_SECONDS
        }
        self.left_out = {
            key: seen for key, seen in self.left_out.items() if now - seen < FORGET_SECONDS
        }
        return period


def lag_percentiles(
    workers: Sequence[WorkerMetrics], unowned: Sequence[float] = ()
) -> tuple[float, float, float] | None:
    """Return p50, p99 and maximum of the leases' lags, in seconds; None without a known lag.

    A row has the largest lags of its worker. The other ones count with their median.

    Args:
        workers: The rows of the live workers.
        unowned: How old the oldest unread records of leases without a live worker can be.
    """
    weighted: list[tuple[int, int]] = [(round(1000 * age), 1) for age in unowned]
    for worker in workers:
        if worker.status is None:
            continue
        weighted += [(lag.millis, 1) for lag in worker.status.lags]
        if worker.status.more_lags_millis is not None:
            weighted.append((worker.status.more_lags_millis, worker.status.more_lags))
    weighted.sort()
    count = sum(weight for _, weight in weighted)
    if not count:
        return None
    return _at(weighted, 0.5 * count), _at(weighted, 0.99 * count), weighted[-1][0] / 1000


def _at(weighted: Sequence[tuple[int, int]], rank: float) -> float:
    passed = 0
    for millis, weight in weighted:
        passed += weight
        if passed >= rank:
            return millis / 1000
    return weighted[-1][0] / 1000


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def output_metadata(
    period: Period,
    workers: Sequence[WorkerMetrics],
    wall_seconds: float,
    dead_letter_table: str | None = None,
    unowned: Sequence[float] = (),
) -> dict[str, Any]:
    """Metadata of one report. Dagster plots the values that are numbers.

    Args:
        period: What was committed.
        workers: The rows of the live workers.
        wall_seconds: Epoch seconds, for the age of the oldest row. For display only.
        dead_letter_table: Address of the dead-letter table.
        unowned: See `lag_percentiles`.
    """
    statuses = [worker.status for worker in workers if worker.status is not None]
    done, commit = period.done, _largest([one.commit_millis_p99 for one in statuses])
    put_to_commit = _largest([one.put_to_commit_millis_p99 for one in statuses])
    oldest = min((worker.last_update_seconds for worker in workers), default=None)
    p50, p99, largest = lag_percentiles(workers, unowned) or (None, None, None)
    has_letters = done.dead_letters and dead_letter_table is not None
    return known(
        {
            "records_per_second": round(period.records_per_second, 1),
            "mb_per_second": round(period.bytes_per_second / _MEGABYTE, 3),
            "lag_seconds_max": largest,
            "lag_seconds_p99": p99,
            "lag_seconds_p50": p50,
            "leases_without_lag": sum(status.unknown_lags for status in statuses) or None,
            "oldest_report_seconds": None
            if oldest is None
            else round(max(wall_seconds - oldest, 0.0)),
            "workers": len(workers),
            "records": done.records,
            "bytes": done.bytes,
            "rows": done.rows,
            "batches": done.batches,
            "dead_letters": done.dead_letters,
            "period": dg.MetadataValue.text(f"{period.seconds:.0f} s"),
            "commit_seconds_p99": None if commit is None else commit / 1000,
            "put_to_commit_seconds_p99": None if put_to_commit is None else put_to_commit / 1000,
            "table_version": _largest([one.table_version for one in statuses]),
            "dead_letter_table": dg.MetadataValue.path(str(dead_letter_table))
            if has_letters
            else None,
        }
    )


def output_event(
    key: dg.AssetKey, period: Period, metadata: dict[str, Any]
) -> dg.AssetMaterialization | dg.AssetObservation:
    """Return a materialization if data was committed in the period, otherwise an observation.

    Materializations start downstream assets, which have nothing to do without new rows.
    """
    if period.done.batches:
        return dg.AssetMaterialization(key, metadata=metadata)
    return dg.AssetObservation(key, metadata=metadata)


def output_events(
    totals: FleetTotals,
    key: dg.AssetKey,
    workers: Sequence[WorkerMetrics],
    *,
    now: float,
    wall_seconds: float,
    period_seconds: float,
    dead_letter_table: str | None,
    unowned: Sequence[float] = (),
    idle: str | None = None,
    runs: dg.MarkdownMetadataValue | None = None,
    table: Callable[[], Mapping[str, Any]] = dict,
) -> list[dg.AssetMaterialization | dg.AssetObservation]:
    """Return the report of the output if it is due (`now` in monotonic seconds).

    `idle` says since when nothing has arrived. It is in the reports without data. `runs` has links
    to the running workers: the report itself has no run. `table` reads columns and number of rows
    of the table, for a report with data.
    """
    if not totals.is_due(now, period_seconds):
        return []
    period = totals.close_period(now)
    metadata = output_metadata(period, workers, wall_seconds, dead_letter_table, unowned)
    if idle is not None and not period.done.batches:
        metadata = {"state": dg.MetadataValue.text(idle)} | metadata
    if period.done.batches:
        metadata |= table()
    if runs is not None:
        metadata |= {"runs": runs}
    return [output_event(key, period, metadata)]


# Report each stream of the application to Dagster, also those that appear at run time.
#
# Every stream has the external asset `kinesis/<name>`. Dagster shows an asset that only has
# events, so a stream that no definition names has its page and its plots at once. If the streams
# are selected at run time, the asset `<application>/streams` has one partition per stream, too.
# It is in the asset graph, upstream of the output.

STREAMS_PER_HOUR: Final = 20
"""With more streams, each one is reported less often, because events stay in Dagster's log."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream in one observation of the application.

    Attributes:
        name: Name or ARN.
        key: Asset key of the stream.
        leases: Its rows of the lease table.
        lag_millis: The largest lag of its shards. None: unknown.
        unread_shards: Number of its shards whose lag is not known yet.
    """

    name: str
    key: dg.AssetKey
    leases: tuple[Lease, ...]
    lag_millis: int | None = None
    unread_shards: int = 0

    @property
    def content(self) -> tuple[tuple[str, str | None, str | None, bool], ...]:
        """What is reported at once when it changes."""
        return tuple((le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in self.leases)

    def row(self) -> dict[str, Any]:
        """The row of this stream in a table."""
        return {
            "stream": self.name,
            "leases": len(self.leases),
            "lag": lag_text(self.lag_millis),
            "not read yet": self.unread_shards,
        }


def stream_views(snapshot: Snapshot) -> tuple[StreamView, ...]:
    """Divide leases and lags by stream."""
    streams, leases = snapshot.streams, snapshot.leases
    keys, groups = stream_keys(streams), group_by_stream(leases)
    single = groups.get(None)
    if single is not None and len(streams) == 1:
        name, lag = streams[0], snapshot.lag_seconds
        return (StreamView(name, keys[name], tuple(single), _millis(lag)),)
    lags = _lags(snapshot.live)
    by_name: dict[str, list[str]] = {}
    for serialized in groups.keys() | lags.keys():
        if serialized is not None:
            by_name.setdefault(serialized.split(":")[1], []).append(serialized)
    views = []
    for name in keys:
        bare = keys[name].path[-1]
        same = [one for one in by_name.get(bare, []) if is_lease_stream(name, one, streams)]
        known = [lag for one in same if (lag := lags.get(one, (None, 0))[0]) is not None]
        rows = tuple(lease for one in sorted(same) for lease in groups.get(one, ()))
        ages = (snapshot.unread.get(lease.lease_key) for lease in rows)
        known += [round(1000 * age) for age in ages if age is not None]
        unknown = sum(lags.get(one, (None, 0))[1] for one in same)
        views.append(StreamView(name, keys[name], rows, max(known, default=None), unknown))
    return tuple(views)


def _millis(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)


def _lags(workers: Iterable[WorkerMetrics]) -> Mapping[str, tuple[int | None, int]]:
    """The largest lag, and the number of shards whose lag is unknown, by serialized stream."""
    lags: dict[str, tuple[int | None, int]] = {}
    for worker in workers:
        for one in () if worker.status is None else worker.status.streams:
            if one.stream.count(":") != 2:  # noqa: PLR2004 (account, name and epoch)
                continue
            millis, unknown = lags.get(one.stream, (None, 0))
            known = [lag for lag in (millis, one.millis) if lag is not None]
            lags[one.stream] = (max(known, default=None), unknown + one.unknown)
    return lags


def stream_events(
    view: StreamView, names: Names
) -> list[dg.AssetMaterialization | dg.AssetObservation]:
    """The events of one stream."""
    metadata = _metadata(view)
    events: list[dg.AssetMaterialization | dg.AssetObservation] = [
        dg.AssetObservation(view.key, metadata=metadata)
    ]
    if names.selects_streams:
        partition = partition_key(view.key)
        events.append(
            dg.AssetMaterialization(names.selected_streams, metadata=metadata, partition=partition)
        )
    return events


def _metadata(view: StreamView) -> dict[str, Any]:
    unfinished = [lease for lease in view.leases if not lease.ended]
    lag = lag_text(view.lag_millis)
    if view.unread_shards:
        lag += f"; not read yet: {counted(view.unread_shards, 'shard')}"
    return known(
        {
            "shards_with_lease": len(view.leases),
            "shards_being_read": len(unfinished),
            "kbps": round(sum(lease.throughput_kbps or 0.0 for lease in unfinished), 1),
            "lag": dg.MetadataValue.text(lag),
            "lag_seconds": None if view.lag_millis is None else view.lag_millis / 1000,
        }
    )


def worst_streams(views: Sequence[StreamView]) -> list[dict[str, Any]]:
    """Rows of a table: the streams with the largest lag; unknown lags first."""
    worst = sorted(views, key=lambda view: (view.lag_millis is not None, -(view.lag_millis or 0)))
    return [view.row() for view in worst[:MAX_ROWS]]


def partition_requests(
    names: Names, streams: Sequence[str], existing: Iterable[str]
) -> list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest]:
    """The changes that give the asset of the selected streams one partition per stream."""
    wanted = {partition_key(key) for key in stream_keys(streams).values()}
    found = set(existing)
    partitions = dg.DynamicPartitionsDefinition(name=names.stream_partitions)
    requests: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = []
    if wanted - found:
        requests.append(partitions.build_add_request(sorted(wanted - found)))
    if found - wanted:
        requests.append(partitions.build_delete_request(sorted(found - wanted)))
    return requests


# Show leases, workers and moves as tables in the Dagster UI.
#
# In a window of 1,600 points a table has 550 points: about 65 characters in six columns. What is
# wider is cut off at the right. Cells are wrapped, names of columns are not.

MAX_TABLE_ROWS: Final = 200
"""Largest number of leases and workers in a table."""
_NO_DECIMALS_FROM: Final = 100.0
_SHARD_PREFIX: Final = "shardId-"
_RUN_STATES: Final = {
    "QUEUED": "queued",
    "CANCELING": "stopping",
    **dict.fromkeys(("NOT_STARTED", "MANAGED", "STARTING"), "starting"),
}


def lease_text(lease_key: str) -> str:
    """Return a lease key as short text: `12`, or `orders:12` with several streams."""
    parts = lease_key.split(":")
    number = parts[-1].removeprefix(_SHARD_PREFIX)
    is_number = number != parts[-1] and number.isdecimal()
    return ":".join([*parts[1:2], str(int(number)) if is_number else parts[-1]])


def move_text(from_worker: str | None, to_worker: str | None) -> str:
    """Return the former and the new owner as one text, which a narrow column wraps."""
    return f"{from_worker or 'nobody'} → {to_worker or 'nobody'}"


def lease_table(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The leases, at most `MAX_TABLE_ROWS`: those without a live owner first, then by lag."""
    return [
        {
            "shard": lease_text(row.lease_key),
            "worker": row.worker,
            "state": row.state,
            "lag": row.lag_text,
            "checkpoint": ""
            if row.checkpoint_age is None or row.state == "ended"
            else f"{duration_text(row.checkpoint_age)} old",
            "KB/s": None if row.kbps is None else _rate_text(row.kbps),
        }
        for row in lease_rows(snapshot)[:MAX_TABLE_ROWS]
    ]


def _rate_text(kbps: float) -> str:
    return f"{kbps:.1f}" if kbps < _NO_DECIMALS_FROM else f"{kbps:,.0f}"


def rows_not_shown(snapshot: Snapshot) -> dg.TextMetadataValue | None:
    """How many leases have no row. None: all of them have one."""
    if (more := len(snapshot.leases) - MAX_TABLE_ROWS) <= 0:
        return None
    return dg.MetadataValue.text(f"{more} leases with a smaller lag; run `kcl-pipeline status`")


def worker_table(
    snapshot: Snapshot, separator: str, runs: Sequence[RunView]
) -> list[dict[str, Any]]:
    """The workers, then the runs that have no worker yet.

    The state has the version of the package, if not all workers have the same.
    """
    workers = worker_rows(snapshot, separator)
    differ = len({row.version for row in workers}) > 1
    rows: list[dict[str, Any]] = []
    for row in workers:
        version = f", version {row.version}" if differ and row.version else ""
        age = row.last_batch_seconds
        rows.append(
            {
                "worker": row.worker_id,
                "state": row.state_text + version,
                "leases": row.leases,
                "cpu": None if row.cpu_percent is None else f"{row.cpu_percent:.0f}%",
                "KB/s": _rate_text(row.kbps),
                "lag": row.lag_text,
                "batch": None if age is None else f"{duration_text(age)} ago",
                "dead letters": row.dead_letters,
            }
        )
    alive = {row.worker_id for row in workers}
    empty = dict.fromkeys(list(rows[0])[2:]) if rows else {}
    return rows + [
        {"worker": run.worker_id, "state": run_state(run)} | empty
        for run in runs
        if run.worker_id not in alive
    ]


def move_table(moves: Sequence[OwnerChange], now: float) -> list[dict[str, Any]]:
    """The last moves, newest first. `now` is in epoch seconds."""
    return [
        {
            "ago": duration_text(now - move.at),
            "shard": lease_text(move.lease_key),
            "workers": move_text(move.from_worker, move.to_worker),
            # The longest text is last: a narrow page cuts the right side off.
            "reason": move.reason,
        }
        for move in moves
    ]


def run_state(run: RunView) -> str:
    """The state of a run without a live worker."""
    return _RUN_STATES.get(run.status.value, "started, no report yet")


def run_links(runs: Sequence[RunView]) -> dg.MarkdownMetadataValue:
    """Links to the active runs."""
    links = [
        f"- [{run.worker_id}](/runs/{run.run_id})"
        for run in sorted(runs, key=lambda run: run.worker_id)[:MAX_TABLE_ROWS]
    ]
    return dg.MetadataValue.md("\n".join(links))


# Report streams, fleet and checks to Dagster: on change, and seldom while nothing changes.

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation

QUIET_SECONDS: Final = 3_600.0
"""What does not change is reported once per this time, because events stay in Dagster's log."""
FAILING_SECONDS: Final = 600.0
"""A check that fails is reported again after this time, with the numbers of then."""
SHORTEST_GAP_SECONDS: Final = 9.0
"""Shortest time between two reports of one subject.

An event permanently uses 9 kB of Dagster's event log. With ticks every 5 seconds, a fleet that
changes at every tick is reported at every second tick.
"""
HOLE_GRACE_SECONDS: Final = 30.0
_WHILE_LEASES_ARE_CREATED: Final = frozenset({"hash_keys_uncovered", "no_leases"})


@dataclass(slots=True)
class Cadence:
    """Decide which reports are due. Can be built again at any time.

    Attributes:
        reported: By subject, the content reported last and when (monotonic seconds).
        hole_since: Since when some hash keys are not covered by a lease.
    """

    reported: dict[str, tuple[Hashable, float]] = field(default_factory=dict)
    hole_since: float | None = None

    def hole_lasts(self, hole: bool, now: float) -> bool:
        """Whether hash keys have been uncovered for `HOLE_GRACE_SECONDS`.

        A new application, and a reshard, need less time than this to create their leases.
        """
        self.hole_since = (now if self.hole_since is None else self.hole_since) if hole else None
        return self.hole_since is not None and now - self.hole_since >= HOLE_GRACE_SECONDS

    def due(
        self, subject: str, content: Hashable, now: float, *, longest: float = QUIET_SECONDS
    ) -> bool:
        """Whether `content` is due. If so it is recorded as reported; the caller reports it.

        Content that has not changed is due `longest` seconds after the last report; with 0.0, any
        content is due now.
        """
        last = self.reported.get(subject)
        if last is not None and longest:
            gap = now - last[1]
            if gap < SHORTEST_GAP_SECONDS or (last[0] == content and gap < longest):
                return False
        self.reported[subject] = (content, now)
        return True


@dataclass(slots=True)
class LeaseWaits:
    """Since when each unfinished lease has had no live owner (monotonic seconds).

    Can be built again at any time.
    """

    since: LastChanges[str] = field(default_factory=LastChanges)

    def observe(self, leases: Sequence[Lease], ownerless: set[str], now: float) -> dict[str, float]:
        """Add one observation and return, by lease key, the seconds without a live owner."""
        waiting = {
            le.lease_key
            for le in leases
            if not le.ended and (le.actual_owner is None or le.lease_key in ownerless)
        }
        self.since.observe(dict.fromkeys(waiting, True), now)
        return self.since.seconds(now)


def fleet_metadata(view: FleetView, separator: str) -> dict[str, Any]:
    """Leader, leases, workers, the last moves and the plan. Dagster plots what are numbers."""
    snapshot = view.snapshot
    cpus = [cpu for w in snapshot.live if (cpu := cpu_of(w)) is not None]
    counts = [row["leases"] for row in worker_table(snapshot, separator, ())]
    metadata: dict[str, Any] = {
        "state": dg.MetadataValue.text(_state(snapshot)),
        "leader": dg.MetadataValue.text(view.lock_owner or "none"),
        "this_sensor_leads": view.leads,
        "lease_rows": table_of(lease_table(snapshot), MAX_TABLE_ROWS),
        "lease_rows_not_shown": rows_not_shown(snapshot),
        "worker_rows": table_of(worker_table(snapshot, separator, view.runs), MAX_TABLE_ROWS),
        "runs": run_links(view.runs) if view.runs else None,
        "last_moves": table_of(move_table(view.moves, snapshot.at)),
        "leases": len(snapshot.leases),
        "unfinished": len(snapshot.unfinished),
        "without_owner": sum(1 for le in snapshot.unfinished if le.actual_owner is None),
        "in_handoff": sum(1 for le in snapshot.leases if le.in_handoff),
        "workers": len(snapshot.live),
        "lease_spread": max(counts) - min(counts) if counts else None,
        "cpu_spread": round(max(cpus) - min(cpus), 1) if cpus else None,
        "cycle_seconds": view.cycle_seconds,
    }
    if view.plan is not None and view.plan_input is not None:
        metadata |= plan_metadata(view.plan, view.plan_input)
    return known(metadata)


def _state(snapshot: Snapshot) -> str:
    if snapshot.pause is not None:
        return snapshot.pause.sentence
    if snapshot.live:
        return "working"
    return f"{counted(snapshot.starting, 'worker')} starting" if snapshot.starting else "no worker"


def plan_metadata(plan: Plan, plan_input: PlanInput) -> dict[str, Any]:
    """The moves with their reasons, and the load of each worker and group before and after."""
    table = explain(plan_input, plan)
    return {
        "plan": table_of(
            [
                {
                    "lease": lease_text(move.lease_key),
                    "workers": move_text(move.from_worker, move.to_worker),
                    "KB/s": None if move.kbps is None else f"{move.kbps:.1f}",
                    "reason": move.reason,
                }
                for move in table.moves
            ]
        ),
        "plan_summary": dg.MetadataValue.text(table.summary),
        "plan_workers": table_of(load_rows(table.workers, "worker")),
        "plan_groups": table_of(load_rows(table.groups, "group")),
        "plan_notes": dg.MetadataValue.text(
            "; ".join(
                (
                    f"strategy {plan.strategy}",
                    *plan.notes,
                    *(f"no worker can take {key}" for key in plan.spilled),
                )
            )
        ),
    }


def load_rows(rows: Sequence[LoadRow], kind: str) -> list[dict[str, Any]]:
    """Workers or groups with what they have before and after a plan."""
    return [
        {
            kind: row.name,
            "leases": f"{row.leases_before} → {row.leases_after}",
            "KB/s": f"{row.kbps_before:.1f} → {row.kbps_after:.1f}",
            "utilization": f"{row.utilization_before:.2f} → {row.utilization_after:.2f}",
        }
        for row in rows
    ]


def _due_streams(
    streams: Sequence[StreamView], cadence: Cadence, now: float
) -> Iterator[StreamView]:
    """The streams that are due: on change and once an hour; with many streams, less often."""
    many = len(streams) > STREAMS_PER_HOUR
    longest = QUIET_SECONDS * max(len(streams) / STREAMS_PER_HOUR, 1.0)
    for stream in streams:
        subject = f"stream {'/'.join(stream.key.path)}"
        if cadence.due(subject, None if many else stream.content, now, longest=longest):
            yield stream


def asset_events(
    view: FleetView,
    names: Names,
    settings: ConsumerSettings,
    options: DagsterOptions,
    cadence: Cadence,
    now: float,
    *,
    after_output: bool = False,
) -> list[AssetEvent]:
    """The events that are due at `now` (monotonic seconds).

    The fleet is observed, not materialized: nothing is downstream of it, and the Dagster UI ignores
    evaluations of checks that are older than the last materialization. So the checks of the output
    follow each materialization of it (`after_output`).
    """
    events: list[AssetEvent] = []
    snapshot = view.snapshot
    streams = stream_views(snapshot)
    owners = tuple(
        (le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in snapshot.leases
    )
    states = tuple((w.worker_id, w.drain_requested) for w in snapshot.live)
    runs = tuple((run.run_id, run.status) for run in view.runs)
    if cadence.due("fleet", (owners, states, runs, view.lock_owner, snapshot.pause), now):
        metadata = fleet_metadata(view, settings.worker.worker_group_separator)
        if settings.is_multi_stream:
            metadata["streams"] = table_of(worst_streams(streams))
        events.append(dg.AssetObservation(names.fleet, metadata=metadata))
    for stream in _due_streams(streams, cadence, now):
        events += stream_events(stream, names)
    for verdict in fleet_verdicts(view, options, cadence, now):
        asset = asset_of(verdict.check, names)
        longest = QUIET_SECONDS if verdict.passed else FAILING_SECONDS
        if after_output and asset == names.output:
            longest = 0.0  # also shortly after a report: a check may have been executed since
        content: Hashable = verdict.content
        if verdict.check is CheckName.LAG:
            # A fleet to which nothing arrives is said once, with the time of the last batch
            content = (content, idle_text(snapshot) is not None)
        if cadence.due(verdict.check.value, content, now, longest=longest):
            events.append(verdict.evaluation(asset))
    return events


def outage_events(
    snapshot: Snapshot, names: Names, options: DagsterOptions, cadence: Cadence, now: float
) -> list[AssetEvent]:
    """The checks that need no table, while the tables cannot be read."""
    findings = findings_of(snapshot, options.check_limits, options.lag_threshold_seconds)
    return [
        verdict.evaluation(names.fleet)
        for verdict in verdicts(findings)
        if verdict.check is CheckName.LEADER
        # Whether workers report is not known; runs that wait, fail or start are.
        or (verdict.check is CheckName.WORKERS and (snapshot.starting or not verdict.passed))
        if cadence.due(verdict.check.value, verdict.content, now, longest=FAILING_SECONDS)
    ]


def fleet_verdicts(
    view: FleetView, options: DagsterOptions, cadence: Cadence, now: float
) -> list[CheckVerdict]:
    """The verdicts of what the sensor has observed. What is not known is left out."""
    findings = findings_of(view.snapshot, options.check_limits, options.lag_threshold_seconds)
    hole = any(one.name in _WHILE_LEASES_ARE_CREATED for one in findings)
    hole_lasts = cadence.hole_lasts(hole, now)

    def counts(finding: Finding) -> bool:
        return hole_lasts or finding.name not in _WHILE_LEASES_ARE_CREATED

    return [one for one in verdicts([*filter(counts, findings)]) if one.is_known]


def stuck_limit_seconds(settings: ConsumerSettings) -> float:
    """After how long a lease without a live owner is stuck.

    Twice the sum of the failover time, the assignment interval and the discovery interval.
    """
    millis = (
        settings.lease.failover_time_millis
        + settings.lease_assignment_interval_millis
        + settings.lease_discovery_interval_millis
    )
    return 2 * millis / 1000

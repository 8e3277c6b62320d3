"""Report the output of the whole fleet to Dagster: with the first rows, then once per period.

Every worker writes its totals since its start to its worker metrics row. The sensor subtracts them,
so that the figures of all workers are one series. They are computed without an additional call.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import add, lt, sub
from typing import Any, Final

import dagster as dg

from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.runs.metadata import known

FORGET_SECONDS: Final = 3600.0
"""A worker without a row is forgotten after this time."""
_MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Figures:
    """What was committed: by a worker since its start, or by the fleet in a period."""

    records: int = 0
    bytes: int = 0
    rows: int = 0
    batches: int = 0
    dead_letters: int = 0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(*map(sub, astuple(self), astuple(other)))

    def below(self, other: "Figures") -> bool:
        """Whether any figure is smaller than in `other`."""
        return any(map(lt, astuple(self), astuple(other)))


@dataclass(slots=True)
class _Process:
    """One process of a worker: its figures at the last report and now."""

    base: Figures
    base_seconds: float
    latest: Figures
    seconds: float
    reported_at: float

    @property
    def per_second(self) -> tuple[float, float]:
        """Records and bytes per second, by the worker's own clock."""
        elapsed, done = self.seconds - self.base_seconds, self.latest - self.base
        return (done.records / elapsed, done.bytes / elapsed) if elapsed > 0 else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Period:
    """What the fleet committed between two reports.

    Attributes:
        done: The sums.
        records_per_second: The sum of the workers' rates.
        bytes_per_second: As above.
        seconds: Length of the period.
    """

    done: Figures
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
    ended: Figures = field(default_factory=Figures)
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
            totals = None if row.status is None else row.status.totals
            if row.status is None or totals is None or row.worker_id in self.left_out:
                continue
            figures = Figures(
                totals.records,
                totals.bytes,
                totals.rows,
                totals.batches,
                row.status.dead_letters,
            )
            key = (row.worker_id, row.run_id)
            known = self.processes.get(key)
            if known is not None and not figures.below(known.latest):
                known.latest, known.seconds, known.reported_at = figures, totals.seconds, now
                continue
            if known is not None:
                self.ended += known.latest - known.base
            is_new = totals.seconds <= now - self.watched_since
            self.processes[key] = _Process(
                Figures() if is_new else figures,
                0.0 if is_new else totals.seconds,
                figures,
                totals.seconds,
                now,
            )

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
            one.base, one.base_seconds = one.latest, one.seconds
        period = Period(done, records, size, now - self.reported_at)
        self.ended, self.reported_at, self.was_idle = Figures(), now, not done.batches
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
    totals = [status.totals for status in statuses if status.totals is not None]
    done, commit = period.done, _largest([one.commit_millis_p99 for one in totals])
    put_to_commit = _largest([one.put_to_commit_millis_p99 for one in totals])
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
            "table_version": _largest([one.table_version for one in totals]),
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

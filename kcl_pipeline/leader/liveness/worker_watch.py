"""Observe worker metrics rows: which workers report, how often, and which are alive.

The existence of a row proves nothing, because rows of stopped workers stay for a day. A worker is
alive if this process has seen its row change or appear, or has seen it renew a lease. A worker that
leads is alive itself. Clocks of two hosts are not compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.tables import WorkerMetrics

FRESH_PERIODS: Final = 3
_JAVA_PERIOD_SECONDS: Final = 30.0
_SHORTEST_PERIOD_SECONDS: Final = 1.0
"""`lut` has whole seconds, so a row does not change more often."""
_LONGEST_PERIOD_SECONDS: Final = 60.0
_GAPS_KEPT: Final = 5
_GAPS_NEEDED: Final = 3


@dataclass(slots=True)
class _Row:
    row: WorkerMetrics
    changed_at: float
    has_changed: bool = False
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))
    """Seconds between the last changes. The first may be short, because observation may start at
    any time within a period.
    """


class WorkerWatch:
    """The times at which worker metrics rows changed, on the clock of this process.

    Args:
        settings: The reporting period of this application's workers.
        own_id: Worker id of this process. None: it is not a worker.
    """

    def __init__(self, settings: ConsumerSettings, own_id: str | None = None) -> None:
        self._own_id = own_id
        self.period_seconds = max(
            settings.worker.worker_metrics_reporter_freq_in_millis / 1000, _SHORTEST_PERIOD_SECONDS
        )
        self._rows: dict[str, _Row] = {}
        self._alive: set[str] = set()
        self._has_scanned = False

    def forget(self) -> None:
        """Forget all observations. The next scan is a first scan."""
        self._rows.clear()
        self._alive.clear()
        self._has_scanned = False

    def observe(self, rows: Iterable[WorkerMetrics], now: float) -> frozenset[str]:
        """Compare all rows with the former scan.

        Returns:
            Workers whose row was deleted since the former scan.
        """
        seen = {row.worker_id: row for row in rows}
        gone = frozenset(self._rows.keys() - seen.keys())
        for worker_id in gone:
            del self._rows[worker_id]
        for worker_id, row in seen.items():
            self._observe_row(worker_id, row, now)
        self._alive &= seen.keys()
        self._has_scanned = True
        return gone

    def _observe_row(self, worker_id: str, row: WorkerMetrics, now: float) -> None:
        known = self._rows.get(worker_id)
        if known is None:
            self._rows[worker_id] = _Row(row, now, has_changed=self._has_scanned)
            if self._has_scanned:
                self._alive.add(worker_id)
            return
        if (row.last_update_seconds, row.stats) != (known.row.last_update_seconds, known.row.stats):
            known.gaps.append(now - known.changed_at)
            known.changed_at, known.has_changed = now, True
            self._alive.add(worker_id)
        known.row = row

    def note_renewal(self, worker_id: str) -> None:
        """Note that the worker has renewed a lease."""
        if worker_id in self._rows:
            self._alive.add(worker_id)

    def is_alive(self, worker_id: str) -> bool:
        """Return whether this process knows that the worker is alive."""
        return worker_id == self._own_id or worker_id in self._alive

    def is_of_this_package(self, worker_id: str) -> bool:
        """Return whether the worker's row has an attribute that only this package writes."""
        known = self._rows.get(worker_id)
        return known is not None and known.row.run_id is not None

    def ids(self) -> Iterable[str]:
        """Return all workers that have a row."""
        return self._rows.keys()

    def changes(self) -> dict[str, float]:
        """Return by worker the time when its row changed last, or was first read."""
        return {worker_id: known.changed_at for worker_id, known in self._rows.items()}

    def announces(self, worker_id: str) -> bool:
        """Return whether the worker stays, and announces changes of its leases in its row."""
        known = self._rows.get(worker_id)
        return known is not None and known.row.changes is not None and not known.row.drain_requested

    def announced(self) -> Hashable:
        """Return the values of all rows by which workers announce changes."""
        rows = (known.row for known in self._rows.values())
        return frozenset((r.worker_id, r.run_id, r.changes, r.drain_requested) for r in rows)

    def fresh(self, now: float, renews: Callable[[str], bool]) -> tuple[WorkerMetrics, ...]:
        """Return the rows that changed within three reporting periods, sorted by id.

        For a worker that renews leases, these are three periods of the Java KCL: its period may be
        longer than observed so far.
        """
        return tuple(
            self._rows[worker_id].row
            for worker_id in sorted(self._rows)
            if self._is_fresh(worker_id, now, renews)
        )

    def _is_fresh(self, worker_id: str, now: float, renews: Callable[[str], bool]) -> bool:
        known = self._rows[worker_id]
        age = now - known.changed_at
        if age < FRESH_PERIODS * self._period_of(known):
            return True
        return age <= FRESH_PERIODS * _JAVA_PERIOD_SECONDS and renews(worker_id)

    def _period_of(self, known: _Row) -> float:
        """Return the estimated reporting period: the second longest of the last five gaps.

        It is at least the period in the settings. Early reports and one late report do not matter:
        a Java worker that was paused reports several times at once. With three gaps it is the
        longest one. With fewer, a worker whose row changes may be a Java worker, whose default
        period is three times as long.
        """
        own = self.period_seconds
        if len(known.gaps) >= _GAPS_NEEDED:
            gaps = sorted(known.gaps)
            gap = gaps[-2] if len(gaps) > _GAPS_NEEDED else gaps[-1]
            return max(own, min(gap, _LONGEST_PERIOD_SECONDS))
        if known.has_changed:
            return max(own, min(FRESH_PERIODS * own, _JAVA_PERIOD_SECONDS))
        return own

    def unchanged_for(self, seconds: float, now: float) -> tuple[WorkerMetrics, ...]:
        """Return the rows that have not changed for `seconds` of observation."""
        return tuple(
            known.row
            for _, known in sorted(self._rows.items())
            if now - known.changed_at >= seconds
        )


class UnreadableRows:
    """The times at which worker metrics rows changed that cannot be read.

    Such a worker gets no further leases. A row that changes shows that its worker is alive.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, float | None]] = {}
        """By worker id, the last heartbeat and the time of its last change."""

    def observe(self, rows: Iterable[BadRow], now: float) -> None:
        """Compare all unreadable rows with the former scan."""
        before = self._rows
        self._rows = {}
        for row in rows:
            heartbeat, changed_at = before.get(row.key, (row.heartbeat, None))
            self._rows[row.key] = (row.heartbeat, changed_at if heartbeat == row.heartbeat else now)

    def ids(self) -> frozenset[str]:
        """Return the workers of all unreadable rows."""
        return frozenset(self._rows)

    def living(self, now: float) -> frozenset[str]:
        """Return the workers whose row changed within three reporting periods of the Java KCL."""
        return frozenset(
            worker_id
            for worker_id, (_, changed_at) in self._rows.items()
            if changed_at is not None and now - changed_at <= FRESH_PERIODS * _JAVA_PERIOD_SECONDS
        )

"""What the leader knows of workers from their rows: who reports, how often, and who is alive.

A row proves nothing by being there. Rows of workers that died stay for a day, and a new leader
finds them all. A worker is known to be alive when this process saw its row change, saw its row
appear, or saw it renew a lease; a worker that leads also knows itself. Clocks of two hosts are
never compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.tables import WorkerMetrics

FRESH_PERIODS: Final = 3
_JAVA_PERIOD_SECONDS: Final = 30.0
_SHORTEST_PERIOD_SECONDS: Final = 1.0
"""`lut` counts whole seconds, so that rows cannot be seen to change more often."""
_LONGEST_PERIOD_SECONDS: Final = 60.0
_GAPS_KEPT: Final = 5
_GAPS_NEEDED: Final = 3


@dataclass(slots=True)
class _Row:
    row: WorkerMetrics
    changed_at: float
    has_changed: bool = False
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))
    """Seconds between the last changes seen; the first may be short, since the first look came
    somewhere within a period.
    """


class WorkerWatch:
    """When each worker's row last changed, on the clock of this process.

    Args:
        settings: The reporting period of this application's workers.
        own_id: The worker that this process is; None for a leader that is no worker.
    """

    def __init__(self, settings: ConsumerSettings, own_id: str | None = None) -> None:
        self._own_id = own_id
        self.period_seconds = max(
            settings.worker.worker_metrics_reporter_freq_in_millis / 1000, _SHORTEST_PERIOD_SECONDS
        )
        self._rows: dict[str, _Row] = {}
        self._alive: set[str] = set()
        self._has_looked = False

    def forget(self) -> None:
        """Begin anew: the next look is a first look."""
        self._rows.clear()
        self._alive.clear()
        self._has_looked = False

    def observe(self, rows: Iterable[WorkerMetrics], now: float) -> frozenset[str]:
        """Take in all rows as read at `now`; returns the workers whose row went since before."""
        seen = {row.worker_id: row for row in rows}
        gone = frozenset(self._rows.keys() - seen.keys())
        for worker_id in gone:
            del self._rows[worker_id]
        for worker_id, row in seen.items():
            self._observe_row(worker_id, row, now)
        self._alive &= seen.keys()
        self._has_looked = True
        return gone

    def _observe_row(self, worker_id: str, row: WorkerMetrics, now: float) -> None:
        known = self._rows.get(worker_id)
        if known is None:
            self._rows[worker_id] = _Row(row, now, has_changed=self._has_looked)
            if self._has_looked:
                self._alive.add(worker_id)
            return
        if (row.last_update_seconds, row.stats) != (known.row.last_update_seconds, known.row.stats):
            known.gaps.append(now - known.changed_at)
            known.changed_at, known.has_changed = now, True
            self._alive.add(worker_id)
        known.row = row

    def note_renewal(self, worker_id: str) -> None:
        """The worker was seen renewing a lease."""
        if worker_id in self._rows:
            self._alive.add(worker_id)

    def is_alive(self, worker_id: str) -> bool:
        """Whether this process has seen a sign of life of the worker."""
        return worker_id == self._own_id or worker_id in self._alive

    def ids(self) -> Iterable[str]:
        """All workers that have a row."""
        return self._rows.keys()

    def changed_at(self, worker_id: str) -> float | None:
        """When the row was last seen to change, or first seen; None without a row."""
        known = self._rows.get(worker_id)
        return None if known is None else known.changed_at

    def fresh(self, now: float, renews: Callable[[str], bool]) -> tuple[WorkerMetrics, ...]:
        """Rows that changed within three reporting periods of their worker, sorted by id.

        A worker that renews leases may rest for three of the Java library's periods: it may report
        at any moment, or have a slower period than has been seen yet.
        """
        return tuple(
            self._rows[worker_id].row
            for worker_id in sorted(self._rows)
            if self._is_fresh(worker_id, now, renews)
        )

    def _is_fresh(self, worker_id: str, now: float, renews: Callable[[str], bool]) -> bool:
        known = self._rows[worker_id]
        rest = now - known.changed_at
        if rest < FRESH_PERIODS * self._period_of(known):
            return True
        return rest <= FRESH_PERIODS * _JAVA_PERIOD_SECONDS and renews(worker_id)

    def _period_of(self, known: _Row) -> float:
        """The second longest of the last five gaps, at least this application's own period.

        Reports that come early change nothing, nor does one that comes late: a Java worker that was
        paused makes up for missed reports at once. While fewer than four gaps have been seen it is
        the longest. While fewer than three have been, a worker whose row changes may be a Java
        worker, which reports three times as seldom by default.
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
        """Rows that have not changed for `seconds` while this process was looking."""
        return tuple(
            known.row
            for _, known in sorted(self._rows.items())
            if now - known.changed_at >= seconds
        )

"""Observe leases and workers while another process leads.

A new leader then knows at once which leases have expired. The two smallest worker ids whose row
moves scan the tables. The others read the worker rows once in a while, to learn whether they are
one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from kcl_pipeline.changes import LastChanges
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.phase import Scan
from kcl_pipeline.leases.tables import WorkerMetrics, WorkerMetricsTable

WATCHERS: Final = 2
"""Processes that scan while they do not lead."""
_SCANS_PER_FAILOVER: Final = 5
_DUTY: Final = 4.0
"""A scan takes at most a fifth of the time."""
_LOOK_SECONDS: Final = 60.0
_LOOK_SECONDS_PER_WORKER: Final = 3.0
"""The time between two looks of the others grows with the fleet; the reads of all do not."""
_LIVING_SECONDS: Final = 90.0
"""A worker whose row has not changed for this time is not one of the two: three periods of KCL."""
_PATIENCE_SECONDS: Final = 1.5
"""How long the others leave a free lock to the two, who look at it twice a second."""


class StandbyWatch:
    """Reads for one process that does not lead.

    Args:
        settings: All settings.
        own_id: Worker id of this process, or the name of the sensor.
        liveness: Has observed the scans.
        scan: Reads and observes both tables.
        worker_table: The worker-metrics table.
        clock: The clock.
        events: Receives events.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        own_id: str,
        liveness: Liveness,
        scan: Callable[[], Scan],
        worker_table: WorkerMetricsTable,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._own_id = own_id
        self._liveness = liveness
        self._scan = scan
        self._worker_table = worker_table
        self._clock = clock
        self._events = events
        self._scan_seconds = settings.lease.failover_time_millis / 1000 / _SCANS_PER_FAILOVER
        self._reports = LastChanges[str]()
        self._moving: set[str] = set()
        self._next_look = -math.inf
        self._workers = 0
        self._has_looked = False
        self.is_watcher = True
        """Whether this process is one of the two. Before its first look it counts as one."""

    @property
    def patience_seconds(self) -> float:
        """How long this process leaves a free or expired lock to others."""
        return 0.0 if self.is_watcher else _PATIENCE_SECONDS

    def look(self, leader: str) -> None:
        """Read the tables if it is time to.

        An error is reported as an event. The next look tries again.

        Args:
            leader: Owner of the lock.
        """
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        try:
            if self.is_watcher:
                self._liveness.forget_after_pause(now)
                rows = self._scan()
                owners = {lease.actual_owner for lease in rows.leases}
                self._choose(rows.workers, leader, owners)
            else:
                self._choose(self._worker_table.scan_workers().workers, leader, set())
        except (KclError, ValueError) as error:
            self._events(AwsTrouble("scan of a standby leader", str(error)))
        seconds = self._clock.monotonic() - now
        if self.is_watcher:
            pause = max(self._scan_seconds, _DUTY * seconds)
        else:
            pause = max(_LOOK_SECONDS, _LOOK_SECONDS_PER_WORKER * self._workers)
        self._next_look = self._clock.monotonic() + pause

    def _choose(self, rows: Iterable[WorkerMetrics], leader: str, owners: set[str | None]) -> None:
        """Decide whether this process is one of the two smallest ids that move.

        In the first look the owners of leases count as moving.
        """
        now = self._clock.monotonic()
        moved = self._reports.observe(
            {row.worker_id: (row.last_update_seconds, row.stats) for row in rows}, now
        )
        if not self._has_looked:
            self._has_looked = True
            self._moving = {key for key in owners if key is not None and key in self._reports}
        self._moving |= moved.keys()
        self._moving &= self._reports.keys() - self._reports.unchanged_for(_LIVING_SECONDS, now)
        others = self._moving - {leader}
        self._workers = len(others)
        # A process without a row, such as the sensor, comes after all others
        is_known = self._own_id in others
        before = [key for key in others if key < self._own_id or not is_known]
        self.is_watcher = len(before) < WATCHERS

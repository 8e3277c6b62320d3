"""Observe leases and workers while another process leads.

A new leader then knows at once which leases have expired. Two standbys, the first living workers by
id, read one lease of the leader all the time, the worker metrics rows as often as they change, and
the lease table now and then. Every standby scans from the time when the lock has not been renewed
as usual.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leader.liveness.liveness import Liveness
from kcl_pipeline.leader.reads.tables import TableReads, choose_probes
from kcl_pipeline.leases.tables import WorkerMetrics

WATCHERS: Final = 2
"""Standbys that read all the time."""

SUSPECT_SHARE: Final = 0.5
"""Share of the lock's duration without a heartbeat after which every standby scans. A leader sends
a heartbeat after five sixteenths, in its next cycle.
"""

_READS_PER_FAILOVER: Final = 5
_DUTY: Final = 4.0
"""A read takes at most a fifth of the time."""
_SCAN_SECONDS: Final = 60.0
"""Time between two scans of a standby that reads all the time."""
_LOOK_SECONDS: Final = 60.0
_LOOK_SECONDS_PER_WORKER: Final = 3.0
"""The time between two looks of other standbys grows with the fleet, so that the reads of all do
not.
"""
_LIVING_SECONDS: Final = 90.0
"""A worker whose row has not changed for this time is not one of the first."""


class StandbyWatch:
    """Reads for one process that does not lead.

    Args:
        settings: All settings.
        own_id: Worker id of this process, or the name of the sensor.
        liveness: Receives the scans.
        reads: Reads both tables.
        clock: The clock.
        events: Receives events.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        own_id: str,
        liveness: Liveness,
        reads: TableReads,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._own_id = own_id
        self._liveness = liveness
        self._reads = reads
        self._clock = clock
        self._events = events
        self._watch_seconds = settings.lease.failover_time_millis / 1000 / _READS_PER_FAILOVER
        self._rows_seconds = settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._looked_at = self._scanned_at = self._ranked_at = -math.inf
        self._look_seconds = 0.0
        self._rank = 0
        self._workers = 0
        self._rows: dict[str, tuple[object, float]] = {}
        """By worker id, the last report and the time of its last change."""
        self._probes: dict[str, str] = {}
        self._must_scan = True

    @property
    def is_watcher(self) -> bool:
        """Whether this standby is one of those that read all the time."""
        return self._rank < WATCHERS

    def look(self, leader: str | None, unchanged_share: float) -> None:
        """Read the tables if it is time to.

        An error is reported as an event. The next call tries again.

        Args:
            leader: Owner of the lock.
            unchanged_share: Time without a heartbeat, as a share of the lock's duration.
        """
        now, is_suspect = self._clock.monotonic(), unchanged_share >= SUSPECT_SHARE
        if now - self._looked_at < self._pause_seconds(is_suspect=is_suspect):
            return
        self._looked_at = now
        try:
            self._read(leader, now, is_suspect=is_suspect)
        except (KclError, ValueError) as error:
            self._must_scan = True
            self._events(AwsTrouble("scan of a standby leader", str(error)))
            return
        self._look_seconds = self._clock.monotonic() - now

    def _pause_seconds(self, *, is_suspect: bool) -> float:
        if not self.is_watcher and not is_suspect:
            return max(_LOOK_SECONDS, _LOOK_SECONDS_PER_WORKER * self._workers)
        return max(self._watch_seconds, _DUTY * self._look_seconds)

    def _read(self, leader: str | None, now: float, *, is_suspect: bool) -> None:
        self._liveness.forget_after_pause(now)
        if is_suspect or not math.isfinite(self._scanned_at):
            self._scan(leader, now)
        elif not self.is_watcher:
            self._rank_among(self._reads.workers().workers, leader, now)
        elif (
            self._must_scan
            or now - self._scanned_at >= _SCAN_SECONDS
            or self._liveness.watching_since is None
        ):
            self._scan(leader, now)
        else:
            self._probe(leader, now)

    def _scan(self, leader: str | None, now: float) -> None:
        found = self._reads.scan()
        self._scanned_at = now
        self._probes = choose_probes(found.leases, self._probes)
        self._must_scan = self._reads.is_small(
            len(found.leases), len(self._probes)
        ) or not self._liveness.announce_changes(self._probes)
        self._rank_among(found.workers, leader, now, {lease.actual_owner for lease in found.leases})

    def _probe(self, leader: str | None, now: float) -> None:
        """Read a lease of the leader, which dates the renewals of all its leases."""
        key = self._probes.get(leader or "")
        is_due = now - self._ranked_at >= self._rows_seconds
        found, workers = self._reads.probe(() if key is None else (key,), with_workers=is_due)
        lease = None if key is None else found.get(key)
        self._must_scan = key is not None and (lease is None or lease.owner != leader)
        if workers is not None:
            self._rank_among(workers.workers, leader, now)

    def _rank_among(
        self,
        rows: Iterable[WorkerMetrics],
        leader: str | None,
        now: float,
        owners: Collection[str | None] = (),
    ) -> None:
        """Count the living workers with a lower id.

        In the first read, the workers that own leases count as living.
        """
        before, self._rows, self._ranked_at = self._rows, {}, now
        for row in rows:
            report = (row.last_update_seconds, row.stats)
            known = before.get(row.worker_id)
            if known is not None and known[0] == report:
                changed_at = known[1]
            else:
                changed_at = now if before or row.worker_id in owners else -math.inf
            self._rows[row.worker_id] = (report, changed_at)
        living = {key for key, (_, at) in self._rows.items() if now - at < _LIVING_SECONDS}
        living.discard(leader or "")
        self._workers = len(living)
        self._rank = sum(1 for worker_id in living if worker_id < self._own_id)
        if self._own_id not in living:
            self._rank = len(living)

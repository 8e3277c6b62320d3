"""Observe leases and workers while another process leads.

A new leader then knows at once which leases have expired. Two standbys scan the tables all the
time. They are the first owners of leases by id. The others scan from the time when the lock has not
been renewed as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.phase import Scan
from kcl_pipeline.leases.lease import Lease

WATCHERS: Final = 2
"""Standbys that scan all the time."""

SUSPECT_SHARE: Final = 0.4
"""Share of the lock's duration without a heartbeat after which every standby scans."""

_SCANS_PER_FAILOVER: Final = 5
_DUTY: Final = 4.0
"""A scan takes at most a fifth of the time."""
_LOOK_SECONDS: Final = 60.0
_LOOK_SECONDS_PER_WORKER: Final = 3.0
"""The time between two scans of other standbys grows with the fleet, so that the reads of all do
not.
"""


class StandbyWatch:
    """Scans for one process that does not lead.

    Args:
        settings: All settings.
        own_id: Worker id of this process, or the name of the sensor.
        liveness: Receives the scans.
        scan: Reads both tables.
        clock: The clock.
        events: Receives events.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        own_id: str,
        liveness: Liveness,
        scan: Callable[[], Scan],
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._own_id = own_id
        self._liveness = liveness
        self._scan = scan
        self._clock = clock
        self._events = events
        self._watch_seconds = settings.lease.failover_time_millis / 1000 / _SCANS_PER_FAILOVER
        self._scanned_at = -math.inf
        self._scan_seconds = 0.0
        self._rank = 0
        self._workers = 0

    @property
    def is_watcher(self) -> bool:
        """Whether this standby is one of those that scan all the time."""
        return self._rank < WATCHERS

    @property
    def workers(self) -> int:
        """Number of owners of leases in the last scan, without the leader."""
        return self._workers

    def look(self, leader: str | None, unchanged_share: float) -> None:
        """Scan the tables if it is time to.

        An error is reported as an event. The next call tries again.

        Args:
            leader: Owner of the lock.
            unchanged_share: Time without a heartbeat, as a share of the lock's duration.
        """
        now = self._clock.monotonic()
        if now - self._scanned_at < self._pause_seconds(unchanged_share):
            return
        self._scanned_at = now
        try:
            found = self._scan()
        except KclError as error:
            self._events(AwsTrouble("scan of a standby leader", str(error)))
            return
        self._scan_seconds = self._clock.monotonic() - now
        self._liveness.forget_after_pause(found.scan_started)
        self._liveness.observe(
            found.leases,
            found.workers,
            found.scan_started,
            found.scan_finished,
            unreadable=found.unreadable_workers,
        )
        self._rank_among(found.leases, leader)

    def _pause_seconds(self, unchanged_share: float) -> float:
        if not self.is_watcher and unchanged_share < SUSPECT_SHARE:
            return max(_LOOK_SECONDS, _LOOK_SECONDS_PER_WORKER * self._workers)
        return max(self._watch_seconds, _DUTY * self._scan_seconds)

    def _rank_among(self, leases: Iterable[Lease], leader: str | None) -> None:
        owners = {lease.actual_owner for lease in leases} - {None, leader}
        self._workers = len(owners)
        self._rank = sum(1 for owner in owners if owner is not None and owner < self._own_id)
        if self._own_id not in owners:
            self._rank = len(owners)

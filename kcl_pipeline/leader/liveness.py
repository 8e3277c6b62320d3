"""Decide which leases have expired and which workers live (protocol §5.3).

A lease has expired when its owner has not renewed it for the failover time. A worker lives while
its row changes within three of its reporting periods. Both are measured from the time at which this
process saw the last change, on its own monotonic clock. Nothing is stored: a new leader that has
not watched needs one failover time before a lease expires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import LastChanges
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.planning.state import Observation

PERIODS: Final = 3
"""Reporting periods without a change of its row after which a worker does not live any more."""
_JAVA_PERIOD_SECONDS: Final = 30.0
_SHORTEST_PERIOD_SECONDS: Final = 1.0
"""`lut` has whole seconds, so a row does not change more often."""
SETTLING_RENEWALS: Final = 9
"""Renewals after which the first sample of a throughput has no weight any more: one part in 512."""
BARRED_FAILOVERS: Final = 10
"""Failover times without leases for a worker that has let the lease of its probation expire."""
_SILENT_SHARES: Final = (0.5, 3.0)
"""Shares of the failover time between which an unrenewed lease is about to be assigned."""


@dataclass(slots=True)
class _Probation:
    """A worker that let a lease expire.

    Attributes:
        since: The expiry. Leases that it had before expire in the same silence.
        barred_until: Until then it gets no lease, unless no other worker lives.
    """

    since: float
    barred_until: float = -math.inf


class Liveness:
    """The times at which this process saw leases and workers change.

    The leader passes every scan to `observe` and every move to `note_move`, and calls `begin` when
    it acquires the lock.

    Args:
        settings: All settings.
        own_id: Worker id of this process. None: it is not a worker.

    Attributes:
        sampling_seconds: Time from the first sample of a throughput until it counts.
        settling_seconds: Time after which owners and workers that do not respond are recognised.
        watching_since: Time of the first scan. None: there was none.
    """

    def __init__(self, settings: ConsumerSettings, own_id: str | None = None) -> None:
        lease = settings.lease
        self._own_id = own_id
        self._failover_seconds = lease.failover_time_millis / 1000
        self._renewal_seconds = lease.renewal_interval_millis / 1000
        self._handoff_seconds = (
            self._failover_seconds + lease.graceful_lease_handoff_timeout_millis / 1000
        )
        # The first renewal of a new owner comes after its discovery of the lease
        discovery_seconds = settings.lease_discovery_interval_millis / 1000
        java_seconds = settings.kcl_discovery_interval_millis / 1000
        first = 2 * (discovery_seconds + self._renewal_seconds)
        self._first_seconds = max(self._failover_seconds, first)
        self._java_first_seconds = self._failover_seconds + max(discovery_seconds, java_seconds)
        report_seconds = settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._period_seconds = max(report_seconds, _SHORTEST_PERIOD_SECONDS)
        self.settling_seconds = max(self._java_first_seconds, PERIODS * self._period_seconds)
        self.sampling_seconds = SETTLING_RENEWALS * self._renewal_seconds
        self._watched_until = -math.inf
        self._forget()

    def _forget(self) -> None:
        self.watching_since: float | None = None
        self._leases: dict[str, Lease] = {}
        self._rows: dict[str, WorkerMetrics] = {}
        self._renewals = LastChanges[str]()
        """By lease, its counter and owners: since the last renewal or move."""
        self._owners = LastChanges[str]()
        """By lease, its two owners: since the last move."""
        self._actual_owners = LastChanges[str]()
        self._samples = LastChanges[str]()
        self._ends = LastChanges[str]()
        self._reports = LastChanges[str]()
        self._unreadable = LastChanges[str]()
        self._confirmed: set[str] = set()
        """Workers whose row has changed or appeared, or that have renewed a lease."""
        self._renewed_at: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}
        """When a lease last moved between living owners. One that had no owner may move at once."""
        self._last_owners: dict[str, str] = {}
        self._expired: set[str] = set()
        self._probation: dict[str, _Probation] = {}
        self._is_new_application = False

    def begin(self, now: float, replaced: str | None = None) -> None:
        """Start to lead. Former observations are kept if the last scan is recent.

        Args:
            now: Time in monotonic seconds.
            replaced: The owner whose lock expired: its worker must report before it gets leases.
                None: the lock was free.
        """
        self.forget_after_pause(now)
        if replaced is not None:
            self._probation.setdefault(replaced, _Probation(now))

    def forget_after_pause(self, now: float) -> None:
        """Forget everything if the last scan is too old."""
        if now - self._watched_until > self.settling_seconds:
            self._forget()

    def observe(
        self,
        leases: Iterable[Lease],
        workers: Iterable[WorkerMetrics],
        scan_started: float,
        scan_finished: float,
        *,
        unreadable: Iterable[BadRow] = (),
        blind_seconds: float = 0.0,
    ) -> None:
        """Compare a scan with the former one.

        Changes count from `scan_finished`, and ages up to `scan_started`. So a pause of the leader
        during a scan does not count as missing renewals.

        Args:
            leases: All leases.
            workers: All worker metrics rows.
            scan_started: Start of the scan in monotonic seconds.
            scan_finished: End of the scan in monotonic seconds.
            unreadable: Worker metrics rows that cannot be used. Their workers have not stopped.
            blind_seconds: Time since the former scan in which no scan succeeded. It is no silence
                of the workers: an outage of DynamoDB stops their renewals, too.
        """
        if blind_seconds:
            self._renewals.shift(blind_seconds)
            self._reports.shift(blind_seconds)
        is_first = self.watching_since is None
        self._leases = {lease.lease_key: lease for lease in leases}
        if is_first:
            self.watching_since = scan_finished
            self._is_new_application = all(
                lease.actual_owner is None and lease.counter == 0 for lease in self._leases.values()
            )
        self._watched_until = scan_finished
        self._observe_workers(workers, unreadable, scan_finished, is_first=is_first)
        self._observe_leases(scan_finished)
        self._note_expired(scan_started, scan_finished)

    def _observe_workers(
        self,
        workers: Iterable[WorkerMetrics],
        unreadable: Iterable[BadRow],
        now: float,
        *,
        is_first: bool,
    ) -> None:
        before, self._rows = self._rows.keys(), {row.worker_id: row for row in workers}
        self._unreadable.observe({row.key: row.heartbeat for row in unreadable}, now)
        changed = self._reports.observe(
            {key: (row.last_update_seconds, row.stats) for key, row in self._rows.items()}, now
        )
        self._confirmed |= changed.keys()
        if not is_first:  # a row that was there at the first look is no sign of life
            self._confirmed |= self._rows.keys() - before
        self._confirmed &= self._rows.keys()

    def _observe_leases(self, now: float) -> None:
        rows = self._leases
        renewals = {key: (row.counter, *_owners(row)) for key, row in rows.items()}
        renewed = self._renewals.observe(renewals, now)
        moved = self._owners.observe({key: _owners(row) for key, row in rows.items()}, now)
        for key in renewed.keys() - moved.keys():
            self._note_renewal(rows[key].actual_owner, now)
        owners = {key: row.actual_owner for key, row in rows.items()}
        for key, before in self._actual_owners.observe(owners, now).items():
            self._note_owner(key, before, owners[key], now)
        samples = {key: row.throughput_kbps is not None for key, row in rows.items()}
        self._samples.observe(samples, now)
        self._ends.observe({key: row.ended for key, row in rows.items()}, now)
        for memory in (self._moved_at, self._last_owners):
            for key in memory.keys() - rows.keys():
                del memory[key]

    def _note_renewal(self, worker_id: str | None, now: float) -> None:
        if worker_id is not None:
            self._renewed_at[worker_id] = now
            self._probation.pop(worker_id, None)
            if worker_id in self._rows:
                self._confirmed.add(worker_id)

    def _note_owner(self, key: str, before: object, after: str | None, now: float) -> None:
        self._last_owners.pop(key, None)
        if not isinstance(before, str):
            return
        if after is None:
            self._last_owners[key] = before
        elif key not in self._expired:
            self._moved_at[key] = now

    def _note_expired(self, scan_started: float, now: float) -> None:
        """Note the owners of leases that have expired since the former scan."""
        before, self._expired = self._expired, self._expired_now(scan_started)
        for key in self._expired - before:
            worker_id = self._leases[key].actual_owner or ""
            known = self._probation.setdefault(worker_id, _Probation(now))
            if self._owners.since(key) > known.since:  # the lease of its probation
                known.barred_until = now + BARRED_FAILOVERS * self._failover_seconds
                known.since = now
        with_row = self._rows.keys() | self._unreadable_ids()
        owners = {lease.actual_owner for lease in self._leases.values()}
        self._probation = {key: one for key, one in self._probation.items() if key in with_row}
        self._renewed_at = {key: at for key, at in self._renewed_at.items() if key in owners}

    # Leases

    def _is_proven(self, key: str) -> bool:
        """Return whether this process has seen the current owner renew the lease."""
        return self._renewals.since(key) > self._owners.since(key)

    def _grace_seconds(self, lease: Lease) -> float:
        """Return how long a lease with an owner may stay unchanged."""
        if self._is_proven(lease.lease_key):
            return self._failover_seconds
        row = self._rows.get(lease.actual_owner or "")
        if row is None and lease.actual_owner not in self._unreadable_ids():
            # Its owner has stopped, and does not discover it
            return self._java_first_seconds if self._is_old(lease) else self._renewal_seconds
        return (
            self._java_first_seconds if row is None or row.run_id is None else self._first_seconds
        )

    def _is_old(self, lease: Lease) -> bool:
        """Return whether the lease had its owner at the first look."""
        return not self._owners.has_changed(lease.lease_key)

    def _expired_now(self, now: float) -> set[str]:
        return {
            key
            for key, lease in self._leases.items()
            if lease.actual_owner is not None
            and now - self._renewals.since(key) > self._grace_seconds(lease)
        }

    def next_expiry_seconds(self, now: float) -> float:
        """Return the seconds until the next unfinished lease expires unrenewed; inf for none."""
        ends = (
            self._renewals.since(key) + self._grace_seconds(lease)
            for key, lease in self._leases.items()
            if lease.actual_owner is not None and not lease.ended
        )
        return min((end - now for end in ends if end >= now), default=math.inf)

    def is_a_lease_silent(self) -> bool:
        """Return whether the last scan shows a lease whose owner may have stopped."""
        least, most = (share * self._failover_seconds for share in _SILENT_SHARES)
        return any(
            least <= self._watched_until - self._renewals.since(key) <= most
            for key, lease in self._leases.items()
            if lease.actual_owner is not None and not lease.ended
        )

    def note_move(self, lease: Lease, now: float) -> None:
        """Note a move that this process has written.

        The time of the new owner starts now. The change of the counter is not a renewal.
        """
        key, before = lease.lease_key, self._leases.get(lease.lease_key)
        self._leases[key] = lease
        if before is None or before.actual_owner != lease.actual_owner:
            self._note_owner(key, before and before.actual_owner, lease.actual_owner, now)
            self._actual_owners.note(key, lease.actual_owner, now)
        self._owners.note(key, _owners(lease), now)
        # A handoff leaves the counter alone: its owner has renewed as long ago as before
        if before is None or lease.counter != before.counter:
            self._renewals.note(key, (lease.counter, *_owners(lease)), now)
            self._expired.discard(key)
        else:
            since = self._renewals.since(key)
            self._renewals.note(key, (lease.counter, *_owners(lease)), since)
        for changes, value in (
            (self._samples, lease.throughput_kbps is not None),
            (self._ends, lease.ended),
        ):
            if key not in changes:
                changes.note(key, value, now)

    def ended_seconds(self, now: float) -> dict[str, float]:
        """Return for each lease at SHARD_END the seconds since this process first saw it there."""
        return {k: age for k, age in self._ends.seconds(now).items() if self._leases[k].ended}

    # Workers

    def living(self, now: float) -> tuple[WorkerMetrics, ...]:
        """Return the workers whose row changed within three of their periods, sorted by id.

        A row in a first scan counts as changed; see `Observation.unconfirmed`. The period of a
        worker with other settings is unknown: while it renews leases, it has that of Java.
        """
        return tuple(self._rows[key] for key in sorted(self._rows) if self._lives(key, now))

    def _lives(self, worker_id: str, now: float) -> bool:
        age = now - self._reports.since(worker_id)
        is_java = self._rows[worker_id].run_id is None
        period = (
            max(self._period_seconds, _JAVA_PERIOD_SECONDS) if is_java else self._period_seconds
        )
        if age < PERIODS * period:
            return True
        renewed_at = self._renewed_at.get(worker_id, -math.inf)
        is_renewing = now - renewed_at <= self._failover_seconds
        return is_renewing and age <= PERIODS * _JAVA_PERIOD_SECONDS

    def unchanged_for(self, seconds: float, now: float) -> tuple[WorkerMetrics, ...]:
        """Return the rows that have not changed for `seconds` of observation, sorted by id."""
        return tuple(self._rows[key] for key in sorted(self._reports.unchanged_for(seconds, now)))

    def _unconfirmed(self, now: float) -> frozenset[str]:
        """Return the workers that may have stopped, because only their row is known.

        In an application whose leases never had an owner, all workers have just started. At the
        first look, owners count as alive until they should have renewed: the former leader has
        reassigned the leases of workers that stopped earlier.
        """
        watched = now - (self.watching_since if self.watching_since is not None else now)
        if self._is_new_application and watched <= self._period_seconds:
            return frozenset()
        unknown = self._rows.keys() - self._confirmed - {self._own_id}
        if watched <= self._renewal_seconds:
            first = (
                key for key in self._leases if self._renewals.since(key) == self.watching_since
            )
            owners = {self._leases[key].actual_owner for key in first}
            unknown -= owners - self._probation.keys()
        return frozenset(unknown)

    def _unreadable_ids(self) -> frozenset[str]:
        return self._unreadable.keys()

    def on_probation(self) -> frozenset[str]:
        """Return the workers that may be assigned one lease at a time."""
        return frozenset(self._probation)

    def _distrusted(self, now: float) -> frozenset[str]:
        """Return the workers that may not be assigned leases now."""
        unproven = {
            lease.owner
            for key, lease in self._leases.items()
            if not lease.ended
            and (lease.in_handoff or not self._is_proven(key))
            and key not in self._expired
        }
        silent = {key for key, one in self._probation.items() if not self._has_reported(key, one)}
        busy = {key for key in self._probation if key in unproven}
        barred = {key for key, one in self._probation.items() if now < one.barred_until}
        others = {row.worker_id for row in self.living(now)} - self._unconfirmed(now)
        if not others - silent - barred:
            barred = set()
        return frozenset(silent | busy | barred)

    def _has_reported(self, worker_id: str, probation: _Probation) -> bool:
        return worker_id in self._reports and self._reports.since(worker_id) > probation.since

    def observation(self, scan_started: float) -> Observation:
        """Return all observations as values, with ages up to `scan_started`."""
        now = scan_started
        expired = frozenset(self._expired_now(now))
        waiting = {key for key, lease in self._leases.items() if lease.actual_owner is None}
        since = {key: self._renewals.since(key) for key in expired}
        since |= {key: self._actual_owners.since(key) for key in waiting}
        handoffs = (key for key, lease in self._leases.items() if lease.in_handoff)
        sampled = (key for key, row in self._leases.items() if row.throughput_kbps is not None)
        java_seconds = PERIODS * _JAVA_PERIOD_SECONDS
        return Observation(
            expired=expired,
            waited_seconds={key: max(now - at, 0.0) for key, at in since.items()},
            overdue_handoffs=frozenset(
                key for key in handoffs if now - self._owners.since(key) > self._handoff_seconds
            ),
            last_owners=dict(self._last_owners),
            moved_seconds={key: max(now - at, 0.0) for key, at in self._moved_at.items()},
            distrusted=self._distrusted(now),
            unconfirmed=self._unconfirmed(now),
            unsettled=frozenset(
                key
                for key in sampled
                if self._samples.has_changed(key)
                and now - self._samples.since(key) < self.sampling_seconds
            ),
            unreadable=frozenset(
                key
                for key in self._unreadable_ids()
                if self._unreadable.has_changed(key)
                and now - self._unreadable.since(key) <= java_seconds
            ),
        )


def _owners(lease: Lease) -> tuple[str | None, str | None]:
    return lease.owner, lease.checkpoint_owner

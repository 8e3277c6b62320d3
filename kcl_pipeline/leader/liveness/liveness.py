"""Decide which leases have expired and which workers are alive (protocol §5.3).

The decisions use the times at which this process saw counters and rows change, on its own monotonic
clock. Times that other hosts write are only checked for a change. Nothing is stored. A new leader
needs one grace period before a lease expires, and one reporting period before all workers count as
alive.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.liveness.distrust import DistrustedWorkers
from kcl_pipeline.leader.liveness.grace import GracePeriods
from kcl_pipeline.leader.liveness.lease_memory import SETTLING_RENEWALS, LeaseMemory, Renewals
from kcl_pipeline.leader.liveness.worker_watch import FRESH_PERIODS, UnreadableRows, WorkerWatch
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.tables import WorkerListing, WorkerMetrics
from kcl_pipeline.planning.state import Observation


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
        renewals: The last known renewals of each worker.
        watching_since: Time of the first scan as a leader. None: there was none.
    """

    def __init__(self, settings: ConsumerSettings, own_id: str | None = None) -> None:
        self._failover_seconds = settings.lease.failover_time_millis / 1000
        self._renewal_seconds = settings.lease.renewal_interval_millis / 1000
        self._handoff_seconds = (
            self._failover_seconds + settings.lease.graceful_lease_handoff_timeout_millis / 1000
        )
        self._workers = WorkerWatch(settings, own_id)
        self._grace = GracePeriods(settings, self._workers)
        self.settling_seconds = max(
            self._grace.longest_seconds, FRESH_PERIODS * self._workers.period_seconds
        )
        self.sampling_seconds = SETTLING_RENEWALS * self._renewal_seconds
        self.watching_since: float | None = None
        self._watched_until: float | None = None
        self._never_owned = False
        self._replaced: str | None = None
        self._leases: dict[str, LeaseMemory] = {}
        self.renewals = Renewals(settings.lease)
        self._distrust = DistrustedWorkers(self._failover_seconds)
        self._unreadable = UnreadableRows()
        self._gone: dict[str, float] = {}
        """Workers whose row was deleted while this process leads, and when it noticed."""

    def begin(self, now: float, replaced: str | None = None) -> None:
        """Start to lead.

        Former observations are kept if the last scan is within the last reporting periods.

        Args:
            now: Time in monotonic seconds.
            replaced: The owner whose lock expired. It has not worked for that time. None: the lock
                was free.
        """
        self._replaced = replaced
        self._grace.begin(now, replaced)
        if replaced is not None:
            self._distrust.replace_leader(replaced, now)
        self.forget_after_pause(now)

    def forget_after_pause(self, now: float) -> None:
        """Forget which workers are alive if the last scan is too old."""
        if self._watched_until is None or now - self._watched_until > self.settling_seconds:
            self.watching_since = None
            self._workers.forget()

    def observe(
        self,
        leases: Iterable[Lease],
        workers: Iterable[WorkerMetrics],
        scan_started: float,
        scan_finished: float,
        *,
        unreadable: Iterable[BadRow] = (),
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
        """
        rows = {lease.lease_key: lease for lease in leases}
        if self.watching_since is None:
            self.watching_since = scan_finished
            self._never_owned = all(
                lease.actual_owner is None and lease.counter == 0 for lease in rows.values()
            )
        for key in [k for k in self._leases if k not in rows]:
            del self._leases[key]
        self.renewals.forget_others({m.actual_owner or "" for m in self._leases.values()})
        self._observe_workers(WorkerListing(tuple(workers), tuple(unreadable)), scan_finished)
        self._observe_leases(rows, scan_started, scan_finished)

    def observe_some(
        self,
        leases: Iterable[Lease],
        workers: WorkerListing | None,
        read_started: float,
        read_finished: float,
    ) -> None:
        """Compare some leases, and the worker metrics rows if they were read, with former reads.

        The other leases are as they were: no lease expires because it was not read. `observe` must
        have been called before.
        """
        if workers is not None:
            self._observe_workers(workers, read_finished)
        rows = {lease.lease_key: lease for lease in leases}
        self._observe_leases(rows, read_started, read_finished)

    def _observe_workers(self, listing: WorkerListing, now: float) -> None:
        self._watched_until = now
        self._unreadable.observe(listing.bad_rows, now)
        with_row = {row.worker_id for row in listing.workers} | self._unreadable.ids()
        self._gone |= dict.fromkeys(self._workers.observe(listing.workers, now), now)
        # Kept for the longest time of a handoff to one of them
        self._gone = {
            worker_id: since
            for worker_id, since in self._gone.items()
            if worker_id not in with_row and now - since <= self._handoff_seconds
        }

    def _observe_leases(
        self, rows: dict[str, Lease], read_started: float, read_finished: float
    ) -> None:
        self.renewals.observe(self._leases, rows, read_finished)
        for key, lease in rows.items():
            self._observe_lease(key, lease, read_finished)
            self._leases[key].read_started = read_started
        self._declare_expired(read_started, read_finished)
        # A worker without a row is no target, and a new row is a report.
        self._distrust.keep({*self._workers.ids(), *self._unreadable.ids()})

    def _observe_lease(self, key: str, lease: Lease, now: float) -> None:
        memory = self._leases.get(key)
        if memory is None:
            memory = self._leases[key] = LeaseMemory(
                lease.counter,
                lease.owner,
                lease.checkpoint_owner,
                now,
                proven=False,
                read_at=now,
                read_started=now,
            )
            memory.note_sample(lease, -math.inf)
        else:
            self._compare(memory, lease, now)
            memory.note_sample(lease, now)
        memory.note_row(lease, now)
        memory.waiting_since = _since(memory.waiting_since, now, is_on=lease.actual_owner is None)
        memory.handoff_since = _since(memory.handoff_since, now, is_on=lease.in_handoff)
        memory.ended_since = _since(memory.ended_since, now, is_on=lease.ended)

    def _compare(self, memory: LeaseMemory, lease: Lease, now: float) -> None:
        before = memory.actual_owner
        after = lease.actual_owner
        if (lease.owner, lease.checkpoint_owner) != (memory.owner, memory.checkpoint_owner):
            memory.handoff_since = None
        if after != before:
            memory.moved_at = now
            if before is not None and after is not None and not memory.declared_expired:
                memory.changed_hands_at = now
            memory.proven = memory.declared_expired = False
            memory.last_owner = before if after is None else None
        elif lease.counter != memory.counter:
            # Its owner may have stopped since its last known renewal, which is before this read
            last = self.renewals.last(after or "")
            memory.moved_at = last if last > memory.read_at else now
            memory.proven, memory.declared_expired = True, False
            if after is not None:
                self._distrust.renewed(after)
                # Not in the first scan as a leader: that renewal may be old
                if self.watching_since is not None and now > self.watching_since:
                    self._workers.note_renewal(after)

    def _declare_expired(self, read_started: float, read_finished: float) -> None:
        """Note new expiries, and their owners."""
        struck: dict[str, float] = {}
        for memory in self._leases.values():
            owner = memory.actual_owner
            if (
                owner is not None
                and not memory.declared_expired
                and self._is_expired(memory, read_started)
            ):
                memory.declared_expired = True
                struck[owner] = max(struck.get(owner, memory.moved_at), memory.moved_at)
        self._distrust.strike(struck, read_finished)

    def _is_expired(self, memory: LeaseMemory, now: float) -> bool:
        """Return whether a lease has expired. Only its last read counts, not the time after it.

        An owner that has not renewed yet has additional time for the discovery, unless its row was
        deleted: a stopped worker does not discover leases.
        """
        now = min(now, memory.read_started)
        if now - memory.moved_at > self._grace.seconds(memory):
            return True
        gone_since = self._gone.get(memory.actual_owner or "", math.inf)
        return not memory.proven and now - max(gone_since, memory.moved_at) > self._renewal_seconds

    def next_expiry_seconds(self, now: float) -> float:
        """Return the seconds until the next unfinished lease expires unrenewed; inf for none."""
        ends = (
            self.renewals.moved_at(memory) + self._grace.seconds(memory)
            for memory in self._leases.values()
            if memory.actual_owner is not None and memory.ended_since is None
        )
        return min((end - now for end in ends if end >= now), default=math.inf)

    def is_a_lease_silent(self) -> bool:
        """Return whether the last read shows a lease whose owner may have stopped."""
        return any(m.is_silent(self._failover_seconds) for m in self._leases.values())

    def note_move(self, lease: Lease, now: float) -> None:
        """Note a move that this process has written.

        The grace period of the new owner starts now. The change of the counter is not a renewal.
        """
        memory = self._leases.get(lease.lease_key)
        if memory is None or (memory.actual_owner) != lease.actual_owner:
            self._observe_lease(lease.lease_key, lease, now)
            return
        if lease.counter != memory.counter:
            memory.moved_at = now
            memory.proven = memory.declared_expired = False
        memory.note_row(lease, now)
        memory.handoff_since = now if lease.in_handoff else None

    def living(self, now: float) -> tuple[WorkerMetrics, ...]:
        """Return the workers whose row changed within three reporting periods, sorted by id.

        A row in a first scan counts as changed; see `Observation.unconfirmed`.
        """
        return self._workers.fresh(now, lambda worker_id: self._renews(worker_id, now))

    def _renews(self, worker_id: str, now: float) -> bool:
        mine = [m for m in self._leases.values() if m.actual_owner == worker_id]
        moved_at = self.renewals.moved_at
        return any(m.proven and now - moved_at(m) <= self._failover_seconds for m in mine)

    def unchanged_for(self, seconds: float, now: float) -> tuple[WorkerMetrics, ...]:
        """Return the rows that have not changed for `seconds` of observation."""
        return self._workers.unchanged_for(seconds, now)

    def _unconfirmed(self, now: float) -> frozenset[str]:
        """Return the workers that may have stopped, because only their row is known.

        After a first scan these are all workers except owners of leases. Owners count as alive
        until they should have renewed, except the owner of the expired lock: the former leader has
        reassigned the leases of workers that stopped earlier. In an application whose leases never
        had an owner, all workers have just started and count as alive.
        """
        watched = now - (self.watching_since if self.watching_since is not None else now)
        if self._never_owned and watched <= self._workers.period_seconds:
            return frozenset()
        unknown = {w for w in self._workers.ids() if not self._workers.is_alive(w)}
        if watched <= self._renewal_seconds:
            unknown -= self._owners_at_first_scan() - {self._replaced}
        return frozenset(unknown)

    def _owners_at_first_scan(self) -> set[str]:
        return {
            owner
            for m in self._leases.values()
            if m.moved_at == self.watching_since and (owner := m.actual_owner) is not None
        }

    def ended_seconds(self, now: float) -> dict[str, float]:
        """Return for each lease at SHARD_END the seconds since this process first saw it there."""
        return {
            key: now - m.ended_since for key, m in self._leases.items() if m.ended_since is not None
        }

    def observation(self, scan_started: float) -> Observation:
        """Return all observations as values, with ages up to `scan_started`."""
        expired = frozenset(
            key
            for key, m in self._leases.items()
            if m.actual_owner is not None and self._is_expired(m, scan_started)
        )
        waited = {key: scan_started - self._leases[key].moved_at for key in expired}
        waited |= {
            key: scan_started - m.waiting_since
            for key, m in self._leases.items()
            if m.waiting_since is not None
        }
        return Observation(
            expired=expired,
            waited_seconds={key: max(seconds, 0.0) for key, seconds in waited.items()},
            overdue_handoffs=frozenset(
                k
                for k, m in self._leases.items()
                if m.handoff_since is not None
                and scan_started - m.handoff_since > self._handoff_seconds
            ),
            last_owners={
                k: m.last_owner for k, m in self._leases.items() if m.last_owner is not None
            },
            moved_seconds={
                k: max(scan_started - m.changed_hands_at, 0.0)
                for k, m in self._leases.items()
                if m.changed_hands_at is not None
            },
            distrusted=self._distrusted(scan_started),
            unconfirmed=self._unconfirmed(scan_started),
            unsettled=frozenset(
                k
                for k, m in self._leases.items()
                if m.sampled_at is not None and scan_started - m.sampled_at < self.sampling_seconds
            ),
            unreadable=self._unreadable.living(scan_started),
        )

    def _distrusted(self, now: float) -> frozenset[str]:
        return self._distrust.ids(self._workers.changes(), now)

    def membership(self, now: float) -> Hashable:
        """Return a value that differs from a former one if workers have changed.

        They have joined or left, announced a change of leases, or may be assigned leases now.
        """
        return (
            self._workers.announced(),
            tuple(row.worker_id for row in self.living(now)),
            self._distrusted(now),
            self._unconfirmed(now),
            self._unreadable.ids(),
        )

    def announce_changes(self, workers: Iterable[str]) -> bool:
        """Return whether all these workers stay, and announce changes of their leases."""
        return all(map(self._workers.announces, workers))

    def is_settled(self, lease: Lease) -> bool:
        """Return whether a lease needs no leader while its owner renews its leases.

        A finished lease does not. Another one has an owner that has renewed it, and that announces
        changes of its leases.
        """
        if lease.ended:
            return True
        memory, owner = self._leases.get(lease.lease_key), lease.owner
        return (
            memory is not None
            and owner is not None
            and not lease.in_handoff
            and memory.proven
            and not memory.declared_expired
            and self._workers.announces(owner)
        )


def _since(before: float | None, now: float, *, is_on: bool) -> float | None:
    """Return the time since which a state holds; None if it does not."""
    if not is_on:
        return None
    return now if before is None else before

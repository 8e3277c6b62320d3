"""What the leader remembers between cycles: when things last moved, on its own monotonic clock
(protocol §5.3).

Nothing here is stored. It can be lost at any time; a leader that starts anew then needs one grace
period before it calls an owner dead, and one reporting period before it calls every worker alive.
No time written by another host is compared with anything: only whether it changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.worker_watch import FRESH_PERIODS, WorkerWatch
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.state import Observation

_MOST_STRIKES = 6


@dataclass(slots=True)
class _LeaseMemory:
    counter: int
    owner: str | None
    checkpoint_owner: str | None
    moved_at: float
    """When the counter, or the owner, was last seen to change."""
    proven: bool
    """Whether the present owner has been seen renewing."""
    waiting_since: float | None = None
    handoff_since: float | None = None
    changed_hands_at: float | None = None
    """When a living owner last gave it to another. One that had nobody may be moved again at once:
    who came first got them all.
    """
    last_owner: str | None = None
    ended_since: float | None = None
    declared_expired: bool = False


@dataclass(slots=True)
class _Distrust:
    since: float
    strikes: int


class Liveness:
    """Times of leases and workers as this process saw them.

    Feed it every scan with `observe`, and every move it writes with `note_move`; call `begin` when
    this process becomes the leader. `own_id` is the worker that this process is, if it is one.
    """

    def __init__(self, settings: ConsumerSettings, own_id: str | None = None) -> None:
        self._failover = settings.lease.failover_time_millis / 1000
        # A new owner finds its lease by discovery, and its first write is the renewal after that.
        self._grace = self._failover + settings.lease_discovery_interval_millis / 1000
        self._renewal = settings.lease.renewal_interval_millis / 1000
        self._handoff = self._failover + settings.lease.graceful_lease_handoff_timeout_millis / 1000
        self._workers = WorkerWatch(settings, own_id)
        self.settling_seconds = max(self._grace, FRESH_PERIODS * self._workers.period_seconds)
        """How long to look before a dead owner or worker can be told from a living one."""
        self.watching_since: float | None = None
        """When this process first looked since it leads; None before that."""
        self._watched_until: float | None = None
        self._nobody_ever_held = False
        self._replaced: str | None = None
        self._leases: dict[str, _LeaseMemory] = {}
        self._distrust: dict[str, _Distrust] = {}
        self._gone: dict[str, float] = {}
        """Workers whose row went while this process was looking: they stopped in good order, and
        since when that is known.
        """

    def begin(self, now: float, replaced: str | None = None) -> None:
        """This process has become the leader.

        What it knows from before counts if it has looked within the last reporting periods.
        `replaced` is the owner whose lock expired: it stopped working at least that long ago.
        """
        self._replaced = replaced
        if self._watched_until is None or now - self._watched_until > self.settling_seconds:
            self.watching_since = None
            self._workers.forget()

    def observe(
        self,
        leases: Iterable[Lease],
        workers: Iterable[WorkerMetrics],
        scan_started: float,
        scan_finished: float,
    ) -> None:
        """Take in a scan that was begun at `asked` and complete at `answered`, in monotonic
        seconds.

        Changes count from `answered` and ages up to `asked`: a leader that is paused during a scan
        does not take the pause for silence.
        """
        rows = {lease.lease_key: lease for lease in leases}
        if self.watching_since is None:
            self.watching_since = scan_finished
            self._nobody_ever_held = all(
                lease.actual_owner is None and lease.counter == 0 for lease in rows.values()
            )
        self._watched_until = scan_finished
        workers = tuple(workers)
        with_row = {row.worker_id for row in workers}
        self._gone |= dict.fromkeys(self._workers.observe(workers, scan_finished), scan_finished)
        # As long as a handoff to one of them may take
        self._gone = {
            worker_id: since
            for worker_id, since in self._gone.items()
            if worker_id not in with_row and scan_finished - since <= self._handoff
        }
        for key in [k for k in self._leases if k not in rows]:
            del self._leases[key]
        for key, lease in rows.items():
            self._observe_lease(key, lease, scan_finished)
        self._declare_expired(scan_started, scan_finished)
        # Without a row nobody is a target, and a row that comes back is a report.
        self._distrust = {
            worker_id: distrust
            for worker_id, distrust in self._distrust.items()
            if worker_id in with_row
        }

    def _observe_lease(self, key: str, lease: Lease, now: float) -> None:
        memory = self._leases.get(key)
        if memory is None:
            memory = self._leases[key] = _LeaseMemory(
                lease.counter, lease.owner, lease.checkpoint_owner, now, proven=False
            )
        else:
            self._compare(memory, lease, now)
        memory.counter, memory.owner, memory.checkpoint_owner = (
            lease.counter,
            lease.owner,
            lease.checkpoint_owner,
        )
        if lease.actual_owner is not None:
            memory.waiting_since = None
        elif memory.waiting_since is None:
            memory.waiting_since = now
        if not lease.in_handoff:
            memory.handoff_since = None
        elif memory.handoff_since is None:
            memory.handoff_since = now
        if not lease.ended:
            memory.ended_since = None
        elif memory.ended_since is None:
            memory.ended_since = now

    def _compare(self, memory: _LeaseMemory, lease: Lease, now: float) -> None:
        before = memory.checkpoint_owner or memory.owner
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
            memory.moved_at = now
            memory.proven, memory.declared_expired = True, False
            if after is not None:
                self._distrust.pop(after, None)
                # Between two looks of one watch: before that, it may have been long ago
                if self.watching_since is not None and now > self.watching_since:
                    self._workers.note_renewal(after)

    def _declare_expired(self, scan_started: float, scan_finished: float) -> None:
        """Every expiry counts once against the owner, however many of its leases expire in the same
        scan.
        """
        owners = set()
        for memory in self._leases.values():
            owner = memory.checkpoint_owner or memory.owner
            if (
                owner is not None
                and not memory.declared_expired
                and self._is_expired(memory, scan_started)
            ):
                memory.declared_expired = True
                owners.add(owner)
        for owner in owners:
            strikes = self._distrust[owner].strikes + 1 if owner in self._distrust else 1
            self._distrust[owner] = _Distrust(scan_finished, min(strikes, _MOST_STRIKES))

    def _is_expired(self, memory: _LeaseMemory, now: float) -> bool:
        """An owner not yet seen renewing has time to discover the lease as well, unless it stopped
        while it was given the lease: it does neither any more.
        """
        if memory.proven:
            return now - memory.moved_at > self._failover
        gone_since = self._gone.get(memory.checkpoint_owner or memory.owner or "", math.inf)
        return (
            now - memory.moved_at > self._grace
            or now - max(gone_since, memory.moved_at) > self._renewal
        )

    def note_move(self, lease: Lease, now: float) -> None:
        """Remember a move that this process has just written: the new owner has its full grace from
        now on, and a counter moved by us proves nothing.
        """
        memory = self._leases.get(lease.lease_key)
        if memory is None or (memory.checkpoint_owner or memory.owner) != lease.actual_owner:
            self._observe_lease(lease.lease_key, lease, now)
            return
        if lease.counter != memory.counter:
            memory.moved_at = now
            memory.proven = memory.declared_expired = False
        memory.counter, memory.owner, memory.checkpoint_owner = (
            lease.counter,
            lease.owner,
            lease.checkpoint_owner,
        )
        memory.handoff_since = now if lease.in_handoff else None

    def living(self, now: float) -> tuple[WorkerMetrics, ...]:
        """Workers whose row changed within three of their reporting periods, sorted by id. A row
        seen for the first time counts as alive; see `Observation.unconfirmed`.
        """
        return self._workers.fresh(now, lambda worker_id: self._renews(worker_id, now))

    def _renews(self, worker_id: str, now: float) -> bool:
        mine = [m for m in self._leases.values() if (m.checkpoint_owner or m.owner) == worker_id]
        return any(m.proven and now - m.moved_at <= self._failover for m in mine)

    def unchanged_for(self, seconds: float, now: float) -> tuple[WorkerMetrics, ...]:
        """Rows that have not changed for `seconds` while this process was looking."""
        return self._workers.unchanged_for(seconds, now)

    def _unconfirmed(self, now: float) -> frozenset[str]:
        """Workers of which there is only a row, which may be that of a dead one.

        At a first look that is all of them. Then owners of leases count as alive, except the one
        that let the lock expire, until they should have renewed: the leases of a worker that died
        earlier have been given to others. In an application whose leases nobody has ever had, all
        workers have just started.
        """
        watched = now - (self.watching_since if self.watching_since is not None else now)
        if self._nobody_ever_held and watched <= self._workers.period_seconds:
            return frozenset()
        unknown = {w for w in self._workers.ids() if not self._workers.is_alive(w)}
        if watched <= self._renewal:
            unknown -= self._owners_at_first_look() - {self._replaced}
        return frozenset(unknown)

    def _owners_at_first_look(self) -> set[str]:
        return {
            owner
            for m in self._leases.values()
            if m.moved_at == self.watching_since
            and (owner := m.checkpoint_owner or m.owner) is not None
        }

    def ended_seconds(self, now: float) -> dict[str, float]:
        """How long each lease at SHARD_END has been known to be there."""
        return {
            key: now - m.ended_since for key, m in self._leases.items() if m.ended_since is not None
        }

    def observation(self, scan_started: float) -> Observation:
        """All of it as values, with ages up to `asked`."""
        expired = frozenset(
            key
            for key, m in self._leases.items()
            if (m.checkpoint_owner or m.owner) is not None and self._is_expired(m, scan_started)
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
                if m.handoff_since is not None and scan_started - m.handoff_since > self._handoff
            ),
            last_owners={
                k: m.last_owner for k, m in self._leases.items() if m.last_owner is not None
            },
            moved_seconds={
                k: max(scan_started - m.changed_hands_at, 0.0)
                for k, m in self._leases.items()
                if m.changed_hands_at is not None
            },
            distrusted=frozenset(
                worker
                for worker in self._distrust
                if not self._is_trusted_again(worker, scan_started)
            ),
            unconfirmed=self._unconfirmed(scan_started),
        )

    def _is_trusted_again(self, worker_id: str, now: float) -> bool:
        """A worker that let leases expire must report again first; each time that happens without a
        renewal in between, it also waits twice as long.
        """
        distrust = self._distrust[worker_id]
        changed_at = self._workers.changed_at(worker_id)
        if changed_at is None or changed_at <= distrust.since:
            return False
        return now - distrust.since >= ((1 << (distrust.strikes - 1)) - 1) * self._failover

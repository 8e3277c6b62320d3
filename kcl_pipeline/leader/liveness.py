"""What the leader remembers between cycles: when things last moved, on its own monotonic clock (protocol §5.3).

Nothing here is stored. It can be lost at any time; a leader that starts anew then needs one grace period before it calls an owner dead.
No time written by another host is compared with anything: only whether it changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.state import Observation

_FRESH_PERIODS = 3
_FIRST_REPORT_SECONDS = 90.0
"""Three of KCL's reporting periods: how long a row may rest before its first change is seen, if its worker renews leases meanwhile."""
_SHORTEST_PERIOD_SECONDS = 1.0
"""`lut` counts whole seconds, so that rows cannot be seen to change more often."""
_LONGEST_PERIOD_SECONDS = 60.0
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
    """When a living owner last gave it to another. One that had nobody may be moved again at once: who came first got them all."""
    last_owner: str | None = None
    ended_since: float | None = None
    declared_expired: bool = False


@dataclass(slots=True)
class _WorkerMemory:
    row: WorkerMetrics
    changed_at: float
    period: float | None = None
    """The shortest time between two changes seen."""


@dataclass(slots=True)
class _Distrust:
    since: float
    strikes: int


class Liveness:
    """Times of leases and workers as this process saw them. Feed it every scan with `observe`, and every move it writes with `note_move`."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._failover = settings.lease.failover_time_millis / 1000
        # A new owner finds its lease by discovery, and its first write is the renewal after that.
        self._grace = self._failover + settings.lease_discovery_interval_millis / 1000
        self._renewal = settings.lease.renewal_interval_millis / 1000
        self._handoff = self._failover + settings.lease.graceful_lease_handoff_timeout_millis / 1000
        self._period = max(settings.worker.worker_metrics_reporter_freq_in_millis / 1000, _SHORTEST_PERIOD_SECONDS)
        self.settling_seconds = max(self._grace, _FRESH_PERIODS * self._period)
        """How long to look before a dead owner or worker can be told from a living one."""
        self._leases: dict[str, _LeaseMemory] = {}
        self._workers: dict[str, _WorkerMemory] = {}
        self._distrust: dict[str, _Distrust] = {}
        self._gone: dict[str, float] = {}
        """Workers whose row went while this process was looking: they stopped in good order, and since when that is known."""

    def observe(self, leases: Iterable[Lease], workers: Iterable[WorkerMetrics], asked: float, answered: float) -> None:
        """Take in a scan that was begun at `asked` and complete at `answered`, in monotonic seconds.

        Changes count from `answered` and ages up to `asked`: a leader that is paused during a scan does not take the pause for silence.
        """
        rows = {lease.lease_key: lease for lease in leases}
        for key in [k for k in self._leases if k not in rows]:
            del self._leases[key]
        for key, lease in rows.items():
            self._observe_lease(key, lease, answered)
        seen = {row.worker_id: row for row in workers}
        for worker_id in [w for w in self._workers if w not in seen]:
            del self._workers[worker_id]
            self._gone[worker_id] = answered
        # As long as a handoff to one of them may take
        self._gone = {worker_id: since for worker_id, since in self._gone.items() if worker_id not in seen and answered - since <= self._handoff}
        for worker_id, row in seen.items():
            self._observe_worker(worker_id, row, answered)
        self._declare_expired(asked, answered)
        # Without a row nobody is a target, and a row that comes back is a report.
        self._distrust = {worker_id: distrust for worker_id, distrust in self._distrust.items() if worker_id in seen}

    def _observe_lease(self, key: str, lease: Lease, now: float) -> None:
        memory = self._leases.get(key)
        if memory is None:
            memory = self._leases[key] = _LeaseMemory(lease.counter, lease.owner, lease.checkpoint_owner, now, proven=False)
        else:
            self._compare(memory, lease, now)
        memory.counter, memory.owner, memory.checkpoint_owner = lease.counter, lease.owner, lease.checkpoint_owner
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

    def _observe_worker(self, worker_id: str, row: WorkerMetrics, now: float) -> None:
        memory = self._workers.get(worker_id)
        if memory is None:
            self._workers[worker_id] = _WorkerMemory(row, now)
        elif (row.last_update_seconds, row.stats) != (memory.row.last_update_seconds, memory.row.stats):
            gap = now - memory.changed_at
            memory.period = gap if memory.period is None else min(memory.period, gap)
            memory.row, memory.changed_at = row, now
        else:
            memory.row = row

    def _declare_expired(self, asked: float, answered: float) -> None:
        """Every expiry counts once against the owner, however many of its leases expire in the same scan."""
        owners = set()
        for memory in self._leases.values():
            owner = memory.checkpoint_owner or memory.owner
            if owner is not None and not memory.declared_expired and self._is_expired(memory, asked):
                memory.declared_expired = True
                owners.add(owner)
        for owner in owners:
            strikes = self._distrust[owner].strikes + 1 if owner in self._distrust else 1
            self._distrust[owner] = _Distrust(answered, min(strikes, _MOST_STRIKES))

    def _is_expired(self, memory: _LeaseMemory, now: float) -> bool:
        """An owner not yet seen renewing has time to discover the lease as well, unless it stopped while it was given the lease: it does neither any more."""
        if memory.proven:
            return now - memory.moved_at > self._failover
        gone_since = self._gone.get(memory.checkpoint_owner or memory.owner or "", math.inf)
        return now - memory.moved_at > self._grace or now - max(gone_since, memory.moved_at) > self._renewal

    def note_move(self, lease: Lease, now: float) -> None:
        """Remember a move that this process has just written: the new owner has its full grace from now on, and a counter moved by us proves nothing."""
        memory = self._leases.get(lease.lease_key)
        if memory is None or (memory.checkpoint_owner or memory.owner) != lease.actual_owner:
            self._observe_lease(lease.lease_key, lease, now)
            return
        if lease.counter != memory.counter:
            memory.moved_at = now
            memory.proven = memory.declared_expired = False
        memory.counter, memory.owner, memory.checkpoint_owner = lease.counter, lease.owner, lease.checkpoint_owner
        memory.handoff_since = now if lease.in_handoff else None

    def living(self, now: float) -> tuple[WorkerMetrics, ...]:
        """Workers whose row changed within three of their reporting periods, sorted by id. A row seen for the first time counts as alive.

        The period is the one seen, at least that of the settings. While no change has been seen a row may rest longer as long as
        the worker renews leases: a Java peer reports every 30 s by default.
        """
        return tuple(self._workers[worker_id].row for worker_id in sorted(self._workers) if self._is_fresh(worker_id, now))

    def _is_fresh(self, worker_id: str, now: float) -> bool:
        memory = self._workers[worker_id]
        rest = now - memory.changed_at
        period = max(self._period, min(memory.period or 0.0, _LONGEST_PERIOD_SECONDS))
        if rest < _FRESH_PERIODS * period:
            return True
        return memory.period is None and rest <= _FIRST_REPORT_SECONDS and self._renews(worker_id, now)

    def _renews(self, worker_id: str, now: float) -> bool:
        mine = [m for m in self._leases.values() if (m.checkpoint_owner or m.owner) == worker_id]
        return any(m.proven and now - m.moved_at <= self._failover for m in mine)

    def unchanged_for(self, seconds: float, now: float) -> tuple[WorkerMetrics, ...]:
        """Rows that have not changed for `seconds` while this process was looking."""
        return tuple(m.row for _, m in sorted(self._workers.items()) if now - m.changed_at >= seconds)

    def ended_seconds(self, now: float) -> dict[str, float]:
        """How long each lease at SHARD_END has been known to be there."""
        return {key: now - m.ended_since for key, m in self._leases.items() if m.ended_since is not None}

    def observation(self, asked: float) -> Observation:
        """All of it as values, with ages up to `asked`."""
        expired = frozenset(key for key, m in self._leases.items() if (m.checkpoint_owner or m.owner) is not None and self._is_expired(m, asked))
        waited = {key: asked - self._leases[key].moved_at for key in expired}
        waited |= {key: asked - m.waiting_since for key, m in self._leases.items() if m.waiting_since is not None}
        return Observation(
            expired=expired,
            waited_seconds={key: max(seconds, 0.0) for key, seconds in waited.items()},
            overdue_handoffs=frozenset(k for k, m in self._leases.items() if m.handoff_since is not None and asked - m.handoff_since > self._handoff),
            last_owners={k: m.last_owner for k, m in self._leases.items() if m.last_owner is not None},
            moved_seconds={k: max(asked - m.changed_hands_at, 0.0) for k, m in self._leases.items() if m.changed_hands_at is not None},
            distrusted=frozenset(worker for worker in self._distrust if not self._is_trusted_again(worker, asked)),
        )

    def _is_trusted_again(self, worker_id: str, now: float) -> bool:
        """A worker that let leases expire must report again first; each time that happens without a renewal in between, it also waits twice as long."""
        distrust = self._distrust[worker_id]
        memory = self._workers.get(worker_id)
        if memory is None or memory.changed_at <= distrust.since:
            return False
        return now - distrust.since >= ((1 << (distrust.strikes - 1)) - 1) * self._failover

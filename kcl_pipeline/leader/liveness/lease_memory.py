"""What a leader remembers about a lease and about the renewals of its owner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.leases.lease.values import Lease

_LEAST_SHARE: Final = 0.85
"""Share of the renewal interval after which the next renewal is expected at the earliest."""
SETTLING_RENEWALS: Final = 9
"""Renewals after which the first sample of a throughput has no weight any more: one part in 512."""
_SILENT_SHARE: Final = 0.5
"""Share of the failover time without a known renewal after which a worker may have stopped."""

_LONGEST_SILENT_SHARE: Final = 3.0
"""The same after which a lease is not about to be assigned: it would have been."""


@dataclass(slots=True)
class LeaseMemory:
    """The former reads of one lease."""

    counter: int
    owner: str | None
    checkpoint_owner: str | None
    moved_at: float
    """Time of the last change of counter or owner."""
    proven: bool
    """Whether this process has seen the current owner renew the lease."""
    read_at: float
    """End of the last read."""
    read_started: float
    """Start of the last read. Nothing is known about the time after it."""
    waiting_since: float | None = None
    handoff_since: float | None = None
    changed_hands_at: float | None = None
    """Time of the last move between living owners. A lease that had no owner may be moved again at
    once, because the first worker was assigned all leases.
    """
    last_owner: str | None = None
    ended_since: float | None = None
    declared_expired: bool = False
    sampled_at: float | None = None
    """When the throughput got its first sample; -inf if it had one in the first read."""

    def note_sample(self, lease: Lease, now: float) -> None:
        """Note whether the throughput has a sample."""
        if self.sampled_at is None and lease.throughput_kbps is not None:
            self.sampled_at = now

    def note_row(self, lease: Lease, now: float) -> None:
        """Note a row that was read or written now."""
        self.counter, self.owner = lease.counter, lease.owner
        self.checkpoint_owner = lease.checkpoint_owner
        self.read_at = self.read_started = now

    @property
    def actual_owner(self) -> str | None:
        """The owner that renews the lease."""
        return self.checkpoint_owner or self.owner

    def is_silent(self, failover_seconds: float) -> bool:
        """Return whether the owner has not renewed for half to three times the failover time."""
        if self.actual_owner is None or self.ended_since is not None:
            return False
        silent = (self.read_started - self.moved_at) / failover_seconds
        return _SILENT_SHARE <= silent <= _LONGEST_SILENT_SHARE

    def is_renewed_by(self, lease: Lease) -> bool:
        """Return whether `lease` is a later state with the same owner and another counter."""
        return (
            lease.counter != self.counter
            and lease.actual_owner is not None
            and (lease.owner, lease.checkpoint_owner) == (self.owner, self.checkpoint_owner)
        )


@dataclass(frozen=True, slots=True)
class _Renewal:
    at: float
    is_single: bool


class Renewals:
    """The times at which each worker was seen to renew a lease.

    A worker renews all its leases in one pass. So a lease that was not read in every cycle was last
    renewed when another lease of the same worker was seen to move.

    Args:
        settings: Failover time and renewal interval.
    """

    def __init__(self, settings: LeaseSettings) -> None:
        self._least_seconds = _LEAST_SHARE * settings.renewal_interval_millis / 1000
        self._silent_seconds = _SILENT_SHARE * settings.failover_time_millis / 1000
        self._last: dict[str, _Renewal] = {}

    def observe(
        self, memories: Mapping[str, LeaseMemory], rows: Mapping[str, Lease], now: float
    ) -> None:
        """Note the workers that have renewed since their last known renewal.

        A lease proves that if it was read after that renewal.

        Args:
            memories: The leases before this read.
            rows: The leases of this read.
            now: End of this read in monotonic seconds.
        """
        found: dict[str, bool] = {}
        for key, lease in rows.items():
            memory = memories.get(key)
            if memory is None or not memory.is_renewed_by(lease):
                continue
            owner = lease.actual_owner or ""
            if memory.read_at >= self.last(owner):
                is_single = lease.counter == memory.counter + 1
                found[owner] = found.get(owner, True) and is_single
        for owner, is_single in found.items():
            self._last[owner] = _Renewal(now, is_single)

    def last(self, worker_id: str) -> float:
        """Return the time of the last known renewal; -inf if there is none."""
        found = self._last.get(worker_id)
        return -math.inf if found is None else found.at

    def is_due(self, worker_id: str, now: float) -> bool:
        """Return whether the worker may have renewed again since its last known renewal.

        A worker that processes batches writes its leases at any time. A worker that only renews
        does not write again at once.
        """
        found = self._last.get(worker_id)
        return found is None or not found.is_single or now - found.at >= self._least_seconds

    def is_silent(self, worker_id: str, now: float) -> bool:
        """Return whether no renewal was seen for half of the failover time."""
        return now - self.last(worker_id) > self._silent_seconds

    def moved_at(self, memory: LeaseMemory) -> float:
        """Return the time of the last known renewal of a lease, or of its last move."""
        last = self.last(memory.actual_owner or "")
        if memory.proven and memory.read_at < last:
            return max(memory.moved_at, last)
        return memory.moved_at

    def forget_others(self, workers: set[str]) -> None:
        """Forget all workers that own no lease."""
        for worker_id in self._last.keys() - workers:
            del self._last[worker_id]

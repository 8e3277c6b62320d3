"""Decide how long a lease may stay unchanged before it has expired (protocol §5.3)."""

from __future__ import annotations

import math

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.liveness.lease_memory import LeaseMemory
from kcl_pipeline.leader.liveness.worker_watch import WorkerWatch


class GracePeriods:
    """The times after which leases expire.

    An owner that has renewed a lease renews it again within the failover time. A new owner
    discovers its lease, and then renews it. The renewal is its first write. The discovery interval
    of a Java worker is longer than that of this package.

    A worker that leads discovers its leases in its own cycles. So after it has lost the lock, the
    leases that it owned before need no time for the discovery.

    Args:
        settings: Failover time and discovery intervals.
        workers: Which workers are of this package.

    Attributes:
        longest_seconds: The longest of these times.
    """

    def __init__(self, settings: ConsumerSettings, workers: WorkerWatch) -> None:
        self._workers = workers
        self._failover_seconds = settings.lease.failover_time_millis / 1000
        discovery_seconds = settings.lease_discovery_interval_millis / 1000
        renewal_seconds = settings.lease.renewal_interval_millis / 1000
        self.longest_seconds = self._failover_seconds + max(
            discovery_seconds, settings.kcl_discovery_interval_millis / 1000
        )
        self._own_seconds = max(self._failover_seconds, 2 * (discovery_seconds + renewal_seconds))
        self._replaced: str | None = None
        self._replaced_at = -math.inf

    def begin(self, now: float, replaced: str | None) -> None:
        """Start to lead.

        Args:
            now: Time in monotonic seconds.
            replaced: The owner whose lock expired. None: the lock was free.
        """
        self._replaced, self._replaced_at = replaced, now

    def seconds(self, memory: LeaseMemory) -> float:
        """Return how long a lease with an owner may stay unchanged."""
        owner = memory.actual_owner or ""
        if memory.proven:
            return self._failover_seconds
        if not self._workers.is_of_this_package(owner):
            return self.longest_seconds
        if owner == self._replaced and memory.moved_at < self._replaced_at:
            return self._failover_seconds
        return self._own_seconds

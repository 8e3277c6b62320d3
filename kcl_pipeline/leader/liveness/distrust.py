"""Workers that let leases expire, and may not be assigned leases for a while."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

_MAX_STRIKES = 6


@dataclass(slots=True)
class _Distrust:
    since: float
    strikes: int
    struck_at: float = -math.inf


class DistrustedWorkers:
    """Workers whose leases expired, until they report again. For each further expiry without a
    renewal, the wait doubles.

    Args:
        failover_seconds: The first wait.
    """

    def __init__(self, failover_seconds: float) -> None:
        self._failover_seconds = failover_seconds
        self._workers: dict[str, _Distrust] = {}

    def replace_leader(self, worker_id: str, now: float) -> None:
        """Note that the lock of this worker expired."""
        self._workers.setdefault(worker_id, _Distrust(now, strikes=0))

    def renewed(self, worker_id: str) -> None:
        """Note that the worker has renewed a lease."""
        self._workers.pop(worker_id, None)

    def strike(self, expired: Mapping[str, float], now: float) -> None:
        """Note workers that let leases expire.

        Leases that a worker had before its last strike expire one after the other in one silence.
        They are no further strike.

        Args:
            expired: By worker, when the last one of these leases moved.
            now: The time of the strike.
        """
        for worker_id, moved_at in expired.items():
            before = self._workers.get(worker_id)
            is_new = before is None or moved_at > before.struck_at
            distrust = self._workers.setdefault(worker_id, _Distrust(now, strikes=0))
            distrust.since = now
            if is_new:
                distrust.strikes = min(distrust.strikes + 1, _MAX_STRIKES)
                distrust.struck_at = now

    def keep(self, workers: Container[str]) -> None:
        """Forget all other workers."""
        self._workers = {key: one for key, one in self._workers.items() if key in workers}

    def ids(self, changed_at: Mapping[str, float], now: float) -> frozenset[str]:
        """Return the workers that may not be assigned leases now.

        Args:
            changed_at: When the row of each worker changed last.
            now: Time in monotonic seconds.
        """
        return frozenset(
            worker_id
            for worker_id, distrust in self._workers.items()
            if not self._is_trusted_again(distrust, changed_at.get(worker_id, -math.inf), now)
        )

    def _is_trusted_again(self, distrust: _Distrust, changed_at: float, now: float) -> bool:
        if changed_at <= distrust.since:
            return False
        doublings = max(distrust.strikes - 1, 0)
        return now - distrust.since >= ((1 << doublings) - 1) * self._failover_seconds

"""Checks of the leader: how its lock changes hands (S9) and what it plans (S12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import LEADER_KEY
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from verification.simulation.checks.leases import BrokenInvariantError
from verification.simulation.scenario import LOCK_SECONDS

_ROUNDING: Final = 1e-6


class LockWatch:
    """Checks each change of the lock's owner.

    The owner may change only when the lock is absent, or has not been renewed for its whole
    duration.
    """

    def __init__(self, table: InMemoryCoordinatorStateTable, now: Callable[[], float]) -> None:
        self._table = table.view()
        self._now = now
        self._seen: LeaderLock | None = None
        self._written_at = 0.0

    @property
    def owner_name(self) -> str | None:
        """The owner of the lock, or None."""
        return None if self._seen is None else self._seen.owner_name

    def look(self) -> None:
        """Check the lock after every write; raise `BrokenInvariantError` if it was stolen."""
        # most writes are not of the lock
        exists = LEADER_KEY in self._table.store._rows  # noqa: SLF001
        lock = self._table.read_lock() if exists else None
        before, self._seen = self._seen, lock
        if lock == before:
            return
        age = self._now() - self._written_at
        self._written_at = self._now()
        if (
            lock is not None
            and before is not None
            and lock.owner_name != before.owner_name
            and age + _ROUNDING < LOCK_SECONDS
        ):
            raise BrokenInvariantError(
                f"S9: {lock.owner_name} took the lock from {before.owner_name} {age:.3f} s "
                "after its last heartbeat"
            )


class WatchedLeader(LeaderCycle):
    """A leader whose plans are checked."""

    def run_once(self, deadline_seconds: float | None = None) -> CycleReport:
        """See `LeaderCycle.run_once`.

        Raises `BrokenInvariantError` for a move to a worker that does not exist or wants to leave.
        """
        report = super().run_once(deadline_seconds)
        if report.led and report.plan is not None:
            targets = {row.worker_id for row in report.workers if not row.drain_requested}
            for move in report.plan.moves:
                if move.to_worker not in targets:
                    raise BrokenInvariantError(
                        f"S12: the plan gives {move.lease_key} to {move.to_worker}, which is "
                        "not there or asked to drain"
                    )
        return report

"""Decide when the fleet is balanced: when a worker has joined, and at intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kcl_pipeline.planning.model import LeaseState, WorkerState
from kcl_pipeline.planning.state import Prepared

JOIN_SECONDS: Final = 15.0
"""How long a worker that has joined causes balancing in every cycle."""


class BalanceSchedule:
    """The times at which leases may move for balance.

    A worker joins when it accepts leases and has none, while another one has several. The fleet is
    then balanced in every cycle until a plan has no moves and no handoff runs, at most for
    `JOIN_SECONDS`.

    Args:
        interval_seconds: Time between two other times.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._due_at: float | None = None
        self._empty: frozenset[str] = frozenset()
        self._joining_until = -math.inf

    def restart(self) -> None:
        """Forget everything, at the start of a term without earlier observations."""
        self._due_at = None
        self._empty = frozenset()
        self._joining_until = -math.inf

    def balance_now(self) -> None:
        """Balance in the next plan, because an operator wants it."""
        self._due_at = -math.inf

    def applied(self, prepared: Prepared, now: float, settling_seconds: float) -> Prepared:
        """Return the input of a plan in which leases may move for balance if that is due.

        Args:
            prepared: The input without balance. A lease in a handoff has its new owner.
            now: Time in monotonic seconds.
            settling_seconds: Time after the start of a term without balance at intervals. A lease
                is not moved for balance to a worker that may have stopped.
        """
        given = prepared.given
        self._note_joins(now, given.workers, given.leases)
        if self._due_at is None:
            self._due_at = now + settling_seconds
        if now < self._due_at and now >= self._joining_until:
            return prepared
        limits = replace(given.limits, balance=True)
        return replace(prepared, given=replace(given, limits=limits))

    def note_balanced(self, now: float, *, is_calm: bool) -> None:
        """Note that a plan with balance was written.

        Args:
            now: Time in monotonic seconds.
            is_calm: Whether it has no moves and no handoff runs.
        """
        if is_calm:
            self._joining_until = -math.inf
        if self._due_at is not None and now >= self._due_at:
            self._due_at = now + self._interval_seconds

    def is_joining(self, now: float) -> bool:
        """Return whether a worker that has joined causes balancing in every cycle."""
        return now < self._joining_until

    def _note_joins(
        self, now: float, workers: Iterable[WorkerState], leases: Iterable[LeaseState]
    ) -> None:
        counts = Counter(lease.owner for lease in leases if not lease.ended)
        has_spare = max((n for owner, n in counts.items() if owner is not None), default=0) > 1
        empty = frozenset(
            worker.worker_id
            for worker in workers
            if has_spare and worker.accepts_leases and not counts[worker.worker_id]
        )
        if empty - self._empty:
            self._joining_until = now + JOIN_SECONDS
        self._empty = empty

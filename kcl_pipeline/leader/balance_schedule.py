"""Decide when the fleet is balanced: when a worker has joined, once more after that, and at
intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Self

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.planning.model import LeaseState, WorkerState
from kcl_pipeline.planning.state import Prepared

JOIN_SECONDS: Final = 15.0
"""How long a worker that has joined causes balancing in every cycle."""


class BalanceSchedule:
    """The times at which leases may move for balance.

    A worker joins when it accepts leases and has none, while another one has several. The fleet is
    then balanced in every cycle until a plan has no moves and no handoff runs, at most for
    `JOIN_SECONDS`.

    It is balanced once more when the throughputs have settled: `again_seconds` after the last join,
    or up to that time later while the throughput of a lease is too new. If they have settled, those
    leases that were moved without a throughput may move again at once.

    Args:
        interval_seconds: Time between two other times.
        again_seconds: See above.
    """

    def __init__(self, interval_seconds: float, again_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._again_seconds = again_seconds
        self.restart()

    @classmethod
    def of(cls, settings: ConsumerSettings, again_seconds: float) -> Self:
        """Return the times of an application: every so many assignment intervals."""
        intervals = settings.assignment.variance_balancing_frequency
        return cls(intervals * settings.lease_assignment_interval_millis / 1000, again_seconds)

    def restart(self) -> None:
        """Forget everything, at the start of a term without earlier observations."""
        self._due_at: float | None = None
        self._empty: frozenset[str] = frozenset()
        self._joining_until = -math.inf
        self._again_at = math.inf
        self._was_blind = False

    def applied(
        self, prepared: Prepared, now: float, settling_seconds: float, *, has_settled: bool
    ) -> Prepared:
        """Return the input of a plan in which leases may move for balance if that is due.

        Args:
            prepared: The input without balance. A lease in a handoff has its new owner.
            now: Time in monotonic seconds.
            settling_seconds: Time after the start of a term without balance at intervals. A lease
                is not moved for balance to a worker that may have stopped.
            has_settled: Whether no throughput is too new.
        """
        given = prepared.given
        self._note_joins(now, given.workers, given.leases)
        if self._due_at is None:
            self._due_at = now + settling_seconds
        is_joining = self.is_joining(now)
        self._was_blind |= is_joining and not has_settled
        is_again = now >= self._again_at + (0.0 if has_settled else self._again_seconds)
        if now < self._due_at and not is_joining and not is_again:
            return prepared
        limits = replace(given.limits, balance=True)
        if is_again:
            if self._was_blind and has_settled:
                limits = replace(limits, cool_down_seconds=0.0)
            self._again_at, self._was_blind = math.inf, False
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

    def must_look(self, now: float) -> bool:
        """Return whether the fleet is balanced once more as soon as the throughputs allow it."""
        return now >= self._again_at

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
            self._again_at = now + self._again_seconds
        self._empty = empty

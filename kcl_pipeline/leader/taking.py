"""Take leases without a leader, by conditional writes, as KCL 2.x does (protocol §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink, LeaseMoved, MoveRefused, PlanMade
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.kcl.take import (
    TAKE_AND_STEAL,
    SeenLease,
    Take,
    TakeLimits,
    leases_to_take,
)


@dataclass(frozen=True, slots=True)
class TakeResult:
    """The result of one run.

    Attributes:
        taken: Keys of the leases that now belong to this worker.
        must_repeat: Whether a write was refused or failed, so that a lease may be left over.
    """

    taken: tuple[str, ...]
    must_repeat: bool


@dataclass(slots=True)
class _Ages:
    """When the counter of each lease was last seen to change, in monotonic seconds."""

    counters: dict[str, tuple[int, float]] = field(default_factory=dict)

    def observe(self, leases: tuple[Lease, ...], now: float) -> None:
        """Compare a scan with the former one. A new lease without an owner is very old."""
        before, self.counters = self.counters, {}
        for lease in leases:
            known = before.get(lease.lease_key)
            if known is not None and known[0] == lease.counter:
                self.counters[lease.lease_key] = known
            else:
                at = -math.inf if known is None and lease.owner is None else now
                self.counters[lease.lease_key] = (lease.counter, at)

    def note(self, lease: Lease, now: float) -> None:
        """Note a write of this worker."""
        self.counters[lease.lease_key] = (lease.counter, now)


class LeaseTaker:
    """Takes leases for one worker. One thread calls it.

    Changes count from the end of a scan, and ages up to its start. So a worker that was paused
    during a scan takes nothing early.

    Args:
        worker_id: The worker.
        settings: All settings.
        table: The lease table.
        clock: The clock.
        events: Receives `PlanMade`, `LeaseMoved`, `MoveRefused` and errors of single leases.
        rng: Makes the random choices.
    """

    def __init__(
        self,
        worker_id: str,
        settings: ConsumerSettings,
        table: LeaseTable,
        clock: Clock,
        events: EventSink,
        rng: Random,
    ) -> None:
        self._worker_id = worker_id
        self._is_multi_stream = settings.is_multi_stream
        self._table = table
        self._clock = clock
        self._events = events
        self._rng = rng
        assignment = settings.assignment
        self._limits = TakeLimits(
            settings.lease.failover_time_millis / 1000,
            assignment.max_leases_for_worker,
            assignment.max_leases_to_steal_at_one_time,
            assignment.enable_priority_lease_assignment,
        )
        self._ages = _Ages()

    def forget(self) -> None:
        """Forget all observations, while somebody leads."""
        self._ages = _Ages()

    def run(self) -> TakeResult:
        """Scan the leases, decide, and take leases.

        Raises:
            AwsError: The leases cannot be listed.
        """
        began = self._clock.monotonic()
        listing = self._table.list_leases()
        found = listing.of_form(self._table.name, multi_stream=self._is_multi_stream).leases
        self._ages.observe(found, self._clock.monotonic())
        seen = [self._with_age(lease, began) for lease in found]
        takings = leases_to_take(self._worker_id, seen, self._limits, self._rng)
        if takings.takes or takings.spilled:
            millis = (self._clock.monotonic() - began) * 1000
            counts = (len(takings.takes), takings.available, takings.spilled)
            self._events(PlanMade(TAKE_AND_STEAL, *counts, millis))
        leases = {lease.lease_key: lease for lease in found}
        taken = [one.lease_key for one in takings.takes if self._take(one, leases[one.lease_key])]
        return TakeResult(tuple(taken), must_repeat=len(taken) < len(takings.takes))

    def _with_age(self, lease: Lease, now: float) -> SeenLease:
        return SeenLease(
            lease.lease_key,
            lease.owner,
            now - self._ages.counters[lease.lease_key][1],
            ended=lease.ended,
            in_handoff=lease.in_handoff,
        )

    def _take(self, take: Take, lease: Lease) -> bool:
        """Take one lease, if nobody has written it since. After an error the next run decides."""
        try:
            current: Lease | None = lease
            if take.from_worker is not None:
                # Its owner renews it all the time, so that its counter may have moved
                current = self._table.get(lease.lease_key)
                if current is None or current.owner != lease.owner or current.in_handoff:
                    current = None
            row = current and self._table.assign(current, self._worker_id, unrenewed=True)
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble(f"taking {lease.lease_key}", str(error)))
            return False
        if row is None:
            self._events(MoveRefused(lease.lease_key, self._worker_id))
            return False
        self._ages.note(row, self._clock.monotonic())
        self._events(
            LeaseMoved(
                lease.lease_key, lease.owner, self._worker_id, graceful=False, reason=take.reason
            )
        )
        return True

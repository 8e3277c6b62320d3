"""Write the moves of a plan: as handoffs from living owners, else at once (protocol §5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.events import EventSink, LeaseMoved, MoveRefused
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.lock import WRITES_AT_ONCE, LeaderElection
from kcl_pipeline.leader.phase import CycleContext, Map
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.model import Move
from kcl_pipeline.planning.state import Observation

How = Literal["assign", "hand off", "leave"]


def how_to_move(
    lease: Lease,
    to_worker: str,
    observation: Observation,
    *,
    graceful_enabled: bool,
    has_to_move: bool,
) -> How:
    """Return the write that a move needs.

    A running handoff is not changed until it is overdue, unless the plan cancels it because its
    destination has stopped. An expired lease is assigned even to its own owner, which starts a new
    failover time.

    Args:
        lease: The row.
        to_worker: Destination of the move.
        observation: Observations of this cycle.
        graceful_enabled: Whether handoffs are enabled.
        has_to_move: Whether the plan cancels a running handoff.
    """
    expired = lease.lease_key in observation.expired
    if lease.in_handoff and not (
        expired or has_to_move or lease.lease_key in observation.overdue_handoffs
    ):
        return "leave"
    if lease.owner == to_worker and not lease.in_handoff and not expired:
        return "leave"
    if (
        graceful_enabled
        and lease.owner is not None
        and not lease.in_handoff
        and not lease.ended
        and not expired
    ):
        return "hand off"
    return "assign"


class MoveWriter:
    """Writes moves, in parallel if `map_` is parallel."""

    def __init__(
        self,
        settings: LeaseSettings,
        table: LeaseTable,
        clock: Clock,
        events: EventSink,
        liveness: Liveness,
        leadership: LeaderElection,
        map_: Map = map,
    ) -> None:
        self._settings = settings
        self._table = table
        self._clock = clock
        self._events = events
        self._liveness = liveness
        self._leadership = leadership
        self._map = map_

    def write(self, context: CycleContext, moves: Sequence[Move], observation: Observation) -> None:
        """Write the moves in their order.

        The next cycle plans a refused move again. After an error of one move, the others are
        written.
        """
        wanted: list[tuple[Move, Lease, How]] = []
        for move in moves:
            lease = context.leases.get(move.lease_key)
            if lease is not None:
                how = how_to_move(
                    lease,
                    move.to_worker,
                    observation,
                    graceful_enabled=self._settings.is_graceful_lease_handoff_enabled,
                    has_to_move=move.from_worker is None,
                )
                if how != "leave":
                    wanted.append((move, lease, how))
        write = partial(self._write_one, observation.expired)
        for begin in range(0, len(wanted), WRITES_AT_ONCE):
            if context.deadline.passed():
                return
            self._leadership.check()
            group = wanted[begin : begin + WRITES_AT_ONCE]
            for item, found in zip(group, self._map(write, group), strict=True):
                self._note_written(context, *item, found)

    def _write_one(
        self, expired: frozenset[str], item: tuple[Move, Lease, How]
    ) -> Lease | Exception | None:
        """Write one move. Return the new row, an error, or None if the write was refused.

        An expired lease is assigned only if it has not been renewed since. If the lock may have
        expired, the move is not written.
        """
        move, lease, how = item
        try:
            if self._leadership.may_have_expired():
                return None
            if how == "hand off":
                return self._table.initiate_handoff(lease, move.to_worker)
            return self._table.assign(lease, move.to_worker, unrenewed=lease.lease_key in expired)
        except Exception as error:  # noqa: BLE001 (the cycle counts and reports it)
            return error

    def _note_written(
        self,
        context: CycleContext,
        move: Move,
        before: Lease,
        how: How,
        outcome: Lease | Exception | None,
    ) -> None:
        if isinstance(outcome, Exception):
            context.errors.append(outcome)
        elif outcome is None:
            self._events(MoveRefused(move.lease_key, move.to_worker))
        else:
            context.leases[move.lease_key] = outcome
            self._liveness.note_move(outcome, self._clock.monotonic())
            self._events(
                LeaseMoved(
                    move.lease_key,
                    before.actual_owner,
                    move.to_worker,
                    how == "hand off",
                    move.reason,
                )
            )

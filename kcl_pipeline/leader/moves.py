"""Writing a plan: graceful where the owner is at work, at once where it is not (protocol §5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.events import EventSink, LeaseMoved, MoveRefused
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.phase import WRITES_AT_ONCE, Fence, Map, Round
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.model import Move
from kcl_pipeline.planning.state import Observation

How = Literal["assign", "hand off", "leave"]


def how_to_move(lease: Lease, to_worker: str, seen: Observation, *, graceful_enabled: bool, has_to_move: bool) -> How:
    """The write that a move needs. Pure.

    A handoff that is running is left alone until it is overdue, unless the plan says that it has to be given up (its destination is gone).
    An expired lease is assigned, also to the worker that let it expire: that restarts its time.
    """
    expired = lease.lease_key in seen.expired
    if lease.in_handoff and not (expired or has_to_move or lease.lease_key in seen.overdue_handoffs):
        return "leave"
    if lease.owner == to_worker and not lease.in_handoff and not expired:
        return "leave"
    if graceful_enabled and lease.owner is not None and not lease.in_handoff and not lease.ended and not expired:
        return "hand off"
    return "assign"


@dataclass(frozen=True, slots=True)
class _Written:
    move: Move
    before: Lease
    graceful: bool
    lease: Lease | None
    error: Exception | None = None


class MoveWriter:
    """Writes moves, several at a time if `map_` does."""

    def __init__(self, settings: LeaseSettings, table: LeaseTable, clock: Clock, events: EventSink, liveness: Liveness, fence: Fence, map_: Map = map) -> None:
        self._settings = settings
        self._table = table
        self._clock = clock
        self._events = events
        self._liveness = liveness
        self._fence = fence
        self._map = map_

    def write(self, now: Round, moves: Sequence[Move], seen: Observation) -> None:
        """Write the moves in their order; a refused one is left to the next cycle, an error of one does not hold up the others."""
        wanted: list[tuple[Move, Lease, How]] = []
        for move in moves:
            lease = now.leases.get(move.lease_key)
            if lease is not None:
                has_to_move = move.from_worker is None
                how = how_to_move(lease, move.to_worker, seen, graceful_enabled=self._settings.is_graceful_lease_handoff_enabled, has_to_move=has_to_move)
                if how != "leave":
                    wanted.append((move, lease, how))
        for begin in range(0, len(wanted), WRITES_AT_ONCE):
            if now.deadline.passed():
                return
            self._fence.check()
            for written in self._map(self._write_one, wanted[begin : begin + WRITES_AT_ONCE]):
                self._take_in(now, written)

    def _write_one(self, item: tuple[Move, Lease, How]) -> _Written:
        move, lease, how = item
        try:
            if how == "hand off":
                return _Written(move, lease, graceful=True, lease=self._table.initiate_handoff(lease, move.to_worker))
            return _Written(move, lease, graceful=False, lease=self._table.assign(lease, move.to_worker))
        except Exception as error:  # noqa: BLE001 (the cycle counts and reports it)
            return _Written(move, lease, graceful=how == "hand off", lease=None, error=error)

    def _take_in(self, now: Round, written: _Written) -> None:
        move = written.move
        if written.error is not None:
            now.errors.append(written.error)
        elif written.lease is None:
            now.failed_moves += 1
            self._events(MoveRefused(move.lease_key, move.to_worker))
        else:
            now.leases[move.lease_key] = written.lease
            self._liveness.note_move(written.lease, self._clock.monotonic())
            self._events(LeaseMoved(move.lease_key, written.before.actual_owner, move.to_worker, written.graceful, move.reason))

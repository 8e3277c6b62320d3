"""Implement KCL's LEASE_COUNT_BASED strategy, without its off-by-one error (protocol §5.6)."""

from __future__ import annotations

from kcl_pipeline.planning.kcl.fleet import (
    Holder,
    holders,
    lease_weights,
    placement_reason,
    waiting_leases,
)
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, PlanLimits

NAME = "lease_count_based"


def lease_count_based(given: PlanInput) -> Plan:
    """Assign all workers about the same number of leases.

    Each lease without an owner goes to the worker with the fewest leases. Then leases move one at a
    time from the worker with the most to that with the fewest, until they differ by at most one.
    Only unfinished leases are balanced; `max_leases_for_worker` counts all.
    """
    weights = lease_weights(given.leases)
    fleet = holders(given, weights)
    moves: list[Move] = []
    spilled: list[str] = []
    for lease in waiting_leases(given, weights):
        targets = [holder for holder in fleet if holder.can_take(given.limits)]
        if not targets:
            spilled.append(lease.lease_key)
            continue
        target = min(targets, key=Holder.fewest_first)
        target.add(lease, weights[lease.lease_key])
        moves.append(Move(lease.lease_key, None, target.worker_id, placement_reason(lease)))
    if given.limits.balance:
        moves += _even_out(fleet, {move.lease_key for move in moves}, given.limits)
    return Plan(NAME, tuple(moves), tuple(spilled))


def _even_out(fleet: list[Holder], placed: set[str], limits: PlanLimits) -> list[Move]:
    moves: list[Move] = []
    moved = set(placed)
    while True:
        step = _next_step(fleet, moved, limits)
        if step is None:
            return moves
        lease, source, target = step
        reason = (
            f"{source.worker_id} has {source.live} leases, {target.worker_id} has {target.live}"
        )
        source.remove(lease, 0.0)
        target.add(lease, 0.0)
        moved.add(lease.lease_key)
        moves.append(Move(lease.lease_key, source.worker_id, target.worker_id, reason))


def _next_step(
    fleet: list[Holder], moved: set[str], limits: PlanLimits
) -> tuple[LeaseState, Holder, Holder] | None:
    """Return the next lease to move, its source and its target; None if there is none."""
    targets = sorted((h for h in fleet if h.can_take(limits)), key=Holder.fewest_first)
    for source in sorted(fleet, key=lambda h: (-h.live, -len(h.leases), h.worker_id)):
        movable = [
            item
            for key, item in source.leases.items()
            if item.movable and not item.ended and key not in moved
        ]
        for lease in sorted(movable, key=lambda item: (-item.seconds_since_move, item.lease_key)):
            for target in targets:
                if source.live - target.live < 2:  # noqa: PLR2004 (a difference of one is even)
                    break
                if target.fits(lease, limits):
                    return lease, source, target
    return None

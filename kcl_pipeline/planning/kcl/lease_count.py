"""Implement KCL's LEASE_COUNT_BASED strategy, without its off-by-one error (protocol §5.6)."""

from __future__ import annotations

from bisect import bisect_left, insort

from kcl_pipeline.planning.kcl.fleet import (
    Holder,
    holders,
    lease_weights,
    place,
    waiting_leases,
)
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, PlanLimits

NAME = "lease_count_based"

_Rank = tuple[int, int, str]
"""Sort key of a worker. It ends with the id, so two workers are never equal in it."""


def lease_count_based(given: PlanInput) -> Plan:
    """Assign all workers about the same number of leases.

    Each lease without an owner goes to the worker with the fewest leases. Then leases move one at a
    time from the worker with the most to that with the fewest, until they differ by at most one.
    Only unfinished leases are balanced; `max_leases_for_worker` counts all.
    """
    weights = lease_weights(given.leases)
    fleet = holders(given, weights)
    waiting = waiting_leases(given, weights)
    moves, spilled = place(
        waiting,
        fleet,
        given.limits,
        Holder.fewest_first,
        lambda lease, target: target.add(lease, weights[lease.lease_key]),
    )
    if given.limits.balance:
        moves += _even_out(fleet, {move.lease_key for move in moves}, given)
    return Plan(NAME, tuple(moves), tuple(spilled))


def _even_out(fleet: list[Holder], placed: set[str], given: PlanInput) -> list[Move]:
    """Move leases one at a time. A lease that was placed or moved in this plan stays.

    What a step needs is kept in order, because a fleet that begins on one worker needs as many
    steps as there are leases.
    """
    limits = given.limits
    moves: list[Move] = []
    movable = {holder.worker_id: _movable(holder, placed) for holder in fleet}
    sources = sorted((_most_first(holder), holder) for holder in fleet)
    targets = sorted((h.fewest_first(), h) for h in fleet if h.can_take(limits))
    while not given.stop() and (step := _next_step(sources, targets, movable, limits)) is not None:
        lease, source, target = step
        reason = (
            f"{source.worker_id} has {source.live} leases, {target.worker_id} has {target.live}"
        )
        movable[source.worker_id].remove(lease)
        for holder, change in ((source, source.remove), (target, target.add)):
            _drop(sources, (_most_first(holder), holder))
            _drop(targets, (holder.fewest_first(), holder))
            change(lease, 0.0)
            insort(sources, (_most_first(holder), holder))
            if holder.can_take(limits):
                insort(targets, (holder.fewest_first(), holder))
        moves.append(Move(lease.lease_key, source.worker_id, target.worker_id, reason))
    return moves


def _movable(holder: Holder, placed: set[str]) -> list[LeaseState]:
    """Return the leases that may move, the one that has not moved for longest first."""
    leases = (
        lease
        for key, lease in holder.leases.items()
        if lease.movable and not lease.ended and key not in placed
    )
    return sorted(leases, key=lambda lease: (-lease.seconds_since_move, lease.lease_key))


def _most_first(holder: Holder) -> _Rank:
    return (-holder.live, -len(holder.leases), holder.worker_id)


def _drop(ranked: list[tuple[_Rank, Holder]], entry: tuple[_Rank, Holder]) -> None:
    place = bisect_left(ranked, entry)
    if place < len(ranked) and ranked[place] == entry:
        del ranked[place]


def _next_step(
    sources: list[tuple[_Rank, Holder]],
    targets: list[tuple[_Rank, Holder]],
    movable: dict[str, list[LeaseState]],
    limits: PlanLimits,
) -> tuple[LeaseState, Holder, Holder] | None:
    """Return the next lease to move, its source and its target; None if there is none."""
    for _, source in sources:
        for lease in movable[source.worker_id]:
            for _, target in targets:
                if source.live - target.live < 2:  # noqa: PLR2004 (a difference of one is even)
                    break
                if target.fits(lease, limits):
                    return lease, source, target
    return None

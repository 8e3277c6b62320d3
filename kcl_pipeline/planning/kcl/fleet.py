"""Count leases, weights and throughput of workers while the KCL strategies plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any

from kcl_pipeline.planning.model import LeaseState, Move, PlanInput, PlanLimits, WorkerState


def lease_weights(leases: tuple[LeaseState, ...]) -> Mapping[str, float]:
    """Return the weight of each lease, by key, in KiB/s.

    A finished lease has weight 0, a lease without a sample the mean. If no throughput is known,
    every lease has weight 1. So a plan never divides zero by zero (protocol §5.5, NaN).
    """
    live = [lease for lease in leases if not lease.ended]
    known = [lease.throughput_kbps for lease in live if lease.throughput_kbps is not None]
    total = sum(known)
    weights = {lease.lease_key: 0.0 for lease in leases if lease.ended}
    if total <= 0:
        return weights | {lease.lease_key: 1.0 for lease in live}
    mean = total / len(known)
    return weights | {
        lease.lease_key: mean if lease.throughput_kbps is None else lease.throughput_kbps
        for lease in live
    }


@dataclass(slots=True)
class Holder:
    """A worker that accepts leases, with its leases in the plan so far.

    `throughput_kbps` is the sum of samples, `weight` the sum of all weights.
    """

    worker: WorkerState
    leases: dict[str, LeaseState] = field(default_factory=dict)
    live: int = 0
    weight: float = 0.0
    throughput_kbps: float = 0.0

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self.worker.worker_id

    def add(self, lease: LeaseState, weight: float) -> None:
        """Count a lease as held."""
        self.leases[lease.lease_key] = lease
        self.live += not lease.ended
        self.weight += weight
        self.throughput_kbps += throughput_of(lease)

    def remove(self, lease: LeaseState, weight: float) -> None:
        """Count a lease as given away."""
        del self.leases[lease.lease_key]
        self.live -= not lease.ended
        self.weight -= weight
        self.throughput_kbps -= throughput_of(lease)

    def can_take(self, limits: PlanLimits) -> bool:
        """Return whether the worker is within its limits.

        As in KCL, the last lease may exceed `max_throughput_per_host_kbps`.
        """
        return (
            len(self.leases) < limits.max_leases_for_worker
            and self.throughput_kbps <= limits.max_throughput_per_host_kbps
        )

    def fits(self, lease: LeaseState, limits: PlanLimits) -> bool:
        """Return whether the worker stays within its limits with this lease, for balance moves."""
        within = self.throughput_kbps + throughput_of(lease) <= limits.max_throughput_per_host_kbps
        return within and len(self.leases) < limits.max_leases_for_worker

    def fewest_first(self) -> tuple[int, int, str]:
        """Return the sort key for ties: unfinished leases, all leases, id."""
        return (self.live, len(self.leases), self.worker_id)


def throughput_of(lease: LeaseState) -> float:
    """Return the throughput in KiB/s; 0 without a sample and for a finished lease."""
    return 0.0 if lease.ended or lease.throughput_kbps is None else lease.throughput_kbps


def holders(given: PlanInput, weights: Mapping[str, float]) -> list[Holder]:
    """Return the workers that accept leases, sorted by id, with their leases.

    As in KCL, other workers keep their leases and are ignored.
    """
    found = {
        w.worker_id: Holder(w)
        for w in sorted(given.workers, key=lambda w: w.worker_id)
        if w.accepts_leases
    }
    for lease in sorted(given.leases, key=lambda item: item.lease_key):
        if lease.owner in found:
            found[lease.owner].add(lease, weights[lease.lease_key])
    return list(found.values())


def waiting_leases(given: PlanInput, weights: Mapping[str, float]) -> list[LeaseState]:
    """Return leases without a living owner, by decreasing wait and weight."""
    waiting = [lease for lease in given.leases if lease.owner is None and lease.movable]
    return sorted(
        waiting, key=lambda item: (-item.waited_seconds, -weights[item.lease_key], item.lease_key)
    )


def place(
    waiting: list[LeaseState],
    fleet: list[Holder],
    limits: PlanLimits,
    rank: Callable[[Holder], tuple[Any, ...]],
    give: Callable[[LeaseState, Holder], None],
) -> tuple[list[Move], list[str]]:
    """Give each lease in turn to the worker with the lowest rank that is within its limits.

    Args:
        waiting: Leases without a living owner.
        fleet: The workers.
        limits: The limits of a worker.
        rank: The sort key of a worker, which ends with its id. It changes only by `give`.
        give: Counts a lease as held by a worker.

    Returns:
        The moves, and the keys of the leases that nobody can take.
    """
    ready = [(rank(holder), holder) for holder in fleet if holder.can_take(limits)]
    heapify(ready)
    moves: list[Move] = []
    for lease in waiting:
        if not ready:
            break
        target = ready[0][1]
        give(lease, target)
        moves.append(Move(lease.lease_key, None, target.worker_id, lease.unowned_because))
        # A worker at its limit stays there, because leases are only added here.
        if target.can_take(limits):
            heapreplace(ready, (rank(target), target))
        else:
            heappop(ready)
    return moves, [lease.lease_key for lease in waiting[len(moves) :]]

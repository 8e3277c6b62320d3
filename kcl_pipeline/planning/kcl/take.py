"""Decide which leases a worker takes without a leader, as KCL 2.x does.

Every worker decides alone, from one scan of the lease table. The decision is pure: a random choice
comes from the generator that is passed in. As in KCL, leases of finished shards count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

TAKE_AND_STEAL: Final = "take_and_steal"
"""Name of the algorithm in plans and events."""

VERY_OLD_FAILOVERS: Final = 3.0
"""A lease that nobody has renewed for this many failover times is taken beyond the target."""


@dataclass(frozen=True, slots=True)
class SeenLease:
    """One lease as a worker has seen it.

    Attributes:
        lease_key: The lease.
        owner: Its owner (`leaseOwner`). None: it has none.
        age_seconds: Time since its counter was last seen to change. inf: a new lease that never had
            an owner.
        ended: Whether it is at SHARD_END. Such a lease is stolen last.
        in_handoff: Whether it is in a handoff between living workers. Then it is not stolen.
    """

    lease_key: str
    owner: str | None
    age_seconds: float
    ended: bool = False
    in_handoff: bool = False


@dataclass(frozen=True, slots=True)
class TakeLimits:
    """The settings of the decision.

    Attributes:
        failover_seconds: A lease that was not renewed for this time has expired.
        max_leases_for_worker: Most leases of a worker.
        max_leases_to_steal_at_one_time: Most leases that one decision steals.
        enable_priority_lease_assignment: Whether very old leases are taken beyond the target.
    """

    failover_seconds: float
    max_leases_for_worker: int = 2**31 - 1
    max_leases_to_steal_at_one_time: int = 1
    enable_priority_lease_assignment: bool = True


@dataclass(frozen=True, slots=True)
class Take:
    """One lease to take. `from_worker` is the living owner that loses it; None: it has none."""

    lease_key: str
    from_worker: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Takings:
    """The decision of one worker.

    Attributes:
        takes: The leases to take, in this order.
        target: Number of leases that every worker should have.
        spilled: Number of leases above `max_leases_for_worker` in the target, per worker.
        available: Number of leases without a living owner.
    """

    takes: tuple[Take, ...] = ()
    target: int = 0
    spilled: int = 0
    available: int = 0


def leases_to_take(
    worker_id: str, leases: Iterable[SeenLease], limits: TakeLimits, rng: Random
) -> Takings:
    """Return the leases that this worker takes now.

    The target is the number of leases divided by the number of workers, rounded up. Workers are the
    owners of unexpired leases, and this worker.

    1. If there are very old leases, take those, up to `max_leases_for_worker`.
    2. Else, take leases without a living owner, up to the target.
    3. If there are none, steal from the worker with the most leases: what it has above the target,
       or one lease if it has just the target and this worker needs at least two.

    The order of the leases does not matter.

    Args:
        worker_id: The worker that decides.
        leases: All leases.
        limits: The settings.
        rng: Makes the random choices.
    """
    ordered = sorted(leases, key=lambda lease: lease.lease_key)
    available = [lease for lease in ordered if _is_available(lease, limits)]
    if not ordered:
        return Takings()
    counts = _counts(worker_id, ordered, limits)
    wanted = -(-len(ordered) // len(counts))
    target = min(wanted, limits.max_leases_for_worker)
    spilled = wanted - target
    mine = counts[worker_id]
    takes: list[Take] = []
    very_old = _very_old(ordered, limits)
    if very_old:
        room = max(limits.max_leases_for_worker - mine, 0)
        takes = [_take(lease) for lease in _shuffled(very_old, rng)[:room]]
    elif available:
        needed = max(target - mine, 0)
        takes = [_take(lease) for lease in _shuffled(available, rng)[:needed]]
    else:
        takes = _steals(ordered, counts, target, target - mine, limits, rng)
    return Takings(tuple(takes), target, spilled, len(available))


def _is_available(lease: SeenLease, limits: TakeLimits) -> bool:
    return lease.owner is None or lease.age_seconds > limits.failover_seconds


def _very_old(leases: list[SeenLease], limits: TakeLimits) -> list[SeenLease]:
    if not limits.enable_priority_lease_assignment:
        return []
    limit = VERY_OLD_FAILOVERS * limits.failover_seconds
    return [lease for lease in leases if lease.age_seconds > limit]


def _counts(worker_id: str, leases: list[SeenLease], limits: TakeLimits) -> Counter[str]:
    counts = Counter({worker_id: 0})
    counts.update(
        lease.owner
        for lease in leases
        if lease.owner is not None and not _is_available(lease, limits)
    )
    return counts


def _steals(
    leases: list[SeenLease],
    counts: Mapping[str, int],
    target: int,
    needed: int,
    limits: TakeLimits,
    rng: Random,
) -> list[Take]:
    most = max(counts.values())
    if needed <= 0 or most < target:
        return []
    number = min(needed, most - target)
    if needed > 1 and number == 0:
        number = 1
    number = min(number, limits.max_leases_to_steal_at_one_time)
    victim = rng.choice(sorted(owner for owner, count in counts.items() if count == most))
    candidates = [one for one in leases if one.owner == victim and not one.in_handoff]
    chosen = sorted(_shuffled(candidates, rng), key=lambda lease: lease.ended)[:number]
    return [
        Take(lease.lease_key, victim, f"{victim} has {most} leases, the target is {target}")
        for lease in chosen
    ]


def _take(lease: SeenLease) -> Take:
    if lease.owner is None:
        return Take(lease.lease_key, None, "it has no owner")
    return Take(
        lease.lease_key, None, f"{lease.owner} has not renewed it for {lease.age_seconds:.1f} s"
    )


def _shuffled(leases: list[SeenLease], rng: Random) -> list[SeenLease]:
    return rng.sample(leases, len(leases))

"""Turn the input of a plan into numbers: loads, capacities and what may move.

Loads are in *fair shares*: per resource they are scaled so that the load that can be spread equals
the capacity that takes it, and the mean capacity is one. A worker's utilization is the largest,
over resources, of load ÷ capacity; 1.0 is perfectly even.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kcl_pipeline.planning.balanced.loads import THROUGHPUT, Loads, lease_loads
from kcl_pipeline.planning.model import LeaseState, PlanInput, PlanLimits, WorkerState

EPSILON = 1e-9
OVERSIZED_SLACK = 0.02
"""What a worker may have on top of a lease that is too heavy for every worker, as a part of it."""
_UNBOUNDED = 1e12
"""Capacity for a resource that has hard limits, but is not balanced."""


@dataclass(slots=True)
class Problem:
    """A planning problem. Leases, workers, groups and resources are indices (i, w, g, r).

    Attributes:
        leases: Leases of workers that accept leases, and leases without an owner, by key.
        workers: Workers that accept leases, by id.
        limits: The limits.
        stop: Returns whether the time for the plan is over.
        mode: "load", "count" (leases are counted) or "idle" (they are counted, because the traffic
            is negligible).
        home: Owner of each lease; -1: none.
        free: Whether each lease may be assigned or moved.
        loads: `loads[r][i]` in fair shares.
        capacities: `capacities[r][w]` in fair shares.
        base: `base[r][w]`, load that no lease explains.
        most: `most[r]`, hard limit of the load of a worker.
        group_most: `group_most[r][g]`, hard limit of the load of a group.
        groups: Names of the groups.
        group_of: Group of each worker.
        group_capacities: `group_capacities[r][g]` in fair shares.
        other_group_leases: Per group, leases of workers that accept no leases.
        oversized: Leases that alone exceed the target of every worker, heaviest first. None are, if
            there are as many as workers.
        reach: A utilization below which no plan comes; at least the target.
    """

    leases: list[LeaseState]
    workers: list[WorkerState]
    limits: PlanLimits
    stop: Callable[[], bool]
    mode: str
    home: list[int]
    free: list[bool]
    loads: list[list[float]]
    capacities: list[list[float]]
    base: list[list[float]]
    most: list[float]
    group_most: list[list[float]]
    groups: list[str]
    group_of: list[int]
    group_capacities: list[list[float]]
    other_group_leases: list[int]
    oversized: list[int]
    reach: float = 1.0

    @property
    def target(self) -> float:
        """The utilization at which balancing stops, if the sizes of leases allow it."""
        limits = self.limits
        return (
            1.0
            + min(limits.balance_target_percentage, limits.re_balance_threshold_percentage) / 100.0
        )

    @property
    def hysteresis(self) -> float:
        """The utilization above the reachable one at which balancing starts."""
        return 1.0 + self.limits.re_balance_threshold_percentage / 100.0 - self.target

    @property
    def group_targets(self) -> list[float]:
        """The target utilization per group.

        Groups average over their workers, so the band is narrower by the root of their size.
        """
        sizes = Counter(self.group_of)
        return [1.0 + (self.target - 1.0) / math.sqrt(sizes[g]) for g in range(len(self.groups))]

    @property
    def balances_groups(self) -> bool:
        """Whether groups are balanced. Groups of one worker each need no balance of their own.

        Neither are they beside an oversized lease: the other workers of its group would be emptied.
        """
        return 1 < len(self.groups) < len(self.workers) and not self.oversized

    def fixed(self, resource: int) -> list[float]:
        """Return the load of each worker that cannot move."""
        fixed = list(self.base[resource])
        for i, w in enumerate(self.home):
            if w >= 0 and not self.free[i]:
                fixed[w] += self.loads[resource][i]
        return fixed

    def loads_of(self, owner: Sequence[int]) -> list[list[float]]:
        """Return the load of each worker in an assignment: `loads[r][w]` in fair shares."""
        load = [list(base) for base in self.base]
        for row, loads in zip(load, self.loads, strict=True):
            for w, lease_load in zip(owner, loads, strict=True):
                if w >= 0:
                    row[w] += lease_load
        return load

    def utilizations(self, load: list[list[float]]) -> list[float]:
        """Return load over capacity of each worker in its most loaded resource; 1.0 is fair."""
        return [
            max(
                row[w] / capacities[w]
                for row, capacities in zip(load, self.capacities, strict=True)
            )
            for w in range(len(self.workers))
        ]

    def group_utilizations(self, load: list[list[float]]) -> list[float]:
        """Return the same of each group."""
        worst = [0.0] * len(self.groups)
        for row, capacities in zip(load, self.group_capacities, strict=True):
            total = [0.0] * len(self.groups)
            for g, worker_load in zip(self.group_of, row, strict=True):
                total[g] += worker_load
            worst = [max(w, t / c) for w, t, c in zip(worst, total, capacities, strict=True)]
        return worst


def build(plan_input: PlanInput, *, measured: bool = True) -> Problem | None:
    """Return the problem of this input; None if no worker accepts leases.

    `measured`: whether loads are throughput and CPU. Otherwise every unfinished lease weighs 1.
    """
    limits = plan_input.limits
    everyone = sorted(plan_input.workers, key=lambda worker: worker.worker_id)
    workers = [worker for worker in everyone if worker.accepts_leases and worker.capacity > 0]
    if not workers:
        return None
    index = {worker.worker_id: w for w, worker in enumerate(workers)}
    ordered = sorted(plan_input.leases, key=lambda lease: lease.lease_key)
    cool_down_seconds = 0.0 if _has_joined(workers, ordered) else limits.cool_down_seconds
    loads = lease_loads(ordered, everyone, limits, len(workers), measured=measured)
    taken = [
        i
        for i, lease in enumerate(ordered)
        if (lease.owner in index) or (lease.owner is None and lease.movable)
    ]
    leases = [ordered[i] for i in taken]
    names = [worker.group for worker in workers]
    if len(set(names)) == len(names) and _has_no_group_limits(limits):
        names = [""] * len(names)
    groups = sorted(set(names))
    group_index = {name: g for g, name in enumerate(groups)}
    problem = Problem(
        leases=leases,
        workers=workers,
        limits=limits,
        stop=plan_input.stop,
        mode=loads.mode,
        home=[index[lease.owner] if lease.owner is not None else -1 for lease in leases],
        free=[
            lease.movable
            and (
                lease.owner is None
                or (
                    limits.balance
                    and not lease.ended
                    and lease.seconds_since_move >= cool_down_seconds
                )
            )
            for lease in leases
        ],
        loads=[],
        capacities=[],
        base=[],
        most=[],
        group_most=[],
        groups=groups,
        group_of=[group_index[name] for name in names],
        group_capacities=[],
        other_group_leases=[0] * len(groups),
        oversized=[],
    )
    others = [worker for worker in everyone if worker.worker_id not in index]
    other_kbps = _count_the_others(problem, ordered, loads, others, group_index)
    _scale(problem, loads, taken, other_kbps)
    problem.oversized = _oversized(problem)
    problem.reach = _reach(problem)
    return problem


def _has_no_group_limits(limits: PlanLimits) -> bool:
    return limits == replace(
        limits,
        max_leases_for_group=PlanLimits().max_leases_for_group,
        max_throughput_per_group_kbps=math.inf,
    )


def _has_joined(workers: list[WorkerState], leases: list[LeaseState]) -> bool:
    """Return whether a worker has no lease while another one has several.

    The cool-down does not keep leases from such a worker. It only prevents that leases go to and
    fro, and a worker that has just joined has given none away.
    """
    counts = Counter(lease.owner for lease in leases if lease.owner is not None and not lease.ended)
    return max(counts.values(), default=0) > 1 and any(
        not counts[worker.worker_id] for worker in workers
    )


def _count_the_others(
    problem: Problem,
    ordered: list[LeaseState],
    loads: Loads,
    others: list[WorkerState],
    group_index: dict[str, int],
) -> list[float]:
    """Count the leases of workers that accept none against their group; return its KB/s."""
    group_of = {worker.worker_id: group_index.get(worker.group) for worker in others}
    other_kbps = [0.0] * len(problem.groups)
    for i, lease in enumerate(ordered):
        g = None if lease.owner is None else group_of.get(lease.owner)
        if g is not None:
            problem.other_group_leases[g] += 1
            other_kbps[g] += loads.kbps[i]
    return other_kbps


def _scale(problem: Problem, measured: Loads, taken: list[int], other_kbps: list[float]) -> None:
    limits, target, workers = problem.limits, problem.target, problem.workers
    for r, resource in enumerate(measured.resources):
        loads = [measured.loads[r][i] for i in taken]
        capacities = [measured.capacity(r, worker) for worker in workers]
        base = [measured.base[r].get(worker.worker_id, 0.0) for worker in workers]
        total, capacity_sum = math.fsum(loads) + math.fsum(base), math.fsum(capacities)
        mean_capacity = capacity_sum / len(capacities)
        unit = total / capacity_sum * mean_capacity if total > 0 else 1.0
        # An absolute dead-band wider than the relative one is more capacity: all limits stay
        # `target * capacity`.
        widened = max((1.0 + measured.dead_bands[r] / unit) / target, 1.0) if total > 0 else 1.0
        if not measured.is_balanced(r):
            widened = _UNBOUNDED
        problem.loads.append([load / unit for load in loads])
        problem.base.append([load / unit for load in base])
        problem.capacities.append([capacity / mean_capacity * widened for capacity in capacities])
        is_capped = resource == THROUGHPUT
        problem.most.append(limits.max_throughput_per_host_kbps / unit if is_capped else math.inf)
        problem.group_most.append(
            [
                (limits.max_throughput_per_group_kbps - kbps) / unit if is_capped else math.inf
                for kbps in other_kbps
            ]
        )
    for capacities in problem.capacities:
        by_group = [0.0] * len(problem.groups)
        for w, capacity in enumerate(capacities):
            by_group[problem.group_of[w]] += capacity
        problem.group_capacities.append(by_group)


def _oversized(problem: Problem) -> list[int]:
    """Return the leases that alone exceed the target, or the hard limit, of every worker."""
    most = [
        min(problem.target * max(capacities), hard)
        for capacities, hard in zip(problem.capacities, problem.most, strict=True)
    ]
    heavy = {
        i
        for loads, largest in zip(problem.loads, most, strict=True)
        for i, load in enumerate(loads)
        if load > largest + EPSILON
    }
    if len(heavy) >= len(problem.workers):
        return []
    return sorted(heavy, key=lambda i: (-max(loads[i] for loads in problem.loads), i))


def _reach(problem: Problem) -> float:
    """Return a utilization below which no plan comes; at least the target.

    Of the k n + 1 heaviest leases, one of n workers has k + 1.
    """
    least, workers = problem.target, len(problem.workers) - len(problem.oversized)
    excluded = set(problem.oversized)
    for loads, capacities in zip(problem.loads, problem.capacities, strict=True):
        ordered = sorted((load for i, load in enumerate(loads) if i not in excluded), reverse=True)
        for k, load in enumerate(ordered[::workers], start=1):
            least = max(least, k * load / max(capacities) * (1 + 100 * EPSILON))
    return least

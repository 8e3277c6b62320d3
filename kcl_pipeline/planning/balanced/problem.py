"""Turn the input of a plan into numbers: loads, capacities and what may move.

Loads are in *fair shares*: per resource they are scaled so that the load that can be spread equals
the capacity that takes it, and the mean capacity is one. A worker's utilization is the largest,
over resources, of load ÷ capacity; 1.0 is perfectly even.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kcl_pipeline.planning.balanced.loads import Loads, lease_loads
from kcl_pipeline.planning.model import LeaseState, PlanInput, PlanLimits, WorkerState

EPSILON = 1e-9


@dataclass(slots=True)
class Problem:
    """A planning problem. Leases, workers, groups and resources are indices (i, w, g, r).

    Attributes:
        leases: Leases of workers that accept leases, and leases without an owner, by key.
        workers: Workers that accept leases, by id.
        limits: The limits.
        mode: "load", "count" (no lease has a sample) or "idle" (the traffic is negligible:
            leases are counted).
        home: Owner of each lease; -1: none.
        free: Whether each lease may be assigned or moved.
        loads: `loads[r][i]` in fair shares.
        capacities: `capacities[r][w]` in fair shares.
        base: `base[r][w]`, load that no lease explains.
        kbps: Throughput of each lease, for the caps.
        groups: Names of the groups.
        group_of: Group of each worker.
        group_capacities: `group_capacities[r][g]` in fair shares.
        other_group_leases: Per group, leases of workers that accept no leases.
        other_group_kbps: Per group, throughput of these leases.
        stop: Returns whether the time for the plan is over.
    """

    leases: list[LeaseState]
    workers: list[WorkerState]
    limits: PlanLimits
    mode: str
    home: list[int]
    free: list[bool]
    loads: list[list[float]]
    capacities: list[list[float]]
    base: list[list[float]]
    kbps: list[float]
    groups: list[str]
    group_of: list[int]
    group_capacities: list[list[float]]
    other_group_leases: list[int]
    other_group_kbps: list[float]
    stop: Callable[[], bool]

    @property
    def target(self) -> float:
        """The utilization at which balancing stops, if the sizes of leases allow it."""
        return (
            1.0
            + min(
                self.limits.balance_target_percentage, self.limits.re_balance_threshold_percentage
            )
            / 100.0
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
        sizes = [0] * len(self.groups)
        for g in self.group_of:
            sizes[g] += 1
        return [1.0 + (self.target - 1.0) / math.sqrt(size) for size in sizes]

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
            for w, one in zip(owner, loads, strict=True):
                if w >= 0:
                    row[w] += one
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


def build(plan_input: PlanInput) -> Problem | None:
    """Return the problem of this input; None if no worker accepts leases."""
    limits = plan_input.limits
    everyone = {
        worker.worker_id: worker
        for worker in sorted(plan_input.workers, key=lambda worker: worker.worker_id)
    }
    workers = [
        worker for worker in everyone.values() if worker.accepts_leases and worker.capacity > 0
    ]
    if not workers:
        return None
    index = {worker.worker_id: w for w, worker in enumerate(workers)}
    ordered = sorted(plan_input.leases, key=lambda lease: lease.lease_key)
    cool_down_seconds = 0.0 if _has_joined(workers, ordered) else limits.cool_down_seconds
    measured = lease_loads(ordered, list(everyone.values()), limits, len(workers))
    taken = [
        i
        for i, lease in enumerate(ordered)
        if (lease.owner in index) or (lease.owner is None and lease.movable)
    ]
    leases = [ordered[i] for i in taken]
    groups = sorted({worker.group for worker in workers})
    group_index = {name: g for g, name in enumerate(groups)}
    problem = Problem(
        leases=leases,
        workers=workers,
        limits=limits,
        mode=measured.mode,
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
        kbps=[measured.kbps[i] for i in taken],
        groups=groups,
        group_of=[group_index[worker.group] for worker in workers],
        group_capacities=[],
        other_group_leases=[0] * len(groups),
        other_group_kbps=[0.0] * len(groups),
        stop=plan_input.stop,
    )
    _count_the_others(problem, ordered, measured, everyone, group_index)
    _scale(problem, measured, taken)
    return problem


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
    measured: Loads,
    everyone: dict[str, WorkerState],
    group_index: dict[str, int],
) -> None:
    """Count the leases of workers that accept no leases against the limits of their group."""
    accepting = {worker.worker_id for worker in problem.workers}
    for i, lease in enumerate(ordered):
        if lease.owner is None or lease.owner in accepting or lease.owner not in everyone:
            continue
        group = group_index.get(everyone[lease.owner].group)
        if group is not None:
            problem.other_group_leases[group] += 1
            problem.other_group_kbps[group] += measured.kbps[i]


def _scale(problem: Problem, measured: Loads, taken: list[int]) -> None:
    target = problem.target
    for r in range(len(measured.resources)):
        loads = [measured.loads[r][i] for i in taken]
        capacities = [measured.capacity(r, worker) for worker in problem.workers]
        base = [measured.base[r].get(worker.worker_id, 0.0) for worker in problem.workers]
        total, capacity_sum = math.fsum(loads) + math.fsum(base), math.fsum(capacities)
        mean_capacity = capacity_sum / len(capacities)
        unit = total / capacity_sum * mean_capacity if total > 0 else 1.0
        # An absolute dead-band wider than the relative one is more capacity: all limits stay
        # `target * capacity`.
        widened = max((1.0 + measured.dead_bands[r] / unit) / target, 1.0) if total > 0 else 1.0
        problem.loads.append([load / unit for load in loads])
        problem.base.append([load / unit for load in base])
        problem.capacities.append([capacity / mean_capacity * widened for capacity in capacities])
    for capacities in problem.capacities:
        by_group = [0.0] * len(problem.groups)
        for w, capacity in enumerate(capacities):
            by_group[problem.group_of[w]] += capacity
        problem.group_capacities.append(by_group)

"""Measure the quality of a plan: evenness, number of moves, and a lower bound of moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kcl_pipeline.planning.balanced.problem import EPSILON, OVERSIZED_SLACK, build
from kcl_pipeline.planning.explain import max_over_mean, owners_after
from kcl_pipeline.planning.model import Plan, PlanInput
from verification.planning.bound import moves_lower_bound


@dataclass(frozen=True, slots=True)
class PlanQuality:
    """The quality of a plan.

    Attributes:
        max_over_mean: Largest throughput per capacity of a worker after the plan, over that of the
            fleet. 1.0 without load.
        largest_over_mean: Load of the heaviest lease over the mean load of a worker.
        moves: Number of moves.
        lower_bound: No plan that makes the fleet as even as this one, or even within the dead-band,
            has fewer moves.
    """

    max_over_mean: float
    largest_over_mean: float
    moves: int
    lower_bound: int

    @property
    def moves_over_lower_bound(self) -> float:
        """Ratio of moves to the lower bound. 1.0 if both are 0."""
        return 1.0 if self.moves == self.lower_bound else self.moves / max(self.lower_bound, 1)


def quality_of(plan_input: PlanInput, plan: Plan) -> PlanQuality:
    """Return the quality of a plan of any strategy."""
    owners = owners_after(plan_input, plan)
    loads = [lease.throughput_kbps or 0.0 for lease in plan_input.leases if not lease.ended]
    capacity = math.fsum(worker.capacity for worker in plan_input.workers)
    mean = math.fsum(loads) / capacity if capacity > 0 else 0.0
    return PlanQuality(
        max_over_mean(plan_input, owners),
        max(loads) / mean if mean > 0 else 0.0,
        len(plan.moves),
        lower_bound(plan_input, plan),
    )


def lower_bound(plan_input: PlanInput, plan: Plan) -> int:
    """Return the lower bound of moves for the evenness that the plan reaches.

    The evenness is at least the dead-band. 0 if no worker accepts leases.
    """
    problem = build(plan_input)
    if problem is None:
        return 0
    index = {worker.worker_id: w for w, worker in enumerate(problem.workers)}
    owners = owners_after(plan_input, plan)
    owner = [index.get(owners[lease.lease_key] or "", -1) for lease in problem.leases]
    oversized = set(problem.oversized)
    used = problem.utilizations(problem.loads_of(owner))
    alone = {owner[i]: 0.0 for i in oversized if owner[i] >= 0}
    for i in oversized:
        if owner[i] >= 0:
            share = max(
                loads[i] / capacities[owner[i]]
                for loads, capacities in zip(problem.loads, problem.capacities, strict=True)
            )
            alone[owner[i]] = max(alone[owner[i]], share)
    reached = max([problem.target, *(u for w, u in enumerate(used) if w not in alone)])
    if any(
        used[w] > max(reached, (1 + OVERSIZED_SLACK) * share) * (1 + EPSILON)
        for w, share in alone.items()
    ) or len(alone) < len(oversized):
        # A worker with an oversized lease has more than slack above it. The plan's evenness is then
        # the peak over all workers.
        oversized, reached = set(), max([problem.target, *used])
    group_rest = None
    if 1 < len(problem.groups) < len(problem.workers):
        group_rest = problem.group_utilizations(problem.loads_of(owner))
        group_rest = [
            max(used, target)
            for used, target in zip(group_rest, problem.group_targets, strict=True)
        ]
    bound = moves_lower_bound(problem, reached, sorted(oversized), group_rest)
    return bound - sum(1 for i, w in enumerate(owner) if w < 0 and problem.free[i])

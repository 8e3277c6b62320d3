"""Compute the objective of an assignment as a tuple; smaller is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kcl_pipeline.planning.balanced.problem import EPSILON, Problem


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """The objective. Utilizations are in targets: 1.0 means within the dead-band.

    Attributes:
        unplaced: Leases without an owner.
        violations: Workers and groups above a cap.
        peak: Largest utilization of a worker.
        peak_without_oversized: The same, without workers with a lease that is too heavy for all.
        group_peak: Largest utilization of a group.
        moves: Number of moves, including leases without an owner.
        moved_kbps: Throughput of the moves, without leases without an owner.
        variance: Sum of squared utilizations times capacity.
        count_squares: Sum of squared numbers of leases per worker, weighted by `lease_weight`.
    """

    unplaced: int
    violations: int
    peak: float
    peak_without_oversized: float
    group_peak: float
    moves: int
    moved_kbps: float
    variance: float
    count_squares: int


def lease_weight(problem: Problem, i: int) -> int:
    """Return the weight of a lease in `Score.count_squares`.

    Finished leases only decide between workers with equally many unfinished ones.
    """
    return 1 if problem.leases[i].ended else 1_000


def heavy_for_all(problem: Problem) -> set[int]:
    """Return the leases that alone exceed the dead-band of every worker."""
    top = [problem.target * max(capacities) for capacities in problem.capacities]
    return {
        i
        for i in range(len(problem.leases))
        if any(loads[i] > most + EPSILON for loads, most in zip(problem.loads, top, strict=True))
    }


def score(problem: Problem, owner: Sequence[int]) -> Score:
    """Return the score of an assignment: the index of a worker per lease; -1: none."""
    load = problem.loads_of(owner)
    hosts = {owner[i] for i in heavy_for_all(problem)}
    used = problem.utilizations(load)
    group_peak = 1.0
    if len(problem.groups) > 1:
        for g, size_target in enumerate(problem.group_targets):
            members = [w for w, group in enumerate(problem.group_of) if group == g]
            for row, capacities in zip(load, problem.group_capacities, strict=True):
                group_peak = max(
                    group_peak, sum(row[w] for w in members) / capacities[g] / size_target
                )
    moved = [i for i, w in enumerate(owner) if w >= 0 and w != problem.home[i]]
    return Score(
        unplaced=sum(1 for i, w in enumerate(owner) if w < 0 and problem.free[i]),
        violations=violations(problem, owner),
        peak=round(max(1.0, max(used) / problem.target), 8),
        peak_without_oversized=round(
            max([1.0, *(u / problem.target for w, u in enumerate(used) if w not in hosts)]), 8
        ),
        group_peak=round(group_peak, 8),
        moves=len(moved),
        moved_kbps=round(math.fsum(problem.kbps[i] for i in moved if problem.home[i] >= 0), 6),
        variance=round(
            sum(
                row[w] ** 2 / capacities[w]
                for row, capacities in zip(load, problem.capacities, strict=True)
                for w in range(len(row))
            ),
            8,
        ),
        count_squares=sum(
            sum(lease_weight(problem, i) for i, v in enumerate(owner) if v == w) ** 2
            for w in range(len(problem.workers))
        ),
    )


def violations(problem: Problem, owner: Sequence[int]) -> int:
    """Return how many workers and groups are above a cap.

    A single lease with traffic is never above a throughput cap, because it must have an owner.
    """
    limits = problem.limits
    workers, groups = len(problem.workers), len(problem.groups)
    count, busy, kbps = [0] * workers, [0] * workers, [0.0] * workers
    for i, w in enumerate(owner):
        if w >= 0:
            count[w] += 1
            busy[w] += problem.kbps[i] > 0
            kbps[w] += problem.kbps[i]
    group_count, group_kbps = list(problem.other_group_leases), list(problem.other_group_kbps)
    group_busy = [int(other > 0) for other in group_kbps]
    for w, g in enumerate(problem.group_of):
        group_count[g] += count[w]
        group_kbps[g] += kbps[w]
        group_busy[g] += busy[w]
    broken = 0
    for w in range(workers):
        broken += count[w] > limits.max_leases_for_worker
        broken += busy[w] > 1 and kbps[w] > limits.max_throughput_per_host_kbps + EPSILON
    for g in range(groups):
        broken += group_count[g] > limits.max_leases_for_group
        broken += (
            group_busy[g] > 1 and group_kbps[g] > limits.max_throughput_per_group_kbps + EPSILON
        )
    return broken

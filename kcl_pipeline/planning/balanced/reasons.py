"""Derive moves from an assignment, by decreasing importance, each with its reason."""

from __future__ import annotations

from kcl_pipeline.planning.balanced.problem import Problem
from kcl_pipeline.planning.model import Move


def moves_of(problem: Problem, owner: list[int]) -> tuple[Move, ...]:
    """Return the moves: first leases without a living owner, then those of the most loaded workers.

    The former are sorted by decreasing wait, the latter by decreasing load.
    """
    before, after = (problem.utilizations(problem.loads_of(one)) for one in (problem.home, owner))
    counts = [0] * len(problem.workers)
    for w in problem.home:
        if w >= 0:
            counts[w] += 1
    arriving = {w for i, w in enumerate(owner) if w >= 0 and w != problem.home[i]}
    moved = [i for i, w in enumerate(owner) if w >= 0 and w != problem.home[i]]

    def importance(i: int) -> tuple[float, ...]:
        home, size = problem.home[i], max(loads[i] for loads in problem.loads)
        return (
            (0, -problem.leases[i].waited_seconds, -size, i)
            if home < 0
            else (1, -before[home], -size, i)
        )

    groups = _group_utilizations(problem)
    return tuple(
        Move(
            problem.leases[i].lease_key,
            problem.leases[i].owner,
            problem.workers[owner[i]].worker_id,
            _reason(problem, i, owner[i], before, after, counts, groups, arriving),
        )
        for i in sorted(moved, key=importance)
    )


def _group_utilizations(problem: Problem) -> list[float]:
    worst = [0.0] * len(problem.groups)
    for loads, base, capacities in zip(
        problem.loads, problem.base, problem.group_capacities, strict=True
    ):
        total = [0.0] * len(problem.groups)
        for w, g in enumerate(problem.group_of):
            total[g] += base[w]
        for i, w in enumerate(problem.home):
            if w >= 0:
                total[problem.group_of[w]] += loads[i]
        worst = [
            max(one, load / capacity)
            for one, load, capacity in zip(worst, total, capacities, strict=True)
        ]
    return worst


def _reason(
    problem: Problem,
    i: int,
    to: int,
    before: list[float],
    after: list[float],
    counts: list[int],
    groups: list[float],
    arriving: set[int],
) -> str:
    lease, limits = problem.leases[i], problem.limits
    taker = (
        f"{problem.workers[to].worker_id} goes from {before[to]:.2f} to {after[to]:.2f} of its "
        "fair share"
    )
    home = problem.home[i]
    if home < 0:
        gone = f"its owner {lease.last_owner} expired" if lease.last_owner else "no owner"
        seconds = f"{lease.waited_seconds:.0f} s"
        waited = f" {seconds} ago" if lease.last_owner else f" for {seconds}"
        return f"{gone}{waited if lease.waited_seconds > 0 else ''}; {taker}"
    giver = problem.workers[home].worker_id
    if counts[home] > limits.max_leases_for_worker:
        return (
            f"{giver} has {counts[home]} leases, more than "
            f"max_leases_for_worker={limits.max_leases_for_worker}; {taker}"
        )
    if problem.mode == "idle":
        return f"{problem.workers[to].worker_id} had no lease, {giver} had {counts[home]}"
    if before[home] > problem.target:
        return f"{giver} is at {before[home]:.2f} of its fair share; {taker}"
    if home in arriving:
        return f"frees capacity of {giver} for another lease; {taker}"
    from_group, to_group = problem.group_of[home], problem.group_of[to]
    if from_group != to_group and groups[from_group] > groups[to_group]:
        return (
            f"group {problem.groups[from_group]} is at {groups[from_group]:.2f} of its "
            f"share, group {problem.groups[to_group]} at {groups[to_group]:.2f}; {taker}"
        )
    return f"{giver} is at {before[home]:.2f} of its fair share; {taker}"

"""Plan the fewest moves to a fleet that is even within the dead-band (`docs/planning.md`).

Objective, lexicographic: leases without an owner that could have one · hard caps · largest
utilization of a worker, then of a worker that holds no lease too heavy for everybody, down to the
dead-band · largest utilization of a group, down to its dead-band · leases moved, then bytes moved ·
variance. Up to `EXACT_LEASES` by `EXACT_WORKERS` (`exact`) the assignment is optimal. For larger
fleets the heuristic (`solve`) is close to optimal from level three on. This module decides whether
leases move: dead-band with hysteresis, benefit per move, churn budget.
"""

from __future__ import annotations

from dataclasses import replace

from kcl_pipeline.planning.balanced import solve as balanced_solve
from kcl_pipeline.planning.balanced.assignment import Assignment
from kcl_pipeline.planning.balanced.exact import is_small
from kcl_pipeline.planning.balanced.exact import solve as solve_exactly
from kcl_pipeline.planning.balanced.place import place
from kcl_pipeline.planning.balanced.problem import EPSILON, Problem, build
from kcl_pipeline.planning.balanced.reasons import moves_of
from kcl_pipeline.planning.balanced.score import score, violations
from kcl_pipeline.planning.balanced.targets import OVERSIZED_SLACK, Targets, compute
from kcl_pipeline.planning.model import Plan, PlanInput

NAME = "balanced"
_STRETCHES = (1.01, 1.025, 1.05, 1.1, 1.2, 1.4, 1.8, 3.0, 10.0)
_REFINEMENTS = 3


def balanced(plan_input: PlanInput) -> Plan:
    """Return the plan for this input. The order of leases and workers does not matter."""
    problem = build(plan_input)
    if problem is None:
        waiting = sorted(
            lease.lease_key for lease in plan_input.leases if lease.owner is None and lease.movable
        )
        return Plan(NAME, (), tuple(waiting), ("no worker takes leases",))
    calm = _placed_only(problem)
    if not problem.limits.balance:
        owner, why = calm, "this cycle places leases without an owner and does not balance"
    elif problem.mode == "idle":
        owner, why = (
            _fill_empty(problem, calm),
            "traffic is negligible: leases are counted; workers with few leases are given some",
        )
    else:
        owner, why = _balance(problem, calm)
        if owner == calm and problem.hysteresis > 0 and len(problem.loads) > 1:
            owner = _fill_empty(problem, calm, most=1)
            why += "; a worker without any lease is given one" if owner != calm else ""
    spilled = tuple(
        problem.leases[i].lease_key for i, w in enumerate(owner) if w < 0 and problem.free[i]
    )
    return Plan(NAME, moves_of(problem, owner), spilled, (why,))


def _placed_only(problem: Problem) -> list[int]:
    """Return the assignment in which only leases without an owner change."""
    waiting = [i for i, w in enumerate(problem.home) if w < 0 and problem.free[i]]
    if not waiting:
        return list(problem.home)
    targets = Targets(problem.target, [])
    assignment = Assignment(problem, targets, targets.rest)
    place(assignment, waiting)
    only = replace(
        problem, free=[free and w < 0 for free, w in zip(problem.free, problem.home, strict=True)]
    )
    return solve_exactly(only, assignment.owner) if is_small(only) else assignment.owner


def _balance(problem: Problem, calm: list[int]) -> tuple[list[int], str]:
    """Return the new assignment, and a sentence with the reason."""
    targets = compute(problem)
    best = _solve_small(problem, targets, calm) if is_small(problem) else None
    if best is not None and score(problem, best).unplaced < score(problem, calm).unplaced:
        return best, "other leases move so that one without an owner finds a worker"
    reach = (
        score(problem, best).peak_without_oversized * problem.target
        if best is not None
        else targets.rest
    )
    loaded = any(
        w < 0 and problem.free[i] and any(loads[i] > 0 for loads in problem.loads)
        for i, w in enumerate(problem.home)
    )
    patience = 0.0 if loaded else problem.hysteresis
    now = _Stress(problem, targets, calm, reach)
    broken = violations(problem, calm)
    uneven = now.peak > reach + patience + EPSILON or now.misplaced_oversized
    if best is not None:
        uneven = _gain(problem, calm, best) > patience + EPSILON
    if not (broken or uneven or now.group_is_over):
        return (
            calm,
            (
                f"the most loaded worker is at {now.total_peak:.3f} of its fair share; that is "
                f"near enough to the {reach:.3f} in reach"
            ),
        )
    chosen = best if best is not None else _solve(problem, targets, calm)
    then = _Stress(problem, targets, chosen, reach)
    extra = sum(1 for a, b in zip(chosen, calm, strict=True) if a != b)
    worth = problem.limits.min_benefit_per_move * extra
    if best is not None:
        helps = _gain(problem, calm, best) >= worth
    else:
        gain = max(now.total_peak - then.total_peak, now.peak - then.peak)
        helps = now.excess - then.excess >= worth and (loaded or gain >= problem.hysteresis / 2)
    group_helps = (
        now.group_is_over and now.group_peak - then.group_peak > (now.group_peak - 1.0) / 2
    )
    if not (helps or group_helps or violations(problem, chosen) < broken):
        return (
            calm,
            (
                f"the most loaded worker is at {now.total_peak:.3f} of its fair share, and no "
                "move would help enough"
            ),
        )
    budget = int(problem.limits.churn_budget_percentage / 100.0 * len(problem.leases))
    if extra > budget:
        return _within_budget(
            problem, targets, calm, chosen, budget
        ), f"the churn budget of {budget} moves is spent; the rest follows"
    return (
        chosen,
        (
            f"the most loaded worker goes from {now.total_peak:.3f} to {then.total_peak:.3f} of "
            "its fair share"
        ),
    )


def _gain(problem: Problem, calm: list[int], best: list[int]) -> float:
    """Return by how much the exact solution reduces a peak, in utilization."""
    here, there = score(problem, calm), score(problem, best)
    return (
        max(here.peak - there.peak, here.peak_without_oversized - there.peak_without_oversized)
        * problem.target
    )


class _Stress:
    """The unevenness of an assignment: utilizations, and load above `reach` in fair shares."""

    def __init__(self, problem: Problem, targets: Targets, owner: list[int], reach: float) -> None:
        load = problem.loads_of(owner)
        used = problem.utilizations(load)
        hosts: dict[int, float] = {}
        for i in targets.oversized:
            if (w := owner[i]) >= 0:
                alone = max(
                    loads[i] / caps[w]
                    for loads, caps in zip(problem.loads, problem.capacities, strict=True)
                )
                hosts[w] = max(hosts.get(w, 0.0), (1 + OVERSIZED_SLACK) * alone - reach)
        self.total_peak = max(used)
        # For the host of an oversized lease, only the utilization above that lease alone counts.
        self.peak = max(u - max(hosts.get(w, 0.0), 0.0) for w, u in enumerate(used))
        self.misplaced_oversized = len(hosts) < len(targets.oversized)
        self.excess = sum(
            max(
                0.0,
                *(
                    row[w] - reach * caps[w]
                    for row, caps in zip(load, problem.capacities, strict=True)
                ),
            )
            for w in range(len(used))
        )
        self.group_peak = 1.0
        if len(problem.groups) > 1:
            for row, caps in zip(load, problem.group_capacities, strict=True):
                by_group = [0.0] * len(problem.groups)
                for w, g in enumerate(problem.group_of):
                    by_group[g] += row[w]
                self.group_peak = max(
                    [
                        self.group_peak,
                        *(total / cap for total, cap in zip(by_group, caps, strict=True)),
                    ]
                )
        self.group_is_over = (
            self.group_peak > 1.0 + problem.limits.group_threshold_percentage / 100.0 + EPSILON
            # Groups of one worker each need no balance of their own.
            and 1 < len(problem.groups) < len(problem.workers)
            and (not targets.oversized or is_small(problem))
        )


def _solve_small(problem: Problem, targets: Targets, calm: list[int]) -> list[int]:
    start = _attempt(problem, targets, targets.rest)[0]
    if (score(problem, calm)) < score(problem, start):
        start = calm
    return solve_exactly(problem, start)


def _solve(problem: Problem, targets: Targets, calm: list[int]) -> list[int]:
    """Run the heuristic at the target, or else at the lowest utilization that it reaches."""
    best, done, peak = _attempt(problem, targets, targets.rest)
    if done:
        return best
    rank = (_unplaced(problem, best), violations(problem, best), peak)
    failed, reached = targets.rest, min(peak, _Stress(problem, targets, calm, targets.rest).peak)
    for stretch in _STRETCHES:
        rest = targets.rest * stretch
        if rest >= reached or problem.stop():
            break
        owner, done, peak = _attempt(problem, targets, rest)
        if (candidate := (_unplaced(problem, owner), violations(problem, owner), peak)) < rank:
            best, rank = owner, candidate
        if done:
            reached = min(reached, rest)
            break
        failed = rest
    for _ in range(_REFINEMENTS):
        if problem.stop():
            return best
        middle = (failed + reached) / 2
        owner, done, peak = _attempt(problem, targets, middle)
        if (candidate := (_unplaced(problem, owner), violations(problem, owner), peak)) < rank:
            best, rank = owner, candidate
        failed, reached = (failed, middle) if done else (middle, reached)
    # A run that aims exactly at the reached utilization needs fewer moves.
    owner, _, peak = _attempt(problem, targets, rank[2] * (1 + EPSILON))
    if (_unplaced(problem, owner), violations(problem, owner)) == rank[:2] and peak <= rank[2] * (
        1 + 4 * EPSILON
    ):
        moved, before = (
            sum(1 for a, b in zip(one, problem.home, strict=True) if a != b)
            for one in (owner, best)
        )
        best = owner if moved < before else best
    return best


def _unplaced(problem: Problem, owner: list[int]) -> int:
    return sum(1 for i, w in enumerate(owner) if w < 0 and problem.free[i])


def _attempt(problem: Problem, targets: Targets, rest: float) -> tuple[list[int], bool, float]:
    """Run the heuristic once at utilization `rest`.

    Return the assignment, whether all limits hold, and the peak of workers without an oversized
    lease.
    """
    assignment = Assignment(problem, targets, rest)
    place(assignment, [i for i, w in enumerate(problem.home) if w < 0 and problem.free[i]])
    balanced_solve.obey(assignment)
    balanced_solve.spread_oversized(assignment, targets)
    balanced_solve.even_groups(assignment)
    done = balanced_solve.shed(assignment)
    balanced_solve.take_back(assignment)
    balanced_solve.settle(assignment)
    return assignment.owner, done, assignment.peak()


def _within_budget(
    problem: Problem, targets: Targets, calm: list[int], chosen: list[int], budget: int
) -> list[int]:
    """Return the assignment after as many moves as the budget allows, from the most loaded workers.

    A move must not make its destination more loaded than its source was.
    """
    assignment = Assignment(replace(problem, home=calm), targets, targets.rest)
    wanted = [i for i, (a, b) in enumerate(zip(calm, chosen, strict=True)) if a != b and a >= 0]
    while budget > 0 and wanted:
        wanted.sort(
            key=lambda i: (-assignment.utilization(assignment.owner[i]), -assignment.sizes[i], i)
        )
        left: list[int] = []
        for i in wanted:
            before = assignment.utilization(assignment.owner[i])
            after = max(
                (assignment.load[r][chosen[i]] + assignment.loads[r][i])
                / problem.capacities[r][chosen[i]]
                for r in assignment.resources
            )
            if (
                budget > 0
                and assignment.fits_hard(i, chosen[i])
                and after < max(before, targets.rest)
            ):
                assignment.move(i, chosen[i])
                budget -= 1
            else:
                left.append(i)
        if len(left) == len(wanted):
            break
        wanted = left
    return assignment.owner


def _fill_empty(problem: Problem, calm: list[int], most: int | None = None) -> list[int]:
    """Move the lightest leases of the workers with the most leases to workers with few.

    These are workers without leases, and without `most` also those with at most half of their
    share. Each gets at most `most`. Finished leases do not count. Negligible traffic does not
    predict later traffic. If CPU is balanced, an idle process may have the same CPU as one with
    leases. A worker that joins such a fleet would never get leases, and their cost on it would stay
    unknown.
    """
    assignment = Assignment(
        replace(problem, home=calm), Targets(problem.target, []), problem.target
    )
    held = assignment.open
    fair = min(max(sum(held) // len(held), 1), most or len(calm))
    few = 0 if most is not None else fair // 2
    for w in [w for w, count in enumerate(held) if count <= few]:
        while held[w] < fair and not problem.stop():
            giver = max(
                range(len(held)), key=lambda v: (held[v] if assignment.held[0][v] else -1, -v)
            )
            if held[giver] <= held[w] + 1 or not assignment.held[0][giver]:
                break
            lease = min((i for _, i in assignment.held[0][giver]), key=lambda i: problem.kbps[i])
            if not assignment.fits_hard(lease, w):
                break
            assignment.move(lease, w)
    return assignment.owner

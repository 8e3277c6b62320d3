"""The lower bound on moves is one: no plan that exhaustive search finds beats it."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.planning.balanced.problem import OVERSIZED_SLACK, Problem, build
from kcl_pipeline.planning.model import LeaseState, PlanInput, WorkerState
from tests.support.examples import examples
from verification.planning.bound import moves_lower_bound


def fewest_moves(
    problem: Problem, rest: float, oversized: list[int], group_rest: list[float] | None = None
) -> int | None:
    """By trying every assignment; None when none reaches the goal."""
    free = [i for i in range(len(problem.leases)) if problem.free[i]]
    best: int | None = None
    for chosen in itertools.product(range(len(problem.workers)), repeat=len(free)):
        owner = list(problem.home)
        for i, w in zip(free, chosen, strict=True):
            owner[i] = w
        if _reaches(problem, owner, rest, oversized) and (
            group_rest is None or _groups_reach(problem, owner, group_rest)
        ):
            moves = sum(1 for i in free if owner[i] != problem.home[i])
            best = moves if best is None else min(best, moves)
    return best


def _reaches(problem: Problem, owner: list[int], rest: float, oversized: list[int]) -> bool:
    for r, loads in enumerate(problem.loads):
        fixed = problem.fixed(r)
        for w in range(len(problem.workers)):
            load = problem.base[r][w] + sum(loads[i] for i, v in enumerate(owner) if v == w)
            limit = max(
                [
                    rest * problem.capacities[r][w],
                    (1 + OVERSIZED_SLACK) * fixed[w],
                    *((1 + OVERSIZED_SLACK) * loads[i] for i in oversized if owner[i] == w),
                ]
            )
            if load > limit + 1e-12:
                return False
    return True


def _groups_reach(problem: Problem, owner: list[int], group_rest: list[float]) -> bool:
    for r, loads in enumerate(problem.loads):
        for g, rest in enumerate(group_rest):
            load = sum(loads[i] for i, w in enumerate(owner) if problem.group_of[w] == g)
            if load > rest * problem.group_capacities[r][g] + 1e-12:
                return False
    return True


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    workers = tuple(
        WorkerState(
            f"w{w}",
            group=draw(st.sampled_from("ab")),
            capacity=draw(st.sampled_from((1.0, 1.0, 3.0))),
        )
        for w in range(draw(st.integers(2, 3)))
    )
    owners = st.sampled_from([None, "w0", "w0", *(worker.worker_id for worker in workers)])
    loads = draw(st.sampled_from((st.integers(20, 400), st.sampled_from((50, 100, 400)))))
    leases = tuple(
        LeaseState(f"s{i}", draw(owners), float(draw(loads)), movable=draw(st.integers(0, 6)) > 0)
        for i in range(draw(st.integers(3, 7)))
    )
    problem = build(PlanInput(leases, workers))
    assert problem is not None
    return problem


@examples(200)
@given(problems(), st.sampled_from((1.05, 1.15, 1.3, 1.6)))
def test_no_plan_beats_the_bound(problem: Problem, rest: float) -> None:
    best = fewest_moves(problem, rest, [])
    if best is not None:
        assert moves_lower_bound(problem, rest, []) <= best


@examples(100)
@given(problems(), st.sampled_from((1.05, 1.2)), st.integers(1, 2))
def test_no_plan_beats_the_bound_with_oversized(problem: Problem, rest: float, count: int) -> None:
    oversized = sorted(range(len(problem.leases)), key=lambda i: -problem.loads[0][i])[:count]
    best = fewest_moves(problem, rest, oversized)
    if best is not None:
        assert moves_lower_bound(problem, rest, oversized) <= best


@st.composite
def problems_with_oversized(draw: st.DrawFn) -> tuple[Problem, list[int]]:
    workers = tuple(
        WorkerState(f"w{w}", capacity=draw(st.sampled_from((1.0, 1.0, 1.5)))) for w in range(3)
    )
    owners = st.sampled_from([None, "w0", "w0", "w1", "w2"])
    loads = [
        *draw(st.lists(st.integers(600, 900), min_size=1, max_size=2)),
        *draw(st.lists(st.integers(1, 60), min_size=2, max_size=5)),
    ]
    problem = build(
        PlanInput(
            tuple(LeaseState(f"s{i}", draw(owners), float(load)) for i, load in enumerate(loads)),
            workers,
        )
    )
    assert problem is not None
    return problem, problem.oversized


@examples(200)
@given(problems_with_oversized(), st.sampled_from((1.05, 1.2)))
def test_no_plan_beats_the_bound_beside_real_oversized_leases(
    case: tuple[Problem, list[int]], rest: float
) -> None:
    problem, oversized = case
    best = fewest_moves(problem, rest, oversized)
    if best is not None:
        assert moves_lower_bound(problem, rest, oversized) <= best


@examples(60)
@given(problems(), st.sampled_from((1.1, 1.4)))
def test_no_plan_beats_the_bound_with_groups(problem: Problem, rest: float) -> None:
    group_rest = [1.0 + (rest - 1) / 2] * len(problem.groups)
    best = fewest_moves(problem, rest, [], group_rest)
    if best is not None:
        assert moves_lower_bound(problem, rest, [], group_rest) <= best


def test_it_is_tight_where_holes_decide() -> None:
    # Every worker but one is full of small leases; the heavy one of the full worker fits nowhere,
    # so three small ones go.
    leases = [LeaseState("heavy", "w0", 60.0), *(LeaseState(f"a{i}", "w0", 10.0) for i in range(6))]
    leases += [LeaseState(f"b{w}{i}", f"w{w}", 9.0) for w in (1, 2, 3) for i in range(10)]
    problem = build(PlanInput(tuple(leases), tuple(WorkerState(f"w{w}") for w in range(4))))
    assert problem is not None
    heaviest_first = 1
    assert moves_lower_bound(problem, 1.08, []) > heaviest_first


def test_it_is_zero_where_nothing_has_to_move_and_counts_placements() -> None:
    rng = random.Random(1)
    leases = [LeaseState(f"s{i}", f"w{i % 5}", 100.0) for i in range(50)]
    workers = tuple(WorkerState(f"w{w}") for w in range(5))
    problem = build(PlanInput(tuple(leases), workers))
    assert problem is not None
    assert moves_lower_bound(problem, 1.05, []) == 0
    orphans = [LeaseState(f"o{i}", None, rng.uniform(0, 1)) for i in range(7)]
    problem = build(PlanInput((*leases, *orphans), workers))
    assert problem is not None
    assert moves_lower_bound(problem, 1.05, []) == 7

"""Small fleets: the plan is the best there is, by comparison with trying everything."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kcl_pipeline.planning.balanced.exact import breaks_caps
from kcl_pipeline.planning.balanced.problem import Problem, build
from kcl_pipeline.planning.balanced.score import Score, score
from kcl_pipeline.planning.balanced.strategy import balanced
from kcl_pipeline.planning.model import LeaseState, Plan, PlanInput, PlanLimits, WorkerState

EAGER = PlanLimits(
    re_balance_threshold_percentage=5,
    group_threshold_percentage=0.0,
    min_benefit_per_move=0.0,
    dead_band_kbps=0.0,
)
"""No hysteresis, and no traffic is negligible: whatever is better at all is wanted."""


def planned_score(plan_input: PlanInput, plan: Plan) -> tuple[Problem, Score]:
    problem = build(plan_input)
    assert problem is not None
    index = {worker.worker_id: w for w, worker in enumerate(problem.workers)}
    to = {move.lease_key: index[move.to_worker] for move in plan.moves}
    return problem, score(
        problem,
        [to.get(lease.lease_key, problem.home[i]) for i, lease in enumerate(problem.leases)],
    )


def best_of_all(problem: Problem) -> Score:
    free = [i for i in range(len(problem.leases)) if problem.free[i]]
    best: Score | None = None
    choices = [[*range(len(problem.workers)), *([-1] if problem.home[i] < 0 else [])] for i in free]
    for chosen in itertools.product(*choices):
        owner = list(problem.home)
        for i, w in zip(free, chosen, strict=True):
            owner[i] = w
        if breaks_caps(problem, owner):
            continue
        one = score(problem, owner)
        if best is None or one < best:
            best = one
    assert best is not None
    return best


@st.composite
def small_cases(draw: st.DrawFn, leases: int = 6, workers: int = 3) -> PlanInput:
    fleet = tuple(
        WorkerState(
            f"w{w}",
            group=draw(st.sampled_from("ab")),
            capacity=draw(st.sampled_from((1.0, 1.0, 2.0))),
        )
        for w in range(draw(st.integers(1, workers)))
    )
    owners = st.sampled_from([None, *(worker.worker_id for worker in fleet)])
    loads = draw(
        st.sampled_from((st.integers(10, 500), st.just(100), st.sampled_from((10, 20, 40, 3_000))))
    )
    shards = tuple(
        LeaseState(
            f"s{i:02}",
            draw(owners),
            float(draw(loads)),
            movable=draw(st.integers(0, 9)) > 0,
            ended=draw(st.integers(0, 9)) == 0,
        )
        for i in range(draw(st.integers(1, leases)))
    )
    limits = draw(
        st.sampled_from(
            (
                EAGER,
                EAGER,
                replace(EAGER, max_leases_for_worker=2),
                replace(EAGER, max_throughput_per_host_kbps=700.0),
                replace(EAGER, max_leases_for_group=3),
            )
        )
    )
    return PlanInput(shards, fleet, limits)


@settings(max_examples=150, deadline=None)
@given(small_cases())
def test_no_assignment_is_better(case: PlanInput) -> None:
    problem, got = planned_score(case, balanced(case))
    assert got == best_of_all(problem)


@settings(max_examples=60, deadline=None)
@given(small_cases(), st.data())
def test_two_resources_no_assignment_is_better(case: PlanInput, data: st.DataObject) -> None:
    fleet = tuple(
        replace(worker, metrics={"C": float(data.draw(st.integers(5, 90)))}, limits={"C": 80.0})
        for worker in case.workers
    )
    case = replace(case, workers=fleet)
    problem, got = planned_score(case, balanced(case))
    assert got == best_of_all(problem)


def test_twelve_leases_four_workers_match_a_full_enumeration() -> None:
    # 4^12 assignments are too many to score one by one; a table over subsets gives the smallest
    # peak, then the fewest moves at that peak.
    rng = random.Random(7)
    for _ in range(4):
        loads = [float(rng.randint(20, 400)) for _ in range(12)]
        owner = [rng.randrange(4) for _ in range(12)]
        case = PlanInput(
            tuple(LeaseState(f"s{i:02}", f"w{owner[i]}", loads[i]) for i in range(12)),
            tuple(WorkerState(f"w{w}") for w in range(4)),
            EAGER,
        )
        _, got = planned_score(case, balanced(case))
        peak, moves = _by_subsets(loads, owner)
        assert got.peak == round(max(peak / (sum(loads) / 4) / 1.05, 1.0), 8)
        assert got.moves == moves


# a table over subsets is one loop in another
def _by_subsets(loads: list[float], owner: list[int]) -> tuple[float, int]:  # noqa: C901
    size = 1 << len(loads)
    weight = [0.0] * size
    for mask in range(1, size):
        low = (mask & -mask).bit_length() - 1
        weight[mask] = weight[mask & (mask - 1)] + loads[low]
    mine = [sum(1 << i for i, w in enumerate(owner) if w == v) for v in range(4)]
    mean = sum(loads) / 4

    def fewest(limit: float) -> int | None:
        best: dict[int, int] = {0: 0}
        for v in range(4):
            following: dict[int, int] = {}
            for used, moved in best.items():
                rest = (size - 1) & ~used
                part = rest
                while True:
                    if weight[part] <= limit and (v < 3 or part == rest):
                        cost = moved + (part & ~mine[v]).bit_count()
                        if cost < following.get(used | part, 99):
                            following[used | part] = cost
                    if part == 0:
                        break
                    part = (part - 1) & rest
            best = following
        return best.get(size - 1)

    for limit in sorted(
        {round(weight[mask], 6) for mask in range(size) if weight[mask] >= 1.05 * mean}
        | {1.05 * mean}
    ):
        moves = fewest(limit + 1e-6)
        if moves is not None:
            return limit, moves
    raise AssertionError

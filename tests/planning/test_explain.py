"""What people see of a plan."""

from __future__ import annotations

import random

import pytest

from benchmarks.planner_text import text_of
from kcl_pipeline.planning.explain import explain
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, WorkerState
from kcl_pipeline.planning.strategies import balanced
from verification.planning.quality import quality_of


@pytest.fixture
def case() -> PlanInput:
    rng = random.Random(2)
    crew = tuple(WorkerState(f"{group}-{w}", group=group) for group in "ab" for w in range(5))
    return PlanInput(
        tuple(
            LeaseState(f"s{i:03}", rng.choice(crew[:6]).worker_id, rng.uniform(10, 100))
            for i in range(200)
        ),
        crew,
    )


def test_the_table_adds_up(case: PlanInput) -> None:
    plan = balanced(case)
    table = explain(case, plan)
    assert [row.lease_key for row in table.moves] == [move.lease_key for move in plan.moves]
    assert all(row.reason for row in table.moves)
    for rows in (table.workers, table.groups):
        assert (
            sum(row.leases_before for row in rows) == sum(row.leases_after for row in rows) == 200
        )
        assert sum(row.kbps_after for row in rows) == pytest.approx(
            sum(lease.throughput_kbps or 0 for lease in case.leases)
        )
    assert table.workers[0].utilization_before == pytest.approx(table.max_over_mean_before)
    assert max(row.utilization_after for row in table.workers) == pytest.approx(table.max_over_mean)
    assert table.max_over_mean <= 1.05 < table.max_over_mean_before
    assert 0 < quality_of(case, plan).lower_bound <= len(plan.moves)


def test_the_text_names_moves_workers_groups_and_the_bound(case: PlanInput) -> None:
    plan = balanced(case)
    table, bound = explain(case, plan), quality_of(case, plan).lower_bound
    text = text_of(plan, table, bound)
    first = plan.moves[0]
    assert first.lease_key in text
    assert first.reason in text
    assert f"at least {bound} moves are needed" in text
    assert "utilization after" in text
    assert "more" in text_of(plan, table, bound, most_rows=3)


def test_a_plan_of_any_strategy_and_an_empty_fleet_can_be_explained(case: PlanInput) -> None:
    assert explain(case, Plan("other", ())).summary.startswith("other: 0 moves, ")
    one = Plan("other", (Move(case.leases[0].lease_key, None, "a-1", "no owner"),))
    assert explain(case, one).summary.startswith("other: 1 move, ")
    empty = PlanInput((LeaseState("s", None, 5.0),), ())
    plan = balanced(empty)
    assert plan.spilled == ("s",)
    assert "s" in text_of(plan, explain(empty, plan), 0)


def test_the_bound_of_a_lesser_plan_is_lower(case: PlanInput) -> None:
    nothing, good = quality_of(case, Plan("other", ())), quality_of(case, balanced(case))
    assert nothing.lower_bound == 0 < good.lower_bound
    assert nothing.moves_over_lower_bound == 1.0

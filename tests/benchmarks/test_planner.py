"""The benchmarks run, and what they print says what it should."""

from __future__ import annotations

import json
import random
import sys
from itertools import cycle, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import planner, rebalance
from benchmarks.planner_cases import DISTRIBUTIONS, STARTS, carried_out, from_trace, make
from kcl_pipeline.planning.model import LeaseState, PlanInput, WorkerState
from kcl_pipeline.planning.strategies import balanced
from tests.support.shortened import shortened
from verification.kcl_variance_exact import kcl_variance_exact
from verification.planning.quality import quality_of


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


# Each start and each distribution; `make test-long` has all pairs
SHORT = {*zip(STARTS, cycle(DISTRIBUTIONS))}


@pytest.mark.parametrize(
    ("start", "distribution"), shortened(product(STARTS, DISTRIBUTIONS), SHORT.__contains__)
)
def test_quality_at_full_size(distribution: str, start: str) -> None:
    case = make(distribution, start, 77)
    plan = balanced(case)
    found = quality_of(case, plan)
    assert found.max_over_mean <= 1.05
    assert found.moves_over_lower_bound <= 1.25
    assert balanced(carried_out(case, plan)).moves == ()


def test_the_json_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = [
        "--json",
        "--seeds",
        "2",
        "--kcl-seeds",
        "1",
        "--leases",
        "400",
        "--workers",
        "20",
        "--no-large",
        "--figures",
        str(tmp_path),
    ]
    assert planner.main(small) == 0
    result = printed(capsys)
    assert set(result) >= {"scenarios", "plan_ms_p50", "plan_ms_p99", "strategies"}
    scenarios = result["scenarios"]
    assert isinstance(scenarios, list)
    assert len(scenarios) == 8
    wanted = {
        "name",
        "seeds",
        "max_over_mean",
        "largest_over_mean",
        "moves",
        "lower_bound",
        "moves_over_lower_bound",
        "kcl_1",
        "kcl_10",
        "kcl_60",
        "lpt",
    }
    for one in scenarios:
        assert set(one) >= wanted
        assert set(one["kcl_60"]) == {"max_over_mean", "moves"}
    assert len(list(tmp_path.glob("planner_*.svg"))) == 8
    rows = result["strategies"]
    assert isinstance(rows, list)
    assert {row["name"] for row in rows} == {
        "balanced",
        "worker_utilization_aware",
        "lease_count_based",
        "kcl_variance",
    }
    assert all("one_worker" in row["ms"] for row in rows)


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = random.Random(3)
    trace = {
        "workers": [
            {"id": f"w{w}", "group": f"g{w % 2}", "capacity": 1 + w % 2} for w in range(10)
        ],
        "leases": [
            {
                "key": f"k{i}",
                "load": rng.random() / 1_000,
                "owner": rng.choice(["w0", "w1", "dead", None]),
            }
            for i in range(300)
        ],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert planner.main(["--trace", str(path), "--json"]) == 0
    result = printed(capsys)
    assert result["max_over_mean"] <= 1.05  # type: ignore[operator] (a number)
    keys = [move["key"] for move in result["moves"]]  # type: ignore[attr-defined] (rows)
    assert len(keys) == len(set(keys)) == result["moves_count"]
    assert {lease["key"] for lease in trace["leases"] if lease["owner"] in ("dead", None)} <= set(
        keys
    )
    path.write_text('{"workers": 3}')
    assert planner.main(["--trace", str(path)]) == 2
    with pytest.raises(ValueError, match="is not a trace"):
        from_trace(path)


def test_rebalance_prints_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebalance.main(["--json", "--leases", "60", "--workers", "6", "--minutes", "300"]) == 0
    rows = printed(capsys)["strategies"]
    assert isinstance(rows, dict)
    assert set(rows) == {
        "balanced",
        "lease_count_based",
        "kcl_variance",
        "kcl_variance_exact",
    }
    assert all(set(row) == {"max_over_mean", "moves", "over_1_10"} for row in rows.values())
    assert rows["balanced"]["max_over_mean"] < rows["lease_count_based"]["max_over_mean"]


def test_every_orphan_of_the_virtual_day_is_placed_at_once() -> None:
    day = rebalance.make_day(4, 50, 5, 400)
    stranded = []

    def watched(case: PlanInput) -> object:
        plan = balanced(case)
        placed = {move.lease_key for move in plan.moves}
        stranded.extend(
            lease.lease_key
            for lease in case.leases
            if lease.owner is None and lease.lease_key not in placed
        )
        return plan

    rebalance.live_through(day, watched, 5)  # type: ignore[arg-type] (returns a plan)
    assert stranded == []


def test_kcl_as_it_is_keeps_its_defects() -> None:
    # Ties: with Java's heap the workers in the middle get nothing (protocol §5.5).
    crew = tuple(WorkerState(f"w{w}", metrics={"C": 0.0}, limits={"C": 80.0}) for w in range(4))
    plan = kcl_variance_exact(
        PlanInput(tuple(LeaseState(f"s{i}", None) for i in range(12)), crew), random.Random(1)
    )
    takers = {move.to_worker for move in plan.moves}
    assert takers == {"w0", "w3"}
    # Overshoot: nothing fits 60 % of the excess, so the one lightest lease goes.
    leases = [LeaseState("a", "w0", 50.0), LeaseState("b", "w0", 60.0), LeaseState("c", "w1", 70.0)]
    crew = (
        WorkerState("w0", metrics={"C": 55.0}, limits={"C": 80.0}),
        WorkerState("w1", metrics={"C": 35.0}, limits={"C": 80.0}),
        WorkerState("w2", metrics={"C": 0.0}, limits={"C": 80.0}),
    )
    plan = kcl_variance_exact(PlanInput(tuple(leases), crew), random.Random(1))
    assert [(move.lease_key, move.to_worker) for move in plan.moves] == [("a", "w2")]

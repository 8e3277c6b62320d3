"""Each constant of the search is needed: without it, plans of some fleets are worse."""

from __future__ import annotations

import pytest

from verification.planning.traces import Measured, Trace, measure, traces

MODULE = "kcl_pipeline.planning.balanced.strategy"


def fleets() -> list[Trace]:
    """Return the fleets of some seeds, without the largest ones."""
    return [
        trace
        for seed, count in ((1, 60), (13, 60), (517, 20))
        for trace in traces(seed, count)
        if len(trace.case.workers) <= 100
    ]


def badness() -> tuple[float, int]:
    """Return what plans exceed 1.05 by in all, where they need not, and how many do not settle."""
    results: list[Measured] = [measure(trace, "balanced") for trace in fleets()]
    uneven = sum(max(r.quality.max_over_mean - 1.05, 0.0) for r in results if r.is_reachable)
    return uneven, sum(r.moves_again > 0 for r in results)


@pytest.mark.parametrize(
    ("name", "without"), [("_RECEIVERS", 1), ("_LIGHTER", 1.0), ("_STEP", 1.3)]
)
def test_without_it_plans_are_less_even_or_do_not_settle(
    name: str, without: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, unsettled = badness()
    monkeypatch.setattr(f"{MODULE}.{name}", without)
    uneven, unsettled_without = badness()
    assert uneven > usual + 0.005 or unsettled_without > unsettled

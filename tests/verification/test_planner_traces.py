"""Plans of fleets that a seed draws are as good as documented.

`python -m verification.planning.traces` does the same with a fresh seed.
"""

from __future__ import annotations

import pytest

from tests.support.shortened import shortened
from verification.planning.traces import SIZES, measure, traces

LARGE = tuple(f"{leases}x{workers}" for leases, workers in SIZES if workers >= 40)
"""The bound is loose for small fleets, of which a plan moves few leases."""


@pytest.mark.parametrize(
    ("seed", "count"), shortened([(1, 12), (1, 30), (13, 30)], {(1, 12)}.__contains__)
)
def test_a_plan_is_even_and_settled(seed: int, count: int) -> None:
    results = [measure(trace, "balanced") for trace in traces(seed, count)]
    faults = [(one.trace.name, one.faults) for one in results if one.faults]
    unsettled = [name for name, found in faults if "not at rest" in found]
    uneven = [name for name, found in faults if "uneven" in found and any(x in name for x in LARGE)]
    assert not unsettled, seed
    assert not uneven, seed
    ratios = [r.quality.moves_over_lower_bound for r in results if r.quality.lower_bound >= 100]
    assert sum(ratios) / len(ratios) <= 1.25, (seed, ratios)

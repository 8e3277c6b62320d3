"""A plan that takes too long is cut off: it has the moves found so far."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import LeaseState, PlanInput, WorkerState

LOADED = ("balanced", "lease_count_based", "kcl_variance")


def after_calls(calls: int) -> Callable[[], bool]:
    """Return a `stop` that says yes from this call on."""
    left = [calls]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return stop


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("kbps", [0.0, 100.0])
def test_a_plan_that_is_cut_off_has_some_of_the_moves(name: str, kbps: float) -> None:
    leases = tuple(LeaseState(f"s{i:03}", "w0000", kbps) for i in range(400))
    crew = tuple(WorkerState(f"w{w:04}") for w in range(20))
    waiting = tuple(LeaseState(f"t{i}", None, kbps) for i in range(5))
    whole = strategies.get(name)(PlanInput((*leases, *waiting), crew))
    cut = strategies.get(name)(PlanInput((*leases, *waiting), crew, stop=after_calls(10)))
    placed = {move.lease_key for move in cut.moves if move.from_worker is None}
    assert placed == {lease.lease_key for lease in waiting}, "a cut never leaves one out"
    assert len(cut.moves) < len(whole.moves)
    assert all(move.reason for move in cut.moves)


def test_a_plan_that_is_cut_off_has_moved_the_heaviest_leases() -> None:
    leases = tuple(LeaseState(f"s{i:03}", "w0000", 10.0 + i) for i in range(400))
    crew = tuple(WorkerState(f"w{w:04}") for w in range(20))
    cut = strategies.get("balanced")(PlanInput(leases, crew, stop=after_calls(20)))
    moved = {move.lease_key for move in cut.moves}
    assert moved
    assert moved == {f"s{i:03}" for i in range(400 - len(moved), 400)}


@pytest.mark.parametrize("seeds", [10, pytest.param(40, marks=pytest.mark.long)])
def test_a_plan_of_two_loads_ends_by_itself(seeds: int) -> None:
    """Leases that are light in bytes and heavy in CPU were refused by every group for ever."""
    rng = random.Random(3)
    crew = tuple(
        WorkerState(f"g{w % 2}-{w:04}", f"g{w % 2}", metrics={"C": rng.uniform(5.0, 95.0)})
        for w in range(20)
    )
    for seed in range(seeds):
        rng = random.Random(seed)
        leases = tuple(
            LeaseState(f"s{i:03}", rng.choice(crew).worker_id, 100 * rng.lognormvariate(-0.5, 1.0))
            for i in range(300)
        )
        looks = [0]

        def stop(looks: list[int] = looks) -> bool:
            looks[0] += 1
            return looks[0] > 20_000

        strategies.get("balanced")(PlanInput(leases, crew, stop=stop))
        assert looks[0] < 20_000

"""The cost of a shard is found in the workers' figures."""

from __future__ import annotations

import random

import pytest

from kcl_pipeline.planning.cost import CostModel, WorkerSample, fit


def samples(count: int, *, seed: int = 1) -> list[WorkerSample]:
    rng = random.Random(seed)
    rates = [rng.uniform(1_000, 5_000) for _ in range(count)]
    return [WorkerSample(4.0 + 0.006 * kbps + rng.uniform(-1, 1), kbps, 20) for kbps in rates]


def test_the_slope_and_the_idle_process_are_found() -> None:
    model = fit(samples(50))
    assert model.per_kbps == pytest.approx(0.006, rel=0.15)
    assert model.per_lease == 0.0
    assert 0 <= model.idle_percentage < 10


def test_fallbacks_in_order() -> None:
    two = samples(2)
    of_two = sum(one.cpu_percentage for one in two) / sum(one.throughput_kbps for one in two)
    assert fit(two) == CostModel(0.0, of_two, 0.0)
    same = [WorkerSample(40.0 + w, 1_000.0, 10) for w in range(10)]
    assert fit(same).idle_percentage == fit(same).per_lease == 0.0
    assert fit(same).per_kbps * 100.0 == pytest.approx(4.45)
    idle = fit([WorkerSample(10.0, 0.0, 5), WorkerSample(30.0, 0.0, 15)])
    assert idle.per_lease == pytest.approx(2.0)
    assert idle.per_kbps == 0.0


def test_the_slope_is_never_negative() -> None:
    rng = random.Random(5)
    rates = [rng.uniform(1_000, 9_000) for _ in range(20)]
    model = fit([WorkerSample(50.0 - 0.002 * kbps, kbps, 5) for kbps in rates])
    assert model.per_kbps >= 0


def test_what_is_not_explained_is_spread_within_a_factor_of_two() -> None:
    model = fit(samples(50))
    assert model.residual_factor(WorkerSample(95.0, 1_000.0, 20)) == 2.0
    assert model.residual_factor(WorkerSample(0.0, 5_000.0, 20)) == 0.5


def test_small_differences_in_bytes_do_not_say_what_a_byte_costs() -> None:
    """Without the penalty on the slope, one per cent of bytes would explain all of the CPU."""
    even = [WorkerSample(40.0 + 2 * step, 1_000.0 + 10 * step, 10) for step in (-1, 0, 1)]
    assert fit(even).idle_percentage > 30.0

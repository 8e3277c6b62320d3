"""The cost of a shard is found in the workers' figures."""

from __future__ import annotations

import random

import pytest

from kcl_pipeline.planning.cost import WorkerSample, fit


def samples(
    count: int, *, seed: int = 1, factor: float = 1.0, name: str = ""
) -> list[WorkerSample]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        kbps, records = rng.uniform(1_000, 5_000), rng.uniform(500, 9_000)
        found.append(
            WorkerSample(name, 4.0 + factor * (0.006 * kbps + 0.003 * records), kbps, records, 20)
        )
    return found


def test_the_slopes_of_bytes_and_records_are_found() -> None:
    model = fit(samples(50))
    assert model.basis == "regression"
    assert model.per_kbps == pytest.approx(0.006, rel=0.15)
    assert model.per_record_per_s == pytest.approx(0.003, rel=0.15)
    assert 0 <= model.idle_percentage < 10


def test_a_slower_class_is_told_apart() -> None:
    model = fit([*samples(30, name="large"), *samples(30, seed=2, factor=2.0, name="small")])
    assert model.factor("small") / model.factor("large") == pytest.approx(2.0, rel=0.2)
    assert model.factor("unseen") == 1.0


def test_a_class_seen_once_hardly_differs() -> None:
    model = fit([*samples(40), *samples(1, seed=3, factor=3.0, name="odd")])
    assert 1.0 < model.factor("odd") < 2.2


def test_fallbacks_in_order() -> None:
    assert fit(samples(2)).basis == "throughput"
    same = [WorkerSample("", 40.0 + w, 1_000.0, None, 10) for w in range(10)]
    assert fit(same).basis == "throughput"
    assert fit(same).lease_percentage(100.0, None) == pytest.approx(4.45)
    idle = fit([WorkerSample("", 10.0, 0.0, None, 5), WorkerSample("", 30.0, 0.0, None, 15)])
    assert idle.basis == "counts"
    assert idle.lease_percentage(0.0, None) == pytest.approx(2.0)


def test_slopes_are_never_negative() -> None:
    rng = random.Random(5)
    odd = [
        WorkerSample("", 50.0 - 0.002 * kbps, kbps, rng.uniform(1, 100), 5)
        for kbps in (rng.uniform(1_000, 9_000) for _ in range(20))
    ]
    model = fit(odd)
    assert model.per_kbps >= 0
    assert model.per_record_per_s >= 0


def test_what_is_not_explained_is_spread_within_a_factor_of_two() -> None:
    model = fit(samples(50))
    assert model.residual_factor(WorkerSample("", 95.0, 1_000.0, 500.0, 20)) == 2.0
    assert model.residual_factor(WorkerSample("", 0.0, 5_000.0, 9_000.0, 20)) == 0.5

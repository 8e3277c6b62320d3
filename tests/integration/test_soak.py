"""The soak's verdict, and a shortened soak of both paths: a leak of a few hundred kilobytes per
batch would be seen.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.soak import arguments, soak
from benchmarks.trends import MIN_SAMPLES, trend, trends


def test_what_warms_up_and_then_wobbles_is_flat() -> None:
    rng = random.Random(1)
    values = [min(100 + 4 * i, 200) + rng.uniform(-8, 8) for i in range(100)]
    found = trend(values, 24)
    assert found.flat
    assert (found.first, found.last) == (pytest.approx(200, abs=8), pytest.approx(200, abs=8))


@pytest.mark.parametrize(
    ("batches", "kilobytes_per_batch", "flat"),
    [(2000, 10, True), (2000, 40, False), (100, 1000, False), (100, 100, True)],
)
def test_a_planted_leak_is_seen_from_the_stated_limit_on(
    batches: int, kilobytes_per_batch: float, *, flat: bool
) -> None:
    values = [200 + batches / 100 * i * kilobytes_per_batch / 1000 for i in range(100)]
    assert trend(values, 24).flat is flat
    assert trend(values[::-1], 24).flat, "memory that is freed is no leak"


def test_one_figure_that_grows_is_found_among_flat_ones() -> None:
    samples = [
        {"driver_mb": 300.0, "driver_files": 20.0, "jvm_threads": 60.0 + i} for i in range(40)
    ]
    found = trends(samples, 24)
    assert {name: one.flat for name, one in found.items()} == {
        "driver_mb": True,
        "driver_files": True,
        "jvm_threads": False,
    }
    assert trends(
        [sample | {"driver_files": 20.0 + i / 10} for i, sample in enumerate(samples)], 24
    )["driver_files"].flat


def test_too_few_samples_are_no_verdict() -> None:
    assert trend([1.0] * MIN_SAMPLES, 1).flat
    with pytest.raises(ValueError, match="too few"):
        trend([1.0] * (MIN_SAMPLES - 1), 1)


@pytest.mark.processes
def test_the_arrow_path_is_flat_over_sixty_batches() -> None:
    result = soak("arrow", arguments(["--batches", "60", "--limit-mb", "40"]))
    memory = result["rss_mb"]["driver_mb"]
    assert memory["last"] - memory["first"] <= memory["limit"], result["rss_mb"]
    assert result["counts"]["driver_files"]["flat"], result["counts"]
    assert len(result["samples"]) == 60


@pytest.mark.processes
def test_a_worker_that_leaks_is_found() -> None:
    result = soak("arrow", arguments(["--batches", "40", "--limit-mb", "40", "--leak-kb", "6000"]))
    assert not result["flat"]
    assert not result["rss_mb"]["driver_mb"]["flat"]


@pytest.mark.processes
@pytest.mark.spark
@pytest.mark.long
def test_spark_is_flat_over_thirty_batches() -> None:
    result = soak("spark", arguments(["--batches", "30", "--limit-mb", "60"]))
    assert set(result["rss_mb"]) == {"driver_mb", "jvm_mb", "jvm_heap_mb", "python_workers_mb"}
    assert all(one["flat"] for one in result["rss_mb"].values()), result["rss_mb"]
    assert all(sample["python_workers_mb"] > 0 for sample in result["samples"][-10:])

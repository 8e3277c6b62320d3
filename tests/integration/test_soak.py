"""The soak's verdict, and a shortened soak of both paths: a leak of a few hundred kilobytes per
batch would be seen.
"""

from __future__ import annotations

import mmap
import os
import random

import pytest

from benchmarks.resources import memory_file_bytes
from benchmarks.soak import arguments, soak
from benchmarks.soak_minutes import judged, soak_for_minutes
from benchmarks.trends import MIN_SAMPLES, slope, trend, trends


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


def test_a_slope_is_the_growth_per_unit() -> None:
    assert slope([(0.5 * n, 100 + 3 * n) for n in range(20)]) == pytest.approx(6)
    rng = random.Random(1)
    wobbling = [(n / 12, 300 + 0.5 * n / 12 + rng.uniform(-2, 2)) for n in range(120)]
    assert slope(wobbling) == pytest.approx(0.5, abs=0.2)


def test_the_warm_up_is_no_growth_per_minute() -> None:
    """Ten minutes that grow in the first quarter, and a heap that grows always."""
    samples = [
        {
            "minute": n / 12,
            "batches": 2.0 * n,
            "records": 100.0 * n,
            "driver_mb": 200 + min(n, 30) + (n / 12 if n > 30 else 0),
            "driver_files": 30.0,
        }
        for n in range(120)
    ]
    found = judged(samples, [(1.25 * n, 80 + 10 * n) for n in range(8)], 24)
    assert found["mb_per_minute"] == {"driver_mb": pytest.approx(1, abs=0.1), "jvm_heap_mb": 8.0}
    assert (found["batches"], found["records"]) == (238, 11_900)
    assert found["rss_mb"]["driver_mb"]["flat"]
    assert not found["rss_mb"]["jvm_heap_mb"]["flat"]
    assert not found["flat"]


def test_memory_files_count_once_while_they_are_open_or_mapped() -> None:
    before = memory_file_bytes([os.getpid()])
    file = os.memfd_create("records")
    os.posix_fallocate(file, 0, 2**20)
    mapped = mmap.mmap(file, 2**20)
    assert memory_file_bytes([os.getpid(), os.getpid()]) == before + 2**20
    os.close(file)
    assert memory_file_bytes([os.getpid()]) == before + 2**20, "it is mapped"
    mapped.close()
    assert memory_file_bytes([os.getpid()]) == before


@pytest.mark.processes
@pytest.mark.long  # the verdict on such samples is above, and a worker's samples are below
def test_a_worker_under_steady_load_is_measured() -> None:
    result = soak_for_minutes("arrow", 0.2, 40)
    assert len(result["samples"]) == 24
    assert result["records"] > 1_000
    assert set(result["mb_per_minute"]) == {"driver_mb"}
    assert result["counts"]["driver_files"]["flat"], result["counts"]


@pytest.mark.processes
@pytest.mark.parametrize("batches", [30, pytest.param(60, marks=pytest.mark.long)])
def test_the_arrow_path_is_flat(batches: int) -> None:
    result = soak("arrow", arguments(["--batches", str(batches), "--limit-mb", "40"]))
    memory = result["rss_mb"]["driver_mb"]
    assert memory["last"] - memory["first"] <= memory["limit"], result["rss_mb"]
    assert result["counts"]["driver_files"]["flat"], result["counts"]
    assert result["counts"]["driver_sockets"]["flat"], result["counts"]
    assert len(result["samples"]) == batches


@pytest.mark.processes
@pytest.mark.long  # the verdict on such samples is above
def test_a_worker_that_leaks_is_found() -> None:
    result = soak("arrow", arguments(["--batches", "40", "--limit-mb", "40", "--leak-kb", "6000"]))
    assert not result["flat"]
    assert not result["rss_mb"]["driver_mb"]["flat"]


@pytest.mark.processes
@pytest.mark.spark
@pytest.mark.long
def test_spark_is_flat_over_thirty_batches() -> None:
    result = soak("spark", arguments(["--batches", "30", "--limit-mb", "60"]))
    assert set(result["rss_mb"]) == {
        "driver_mb",
        "jvm_mb",
        "jvm_heap_mb",
        "python_workers_mb",
        "memory_files_mb",
    }
    assert all(one["flat"] for one in result["rss_mb"].values()), result["rss_mb"]
    assert all(sample["python_workers_mb"] > 0 for sample in result["samples"][-10:])

"""Decide whether the values of a long run are flat."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_SAMPLES = 8
LIMIT_SHARE = 0.05
LIMIT_COUNT = 4
LIMIT_POOL = 64
LIMIT_SOCKETS = 16
COUNT_LIMITS = {
    "driver_threads": LIMIT_COUNT,
    "driver_files": LIMIT_COUNT,
    "driver_sockets": LIMIT_SOCKETS,
    "delta_threads": LIMIT_POOL,
    "jvm_threads": LIMIT_COUNT,
    "jvm_files": LIMIT_COUNT,
}


@dataclass(frozen=True)
class Trend:
    """Medians of one value in the second and in the last quarter, and the permitted growth."""

    first: float
    last: float
    limit: float
    flat: bool


def trend(values: Sequence[float], smallest_limit: float) -> Trend:
    """Return the trend of one value in its own unit.

    Raises:
        ValueError: There are fewer than two values per quarter.
    """
    if len(values) < MIN_SAMPLES:
        raise ValueError(f"{len(values)} samples are too few to tell; {MIN_SAMPLES} are needed")
    quarter = len(values) // 4
    first, last = (
        statistics.median(values[quarter : 2 * quarter]),
        statistics.median(values[-quarter:]),
    )
    limit = max(first * LIMIT_SHARE, smallest_limit)
    return Trend(round(first, 1), round(last, 1), round(limit, 1), last - first <= limit)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth per unit of time of pairs of time and value, by least squares."""
    times, values = zip(*points, strict=True)
    return statistics.linear_regression(times, values).slope


def trends(samples: Sequence[Mapping[str, float]], limit_mb: float) -> dict[str, Trend]:
    """Return the trends of all values of the samples."""
    return {
        name: trend([sample[name] for sample in samples], COUNT_LIMITS.get(name, limit_mb))
        for name in samples[0]
    }

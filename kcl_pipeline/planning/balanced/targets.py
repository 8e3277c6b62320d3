"""Compute the utilization that a plan aims for, from lower bounds.

A lease is indivisible, so the dead-band cannot always be reached. Two lower bounds are computed
before the search:

- *pigeonhole*: at utilization T a worker of capacity c takes at most `floor(T c / s)` leases of
  load s or more; if these numbers do not add up to the number of such leases, no assignment reaches
  T (500 equal leases on 200 workers: T is at least 3 / 2.5);
- *oversized*: a lease above the limit of the largest worker exceeds every worker alone. Its host
  has a higher limit (the lease plus `OVERSIZED_SLACK`), so that the other workers are balanced in
  spite of one hot shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kcl_pipeline.planning.balanced.problem import EPSILON, Problem
from kcl_pipeline.planning.balanced.score import heavy_for_all

OVERSIZED_SLACK = 0.02
_MOST_STEPS = 40


@dataclass(slots=True)
class Targets:
    """The target utilization `rest` of other workers, and the oversized leases, heaviest first."""

    rest: float
    oversized: list[int]


def size(problem: Problem, lease: int) -> float:
    """Return the load of a lease in its dominant resource, in fair shares."""
    return max(loads[lease] for loads in problem.loads)


def compute(problem: Problem) -> Targets:
    """Return the targets of a problem. They are lower bounds: no assignment is better."""
    target = problem.target
    oversized = sorted(heavy_for_all(problem), key=lambda i: (-size(problem, i), i))
    if len(oversized) >= len(problem.workers):
        oversized = []
    rest = target
    excluded = set(oversized)
    for loads, capacities in zip(problem.loads, problem.capacities, strict=True):
        others = sorted(
            (load for i, load in enumerate(loads) if i not in excluded and load > 0), reverse=True
        )
        # Oversized leases take the largest workers in the case most favourable to the rest only if
        # those are no larger: keep the largest for the bound.
        remaining = sorted(capacities, reverse=True)[: len(capacities) - len(oversized)]
        rest = max(rest, _pigeonhole(others, remaining, rest))
    return Targets(rest, oversized)


def _pigeonhole(loads: list[float], capacities: list[float], at_least: float) -> float:
    """Return the smallest utilization, at least `at_least`, that counting does not exclude.

    `loads` are sorted, heaviest first.
    """
    classes = Counter(capacities)
    best = at_least
    workers = len(capacities)
    for step in range(1, _MOST_STEPS):
        rank = step * workers
        if rank >= len(loads):
            break
        best = _utilization_for(classes, loads[rank], rank + 1, best)
    if loads:
        best = _utilization_for(classes, loads[-1], len(loads), best)
        best = _utilization_for(classes, loads[0], 1, best)
    return best


def _utilization_for(
    classes: Mapping[float, int], load: float, leases: int, at_least: float
) -> float:
    """Return the smallest T >= at_least at which `leases` of `load` each fit."""

    def fitting(utilization: float) -> int:
        return sum(
            count * int(utilization * capacity / load + EPSILON)
            for capacity, count in classes.items()
        )

    if (
        load * leases <= EPSILON
        or leases > 1_000 * sum(classes.values())
        or fitting(at_least) >= leases
    ):
        return at_least
    low, high = at_least, at_least
    while fitting(high) < leases:
        low, high = high, high * 2
    while high - low > EPSILON * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fitting(middle) >= leases else (middle, high)
    return high * (1 + 100 * EPSILON)

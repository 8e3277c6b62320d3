"""Compute the utilization that a plan aims for, from lower bounds.

A lease is indivisible, so the dead-band is not always in reach. Two lower bounds say so before
anything is tried:

- *pigeonhole*: at utilization T a worker of capacity c takes at most `floor(T c / s)` leases of
  load s or more; if these numbers do not add up to the number of such leases, no assignment reaches
  T (500 equal leases on 200 workers: T is at least 3 / 2.5);
- *giants*: a lease heavier than the largest worker's limit is alone too much for any worker. Its
  host is excused (limit: the giant plus `GIANT_SLACK`), everybody else is not: one hot shard is no
  reason to leave the rest of the fleet uneven.
"""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.planning.balanced.problem import EPSILON, Problem

GIANT_SLACK = 0.02
_MOST_STEPS = 40


@dataclass(slots=True)
class Targets:
    """`rest`: utilization aimed for on workers without a giant. `giants`: lease indices, heaviest
    first.
    """

    rest: float
    giants: list[int]


def size(problem: Problem, lease: int) -> float:
    """The load of a lease in its dominant resource, in fair shares of a worker of mean capacity."""
    return max(loads[lease] for loads in problem.loads)


def compute(problem: Problem) -> Targets:
    """Targets of this problem; lower bounds only, so the best assignment may be worse, never
    better.
    """
    target = problem.target
    top = [max(capacities) for capacities in problem.capacities]
    giants = [
        i
        for i in range(len(problem.leases))
        if any(
            loads[i] > target * most + EPSILON
            for loads, most in zip(problem.loads, top, strict=True)
        )
    ]
    giants.sort(key=lambda i: (-size(problem, i), i))
    if len(giants) >= len(problem.workers):
        giants = []
    rest = target
    excluded = set(giants)
    for loads, capacities in zip(problem.loads, problem.capacities, strict=True):
        others = sorted(
            (load for i, load in enumerate(loads) if i not in excluded and load > 0), reverse=True
        )
        # Giants take the largest workers in the case most favourable to the rest only if those are
        # no larger: keep the largest for the bound.
        remaining = sorted(capacities, reverse=True)[: len(capacities) - len(giants)]
        rest = max(rest, _pigeonhole(others, remaining, rest))
    return Targets(rest, giants)


def _pigeonhole(loads: list[float], capacities: list[float], at_least: float) -> float:
    """The smallest utilization, not below `at_least`, that no counting argument excludes.

    `loads` heaviest first.
    """
    classes: dict[float, int] = {}
    for capacity in capacities:
        classes[capacity] = classes.get(capacity, 0) + 1
    best = at_least
    workers = len(capacities)
    for step in range(1, _MOST_STEPS):
        rank = step * workers
        if rank >= len(loads):
            break
        best = _enough_room(classes, loads[rank], rank + 1, best)
    if loads:
        best = _enough_room(classes, loads[-1], len(loads), best)
        best = _enough_room(classes, loads[0], 1, best)
    return best


def _enough_room(classes: dict[float, int], load: float, leases: int, at_least: float) -> float:
    """Smallest T >= at_least with room for `leases` of `load` each."""

    def room(utilization: float) -> int:
        return sum(
            count * int(utilization * capacity / load + EPSILON)
            for capacity, count in classes.items()
        )

    if (
        load * leases <= EPSILON
        or leases > 1_000 * sum(classes.values())
        or room(at_least) >= leases
    ):
        return at_least
    low, high = at_least, at_least
    while room(high) < leases:
        low, high = high, high * 2
    while high - low > EPSILON * high:
        middle = (low + high) / 2
        low, high = (low, middle) if room(middle) >= leases else (middle, high)
    return high * (1 + 100 * EPSILON)

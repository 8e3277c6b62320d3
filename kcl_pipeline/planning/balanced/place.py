"""Step 1 of the heuristic: assign leases without an owner, heaviest first."""

from __future__ import annotations

import heapq
import math

from kcl_pipeline.planning.balanced.assignment import Assignment
from kcl_pipeline.planning.balanced.problem import EPSILON

_MOST_BUCKETS = 48
_OVERHEAD = 1e-3
"""An unfinished lease counts this part of a mean lease on top of its load, so that leases without
load are spread too.
"""
_FINISHED = 1e-3
"""Part of that overhead which a finished lease counts: it only decides between equal workers."""


def place(state: Assignment, leases: list[int]) -> list[int]:
    """Assign leases without an owner to workers, within the caps.

    A lease goes to the worker with the lowest utilization afterwards; among equal workers, to one
    of the least loaded group.

    Returns:
        Leases that the caps do not allow on any worker.
    """
    problem = state.problem
    overhead = _OVERHEAD * math.fsum(state.sizes) / max(len(state.sizes), 1) + EPSILON
    buckets = _buckets(state, overhead)
    spilled: list[int] = []
    # One bucket holds workers of one group and capacity: within it the emptiest is best for any
    # lease, so only the tops are compared.
    for i in sorted(leases, key=lambda i: (-state.sizes[i], problem.leases[i].lease_key)):
        refused: list[tuple[list[tuple[float, int]], tuple[float, int]]] = []
        chosen = -1
        while True:
            heap = min(
                (heap for heap in buckets if heap),
                key=lambda heap: _after(state, heap[0], i),
                default=None,
            )
            if heap is None:
                break
            entry = heapq.heappop(heap)
            if state.fits_hard(i, entry[1]):
                chosen = entry[1]
                state.move(i, chosen)
                heapq.heappush(heap, (_filled(state, chosen, overhead), chosen))
                break
            refused.append((heap, entry))
        for heap, entry in refused:
            heapq.heappush(heap, entry)
        if chosen < 0:
            spilled.append(i)
    return spilled


def _filled(state: Assignment, w: int, overhead: float) -> float:
    extra = overhead * (state.open[w] + _FINISHED * (state.count[w] - state.open[w]))
    return max((state.load[r][w] + extra) / state.problem.capacities[r][w] for r in state.resources)


def _after(state: Assignment, entry: tuple[float, int], i: int) -> tuple[float, float, int]:
    filled, w = entry
    problem = state.problem
    group = problem.group_of[w]
    if len(state.resources) == 1:
        after = filled + state.loads[0][i] / problem.capacities[0][w]
        in_group = state.group_load[0][group] / problem.group_capacities[0][group]
    else:
        after = max(
            (state.load[r][w] + state.loads[r][i]) / problem.capacities[r][w]
            for r in state.resources
        )
        in_group = max(
            state.group_load[r][group] / problem.group_capacities[r][group] for r in state.resources
        )
    return round(after, 9), round(in_group, 9), w


def _buckets(state: Assignment, overhead: float) -> list[list[tuple[float, int]]]:
    """Heaps of (filling, worker).

    Too many kinds of workers are lumped together, by group first, then by capacity.
    """
    problem = state.problem
    kinds = [
        (problem.group_of[w], tuple(row[w] for row in problem.capacities))
        for w in range(len(state.count))
    ]
    if len(set(kinds)) > _MOST_BUCKETS:
        kinds = [(0, capacities) for _, capacities in kinds]
    if len(set(kinds)) > _MOST_BUCKETS:
        kinds = [(0, (float(round(4 * math.log2(capacities[0]))),)) for _, capacities in kinds]
    heaps: dict[tuple[int, tuple[float, ...]], list[tuple[float, int]]] = {}
    for w, kind in enumerate(kinds):
        heaps.setdefault(kind, []).append((_filled(state, w, overhead), w))
    for heap in heaps.values():
        heapq.heapify(heap)
    return list(heaps.values())

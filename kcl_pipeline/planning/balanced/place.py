"""Step 1 of the heuristic: leases without an owner go where the most room is, heaviest first."""

from __future__ import annotations

import heapq
import math

from kcl_pipeline.planning.balanced.board import Board
from kcl_pipeline.planning.balanced.problem import EPSILON

_MOST_BUCKETS = 48
_OVERHEAD = 1e-3
"""A lease counts this part of a mean lease on top of its load, so that leases without load are
spread too.
"""


def place(board: Board, leases: list[int]) -> list[int]:
    """Give `leases` (without owner) to workers that the caps allow; returns those that nobody may
    take.

    The worker with the lowest utilization afterwards takes a lease; among equals, one of the least
    loaded group.
    """
    problem = board.problem
    overhead = _OVERHEAD * math.fsum(board.sizes) / max(len(board.sizes), 1) + EPSILON
    buckets = _buckets(board, overhead)
    spilled: list[int] = []
    # One bucket holds workers of one group and capacity: within it the emptiest is best for any
    # lease, so only the tops are compared.
    for i in sorted(leases, key=lambda i: (-board.sizes[i], problem.leases[i].lease_key)):
        refused: list[tuple[list[tuple[float, int]], tuple[float, int]]] = []
        chosen = -1
        while True:
            heap = min(
                (heap for heap in buckets if heap),
                key=lambda heap: _after(board, heap[0], i),
                default=None,
            )
            if heap is None:
                break
            entry = heapq.heappop(heap)
            if board.fits_hard(i, entry[1]):
                chosen = entry[1]
                board.move(i, chosen)
                heapq.heappush(heap, (_filled(board, chosen, overhead), chosen))
                break
            refused.append((heap, entry))
        for heap, entry in refused:
            heapq.heappush(heap, entry)
        if chosen < 0:
            spilled.append(i)
    return spilled


def _filled(board: Board, w: int, overhead: float) -> float:
    return max(
        (board.load[r][w] + overhead * board.count[w]) / board.problem.capacities[r][w]
        for r in board.resources
    )


def _after(board: Board, entry: tuple[float, int], i: int) -> tuple[float, float, int]:
    filled, w = entry
    problem = board.problem
    group = problem.group_of[w]
    if len(board.resources) == 1:
        after = filled + board.loads[0][i] / problem.capacities[0][w]
        in_group = board.group_load[0][group] / problem.group_capacities[0][group]
    else:
        after = max(
            (board.load[r][w] + board.loads[r][i]) / problem.capacities[r][w]
            for r in board.resources
        )
        in_group = max(
            board.group_load[r][group] / problem.group_capacities[r][group] for r in board.resources
        )
    return round(after, 9), round(in_group, 9), w


def _buckets(board: Board, overhead: float) -> list[list[tuple[float, int]]]:
    """Heaps of (filling, worker).

    Too many kinds of workers are lumped together, by group first, then by capacity.
    """
    problem = board.problem
    kinds = [
        (problem.group_of[w], tuple(row[w] for row in problem.capacities))
        for w in range(len(board.count))
    ]
    if len(set(kinds)) > _MOST_BUCKETS:
        kinds = [(0, capacities) for _, capacities in kinds]
    if len(set(kinds)) > _MOST_BUCKETS:
        kinds = [(0, (float(round(4 * math.log2(capacities[0]))),)) for _, capacities in kinds]
    heaps: dict[tuple[int, tuple[float, ...]], list[tuple[float, int]]] = {}
    for w, kind in enumerate(kinds):
        heaps.setdefault(kind, []).append((_filled(board, w, overhead), w))
    for heap in heaps.values():
        heapq.heapify(heap)
    return list(heaps.values())

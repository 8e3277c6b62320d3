"""Find the best assignment of a small fleet by branch and bound.

There are two searches. The first finds how even the fleet can be (levels one to three of the
objective). It ignores current owners, so equivalent workers are tried once. The second finds the
fewest moves with this evenness, and tries current owners first. Both assign the heaviest leases
first, and cut a branch that is not better than the best known assignment: every component of the
objective only grows while leases are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kcl_pipeline.planning.balanced.problem import EPSILON, Problem
from kcl_pipeline.planning.balanced.score import Score, heavy_for_all, lease_weight, score

EXACT_LEASES = 12
EXACT_WORKERS = 4
_MOST_NODES = 100_000
"""Safety limit. Random cases of the largest size need some thousands."""

_Even = tuple[int, int, float, float, float]
_Cost = tuple[int, float, float, int]


def is_small(problem: Problem) -> bool:
    """Return whether this problem is solved exactly."""
    return sum(problem.free) <= EXACT_LEASES and len(problem.workers) <= EXACT_WORKERS


def solve(problem: Problem, start: Sequence[int]) -> list[int]:
    """Return the best assignment. `start` is a feasible assignment."""
    search = _Search(problem, start)
    search.even()
    search.few()
    return search.best_owner


class _Search:
    def __init__(self, problem: Problem, start: Sequence[int]) -> None:
        self.problem = problem
        self.oversized = heavy_for_all(problem)
        self.resources = range(len(problem.loads))
        self.order = sorted(
            (i for i in range(len(problem.leases)) if problem.free[i]),
            key=lambda i: (
                i not in self.oversized,
                -max(loads[i] for loads in problem.loads),
                tuple(loads[i] for loads in problem.loads),
                problem.home[i],
                i,
            ),
        )
        self.owner = [-1 if problem.free[i] else w for i, w in enumerate(problem.home)]
        self.load = [problem.fixed(r) for r in self.resources]
        self.free_oversized = sum(1 for i in self.order if i in self.oversized)
        self.has_oversized = [0] * len(problem.workers)
        self.count = [0] * len(problem.workers)
        self.lease_weights = [0] * len(problem.workers)
        for i, w in enumerate(self.owner):
            if w >= 0:
                self.count[w] += 1
                self.lease_weights[w] += lease_weight(problem, i)
        for i in self.oversized:
            if self.owner[i] >= 0:
                self.has_oversized[self.owner[i]] += 1
        limits = problem.limits
        self.capped = (
            min(limits.max_leases_for_worker, limits.max_leases_for_group)
            < len(problem.leases) + sum(problem.other_group_leases)
            or min(limits.max_throughput_per_host_kbps, limits.max_throughput_per_group_kbps)
            < math.inf
        )
        self.only_worker_counts = (
            limits.max_leases_for_group >= len(problem.leases) + sum(problem.other_group_leases)
            and min(limits.max_throughput_per_host_kbps, limits.max_throughput_per_group_kbps)
            == math.inf
        )
        self.best_owner = list(start)
        self.best_score = score(problem, start)
        self.nodes = 0

    # How even can it be?

    def even(self) -> None:
        """Run the first search: levels one to three of the objective."""
        self.nodes = 0
        self._even(0, 0)

    def _evenness(self, depth: int) -> tuple[float, float, float]:
        """Return peak, peak without oversized leases and group peak so far, in targets.

        Oversized leases come first: until all have a host, any worker may become one.
        """
        problem = self.problem
        peak = rest = group_peak = 1.0
        for w in range(len(problem.workers)):
            used = (
                max(self.load[r][w] / problem.capacities[r][w] for r in self.resources)
                / problem.target
            )
            peak = max(peak, used)
            if depth >= self.free_oversized and not self.has_oversized[w]:
                rest = max(rest, used)
        if len(problem.groups) > 1:
            for g, target in enumerate(problem.group_targets):
                for r in self.resources:
                    total = sum(
                        load
                        for load, group in zip(self.load[r], problem.group_of, strict=True)
                        if group == g
                    )
                    group_peak = max(group_peak, total / problem.group_capacities[r][g] / target)
        return peak, rest, group_peak

    def _even(self, depth: int, unplaced: int) -> None:
        self.nodes += 1
        known = self.best_score
        peak, rest, group_peak = self._evenness(depth)
        if depth < len(self.order) and (
            self.problem.home[self.order[depth]] >= 0
            or not self.capped
            or unplaced >= known.unplaced
        ):
            # The next lease is assigned (or costs a level that does not improve any more).
            peak = max(peak, self._next_peak(self.order[depth]))
        here = (unplaced, 0, round(peak, 8), round(rest, 8), round(group_peak, 8))
        if here >= _even_part(known) or self.nodes > _MOST_NODES:
            return
        if depth == len(self.order):
            full = score(self.problem, self.owner)
            if _even_part(full) < _even_part(known):
                self.best_score, self.best_owner = full, list(self.owner)
            return
        i = self.order[depth]
        first = self._first_of_alike(depth, same_home=False)
        tried: set[tuple[object, ...]] = set()
        for w in sorted(
            range(first, len(self.problem.workers)),
            key=lambda w: (self.load[0][w] / self.problem.capacities[0][w], w),
        ):
            alike = self._looks(w)
            if not self.capped and first == 0 and alike in tried:
                continue
            tried.add(alike)
            before = self._put(i, w)
            if self._allowed():
                self._even(depth + 1, unplaced)
            self._take(i, w, before)
        if self.capped and self.problem.home[i] < 0:
            self._even(depth + 1, unplaced + 1)

    def _next_peak(self, i: int) -> float:
        problem = self.problem
        lowest = min(
            max(
                (self.load[r][w] + problem.loads[r][i]) / problem.capacities[r][w]
                for r in self.resources
            )
            for w in range(len(problem.workers))
        )
        return lowest / problem.target

    def _looks(self, w: int) -> tuple[object, ...]:
        problem = self.problem
        group_size = sum(1 for g in problem.group_of if g == problem.group_of[w])
        group: object = problem.group_of[w] if len(problem.groups) > 1 and group_size > 1 else -1
        return (
            group,
            *(self.load[r][w] for r in self.resources),
            *(problem.capacities[r][w] for r in self.resources),
            self.has_oversized[w],
        )

    # With how few moves?

    def few(self) -> None:
        """Run the second search: fewest moves, then bytes, then variance, with this evenness."""
        self.nodes = 0
        self.reached = _even_part(self.best_score)
        self._few(0, 0, 0, 0.0)

    def _few(self, depth: int, unplaced: int, moves: int, kbps: float) -> None:
        self.nodes += 1
        peak, rest, group_peak = self._evenness(depth)
        allowed = self.reached
        if (
            self.nodes > _MOST_NODES
            or unplaced > allowed[0]
            or max(round(peak, 8) - allowed[2], round(rest, 8) - allowed[3]) > 0
        ):
            return
        if round(group_peak, 8) > allowed[4]:
            return
        known = _cost_part(self.best_score)
        here = (
            moves + self._still_to_leave(depth),
            round(kbps, 6),
            round(self._variance(), 8),
            sum(number * number for number in self.lease_weights),
        )
        if here >= known:
            return
        if depth == len(self.order):
            full = score(self.problem, self.owner)
            if full < self.best_score:
                self.best_score, self.best_owner = full, list(self.owner)
            return
        i = self.order[depth]
        home = self.problem.home[i]
        first = self._first_of_alike(depth, same_home=True)
        choices = [w for w in range(first, len(self.problem.workers)) if w != home]
        if home >= first:
            choices.insert(0, home)
        for w in choices:
            before = self._put(i, w)
            moved = w != home
            if self._allowed():
                self._few(
                    depth + 1,
                    unplaced,
                    moves + moved,
                    kbps + (self.problem.kbps[i] if moved and home >= 0 else 0.0),
                )
            self._take(i, w, before)
        if self.capped and home < 0:
            self._few(depth + 1, unplaced + 1, moves, kbps)

    def _still_to_leave(self, depth: int) -> int:
        """Return a lower bound of the moves of undecided leases, per worker, heaviest first."""
        problem = self.problem
        leave = 0
        for w in range(len(problem.workers)):
            if self.has_oversized[w]:
                continue
            most = 0
            for r in self.resources:
                mine = [problem.loads[r][i] for i in self.order[depth:] if problem.home[i] == w]
                if any(i in self.oversized for i in self.order[depth:]):
                    continue
                excess = (
                    self.load[r][w]
                    + sum(mine)
                    - self.reached[3] * problem.target * problem.capacities[r][w] * (1 + 1e-7)
                )
                mine.sort(reverse=True)
                k = 0
                while excess > EPSILON and k < len(mine):
                    excess -= mine[k]
                    k += 1
                most = max(most, k)
            leave += most
        return leave + sum(1 for i in self.order[depth:] if problem.home[i] < 0 and not self.capped)

    def _variance(self) -> float:
        return sum(
            load**2 / capacity
            for r in self.resources
            for load, capacity in zip(self.load[r], self.problem.capacities[r], strict=True)
        )

    # Both

    def _first_of_alike(self, depth: int, *, same_home: bool) -> int:
        """Return the first worker to try. Of equal leases, the earlier has the lower worker."""
        if depth == 0:
            return 0
        problem, i, before = self.problem, self.order[depth], self.order[depth - 1]
        same = (
            all(loads[i] == loads[before] for loads in problem.loads)
            and problem.kbps[i] == problem.kbps[before]
            and problem.leases[i].ended == problem.leases[before].ended
        )
        same = same and (i in self.oversized) == (before in self.oversized)
        if same and (problem.home[i] == problem.home[before] or not (same_home or self.capped)):
            # If one of them cannot be assigned, the others cannot either.
            return self.owner[before] if self.owner[before] >= 0 else len(problem.workers)
        return 0

    def _allowed(self) -> bool:
        """Return whether all workers and groups that receive a lease are within their caps."""
        if not self.capped or (
            self.only_worker_counts and max(self.count) <= self.problem.limits.max_leases_for_worker
        ):
            return True
        return not breaks_caps(self.problem, self.owner)

    def _put(self, i: int, w: int) -> list[float]:
        """Assign a lease to a worker; return its former loads, to restore them exactly."""
        before = [load[w] for load in self.load]
        self.owner[i] = w
        self.count[w] += 1
        self.lease_weights[w] += lease_weight(self.problem, i)
        self.has_oversized[w] += i in self.oversized
        for r in self.resources:
            self.load[r][w] += self.problem.loads[r][i]
        return before

    def _take(self, i: int, w: int, before: list[float]) -> None:
        self.owner[i] = -1
        self.count[w] -= 1
        self.lease_weights[w] -= lease_weight(self.problem, i)
        self.has_oversized[w] -= i in self.oversized
        for r in self.resources:
            self.load[r][w] = before[r]


def breaks_caps(problem: Problem, owner: Sequence[int]) -> bool:
    """Return whether a worker or group receives leases that its caps do not allow.

    Leases without traffic do not count for a throughput cap.
    """
    limits = problem.limits
    heavy = [
        i for i, w in enumerate(owner) if w >= 0 and w != problem.home[i] and problem.kbps[i] > 0
    ]
    for w in {w for i, w in enumerate(owner) if w >= 0 and w != problem.home[i]}:
        mine = [i for i, v in enumerate(owner) if v == w]
        busy = [problem.kbps[i] for i in mine if problem.kbps[i] > 0]
        if len(mine) > limits.max_leases_for_worker or (
            any(owner[i] == w for i in heavy)
            and len(busy) > 1
            and sum(busy) > limits.max_throughput_per_host_kbps + EPSILON
        ):
            return True
    group_of = problem.group_of
    for g in {
        group_of[w]
        for i, w in enumerate(owner)
        if w >= 0 and (problem.home[i] < 0 or group_of[problem.home[i]] != group_of[w])
    }:
        mine = [i for i, v in enumerate(owner) if v >= 0 and group_of[v] == g]
        busy = [problem.kbps[i] for i in mine if problem.kbps[i] > 0]
        other = problem.other_group_kbps[g]
        if len(mine) + problem.other_group_leases[g] > limits.max_leases_for_group:
            return True
        if (
            any(group_of[owner[i]] == g for i in heavy)
            and len(busy) + (other > 0) > 1
            and sum(busy) + other > limits.max_throughput_per_group_kbps + EPSILON
        ):
            return True
    return False


def _even_part(known: Score) -> _Even:
    return (
        known.unplaced,
        known.violations,
        known.peak,
        known.peak_without_oversized,
        known.group_peak,
    )


def _cost_part(known: Score) -> _Cost:
    return known.moves, known.moved_kbps, known.variance, known.count_squares

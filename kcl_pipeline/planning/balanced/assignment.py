"""A mutable assignment of leases to workers, with loads, limits and capacity left."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import chain
from typing import Final

from kcl_pipeline.planning.balanced.problem import EPSILON, Problem
from kcl_pipeline.planning.balanced.targets import OVERSIZED_SLACK, Targets, size

_PROBES: Final = 64
"""Number of workers that are tried for a lease (our own limit)."""


class Assignment:
    """A mutable assignment. Loads are in fair shares, indices are those of the problem.

    `count[w]` is the number of all leases of a worker, for the caps. `open[w]` is the number of
    unfinished ones, for everything that shares out leases by number.
    """

    def __init__(self, problem: Problem, targets: Targets, rest: float) -> None:
        self.problem = problem
        self.targets = targets
        # Pairs that may still be tried for an exchange. Limits the time if the target cannot be
        # reached.
        self.tries = 4_000 + 2 * len(problem.leases)
        self.loads = problem.loads
        self.resources = range(len(problem.loads))
        self.sizes = (
            [size(problem, i) for i in range(len(problem.leases))]
            if len(problem.loads) > 1
            else problem.loads[0]
        )
        self.oversized = set(targets.oversized)
        self.owner = list(problem.home)
        workers = len(problem.workers)
        self.load = [list(base) for base in problem.base]
        self.kbps = [0.0] * workers
        self.count = [0] * workers
        self.open = [0] * workers
        self.held: list[list[list[tuple[float, int]]]] = [
            [[] for _ in range(workers)] for _ in self.resources
        ]
        self.fixed = [problem.fixed(r) for r in self.resources]
        groups = len(problem.groups)
        self.group_load = [[0.0] * groups for _ in self.resources]
        self.group_kbps = list(problem.other_group_kbps)
        self.group_count = list(problem.other_group_leases)
        for i, w in enumerate(self.owner):
            if w >= 0:
                self._add(i, w, sort=False)
        for by_worker in self.held:
            for held in by_worker:
                held.sort()
        for r in self.resources:
            for w in range(workers):
                self.group_load[r][problem.group_of[w]] += problem.base[r][w]
        self.has_kbps_limit = (
            problem.limits.max_throughput_per_host_kbps < math.inf
            or problem.limits.max_throughput_per_group_kbps < math.inf
        )
        self.limit: list[list[float]] = []
        self.plain_limit: list[list[float]] = []
        self.group_limit: list[list[float]] = []
        self.set_limits(rest)

    def set_limits(self, rest: float) -> None:
        """Set the limit of every worker to utilization `rest`.

        The limit is higher for the host of an oversized lease, and for load that cannot move.
        """
        problem = self.problem
        # Slightly below, so that sums in another order are not above.
        self.plain_limit = [
            [
                max(rest * (1 - EPSILON) * capacity, (1 + OVERSIZED_SLACK) * fixed)
                for capacity, fixed in zip(capacities, fixed_of, strict=True)
            ]
            for capacities, fixed_of in zip(problem.capacities, self.fixed, strict=True)
        ]
        self.limit = [list(limits) for limits in self.plain_limit]
        # Groups may be as uneven as workers have to be. With an oversized lease groups have no
        # limit: the other workers of its group would be emptied for it.
        targets = [target + max(rest - self.targets.rest, 0.0) for target in problem.group_targets]
        self.group_limit = [
            [target * capacity for target, capacity in zip(targets, capacities, strict=True)]
            if len(problem.groups) > 1 and not self.oversized
            else [math.inf] * len(problem.groups)
            for capacities in problem.group_capacities
        ]
        for i in self.oversized:
            if self.owner[i] >= 0:
                self.excuse(i, self.owner[i])
        self.slacks = sorted((self.slack(w), w) for w in range(len(problem.workers)))

    def excuse(self, lease: int, w: int) -> None:
        """Let a worker hold this oversized lease."""
        for r in self.resources:
            self.limit[r][w] = max(self.limit[r][w], (1 + OVERSIZED_SLACK) * self.loads[r][lease])

    def slack(self, w: int) -> float:
        """Return the free capacity in the tightest resource; negative above the limit."""
        if len(self.limit) == 1:
            return self.limit[0][w] - self.load[0][w]
        return min(self.limit[r][w] - self.load[r][w] for r in self.resources)

    def over(self, w: int) -> tuple[float, int]:
        """Return the excess of a worker and its resource; 0 or less if there is none."""
        if len(self.limit) == 1:
            return self.load[0][w] - self.limit[0][w], 0
        return max((self.load[r][w] - self.limit[r][w], r) for r in self.resources)

    def utilization(self, w: int) -> float:
        """Return load over capacity in the most loaded resource."""
        return max(self.load[r][w] / self.problem.capacities[r][w] for r in self.resources)

    def peak(self) -> float:
        """Return the largest utilization of a worker without an oversized lease."""
        hosts = {self.owner[i] for i in self.oversized}
        return max(
            (self.utilization(w) for w in range(len(self.count)) if w not in hosts), default=0.0
        )

    def fits_hard(self, i: int, w: int) -> bool:
        """Return whether the caps of worker and group allow the lease.

        A lease above the throughput cap is allowed on a worker without other load.
        """
        limits = self.problem.limits
        if self.count[w] >= limits.max_leases_for_worker:
            return False
        group, old = self.problem.group_of[w], self.owner[i]
        stays_in_group = old >= 0 and self.problem.group_of[old] == group
        if not stays_in_group and self.group_count[group] >= limits.max_leases_for_group:
            return False
        if not self.has_kbps_limit:
            return True
        kbps = self.problem.kbps[i]
        if (
            self.kbps[w] > 0
            and kbps > 0
            and self.kbps[w] + kbps > limits.max_throughput_per_host_kbps
        ):
            return False
        return (
            stays_in_group
            or kbps == 0
            or self.group_kbps[group] == 0
            or self.group_kbps[group] + kbps <= limits.max_throughput_per_group_kbps
        )

    def fits(self, i: int, w: int) -> bool:
        """Return whether the worker stays within all limits with this lease."""
        for r in self.resources:
            if self.load[r][w] + self.loads[r][i] > self.limit[r][w]:
                return False
        return self.fits_group(i, w) and self.fits_hard(i, w)

    def fits_group(self, i: int, w: int) -> bool:
        """Return whether the group stays within its limit, or already has the lease."""
        groups = self.problem.group_of
        group, old = groups[w], self.owner[i]
        if len(self.problem.groups) == 1 or (old >= 0 and groups[old] == group):
            return True
        return all(
            self.group_load[r][group] + self.loads[r][i] <= self.group_limit[r][group]
            for r in self.resources
        )

    def move(self, i: int, w: int) -> None:
        """Assign the lease to the worker (-1: to none)."""
        old = self.owner[i]
        if old >= 0:
            self._forget_slack(old)
            self._remove(i, old)
            if i in self.oversized:
                for r in self.resources:
                    self.limit[r][old] = self.plain_limit[r][old]
                for other in self.oversized:
                    if self.owner[other] == old and other != i:
                        self.excuse(other, old)
            insort(self.slacks, (self.slack(old), old))
        self.owner[i] = w
        if w >= 0:
            self._forget_slack(w)
            if i in self.oversized:
                self.excuse(i, w)
            self._add(i, w, sort=True)
            insort(self.slacks, (self.slack(w), w))

    def best_fit(self, i: int, *, without: tuple[int, ...] = ()) -> int:
        """Return the worker with the least free capacity that fits the lease; -1 if none does."""
        slacks = self.slacks
        first = bisect_left(slacks, (self.sizes[i], -1))
        tightest = slacks[first : first + _PROBES]
        for _, w in chain(tightest, reversed(slacks[-(_PROBES // 4) :])):
            if w != self.owner[i] and w not in without and self.fits(i, w):
                return w
        return -1

    def _forget_slack(self, w: int) -> None:
        del self.slacks[bisect_left(self.slacks, (self.slack(w), w))]

    def _add(self, i: int, w: int, *, sort: bool) -> None:
        group = self.problem.group_of[w]
        for r in self.resources:
            load = self.loads[r][i]
            self.load[r][w] += load
            self.group_load[r][group] += load
            if self.problem.free[i]:
                if sort:
                    insort(self.held[r][w], (load, i))
                else:
                    self.held[r][w].append((load, i))
        self.kbps[w] += self.problem.kbps[i]
        self.group_kbps[group] += self.problem.kbps[i]
        self.count[w] += 1
        self.open[w] += not self.problem.leases[i].ended
        self.group_count[group] += 1

    def _remove(self, i: int, w: int) -> None:
        group = self.problem.group_of[w]
        for r in self.resources:
            load = self.loads[r][i]
            self.load[r][w] -= load
            self.group_load[r][group] -= load
            if self.problem.free[i]:
                held = self.held[r][w]
                del held[bisect_left(held, (load, i))]
        self.kbps[w] -= self.problem.kbps[i]
        self.group_kbps[group] -= self.problem.kbps[i]
        self.count[w] -= 1
        self.open[w] -= not self.problem.leases[i].ended
        self.group_count[group] -= 1

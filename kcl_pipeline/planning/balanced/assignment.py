"""A mutable assignment of leases to workers, with loads, limits and the capacity that is left."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Final

from kcl_pipeline.planning.balanced.problem import EPSILON, OVERSIZED_SLACK, Problem

_MOST_KINDS: Final = 48
"""Most kinds of workers, by group and capacity, that are compared for each lease that is placed."""
_OVERHEAD: Final = 1e-3
"""An unfinished lease counts this part of a mean lease on top of its load, so that leases without
load are spread too. A finished one counts this part of that.
"""


class Assignment:
    """A mutable assignment. Loads are in fair shares, indices are those of the problem.

    Attributes:
        problem: The problem.
        rest: The utilization up to which a worker is filled.
        owner: Worker of each lease; -1: none.
        sizes: Load of each lease in its dominant resource.
        load: `load[r][w]`.
        limit: `limit[r][w]`. It is above `rest` for a worker with an oversized lease, or with load
            that cannot move. It never exceeds a hard limit.
        held: `held[r][w]`, the leases of a worker that may move, as sorted pairs (load, lease).
        count: Number of leases of each worker, for the hard limits.
        open: Number of unfinished leases of each worker.
    """

    def __init__(self, problem: Problem, rest: float, owner: Iterable[int] | None = None) -> None:
        self.problem = problem
        self.owner = list(problem.home if owner is None else owner)
        self.resources = range(len(problem.loads))
        self.sizes = [max(loads) for loads in zip(*problem.loads, strict=True)]
        self.load = [list(base) for base in problem.base]
        workers, groups = len(problem.workers), len(problem.groups)
        self.count, self.open = [0] * workers, [0] * workers
        self.group_load = [[0.0] * groups for _ in self.resources]
        self.group_count = list(problem.other_group_leases)
        self.held: list[list[list[tuple[float, int]]]] = [
            [[] for _ in range(workers)] for _ in self.resources
        ]
        self._fixed = [problem.fixed(r) for r in self.resources]
        self._hosted: dict[int, int] = {}
        self._oversized = set(problem.oversized)
        for i, w in enumerate(self.owner):
            if w >= 0:
                self._count(i, w, 1)
                if problem.free[i]:
                    for r in self.resources:
                        self.held[r][w].append((problem.loads[r][i], i))
        for row in self.held:
            for held in row:
                held.sort()
        for r in self.resources:
            for w, g in enumerate(problem.group_of):
                self.group_load[r][g] += problem.base[r][w]
        self.set_rest(rest)

    def set_rest(self, rest: float) -> None:
        """Set the utilization up to which workers are filled."""
        problem, self.rest = self.problem, rest
        self.limit = [[0.0] * len(problem.workers) for _ in self.resources]
        self._slack = [0.0] * len(problem.workers)
        self._hosted = {}
        for i in reversed(problem.oversized):
            if self.owner[i] >= 0:
                self._hosted[self.owner[i]] = i
        for w in range(len(problem.workers)):
            self._set_limit(w)
        extra = max(rest - problem.reach, 0.0)
        self.group_limit = [
            [
                min((target + extra) * capacity if problem.balances_groups else math.inf, most)
                for target, capacity, most in zip(
                    problem.group_targets, capacities, hard, strict=True
                )
            ]
            for capacities, hard in zip(problem.group_capacities, problem.group_most, strict=True)
        ]
        # Per group, (free capacity, worker) in order.
        self._rooms: list[list[tuple[float, int]]] = [[] for _ in problem.groups]
        for w, g in enumerate(problem.group_of):
            self._rooms[g].append((self._slack[w], w))
        for room in self._rooms:
            room.sort()

    def over(self, w: int) -> tuple[float, int]:
        """Return the excess of a worker and its resource; 0 or less if there is none."""
        if len(self.limit) == 1:
            return self.load[0][w] - self.limit[0][w], 0
        return max((self.load[r][w] - self.limit[r][w], r) for r in self.resources)

    def utilization(self, w: int) -> float:
        """Return load over capacity in the most loaded resource."""
        return max(self.load[r][w] / self.problem.capacities[r][w] for r in self.resources)

    @property
    def peak(self) -> float:
        """The utilization of the most loaded worker."""
        return max(self.utilization(w) for w in range(len(self.count)))

    def excess(self) -> float:
        """Return the load above the limits, in fair shares."""
        return sum(max(self.over(w)[0], 0.0) for w in range(len(self.count)))

    def group_excess(self) -> float:
        """Return the same of groups."""
        return max(
            self.group_load[r][g] - self.group_limit[r][g]
            for r in self.resources
            for g in range(len(self.group_count))
        )

    def violations(self) -> int:
        """Return how many leases too many workers and groups have, by their hard limits."""
        limits = self.problem.limits
        return sum(max(count - limits.max_leases_for_worker, 0) for count in self.count) + sum(
            max(count - limits.max_leases_for_group, 0) for count in self.group_count
        )

    def unplaced(self) -> list[int]:
        """Return the leases without an owner that could have one."""
        return [i for i, w in enumerate(self.owner) if w < 0 and self.problem.free[i]]

    def changed(self) -> list[int]:
        """Return the leases that have another owner than at the beginning."""
        home = self.problem.home
        return [i for i, w in enumerate(self.owner) if w >= 0 and w != home[i]]

    def fits(self, i: int, w: int) -> bool:
        """Return whether the worker stays within all limits with this lease."""
        if self.count[w] >= self.problem.limits.max_leases_for_worker:
            return False
        for r in self.resources:
            if self.load[r][w] + self.problem.loads[r][i] > self.limit[r][w]:
                return False
        return self.fits_group(i, self.problem.group_of[w])

    def fits_group(self, i: int, g: int) -> bool:
        """Return whether the group stays within its limits, or already has the lease."""
        w = self.owner[i]
        if w >= 0 and self.problem.group_of[w] == g:
            return True
        if self.group_count[g] >= self.problem.limits.max_leases_for_group:
            return False
        return all(
            self.group_load[r][g] + self.problem.loads[r][i] <= self.group_limit[r][g]
            for r in self.resources
        )

    def taker(self, i: int, *, loosest: bool = False, in_other_group: bool = False) -> int:
        """Return the worker with the least free capacity that can take the lease; -1: none can.

        `loosest`: with the most free capacity. `in_other_group`: not in the group that has it.
        """
        best = (math.inf, -1)
        own_group = self.problem.group_of[self.owner[i]] if in_other_group else -1
        for g, room in enumerate(self._rooms):
            if g == own_group or not self.fits_group(i, g):
                continue
            # Two of each, because one of them may be the worker that has the lease.
            first = bisect_left(room, (self.sizes[i], -1))
            tightest = [] if loosest else room[first : first + 2]
            for slack, w in (*tightest, *reversed(room[-2:])):
                if w != self.owner[i] and self.fits(i, w):
                    best = min(best, (-slack if loosest else slack, w))
                    break
        return best[1]

    def largest_slack(self) -> float:
        """Return the free capacity of the worker that has the most."""
        return max(room[-1][0] for room in self._rooms if room)

    def slack(self, w: int) -> float:
        """Return the free capacity of a worker in its tightest resource; negative above it."""
        return self._slack[w]

    def emptiest(self, number: int) -> list[int]:
        """Return the workers with the most free capacity, of each group, the most first."""
        top = [entry for room in self._rooms for entry in room[-number:]]
        return [w for _, w in sorted(top, reverse=True)[:number]]

    def move(self, i: int, w: int) -> None:
        """Assign the lease to the worker (-1: to none)."""
        problem, old = self.problem, self.owner[i]
        self.owner[i] = w
        for worker, sign in ((old, -1), (w, 1)):
            if worker < 0:
                continue
            self._count(i, worker, sign)
            if problem.free[i]:
                for r in self.resources:
                    held, entry = self.held[r][worker], (problem.loads[r][i], i)
                    if sign > 0:
                        insort(held, entry)
                    else:
                        del held[bisect_left(held, entry)]
            room = self._rooms[problem.group_of[worker]]
            del room[bisect_left(room, (self._slack[worker], worker))]
            if i in self._oversized:
                self._host(worker)
            self._set_slack(worker)
            insort(room, (self._slack[worker], worker))

    def release(self, leases: Iterable[int]) -> None:
        """Take leases from their workers. They have no owner then."""
        for i in leases:
            self._count(i, self.owner[i], -1)
            self.owner[i] = -1
        for row in self.held:
            for w, held in enumerate(row):
                row[w] = [entry for entry in held if self.owner[entry[1]] == w]
        self.set_rest(self.rest)

    def _host(self, w: int) -> None:
        self._hosted.pop(w, None)
        heaviest = next((i for i in self.problem.oversized if self.owner[i] == w), None)
        if heaviest is not None:
            self._hosted[w] = heaviest
        self._set_limit(w)

    def _set_limit(self, w: int) -> None:
        hosted, problem = self._hosted.get(w), self.problem
        for r in self.resources:
            alone = self._fixed[r][w]
            if hosted is not None:
                alone = max(alone, problem.loads[r][hosted])
            # Slightly below `rest`, so that sums in another order are not above.
            limit = max(
                self.rest * (1 - EPSILON) * problem.capacities[r][w], (1 + OVERSIZED_SLACK) * alone
            )
            if limit > problem.most[r]:
                limit = max(problem.most[r], alone)
            self.limit[r][w] = limit
        self._set_slack(w)

    def _set_slack(self, w: int) -> None:
        slack = self.limit[0][w] - self.load[0][w]
        for r in self.resources[1:]:
            slack = min(slack, self.limit[r][w] - self.load[r][w])
        if slack > 0 and self.count[w] >= self.problem.limits.max_leases_for_worker:
            slack = 0.0
        self._slack[w] = slack

    def _count(self, i: int, w: int, sign: int) -> None:
        problem, g = self.problem, self.problem.group_of[w]
        for r in self.resources:
            load = sign * problem.loads[r][i]
            self.load[r][w] += load
            self.group_load[r][g] += load
        self.count[w] += sign
        self.open[w] += sign * (not problem.leases[i].ended)
        self.group_count[g] += sign

    # One loop over leases, which reads three counters of a worker.
    def place(  # noqa: C901
        self, leases: Iterable[int], may_go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Give leases without an owner to workers within the hard limits, heaviest first.

        A lease goes to the worker with the lowest utilization afterwards, in a group that stays
        within its limit if there is one; among equal workers to the group with the lowest
        utilization afterwards. A lease that no worker can take stays without an owner.
        """
        problem = self.problem
        overhead = _OVERHEAD * math.fsum(self.sizes) / max(len(self.sizes), 1) + EPSILON

        def filled(w: int) -> float:
            extra = overhead * (self.open[w] + _OVERHEAD * (self.count[w] - self.open[w]))
            used = (self.load[0][w] + extra) / problem.capacities[0][w]
            for r in self.resources[1:]:
                used = max(used, (self.load[r][w] + extra) / problem.capacities[r][w])
            return used

        # Within workers of one group and capacity the emptiest is the best for any lease.
        kinds = [(g, problem.capacities[0][w]) for w, g in enumerate(problem.group_of)]
        if len(set(kinds)) > _MOST_KINDS:
            kinds = [(0, float(round(2 * math.log2(capacity)))) for _, capacity in kinds]
        heaps: dict[tuple[int, float], list[tuple[float, int]]] = {}
        for w, kind in enumerate(kinds):
            heaps.setdefault(kind, []).append((filled(w), w))
        for heap in heaps.values():
            heapq.heapify(heap)

        def after(heap: list[tuple[float, int]], i: int) -> tuple[bool, float, float, int]:
            used, w = heap[0]
            g = problem.group_of[w]
            is_over, then, in_group = False, used, 0.0
            for r in self.resources:
                load, group_load = problem.loads[r][i], self.group_load[r][g]
                if (here := used + load / problem.capacities[r][w]) > then:
                    then = here
                if (share := (group_load + load) / problem.group_capacities[r][g]) > in_group:
                    in_group = share
                if group_load + load > self.group_limit[r][g]:
                    is_over = True
            return is_over, round(then, 9), round(in_group, 9), w

        touched: set[int] = set()
        for i in self._heaviest_first(leases):
            refused: list[tuple[list[tuple[float, int]], tuple[float, int]]] = []
            while may_go_on() and (candidates := [heap for heap in heaps.values() if heap]):
                heap = candidates[0]
                if len(candidates) > 1:
                    heap = min(candidates, key=lambda heap: after(heap, i))
                w = heap[0][1]
                if self.is_allowed(i, w):
                    self.owner[i] = w
                    self._count(i, w, 1)
                    touched.add(w)
                    for r in self.resources:
                        self.held[r][w].append((problem.loads[r][i], i))
                    heapq.heapreplace(heap, (filled(w), w))
                    break
                refused.append((heap, heapq.heappop(heap)))
            for heap, entry in refused:
                heapq.heappush(heap, entry)
        # Order and free capacity follow once for all: there may be very many leases.
        for row in self.held:
            for w in touched:
                row[w].sort()
        if touched:
            self.set_rest(self.rest)

    def _heaviest_first(self, leases: Iterable[int]) -> list[int]:
        """Return the leases in order; if there is not room for all, those that wait longest."""
        most, waiting = self.problem.limits.max_leases_for_worker, sorted(leases)
        room = sum(max(most - count, 0) for count in self.count)
        if room < len(waiting):
            waited = [-lease.waited_seconds for lease in self.problem.leases]
            waiting = sorted(sorted(waiting, key=waited.__getitem__)[:room])
        return sorted(waiting, key=self.sizes.__getitem__, reverse=True)

    def is_allowed(self, i: int, w: int) -> bool:
        """Return whether the hard limits allow the lease.

        A lease above a limit of throughput is allowed where there is no other load.
        """
        problem, g = self.problem, self.problem.group_of[w]
        if (
            self.count[w] >= problem.limits.max_leases_for_worker
            or self.group_count[g] >= problem.limits.max_leases_for_group
        ):
            return False
        for r in self.resources:
            load = problem.loads[r][i]
            if load > 0 and (
                (self.load[r][w] > 0 and self.load[r][w] + load > problem.most[r])
                or (
                    (self.group_load[r][g] > 0 or problem.other_group_leases[g])
                    and self.group_load[r][g] + load > problem.group_most[r][g]
                )
            ):
                return False
        return True

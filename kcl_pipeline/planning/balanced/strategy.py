"""Plan few moves to a fleet that is even within a band (`docs/planning.md`).

1. *Place* leases without an owner, heaviest first, where the utilization is lowest afterwards.
2. *Obey* the hard limits: who is above one gives away the lightest leases.
3. *Spread oversized leases*: at most one per worker.
4. *Empty* workers that have to give many leases: their heaviest ones are placed anew.
5. *Shed*: a worker that is `e` above its limit has to give at least k leases, k counted heaviest
   first. It gives the lightest lease of at least `e / k`, so that k - 1 suffice afterwards, to the
   worker that has the least free capacity afterwards. The greatest `e / k` comes first, because
   heavy leases need large free capacity. If no worker has enough, lighter leases go, or a
   worker takes a heavy one and has to give lighter ones next.
6. If some worker cannot be relieved, all limits rise a little, and step 5 is repeated.
7. *Even groups*: a group above its limit gives the heaviest leases that workers of other groups
   have capacity for, and lighter ones where they have none. If it still is above its limit, its
   heaviest leases are placed anew.
8. *Take back* what fits where it was, and give the others to the workers with most capacity free.

The plan is a function of its input, without randomness. It is cut off by `PlanInput.stop` and by
the churn budget, with the moves that it has then.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Final

from kcl_pipeline.planning.balanced.assignment import Assignment
from kcl_pipeline.planning.balanced.problem import EPSILON, Problem, build
from kcl_pipeline.planning.model import Move, Plan, PlanInput

_MANY: Final = 64
"""A worker that has to give more leases than this gives its heaviest ones at once, so that a plan
that is cut off has relieved it the most.
"""
_STEP: Final = 1.02
"""Factor by which limits rise while a worker cannot be relieved."""
_RECEIVERS: Final = 64
"""Workers that are compared when none has enough capacity free."""
_LIGHTER: Final = 0.7
"""Only leases below this part of a lease's load are moved away for it, so that chains end."""


def plan_balanced(given: PlanInput, name: str, *, measured: bool = True) -> Plan:
    """Return the plan for this input.

    Args:
        given: The input.
        name: Name of the strategy, in the plan.
        measured: Whether loads are throughput and CPU. Otherwise leases are counted.
    """
    problem = build(given, measured=measured)
    if problem is None:
        waiting = sorted(
            lease.lease_key for lease in given.leases if lease.owner is None and lease.movable
        )
        return Plan(name, (), tuple(waiting), ("no worker takes leases",))
    chosen, note = _choose(problem)
    spilled = tuple(problem.leases[i].lease_key for i in chosen.unplaced())
    return Plan(name, _moves(chosen), spilled, (note,))


def _choose(problem: Problem) -> tuple[Assignment, str]:
    """Return the new assignment, and a sentence with the reason."""
    rest = problem.reach
    state = Assignment(problem, rest)
    waiting = state.unplaced()
    state.place(waiting)
    if not problem.limits.balance:
        return state, "this cycle places leases without an owner and does not balance"
    note = f"the most loaded worker is at {state.peak:.3f} of its fair share"
    if problem.mode != "load":
        note = f"leases are counted; {note}"
    if problem.mode == "idle":
        note = f"traffic is negligible: {note}"
    # A fleet with leases to place moves anyway; then it goes to the target at once.
    is_moving = any(state.owner[i] >= 0 and state.sizes[i] > EPSILON for i in waiting)
    patience = 0.0 if is_moving else problem.hysteresis
    if not _is_uneven(state, rest, patience):
        _feed(state)
        return state, f"{note}, which is near enough to the {rest:.3f} in reach"
    excess, group_excess = state.excess(), state.group_excess()
    broken, unplaced = state.violations(), len(state.unplaced())
    search = _Search(state)
    search.run()
    peak = state.peak
    state.set_rest(rest)
    if (
        excess - state.excess() > max(patience / 2, EPSILON)
        or state.violations() < broken
        or len(state.unplaced()) < unplaced
        or group_excess - state.group_excess() > group_excess / 2 > EPSILON
    ):
        end = "; the plan was cut off" if search.is_cut_off else ""
        return state, f"{note}, and goes to {peak:.3f}{end}"
    state = Assignment(problem, rest)
    state.place(waiting)
    _feed(state)
    return state, f"{note}, and no move would help enough"


def _is_uneven(state: Assignment, rest: float, patience: float) -> bool:
    problem = state.problem
    if state.violations() or state.group_excess() > EPSILON:
        return True
    if problem.mode == "idle":
        # Negligible traffic does not predict later traffic: only a worker with few leases counts.
        return min(state.open) <= sum(state.open) // len(state.open) // 2 < max(state.open) - 1
    if len({state.owner[i] for i in problem.oversized}) < len(problem.oversized):
        return True
    state.set_rest(rest + patience)
    excess = state.excess()
    state.set_rest(rest)
    return excess > EPSILON


def _feed(state: Assignment) -> None:
    """Give one lease to every worker that has none, from those with the most.

    An idle process may have the same CPU as one with leases, or the others may be within the band.
    Such a worker would never get leases, and their cost on it would stay unknown.
    """
    givers = [(-count, w) for w, count in enumerate(state.open) if state.held[0][w]]
    heapq.heapify(givers)
    for w in [w for w, count in enumerate(state.open) if not count]:
        if not givers or givers[0][0] > -2:  # noqa: PLR2004 (the last lease stays)
            break
        giver = givers[0][1]
        _, lease = state.held[0][giver][0]
        if state.is_allowed(lease, w):
            state.move(lease, w)
        if state.held[0][giver]:
            heapq.heapreplace(givers, (-state.open[giver], giver))
        else:
            heapq.heappop(givers)


class _Search:
    """The search for an assignment with few moves. It changes `state`."""

    def __init__(self, state: Assignment) -> None:
        self.state = state
        self.problem = state.problem
        budget = self.problem.limits.churn_budget_percentage / 100.0 * len(state.owner)
        self._left = int(budget)
        self.is_cut_off = False
        self._pushed: set[int] = set()

    def run(self) -> None:
        """Take all steps after the first one."""
        self._obey()
        self._spread_oversized()
        self._empty()
        self._relieve()
        if self._leave_groups():
            self._place_anew(self._of_uneven_groups())
        self._relieve()
        self._settle()

    def _relieve(self) -> None:
        """Relieve all workers; raise the limits of all while that is not possible."""
        state, step, left = self.state, _STEP, self._left
        while not self._shed() and not self.is_cut_off:
            workers = range(len(state.count))
            stuck = max((state.utilization(w) for w in workers if state.over(w)[0] > 0), default=0)
            if stuck <= state.rest:  # a hard limit, which does not rise
                break
            # While nothing moves, each step is wider than the one before it.
            step, left = _STEP if self._left < left else step * _STEP, self._left
            state.set_rest(min(state.rest * step, stuck * (1 + 2 * EPSILON)))

    def _move(self, i: int, w: int) -> None:
        self._left -= 1
        self.state.move(i, w)

    def _may_go_on(self) -> bool:
        if self._left <= 0 or self.problem.stop():
            self.is_cut_off = True
        return not self.is_cut_off

    def _obey(self) -> None:
        """Bring workers and groups under their numbers of leases, if others have capacity."""
        state, limits = self.state, self.problem.limits
        for w, g in enumerate(self.problem.group_of):
            for _, i in list(state.held[0][w]):
                if (
                    state.count[w] <= limits.max_leases_for_worker
                    and state.group_count[g] <= limits.max_leases_for_group
                ) or not self._may_go_on():
                    break
                taker = state.taker(i, loosest=True)
                if taker >= 0:
                    self._move(i, taker)

    def _spread_oversized(self) -> None:
        """Give each worker at most one oversized lease: the largest workers, the heavier first."""
        state, problem = self.state, self.problem
        hosts: set[int] = set()
        for i in problem.oversized:
            home = state.owner[i]
            if home in hosts or home < 0 or problem.free[i]:
                free = [
                    w
                    for w in range(len(state.count))
                    if w not in hosts
                    and (w == home or state.count[w] < problem.limits.max_leases_for_worker)
                ]
                if not free:
                    continue
                home = min(
                    free,
                    key=lambda w: (
                        -min(row[w] for row in problem.capacities),
                        w != home,
                        state.load[0][w],
                        w,
                    ),
                )
                if home != state.owner[i] and problem.free[i] and self._may_go_on():
                    self._move(i, home)
            hosts.add(home)

    def _empty(self) -> None:
        """Place the heaviest leases anew of workers that give many."""
        state = self.state
        pool: set[int] = set()
        for w in range(len(state.count)):
            excess, r = state.over(w)
            if excess > 0 and (k := leases_for(state.held[r][w], excess)) > _MANY:
                pool.update(i for _, i in state.held[r][w][-k:])
        chosen = sorted(sorted(pool), key=state.sizes.__getitem__, reverse=True)
        self._place_anew(chosen)

    def _place_anew(self, leases: list[int]) -> None:
        if not leases or not self._may_go_on():
            return
        allowed = leases[: self._left]
        self._left -= len(allowed) - 1
        home = {i: self.state.owner[i] for i in allowed}
        self.state.release(allowed)
        self.state.place(allowed, self._may_go_on)
        for i in self.state.unplaced():
            if i in home:
                self.state.move(i, home[i])

    def _leave_groups(self) -> bool:
        """Move leases out of groups above their limit; return whether one is still above it.

        The heaviest go first that a worker of another group has capacity for. Where none has,
        lighter ones go.
        """
        state, lightest = self.state, math.inf
        while leases := self._of_uneven_groups(lightest):
            refused = math.inf
            for i in sorted(leases, key=state.sizes.__getitem__, reverse=True):
                if not self._may_go_on():
                    return False
                taker = state.taker(i, loosest=True, in_other_group=True)
                if taker >= 0:
                    self._move(i, taker)
                else:
                    refused = state.sizes[i]
            if refused == math.inf:
                break
            lightest = refused
        return state.group_excess() > EPSILON

    def _of_uneven_groups(self, lighter_than: float = math.inf) -> list[int]:
        """Return leases of groups above their limit, the heaviest first, that must leave them."""
        state, problem = self.state, self.problem
        leases: list[int] = []
        for g in range(len(problem.groups)):
            for r in state.resources:
                excess = state.group_load[r][g] - state.group_limit[r][g]
                if excess <= EPSILON:
                    continue
                heap = [
                    (-state.load[r][w] / problem.capacities[r][w], w, held)
                    for w, group in enumerate(problem.group_of)
                    if group == g and (held := self._lighter(r, w, lighter_than))
                ]
                heapq.heapify(heap)
                while excess > EPSILON and heap:
                    used, w, held = heap[0]
                    # The heaviest within the excess, or the lightest above it
                    place = max(bisect_left(held, (excess + EPSILON, -1)) - 1, 0)
                    load, i = held.pop(place)
                    leases.append(i)
                    excess -= load
                    if held:
                        entry = (used + load / problem.capacities[r][w], w, held)
                        heapq.heapreplace(heap, entry)
                    else:
                        heapq.heappop(heap)
        return list(dict.fromkeys(leases))

    def _lighter(self, r: int, w: int, size: float) -> list[tuple[float, int]]:
        # By size, not by the load in `r`: a lease that is refused does not come again.
        sizes = self.state.sizes
        return [entry for entry in self.state.held[r][w] if sizes[entry[1]] < size]

    def _shed(self) -> bool:
        """Relieve workers above their limits; return whether none is left."""
        state = self.state
        heap: list[tuple[float, int]] = []
        pieces: dict[int, tuple[int, int]] = {}
        for w in range(len(state.count)):
            self._queue(heap, pieces, w)
        stuck = False
        while heap and self._may_go_on():
            need, w = heapq.heappop(heap)
            excess, r = state.over(w)
            if excess <= 0:
                continue
            k = pieces[w][0]
            if excess / k < -need - EPSILON:  # the entry is older than a move
                self._queue(heap, pieces, w)
            elif self._give(w, r, excess / k):
                pieces[w] = (max(k - 1, 1), r)
                self._queue(heap, pieces, w)
            elif (pushed := self._push(w, r, excess, k)) >= 0:
                pieces[w] = (max(k - 1, 1), r)
                pieces.pop(pushed, None)
                self._queue(heap, pieces, w)
                self._queue(heap, pieces, pushed)
            elif k < len(state.held[r][w]):
                pieces[w] = (k + 1, r)
                heapq.heappush(heap, (-excess / (k + 1), w))
            else:
                stuck = True
        return not stuck

    def _queue(
        self, heap: list[tuple[float, int]], pieces: dict[int, tuple[int, int]], w: int
    ) -> None:
        """Queue a worker that is over its limit, by the load of the next lease that it gives."""
        excess, r = self.state.over(w)
        held = self.state.held[r][w]
        if excess <= 0 or not held:
            return
        if w not in pieces or pieces[w][1] != r:
            pieces[w] = (leases_for(held, excess), r)
        heapq.heappush(heap, (-excess / pieces[w][0], w))

    def _give(self, w: int, r: int, need: float) -> bool:
        """Move the lightest lease of at least `need` that another worker can take."""
        state, held = self.state, self.state.held[r][w]
        first = bisect_left(held, (need - EPSILON, -1))
        if first == len(held):
            return False
        lease = held[first][1]
        taker = state.taker(lease)
        if taker >= 0:
            self._move(lease, taker)
        return taker >= 0

    def _push(self, w: int, r: int, excess: float, pieces: int) -> int:
        """Move a heavy lease to a worker that can free the capacity by moving lighter ones.

        Only if this needs no more moves than moving leases that fit somewhere. Return the worker,
        which is over its limit now, or -1.
        """
        state, problem = self.state, self.problem
        held = state.held[r][w]
        first = bisect_left(held, (excess / pieces - EPSILON, -1))
        fitting = held[: bisect_left(held, (state.largest_slack(), len(state.owner)))]
        most = len(state.owner)
        if sum(load for load, _ in fitting) >= excess:
            most = leases_for(fitting, excess) - pieces
        best: tuple[int, float, int, int] | None = None
        for load, i in held[first : first + 1]:
            if i in self._pushed:
                continue
            for v in state.emptiest(_RECEIVERS):
                if v == w or not (
                    state.is_allowed(i, v) and state.fits_group(i, problem.group_of[v])
                ):
                    continue
                missing, by = max(
                    (problem.loads[q][i] - state.limit[q][v] + state.load[q][v], q)
                    for q in state.resources
                )
                lighter = state.held[by][v]
                lighter = lighter[: bisect_left(lighter, (_LIGHTER * load, -1))]
                cost = leases_for(lighter, missing)
                if cost <= most and sum(x for x, _ in lighter[-cost:]) >= missing:
                    rank = (cost, missing / max(cost, 1), i, v)
                    best = rank if best is None else min(best, rank)
                    most = best[0]
        if best is None:
            return -1
        self._pushed.add(best[2])
        self._move(best[2], best[3])
        return best[3]

    def _settle(self) -> None:
        """Take back unnecessary moves; then spread the others over the free capacity."""
        state, home = self.state, self.problem.home
        # Sorts are stable, and these leases come in their order.
        for i in sorted(state.changed(), key=state.sizes.__getitem__):
            if home[i] >= 0 and state.fits(i, home[i]):
                state.move(i, home[i])
        for i in sorted(state.changed(), key=state.sizes.__getitem__, reverse=True):
            enough = state.slack(state.owner[i]) + state.sizes[i] + EPSILON
            if i in self.problem.oversized or state.largest_slack() <= enough:
                continue
            w = state.taker(i, loosest=True)
            if w >= 0 and w != home[i] and state.slack(w) > enough:
                state.move(i, w)


def leases_for(held: list[tuple[float, int]], excess: float) -> int:
    """Return how many leases have this load at least, heaviest first; at most all."""
    gone = 0.0
    for k in range(len(held)):
        gone += held[-1 - k][0]
        if gone >= excess - EPSILON:
            return k + 1
    return len(held)


def _moves(state: Assignment) -> tuple[Move, ...]:
    """Return the moves: leases without a living owner first, then those of the most loaded workers.

    The former are sorted by decreasing wait, the latter by decreasing load.
    """
    problem = state.problem
    load = problem.loads_of(problem.home)
    before = problem.utilizations(load)

    def importance(i: int) -> tuple[float, ...]:
        home, size = problem.home[i], state.sizes[i]
        if home < 0:
            return (0, -problem.leases[i].waited_seconds, -size, i)
        return (1, -before[home], -size, i)

    reason = _reasons(state, load, before)
    return tuple(
        Move(
            problem.leases[i].lease_key,
            problem.leases[i].owner,
            problem.workers[state.owner[i]].worker_id,
            reason(i),
        )
        for i in sorted(state.changed(), key=importance)
    )


def _reasons(
    state: Assignment, load: list[list[float]], before: list[float]
) -> Callable[[int], str]:
    """Return a function that says why a lease moves.

    Args:
        state: The new assignment.
        load: The load of the workers before.
        before: Their utilization before.
    """
    problem = state.problem
    after, groups = problem.utilizations(state.load), problem.group_utilizations(load)
    counts = Counter(problem.home)
    arriving = {state.owner[i] for i in state.changed()}

    @cache  # of very many moves from a worker to another one, all have the same reason
    def balance_reason(home: int, to: int) -> str:
        giver, most = problem.workers[home].worker_id, problem.limits.max_leases_for_worker
        g, to_g = problem.group_of[home], problem.group_of[to]
        if counts[home] > most:
            return f"{giver} has {counts[home]} leases, more than max_leases_for_worker={most}"
        if not counts[to]:
            return f"{problem.workers[to].worker_id} had no lease, {giver} had {counts[home]}"
        if before[home] <= problem.target and home in arriving:
            return f"frees capacity of {giver} for another lease"
        if before[home] <= problem.target and g != to_g and groups[g] > groups[to_g]:
            return (
                f"group {problem.groups[g]} is at {groups[g]:.2f} of its share, "
                f"group {problem.groups[to_g]} at {groups[to_g]:.2f}"
            )
        return f"{giver} is at {before[home]:.2f} of its fair share"

    @cache
    def goes(to: int) -> str:
        worker = problem.workers[to].worker_id
        return f"{worker} goes from {before[to]:.2f} to {after[to]:.2f} of its fair share"

    def reason(i: int) -> str:
        lease, home, to = problem.leases[i], problem.home[i], state.owner[i]
        if home >= 0:
            return f"{balance_reason(home, to)}; {goes(to)}"
        waited = f", waited {lease.waited_seconds:.0f} s" if lease.waited_seconds > 0 else ""
        return f"{lease.unowned_because}{waited}; {goes(to)}"

    return reason

"""Balance a fleet of any size by a heuristic with few moves.

1. *Place* leases without an owner, heaviest first, where the most capacity is free.
2. *Obey* the caps: workers and groups over a hard limit lose their lightest leases.
3. *Spread oversized leases*: one per worker.
4. *Even groups*, then *shed*: a worker that is `e` over its limit needs at least k leases less, k
   counted heaviest first. It moves the lightest lease of at least `e / k` (so that k - 1 still
   suffice afterwards) to the worker that has the least free capacity afterwards. The worker with
   the greatest need comes first, so heavy leases use large free capacity before light ones do.
   If no worker has enough, there are three ways to free capacity: an exchange; moving a lease of
   the receiver to a third worker; or a push, after which the receiver is over its limit by less,
   and is next. If k + 1 lighter leases need no more moves, they move instead.
5. *Take back* unnecessary moves, then *settle*: the moved leases go to the workers with the most
   free capacity, which needs no additional move.

The result is a function of the sorted input, without randomness.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

from kcl_pipeline.planning.balanced.assignment import Assignment
from kcl_pipeline.planning.balanced.problem import EPSILON
from kcl_pipeline.planning.balanced.targets import Targets

_CANDIDATES = 8
_RECEIVERS = 32
_PUSH_RECEIVERS = 128
_LIGHTER = 0.7
"""Only leases below this part of a lease's load are moved away for it, so that chains end."""


def obey(state: Assignment) -> None:
    """Step 2: bring workers and groups under their hard limits, if other workers have capacity."""
    limits = state.problem.limits

    def violates(w: int) -> bool:
        group = state.problem.group_of[w]
        return (
            state.count[w] > limits.max_leases_for_worker
            or state.group_count[group] > limits.max_leases_for_group
            or (
                state.has_kbps_limit
                and state.count[w] > 1
                and state.kbps[w] > limits.max_throughput_per_host_kbps
            )
            or (
                state.has_kbps_limit
                and state.group_kbps[group] > limits.max_throughput_per_group_kbps
            )
        )

    for w in range(len(state.count)):
        if not violates(w):
            continue
        too_many = (
            state.count[w] > limits.max_leases_for_worker
            or state.group_count[state.problem.group_of[w]] > limits.max_leases_for_group
        )
        held = list(state.held[0][w])
        for _, i in held if too_many else reversed(held):
            if not violates(w):
                break
            taker = _roomiest(state, i)
            if taker >= 0:
                state.move(i, taker)


def _roomiest(state: Assignment, i: int) -> int:
    """Return the worker with the most free capacity within the caps; -1 if there is none."""
    roomiest = (w for _, w in reversed(state.slacks))
    return next((w for w in roomiest if w != state.owner[i] and state.fits_hard(i, w)), -1)


def spread_oversized(state: Assignment, targets: Targets) -> None:
    """Step 3: give each worker at most one oversized lease, if possible. The heavier stays."""
    capacities = state.problem.capacities
    hosts: set[int] = set()
    for i in targets.oversized:
        w = state.owner[i]
        if w >= 0 and w not in hosts and (not state.problem.free[i] or _is_large(state, w)):
            hosts.add(w)
            continue
        if not state.problem.free[i]:
            continue
        takers = [
            v
            for v in range(len(state.count))
            if v not in hosts and (v == w or state.fits_hard(i, v))
        ]
        if not takers:
            continue
        # The largest worker first; among equals the one with the least load to move away.
        best = min(
            takers,
            key=lambda v: (-min(row[v] for row in capacities), v != w, state.load[0][v], v),
        )
        hosts.add(best)
        if best != w:
            state.move(i, best)


def _is_large(state: Assignment, w: int) -> bool:
    return all(row[w] >= max(row) * (1 - EPSILON) for row in state.problem.capacities)


def even_groups(state: Assignment) -> None:
    """Move leases from the most loaded workers of groups over their limit to other groups."""
    problem = state.problem
    if len(problem.groups) == 1 or len(problem.groups) == len(problem.workers):
        return
    members: list[list[int]] = [
        [w for w, g in enumerate(problem.group_of) if g == group]
        for group in range(len(problem.groups))
    ]
    for group in range(len(problem.groups)):
        for r in state.resources:
            stuck: set[int] = set()
            while state.group_load[r][group] > state.group_limit[r][group] * (1 + EPSILON):
                givers = [w for w in members[group] if w not in stuck and state.held[r][w]]
                if not givers:
                    break
                w = max(givers, key=lambda w: (state.load[r][w] / problem.capacities[r][w], -w))
                excess = state.group_load[r][group] - state.group_limit[r][group]
                if not _leave_group(state, w, r, excess):
                    stuck.add(w)


def _leave_group(state: Assignment, w: int, r: int, excess: float) -> bool:
    """Move one lease to another group: the heaviest within the excess, else the lightest above."""
    held = state.held[r][w]
    fitting = bisect_left(held, (excess, len(state.owner)))
    for _, i in [
        *reversed(held[max(fitting - _CANDIDATES, 0) : fitting]),
        *held[fitting : fitting + 1],
    ]:
        for _, v in reversed(state.slacks):
            if state.problem.group_of[v] == state.problem.group_of[w]:
                continue
            if state.fits(i, v):
                state.move(i, v)
                return True
            if state.slack(v) < state.sizes[i]:
                break
    return False


def shed(state: Assignment) -> bool:
    """Step 4. Return whether every worker is within its limit afterwards."""
    heap: list[tuple[float, int]] = []
    left: dict[int, tuple[int, int]] = {}
    for w in range(len(state.count)):
        _queue(state, heap, left, w)
    stuck: set[int] = set()
    once: set[int] = set()
    budget = 4 * len(state.owner) + 16
    while heap and budget > 0 and not state.problem.stop():
        budget -= 1
        need, w = heapq.heappop(heap)
        if w in stuck:
            continue
        excess, r = state.over(w)
        if excess <= 0:
            continue
        pieces = left[w][0]
        if excess / pieces < -need - EPSILON:
            _queue(state, heap, left, w)
            continue
        if _relieve(state, w, r, excess / pieces):
            left[w] = (max(pieces - 1, 1), r)
            _queue(state, heap, left, w)
            continue
        pushed = _push(state, w, r, excess, pieces, once)
        if pushed >= 0:
            left[w] = (max(pieces - 1, 1), r)
            left.pop(pushed, None)
            _queue(state, heap, left, w)
            _queue(state, heap, left, pushed)
        elif pieces < len(state.held[r][w]):
            left[w] = (pieces + 1, r)
            heapq.heappush(heap, (-excess / (pieces + 1), w))
        else:
            stuck.add(w)
    return not any(state.over(w)[0] > 0 and state.held[0][w] for w in range(len(state.count)))


def _queue(
    state: Assignment, heap: list[tuple[float, int]], left: dict[int, tuple[int, int]], w: int
) -> None:
    """Queue a worker that is over its limit, by the load of the next lease to move."""
    excess, r = state.over(w)
    if excess <= 0 or not state.held[r][w]:
        return
    known = left.get(w)
    if known is None or known[1] != r:
        left[w] = (pieces_needed(state.held[r][w], excess), r)
    heapq.heappush(heap, (-excess / left[w][0], w))


def pieces_needed(held: list[tuple[float, int]], excess: float) -> int:
    """Return how many leases have to move at least, heaviest first; at most all."""
    gone = 0.0
    for k in range(len(held)):
        gone += held[-1 - k][0]
        if gone >= excess - EPSILON:
            return k + 1
    return len(held)


def _relieve(state: Assignment, w: int, r: int, need: float) -> bool:
    """Move at least `need` of resource `r` from a worker, with one or two moves."""
    held = state.held[r][w]
    first = bisect_left(held, (need - EPSILON, -1))
    if first == len(held):
        return False
    most = state.slacks[-1][0]
    for _, i in held[first:]:
        if state.sizes[i] > most:
            break
        taker = state.best_fit(i)
        if taker >= 0:
            state.move(i, taker)
            return True
    return _relieve_with_two(state, w, r, need)


def _relieve_with_two(state: Assignment, w: int, r: int, need: float) -> bool:
    held = state.held[r][w]
    first = bisect_left(held, (need - EPSILON, -1))
    candidates = [i for _, i in held[first : first + _CANDIDATES]]
    receivers = [v for _, v in state.slacks[: -_RECEIVERS - 1 : -1] if v != w]
    for i in candidates:
        if state.tries <= 0:
            return False
        state.tries -= len(receivers)
        for v in receivers:
            if _exchange(state, i, v, r, need) or _pass_on(state, i, v, r):
                return True
    return False


def _push(state: Assignment, w: int, r: int, excess: float, pieces: int, once: set[int]) -> int:
    """Move a heavy lease to a worker that can free the capacity by moving lighter ones.

    Only if this needs no more moves than moving leases that fit somewhere. Return the worker, which
    is over its limit now, or -1.
    """
    held = state.held[r][w]
    first = bisect_left(held, (excess / pieces - EPSILON, -1))
    if first == len(held):
        return -1
    fitting = held[: bisect_left(held, (state.slacks[-1][0], len(state.owner)))]
    lighter = (
        pieces_needed(fitting, excess) - pieces
        if sum(load for load, _ in fitting) >= excess
        else len(state.owner)
    )
    best: tuple[int, float, int, int] | None = None
    for load, i in held[first : first + 4]:
        if i in once:
            continue
        for _, v in state.slacks[: -_PUSH_RECEIVERS - 1 : -1]:
            if v == w or not state.fits_hard(i, v) or not state.fits_group(i, v):
                continue
            missing, by = max(
                (state.loads[q][i] - state.limit[q][v] + state.load[q][v], q)
                for q in state.resources
            )
            most_pieces = lighter if best is None else min(lighter, best[0])
            cost = _leases_to_free(state.held[by][v], missing, _LIGHTER * load, most_pieces)
            if cost < 0:
                continue
            rank = (cost, missing / cost, i, v)
            if best is None or rank < best:
                best = rank
    if best is None:
        return -1
    once.add(best[2])
    state.move(best[2], best[3])
    return best[3]


def _leases_to_free(held: list[tuple[float, int]], missing: float, below: float, most: int) -> int:
    """Return how many leases below `below` have load `missing`, heaviest first; -1 above `most`."""
    k = bisect_left(held, (below, -1))
    for cost in range(1, min(most, k) + 1):
        missing -= held[k - cost][0]
        if missing <= 0:
            return cost
    return -1


def _exchange(state: Assignment, i: int, v: int, r: int, need: float) -> bool:
    """Move `i` to `v` and a lighter lease back, so that the relief is at least `need`."""
    load = state.loads[r][i]
    missing = load - (state.limit[r][v] - state.load[r][v])
    w = state.owner[i]
    same_group = state.problem.group_of[w] == state.problem.group_of[v]
    held = state.held[r][v]
    first = bisect_left(held, (missing, -1))
    for k in range(first, min(first + _CANDIDATES, len(held))):
        back_load, back = held[k]
        if back_load > load - need:
            return False
        if back in state.oversized or not _would_fit(state, i, back, v):
            continue
        state.move(back, -1)
        if state.fits(i, v):
            state.move(i, v)
            if state.fits_hard(back, w) and (same_group or state.fits_group(back, w)):
                state.move(back, w)
                return True
            state.move(i, w)
        state.move(back, v)
        if len(state.resources) == 1:
            return False
    return False


def _would_fit(state: Assignment, i: int, back: int, v: int) -> bool:
    """Return whether `v` and its group have capacity for `i` without `back`. Moves nothing."""
    groups = state.problem.group_of
    g = groups[v]
    limits = state.problem.limits
    if state.count[v] > limits.max_leases_for_worker:
        return False
    if state.has_kbps_limit:
        kbps = state.kbps[v] - state.problem.kbps[back]
        if kbps > 0 and kbps + state.problem.kbps[i] > limits.max_throughput_per_host_kbps:
            return False
    if g != groups[state.owner[i]]:
        for r in state.resources:
            if (
                state.group_load[r][g] - state.loads[r][back] + state.loads[r][i]
                > state.group_limit[r][g]
            ):
                return False
    return all(
        state.load[r][v] - state.loads[r][back] + state.loads[r][i] <= state.limit[r][v]
        for r in state.resources
    )


def _pass_on(state: Assignment, i: int, v: int, r: int) -> bool:
    """Move `i` to `v`, and the lightest sufficient lease of `v` to a third worker."""
    missing = state.loads[r][i] - (state.limit[r][v] - state.load[r][v])
    held = state.held[r][v]
    k = bisect_left(held, (missing, -1))
    if k == len(held):
        return False
    on = held[k][1]
    if (
        on in state.oversized
        or state.sizes[on] >= state.sizes[i]
        or not _would_fit(state, i, on, v)
    ):
        return False
    third = state.best_fit(on, without=(v, state.owner[i]))
    if third < 0:
        return False
    state.move(on, third)
    if state.fits(i, v):
        state.move(i, v)
        return True
    state.move(on, v)
    return False


def take_back(state: Assignment) -> None:
    """First half of step 5: move leases back to their owners if they fit, lightest first."""
    home = state.problem.home
    moved = [i for i, w in enumerate(state.owner) if home[i] >= 0 and w != home[i]]
    for i in sorted(moved, key=lambda i: (state.sizes[i], i)):
        if state.fits(i, home[i]):
            state.move(i, home[i])


def settle(state: Assignment) -> None:
    """Second half of step 5: moved leases go to the worker with the most free capacity."""
    home = state.problem.home
    moved = [
        i for i, w in enumerate(state.owner) if w >= 0 and w != home[i] and i not in state.oversized
    ]
    for i in sorted(moved, key=lambda i: (-state.sizes[i], i)):
        slack, w = state.slacks[-1]
        own = state.owner[i]
        if w in (home[i], own):
            continue
        if slack - state.slack(own) > state.sizes[i] * (1 + EPSILON) + EPSILON and state.fits(i, w):
            state.move(i, w)

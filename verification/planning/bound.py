"""Compute a lower bound on the number of moves of any plan that balances the load.

The goal of a plan: every lease without an owner is placed, and the load of each worker is at most
`rest` times its capacity in every resource. A worker with a lease of `oversized` may instead have
that lease plus `OVERSIZED_SLACK` of it. A worker with load that cannot move has the same exception.
Groups of workers are bounded in the same way. `moves_lower_bound` is the maximum of four bounds.
Each one proves that no plan reaches the goal with fewer moves.

**Leases that leave.** A move takes a lease from one worker, so the leases that leave different
workers are counted separately. Each placement of a lease without an owner is one more move. Let a
worker exceed its limit by `e`. Arriving leases only add load, so the leaving ones weigh at least
`e`. k leases weigh at most as much as the k heaviest movable ones. So at least the smallest k whose
heaviest weigh `e` leave. If the worker has oversized leases, the cases are "lease g is the heaviest
that stays" (g is not among the k then) and "no oversized lease stays". The minimum over the cases
is the bound.

**Leases that arrive.** The first bound removes the heaviest leases, but these need much free
capacity elsewhere. Call a lease heavy if its load exceeds a threshold θ. For any plan that reaches
the goal, let `m_w` heavy leases leave worker w and `r_w` arrive. At least `f_w(m_w, r_w)` leases
leave w. `f_w(m, r)` is the smallest number that, with exactly m heavy ones among them, reduces the
load plus r θ to the limit (the m heaviest heavy ones, then light ones, heaviest first). Every heavy
lease that leaves, or had no owner (u of them), arrives somewhere: `Σ r_w = Σ m_w + u`. Hence for
any price λ

    moves ≥ placed + Σ_w f_w(m_w, r_w) + λ (Σ m_w + u - Σ r_w) ≥ placed + λ u + Σ_w min over (m, r)
    of (f_w(m, r) + λ (m - r)),

the Lagrange dual of the problem. The right side does not depend on the plan. The bound is the
maximum over several θ and λ.

**Hosts of oversized leases.** (One resource, and none so light that two fit one worker.) In the end
each host has exactly one, so there are as many hosts as oversized leases. A host keeps at most one.
Its other load is at most the limit minus the lightest one, or the slack of the heaviest. Other
workers keep none. This gives two minimum numbers of leaving leases per worker. The cheapest choice
of hosts is the bound. The bound on arriving leases holds for the other leases in the same way.

**Groups.** As the first bound, for groups instead of workers. A lease that changes its group is one
move. If the workers of the other groups have room for n more heavy leases, and more than n leave,
the others of them are replaced by heavy leases that arrive.

With several resources, the maximum over them holds. The bound may be below the optimum, because
free capacity is not matched with single leases. It is never above: tests compare it with exhaustive
search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from kcl_pipeline.planning.balanced.problem import EPSILON, OVERSIZED_SLACK, Problem

_PRICES = (*(step / 4 for step in range(1, 13)), *range(4, 25))
_THRESHOLD_PARTS = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12)
"""Thresholds tried, in limits of the largest worker; just above 1/k at most k - 1 heavy leases fit
a worker.
"""
_KINDS = 4
"""Loads that several leases have, and that are tried as thresholds."""


def moves_lower_bound(
    problem: Problem,
    rest: float,
    oversized: Sequence[int],
    group_rest: Sequence[float] | None = None,
) -> int:
    """No plan that reaches the goal moves fewer leases than this.

    `group_rest`: the utilization that each group may have at most; None: groups are not part of the
    goal.
    """
    held: list[list[int]] = [[] for _ in problem.workers]
    ownerless: list[int] = []
    for i, w in enumerate(problem.home):
        if w >= 0:
            held[w].append(i)
        elif problem.free[i]:
            ownerless.append(i)
    heavy = set(oversized)
    # Load that may not move excuses its worker, as an oversized lease does.
    limits = [
        [
            max(rest * capacity, (1 + OVERSIZED_SLACK) * fixed) * (1 + EPSILON)
            for capacity, fixed in zip(capacities, problem.fixed(r), strict=True)
        ]
        for r, capacities in enumerate(problem.capacities)
    ]
    best = sum(_leaving(problem, w, held[w], limits, heavy) for w in range(len(problem.workers)))
    if not oversized:
        for r in range(len(problem.loads)):
            best = max(best, _arriving(problem, r, held, ownerless, limits[r]))
    elif len(problem.loads) == 1:
        best = max(best, _hosting(problem, held, limits[0], oversized, ownerless))
    if group_rest is not None and len(problem.groups) > 1:
        best = max(best, _leaving_groups(problem, held, group_rest, None if oversized else limits))
    return len(ownerless) + best


def _leaving(
    problem: Problem, w: int, held: list[int], limits: list[list[float]], oversized: set[int]
) -> int:
    if all(_load(problem, r, w, held) <= limits[r][w] for r in range(len(problem.loads))):
        return 0
    mine = [i for i in held if i in oversized]
    gone = [i for i in mine if problem.free[i]]
    cases = [
        _without(
            problem,
            w,
            held,
            limits,
            gone=gone,
            stays=[i for i in mine if not problem.free[i]],
            kept=-1,
        )
    ]
    for lease in mine:
        heavier = [i for i in gone if all(loads[i] > loads[lease] for loads in problem.loads)]
        cases.append(
            _without(
                problem,
                w,
                held,
                limits,
                gone=heavier,
                stays=[i for i in mine if i not in heavier],
                kept=lease,
            )
        )
    return min(cases)


def _hosting(
    problem: Problem,
    held: list[list[int]],
    limits: list[float],
    oversized: Sequence[int],
    ownerless: list[int],
) -> int:
    loads = problem.loads[0]
    least, most = min(loads[i] for i in oversized), max(loads[i] for i in oversized)
    if (
        least <= OVERSIZED_SLACK * most + EPSILON
        or 2 * least <= max(limits)
        or len(oversized) > len(limits)
    ):
        return 0
    heavy = set(oversized)
    total, savings = 0, []
    for w, mine in enumerate(held):
        own = sum(1 for i in mine if i in heavy)
        others = [i for i in mine if i not in heavy]
        movable = sorted((loads[i] for i in others if problem.free[i]), reverse=True)
        load = _load(problem, 0, w, others)
        without = own + _pieces(movable, load - limits[w])
        hosting = max(own - 1, 0) + _pieces(
            movable, load - max(limits[w] - least, OVERSIZED_SLACK * most)
        )
        total += without
        savings.append(without - hosting)
    total -= sum(sorted(savings, reverse=True)[: len(oversized)])
    return max(total, _arriving(problem, 0, held, ownerless, limits, oversized))


def _load(problem: Problem, r: int, w: int, held: list[int]) -> float:
    loads = problem.loads[r]
    return problem.base[r][w] + sum(loads[i] for i in held)


def _without(
    problem: Problem,
    w: int,
    held: list[int],
    limits: list[list[float]],
    *,
    gone: list[int],
    stays: list[int],
    kept: int,
) -> int:
    """Leases that leave when `gone` do, `kept` does not (-1: any may), and each of `stays`
    may raise the limit.
    """
    gone_set = set(gone)
    left = [i for i in held if i not in gone_set]
    most = 0
    for r, loads in enumerate(problem.loads):
        limit = max([limits[r][w], *((1 + OVERSIZED_SLACK) * loads[i] for i in stays)])
        movable = sorted((loads[i] for i in left if problem.free[i] and i != kept), reverse=True)
        most = max(most, _pieces(movable, _load(problem, r, w, left) - limit))
    return len(gone) + most


def _pieces(heaviest_first: list[float], excess: float) -> int:
    """How many leases weigh `excess` at least; all of them if they do not."""
    for k, load in enumerate(heaviest_first):
        if excess <= EPSILON:
            return k
        excess -= load
    return len(heaviest_first)


def _leaving_groups(
    problem: Problem,
    held: list[list[int]],
    group_rest: Sequence[float],
    limits: list[list[float]] | None,
) -> int:
    total = 0
    for g in range(len(problem.groups)):
        workers = [w for w, group in enumerate(problem.group_of) if group == g]
        most = 0
        for r, loads in enumerate(problem.loads):
            excess = (
                sum(_load(problem, r, w, held[w]) for w in workers)
                - group_rest[g] * problem.group_capacities[r][g]
            )
            if excess <= EPSILON:
                continue
            movable = sorted(
                (loads[i] for w in workers for i in held[w] if problem.free[i]), reverse=True
            )
            most = max(most, _pieces(movable, excess))
            if limits is None:
                continue
            others = [w for w, group in enumerate(problem.group_of) if group != g]
            for threshold in _thresholds(loads, max(limits[r])):
                room = sum(int(limits[r][w] / threshold) for w in others)
                room -= sum(loads[i] > threshold for w in others for i in held[w])
                most = max(most, _with_few_heavy(movable, excess, threshold, max(room, 0)))
        total += most
    return total


def _with_few_heavy(movable: list[float], excess: float, threshold: float, room: int) -> int:
    """How many leases leave a group if the workers of others have room for few heavy ones.

    If more of them leave, as many heavy ones arrive, which weigh more than the threshold each.
    """
    heavy = [load for load in movable if load > threshold]
    relief = [0.0, *accumulate(movable[len(heavy) :])]
    gone = [0.0, *accumulate(heavy)]
    best = len(movable)
    for m in range(len(heavy) + 1):
        missing = excess - gone[m] + max(m - room, 0) * threshold - EPSILON
        if (k := bisect_left(relief, missing)) < len(relief):
            best = min(best, m + k)
    return best


def _arriving(
    problem: Problem,
    r: int,
    held: list[list[int]],
    ownerless: list[int],
    limits: list[float],
    oversized: Sequence[int] = (),
) -> int:
    """Count leases that leave and arrive. Each oversized lease has a host of its own, if any."""
    loads, hosted = problem.loads[r], set(oversized)
    least, most = (
        min((loads[i] for i in oversized), default=0),
        max((loads[i] for i in oversized), default=0),
    )
    own = [sum(i in hosted for i in mine) for mine in held]
    held = [[i for i in mine if i not in hosted] for mine in held]
    movable = [sorted((loads[i] for i in mine if problem.free[i]), reverse=True) for mine in held]
    load = [_load(problem, r, w, mine) for w, mine in enumerate(held)]
    excess = [load[w] - limit for w, limit in enumerate(limits)]
    of_host = [
        load[w] - max(limit - least, OVERSIZED_SLACK * most) for w, limit in enumerate(limits)
    ]
    best = 0
    for threshold in _thresholds(loads, max(limits)):
        waiting = sum(1 for i in ownerless if i not in hosted and loads[i] > threshold)
        if not waiting and not any(mine and mine[0] > threshold for mine in movable):
            continue
        tables = [_table(mine, excess[w], threshold) for w, mine in enumerate(movable)]
        tables_of_host = [
            _table(mine, of_host[w], threshold) if oversized else []
            for w, mine in enumerate(movable)
        ]
        for price in _PRICES:
            usual = [_cheapest(table, price) + own[w] for w, table in enumerate(tables)]
            as_host = [
                _cheapest(table, price) + max(own[w] - 1, 0)
                for w, table in enumerate(tables_of_host)
            ]
            changes = sorted(host - plain for host, plain in zip(as_host, usual, strict=True))
            value = price * waiting + sum(usual) + sum(changes[: len(oversized)])
            best = max(best, math.ceil(value - 1e-6))
    return best


def _cheapest(table: list[tuple[int, int]], price: float) -> float:
    return min((leave + price * net for net, leave in table), default=0.0)


def _thresholds(loads: Sequence[float], largest: float) -> list[float]:
    """Return the thresholds that are tried: parts of the largest limit, and loads of leases.

    With one just below the load of many leases, the heavy ones weigh little more than it.
    """
    parts = [part * largest * (1 + EPSILON) for part in _THRESHOLD_PARTS]
    kinds = Counter(round(load, 9) for load in loads).most_common(_KINDS)
    return parts + [load * (1 - 1e-6) for load, number in kinds if load > 0 and number > 1]


def _table(movable: list[float], excess: float, threshold: float) -> list[tuple[int, int]]:
    """Pairs (m - r, f(m, r)) worth looking at; none when the worker cannot reach its limit (it then
    counts nothing).
    """
    heavy = [load for load in movable if load > threshold]
    light = movable[len(heavy) :]
    # More arrivals than fit an empty worker, or than are worth listing, would only make the bound
    # useless; arrivals beyond the table are impossible or cost at least as much per arrival as the
    # last one listed only if all that fit are listed: so all are.
    best: dict[int, int] = {}
    relief = [0.0]
    for load in light:
        relief.append(relief[-1] + load)
    gone_heavy = 0.0
    for m in range(len(heavy) + 1):
        if m:
            gone_heavy += heavy[m - 1]
        r, k = 0, 0
        while True:
            missing = excess - gone_heavy + r * threshold - EPSILON
            while k < len(relief) and relief[k] < missing:
                k += 1
            if k == len(relief):
                break
            best[m - r] = min(best.get(m - r, m + k), m + k)
            r += 1
    return sorted(best.items())

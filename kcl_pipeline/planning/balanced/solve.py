"""The heuristic for fleets of any size: few moves, within the limits of the board.

1. *Place* what has no owner, heaviest first, where the most room is.
2. *Obey* the caps: workers and groups over a hard limit give up their lightest leases.
3. *Spread over giants*: one giant per worker.
4. *Even groups*, then *shed*: a worker that is `e` over its limit needs at least k leases less, k
   counted heaviest first. It gives up the lightest lease of at least `e / k` (so that k - 1 still
   suffice afterwards) to the worker that this leaves with the least room. The worker with the
   greatest need comes first: the heavy leases find the large holes before small ones fill them.
   When no hole is large enough it makes one: by an exchange, by a lease of the receiver that goes
   on to a third worker, or by pushing: the receiver is over its limit then, by less, and is next.
   When k + 1 lighter leases cost no more moves, they go instead.
5. *Take back* moves that turned out to be unnecessary, then *settle*: the moved leases go where the
   room is, which costs nothing.

Everything is a function of the sorted input; there is no chance in it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

from kcl_pipeline.planning.balanced.board import Board
from kcl_pipeline.planning.balanced.problem import EPSILON
from kcl_pipeline.planning.balanced.targets import Targets

_CANDIDATES = 8
_RECEIVERS = 32
_PUSH_RECEIVERS = 128
_LIGHTER = 0.7
"""A lease makes room only with leases lighter than this part of its own load: chains of such moves
end.
"""


def obey(board: Board) -> None:
    """Step 2: bring workers and groups under their hard limits, where somebody else can take the
    leases.
    """
    limits = board.problem.limits

    def violates(w: int) -> bool:
        group = board.problem.group_of[w]
        return (
            board.count[w] > limits.max_leases_for_worker
            or board.group_count[group] > limits.max_leases_for_group
            or (
                board.has_kbps_limit
                and board.count[w] > 1
                and board.kbps[w] > limits.max_throughput_per_host_kbps
            )
            or (
                board.has_kbps_limit
                and board.group_kbps[group] > limits.max_throughput_per_group_kbps
            )
        )

    for w in range(len(board.count)):
        if not violates(w):
            continue
        too_many = (
            board.count[w] > limits.max_leases_for_worker
            or board.group_count[board.problem.group_of[w]] > limits.max_leases_for_group
        )
        held = list(board.held[0][w])
        for _, i in held if too_many else reversed(held):
            if not violates(w):
                break
            taker = _roomiest(board, i)
            if taker >= 0:
                board.move(i, taker)


def _roomiest(board: Board, i: int) -> int:
    """The worker with the most room that the caps allow to take this lease; -1 if there is none."""
    for _, w in reversed(board.slacks):
        if w != board.owner[i] and board.fits_hard(i, w):
            return w
    return -1


def spread_giants(board: Board, targets: Targets) -> None:
    """Step 3: no worker holds two giants while another that can bear one holds none.

    The heavier one stays.
    """
    capacities = board.problem.capacities
    hosts: set[int] = set()
    for i in targets.giants:
        w = board.owner[i]
        if w >= 0 and w not in hosts and (not board.problem.free[i] or _is_large(board, w)):
            hosts.add(w)
            continue
        if not board.problem.free[i]:
            continue
        takers = [
            v
            for v in range(len(board.count))
            if v not in hosts and (v == w or board.fits_hard(i, v))
        ]
        if not takers:
            continue
        # The largest worker first; among equals one that is nearly empty, so that little has to
        # leave.
        best = min(
            takers, key=lambda v: (-min(row[v] for row in capacities), v != w, board.load[0][v], v)
        )
        hosts.add(best)
        if best != w:
            board.move(i, best)


def _is_large(board: Board, w: int) -> bool:
    return all(row[w] >= max(row) * (1 - EPSILON) for row in board.problem.capacities)


def even_groups(board: Board) -> None:
    """A group over its limit gives leases from its most loaded workers to groups that have room, as
    long as that helps.
    """
    problem = board.problem
    if len(problem.groups) == 1 or len(problem.groups) == len(problem.workers):
        return
    members: list[list[int]] = [
        [w for w, g in enumerate(problem.group_of) if g == group]
        for group in range(len(problem.groups))
    ]
    for group in range(len(problem.groups)):
        for r in board.resources:
            stuck: set[int] = set()
            while board.group_load[r][group] > board.group_limit[r][group] * (1 + EPSILON):
                givers = [w for w in members[group] if w not in stuck and board.held[r][w]]
                if not givers:
                    break
                w = max(givers, key=lambda w: (board.load[r][w] / problem.capacities[r][w], -w))
                excess = board.group_load[r][group] - board.group_limit[r][group]
                if not _leave_group(board, w, r, excess):
                    stuck.add(w)


def _leave_group(board: Board, w: int, r: int, excess: float) -> bool:
    """One lease of this worker to another group: the heaviest that does not overshoot, else the
    lightest.
    """
    held = board.held[r][w]
    fitting = bisect_left(held, (excess, len(board.owner)))
    for _, i in [
        *reversed(held[max(fitting - _CANDIDATES, 0) : fitting]),
        *held[fitting : fitting + 1],
    ]:
        for _, v in reversed(board.slacks):
            if board.problem.group_of[v] == board.problem.group_of[w]:
                continue
            if board.fits(i, v):
                board.move(i, v)
                return True
            if board.slack(v) < board.sizes[i]:
                break
    return False


def shed(board: Board) -> bool:
    """Step 4. Whether every worker is within its limit afterwards."""
    heap: list[tuple[float, int]] = []
    left: dict[int, tuple[int, int]] = {}
    for w in range(len(board.count)):
        _queue(board, heap, left, w)
    stuck: set[int] = set()
    once: set[int] = set()
    budget = 4 * len(board.owner) + 16
    while heap and budget > 0:
        budget -= 1
        need, w = heapq.heappop(heap)
        if w in stuck:
            continue
        excess, r = board.over(w)
        if excess <= 0:
            continue
        pieces = left[w][0]
        if excess / pieces < -need - EPSILON:
            _queue(board, heap, left, w)
            continue
        if _relieve(board, w, r, excess / pieces):
            left[w] = (max(pieces - 1, 1), r)
            _queue(board, heap, left, w)
            continue
        pushed = _push(board, w, r, excess, pieces, once)
        if pushed >= 0:
            left[w] = (max(pieces - 1, 1), r)
            left.pop(pushed, None)
            _queue(board, heap, left, w)
            _queue(board, heap, left, pushed)
        elif pieces < len(board.held[r][w]):
            left[w] = (pieces + 1, r)
            heapq.heappush(heap, (-excess / (pieces + 1), w))
        else:
            stuck.add(w)
    return not any(board.over(w)[0] > 0 and board.held[0][w] for w in range(len(board.count)))


def _queue(
    board: Board, heap: list[tuple[float, int]], left: dict[int, tuple[int, int]], w: int
) -> None:
    """Put a worker that is over its limit into the queue, by the load of the lease it has to give
    up.
    """
    excess, r = board.over(w)
    if excess <= 0 or not board.held[r][w]:
        return
    known = left.get(w)
    if known is None or known[1] != r:
        left[w] = (pieces_needed(board.held[r][w], excess), r)
    heapq.heappush(heap, (-excess / left[w][0], w))


def pieces_needed(held: list[tuple[float, int]], excess: float) -> int:
    """How many leases have to go at least, heaviest first (all of them if that is not enough)."""
    gone = 0.0
    for k in range(len(held)):
        gone += held[-1 - k][0]
        if gone >= excess - EPSILON:
            return k + 1
    return len(held)


def _relieve(board: Board, w: int, r: int, need: float) -> bool:
    """Take at least `need` of resource `r` off a worker: one lease, or one with a second move that
    makes room for it.
    """
    held = board.held[r][w]
    first = bisect_left(held, (need - EPSILON, -1))
    if first == len(held):
        return False
    most = board.slacks[-1][0]
    for _, i in held[first:]:
        if board.sizes[i] > most:
            break
        taker = board.best_fit(i)
        if taker >= 0:
            board.move(i, taker)
            return True
    return _relieve_with_two(board, w, r, need)


def _relieve_with_two(board: Board, w: int, r: int, need: float) -> bool:
    held = board.held[r][w]
    first = bisect_left(held, (need - EPSILON, -1))
    candidates = [i for _, i in held[first : first + _CANDIDATES]]
    receivers = [v for _, v in board.slacks[: -_RECEIVERS - 1 : -1] if v != w]
    for i in candidates:
        if board.tries <= 0:
            return False
        board.tries -= len(receivers)
        for v in receivers:
            if _exchange(board, i, v, r, need) or _pass_on(board, i, v, r):
                return True
    return False


def _push(board: Board, w: int, r: int, excess: float, pieces: int, once: set[int]) -> int:
    """Give a heavy lease to a worker that has no room for it, if that worker can make room with
    lighter ones, and this costs no more moves than giving up only leases that fit somewhere.
    Returns that worker (over its limit now), or -1.
    """
    held = board.held[r][w]
    first = bisect_left(held, (excess / pieces - EPSILON, -1))
    if first == len(held):
        return -1
    most = board.slacks[-1][0]
    fitting = held[: bisect_left(held, (most, len(board.owner)))]
    lighter = (
        pieces_needed(fitting, excess) - pieces
        if sum(load for load, _ in fitting) >= excess
        else len(board.owner)
    )
    best: tuple[int, float, int, int] | None = None
    for load, i in held[first : first + 4]:
        if i in once:
            continue
        for _, v in board.slacks[: -_PUSH_RECEIVERS - 1 : -1]:
            if v == w or not board.fits_hard(i, v) or not board.fits_group(i, v):
                continue
            missing, by = max(
                (board.loads[q][i] - board.limit[q][v] + board.load[q][v], q)
                for q in board.resources
            )
            most_pieces = lighter if best is None else min(lighter, best[0])
            cost = _room_for(board.held[by][v], missing, _LIGHTER * load, most_pieces)
            if cost < 0:
                continue
            rank = (cost, missing / cost, i, v)
            if best is None or rank < best:
                best = rank
    if best is None:
        return -1
    once.add(best[2])
    board.move(best[2], best[3])
    return best[3]


def _room_for(held: list[tuple[float, int]], missing: float, below: float, most: int) -> int:
    """How many leases lighter than `below` weigh `missing`, heaviest first; -1 when more than
    `most` would be needed.
    """
    k = bisect_left(held, (below, -1))
    for cost in range(1, min(most, k) + 1):
        missing -= held[k - cost][0]
        if missing <= 0:
            return cost
    return -1


def _exchange(board: Board, i: int, v: int, r: int, need: float) -> bool:
    """`i` to `v`, and back a lighter lease that makes room for it but leaves the relief at
    `need`.
    """
    load = board.loads[r][i]
    missing = load - (board.limit[r][v] - board.load[r][v])
    w = board.owner[i]
    same_group = board.problem.group_of[w] == board.problem.group_of[v]
    held = board.held[r][v]
    first = bisect_left(held, (missing, -1))
    for k in range(first, min(first + _CANDIDATES, len(held))):
        back_load, back = held[k]
        if back_load > load - need:
            return False
        if back in board.giants or not _would_fit(board, i, back, v):
            continue
        board.move(back, -1)
        if board.fits(i, v):
            board.move(i, v)
            if board.fits_hard(back, w) and (same_group or board.fits_group(back, w)):
                board.move(back, w)
                return True
            board.move(i, w)
        board.move(back, v)
        if len(board.resources) == 1:
            return False
    return False


def _would_fit(board: Board, i: int, back: int, v: int) -> bool:
    """A cheap look before anything is moved: whether `v` and its group have room for `i` once
    `back` is gone.
    """
    groups = board.problem.group_of
    g = groups[v]
    limits = board.problem.limits
    if board.count[v] > limits.max_leases_for_worker:
        return False
    if board.has_kbps_limit:
        kbps = board.kbps[v] - board.problem.kbps[back]
        if kbps > 0 and kbps + board.problem.kbps[i] > limits.max_throughput_per_host_kbps:
            return False
    if g != groups[board.owner[i]]:
        for r in board.resources:
            if (
                board.group_load[r][g] - board.loads[r][back] + board.loads[r][i]
                > board.group_limit[r][g]
            ):
                return False
    return all(
        board.load[r][v] - board.loads[r][back] + board.loads[r][i] <= board.limit[r][v]
        for r in board.resources
    )


def _pass_on(board: Board, i: int, v: int, r: int) -> bool:
    """`i` to `v`, and the lightest lease of `v` that makes room for it to a third worker."""
    missing = board.loads[r][i] - (board.limit[r][v] - board.load[r][v])
    held = board.held[r][v]
    k = bisect_left(held, (missing, -1))
    if k == len(held):
        return False
    on = held[k][1]
    if on in board.giants or board.sizes[on] >= board.sizes[i] or not _would_fit(board, i, on, v):
        return False
    third = board.best_fit(on, without=(v, board.owner[i]))
    if third < 0:
        return False
    board.move(on, third)
    if board.fits(i, v):
        board.move(i, v)
        return True
    board.move(on, v)
    return False


def take_back(board: Board) -> None:
    """First half of step 5: a lease goes home where there is room for it after all.

    The lightest first: they matter least.
    """
    home = board.problem.home
    moved = [i for i, w in enumerate(board.owner) if home[i] >= 0 and w != home[i]]
    for i in sorted(moved, key=lambda i: (board.sizes[i], i)):
        if board.fits(i, home[i]):
            board.move(i, home[i])


def settle(board: Board) -> None:
    """Second half of step 5: moved leases, heaviest first, go to the worker with the most room if
    that evens the fleet.
    """
    home = board.problem.home
    moved = [
        i for i, w in enumerate(board.owner) if w >= 0 and w != home[i] and i not in board.giants
    ]
    for i in sorted(moved, key=lambda i: (-board.sizes[i], i)):
        slack, w = board.slacks[-1]
        own = board.owner[i]
        if w in (home[i], own):
            continue
        if slack - board.slack(own) > board.sizes[i] * (1 + EPSILON) + EPSILON and board.fits(i, w):
            board.move(i, w)

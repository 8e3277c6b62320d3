"""The protocol of leases, handoffs, assignments and commits as a state space, searched to its end
(docs/decisions/0006-simulation.md).

A model of the rules, not of the code: rows, the log's two numbers per shard, processes (several of
which may share one worker id), and a leader whose plan may be old when it is written. Every step is
one I/O call; between any two anything else may happen, which is a pause. A write may be applied
without its answer, or lost before it is applied, and is then made again. What grows without end is
bounded by budgets: moves (assignments, handoffs, crashes), lost answers, renewals. Searched is
everything within the bounds.

Safety: committed ranges are contiguous and none is repeated; no checkpoint is past the table; the
worker that processes a shard changes only together with the counter; no plan takes a lease from
owners that it has not seen; no checkpoint goes back; a child commits nothing before its parent has
ended, or, where the parent's row was deleted by hand, before the table has all its parent's
records; a finished and deleted shard does not come back.

`python -m verification.model.search` searches all configurations and then each variant with one
guard removed, which must fail.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from verification.model.lineage import LineageSteps
from verification.model.state import ABSENT, BrokenRuleError, Model, State
from verification.model.steps import Steps


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search: states visited, how many of them have everything committed and
    checkpointed, and the first broken rule with its steps.
    """

    states: int
    complete: int
    broken: str = ""
    path: tuple[str, ...] = ()


def search(model: Model, *, limit: int = 50_000_000) -> Found:
    """Visit every state within the model's bounds, nearest first, or until a rule breaks.

    Raises `RuntimeError` past `limit` states.
    """
    steps, start = (LineageSteps if model.lineage else Steps)(model), model.start()
    seen: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    complete = 0
    while queue:
        state = queue.popleft()
        complete += all(log.reached == model.records for log in state.logs) and all(
            row.checkpoint >= model.records or row == ABSENT for row in state.rows
        )
        try:
            for name, after in steps.of(state):
                if after not in seen and _within(model, after):
                    seen[after] = (state, name)
                    queue.append(after)
        except BrokenRuleError as rule:
            return Found(len(seen), complete, str(rule), _path(seen, state))
        if len(seen) > limit:
            raise RuntimeError(f"{model.name} has more than {limit} states")
    return Found(len(seen), complete)


def _within(model: Model, state: State) -> bool:
    return all(row.counter <= model.most_counter for row in state.rows) and all(
        log.fence <= model.most_fences for log in state.logs
    )


def _path(seen: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    path: list[str] = []
    while (step := seen[state]) is not None:
        state, name = step
        path.append(name)
    return tuple(reversed(path))


_LONE_TWIN: Final = Model(
    "a twin", (0, 0), moves=1, lost=1, handoffs=False, most_counter=6, most_fences=5
)
SMALL: Final = (
    Model("two workers", (0, 1), moves=3, lost=1),
    _LONE_TWIN,
    Model(
        "a twin that renews",
        (0, 0),
        moves=1,
        renewals=1,
        handoffs=False,
        most_counter=6,
        most_fences=4,
    ),
    Model("parent and child", (0, 1), shards=2, records=1, moves=3, lost=1),
    Model(
        "twins across the end of a shard",
        (0, 0),
        shards=2,
        records=1,
        moves=2,
        lost=1,
        handoffs=False,
        most_counter=4,
        most_fences=2,
        lineage=True,
        born=True,
    ),
    Model(
        "the deleted row of a parent",
        (0, 1),
        shards=2,
        records=1,
        moves=3,
        lost=1,
        handoffs=False,
        most_counter=4,
        most_fences=2,
        lineage=True,
        deletions=1,
    ),
)
_TAKER, _TWIN, _RENEWING, _CHILD, _BORN, _DELETED = SMALL
FULL: Final = (
    Model("three workers", (0, 1, 2), moves=3, lost=1),
    Model("two workers, more moves", (0, 1), moves=4, lost=1),
    replace(_LONE_TWIN, name="a twin, lost answers and renewals", renewals=1),
    replace(_LONE_TWIN, name="a twin, batches of several leases", several=True),
    Model(
        "a twin and a taker",
        (0, 0, 1),
        moves=2,
        lost=1,
        handoffs=False,
        most_counter=5,
        most_fences=3,
    ),
    Model("parent and child", (0, 1), shards=2, records=1, moves=4, lost=1),
    replace(_BORN, moves=3),
    replace(_BORN, renewals=1),
    replace(_DELETED, moves=4),
    replace(_DELETED, records=2, moves=4, lost=0),
    replace(_DELETED, log_seen=False, moves=4),
)
GUARDS: Final[tuple[tuple[str, Model], ...]] = (
    ("fence", replace(_TAKER, moves=3)),
    ("two numbers", replace(_TAKER, moves=4, lost=0)),
    ("exact number", replace(_TAKER, moves=3)),
    ("expected numbers", replace(_TAKER, moves=3)),
    ("pending check", replace(_TAKER, moves=3)),
    ("row condition", replace(_TAKER, moves=3)),
    ("owner condition", _TAKER),
    ("counter of an assignment", _TAKER),
    ("counter of a handoff", _TAKER),
    ("positions in the read-back", _RENEWING),
    ("process in the number", replace(_TWIN, several=True)),
    ("parent check", _CHILD),
    ("parent in the creation", _BORN),
    ("step forward", _BORN),
    ("begin of the child", _BORN),
    ("restored parent", _DELETED),
    ("child in the restoration", replace(_DELETED, deletions=0, log_seen=False, moves=4, lost=0)),
    ("checkpoint of a write", replace(_DELETED, moves=4, lost=0)),
    ("number of the table", replace(_DELETED, records=2, moves=4, lost=0)),
)


def without(guard: str) -> Model:
    """The small configuration in which the missing guard is seen.

    Raises `KeyError` for an unknown one.
    """
    return replace(dict(GUARDS)[guard], without=guard)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, print the states, and 1 when a rule breaks that should hold, or none where a guard is
    missing.
    """
    parser = argparse.ArgumentParser(
        description="Search the protocol's state space, then each variant with one guard removed"
    )
    parser.add_argument("--small", action="store_true", help="the bounds that the tests use")
    wrong = 0
    for model in SMALL if parser.parse_args(arguments).small else FULL:
        found = search(model)
        wrong += bool(found.broken)
        verdict = (
            f"BROKEN: {found.broken}: {'; '.join(found.path)}" if found.broken else "no rule broken"
        )
        sys.stdout.write(
            f"{model.name}: {found.states} states, {found.complete} of them complete, {verdict}\n"
        )
        sys.stdout.flush()
    for guard, _ in GUARDS:
        found = search(without(guard))
        wrong += not found.broken
        sys.stdout.write(
            f"without the {guard}: {found.broken or 'NOTHING BREAKS'} ({found.states} "
            f"states): {'; '.join(found.path)}\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

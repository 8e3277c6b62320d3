"""Exhaustive search of the protocol of leases, handoffs, assignments and commits.

See docs/decisions/0006-simulation.md. The model describes the rules, not the code: rows, two
transaction versions per shard, processes (several can share one worker id), and a leader whose plan
can be outdated when it is written. Every step is one I/O call. Any other steps can happen between
two steps, which models a pause. A write can be applied without a response, or lost before it is
applied; it is then repeated. Budgets bound what is unlimited in reality: moves (assignments,
handoffs, crashes), lost responses, renewals. The search visits every state within these bounds.

Safety rules:

- Committed ranges are contiguous and none is repeated.
- No checkpoint is ahead of the table, and no checkpoint goes back.
- The worker that processes a shard changes only together with the counter.
- No plan takes a lease from owners that it has not seen.
- A child commits nothing before its parent has ended. If the parent's row was deleted by hand,
  it commits nothing before the table has all records of its parent.
- A finished and deleted shard is not created again.

`verification.model.positions` has the models of the protocol that stores positions in the table.

`python -m verification.model.search` searches all configurations. Then it searches each variant
with one guard removed, which must fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from verification.model.lineage import LineageSteps
from verification.model.positions import scenarios as positions
from verification.model.positions.scenarios import Positions
from verification.model.state import ABSENT, Model, State
from verification.model.steps import Steps
from verification.model.visit import Found, Searched, visit


class _Leases:
    """The steps and the bounds of the two-phase protocol."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.steps = (LineageSteps if model.lineage else Steps)(model)

    def start(self) -> State:
        return self.model.start()

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        return self.steps.of(s)

    def complete(self, s: State) -> bool:
        records = self.model.records
        return all(log.reached == records for log in s.logs) and all(
            row.checkpoint >= records or row == ABSENT for row in s.rows
        )

    def within(self, s: State) -> bool:
        return all(row.counter <= self.model.most_counter for row in s.rows) and all(
            log.fence <= self.model.most_fences for log in s.logs
        )


def search(model: Model | Positions, *, limit: int = 50_000_000) -> Found:
    """Visit every state within the model's bounds, breadth first, until a rule breaks.

    Raises `RuntimeError` above `limit` states.
    """
    if isinstance(model, Model):
        return visit(_Leases(model), limit=limit)
    searched: Searched[Any] = model
    return visit(searched, limit=limit, goes_on=model.goes_on)


_LONE_SHARED_ID: Final = Model(
    "a shared worker id", (0, 0), moves=1, lost=1, handoffs=False, most_counter=6, most_fences=5
)
_SMALL_LEASES: Final = (
    Model("two workers", (0, 1), moves=3, lost=1),
    _LONE_SHARED_ID,
    Model(
        "a shared worker id, with renewals",
        (0, 0),
        moves=1,
        renewals=1,
        handoffs=False,
        most_counter=6,
        most_fences=4,
    ),
    Model("parent and child", (0, 1), shards=2, records=1, moves=3, lost=1),
    Model(
        "a shared worker id across the end of a shard",
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
_TAKER, _SHARED_ID, _RENEWING, _CHILD, _BORN, _DELETED = _SMALL_LEASES
_FULL_LEASES: Final = (
    Model("three workers", (0, 1, 2), moves=3, lost=1),
    Model("two workers, more moves", (0, 1), moves=4, lost=1),
    replace(_LONE_SHARED_ID, name="a shared worker id, lost answers and renewals", renewals=1),
    replace(_LONE_SHARED_ID, name="a shared worker id, batches of several leases", several=True),
    Model(
        "a shared worker id and a taker",
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
_LEASE_GUARDS: Final[tuple[tuple[str, Model], ...]] = (
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
    ("process in the number", replace(_SHARED_ID, several=True)),
    ("parent check", _CHILD),
    ("parent in the creation", _BORN),
    ("step forward", _BORN),
    ("begin of the child", _BORN),
    ("restored parent", _DELETED),
    ("child in the restoration", replace(_DELETED, deletions=0, log_seen=False, moves=4, lost=0)),
    ("checkpoint of a write", replace(_DELETED, moves=4, lost=0)),
    ("number of the table", replace(_DELETED, records=2, moves=4, lost=0)),
)
SMALL: Final[tuple[Model | Positions, ...]] = (*_SMALL_LEASES, *positions.SMALL)
FULL: Final[tuple[Model | Positions, ...]] = (*_FULL_LEASES, *positions.FULL)
GUARDS: Final[tuple[tuple[str, Model | Positions], ...]] = (*_LEASE_GUARDS, *positions.GUARDS)


def without(guard: str) -> Model | Positions:
    """Return the small configuration that detects the missing guard.

    Raises `KeyError` for an unknown guard.
    """
    return replace(dict(GUARDS)[guard], without=guard)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search all configurations, print the states, and return the exit code.

    It is 1 if a rule breaks that should hold, or if no rule breaks although a guard is missing.
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

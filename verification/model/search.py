"""Exhaustive search of the protocol of leases and commits.

See docs/decisions/0006-simulation.md. The models describe the rules, not the code.
`verification.model.commits` has a sink that stores positions, and `verification.model.leases` one
that does not. Every step is one I/O call. Any other steps can happen between two steps, which
models a pause. Budgets bound what is unlimited in reality: moves (assignments, crashes), lost
answers, renewals, accidents. The search visits every state within these bounds.

`python -m verification.model.search [NAME ...]` searches all configurations. Then it searches each
variant with one rule removed, which must fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from verification.model.scenarios import FULL, GUARDS, SMALL, Model, without
from verification.model.visit import Found, Searched, visit


def search(model: Model, *, limit: int = 50_000_000) -> Found:
    """Visit every state within the model's bounds, breadth first, until a rule breaks.

    Raises `RuntimeError` above `limit` states.
    """
    searched: Searched[Any] = model
    return visit(searched, limit=limit, goes_on=model.goes_on)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search all configurations, print the states, and return the exit code.

    It is 1 if a rule breaks that should hold, or if no rule breaks although a guard is missing.
    """
    parser = argparse.ArgumentParser(
        description="Search the protocol's state space, then each variant with one rule removed"
    )
    parser.add_argument("names", nargs="*", help="only those whose name contains one of these")
    parser.add_argument("--small", action="store_true", help="the bounds that the tests use")
    options = parser.parse_args(arguments)

    def is_chosen(name: str) -> bool:
        return not options.names or any(part in name for part in options.names)

    wrong = 0
    for model in SMALL if options.small else FULL:
        if not is_chosen(model.name):
            continue
        found = search(model)
        wrong += bool(found.broken)
        verdict = (
            f"BROKEN: {found.broken}: {'; '.join(found.path)}" if found.broken else "no rule broken"
        )
        sys.stdout.write(
            f"{model.name}: {found.states} states, {found.complete} of them complete, {verdict}\n"
        )
        sys.stdout.flush()
    for guard in (guard for guard, _ in GUARDS if is_chosen(guard)):
        found = search(without(guard))
        wrong += not found.broken
        sys.stdout.write(
            f"without the {guard}: {found.broken or 'NOTHING BREAKS'} ({found.states} "
            f"states): {'; '.join(found.path)}\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

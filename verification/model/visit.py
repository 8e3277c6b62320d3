"""Visit every state of a model, breadth first, until a rule breaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class BrokenRuleError(Exception):
    """A step violated a safety rule."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    Attributes:
        states: Number of visited states.
        complete: Number of those in which everything is done.
        broken: The first broken rule; empty if none is broken.
        path: The steps that lead to it.
    """

    states: int
    complete: int
    broken: str = ""
    path: tuple[str, ...] = ()


State = TypeVar("State")


class Searched(Protocol[State]):
    """A model whose states can be visited."""

    def start(self) -> State:
        """Return the first state."""
        ...

    def of(self, s: State) -> Iterable[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        ...

    def complete(self, s: State) -> bool:
        """Whether everything is done."""
        ...

    def within(self, s: State) -> bool:
        """Whether the state is inside the bounds of the search."""
        ...


def visit(model: Searched[State], *, limit: int, goes_on: bool = False) -> Found:
    """Visit every state within the model's bounds, breadth first, until a rule breaks.

    Args:
        model: The steps and the bounds.
        limit: Most states.
        goes_on: Also require that a complete state can be reached from every state.

    Raises:
        RuntimeError: There are more than `limit` states.
    """
    start = model.start()
    seen: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    before: dict[State, list[State]] = {}
    complete: list[State] = []
    while queue:
        state = queue.popleft()
        if model.complete(state):
            complete.append(state)
        try:
            for name, after in model.of(state):
                if goes_on:
                    before.setdefault(after, []).append(state)
                if after not in seen and model.within(after):
                    seen[after] = (state, name)
                    queue.append(after)
        except BrokenRuleError as rule:
            return Found(len(seen), len(complete), str(rule), _path(seen, state))
        if len(seen) > limit:
            raise RuntimeError(f"there are more than {limit} states")
    stuck = _first_stuck(seen, complete, before) if goes_on else None
    if stuck is not None:
        return Found(len(seen), len(complete), "it cannot go on", _path(seen, stuck))
    return Found(len(seen), len(complete))


def _first_stuck(
    seen: Iterable[State], complete: list[State], before: dict[State, list[State]]
) -> State | None:
    """Return the first state from which no complete one can be reached."""
    alive, queue = set(complete), list(complete)
    while queue:
        for state in before.get(queue.pop(), ()):
            if state not in alive:
                alive.add(state)
                queue.append(state)
    return next((state for state in seen if state not in alive), None)


def _path(seen: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    path: list[str] = []
    while (step := seen[state]) is not None:
        state, name = step
        path.append(name)
    return tuple(reversed(path))

"""Visit every state of a model, breadth first, until a rule breaks."""

from __future__ import annotations

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
    # A state is large, so that its hash takes most of the time: everything else has its number
    numbers = {model.start(): 0}
    states = list(numbers)
    steps: list[tuple[int, str] | None] = [None]
    before: list[list[int]] = [[]]
    complete: list[int] = []
    number = 0
    while number < len(states):
        state = states[number]
        if model.complete(state):
            complete.append(number)
        try:
            for name, after in model.of(state):
                next_number = numbers.setdefault(after, len(states))
                if next_number == len(states):
                    if not model.within(after):
                        del numbers[after]
                        continue
                    states.append(after)
                    steps.append((number, name))
                    before.append([])
                if goes_on:
                    before[next_number].append(number)
        except BrokenRuleError as rule:
            return Found(len(states), len(complete), str(rule), _path(steps, number))
        if len(states) > limit:
            raise RuntimeError(f"there are more than {limit} states")
        number += 1
    stuck = _first_stuck(complete, before) if goes_on else None
    if stuck is not None:
        return Found(len(states), len(complete), "it cannot go on", _path(steps, stuck))
    return Found(len(states), len(complete))


def _first_stuck(complete: list[int], before: list[list[int]]) -> int | None:
    """Return the first state from which no complete one can be reached."""
    alive, queue = set(complete), list(complete)
    while queue:
        for number in before[queue.pop()]:
            if number not in alive:
                alive.add(number)
                queue.append(number)
    return next((number for number in range(len(before)) if number not in alive), None)


def _path(steps: list[tuple[int, str] | None], number: int) -> tuple[str, ...]:
    path: list[str] = []
    while (step := steps[number]) is not None:
        number, name = step
        path.append(name)
    return tuple(reversed(path))

"""All interleavings of a few actors, one after the other: a stateless search with a bound on
preemptions.

An *actor* is code that runs in a greenlet and gives way at every I/O call (`Turns.give_way`). A
*schedule* is the list of who goes on at each of these points. The search runs the world anew for
every schedule, depth first: the first run lets each actor finish before the next, and each further
run differs from an earlier one in its last free choice. A *preemption* takes the turn from an actor
that could go on; changing actors when one has ended or waits is free, and so is stopping there:
an actor that has not finished has crashed. An actor that is alone may be stopped anywhere for one
preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import greenlet

STOP: Final = "stop"
_MOST_STEPS: Final = 2_000


def _always() -> bool:
    return True


@dataclass(eq=False)
class Actor:
    """Something that runs step by step.

    It may go on while `enabled` holds and what it waits for is there; `error` is what it ended
    with.
    """

    name: str
    body: Callable[[], None]
    enabled: Callable[[], bool] = _always
    waits_for: Callable[[], bool] = _always
    done: bool = False
    error: Exception | None = None
    steps: int = 0
    thread: greenlet.greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.thread = greenlet.greenlet(self._run)

    def _run(self) -> None:
        try:
            self.body()
        except Exception as error:  # noqa: BLE001 (kept for the code that checks the run)
            self.error = error
        finally:
            self.done = True

    @property
    def ready(self) -> bool:
        """Whether it could make a step now."""
        return not self.done and self.waits_for() and (self.steps > 0 or self.enabled())


class Turns:
    """Whose turn it is. Outside of a search (`actor` None) nothing gives way: code under it simply
    runs.
    """

    def __init__(self) -> None:
        self.actor: Actor | None = None

    def give_way(self, _reason: str = "") -> None:
        """Let the search decide who goes on."""
        if self.actor is not None:
            self.actor.thread.parent.switch()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Give way until the condition holds.

        Raises `RuntimeError` where nobody else can make it hold.
        """
        actor = self.actor
        if actor is None:
            if not condition():
                raise RuntimeError("waits for ever")
            return
        while not condition():
            actor.waits_for = condition
            actor.thread.parent.switch()
            actor.waits_for = _always


class World(Protocol):
    """What is explored: made anew for every schedule."""

    turns: Turns
    actors: list[Actor]

    def check(self) -> None:
        """Raise `AssertionError` when something that must always hold does not; called after every
        step.
        """
        ...

    def finish(self) -> None:
        """All actors that have not ended are dead; raise `AssertionError` unless the world can
        still be brought to its end.
        """
        ...


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search saw: schedules run, steps made in all of them, the most steps of one."""

    schedules: int
    steps: int
    longest: int


class Violation(AssertionError):  # noqa: N818 (reads as what it is)
    """An invariant broke; the message has the schedule."""


def explore(make: Callable[[], World], *, preemptions: int, limit: int = 1_000_000) -> Explored:
    """Run every schedule with at most that many preemptions. Raises `Violation`; `RuntimeError`
    when there are more than `limit` schedules.
    """
    schedules = steps = longest = 0
    for trace in _schedules(make, preemptions):
        schedules += 1
        steps += len(trace)
        longest = max(longest, len(trace))
        if schedules > limit:
            raise RuntimeError(f"there are more than {limit} schedules")
    return Explored(schedules, steps, longest)


def _schedules(make: Callable[[], World], preemptions: int) -> Iterator[list[str]]:
    prefix: list[int] = []
    while True:
        choices: list[tuple[int, int]] = []
        yield _run(make(), prefix, choices, preemptions)
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return
        prefix = [taken for taken, _ in choices]
        prefix[-1] += 1


def _run(
    world: World, prefix: list[int], choices: list[tuple[int, int]], preemptions: int
) -> list[str]:
    trace: list[str] = []
    current: Actor | None = None
    left = preemptions
    try:
        while True:
            options = _options(world, current, left)
            if not options:
                break
            at = len(choices)
            taken = prefix[at] if at < len(prefix) else 0
            choices.append((taken, len(options)))
            chosen = options[taken]
            if chosen is None:
                trace.append(STOP)
                break
            left -= current is not None and current is not chosen and current.ready
            current = chosen
            _step(world, current)
            trace.append(current.name)
            if len(trace) > _MOST_STEPS:
                # told with its schedule, as all others
                raise AssertionError("the actors do not come to an end")  # noqa: TRY301
            world.check()
        _end(world)
        world.finish()
        world.check()
    except AssertionError as error:
        raise Violation(f"{error}; schedule: {_readable(trace)}") from error
    return trace


def _options(world: World, current: Actor | None, left: int) -> list[Actor | None]:
    """Actors that may go on, the current one first; None: all that have begun have crashed."""
    others: list[Actor | None] = [
        actor for actor in world.actors if actor is not current and actor.ready
    ]
    if current is not None and current.ready:
        return [current, *(others or [None])] if left else [current]
    return [*others, None] if others and current is not None else others


def _step(world: World, actor: Actor) -> None:
    world.turns.actor = actor
    actor.steps += 1
    actor.thread.parent = greenlet.getcurrent()
    try:
        actor.thread.switch()
    finally:
        world.turns.actor = None


def _end(world: World) -> None:
    """Kill what has not ended: nothing that it still tries has an effect."""
    for actor in world.actors:
        if not actor.done and actor.steps:
            actor.thread.parent = greenlet.getcurrent()
            actor.thread.throw(greenlet.GreenletExit)
        actor.done = True


def _readable(trace: list[str]) -> str:
    parts: list[tuple[str, int]] = []
    for name in trace:
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1] + 1)
        else:
            parts.append((name, 1))
    return " ".join(f"{name}×{count}" for name, count in parts)

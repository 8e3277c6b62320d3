"""A stateless search of all interleavings of a few actors, with a bound on preemptions.

An *actor* is code that runs in a greenlet and yields at every I/O call (`Turns.give_way`). A
*schedule* is the list of actors that continue at each of these points. The search creates a new
world for every schedule, depth first. In the first run each actor ends before the next one starts.
Each further run differs from an earlier one in its last free choice.

A *preemption* switches away from an actor that could continue. A switch is free if the current
actor has ended or waits. A stop at such a point is free, too: an actor that has not ended has
crashed. A single remaining actor can be stopped at any point at the cost of one preemption.
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
    """Code that runs step by step.

    It can continue while `enabled` holds and the condition that it waits for is true. `error` is
    the exception that ended it.
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
        """Whether the actor can make a step now."""
        return not self.done and self.waits_for() and (self.steps > 0 or self.enabled())


class Turns:
    """Switches between the search and the running actor.

    Outside of a search `actor` is None, and `give_way` has no effect.
    """

    def __init__(self) -> None:
        self.actor: Actor | None = None

    def give_way(self, _reason: str = "") -> None:
        """Yield, so that the search chooses the next actor."""
        if self.actor is not None:
            self.actor.thread.parent.switch()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Yield until the condition holds.

        Raises `RuntimeError` outside of a search, where no other actor can make the condition true.
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
    """The system that is explored; created anew for every schedule."""

    turns: Turns
    actors: list[Actor]

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken; called after every step."""
        ...

    def finish(self) -> None:
        """Bring the world to its end after all actors have ended or crashed.

        Raises `AssertionError` if that is not possible.
        """
        ...


@dataclass(frozen=True, slots=True)
class Explored:
    """Result of a search: number of schedules, all steps, and the most steps of one schedule."""

    schedules: int
    steps: int
    longest: int


class Violation(AssertionError):  # noqa: N818 (reads as what it is)
    """A broken invariant; the message contains the schedule."""


def explore(make: Callable[[], World], *, preemptions: int, limit: int = 1_000_000) -> Explored:
    """Run every schedule with at most `preemptions` preemptions.

    Raises `Violation`, or `RuntimeError` if there are more than `limit` schedules.
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
                # Reported with its schedule, like a broken invariant.
                raise AssertionError("the actors do not come to an end")  # noqa: TRY301
            world.check()
        _end(world)
        world.finish()
        world.check()
    except AssertionError as error:
        raise Violation(f"{error}; schedule: {_readable(trace)}") from error
    return trace


def _options(world: World, current: Actor | None, left: int) -> list[Actor | None]:
    """Actors that can continue, the current one first; None means that all started ones crash."""
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
    """Kill all actors that have not ended; their further calls have no effect."""
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

"""The threads of a worker, and what a dying one means: the worker stops, visibly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from kcl_pipeline.clock import Clock, StopSignal


class Joinable(Protocol):
    """A thread, or what a simulation takes for one."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        ...

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        ...


Spawn = Callable[[str, Callable[[], None]], Joinable]
"""Starts a named thread."""


def spawn_thread(name: str, target: Callable[[], None]) -> Joinable:
    """A daemon thread of this process."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class Background:
    """Named loops that run until stopped. A loop that raises stops everything; `check` then raises
    its error in the main thread.
    """

    def __init__(self, clock: Clock, spawn: Spawn = spawn_thread) -> None:
        self.stop: StopSignal = clock.signal()
        self._spawn = spawn
        self._threads: list[Joinable] = []
        self._failures: list[BaseException] = []

    def start(self, name: str, step: Callable[[], float]) -> None:
        """Call `step` again and again, waiting the seconds that it returns in between."""

        def loop() -> None:
            try:
                while not self.stop.is_set():
                    self.stop.wait(max(step(), 0.0))
            except BaseException as error:  # noqa: BLE001
                # whatever it is, the main thread must see it
                self._failures.append(error)
                self.stop.set()

        self._threads.append(self._spawn(name, loop))

    def check(self) -> None:
        """Raise the error of a loop that died, if one has."""
        if self._failures:
            raise self._failures[0]

    def join(self, seconds: float) -> bool:
        """Stop all loops and wait for them up to `seconds` each; True when all have ended."""
        self.stop.set()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)


class Due:
    """A fixed-rate timer on a clock: `ready()` is true once per period; a late call does not make
    up for missed ones.
    """

    def __init__(self, clock: Clock, period_seconds: float, *, first_seconds: float = 0.0) -> None:
        self._clock = clock
        self._period = period_seconds
        self._next = clock.monotonic() + first_seconds

    def ready(self) -> bool:
        """Whether the time has come; if so the next time is set."""
        now = self._clock.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period, now)
        return True

    def seconds(self) -> float:
        """How long until the next time, never below 0."""
        return max(self._next - self._clock.monotonic(), 0.0)

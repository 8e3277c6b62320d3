"""Run the background threads of a worker, and stop the worker when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kcl_pipeline.clock import Clock, StopSignal


class Joinable(Protocol):
    """A thread, or its replacement in the simulation."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""


Spawn = Callable[[str, Callable[[], None]], Joinable]
"""Starts a named thread."""


def spawn_thread(name: str, target: Callable[[], None]) -> Joinable:
    """Start a daemon thread in this process."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class Background:
    """Named loops, each in its own thread.

    A loop that raises stops all loops. `check` then raises its error in the main thread.

    Args:
        clock: Clock of the waits.
        spawn: Starts a thread.

    Attributes:
        stop: Set to stop all loops, apart from those that are last.
    """

    def __init__(self, clock: Clock, spawn: Spawn = spawn_thread) -> None:
        self.stop: StopSignal = clock.signal()
        self._end = clock.signal()
        self._clock = clock
        self._spawn = spawn
        self._threads: list[Joinable] = []
        self._last_threads: list[Joinable] = []
        self._failures: list[BaseException] = []

    def start(self, name: str, step: Callable[[], float], *, is_last: bool = False) -> None:
        """Start a loop that calls `step` and then waits the seconds that `step` returned.

        Args:
            name: Name of the thread.
            step: One step of the loop.
            is_last: The loop goes on until `end`. So leases are renewed while a call of another
                loop hangs, and until they are released.
        """
        stop = self._end if is_last else self.stop

        def loop() -> None:
            try:
                while not stop.is_set():
                    stop.wait(max(step(), 0.0))
            except BaseException as error:  # noqa: BLE001 (the main thread raises it in check())
                self._failures.append(error)
                self.stop.set()

        (self._last_threads if is_last else self._threads).append(self._spawn(name, loop))

    def check(self) -> None:
        """Raise the error of a loop that failed, if there is one."""
        if self._failures:
            raise self._failures[0]

    def join(self, seconds: float) -> bool:
        """Stop the loops that are not last, and wait up to `seconds` for them.

        Returns:
            Whether they have ended.
        """
        self.stop.set()
        return self._join(self._threads, seconds)

    def end(self, seconds: float) -> bool:
        """Stop the loops that are last, and wait up to `seconds` for them.

        Returns:
            Whether they have ended.
        """
        self._end.set()
        return self._join(self._last_threads, seconds)

    def _join(self, threads: Sequence[Joinable], seconds: float) -> bool:
        end = self._clock.monotonic() + seconds
        for thread in threads:
            thread.join(max(end - self._clock.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)


class Due:
    """A timer with a fixed period, without a thread.

    Due times are one period apart. After a call that is late by more than a period, the timer is
    due again at once, one time. The other periods that were missed are dropped.

    Args:
        clock: Clock of the timer.
        period_seconds: Time between two due times.
        first_seconds: Time until the first due time.
    """

    def __init__(self, clock: Clock, period_seconds: float, *, first_seconds: float = 0.0) -> None:
        self._clock = clock
        self._period_seconds = period_seconds
        self._next_due = clock.monotonic() + first_seconds

    def ready(self) -> bool:
        """Return whether the timer is due. If it is, set the next due time."""
        now = self._clock.monotonic()
        if now < self._next_due:
            return False
        self._next_due = max(self._next_due + self._period_seconds, now)
        return True

    def seconds(self) -> float:
        """Return the seconds until the next due time, 0 or more."""
        return max(self._next_due - self._clock.monotonic(), 0.0)

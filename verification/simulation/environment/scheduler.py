"""A seeded, cooperative scheduler that runs production code of whole fleets in virtual time.

A *host* is a simulated machine. It has its own clocks (skewed, jumping). It can be paused (nothing
on it runs, as under SIGSTOP or a long garbage collection) and can crash (nothing on it runs again).
A *task* is a simulated thread. Tasks are greenlets that switch only where they wait on the host's
clock. Every simulated I/O call waits, so each call is a scheduling point. One seed decides
everything.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import greenlet

_POLL_SECONDS: Final = 0.005
_OUTSIDE: Final = "only a task can wait in virtual time"


class HostCrashed(BaseException):
    """Raised in the tasks of a crashed host, and by every I/O call that they still try.

    No production code may catch it.
    """


class TimeIsUpError(Exception):
    """The simulation reached its bound of virtual time or steps."""


@dataclass(eq=False)
class Task:
    """A simulated thread; `error` is the exception that ended it, or None."""

    name: str
    host: Host
    greenlet: greenlet.greenlet
    done: bool = False
    error: BaseException | None = None
    ticket: int = 0

    def join(self, timeout: float | None = None) -> None:
        """Wait in virtual time until the task is done, at most `timeout` seconds."""
        deadline = None if timeout is None else self.host.scheduler.now + timeout
        while not self.done and (deadline is None or self.host.scheduler.now < deadline):
            self.host.scheduler.pause(_POLL_SECONDS)

    def is_alive(self) -> bool:
        """Whether the task has not ended."""
        return not self.done


@dataclass(eq=False)
class Host:
    """A simulated machine.

    `skew_seconds` is added to its wall clock, `monotonic_base` to its monotonic one.
    """

    name: str
    scheduler: Scheduler
    skew_seconds: float = 0.0
    monotonic_base: float = 0.0
    paused_until: float = 0.0
    hung_until: float = 0.0
    crashed: bool = False
    tasks: list[Task] = field(default_factory=list)

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        """Start a task on this host."""
        return self.scheduler.spawn(self, name, target)

    def pause(self, seconds: float) -> None:
        """Run nothing on this host for `seconds`."""
        self.paused_until = max(self.paused_until, self.scheduler.now + seconds)

    def crash(self) -> None:
        """Kill the host: its tasks end at once, and their further calls have no effect."""
        self.crashed = True
        self.paused_until = 0.0

    def check(self) -> None:
        """Raise `HostCrashed` if the host has crashed; every simulated effect calls this first."""
        if self.crashed:
            raise HostCrashed(self.name)


class Scheduler:
    """Runs tasks in virtual time until none is left, a bound is reached, or a condition holds.

    `now` is virtual seconds from 0. `tasks` are all tasks that were ever started. A task that ends
    with a `BaseException` that is not an `Exception` (except its host's crash) ends the run at
    once, and is kept in `broken`. The seeded generator chooses the order of tasks that are due at
    the same time.
    """

    def __init__(self, seed: int, *, max_steps: int = 2_000_000) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self._max_steps = max_steps
        self._queue: list[tuple[float, float, int, Task]] = []
        self._serial = itertools.count()
        self.tasks: list[Task] = []
        self.broken: BaseException | None = None
        self._hub = greenlet.getcurrent()
        self._current: Task | None = None

    def spawn(self, host: Host, name: str, target: Callable[[], None]) -> Task:
        """Start a task; it first runs when the scheduler selects it."""

        def body() -> None:
            try:
                target()
            except HostCrashed:
                pass  # The crash was requested, so it is not an error of the task.
            except greenlet.GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001 (kept for the code that checks the task)
                task.error = error
                if not isinstance(error, Exception):
                    self.broken = self.broken or error
            finally:
                task.done = True

        task = Task(name, host, greenlet.greenlet(body, parent=self._hub))
        host.tasks.append(task)
        self.tasks.append(task)
        self._enqueue(task, self.now)
        return task

    def _enqueue(self, task: Task, when: float) -> None:
        """Schedule a task; only its newest entry counts.

        A task that was woken is not resumed a second time by the time-out of its wait.
        """
        task.ticket = next(self._serial)
        heapq.heappush(self._queue, (when, self.rng.random(), task.ticket, task))

    def current(self) -> Task:
        """The running task; raises `RuntimeError` outside of one."""
        if self._current is None:
            raise RuntimeError(_OUTSIDE)
        return self._current

    def wake(self, task: Task) -> None:
        """Let a waiting task continue now."""
        if not task.done:
            self._enqueue(task, self.now)

    def pause(self, seconds: float) -> None:
        """Yield and continue after `seconds` of virtual time.

        Raises `HostCrashed` if the host has crashed meanwhile.
        """
        task = self._current
        if task is None:
            raise RuntimeError(_OUTSIDE)
        # `Host.check` and `_enqueue` are inlined for speed: this is the innermost loop.
        host = task.host
        if host.crashed:
            raise HostCrashed(host.name)
        task.ticket = ticket = next(self._serial)
        when = self.now + seconds if seconds > 0.0 else self.now
        heapq.heappush(self._queue, (when, self.rng.random(), ticket, task))
        self._hub.switch()
        if host.crashed:
            raise HostCrashed(host.name)

    def run(self, until: Callable[[], bool] | None = None, *, seconds: float = 3_600.0) -> bool:
        """Run until the condition holds (True), no task is left or `seconds` have passed (False).

        Raises `TimeIsUpError` above the bound of steps.
        """
        deadline = self.now + seconds
        queue = self._queue
        while queue:
            if self.broken is not None or (until is not None and until()):
                return self.broken is None
            when, _, ticket, task = queue[0]
            if when > deadline:
                self.now = deadline
                return until is not None and until()
            heapq.heappop(queue)
            if ticket == task.ticket and not task.done:
                self._resume(task, when)
        return until is not None and until()

    def _resume(self, task: Task, when: float) -> None:
        host = task.host
        if host.paused_until > when and not host.crashed:
            self._enqueue(task, host.paused_until)
            return
        self.now = max(self.now, when)
        self.steps += 1
        if self.steps > self._max_steps:
            raise TimeIsUpError(f"{self._max_steps} steps were not enough")
        self._current = task
        try:
            task.greenlet.switch()
        finally:
            self._current = None

    def close(self) -> None:
        """End all remaining tasks as crashes; no greenlet of this scheduler is alive afterwards."""
        for _ in range(10_000):
            live = [
                entry for entry in self._queue if entry[2] == entry[3].ticket and not entry[3].done
            ]
            if not live:
                return
            self._queue = live
            heapq.heapify(self._queue)
            for *_, task in live:
                task.host.crashed = True
            _, _, _, task = heapq.heappop(self._queue)
            self._resume(task, self.now)
        raise RuntimeError("a task does not end although its host has crashed")


class SimulatedClock:
    """The `Clock` of one host: every wait is a scheduling point."""

    def __init__(self, host: Host, epoch: float = 1_800_000_000.0) -> None:
        self._host = host
        self._scheduler = host.scheduler
        self._epoch = epoch

    def monotonic(self) -> float:
        """Seconds since the host booted."""
        return self._scheduler.now + self._host.monotonic_base

    def wall(self) -> float:
        """Epoch seconds with this host's skew."""
        return self._epoch + self._scheduler.now + self._host.skew_seconds

    def sleep(self, seconds: float) -> None:
        """Pause the task."""
        self._scheduler.pause(seconds)

    def signal(self) -> SimulatedSignal:
        """A stop signal in virtual time."""
        return SimulatedSignal(self._host)

    def lock(self) -> AbstractContextManager[object]:
        """A lock that can be held across simulated I/O."""
        return SimulatedLock(self._host)


class SimulatedSignal:
    """`threading.Event` in virtual time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Whether the signal is set."""
        return self._set

    def set(self) -> None:
        """Set the signal and wake the tasks that wait for it."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._host.scheduler.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until set, or for `timeout` seconds."""
        if not self._set:
            task = self._host.scheduler.current()
            self._waiting.append(task)
            self._host.scheduler.pause(3_600.0 if timeout is None else timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._set


class SimulatedLock:
    """`threading.Lock` in virtual time.

    A task that locks it twice waits forever, as with the real lock.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._held = False

    def __enter__(self) -> bool:
        while self._held:
            self._host.scheduler.pause(_POLL_SECONDS)
        self._held = True
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False

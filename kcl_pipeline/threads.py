"""The threads of a worker, and the calls that it makes: in pools, once more after an error.

`Background` runs the first ones, and stops the worker when one of them fails. `DaemonPool` runs
calls, so that one that hangs does not keep its process: the threads of `ThreadPoolExecutor` are
joined when Python ends. A worker that was told to stop would wait there for every call that hangs,
until its platform kills it.

`InFlight` has at most one call per key, `Pools` one pool per purpose, and `retry_transient` repeats
a step until it succeeds or the worker stops.
"""

from __future__ import annotations

import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import AwsError, KclError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, EventSink

MapCallable = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Like `map`, over a sequence. The calls may run in threads."""


def serial_map(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call once per item, in order, in this thread."""
    return [call(item) for item in items] if items else []


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


MAX_SLOW: Final = 10
"""Limit for the calls that have left their slots, as a multiple of the number of slots."""

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")
_Work = tuple["Future[Any]", Callable[[], Any]]


class DaemonPool:
    """A pool of daemon threads, with the methods of `ThreadPoolExecutor`. Thread-safe.

    The threads end after `shutdown`, or when nothing refers to the pool any more.

    Args:
        slots: Calls that run at the same time, without those that are slow.
        name: Prefix of the names of the threads.
        slow_seconds: A call that lasts longer leaves its slot to the calls that wait. None: it
            keeps its slot.
        clock: Tells which calls are slow.
    """

    def __init__(
        self,
        slots: int,
        name: str,
        *,
        slow_seconds: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        slow = math.inf if slow_seconds is None else slow_seconds
        # The threads refer to this object only, so that a pool can be collected.
        self._threads = _Threads(slots, name, slow, clock or SystemClock())
        weakref.finalize(self, self._threads.shutdown).atexit = False

    def submit(self, call: Callable[..., _Answer], *arguments: Any) -> Future[_Answer]:
        """Run a call in a thread, as soon as a slot is free.

        Raises:
            RuntimeError: The pool is shut down.
        """
        future: Future[_Answer] = Future()
        self._threads.add(future, lambda: call(*arguments))
        return future

    def map(self, call: Callable[[_Item], _Answer], items: Iterable[_Item]) -> list[_Answer]:
        """Call with each item; wait for all; return the answers in the order of the items.

        Raises:
            Exception: The first error in the order of the items.
        """
        futures = [self.submit(call, item) for item in items]
        return [future.result() for future in futures]

    def look(self) -> None:
        """Let calls that wait take the slots of calls that have become slow."""
        self._threads.look()

    def shutdown(self) -> None:
        """Reject new calls and cancel waiting ones. Running calls are not waited for."""
        self._threads.shutdown()


class _Threads:
    """The threads of a pool, and the calls that wait for them."""

    def __init__(self, slots: int, name: str, slow_seconds: float, clock: Clock) -> None:
        self._slots = slots
        self._name = name
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._began: dict[int, float] = {}  # of the running calls, by thread
        self._threads = 0
        self._started = 0
        self._is_shut_down = False

    def add(self, future: Future[Any], call: Callable[[], Any]) -> None:
        with self._changed:
            if self._is_shut_down:
                raise RuntimeError(f"the pool {self._name} is shut down")
            self._waiting.append((future, call))
            self._admit()

    def look(self) -> None:
        with self._changed:
            self._admit()

    def shutdown(self) -> None:
        with self._changed:
            self._is_shut_down = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for future, _ in waiting:
            future.cancel()

    def _admit(self) -> None:
        """Wake an idle thread, or start one if a slot is free. The lock is held."""
        now = self._clock.monotonic()
        slow = sum(now - began >= self._slow_seconds for began in self._began.values())
        limit = self._slots + min(slow, MAX_SLOW * self._slots)
        idle = self._threads - len(self._began)
        for _ in range(min(len(self._waiting) - idle, limit - self._threads)):
            self._threads += 1
            self._started += 1
            threading.Thread(
                target=self._run, name=f"{self._name}-{self._started}", daemon=True
            ).start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            _answer(*work)
            del work  # an idle thread must not keep the memory of a call

    def _next(self) -> _Work | None:
        """Wait for a call. None: the pool is shut down."""
        me = threading.get_ident()
        with self._changed:
            self._began.pop(me, None)
            while not self._waiting and not self._is_shut_down:
                self._changed.wait()
            if not self._waiting:
                self._threads -= 1
                return None
            self._began[me] = self._clock.monotonic()
            return self._waiting.popleft()


def _answer(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 (`result` raises it)
        future.set_exception(error)
        # The traceback has this frame: without this line a failed call would refer to itself
        del future, call
    else:
        future.set_result(answer)


SLOW_SECONDS: Final = 0.5
"""A call for a lease that lasts longer leaves its slot, so that it does not delay the others."""

_Call = Callable[[Any], Any]


class CurrentStop:
    """`StopSignal` that delegates to another one, which can be replaced later.

    After it is set, the worker begins no new work. Leases taken during a stop would reach other
    workers later.

    Attributes:
        signal: The current signal.
    """

    def __init__(self, signal: StopSignal) -> None:
        self.signal = signal

    def is_set(self) -> bool:  # noqa: D102 (documented by the protocol, as are the others)
        return self.signal.is_set()

    def set(self) -> None:  # noqa: D102
        self.signal.set()

    def wait(self, timeout: float | None = None) -> bool:  # noqa: D102
        return self.signal.wait(timeout)


class InFlight:
    """Calls in a pool, at most one per key. The thread that starts one does not wait for it.

    Any thread may start calls. One thread collects them.

    Args:
        pool: Runs the calls. None: they run at once, on the calling thread.
    """

    def __init__(self, pool: DaemonPool | None) -> None:
        self._pool = pool
        self._lock = threading.Lock()  # not held during a call
        self._calls: dict[Hashable, Future[Any]] = {}

    def start(self, key: Hashable, call: Callable[[], Any]) -> bool:
        """Start a call, unless one of its key is in flight.

        Returns:
            Whether it was started.

        Raises:
            Exception: The error of the call, if there is no pool.
        """
        if self._pool is None:
            call()
            return True
        with self._lock:
            if key in self._calls:
                return False
            self._calls[key] = self._pool.submit(call)
            return True

    def collect(self) -> None:
        """Forget the calls that have ended.

        Raises:
            Exception: The error of one of them.
        """
        with self._lock:
            done = [key for key, future in self._calls.items() if future.done()]
            ended = [self._calls.pop(key) for key in done]
        if self._pool is not None:
            self._pool.look()
        for future in ended:
            future.result()

    def settle(self, keys: Iterable[Hashable], seconds: float) -> bool:
        """Wait at most `seconds` for calls that are in flight. Their errors are not raised.

        Returns:
            Whether they have ended.
        """
        with self._lock:
            calls = [self._calls[key] for key in keys if key in self._calls]
        return not wait(calls, timeout=seconds).not_done


class Pools:
    """Thread pools for calls that are independent of each other.

    What the thread of the leases starts has its own pool, so that calls of the thread that
    processes do not delay renewals.

    Args:
        threads: Slots of each pool.
        clock: Tells which calls are slow.
        parallel: False: all calls run one after the other on the calling thread.
    """

    def __init__(self, threads: int, clock: Clock, *, parallel: bool) -> None:
        self._clock = clock

        def pool(name: str) -> DaemonPool | None:
            if not parallel:
                return None
            return DaemonPool(threads, name, slow_seconds=SLOW_SECONDS, clock=clock)

        self._lease_calls, self._commits, self._leaving = map(pool, ("lease", "commit", "leave"))
        self.in_flight = InFlight(self._lease_calls)
        """Renewals, discovery and reports: the calls of the thread of the leases."""
        # Like `map`: for reads of rows at the start, and for the leader; and for the thread that
        # processes
        self.map_lookups: MapCallable = partial(self._map, self._lease_calls)
        self.map_commits: MapCallable = partial(self._map, self._commits)

    def _map(self, pool: DaemonPool | None, call: _Call, items: Sequence[Any]) -> list[Any]:
        if pool is None or len(items) <= 1:
            return serial_map(call, items)
        return pool.map(call, items)

    def map_until(self, call: _Call, items: Sequence[Any], *, deadline: float) -> list[Any]:
        """Like `map`, but return only what has ended at a monotonic second. The rest goes on.

        Raises:
            Exception: An error of a call that has ended.
        """
        if self._leaving is None:
            return serial_map(call, items)
        calls = [self._leaving.submit(call, item) for item in items]
        wait(calls, timeout=max(deadline - self._clock.monotonic(), 0.0))
        return [future.result() for future in calls if future.done()]

    def shut_down(self) -> None:
        """Reject new calls and cancel waiting ones. Running calls are not waited for."""
        for pool in (self._lease_calls, self._commits, self._leaving):
            if pool is not None:
                pool.shutdown()


_NOBODY_THERE: Final = "EndpointConnectionError"

_T = TypeVar("_T")


class StoppedWhileRetryingError(KclError):
    """A stop of the worker was requested while a failed step waited for its next attempt."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors are retried, and for how long.

    Attributes:
        limit_seconds: No attempt begins later than this after the first one.
        first_wait_seconds: Upper bound of the first wait. The bound doubles for each further wait.
        longest_wait_seconds: Upper bound of every wait.
        transient: Errors that are retried.
        permanent: Subclasses of `transient` errors that are not retried.
        raises_refused_connections: Whether a refused connection is raised at once, because the
            address is probably wrong.
    """

    limit_seconds: float
    first_wait_seconds: float
    longest_wait_seconds: float
    transient: tuple[type[Exception], ...] = (ThrottledError, UnavailableError)
    permanent: tuple[type[Exception], ...] = ()
    raises_refused_connections: bool = False


START_UP: Final = RetryPolicy(
    60.0, first_wait_seconds=0.2, longest_wait_seconds=5.0, raises_refused_connections=True
)


def retry_transient(
    what: str,
    step: Callable[[], _T],
    clock: Clock,
    rng: random.Random,
    events: EventSink,
    stop: StopSignal,
    policy: RetryPolicy = START_UP,
) -> _T:
    """Repeat a step until it succeeds; report each retried failure as `AwsTrouble`.

    Raises:
        StoppedWhileRetryingError: `stop` was set during a wait.
        Exception: The last error of the step, if the limit is reached or the error is permanent.
    """
    deadline = clock.monotonic() + policy.limit_seconds
    wait = policy.first_wait_seconds
    while True:
        try:
            return step()
        except policy.permanent:
            raise
        except policy.transient as error:
            is_refused = getattr(error, "code", None) == _NOBODY_THERE
            if (
                policy.raises_refused_connections and is_refused
            ) or clock.monotonic() + wait > deadline:
                raise
            events(AwsTrouble(what, str(error)))
            failure = error
        if stop.wait(wait * rng.uniform(0.5, 1.0)):
            raise StoppedWhileRetryingError(f"{what}: {failure}; the worker stops") from failure
        wait = min(2 * wait, policy.longest_wait_seconds)


def attempt(what: str, step: Callable[[], object], events: EventSink) -> None:
    """Run a step once; report an `AwsError` as an event instead of raising it."""
    try:
        step()
    except AwsError as error:
        events(AwsTrouble(what, str(error)))

"""Calls that a worker makes: in threads, again after a transient error, until a stop."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import AwsError, KclError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.threads import DaemonPool, MapCallable, serial_map

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

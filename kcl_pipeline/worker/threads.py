"""Thread pools of a worker, and the stop signal that its modules share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.events import LeaseTask
from kcl_pipeline.leases.store import MapCallable, serial_map

SLICES: Final = 4
"""A call that lasts longer than this part of a wait leaves its slot to the calls that wait."""
MAX_HUNG: Final = 10
"""Limit for calls that have left their slots, as a multiple of the number of slots."""

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


class HangingCalls:
    """Run calls of which some may hang, so that these do not delay the others for long.

    A call that hangs keeps its thread until its time-out. It leaves its slot: the calls that wait
    get a new pool. A call that has not ended is not made a second time. So there is at most one
    thread per item, and a limit for all (`MAX_HUNG`). One thread uses this object.

    Args:
        slots: Number of calls that run at the same time, without those that hang.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pool = ThreadPoolExecutor(slots, "renew")
        self._calls: dict[tuple[_Call, Any], Future[Any]] = {}
        self._in_slots: set[Future[Any]] = set()

    def run(self, call: _Call, items: Iterable[Any], seconds: float) -> list[Any]:
        """Call with each item, wait at most `seconds`, and return the results that are there.

        Raises:
            Exception: An error of a call, also of one that ended after an earlier wait.
        """
        for key in [key for key, future in self._calls.items() if future.done()]:
            self._pop(key).result()
        keys = list(dict.fromkeys((call, item) for item in items))
        awaited = [key for key in keys if key not in self._calls or not self._calls[key].running()]
        for key in keys:
            if key not in self._calls:
                self._submit(key)
        for _ in range(SLICES):
            running = [future for future in self._in_slots if future.running()]
            if not wait([self._calls[key] for key in awaited], timeout=seconds / SLICES).not_done:
                break
            if any(future.running() for future in running):
                self._replace_pool()
        return [self._pop(key).result() for key in awaited if self._calls[key].done()]

    def _submit(self, key: tuple[_Call, Any]) -> None:
        call, item = key
        future = self._calls[key] = self._pool.submit(call, item)
        self._in_slots.add(future)

    def _pop(self, key: tuple[_Call, Any]) -> Future[Any]:
        future = self._calls.pop(key)
        self._in_slots.discard(future)
        return future

    def _replace_pool(self) -> None:
        """Move the calls that wait for a thread into a new pool."""
        running = sum(future.running() for future in self._calls.values())
        if running == len(self._calls) or running >= MAX_HUNG * self._slots:
            return
        self._pool.shutdown(wait=False)
        self._pool = ThreadPoolExecutor(self._slots, "renew")
        self._in_slots.clear()
        for key in [key for key, future in self._calls.items() if future.cancel()]:
            self._submit(key)

    def shut_down(self) -> None:
        """Reject new calls and cancel waiting ones. Running calls are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class InFlight:
    """Run calls that may hang, at most one of each kind, without waiting for them.

    The thread that renews the leases starts them, and must not wait for a throttled query of the
    index or for the worker-metrics table. One thread uses this object.

    Args:
        kinds: Number of kinds.
        parallel: False: calls run at once, on the calling thread.
    """

    def __init__(self, kinds: int, *, parallel: bool) -> None:
        self._pool = ThreadPoolExecutor(kinds, "lease-task") if parallel else None
        self._calls: dict[Hashable, Future[None]] = {}

    def start(self, kind: Hashable, call: Callable[[], None]) -> None:
        """Start a call, unless one of its kind is running.

        Raises:
            Exception: An error of an earlier call.
        """
        self.collect()
        if self._pool is None:
            call()
        elif kind not in self._calls:
            self._calls[kind] = self._pool.submit(call)

    def collect(self) -> None:
        """Forget the calls that have ended.

        Raises:
            Exception: An error of one of them.
        """
        for kind in [kind for kind, future in self._calls.items() if future.done()]:
            self._calls.pop(kind).result()

    def settle(self, seconds: float) -> None:
        """Wait at most `seconds` for the calls that run. Their errors are not raised."""
        wait(self._calls.values(), timeout=seconds)

    def shut_down(self) -> None:
        """Reject new calls. Running ones are not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Pools:
    """Thread pools for calls that are independent of each other.

    Renewals have their own pool, so that writes that wait for a slow table do not delay them.

    Args:
        threads: Size of each pool.
        parallel: False: all calls run one after the other on the calling thread.
    """

    def __init__(self, threads: int, *, parallel: bool) -> None:
        self._parallel = parallel
        self._renewals = HangingCalls(threads)
        self._lookups = ThreadPoolExecutor(threads, "look-up")
        self._commits = ThreadPoolExecutor(threads, "commit")
        # Like `map`: for reads of rows at the start and at the end, and for the leader; and for the
        # thread that processes
        self.map_lookups: MapCallable = partial(self._map, self._lookups)
        self.map_commits: MapCallable = partial(self._map, self._commits)
        self.lease_tasks = InFlight(len(LeaseTask), parallel=parallel)
        """Discovery and metrics, which the thread that renews starts."""

    def map_within(self, call: _Call, items: Sequence[Any], seconds: float) -> list[Any]:
        """Like `map`, for the thread that renews: wait only for this time (`HangingCalls`).

        It returns the results that are there. The other calls go on.
        """
        return (
            self._renewals.run(call, items, seconds) if self._parallel else serial_map(call, items)
        )

    def _map(self, pool: ThreadPoolExecutor, call: _Call, items: Sequence[Any]) -> list[Any]:
        return (
            list(pool.map(call, items))
            if self._parallel and len(items) > 1
            else serial_map(call, items)
        )

    def shut_down(self) -> None:
        """Reject new calls and cancel waiting ones. Running calls are not waited for."""
        self._renewals.shut_down()
        self.lease_tasks.shut_down()
        for pool in (self._lookups, self._commits):
            pool.shutdown(wait=False, cancel_futures=True)

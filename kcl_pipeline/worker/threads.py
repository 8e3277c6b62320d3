"""Thread pools of a worker, and the stop signal that its modules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.leases.store import serial_map


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


class Pools:
    """Thread pools for calls that are independent of each other.

    Renewals have their own pool, so that prepares that wait for a slow table do not delay them.

    Args:
        threads: Size of the pool for renewals and of the pool for commits.
        parallel: False: all calls run one after the other on the calling thread.
    """

    def __init__(self, threads: int, *, parallel: bool) -> None:
        self._parallel = parallel
        self._renewals = ThreadPoolExecutor(threads, "renew")
        self._commits = ThreadPoolExecutor(threads, "commit")
        self.prepare = ThreadPoolExecutor(1, "prepare") if parallel else None
        """Prepares a batch while its files are written."""

    def map_renewals(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Like `map`, for the thread that renews."""
        return self._map(self._renewals, call, items)

    def map_within(
        self, call: Callable[[Any], Any], items: Sequence[Any], seconds: float
    ) -> list[Any]:
        """Like `map_renewals`, but wait only for this time; return the results that are there.

        The other calls go on. So one slow call does not delay the next call for other items.
        """
        if not self._parallel or len(items) <= 1:
            return serial_map(call, items)
        done, _ = wait([self._renewals.submit(call, item) for item in items], timeout=seconds)
        return [future.result() for future in done]

    def map_commits(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Like `map`, for the thread that processes."""
        return self._map(self._commits, call, items)

    def _map(
        self, pool: ThreadPoolExecutor, call: Callable[[Any], Any], items: Sequence[Any]
    ) -> list[Any]:
        return (
            list(pool.map(call, items))
            if self._parallel and len(items) > 1
            else serial_map(call, items)
        )

    def shut_down(self) -> None:
        """Reject new calls and cancel waiting ones. Running calls are not waited for."""
        for pool in (self._renewals, self._commits, self.prepare):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

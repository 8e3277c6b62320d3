"""Run calls in daemon threads, so that a call that hangs does not keep its process.

The threads of `ThreadPoolExecutor` are joined when Python ends. A worker that was told to stop
would wait there for every call that hangs, until its platform kills it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from kcl_pipeline.clock import Clock, SystemClock

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

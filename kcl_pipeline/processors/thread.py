"""The thread of a record processor: it makes the calls of one shard, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kcl_pipeline.clock import Clock


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call of a record processor that has not returned.

    Attributes:
        lease_key: The lease of its shard.
        since: When it began (monotonic seconds).
        thread: Identifier of its thread.
    """

    lease_key: str
    since: float
    thread: int


class ProcessorThread:
    """Makes the calls of one record processor in their order.

    There is a thread only while calls wait or run, so a worker has at most one per shard. It is a
    daemon: a call that hangs does not keep the process from ending.

    Args:
        lease_key: The lease of the shard.
        clock: Tells since when a call runs.
        parallel: False: calls are made on the thread that adds them.
    """

    def __init__(self, lease_key: str, clock: Clock, *, parallel: bool) -> None:
        self._lease_key = lease_key
        self._clock = clock
        self._parallel = parallel
        self._lock = threading.Lock()  # not held during a call
        self._waiting: deque[tuple[Future[None], Callable[[], object]]] = deque()
        self._is_running = False
        self.running: RunningCall | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call runs or waits. If not, all futures are done. Any thread may read it."""
        with self._lock:
            return self._is_running

    def add(self, call: Callable[[], object]) -> Future[None]:
        """Make a call after those that were added before."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((future, call))
            is_first, self._is_running = not self._is_running, True
        if not is_first:
            return future
        if self._parallel:
            name = f"processor-{self._lease_key}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        else:
            self._run()
        return future

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._lock:
                future, call = self._waiting.popleft()
            now = self._clock.monotonic()
            self.running = RunningCall(self._lease_key, now, threading.get_ident())
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:  # noqa: BLE001 (`result` raises it)
                error = raised
            self.running = None
            with self._lock:  # `is_busy` and the future change together
                is_last = not self._waiting
                self._is_running = not is_last
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

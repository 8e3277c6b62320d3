"""Turn signals, by default SIGINT and SIGTERM, into a request to stop.

A KeyboardInterrupt that is raised inside a Spark call breaks the session, and the worker cannot
finish its batch. While `stop_on_signals` is active, they only set a stop signal.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeVar

from kcl_pipeline.clock import StopSignal

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_T = TypeVar("_T")


class SignalHandlers:
    """The handlers of the signals that set `stop`.

    Attributes:
        received: Whether a signal has arrived.
    """

    def __init__(
        self, stop: StopSignal, numbers: tuple[signal.Signals, ...] = STOP_SIGNALS
    ) -> None:
        self.received = False
        self._numbers = numbers
        self._stop = stop

    def install(self) -> None:
        """Set the handlers. No effect outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                signal.signal(number, self._handle)

    def reinstalled_after(self, factory: Callable[[], _T]) -> Callable[[], _T]:
        """Return a function that calls `factory` and then `install`.

        Needed because pyspark replaces the handler of SIGINT.
        """

        def make() -> _T:
            made = factory()
            self.install()
            return made

        return make

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        # The interrupted code may be inside `stop` and hold its lock, which is not reentrant.
        # Another thread waits for that lock without blocking the code that has to release it.
        _thread.start_new_thread(self._stop.set, ())


@contextmanager
def stop_on_signals(
    stop: StopSignal, numbers: tuple[signal.Signals, ...] = STOP_SIGNALS
) -> Iterator[SignalHandlers]:
    """Set `stop` on these signals until the end of the block; then restore the handlers."""
    handlers = SignalHandlers(stop, numbers)
    before = {number: signal.getsignal(number) for number in numbers}
    handlers.install()
    try:
        yield handlers
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)

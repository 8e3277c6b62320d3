"""Read the time and wait, through a clock that tests can replace.

All other modules take a `Clock`. `SystemClock` is the real one. `kcl_pipeline.testing` has a
virtual clock, under which every wait, lock and I/O call is a scheduling point. This requires one
rule: **no plain lock is held across an I/O call.** A lock that is held across one comes from
`Clock.lock()`.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager
from typing import Final, Protocol

_SIGNAL_CHECK_SECONDS: Final = 0.5


class StopSignal(Protocol):
    """A flag that requests a stop, such as `threading.Event`."""

    def is_set(self) -> bool:
        """Whether a stop was requested."""

    def set(self) -> None:
        """Request a stop. Do not call it in a signal handler; see `signals`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set or `timeout` seconds have passed; return whether it is set."""


class Clock(Protocol):
    """Time in seconds, waits and locks."""

    def monotonic(self) -> float:
        """Return seconds that never decrease. Compare them only within one process."""

    def wall(self) -> float:
        """Return epoch seconds. They may jump. Never compare the wall clocks of two hosts."""

    def sleep(self, seconds: float) -> None:
        """Pause this thread for `seconds` (0 or more)."""

    def signal(self) -> StopSignal:
        """Return a new stop signal, not set, whose `wait` uses this clock."""

    def lock(self) -> AbstractContextManager[object]:
        """Return a lock (for `with`) that may be held across I/O."""


class _StopEvent(threading.Event):
    """An event whose `wait` notices signals within `_SIGNAL_CHECK_SECONDS`.

    Python runs signal handlers in the main thread, between two steps of Python code. A signal that
    arrives after the last step before a wait is handled only at the end of that wait, so the main
    thread waits in short parts.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set or `timeout` seconds have passed."""
        if threading.current_thread() is not threading.main_thread():
            return super().wait(timeout)
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not super().wait(min(max(end - time.monotonic(), 0.0), _SIGNAL_CHECK_SECONDS)):
            if time.monotonic() >= end:
                return False
        return True


class SystemClock:
    """The clock of this machine."""

    # The protocol documents these methods.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    signal = staticmethod(_StopEvent)
    lock = staticmethod(threading.Lock)

    def sleep(self, seconds: float) -> None:  # noqa: D102
        time.sleep(seconds)

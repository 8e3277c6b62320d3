"""The one module that knows time and waiting.

Everything else takes a `Clock`. The system clock is real; `kcl_pipeline.testing` has a virtual one,
under which every wait, lock and I/O call is a scheduling point. For that to work there is one rule:
**no plain lock is held across an I/O call**; where a lock has to span one, it comes from
`Clock.lock()`.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Protocol


class StopSignal(Protocol):
    """Something that can be asked whether to stop: `threading.Event` is one."""

    def is_set(self) -> bool:
        """Whether stopping was asked for."""
        ...

    def set(self) -> None:
        """Ask to stop; safe from a signal handler."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until set or `timeout` seconds passed; returns whether it is set."""
        ...


class Clock(Protocol):
    """Time in seconds, and the ways to wait."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something, and only in
        this process.
        """
        ...

    def wall(self) -> float:
        """Epoch seconds; may jump. Never compare the wall clocks of two hosts."""
        ...

    def sleep(self, seconds: float) -> None:
        """Pause this thread for `seconds` (≥ 0)."""
        ...

    def signal(self) -> StopSignal:
        """A new, unset stop signal whose `wait` passes time on this clock."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """A lock (used by `with`) that may be held across I/O."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:  # noqa: D102 (documented by the protocol)
        return time.monotonic()

    def wall(self) -> float:  # noqa: D102
        return time.time()

    def sleep(self, seconds: float) -> None:  # noqa: D102
        time.sleep(seconds)

    def signal(self) -> StopSignal:  # noqa: D102
        return threading.Event()

    def lock(self) -> AbstractContextManager[object]:  # noqa: D102
        return threading.Lock()

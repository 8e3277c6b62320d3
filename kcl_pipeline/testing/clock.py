"""Clocks for tests.

`ShiftedClock` is a real clock with a movable offset. `VirtualClock` is for one thread; its time
passes only by waiting.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Self

from kcl_pipeline.clock import Clock, StopSignal, SystemClock


class ShiftedClock:
    """A clock that is some seconds ahead of another clock.

    Only the times that it returns are shifted. Waiting takes as long as on the base clock.
    """

    def __init__(self, base: Clock | None = None, offset_seconds: float = 0.0) -> None:
        self._base = base if base is not None else SystemClock()
        self._offset = offset_seconds
        self._guard = threading.Lock()

    @property
    def offset_seconds(self) -> float:
        """Seconds that this clock is ahead of the base clock."""
        return self._offset

    def advance(self, seconds: float) -> None:
        """Move the clock ahead by `seconds` at once.

        Raises `ValueError` for a negative number, because monotonic time never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} seconds")
        with self._guard:
            self._offset += seconds

    def monotonic(self) -> float:  # noqa: D102 (documented by the protocol)
        return self._base.monotonic() + self._offset

    def wall(self) -> float:  # noqa: D102 (documented by the protocol)
        return self._base.wall() + self._offset

    def sleep(self, seconds: float) -> None:  # noqa: D102 (documented by the protocol)
        self._base.sleep(seconds)

    def signal(self) -> StopSignal:  # noqa: D102 (documented by the protocol)
        return self._base.signal()

    def lock(self) -> AbstractContextManager[object]:  # noqa: D102 (documented by the protocol)
        return self._base.lock()


class VirtualSignal:
    """A stop signal on virtual time.

    A wait for an unset signal lets its whole time-out pass at once.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._set = False

    def is_set(self) -> bool:  # noqa: D102 (documented by the protocol)
        return self._set

    def set(self) -> None:  # noqa: D102 (documented by the protocol)
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Pass `timeout` seconds unless the signal is set.

        Raises `RuntimeError` without a time-out, because no other thread exists that could set the
        signal.
        """
        if not self._set:
            if timeout is None:
                raise RuntimeError("waiting without a time-out on a virtual clock would never end")
            self._clock.sleep(timeout)
        return self._set


class VirtualClock:
    """A clock for one thread, whose time passes only by `sleep` and `advance`."""

    def __init__(self, start_epoch_seconds: float = 1_700_000_000.0) -> None:
        self._start = start_epoch_seconds
        self._elapsed = 0.0

    def monotonic(self) -> float:  # noqa: D102 (documented by the protocol)
        return self._elapsed

    def wall(self) -> float:  # noqa: D102 (documented by the protocol)
        return self._start + self._elapsed

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass. Raises `ValueError` for a negative number."""
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} seconds")
        self._elapsed += seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, as `sleep` does; the name is for tests that move time."""
        self.sleep(seconds)

    def signal(self) -> VirtualSignal:  # noqa: D102 (documented by the protocol)
        return VirtualSignal(self)

    def lock(self) -> AbstractContextManager[object]:
        """A lock that detects deadlocks of the only thread.

        It raises `RuntimeError` when it is taken twice.
        """
        return VirtualLock()


class VirtualLock:
    """A lock for a single thread; `with` can use it any number of times."""

    def __init__(self) -> None:
        self._locked = False

    def __enter__(self) -> Self:
        if self._locked:
            raise RuntimeError(
                "a lock of a virtual clock was taken twice by the only thread there is"
            )
        self._locked = True
        return self

    def __exit__(self, *_: object) -> None:
        self._locked = False

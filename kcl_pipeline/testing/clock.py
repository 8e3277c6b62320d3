"""Clocks for tests: `ShiftedClock` (a real clock with a movable offset) and `VirtualClock` (one
thread, time passes only by waiting).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Self

from kcl_pipeline.clock import Clock, StopSignal, SystemClock


class ShiftedClock:
    """Another clock, some seconds ahead. Waiting takes as long as it takes on the base clock; only
    what is read is shifted.
    """

    def __init__(self, base: Clock | None = None, offset_seconds: float = 0.0) -> None:
        self._base = base if base is not None else SystemClock()
        self._offset = offset_seconds
        self._guard = threading.Lock()

    @property
    def offset_seconds(self) -> float:
        """How far ahead of the base clock this one is."""
        return self._offset

    def advance(self, seconds: float) -> None:
        """Move `seconds` (≥ 0) ahead at once. Raises `ValueError` for a negative number: monotonic
        time never goes back.
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
    """A stop signal on virtual time: waiting for an unset signal lets its whole time-out pass at
    once.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._set = False

    def is_set(self) -> bool:  # noqa: D102 (documented by the protocol)
        return self._set

    def set(self) -> None:  # noqa: D102 (documented by the protocol)
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Pass `timeout` seconds unless set. Raises `RuntimeError` without a time-out: nobody else
        runs who could set it.
        """
        if not self._set:
            if timeout is None:
                raise RuntimeError("waiting without a time-out on a virtual clock would never end")
            self._clock.sleep(timeout)
        return self._set


class VirtualClock:
    """Time for one thread: it stands still until somebody sleeps or calls `advance`."""

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
        """The same as `sleep`, named for the test that moves time."""
        self.sleep(seconds)

    def signal(self) -> VirtualSignal:  # noqa: D102 (documented by the protocol)
        return VirtualSignal(self)

    def lock(self) -> AbstractContextManager[object]:
        """A lock that raises `RuntimeError` when taken twice: with one thread that would be a
        deadlock.
        """
        return VirtualLock()


class VirtualLock:
    """A lock for the only thread there is; used by `with`, any number of times."""

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

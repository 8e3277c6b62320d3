"""Read the time and wait, through a clock that tests can replace; remember when values changed.

All other modules take a `Clock`. `SystemClock` is the real one. `kcl_pipeline.testing` has a
virtual clock, under which every wait, lock and I/O call is a scheduling point. This requires one
rule: **no plain lock is held across an I/O call.** A lock that is held across one comes from
`Clock.lock()`.

`LastChanges` and `Lasting` remember since when values are unchanged, and for how long something
lasts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

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


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Known:
    value: object
    since: float
    has_changed: bool


class LastChanges(Generic[K]):
    """Since when the value of each key is unchanged, as its observer saw it.

    Times are monotonic seconds of the observer. Clocks of two hosts are never compared.
    """

    def __init__(self) -> None:
        self._known: dict[K, _Known] = {}

    def observe(self, values: Mapping[K, object], now: float) -> dict[K, object]:
        """Compare all values with the former ones, and forget the keys that are gone.

        Returns:
            The former values of the keys whose value has changed. A new key has not changed.
        """
        before, self._known = self._known, {}
        changed: dict[K, object] = {}
        for key, value in values.items():
            known = before.get(key)
            if known is None:
                known = _Known(value, now, has_changed=False)
            elif known.value != value:
                changed[key] = known.value
                known = _Known(value, now, has_changed=True)
            self._known[key] = known
        return changed

    def note(self, key: K, value: object, now: float) -> None:
        """Note a value that this process has written: it is unchanged since now."""
        self._known[key] = _Known(value, now, has_changed=True)

    def shift(self, seconds: float) -> None:
        """Leave out a time in which the observer saw nothing."""
        self._known = {
            key: replace(known, since=known.since + seconds) for key, known in self._known.items()
        }

    def since(self, key: K) -> float:
        """Return since when the value is unchanged: its last change, or the first look."""
        return self._known[key].since

    def has_changed(self, key: K) -> bool:
        """Return whether a change was seen."""
        return self._known[key].has_changed

    def seconds(self, now: float) -> dict[K, float]:
        """Return for each key for how many seconds its value is unchanged."""
        return {key: max(now - known.since, 0.0) for key, known in self._known.items()}

    def unchanged_for(self, seconds: float, now: float) -> frozenset[K]:
        """Return the keys whose value is unchanged for `seconds` or longer."""
        return frozenset(key for key, known in self._known.items() if now - known.since >= seconds)

    def keys(self) -> frozenset[K]:
        """Return all keys."""
        return frozenset(self._known)

    def __contains__(self, key: K) -> bool:
        return key in self._known


_SHORTEST_GAP_SECONDS: Final = 5.0
"""A time between two looks that counts in full, however short the limit of an observer is."""


class Lasting:
    """For how long something lasts while its observer looks.

    The time between two looks counts up to a quarter of the limit: while a process is paused as a
    whole (SIGSTOP), or its thread is in a batch, nothing can move that it looks at.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._longest_gap_seconds = max(limit_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._looked_at = 0.0
        self.seconds = 0.0

    def begin(self, at: float) -> None:
        """Begin again (monotonic seconds)."""
        self._looked_at, self.seconds = at, 0.0

    def count(self, now: float) -> float:
        """Return the seconds since the begin."""
        self.seconds += min(now - self._looked_at, self._longest_gap_seconds)
        self._looked_at = now
        return self.seconds

"""Logs the same trouble once per minute.

A table that was deleted, or a service that is away, fails every call of a worker for as long as it
lasts: a line for each would hide all others.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.events import AwsTrouble, CycleFailed, Event

REPEAT_SECONDS: Final = 60.0
MAX_REMEMBERED: Final = 200
"""Different errors; of more the oldest is forgotten."""
_NUMBER: Final = re.compile(r"\d+")


@dataclass(slots=True)
class _Told:
    at: float
    since: int = 0


class RepeatFilter:
    """Passes events on. Of `AwsTrouble` and `CycleFailed` with one error it passes one per minute.

    Errors that differ only in numbers, such as shard ids, count as one. Thread-safe.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._told: dict[str, _Told] = {}

    def __call__(self, event: Event) -> Event | None:
        """The event to report, with how often it came since the last report; None: not now."""
        if not isinstance(event, AwsTrouble | CycleFailed):
            return event
        key = f"{type(event).__name__} {_NUMBER.sub('#', event.error)}"
        now = self._clock.monotonic()
        with self._lock:
            known = self._told.get(key)
            if known is not None and now - known.at < REPEAT_SECONDS:
                known.since += 1
                return None
            self._told.pop(key, None)
            if len(self._told) >= MAX_REMEMBERED:
                self._told.pop(next(iter(self._told)))
            self._told[key] = _Told(now)
        if known is None or not known.since:
            return event
        seconds = now - known.at
        text = f"{event.error} ({known.since} more times in the last {seconds:.0f} s)"
        return replace(event, error=text)

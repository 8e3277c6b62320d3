"""Log each recurring error once per minute.

While a table is deleted or a service is unavailable, every call of a worker fails. One log line per
failure would hide all other lines.
"""

import re
import threading
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.events import AwsTrouble, CycleFailed, Event

REPEAT_SECONDS: Final = 60.0
MAX_REMEMBERED: Final = 200
"""Number of different errors that are remembered. A further one replaces the oldest."""
_NUMBER: Final = re.compile(r"\d+")


@dataclass(slots=True)
class _Told:
    at: float
    since: int = 0


class RepeatFilter:
    """Filter that passes one `AwsTrouble` or `CycleFailed` per error and minute.

    All other events pass. Errors that differ only in numbers, such as shard ids, are the same
    error. Thread-safe.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._told: dict[str, _Told] = {}

    def __call__(self, event: Event) -> Event | None:
        """Return the event to report, with its number of repetitions since the last report.

        None: the event is not reported now.
        """
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

"""How far the table is behind the streams: the age of the oldest record that is not committed.

The age of a record counts from its arrival, and no clocks of two hosts are compared: Kinesis says
how far an answer is behind the tip, arrival times of one answer are subtracted from each other, and
the time since the answer is measured on this host's monotonic clock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.clock import Clock

UNKNOWN_SECONDS: Final = 30.0
"""A shard of which nothing could be read for so long counts with the time since its lease was
taken: it may be further behind, and it must not look healthy.
"""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of one worker.

    Attributes:
        millis: By lease key; 0 when nothing waits to be committed.
        unknown: Lease keys of which it is not known yet.
    """

    millis: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def worst_millis(self) -> int | None:
        """The largest; None when none is known."""
        return max(self.millis.values(), default=None)


class LagTracker:
    """Remembers what was taken for a batch until it is committed, also over failed attempts.

    Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held_since: dict[str, float] = {}
        self._oldest: dict[str, float] = {}

    def hold(self, lease_keys: Collection[str]) -> None:
        """Follow these leases, and no others."""
        now = self._clock.monotonic()
        with self._lock:
            self._held_since = {key: self._held_since.get(key, now) for key in lease_keys}
            self._oldest = {key: at for key, at in self._oldest.items() if key in self._held_since}

    def took(self, oldest: Mapping[str, float]) -> None:
        """Records were taken for a batch; the oldest of each lease arrived at this time (seconds
        on the monotonic clock).
        """
        with self._lock:
            for key, at in oldest.items():
                self._oldest[key] = min(at, self._oldest.get(key, at))

    def committed(self, lease_keys: Collection[str]) -> None:
        """What was taken of these leases is committed."""
        with self._lock:
            for key in lease_keys:
                self._oldest.pop(key, None)

    def current(self, unread: Mapping[str, int]) -> Lag:
        """The lag now. `unread`: what is known of records after the ones taken, in milliseconds."""
        now = self._clock.monotonic()
        with self._lock:
            held, oldest = dict(self._held_since), dict(self._oldest)
        millis: dict[str, int] = {}
        unknown = []
        for key, since in held.items():
            waits = [max(round((now - oldest[key]) * 1000), 0)] if key in oldest else []
            waits += [unread[key]] if key in unread else []
            if not waits and now - since >= UNKNOWN_SECONDS:
                waits = [round((now - since) * 1000)]
            if waits:
                millis[key] = max(waits)
            else:
                unknown.append(key)
        return Lag(millis, tuple(sorted(unknown)))

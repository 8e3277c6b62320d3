"""Measure the lag of the table: the age of the oldest record that is not committed.

The age of a record counts from its arrival. Clocks of two hosts are never compared. Kinesis reports
how far a response is behind the tip. Arrival times of one response are subtracted from each other.
The time since the response is measured on this host's monotonic clock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.clock import Clock

UNKNOWN_SECONDS: Final = 30.0
"""After this time without a read, the lag of a shard is the time since its lease was gained.

The true lag may be larger, but the shard must not look healthy.
"""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of one worker.

    Attributes:
        millis: Lag by lease key. 0: no record waits to be committed.
        unknown: Keys of leases whose lag is not known yet.
    """

    millis: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def worst_millis(self) -> int | None:
        """The largest lag. None: no lag is known."""
        return max(self.millis.values(), default=None)


class LagTracker:
    """Remember the oldest record taken for a batch until it is committed.

    Failed attempts do not reset it. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held_since: dict[str, float] = {}
        self._oldest: dict[str, float] = {}

    def hold(self, lease_keys: Collection[str]) -> None:
        """Track these leases, and no others."""
        now = self._clock.monotonic()
        with self._lock:
            self._held_since = {key: self._held_since.get(key, now) for key in lease_keys}
            self._oldest = {key: at for key, at in self._oldest.items() if key in self._held_since}

    def took(self, oldest: Mapping[str, float]) -> None:
        """Note that records were taken for a batch.

        Args:
            oldest: Arrival of the oldest record by lease key (monotonic seconds).
        """
        with self._lock:
            for key, at in oldest.items():
                self._oldest[key] = min(at, self._oldest.get(key, at))

    def committed(self, lease_keys: Collection[str]) -> None:
        """Note that the records taken from these leases are committed."""
        with self._lock:
            for key in lease_keys:
                self._oldest.pop(key, None)

    def current(self, unread: Mapping[str, int]) -> Lag:
        """Return the lag now.

        Args:
            unread: Lag of the records after the taken ones, in milliseconds by lease key.
        """
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

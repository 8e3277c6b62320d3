"""How much a lease carries: a moving average of the bytes processed, which each renewal writes into
the row (protocol §6.4).
"""

from __future__ import annotations

from typing import Final

ALPHA: Final = 0.5
BYTES_PER_KILOBYTE: Final = 1024
SHORTEST_SECONDS: Final = 0.1
SEED_KEPT_SECONDS: Final = 30.0


class Throughput:
    """The average of one lease, in KiB/s; half of it is the newest interval.

    Other than KCL, it begins at the previous owner's value (which stays until this owner has
    processed something, at most 30 s), and divides by the time that really passed. None as long as
    there is neither a value to begin with nor a sample. Not thread-safe.
    """

    def __init__(self, now: float, seed_kbps: float | None) -> None:
        self._since = now
        self._seed_ends = now + SEED_KEPT_SECONDS
        self._average = seed_kbps
        self._seeded = seed_kbps is not None
        self._bytes: int | None = None

    def record(self, count: int) -> None:
        """Add processed bytes."""
        self._bytes = (self._bytes or 0) + count

    def close_interval(self, now: float) -> float | None:
        """Fold the bytes since the last call into the average, and return it.

        `now` in seconds on the monotonic clock.
        """
        elapsed = now - self._since
        if elapsed < SHORTEST_SECONDS:
            return self._average
        waiting = self._bytes is None and (
            self._average is None or (self._seeded and now < self._seed_ends)
        )
        if not waiting:
            sample = (self._bytes or 0) / BYTES_PER_KILOBYTE / elapsed
            self._average = (
                sample if self._average is None else ALPHA * sample + (1 - ALPHA) * self._average
            )
            self._seeded = False
        self._bytes = None
        self._since = now
        return self._average

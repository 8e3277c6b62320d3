"""Compute the throughput of a lease: a moving average of processed bytes (protocol §6.4).

Each renewal writes it into the lease row.
"""

from __future__ import annotations

from typing import Final

ALPHA: Final = 0.5
BYTES_PER_KILOBYTE: Final = 1024
SHORTEST_SECONDS: Final = 0.1
SEED_KEPT_SECONDS: Final = 30.0


class Throughput:
    """The average throughput of one lease in KiB/s. Not thread-safe.

    The newest interval has a weight of one half. Unlike KCL, the average starts at the value of the
    previous owner, which is kept until this owner has processed records, at most 30 s. And unlike
    KCL, bytes are divided by the measured time.

    Args:
        now: Time in monotonic seconds.
        seed_kbps: Value of the previous owner. None: it has none.
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
        """Update the average with the bytes since the last call.

        Args:
            now: Time in monotonic seconds.

        Returns:
            The average. None: there is neither a sample nor a value of the previous owner.
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

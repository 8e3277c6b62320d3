"""Decide when a shard is read again.

At its end, a shard is read once per idle time. Behind its end, it is read as fast as the limits of
the shard allow. After failures, the wait grows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MIN_CALL_SECONDS: Final = 0.2
"""A shard allows five calls per second, for all its consumers together."""

SHARD_BYTES_PER_SECOND: Final = 2_000_000
MAX_BACK_OFF_SECONDS: Final = 10.0


@dataclass(slots=True)
class Pace:
    """The time of the next read of one shard.

    A shard allows two megabytes per second. The limit is observed only after the service has
    throttled a read, because a throttled call costs no more than a wait.

    Attributes:
        idle_seconds: Wait at the end of the shard.
        due: Time of the next read, in monotonic seconds.
        failures: Failed reads in a row.
        keeps_byte_rate: Whether the byte rate is observed.
        min_call_seconds: Shortest time between two reads. 0 for a subscription, where a read makes
            no call.
    """

    idle_seconds: float
    due: float = 0.0
    failures: int = 0
    keeps_byte_rate: bool = False
    min_call_seconds: float = MIN_CALL_SECONDS
    _paid_until: float = 0.0

    def succeeded(self, began: float, *, size: int, at_tip: bool) -> None:
        """Note a read that began at `began` and returned `size` bytes."""
        self.failures = 0
        self._paid_until = max(self._paid_until, began) + size / SHARD_BYTES_PER_SECOND
        self.due = began + (
            max(self.idle_seconds, self.min_call_seconds) if at_tip else self.min_call_seconds
        )
        if self.keeps_byte_rate:
            self.due = max(self.due, self._paid_until)

    def failed(self, now: float, rng: random.Random, *, throttled: bool) -> None:
        """Note a failed read.

        The wait doubles with every failure in a row. It is randomized, so that workers do not retry
        at the same time.
        """
        self.failures += 1
        wait = min(
            max(self.idle_seconds, MIN_CALL_SECONDS) * 2 ** min(self.failures - 1, 10),
            MAX_BACK_OFF_SECONDS,
        )
        self.due = now + wait * rng.uniform(0.5, 1.0)
        if throttled:
            self.keeps_byte_rate = True
            self.due = max(self.due, min(self._paid_until, now + MAX_BACK_OFF_SECONDS))

"""Decide when a shard is read again, and how long records wait for a batch.

At its end, a shard is read once per idle time. Behind its end, it is read as fast as the limits of
the shard allow. After failures, the wait grows.

The shards of a worker that are at their end are read at the same times. So their records become one
batch, with one commit, and no record waits for the read of another shard.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MIN_CALL_SECONDS: Final = 0.2
"""A shard allows five calls per second, for all its consumers together."""

SHARD_BYTES_PER_SECOND: Final = 2_000_000
MAX_BACK_OFF_SECONDS: Final = 10.0

COMMON_TIME_SHARE: Final = 0.1
"""A read is delayed by at most this share of the idle time, to take place at the common time.

A shard whose reads are at other times comes nearer to the common time by as much with each read.
"""

_ROUNDING_SECONDS: Final = 1e-6

LAGGING_FACTOR: Final = 5
"""Records of a shard that is not read to its end wait this many times longer for a batch.

They are late already, and larger batches cost less.
"""


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
        common_time: One of the times at which all shards are read, in monotonic seconds. They are
            as far apart as two delayed reads. None: the shard is read at its own times.
    """

    idle_seconds: float
    due: float = 0.0
    failures: int = 0
    keeps_byte_rate: bool = False
    min_call_seconds: float = MIN_CALL_SECONDS
    common_time: float | None = None
    _paid_until: float = 0.0

    def succeeded(self, began: float, *, size: int, at_tip: bool) -> None:
        """Note a read that began at `began` and returned `size` bytes."""
        self.failures = 0
        self._paid_until = max(self._paid_until, began) + size / SHARD_BYTES_PER_SECOND
        self.due = began + self.min_call_seconds
        if at_tip:
            self.due = self._at_common_time(began + max(self.idle_seconds, self.min_call_seconds))
        if self.keeps_byte_rate:
            self.due = max(self.due, self._paid_until)

    def _at_common_time(self, due: float) -> float:
        """Return the common time that follows `due`, if it follows soon enough; else `due`."""
        if self.common_time is None:
            return due
        longest = COMMON_TIME_SHARE * self.idle_seconds
        delay = (self.common_time - due) % (self.idle_seconds + longest)
        return due + delay if delay <= longest + _ROUNDING_SECONDS else due

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

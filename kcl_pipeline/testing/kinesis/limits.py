"""The throughput limits of a shard, as token buckets on a monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MEBIBYTE: Final = 1_048_576
READS_PER_SECOND: Final = 5.0
BYTES_OUT_PER_SECOND: Final = 2.0 * MEBIBYTE
BYTES_IN_PER_SECOND: Final = 1.0 * MEBIBYTE
RECORDS_IN_PER_SECOND: Final = 1000.0


@dataclass(slots=True)
class TokenBucket:
    """Tokens that refill at `per_second`, up to the tokens of one second.

    `has` tests for tokens. `take` removes them without a test and can overdraw the bucket.
    """

    per_second: float
    tokens: float = -1.0
    updated: float = field(default=-1.0)

    def _refill(self, now: float) -> None:
        if self.updated < 0:
            self.tokens = self.per_second
        else:
            self.tokens = min(self.per_second, self.tokens + (now - self.updated) * self.per_second)
        self.updated = now

    def has(self, amount: float, now: float) -> bool:
        """Whether `amount` tokens are available.

        An amount above the capacity is admitted when the bucket is full.
        """
        self._refill(now)
        return self.tokens >= min(amount, self.per_second) - 1e-9

    def available(self, now: float) -> float:
        """Tokens available now; negative after an overdraft."""
        self._refill(now)
        return self.tokens

    def take(self, amount: float) -> None:
        """Remove `amount` tokens; the result can be negative."""
        self.tokens -= amount


class ShardLimits:
    """Limits of one shard per second: 1 MiB and 1,000 records in, 5 reads and 2 MiB out.

    Reads follow the documented rule. A response can have up to 10 MiB. Later reads are rejected
    until the average is within the limit again (5 seconds).
    """

    def __init__(self) -> None:
        self._bytes_in = TokenBucket(BYTES_IN_PER_SECOND)
        self._records_in = TokenBucket(RECORDS_IN_PER_SECOND)
        self._reads = TokenBucket(READS_PER_SECOND)
        self._bytes_out = TokenBucket(BYTES_OUT_PER_SECOND)

    def admit_put(self, size: int, now: float) -> bool:
        """Admit one record of `size` bytes (data and partition key), or return False."""
        if not (self._records_in.has(1, now) and self._bytes_in.has(size, now)):
            return False
        self._records_in.take(1)
        self._bytes_in.take(size)
        return True

    def admit_read(self, now: float) -> bool:
        """Admit one read, or return False.

        A read is rejected after five reads in one second, or while the bytes of earlier reads
        exceed the limit.
        """
        if not self._reads.has(1, now) or self._bytes_out.available(now) <= 0:
            return False
        self._reads.take(1)
        return True

    def charge_read(self, size: int) -> None:
        """Count the bytes that a read returned."""
        self._bytes_out.take(size)

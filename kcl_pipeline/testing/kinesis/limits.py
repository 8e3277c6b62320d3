"""The limits of a real shard, as token buckets on a monotonic clock."""

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
    """Tokens that refill at `per_second` up to one second's worth.

    `take` may overdraw a bucket that is not empty, `spend` needs the tokens.
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
        """Whether `amount` is there; more than a bucket can ever hold is let through when it is
        full.
        """
        self._refill(now)
        return self.tokens >= min(amount, self.per_second) - 1e-9

    def available(self, now: float) -> float:
        """Tokens there now; negative after overdrawing."""
        self._refill(now)
        return self.tokens

    def take(self, amount: float) -> None:
        """Use up `amount`; the bucket may go negative."""
        self.tokens -= amount


class ShardLimits:
    """What one shard lets through: 1 MiB and 1,000 records in, 5 reads and 2 MiB out, per second.

    Reading follows the documented rule: an answer may be up to 10 MiB, and then reads are refused
    until the debt is paid (5 seconds).
    """

    def __init__(self) -> None:
        self._bytes_in = TokenBucket(BYTES_IN_PER_SECOND)
        self._records_in = TokenBucket(RECORDS_IN_PER_SECOND)
        self._reads = TokenBucket(READS_PER_SECOND)
        self._bytes_out = TokenBucket(BYTES_OUT_PER_SECOND)

    def admit_put(self, size: int, now: float) -> bool:
        """Take room for one record of `size` bytes (data and partition key); False when there is
        none.
        """
        if not (self._records_in.has(1, now) and self._bytes_in.has(size, now)):
            return False
        self._records_in.take(1)
        self._bytes_in.take(size)
        return True

    def admit_read(self, now: float) -> bool:
        """Take room for one read; False when there were five in this second or bytes are still
        owed.
        """
        if not self._reads.has(1, now) or self._bytes_out.available(now) <= 0:
            return False
        self._reads.take(1)
        return True

    def charge_read(self, size: int) -> None:
        """Account for the bytes that a read returned."""
        self._bytes_out.take(size)

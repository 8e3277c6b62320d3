"""When a shard may be asked again: at its tip once per idle time, behind it as fast as the shard's
limits allow, after a failure later and later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MIN_CALL_SECONDS: Final = 0.2
"""Five calls a second are all that a shard gives to its consumers together."""

SHARD_BYTES_PER_SECOND: Final = 2_000_000
MAX_BACK_OFF_SECONDS: Final = 10.0


@dataclass(slots=True)
class Pace:
    """The times of one shard, in monotonic seconds.

    The two megabytes a second that a shard gives are kept to only once the service has insisted on
    them: a refusal costs a call, and so does asking a shard again right after it gave ten
    megabytes. `min_call_seconds` 0 is for a shard that pushes: looking for what came costs no call.
    """

    idle_seconds: float
    due: float = 0.0
    failures: int = 0
    keeps_byte_rate: bool = False
    min_call_seconds: float = MIN_CALL_SECONDS
    _paid_until: float = 0.0

    def succeeded(self, began: float, *, size: int, at_tip: bool) -> None:
        """A call that began at `began` brought `size` bytes."""
        self.failures = 0
        self._paid_until = max(self._paid_until, began) + size / SHARD_BYTES_PER_SECOND
        self.due = began + (
            max(self.idle_seconds, self.min_call_seconds) if at_tip else self.min_call_seconds
        )
        if self.keeps_byte_rate:
            self.due = max(self.due, self._paid_until)

    def failed(self, now: float, rng: random.Random, *, throttled: bool) -> None:
        """A call failed: twice the wait for each failure in a row, less a random part, so that
        workers do not come back together.
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

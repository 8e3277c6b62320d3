"""Wait before a lease is taken again that another process with the same worker id takes, too.

Both processes find the lease in the table as their own. Each that takes it refuses the batch that
the other one prepares. Without a wait they can go on like this for ever, and nothing is committed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

FIRST_SECONDS: Final = 0.5
MOST_SECONDS: Final = 8.0
FORGET_SECONDS: Final = 60.0
"""After this time without a loss, the next one counts as the first."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """How often a lease was lost, when it was last, and until when it is not taken."""

    times: int
    at: float
    until: float


class Rivals:
    """The leases that were lost while another process used the worker id.

    The wait after a loss is random, up to a limit that doubles with each loss. So one of the two
    has the lease for long enough to commit a batch.

    Args:
        rng: Draws the waits.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._losses: dict[str, _Loss] = {}

    def lost(self, lease_key: str, now: float) -> None:
        """Note a loss at a monotonic second."""
        self._losses = {
            key: one for key, one in self._losses.items() if now - one.at < FORGET_SECONDS
        }
        known = self._losses.get(lease_key)
        times = 0 if known is None else known.times
        most = min(FIRST_SECONDS * 2**times, MOST_SECONDS)
        self._losses[lease_key] = _Loss(times + 1, now, now + self._rng.uniform(0.0, most))

    def may_take(self, lease_key: str, now: float) -> bool:
        """Return whether the wait after the last loss of a lease is over."""
        known = self._losses.get(lease_key)
        return known is None or now >= known.until

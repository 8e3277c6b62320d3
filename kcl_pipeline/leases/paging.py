"""Retry throttled pages of a scan or query, so that one page does not fail the whole read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import ThrottledError

ATTEMPTS: Final = 16
"""With half of all requests throttled, a page fails finally once in 65,536 reads."""

FIRST_WAIT_SECONDS: Final = 0.05
LONGEST_WAIT_SECONDS: Final = 1.0
TOTAL_SECONDS: Final = 15.0
"""Limit for the pages of one read. Half of the duration of the leader lock."""

_T = TypeVar("_T")


class PageRetry:
    """Retries the pages of one scan or query. A page that was read is not read again.

    Args:
        clock: Clock of the waits.
        rng: Spreads the waits of processes that were throttled together.
        total_seconds: Limit for all pages together.
    """

    def __init__(
        self, clock: Clock, rng: random.Random, total_seconds: float = TOTAL_SECONDS
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._deadline = clock.monotonic() + total_seconds

    def page(self, read: Callable[[], _T]) -> _T:
        """Return the result of `read`, which is repeated while it is throttled.

        Raises:
            ThrottledError: All attempts were throttled, or the time of this read is over.
            AwsError: `read` failed.
        """
        wait = FIRST_WAIT_SECONDS
        attempts = 0
        while True:
            try:
                return read()
            except ThrottledError:
                attempts += 1
                seconds = wait * self._rng.uniform(0.5, 1.0)
                if attempts == ATTEMPTS or self._clock.monotonic() + seconds > self._deadline:
                    raise
            self._clock.sleep(seconds)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

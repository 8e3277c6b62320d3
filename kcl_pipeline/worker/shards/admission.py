"""The check that stands between gaining a lease and reading its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import AwsError, UnreadableRowError
from kcl_pipeline.events import AwsTrouble, EventSink

RETRY_SECONDS: Final = 0.5
_WHAT: Final = "look at the identity of the application"


class Admission:
    """Admits gained leases while the application is the one that this worker was started for.

    The streams of an application may be changed on purpose while no worker holds a lease. A worker
    that stood still meanwhile, or had no lease, would read a gained lease of the new stream with
    its own stream. So the record is read after each gain; `check` compares and raises
    `OtherApplicationError`.
    """

    def __init__(self, check: Callable[[], None], clock: Clock, events: EventSink) -> None:
        self._check = check
        self._clock = clock
        self._events = events
        self._due = 0.0

    def admits(self) -> bool:
        """Whether leases that were gained before this call may be read.

        False when the record could not be read now: ask again. A record that is not readable at all
        was not written by a change, and keeps nobody from reading. Raises `OtherApplicationError`.
        """
        now = self._clock.monotonic()
        if now < self._due:
            return False
        try:
            self._check()
        except UnreadableRowError as error:
            self._events(AwsTrouble(_WHAT, str(error)))
        except AwsError as error:
            self._events(AwsTrouble(_WHAT, str(error)))
            self._due = now + RETRY_SECONDS
            return False
        return True

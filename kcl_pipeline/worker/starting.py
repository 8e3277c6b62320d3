"""What a worker does before it works may be refused for a while, as everything later: then it is
asked for again, for a bounded time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import KclError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, EventSink

RETRY_LIMIT_SECONDS: Final = 60.0
FIRST_WAIT_SECONDS: Final = 0.2
LONGEST_WAIT_SECONDS: Final = 5.0
_NOBODY_THERE: Final = "EndpointConnectionError"

_T = TypeVar("_T")


class StoppedWhileStartingError(KclError):
    """The worker was told to stop before it had begun."""


def retry_transient(
    what: str,
    step: Callable[[], _T],
    clock: Clock,
    rng: random.Random,
    events: EventSink,
    stop: StopSignal,
) -> _T:
    """Take a step that may be repeated, until AWS neither throttles nor fails it.

    A refused connection is raised at once, because an address that is wrong never gets better.
    Raises what the step raised last when `RETRY_LIMIT_SECONDS` are over, and
    `StoppedWhileStartingError`.
    """
    deadline = clock.monotonic() + RETRY_LIMIT_SECONDS
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            return step()
        except (ThrottledError, UnavailableError) as error:
            if error.code == _NOBODY_THERE or clock.monotonic() + wait > deadline:
                raise
            events(AwsTrouble(what, str(error)))
        if stop.wait(wait * rng.uniform(0.5, 1.0)):
            raise StoppedWhileStartingError(f"stopped while starting: {what}")
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)

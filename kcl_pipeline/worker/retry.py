"""Retry transient errors with growing waits that a stop ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import AwsError, KclError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, EventSink

_NOBODY_THERE: Final = "EndpointConnectionError"

_T = TypeVar("_T")


class StoppedWhileRetryingError(KclError):
    """A stop of the worker was requested while a failed step waited for its next attempt."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors are retried, and for how long.

    Attributes:
        limit_seconds: No attempt begins later than this after the first one.
        first_wait_seconds: Upper bound of the first wait. The bound doubles for each further wait.
        longest_wait_seconds: Upper bound of every wait.
        transient: Errors that are retried.
        permanent: Subclasses of `transient` errors that are not retried.
        raises_refused_connections: Whether a refused connection is raised at once, because the
            address is probably wrong.
    """

    limit_seconds: float
    first_wait_seconds: float
    longest_wait_seconds: float
    transient: tuple[type[Exception], ...] = (ThrottledError, UnavailableError)
    permanent: tuple[type[Exception], ...] = ()
    raises_refused_connections: bool = False


START_UP: Final = RetryPolicy(
    60.0, first_wait_seconds=0.2, longest_wait_seconds=5.0, raises_refused_connections=True
)


def retry_transient(
    what: str,
    step: Callable[[], _T],
    clock: Clock,
    rng: random.Random,
    events: EventSink,
    stop: StopSignal,
    policy: RetryPolicy = START_UP,
) -> _T:
    """Repeat a step until it succeeds; report each retried failure as `AwsTrouble`.

    Raises:
        StoppedWhileRetryingError: `stop` was set during a wait.
        Exception: The last error of the step, if the limit is reached or the error is permanent.
    """
    deadline = clock.monotonic() + policy.limit_seconds
    wait = policy.first_wait_seconds
    while True:
        try:
            return step()
        except policy.permanent:
            raise
        except policy.transient as error:
            is_refused = getattr(error, "code", None) == _NOBODY_THERE
            if (
                policy.raises_refused_connections and is_refused
            ) or clock.monotonic() + wait > deadline:
                raise
            events(AwsTrouble(what, str(error)))
            failure = error
        if stop.wait(wait * rng.uniform(0.5, 1.0)):
            raise StoppedWhileRetryingError(f"{what}: {failure}; the worker stops") from failure
        wait = min(2 * wait, policy.longest_wait_seconds)


def attempt(what: str, step: Callable[[], object], events: EventSink) -> None:
    """Run a step once; report an `AwsError` as an event instead of raising it."""
    try:
        step()
    except AwsError as error:
        events(AwsTrouble(what, str(error)))

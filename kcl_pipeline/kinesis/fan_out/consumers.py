"""Registered consumers: found, or registered and waited for (protocol §10.4).

They are never deregistered: others of the application read by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient
from kcl_pipeline.shards import StreamId

MAX_TRIES: Final = 10
WAIT_SECONDS: Final = 1.0


class Consumers:
    """The consumer of each stream, by one name.

    `given` maps stream names to ARNs that are used as they are. Any thread.
    """

    def __init__(
        self, client: FanOutClient, name: str, given: Mapping[str, str], clock: Clock
    ) -> None:
        self._client = client
        self._name = name
        self._given = dict(given)
        self._clock = clock
        self._lock = clock.lock()
        self._known: dict[str, str] = {}

    def arn(self, stream: StreamId) -> str:
        """The ARN of an active consumer, registered if need be, which takes some seconds.

        Raises `ThrottledError` when the service's limits refuse a new one ten times,
        `UnavailableError` when it does not become active in ten seconds, and what a refused call
        means (`AccessDeniedError`, `NotFound`).
        """
        if stream.name in self._given:
            return self._given[stream.name]
        with self._lock:
            if stream.serialized not in self._known:
                self._known[stream.serialized] = self._active(stream)
            return self._known[stream.serialized]

    def forget(self, stream: StreamId) -> None:
        """The consumer turned out to be gone: look for it, or register it, when next asked."""
        with self._lock:
            self._known.pop(stream.serialized, None)

    def _active(self, stream: StreamId) -> str:
        refusals = 0
        for attempt in range(2 * MAX_TRIES):
            if attempt:
                self._clock.sleep(WAIT_SECONDS)
            consumer = self._client.describe_consumer(stream, self._name)
            if consumer is not None and consumer.is_active:
                return consumer.arn
            if consumer is None:
                try:
                    self._client.register_consumer(stream, self._name)
                except ThrottledError:
                    refusals += 1
                    if refusals >= MAX_TRIES:
                        raise
            elif attempt - refusals > MAX_TRIES:
                break
        raise UnavailableError(
            f"consumer {self._name} of {stream.name} did not become active in time",
            code="NotActive",
            operation="DescribeStreamConsumer",
        )

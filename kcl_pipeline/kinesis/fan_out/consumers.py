"""Find or register the fan-out consumers of streams (protocol §10.4).

A consumer is never deregistered, because other workers of the application use it.
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
    """The consumer of each stream. Thread-safe.

    Args:
        client: The client.
        name: Name of the consumer in every stream.
        given: ARNs of registered consumers by the ARN of their stream. Nothing is registered for
            these streams.
        clock: Clock of the waits.
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
        """Return the ARN of an active consumer. Registering one takes some seconds.

        Raises:
            ThrottledError: The service throttled the registration ten times.
            UnavailableError: The consumer did not become active within ten seconds.
            AwsError: A call failed.
        """
        given = self._given.get(stream.arn or "")
        if given is not None:
            return given
        with self._lock:
            if stream.serialized not in self._known:
                self._known[stream.serialized] = self._active(stream)
            return self._known[stream.serialized]

    def forget(self, stream: StreamId) -> None:
        """Drop the cached ARN, because the consumer does not exist any more."""
        with self._lock:
            self._known.pop(stream.serialized, None)

    def _active(self, stream: StreamId) -> str:
        throttled = 0
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
                    throttled += 1
                    if throttled >= MAX_TRIES:
                        raise
            elif attempt - throttled > MAX_TRIES:
                break
        raise UnavailableError(
            f"consumer {self._name} of {stream.name} did not become active in time",
            code="NotActive",
            operation="DescribeStreamConsumer",
        )

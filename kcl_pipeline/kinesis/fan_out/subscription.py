"""The interfaces of a fan-out client and its subscriptions (protocol §10.4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from kcl_pipeline.clock import Clock
from kcl_pipeline.kinesis.client import IteratorType, RecordsPage
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import Spawn


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered consumer of a stream. It can subscribe only if it `is_active`."""

    arn: str
    is_active: bool


class Subscribed(Protocol):
    """A subscription with a bounded buffer, with or without its own thread.

    Its methods do not wait for the connection.

    Attributes:
        error: The error that ended it. None: a normal end. Valid when `is_over`.
        received: Number of events so far.
    """

    error: Exception | None
    received: int

    @property
    def is_over(self) -> bool:
        """Whether the subscription has ended and all events were taken."""

    def start(self, name: str, spawn: Spawn) -> None:
        """Start to read, in a thread of this name if it needs one."""

    def take(self) -> RecordsPage | None:
        """Remove and return the oldest event; None if there is none."""

    def silent_seconds(self) -> float:
        """Return the time without data; 0 while events are buffered, and after the end."""

    def close(self) -> None:
        """End the subscription and drop its events. Thread-safe; does not wait."""


class FanOutClient(Protocol):
    """The calls that enhanced fan-out needs in addition to `KinesisClient`.

    One attempt per call. The errors are those of `kcl_pipeline.errors`.
    """

    def describe_consumer(self, stream: StreamId, name: str) -> Consumer | None:
        """Return the consumer of this name; None if it is not registered."""

    def register_consumer(self, stream: StreamId, name: str) -> None:
        """Register a consumer, which becomes active some seconds later.

        No error if it exists already.

        Raises:
            ThrottledError: The limits of the service are exceeded.
        """

    def subscribe(
        self,
        consumer_arn: str,
        stream: StreamId,
        shard_id: str,
        kind: IteratorType,
        clock: Clock,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> Subscribed:
        """Subscribe to a shard. `start` of the result begins to read.

        Raises:
            ThrottledError: The last subscription to the shard is less than five seconds old.
            NotFoundError: The shard, the stream or the consumer does not exist.
        """

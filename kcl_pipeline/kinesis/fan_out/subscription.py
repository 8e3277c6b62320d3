"""Receive the events of one SubscribeToShard call in a thread with a bounded buffer.

Only this thread waits for the connection (protocol §10.4). The interfaces of a fan-out client are
here, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from kcl_pipeline.background import Spawn
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.kinesis.client import IteratorType, RecordsPage
from kcl_pipeline.shards import StreamId

MAX_BUFFERED_EVENTS: Final = 4
"""Events of 2 MB at most. While the buffer is full, the thread does not read from the connection,
and flow control stops the service.
"""

CAPACITY_CHECK_SECONDS: Final = 0.1


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


class PulledEvents(Protocol):
    """The events of one subscription, for a thread that waits for them."""

    def pages(self) -> Iterator[RecordsPage]:
        """Yield the events, waiting for each, until the service ends the subscription.

        `next_iterator` is the ContinuationSequenceNumber, or None at the end of the shard.

        Raises:
            AwsError: The subscription failed.
        """

    def close(self) -> None:
        """End the subscription. A thread that waits in `pages` returns.

        Thread-safe; does not wait. May be called repeatedly.
        """


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


class Subscription:
    """A subscription whose events a thread receives into a bounded buffer.

    No plain lock is held during a wait.

    Args:
        events: The events.
        clock: The clock.

    Attributes:
        error: The error that ended it. None: a normal end. Set after the last event is buffered.
        received: Number of events so far.
    """

    def __init__(self, events: PulledEvents, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._guard = threading.Lock()
        self._pages: deque[RecordsPage] = deque()
        self._waiting_since: float | None = clock.monotonic()
        self._capacity: StopSignal | None = None
        self._closed = False
        self._over = False
        self.error: Exception | None = None
        self.received = 0

    def start(self, name: str, spawn: Spawn) -> None:
        """Start to read, in a thread of this name."""
        spawn(name, self._pump)

    def take(self) -> RecordsPage | None:
        """Remove and return the oldest event; None if there is none."""
        with self._guard:
            if not self._pages:
                return None
            page = self._pages.popleft()
            if self._capacity is not None:
                self._capacity.set()
            return page

    @property
    def is_over(self) -> bool:
        """Whether the subscription has ended and all events were taken."""
        with self._guard:
            return self._over and not self._pages

    def silent_seconds(self) -> float:
        """Return the time without data; 0 while the buffer is full, and after the end."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def close(self) -> None:
        """End the subscription and drop its events. Does not wait for the thread to end."""
        with self._guard:
            self._closed = True
            self._pages.clear()
            if self._capacity is not None:
                self._capacity.set()
        self._events.close()

    def _pump(self) -> None:
        try:
            for page in self._events.pages():
                self._waiting_since = None
                if not self._put(page) or page.next_iterator is None:
                    break
                self._waiting_since = self._clock.monotonic()
        except Exception as error:  # noqa: BLE001 (`SubscribedShard` raises it)
            self.error = error
        finally:
            self._waiting_since = None
            with self._guard:
                self._over = True
            self._events.close()

    def _put(self, page: RecordsPage) -> bool:
        """Wait until the buffer has capacity and append the event. Return False when closed."""
        while True:
            with self._guard:
                if self._closed:
                    return False
                if len(self._pages) < MAX_BUFFERED_EVENTS:
                    self._pages.append(page)
                    self.received += 1
                    return True
                capacity = self._capacity = self._clock.signal()
            capacity.wait(CAPACITY_CHECK_SECONDS)

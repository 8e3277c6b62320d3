"""One SubscribeToShard: a thread waits on the wire and keeps a few decoded events ready, so that
nobody else ever waits there (protocol §10.4).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.kinesis.client import IteratorType, RecordsPage
from kcl_pipeline.shards import StreamId

MAX_BUFFERED_EVENTS: Final = 4
"""An event holds 2 MB at most.

Behind a full buffer the thread does not read, and the service is held up by the transport.
"""

ROOM_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered consumer of a stream. Only one that `is_active` may subscribe."""

    arn: str
    is_active: bool


class Subscribed(Protocol):
    """A subscription behind a bounded buffer, of which nobody else waits for the wire:
    `Subscription`, and what has no thread of its own.

    `error` is what ended it, None after a normal end; it is there once `is_over`. `received`:
    events so far.
    """

    error: Exception | None
    received: int

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more and everything has been taken."""
        ...

    def start(self, name: str, spawn: Spawn) -> None:
        """Begin to read, on a thread of that name if it needs one."""
        ...

    def take(self) -> RecordsPage | None:
        """The oldest event that has not been taken; None when there is none yet."""
        ...

    def silent_seconds(self) -> float:
        """How long the wire has said nothing; 0 while there are events to take, and after the
        end.
        """
        ...

    def close(self) -> None:
        """End the subscription and forget what is buffered. Any thread; does not wait."""
        ...


class EventStream(Protocol):
    """A subscription that has begun."""

    def subscription(self, clock: Clock) -> Subscribed:
        """The buffer that its events are taken from. Called once."""
        ...


class PulledEvents(Protocol):
    """The events of one subscription, for a thread that waits for them."""

    def pages(self) -> Iterator[RecordsPage]:
        """Waits for the next event; ends when the service ends the subscription.

        `next_iterator` is the ContinuationSequenceNumber, None at the shard's end. Raises the
        errors of `kcl_pipeline.errors`.
        """
        ...

    def close(self) -> None:
        """End it; a thread that waits in `pages` comes back.

        Any thread, any number of times, does not wait.
        """
        ...


class FanOutClient(Protocol):
    """What enhanced fan-out needs of Kinesis beyond `KinesisClient`.

    Raises the errors of `kcl_pipeline.errors`; one attempt per call.
    """

    def describe_consumer(self, stream: StreamId, name: str) -> Consumer | None:
        """The consumer of that name; None when it is not registered."""
        ...

    def register_consumer(self, stream: StreamId, name: str) -> None:
        """Ask for one; it becomes active some seconds later. One that exists already is no error.

        Raises `Throttled` at the service's limits.
        """
        ...

    def subscribe(
        self,
        consumer_arn: str,
        stream: StreamId,
        shard_id: str,
        kind: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> EventStream:
        """Begin.

        Raises `Throttled` while the shard has a younger subscription than five seconds, `NotFound`
        for shard, stream and consumer alike.
        """
        ...


class Joinable(Protocol):
    """A thread, or what a simulation takes for one."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        ...


Spawn = Callable[[str, Callable[[], None]], Joinable]


class Subscription:
    """The events of one subscription behind a bounded buffer. `start` it once, `take` what is
    there, `close` it.

    No plain lock is held while anything waits. `error` is what ended it, None after a normal end;
    it is set only after the last event is buffered.
    """

    def __init__(self, events: PulledEvents, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._guard = threading.Lock()
        self._pages: deque[RecordsPage] = deque()
        self._waiting_since: float | None = clock.monotonic()
        self._room: StopSignal | None = None
        self._closed = False
        self._over = False
        self.error: Exception | None = None
        self.received = 0

    def start(self, name: str, spawn: Spawn) -> None:
        """Begin to read, on a thread of that name."""
        spawn(name, self._pump)

    def take(self) -> RecordsPage | None:
        """The oldest event that has not been taken."""
        with self._guard:
            if not self._pages:
                return None
            page = self._pages.popleft()
            if self._room is not None:
                self._room.set()
            return page

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more and everything has been taken."""
        with self._guard:
            return self._over and not self._pages

    def silent_seconds(self) -> float:
        """How long the wire has said nothing; 0 while the buffer is full, and after the end."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def close(self) -> None:
        """End the subscription and forget what is buffered.

        Does not wait for the thread, which ends by itself.
        """
        with self._guard:
            self._closed = True
            self._pages.clear()
            if self._room is not None:
                self._room.set()
        self._events.close()

    def _pump(self) -> None:
        try:
            for page in self._events.pages():
                self._waiting_since = None
                if not self._put(page) or page.next_iterator is None:
                    break
                self._waiting_since = self._clock.monotonic()
        except Exception as error:  # noqa: BLE001 (it is raised again in the thread that takes)
            self.error = error
        finally:
            self._waiting_since = None
            with self._guard:
                self._over = True
            self._events.close()

    def _put(self, page: RecordsPage) -> bool:
        """Buffer it once there is room; False when closed meanwhile."""
        while True:
            with self._guard:
                if self._closed:
                    return False
                if len(self._pages) < MAX_BUFFERED_EVENTS:
                    self._pages.append(page)
                    self.received += 1
                    return True
                room = self._room = self._clock.signal()
            room.wait(ROOM_CHECK_SECONDS)

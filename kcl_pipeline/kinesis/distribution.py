"""Know whether a stream distributes its records to shards itself.

Kinesis calls this the record distribution strategy AUTO. Producers then need no partition key, and
the hash key of a record says nothing about its shard. Therefore no KPL aggregate of such a stream
is dropped because of the hash keys of its user records (`reader.deaggregate`).

DescribeStreamSummary is limited to 20 calls per second for an account. So the strategy is read when
the stream is resolved, and again only when a decision depends on it and the last answer is old.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.identity import describe
from kcl_pipeline.shards import AUTO, StreamId

KEPT_SECONDS: Final = 600.0
"""How long an answer is used."""

RETRY_SECONDS: Final = 5.0
"""Time between two calls for records without a key after the call failed."""


@dataclass(slots=True)
class _Known:
    """What is known of one stream.

    Attributes:
        lock: Held during the call.
        strategy: The last answer. None: there is none.
        asked_at: When the call for it began (monotonic seconds).
        keyless_due: When a record without a key may be a reason to ask (monotonic seconds).
    """

    lock: AbstractContextManager[object]
    strategy: str | None
    asked_at: float
    keyless_due: float = field(default=float("-inf"))


class RecordDistribution:
    """Knows the record distribution strategies of streams. Thread-safe.

    One call at a time for each stream. Streams do not wait for each other.

    Args:
        kinesis: Describes the streams.
        clock: The clock.
        events: Receives the failed calls that are not raised.
    """

    def __init__(self, kinesis: KinesisClient, clock: Clock, events: EventSink) -> None:
        self._kinesis = kinesis
        self._clock = clock
        self._events = events
        self._began = clock.monotonic()
        self._guard = threading.Lock()
        self._known: dict[tuple[str, int | None], _Known] = {}

    def was_automatic(self, stream: StreamId) -> bool:
        """Return whether the last answer was AUTO. Makes no call."""
        return self._of(stream).strategy == AUTO

    def is_automatic(self, stream: StreamId) -> bool:
        """Return whether the strategy is AUTO. The answer is at most `KEPT_SECONDS` old.

        Raises:
            AwsError: DescribeStreamSummary failed.
        """
        known = self._of(stream)
        with known.lock:
            if known.strategy is None or self._clock.monotonic() - known.asked_at >= KEPT_SECONDS:
                self._ask(stream, known)
            return known.strategy == AUTO

    def note_keyless(self, stream: StreamId) -> None:
        """Note a record without a key. It is a reason to ask at once, once per `KEPT_SECONDS`.

        A failed call has no effect: `is_automatic` asks again when a decision depends on it.
        """
        known = self._of(stream)
        if known.strategy == AUTO or self._clock.monotonic() < known.keyless_due:
            return
        with known.lock:
            now = self._clock.monotonic()
            if known.strategy == AUTO or now < known.keyless_due:
                return
            try:
                self._ask(stream, known)
            except AwsError as error:
                about = f"record distribution strategy of {stream.name}"
                self._events(AwsTrouble(about, str(error)))
                known.strategy = None
                known.keyless_due = now + RETRY_SECONDS
            else:
                known.keyless_due = now + KEPT_SECONDS

    def _ask(self, stream: StreamId, known: _Known) -> None:
        asked_at = self._clock.monotonic()
        known.strategy = describe(self._kinesis, stream).record_distribution
        known.asked_at = asked_at

    def _of(self, stream: StreamId) -> _Known:
        key = stream.arn or stream.serialized, stream.created_millis
        with self._guard:
            if key not in self._known:
                lock = self._clock.lock()
                self._known[key] = _Known(lock, stream.record_distribution, self._began)
            return self._known[key]

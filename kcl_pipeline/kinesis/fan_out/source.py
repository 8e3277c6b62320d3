"""Enhanced fan-out: shards that push their records instead of being asked for them (protocol
§10.4).

A subscription is made to look like a `ShardClient` whose iterators are the places to subscribe
at. `ShardReader` on top of it then does everything that polling does too, by the same lines: where
to begin, what to filter, KPL aggregates, which answers are not believed, where to go on after an
error.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any, Final, cast

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import ExpiredIteratorError, NotFoundError, UnavailableError
from kcl_pipeline.kinesis.client import (
    NO_RECORDS,
    IteratorType,
    KinesisClient,
    LatestIterator,
    RecordsPage,
)
from kcl_pipeline.kinesis.fan_out.consumers import Consumers
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient, Spawn, Subscribed
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.shards import StreamId

POLL_SECONDS: Final = 0.02
"""How often a subscription's buffer is looked at; no call is made for it."""


class SubscribedShard:
    """The `ShardClient` of one shard that is subscribed to. `get_records` never waits for
    records: an empty page means that none is there yet.

    Its iterators are `<type>` or `<type>:<argument>`. One that is not where the subscription stands
    makes a new subscription there, so whatever failed on the way to the caller is delivered again.
    """

    def __init__(
        self,
        polling: KinesisClient,
        fan_out: FanOutClient,
        consumers: Consumers,
        settings: RetrievalSettings,
        clock: Clock,
        spawn: Spawn,
        lease_key: str,
    ) -> None:
        self._polling = polling
        self._fan_out = fan_out
        self._consumers = consumers
        self._settings = settings
        self._clock = clock
        self._spawn = spawn
        self._lease_key = lease_key
        self._guard = threading.Lock()
        self._closed = False
        self._subscription: Subscribed | None = None
        self._at = ""
        self._behind: int | None = None
        self._asked_latest = False

    def get_shard_iterator(
        self,
        _stream: StreamId,
        _shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """A place to subscribe at; no call."""
        argument = (
            sequence_number
            if sequence_number is not None
            else timestamp.isoformat()
            if timestamp is not None
            else None
        )
        return iterator_type if argument is None else f"{iterator_type}:{argument}"

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """A place to subscribe at, and the service's time, which polling asks for."""
        since = self._polling.latest_iterator(stream, shard_id).since
        self._asked_latest = False
        return LatestIterator("LATEST", since)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, _limit: int
    ) -> RecordsPage:
        """The next event, or an empty page.

        Raises what ended the subscription, once everything that came before is given out; the next
        call subscribes again. A normal end (after five minutes) is no error. Raises
        `ExpiredIteratorError` when LATEST would have to be subscribed to twice: the second would be
        a later place.
        """
        subscription = self._subscription
        if self._closed:
            return self._nothing_new(iterator)
        if subscription is None or self._at != iterator:
            subscription = self._subscribe(stream, shard_id, iterator)
        page = subscription.take()
        if page is not None:
            self._behind = page.millis_behind_latest
            self._at = (
                "" if page.next_iterator is None else f"AFTER_SEQUENCE_NUMBER:{page.next_iterator}"
            )
            return RecordsPage(
                page.records,
                self._at or None,
                page.millis_behind_latest,
                page.child_shards,
                page.bytes,
            )
        if subscription.is_over:
            self._drop()
            if subscription.error is not None:
                raise self._explained(subscription.error, stream, shard_id)
            if subscription.received == 0:
                raise UnavailableError(
                    f"the subscription to {self._lease_key} ended without an event",
                    code="EmptySubscription",
                    operation="SubscribeToShard",
                )
        elif (silent := subscription.silent_seconds()) > self._settings.fan_out_stall_millis / 1000:
            self._drop()
            raise UnavailableError(
                f"the subscription to {self._lease_key} has been silent for {silent:.0f} s",
                code="Stalled",
                operation="SubscribeToShard",
            )
        return self._nothing_new(iterator)

    def close(self) -> None:
        """End the subscription, if there is one, and begin none any more. Any thread; does not
        wait.
        """
        with self._guard:
            self._closed = True
        self._drop()

    def _drop(self) -> None:
        with self._guard:
            subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _nothing_new(self, iterator: str) -> RecordsPage:
        return RecordsPage(NO_RECORDS, iterator, self._behind)

    def _subscribe(self, stream: StreamId, shard_id: str, iterator: str) -> Subscribed:
        self._drop()
        kind, _, argument = iterator.partition(":")
        if kind == "LATEST":
            if self._asked_latest:
                raise ExpiredIteratorError(
                    f"the subscription to {self._lease_key} at LATEST is over before its "
                    "first event",
                    operation="SubscribeToShard",
                )
            self._asked_latest = True
        where: dict[str, Any] = {}
        if kind == "AT_TIMESTAMP":
            where["timestamp"] = datetime.fromisoformat(argument).astimezone(UTC)
        elif argument:
            where["sequence_number"] = argument
        arn = self._consumers.arn(stream)
        try:
            events = self._fan_out.subscribe(arn, stream, shard_id, _KINDS[kind], **where)
        except NotFoundError as error:
            raise self._explained(error, stream, shard_id) from error
        subscription = events.subscription(self._clock)
        with self._guard:
            closed = self._closed
            if not closed:
                self._subscription, self._at = subscription, iterator
        if closed:
            subscription.close()
        else:
            subscription.start(f"subscription-{self._lease_key}", self._spawn)
        return subscription

    def _explained(self, error: Exception, stream: StreamId, shard_id: str) -> Exception:
        """The service says the same of a shard that is gone and of a consumer that is gone; only
        the former ends the shard.
        """
        if not isinstance(error, NotFoundError):
            return error
        try:
            self._polling.get_shard_iterator(stream, shard_id, "TRIM_HORIZON")
        except NotFoundError as gone:
            return gone
        self._consumers.forget(stream)
        return UnavailableError(
            f"the fan-out consumer of {stream.name} is gone, its shard {shard_id} is there: "
            f"{error}",
            code="NoConsumer",
            operation=error.operation,
        )


_KINDS: Final[dict[str, IteratorType]] = {
    "LATEST": "LATEST",
    "TRIM_HORIZON": "TRIM_HORIZON",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
    "AT_SEQUENCE_NUMBER": "AT_SEQUENCE_NUMBER",
    "AFTER_SEQUENCE_NUMBER": "AFTER_SEQUENCE_NUMBER",
}


class FanOutReader(ShardReader):
    """A `ShardReader` of a subscription: `read` takes what has been pushed and never waits for
    records. `close` it when its lease is gone.
    """

    poll_seconds: float = POLL_SECONDS

    def close(self) -> None:
        """End the subscription. Any thread; does not wait; `read` brings nothing any more."""
        cast("SubscribedShard", self._kinesis).close()

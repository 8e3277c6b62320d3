"""Read a shard through a subscription, with the same reader as for polling (protocol §10.4).

`SubscribedShard` implements `ShardClient` with a subscription; its iterators are starting positions
of subscriptions. So `ShardReader` decides for polling and subscriptions alike where to start, which
records to filter, how to handle KPL aggregates and invalid responses, and where to continue after
an error.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, cast

from kcl_pipeline.batch import NO_RECORDS
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import AwsError, ExpiredIteratorError, NotFoundError, UnavailableError
from kcl_pipeline.kinesis.client import IteratorType, KinesisClient, LatestIterator, RecordsPage
from kcl_pipeline.kinesis.fan_out.consumers import Consumers
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient, Subscribed
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import Spawn

POLL_SECONDS: Final = 0.02
"""Time between two reads of a subscription's buffer. A read makes no call."""


class SubscribedShard:
    """The `ShardClient` of one shard with a subscription.

    `get_records` does not wait for records: it returns an empty page if there is none. An iterator
    is `<type>` or `<type>:<argument>`. An iterator that is not the position of the subscription
    starts a new subscription. So records that were lost in an error are delivered again.

    Args:
        polling: The client for all calls but subscriptions.
        fan_out: The client for subscriptions.
        consumers: The registered consumers.
        settings: Settings for reading shards.
        clock: The clock.
        spawn: Starts the thread of a subscription.
        lease_key: The lease, for messages.
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
        self._subscribed_at_latest = False
        self._service: tuple[float, float] | None = None
        self._empty_at = clock.monotonic()

    def get_shard_iterator(
        self,
        _stream: StreamId,
        _shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """Return a position to subscribe at. Makes no call."""
        argument = (
            sequence_number
            if sequence_number is not None
            else timestamp.isoformat()
            if timestamp is not None
            else None
        )
        return iterator_type if argument is None else f"{iterator_type}:{argument}"

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """Return a position to subscribe at, and the time of the service.

        The time is that of a GetShardIterator call.
        """
        since = self._polling.latest_iterator(stream, shard_id).since
        self._subscribed_at_latest = False
        return LatestIterator("LATEST", since)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, _limit: int
    ) -> RecordsPage:
        """Return the next event, or an empty page.

        The error of a subscription is raised after all its events were returned. The next call
        subscribes again. The normal end of a subscription, after five minutes, raises no error.

        Raises:
            ExpiredIteratorError: A second subscription at LATEST is necessary. It would start at a
                later position.
            AwsError: The subscription failed.
        """
        subscription = self._subscription
        if self._closed:
            return self._nothing_new(iterator)
        if subscription is None or self._at != iterator:
            subscription = self._subscribe(stream, shard_id, iterator)
        asked_at = self._clock.monotonic()
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
                self._served_millis(),
            )
        silent = subscription.silent_seconds()
        # An event that a full buffer kept on its way arrives within a poll: it is older than this.
        if self._clock.monotonic() - silent <= asked_at - POLL_SECONDS:
            self._empty_at = asked_at
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
        elif silent > self._settings.fan_out_stall_millis / 1000:
            self._drop()
            raise UnavailableError(
                f"the subscription to {self._lease_key} has been silent for {silent:.0f} s",
                code="Stalled",
                operation="SubscribeToShard",
            )
        return self._nothing_new(iterator)

    def close(self) -> None:
        """End the subscription, and start no other one. Thread-safe; does not wait."""
        with self._guard:
            self._closed = True
        self._drop()

    def _drop(self) -> None:
        with self._guard:
            subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _served_millis(self) -> int | None:
        """Return a time of the service before the event that was taken.

        The event arrived after the last time that nothing was on its way, and may have waited
        since.
        """
        if self._service is None:
            return None
        epoch, at = self._service
        return int((epoch + self._empty_at - at) * 1000)

    def _nothing_new(self, iterator: str) -> RecordsPage:
        # without a time: a subscription that is silent does not say that nothing has arrived
        return RecordsPage(NO_RECORDS, iterator, self._behind)

    def _subscribe(self, stream: StreamId, shard_id: str, iterator: str) -> Subscribed:
        self._drop()
        self._behind = None
        kind, _, argument = iterator.partition(":")
        if kind == "LATEST":
            if self._subscribed_at_latest:
                raise ExpiredIteratorError(
                    f"the subscription to {self._lease_key} at LATEST ended before its first event",
                    operation="SubscribeToShard",
                )
            self._subscribed_at_latest = True
        start: dict[str, Any] = {}
        if kind == "AT_TIMESTAMP":
            start["timestamp"] = datetime.fromisoformat(argument).astimezone(UTC)
        elif argument:
            start["sequence_number"] = argument
        arn = self._consumers.arn(stream)
        try:
            subscription = self._fan_out.subscribe(
                arn, stream, shard_id, cast("IteratorType", kind), self._clock, **start
            )
        except NotFoundError as error:
            raise self._explained(error, stream, shard_id) from error
        self._empty_at = self._clock.monotonic()
        self._note_service_time(stream)
        with self._guard:
            closed = self._closed
            if not closed:
                self._subscription, self._at = subscription, iterator
        if closed:
            subscription.close()
        else:
            subscription.start(f"subscription-{self._lease_key}", self._spawn)
        return subscription

    def _note_service_time(self, stream: StreamId) -> None:
        """Ask for the time of the service, once. A failed call is repeated by a later subscription.

        Until then the events have no time. Reading does not wait for it.
        """
        if self._service is not None:
            return
        at = self._clock.monotonic()
        with suppress(AwsError):
            time = self._polling.service_time(stream)
            self._service = None if time is None else (time.timestamp(), at)

    def _explained(self, error: Exception, stream: StreamId, shard_id: str) -> Exception:
        """Return the error, or `UnavailableError` if the consumer does not exist.

        The service responds with the same code for a missing shard and a missing consumer. Only the
        former ends the shard.
        """
        if not isinstance(error, NotFoundError):
            return error
        try:
            self._polling.get_shard_iterator(stream, shard_id, "TRIM_HORIZON")
        except NotFoundError as gone:
            return gone
        self._consumers.forget(stream)
        return UnavailableError(
            f"the fan-out consumer of {stream.name} does not exist, but its shard {shard_id} does: "
            f"{error}",
            code="NoConsumer",
            operation=error.operation,
        )


class FanOutReader(ShardReader):
    """A `ShardReader` of a subscription.

    `read` returns records that were pushed, and does not wait for records. The owner calls `close`
    when it does not hold the lease any more.
    """

    poll_seconds: float = POLL_SECONDS

    def close(self) -> None:
        """End the subscription. Thread-safe; does not wait. `read` returns no more records."""
        cast("SubscribedShard", self._kinesis).close()

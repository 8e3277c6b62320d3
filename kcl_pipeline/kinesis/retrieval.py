"""Choose for each shard between polling and a subscription, and create its reader.

The setting `RetrievalSettings.retrieval_mode` has three values:

*polling*: GetRecords for every shard. *fan_out*: SubscribeToShard for every shard; a worker
without a registered consumer does not start. *auto*: SubscribeToShard for a shard that is started
while the worker holds at most `fan_out_max_shards` leases, if a consumer was registered for every
stream when the worker started; otherwise GetRecords. The choice lasts as long as the reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, SettingsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.kinesis.client import KinesisClient, ShardClient
from kcl_pipeline.kinesis.distribution import RecordDistribution
from kcl_pipeline.kinesis.fan_out.consumers import Consumers
from kcl_pipeline.kinesis.fan_out.source import FanOutReader, SubscribedShard
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.kinesis.reader import FoundGaps, Resume, ShardReader
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange, StreamId
from kcl_pipeline.threads import Spawn


class Retrieval:
    """Creates the reader of each shard.

    Args:
        settings: All settings.
        kinesis: The client for polling.
        fan_out: The client for subscriptions. None: subscriptions are not available.
        clock: The clock.
        events: Receives events.
        spawn: Starts the thread of a subscription.

    Attributes:
        identity: Confirms ends and losses of shards.
        distribution: Knows which streams distribute their records themselves.
        gaps: Gaps that the readers have found.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        kinesis: KinesisClient,
        fan_out: FanOutClient | None,
        clock: Clock,
        events: EventSink,
        spawn: Spawn,
    ) -> None:
        self._settings = settings.retrieval
        self._shard_sync_of = settings.shard_sync_of
        self._kinesis = kinesis
        self._fan_out = fan_out
        self._clock = clock
        self._events = events
        self._spawn = spawn
        self._consumers: Consumers | None = None
        if fan_out is not None:
            self._consumers = Consumers(
                fan_out,
                self._settings.consumer_name or settings.application_name,
                settings.consumers_by_stream,
                clock,
            )
        self._registered = False
        self.identity = StreamIdentityCheck(kinesis, clock)
        self.distribution = RecordDistribution(kinesis, clock, events)
        self.gaps = FoundGaps(clock)

    def register_consumers(self, streams: Iterable[StreamId]) -> None:
        """Find or register the consumers, if the mode needs them. May take some seconds.

        With auto, errors of calls are reported as events, and shards are polled.

        Raises:
            SettingsError: The mode is fan_out, and there is no client for subscriptions.
            AwsError: The mode is fan_out, and a call failed.
        """
        if self._settings.retrieval_mode == "polling":
            return
        if self._consumers is None:
            if self._settings.retrieval_mode == "fan_out":
                raise SettingsError(
                    "retrieval.retrieval_mode='fan_out', but this Kinesis client cannot "
                    "subscribe; write retrieval_mode='polling'"
                )
            return
        try:
            for stream in streams:
                self._consumers.arn(stream)
            self._registered = True
        except AwsError as error:
            if self._settings.retrieval_mode == "fan_out":
                raise
            self._events(
                AwsTrouble("registration of the fan-out consumer; shards are polled", str(error))
            )

    def subscribes(self, held_leases: int) -> bool:
        """Return whether a shard that is started now, with `held_leases` held, is subscribed to."""
        return self._registered and (
            self._settings.retrieval_mode == "fan_out"
            or held_leases <= self._settings.fan_out_max_shards
        )

    def reader(
        self,
        stream: StreamId,
        lease_key: str,
        shard_id: str,
        position: Position,
        hash_key_range: HashKeyRange | None,
        *,
        held_leases: int,
        read_up_to_millis: int | None = None,
        initial_timestamp: datetime | None = None,
    ) -> ShardReader:
        """Return a reader after `position` (exclusive). Raises as `ShardReader`.

        `read_up_to_millis` is that of an earlier reader of this position. `initial_timestamp` is
        that of the lease. Without it, AT_TIMESTAMP is the time of the settings, and LATEST is now.
        """
        client: ShardClient = self._kinesis
        reader: type[ShardReader] = ShardReader
        if self._fan_out and self._consumers and self.subscribes(held_leases):
            reader = FanOutReader
            client = SubscribedShard(
                self._kinesis,
                self._fan_out,
                self._consumers,
                self._settings,
                self._clock,
                self._spawn,
                lease_key,
            )
        return reader(
            client,
            stream,
            lease_key,
            shard_id,
            position,
            hash_key_range,
            self._settings,
            self._clock,
            initial_timestamp=initial_timestamp or self._shard_sync_of(stream).initial_timestamp,
            resume=Resume(
                latest_since=initial_timestamp if position == LATEST else None,
                read_up_to_millis=read_up_to_millis,
                created_millis=created_millis(position, initial_timestamp),
            ),
            identity=self.identity,
            on_gap=partial(self.gaps.note, lease_key, stream),
            distribution=self.distribution,
        )


def created_millis(position: Position, initial_timestamp: datetime | None) -> int | None:
    """Return when a lease at TRIM_HORIZON or LATEST was created (epoch milliseconds), if known.

    Args:
        position: The position of the lease.
        initial_timestamp: `Lease.initial_timestamp`, which is another time with AT_TIMESTAMP.
    """
    if initial_timestamp is None or position not in (LATEST, TRIM_HORIZON):
        return None
    return round(initial_timestamp.timestamp() * 1000)

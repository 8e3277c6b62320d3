"""SubscribeToShard of the Kinesis model: which event a fan-out subscription delivers next.

`kcl_pipeline.local` sends the events over HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.testing.kinesis import sequence
from kcl_pipeline.testing.kinesis.consumers import find_consumer
from kcl_pipeline.testing.kinesis.data import Read, read_from, start_index
from kcl_pipeline.testing.kinesis.errors import in_use, not_found
from kcl_pipeline.testing.kinesis.limits import BYTES_OUT_PER_SECOND, MEBIBYTE, TokenBucket
from kcl_pipeline.testing.kinesis.shards import ShardLog
from kcl_pipeline.testing.kinesis.state import Params, World
from kcl_pipeline.testing.kinesis.stream import Stream, Subscription

GUARD_MILLIS: Final = 5_000
HEARTBEAT_MILLIS: Final = 5_000
_MAX_EVENT_RECORDS: Final = 10_000
_MAX_EVENT_BYTES: Final = MEBIBYTE


@dataclass(frozen=True, slots=True)
class SubscriptionEvent:
    """One event of a subscription.

    `continuation` is None at the end of the shard. `read.child_shards` are then its children, and
    no event follows.
    """

    read: Read
    continuation: str | None


def subscribe(world: World, params: Params) -> Subscription:
    """Start a subscription.

    It is rejected with ResourceInUseException within five seconds of the previous one for this
    consumer and shard. Later it takes over, and the previous subscription ends with that error.
    """
    with world.lock:
        stream, consumer = find_consumer(world, {"ConsumerARN": params["ConsumerARN"]})
        shard_id, position = str(params["ShardId"]), params["StartingPosition"]
        shard = stream.shard(shard_id)
        if shard is None:
            raise not_found(
                f"Shard {shard_id} in stream {stream.name} under account {stream.account} "
                "does not exist"
            )
        now_millis = world.now_millis()
        earlier = stream.subscriptions.get((consumer.arn, shard_id))
        if earlier is not None and now_millis - earlier.started_millis < GUARD_MILLIS:
            raise in_use(
                "Another active subscription exists for this consumer: "
                f"{stream.account}:{stream.name}:{shard_id}:{consumer.name}"
            )
        kind, number = str(position["Type"]), position.get("SequenceNumber")
        index = start_index(
            world,
            stream,
            shard,
            kind,
            None if number is None else str(number),
            position.get("Timestamp"),
        )
        if earlier is not None:
            earlier.superseded = True
        subscription = Subscription(
            stream.name,
            stream.serial,
            shard_id,
            consumer.arn,
            index,
            now_millis,
            now_millis + world.settings.subscription_lifetime_millis,
        )
        stream.subscriptions[consumer.arn, shard_id] = subscription
        return subscription


def next_event(world: World, subscription: Subscription) -> SubscriptionEvent | None:
    """Return the next event, or None if none is due.

    Records are delivered as soon as they are stored. An idle subscription gets an empty event every
    `HEARTBEAT_MILLIS`, with the current position.

    Raises `KinesisError` if another subscription took over, or the stream, shard or consumer is
    gone.
    """
    with world.lock:
        stream, shard, now_millis = _still_there(world, subscription)
        if world.settings.enforce_limits and not _has_bytes_left(world, subscription):
            return None
        read = read_from(
            stream, shard, subscription.index, _MAX_EVENT_RECORDS, now_millis, _MAX_EVENT_BYTES
        )
        idle = not read.page.data and read.next_iterator is not None
        if (
            idle
            and subscription.last_event_millis is not None
            and now_millis - subscription.last_event_millis < HEARTBEAT_MILLIS
        ):
            return None
        subscription.index = read.page.next_index
        subscription.last_event_millis = now_millis
        if subscription.bucket is not None:
            subscription.bucket.take(read.page.size)
        return SubscriptionEvent(
            read, None if read.next_iterator is None else _continuation(shard, read, now_millis)
        )


def has_ended(world: World, subscription: Subscription) -> bool:
    """Whether the subscription's lifetime (five minutes by default) is over."""
    return world.now_millis() >= subscription.ends_millis


def _still_there(world: World, subscription: Subscription) -> tuple[Stream, ShardLog, int]:
    if subscription.superseded:
        raise in_use(
            f"Another subscription took over shard {subscription.shard_id} for consumer "
            f"{subscription.consumer_arn}."
        )
    now_millis = world.now_millis()
    stream = world.streams.get(subscription.stream_name)
    if stream is None or stream.serial != subscription.stream_serial:
        raise not_found(
            f"Stream {subscription.stream_name} under account {world.settings.account} not found."
        )
    stream.settle(now_millis)
    shard = stream.shard(subscription.shard_id)
    if shard is None:
        raise not_found(
            f"Shard {subscription.shard_id} in stream {stream.name} under account "
            f"{stream.account} does not exist"
        )
    if all(c.arn != subscription.consumer_arn for c in stream.consumers.values()):
        raise not_found(
            f"Consumer {subscription.consumer_arn} of stream {stream.name} under account "
            f"{stream.account} not found."
        )
    return stream, shard, now_millis


def _has_bytes_left(world: World, subscription: Subscription) -> bool:
    if subscription.bucket is None:
        subscription.bucket = TokenBucket(BYTES_OUT_PER_SECOND)
    return subscription.bucket.available(world.clock.monotonic()) > 0


def _continuation(shard: ShardLog, read: Read, now_millis: int) -> str:
    if read.page.sequence_numbers:
        return read.page.sequence_numbers[-1]
    # A position without a record: not below the previous record, below the next one.
    arrival_seconds = max(now_millis, shard.opened_millis) // 1000
    return sequence.number(
        sequence.base_of(shard.created_seconds, shard.index), read.page.next_index, arrival_seconds
    )

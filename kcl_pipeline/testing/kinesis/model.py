"""Kinesis Data Streams in one process, on a movable clock.

The model has streams, shards, records, resharding, retention and limits. It has three interfaces:

- `KinesisModel.call`: the service's operations by name.
- `testing.kinesis.client.InMemoryKinesis`: the consumer's protocol; pages become Arrow tables.
- `kcl_pipeline.local`: HTTP for any SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.shards import AUTO, USER_PARTITION_KEY
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.kinesis import consumers, control, listing, subscriptions
from kcl_pipeline.testing.kinesis import data as data_plane
from kcl_pipeline.testing.kinesis.data import Entry, PutResult, Read
from kcl_pipeline.testing.kinesis.errors import KinesisError, constraint, validation
from kcl_pipeline.testing.kinesis.state import Answer, KinesisSettings, Params, World
from kcl_pipeline.testing.kinesis.stream import Stream, Subscription
from kcl_pipeline.testing.kinesis.subscriptions import SubscriptionEvent


def _put_record(world: World, params: Params) -> Answer:
    put = data_plane.put_record(world, params, data_plane.entry_of(params))
    return {
        "ShardId": put.shard_id,
        "SequenceNumber": put.sequence_number,
        "EncryptionType": "NONE",
    }


def render_put(put: PutResult) -> Answer:
    """Convert one result to its member of a PutRecords response."""
    if put.error is not None:
        return {"ErrorCode": put.error, "ErrorMessage": put.message}
    return {"SequenceNumber": put.sequence_number, "ShardId": put.shard_id}


def _put_records(world: World, params: Params) -> Answer:
    puts = data_plane.put_records(
        world, params, [data_plane.entry_of(r) for r in params["Records"]]
    )
    return {
        "FailedRecordCount": sum(p.error is not None for p in puts),
        "Records": [render_put(p) for p in puts],
        "EncryptionType": "NONE",
    }


def render_tail(read: Read) -> Answer:
    """A GetRecords response without its records; unset members are omitted."""
    answer: Answer = {"MillisBehindLatest": read.millis_behind_latest}
    if read.next_iterator is not None:
        answer["NextShardIterator"] = read.next_iterator
    else:
        answer["ChildShards"] = [
            {
                "ShardId": c.shard_id,
                "ParentShards": list(c.parents),
                "HashKeyRange": listing.render_range(c.hash_key_range),
            }
            for c in read.child_shards
        ]
    return answer


def _get_records(world: World, params: Params) -> Answer:
    read = data_plane.get_records(world, params)
    page = read.page
    columns = zip(
        page.sequence_numbers, page.arrival_millis, page.data, page.partition_keys, strict=True
    )
    records = [
        {"SequenceNumber": n, "ApproximateArrivalTimestamp": t, "Data": d}
        | ({} if k is None else {"PartitionKey": k})
        for n, t, d, k in columns
    ]
    return {"Records": records} | render_tail(read)


OPERATIONS: Final[Mapping[str, Callable[[World, Params], Answer]]] = {
    "AddTagsToStream": control.add_tags,
    "CreateStream": control.create_stream,
    "DecreaseStreamRetentionPeriod": control.decrease_retention,
    "DeleteStream": control.delete_stream,
    "DeregisterStreamConsumer": consumers.deregister,
    "DescribeStream": listing.describe_stream,
    "DescribeStreamConsumer": consumers.describe,
    "DescribeStreamSummary": listing.describe_stream_summary,
    "GetRecords": _get_records,
    "GetShardIterator": data_plane.get_shard_iterator,
    "IncreaseStreamRetentionPeriod": control.increase_retention,
    "ListShards": listing.list_shards,
    "ListStreamConsumers": consumers.list_consumers,
    "ListStreams": listing.list_streams,
    "ListTagsForStream": listing.list_tags_for_stream,
    "MergeShards": control.merge_shards,
    "PutRecord": _put_record,
    "PutRecords": _put_records,
    "RegisterStreamConsumer": consumers.register,
    "SplitShard": control.split_shard,
    "UpdateMaxRecordSize": control.update_max_record_size,
    "UpdateShardCount": control.update_shard_count,
    "UpdateStreamMode": control.update_stream_mode,
    "UpdateStreamRecordDistributionStrategy": control.update_record_distribution,
}

_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "AddTagsToStream": ("Tags",),
    "CreateStream": ("StreamName",),
    "DecreaseStreamRetentionPeriod": ("RetentionPeriodHours",),
    "GetRecords": ("ShardIterator",),
    "GetShardIterator": ("ShardId", "ShardIteratorType"),
    "IncreaseStreamRetentionPeriod": ("RetentionPeriodHours",),
    "ListStreamConsumers": ("StreamARN",),
    "MergeShards": ("ShardToMerge", "AdjacentShardToMerge"),
    "PutRecord": ("Data",),
    "PutRecords": ("Records",),
    "RegisterStreamConsumer": ("StreamARN", "ConsumerName"),
    "SplitShard": ("ShardToSplit", "NewStartingHashKey"),
    "UpdateMaxRecordSize": ("StreamARN", "MaxRecordSizeInKiB"),
    "UpdateShardCount": ("TargetShardCount", "ScalingType"),
    "UpdateStreamMode": ("StreamARN", "StreamModeDetails"),
    "UpdateStreamRecordDistributionStrategy": ("StreamARN", "RecordDistributionStrategy"),
}
_PAGE_SIZES: Final = ("MaxResults", "Limit")
_MOST_PER_PAGE: Final = 10_000


class KinesisModel:
    """All streams of one account and region, in memory.

    Thread-safe; every operation is atomic. The default clock is a `ShiftedClock`:
    `model.clock.advance(…)` ages iterators and records.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        settings: KinesisSettings | None = None,
        *,
        enforce_limits: bool | None = None,
    ) -> None:
        settings = settings if settings is not None else KinesisSettings()
        if enforce_limits is not None:
            settings = replace(settings, enforce_limits=enforce_limits)
        self.clock: Clock = clock if clock is not None else ShiftedClock()
        self.world = World(self.clock, settings)

    @property
    def settings(self) -> KinesisSettings:
        """The settings of this model."""
        return self.world.settings

    def call(self, operation: str, **params: Any) -> Answer:
        """Execute one operation of the service.

        For example `call("SplitShard", StreamName=…, ShardToSplit=…, NewStartingHashKey=…)`. In
        requests and responses, blobs are bytes and timestamps are epoch milliseconds. Raises
        `KinesisError` with the service's code.
        """
        function = OPERATIONS.get(operation)
        if function is None:
            raise KinesisError(
                "UnknownOperationException", f"{operation} is not an operation of this model."
            )
        for name in _REQUIRED.get(operation, ()):
            if params.get(name) is None:
                lowered = name[0].lower() + name[1:]
                raise validation(
                    f"1 validation error detected: Value null at '{lowered}' failed to "
                    "satisfy constraint: Member must not be null"
                )
        for name in _PAGE_SIZES:
            size = params.get(name)
            if size is not None and not 1 <= int(size) <= _MOST_PER_PAGE:
                rule = (
                    "greater than or equal to 1"
                    if int(size) < 1
                    else f"less than or equal to {_MOST_PER_PAGE}"
                )
                raise constraint(name[0].lower() + name[1:], size, f"have value {rule}")
        with self.world.lock:
            return function(self.world, params)

    # -- typed shortcuts for tests and producers
    # ----------------------------------------------------------------------------

    def create_stream(
        self, name: str, shard_count: int = 1, record_distribution: str = USER_PARTITION_KEY
    ) -> None:
        """Create a stream with equally wide shards: provisioned, with AUTO on demand."""
        self.call("CreateStream", StreamName=name, ShardCount=shard_count)
        if record_distribution == AUTO:
            arn = self.world.arn(name)
            mode = {"StreamMode": "ON_DEMAND"}
            self.call("UpdateStreamMode", StreamARN=arn, StreamModeDetails=mode)
            self.call(
                "UpdateStreamRecordDistributionStrategy",
                StreamARN=arn,
                RecordDistributionStrategy=record_distribution,
            )

    def put_records(self, name: str, entries: Sequence[Entry]) -> list[PutResult]:
        """Store up to 500 records: (partition key, data, explicit hash key or None).

        The caller must check each `PutResult.error`.
        """
        return data_plane.put_records(self.world, {"StreamName": name}, entries)

    def put(self, name: str, entries: Iterable[tuple[str | None, bytes]]) -> list[PutResult]:
        """Store any number of records (partition key or None, data).

        Raises `KinesisError` for the first record that is rejected.
        """
        everything = [(key, data, None) for key, data in entries]
        puts: list[PutResult] = []
        for i in range(0, len(everything), data_plane.MAX_RECORDS_PER_PUT):
            puts += self.put_records(name, everything[i : i + data_plane.MAX_RECORDS_PER_PUT])
        for put in puts:
            if put.error is not None:
                raise KinesisError(put.error, put.message or "")
        return puts

    def split(self, name: str, shard_id: str, new_starting_hash_key: int | None = None) -> None:
        """Split an open shard, in the middle by default."""
        keys = self.stream(name).require_shard(shard_id).hash_key_range
        middle = (
            (keys.start + keys.end) // 2 + 1
            if new_starting_hash_key is None
            else new_starting_hash_key
        )
        self.call(
            "SplitShard", StreamName=name, ShardToSplit=shard_id, NewStartingHashKey=str(middle)
        )

    def merge(self, name: str, shard_id: str, adjacent_shard_id: str) -> None:
        """Merge two adjacent open shards."""
        self.call(
            "MergeShards",
            StreamName=name,
            ShardToMerge=shard_id,
            AdjacentShardToMerge=adjacent_shard_id,
        )

    def subscribe(self, consumer_arn: str, shard_id: str, **starting_position: Any) -> Subscription:
        """SubscribeToShard, for example `subscribe(arn, shard, Type="LATEST")`.

        `next_event` returns the events.
        """
        return subscriptions.subscribe(
            self.world,
            {
                "ConsumerARN": consumer_arn,
                "ShardId": shard_id,
                "StartingPosition": starting_position,
            },
        )

    def next_event(self, subscription: Subscription) -> SubscriptionEvent | None:
        """Return the next event of the subscription, or None if none is due.

        Raises `KinesisError` if another subscription took over, or the stream, shard or consumer is
        gone.
        """
        return subscriptions.next_event(self.world, subscription)

    def stream(self, name: str) -> Stream:
        """Return the stream for inspection; raises `KinesisError` (ResourceNotFoundException)."""
        with self.world.lock:
            return self.world.named(name)

    def open_shard_ids(self, name: str) -> list[str]:
        """Ids of the open shards, in the order of their hash keys."""
        with self.world.lock:
            return [s.shard_id for s in self.world.named(name).open_shards]

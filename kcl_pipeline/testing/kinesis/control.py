"""Operations of the Kinesis model that change streams, shards, retention, mode or tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kcl_pipeline.shards import AUTO, MAX_HASH_KEY, USER_PARTITION_KEY
from kcl_pipeline.testing.kinesis.errors import (
    constraint,
    in_use,
    invalid_argument,
    limit_exceeded,
    validation,
)
from kcl_pipeline.testing.kinesis.state import Answer, Params, World
from kcl_pipeline.testing.kinesis.stream import HOUR_MILLIS, Stream

ON_DEMAND_SHARDS: Final = 4
MAX_TAGS: Final = 50
ON_DEMAND_STREAM_LIMIT: Final = 50
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_DISTRIBUTIONS: Final = (AUTO, USER_PARTITION_KEY)
_MODES: Final = ("PROVISIONED", "ON_DEMAND")
_MIN_RETENTION_HOURS: Final = 24
_MAX_RETENTION_HOURS: Final = 8760
_RESHARDS_PER_DAY: Final = 10


# -- streams
# ----------------------------------------------------------------------------


def _mode_of(params: Params) -> str:
    mode = str((params.get("StreamModeDetails") or {}).get("StreamMode", "PROVISIONED"))
    if mode not in _MODES:
        raise constraint(
            "streamModeDetails.streamMode", mode, f"satisfy enum value set: [{', '.join(_MODES)}]"
        )
    return mode


def _distribution_of(params: Params, mode: str) -> str:
    strategy = str(params.get("RecordDistributionStrategy") or USER_PARTITION_KEY)
    if strategy not in _DISTRIBUTIONS:
        raise constraint(
            "recordDistributionStrategy",
            strategy,
            f"satisfy enum value set: [{', '.join(_DISTRIBUTIONS)}]",
        )
    _check_distribution(strategy, mode)
    return strategy


def _check_distribution(strategy: str, mode: str) -> None:
    if strategy == AUTO and mode != "ON_DEMAND":
        raise validation(
            f"The record distribution strategy {AUTO} is only supported for streams in "
            "ON_DEMAND mode."
        )


def _check_shard_limit(world: World, more: int) -> None:
    open_shards = sum(len(s.open_shards) for s in world.streams.values() if s.mode == "PROVISIONED")
    if open_shards + more > world.settings.shard_limit:
        raise limit_exceeded(
            "This request would exceed the shard limit for the account "
            f"{world.settings.account} in {world.settings.region}. "
            f"Current shard count for the account: {open_shards}. Limit: "
            f"{world.settings.shard_limit}. "
            f"Number of additional shards that would have resulted from this request: {more}."
        )


def create_stream(world: World, params: Params) -> Answer:
    """CreateStream, provisioned (ShardCount is required) or on demand (four shards)."""
    name, mode, count = str(params["StreamName"]), _mode_of(params), params.get("ShardCount")
    if _NAME.fullmatch(name) is None:
        raise constraint("streamName", name, "satisfy regular expression pattern: [a-zA-Z0-9_.-]+")
    if mode == "PROVISIONED" and count is None:
        raise validation("ShardCount must be specified for a stream in PROVISIONED mode.")
    if mode == "ON_DEMAND" and count is not None:
        raise validation("ShardCount must not be specified for a stream in ON_DEMAND mode.")
    if count is not None and int(count) < 1:
        raise constraint("shardCount", count, "have value greater than or equal to 1")
    if name in world.streams:
        raise in_use(f"Stream {name} under account {world.settings.account} already exists.")
    if mode == "PROVISIONED":
        _check_shard_limit(world, int(count or 0))
    elif sum(s.mode == "ON_DEMAND" for s in world.streams.values()) >= ON_DEMAND_STREAM_LIMIT:
        raise limit_exceeded(
            f"The account {world.settings.account} has {ON_DEMAND_STREAM_LIMIT} on-demand "
            "streams already."
        )
    distribution = _distribution_of(params, mode)
    now_millis = world.now_millis()
    world.serial += 1
    stream = Stream(name, world.arn(name), world.settings.account, world.serial, now_millis, mode)
    stream.created_millis = world.creation_millis(name)
    stream.record_distribution = distribution
    stream.max_record_bytes = int(params.get("MaxRecordSizeInKiB") or 1024) * 1024
    _add_tags(stream.tags, params.get("Tags") or {})
    world.streams[name] = stream
    shards = int(count) if count is not None else ON_DEMAND_SHARDS
    ready_millis = now_millis + int(world.settings.create_delay_seconds * 1000)
    stream.begin("CREATING", ready_millis, now_millis, lambda at: stream.create_shards(shards, at))
    return {}


def delete_stream(world: World, params: Params) -> Answer:
    """DeleteStream, with effect at once.

    A stream with consumers needs EnforceConsumerDeletion.
    """
    stream = world.find(params)
    if stream.consumers and not params.get("EnforceConsumerDeletion"):
        raise in_use(
            f"Stream {stream.name} under account {stream.account} has registered consumers; "
            "deregister them or set EnforceConsumerDeletion."
        )
    del world.streams[stream.name]
    return {}


def update_stream_mode(world: World, params: Params) -> Answer:
    """UpdateStreamMode; only StreamARN can name the stream."""
    stream = world.active({"StreamARN": params["StreamARN"]})
    mode = _mode_of(params)
    _check_distribution(stream.record_distribution, mode)
    stream.mode = mode
    return {}


def update_record_distribution(world: World, params: Params) -> Answer:
    """UpdateStreamRecordDistributionStrategy; only StreamARN can name the stream."""
    stream = world.active({"StreamARN": params["StreamARN"]})
    stream.record_distribution = _distribution_of(params, stream.mode)
    return {}


def update_max_record_size(world: World, params: Params) -> Answer:
    """UpdateMaxRecordSize, 1,024 to 10,240 KiB."""
    size = int(params["MaxRecordSizeInKiB"])
    if not 1024 <= size <= 10240:  # noqa: PLR2004 (the documented range)
        raise constraint("maxRecordSizeInKiB", size, "have value between 1024 and 10240")
    world.active(params).max_record_bytes = size * 1024
    return {}


# -- resharding
# ----------------------------------------------------------------------------


def _provisioned(world: World, params: Params, operation: str) -> Stream:
    stream = world.active(params)
    if stream.mode != "PROVISIONED":
        raise validation(
            f"{operation} is only supported for streams in PROVISIONED mode; stream "
            f"{stream.name} is in {stream.mode} mode."
        )
    return stream


def _reshard_ready_millis(world: World) -> tuple[int, int]:
    now_millis = world.now_millis()
    return now_millis, now_millis + int(world.settings.reshard_delay_seconds * 1000)


def split_shard(world: World, params: Params) -> Answer:
    """SplitShard at NewStartingHashKey, which becomes the first key of the second child."""
    stream = _provisioned(world, params, "SplitShard")
    shard = stream.require_shard(str(params["ShardToSplit"]))
    text = str(params["NewStartingHashKey"])
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_HASH_KEY:
        raise invalid_argument(
            f"NewStartingHashKey {text} used in SplitShard() on shard {shard.shard_id} is "
            "not a hash key."
        )
    new_start = int(text)
    stream.check_split(shard, new_start)
    _check_shard_limit(world, 1)
    now_millis, ready_millis = _reshard_ready_millis(world)
    stream.begin(
        "UPDATING", ready_millis, now_millis, lambda at: stream.split(shard, new_start, at)
    )
    return {}


def merge_shards(world: World, params: Params) -> Answer:
    """MergeShards of two open shards with adjacent hash-key ranges."""
    stream = _provisioned(world, params, "MergeShards")
    shard = stream.require_shard(str(params["ShardToMerge"]))
    adjacent = stream.require_shard(str(params["AdjacentShardToMerge"]))
    stream.check_merge(shard, adjacent)
    now_millis, ready_millis = _reshard_ready_millis(world)
    stream.begin("UPDATING", ready_millis, now_millis, lambda at: stream.merge(shard, adjacent, at))
    return {}


def update_shard_count(world: World, params: Params) -> Answer:
    """UpdateShardCount with uniform scaling.

    The target is at most twice and at least half the number of open shards.
    """
    target = int(params["TargetShardCount"])
    if target < 1:
        raise constraint("targetShardCount", target, "have value greater than or equal to 1")
    if params["ScalingType"] != "UNIFORM_SCALING":
        raise constraint(
            "scalingType", params["ScalingType"], "satisfy enum value set: [UNIFORM_SCALING]"
        )
    stream = _provisioned(world, params, "UpdateShardCount")
    current = len(stream.open_shards)
    counts = f"Current open shard count: {current}, Target shard count: {target}"
    if target > current * 2:
        raise limit_exceeded(
            f"UpdateShardCount cannot scale up over double your current open shard count. {counts}"
        )
    if target * 2 < current:
        raise limit_exceeded(
            f"UpdateShardCount cannot scale down below half your current open shard count. {counts}"
        )
    _check_shard_limit(world, target - current)
    now_millis, ready_millis = _reshard_ready_millis(world)
    stream.reshard_millis = [
        at for at in stream.reshard_millis if at > now_millis - 24 * HOUR_MILLIS
    ]
    if world.settings.enforce_limits and len(stream.reshard_millis) >= _RESHARDS_PER_DAY:
        raise limit_exceeded(
            f"Stream {stream.name} was scaled {_RESHARDS_PER_DAY} times within 24 hours already."
        )
    stream.reshard_millis.append(now_millis)
    stream.begin("UPDATING", ready_millis, now_millis, lambda at: stream.rescale(target, at))
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "CurrentShardCount": current,
        "TargetShardCount": target,
    }


# -- retention
# ----------------------------------------------------------------------------


def _retention(world: World, params: Params) -> tuple[Stream, int]:
    hours = int(params["RetentionPeriodHours"])
    stream = world.active(params)
    asked = f"Requested retention period ({hours} hours)"
    if hours < _MIN_RETENTION_HOURS:
        raise invalid_argument(
            f"Minimum allowed retention period is {_MIN_RETENTION_HOURS} hours. {asked} is "
            "too short."
        )
    if hours > _MAX_RETENTION_HOURS:
        raise invalid_argument(
            f"Maximum allowed retention period is {_MAX_RETENTION_HOURS} hours. {asked} is "
            "too long."
        )
    return stream, hours


def increase_retention(world: World, params: Params) -> Answer:
    """IncreaseStreamRetentionPeriod, up to 8,760 hours.

    Records that the old period has trimmed stay trimmed.
    """
    stream, hours = _retention(world, params)
    if hours < stream.retention_hours:
        raise invalid_argument(
            f"Requested retention period ({hours} hours) for stream {stream.name} can not be "
            "shorter than existing retention period "
            f"({stream.retention_hours} hours). Use DecreaseRetentionPeriod API."
        )
    for shard in stream.shards:
        stream.trim(shard, world.now_millis())
    stream.retention_hours = hours
    return {}


def decrease_retention(world: World, params: Params) -> Answer:
    """DecreaseStreamRetentionPeriod, down to 24 hours."""
    stream, hours = _retention(world, params)
    if hours > stream.retention_hours:
        raise invalid_argument(
            f"Requested retention period ({hours} hours) for stream {stream.name} can not be "
            "longer than existing retention period "
            f"({stream.retention_hours} hours). Use IncreaseRetentionPeriod API."
        )
    stream.retention_hours = hours
    return {}


# -- tags
# ----------------------------------------------------------------------------


def _add_tags(tags: dict[str, str], more: Mapping[str, Any]) -> None:
    merged = tags | {str(k): str(v) for k, v in more.items()}
    if len(merged) > MAX_TAGS:
        raise invalid_argument(f"Failed to add tags: a resource can have at most {MAX_TAGS} tags.")
    tags.update(merged)


def add_tags(world: World, params: Params) -> Answer:
    """AddTagsToStream."""
    _add_tags(world.find(params).tags, params["Tags"])
    return {}

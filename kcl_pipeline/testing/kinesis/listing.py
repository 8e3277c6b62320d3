"""Operations of the Kinesis model that describe streams, shards and tags."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.kinesis.errors import KinesisError, constraint, in_use, invalid_argument
from kcl_pipeline.testing.kinesis.shards import ShardLog
from kcl_pipeline.testing.kinesis.state import Answer, Params, World, decode_token, encode_token
from kcl_pipeline.testing.kinesis.stream import Stream

MAX_SHARDS_PER_LIST: Final = 1000
_FILTERS: Final = (
    "AFTER_SHARD_ID",
    "AT_LATEST",
    "AT_TIMESTAMP",
    "AT_TRIM_HORIZON",
    "FROM_TIMESTAMP",
    "FROM_TRIM_HORIZON",
)
_DEFAULT_DESCRIBE: Final = 100
_DEFAULT_STREAMS: Final = 100
_DEFAULT_TAGS: Final = 50


def render_range(keys: HashKeyRange) -> Answer:
    """Convert a hash-key range to the service's format."""
    return {"StartingHashKey": str(keys.start), "EndingHashKey": str(keys.end)}


def render_shard(shard: ShardLog) -> Answer:
    """Convert a shard to the service's format; unset members are omitted."""
    numbers = {"StartingSequenceNumber": shard.starting_sequence_number}
    if shard.ending_sequence_number is not None:
        numbers["EndingSequenceNumber"] = shard.ending_sequence_number
    answer: Answer = {"ShardId": shard.shard_id}
    for name, parent in zip(
        ("ParentShardId", "AdjacentParentShardId"), shard.parents, strict=False
    ):
        answer[name] = parent
    return answer | {
        "HashKeyRange": render_range(shard.hash_key_range),
        "SequenceNumberRange": numbers,
    }


def _render_stream(stream: Stream) -> Answer:
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status,
        "StreamModeDetails": {"StreamMode": stream.mode},
        "RetentionPeriodHours": stream.retention_hours,
        "StreamCreationTimestamp": stream.created_millis,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
    }


def describe_stream(world: World, params: Params) -> Answer:
    """DescribeStream, with shards in pages of `Limit` (default 100)."""
    stream = world.find(params)
    shards = stream.shards_after(params.get("ExclusiveStartShardId"))
    limit = params.get("Limit") or _DEFAULT_DESCRIBE
    return {
        "StreamDescription": _render_stream(stream)
        | {
            "Shards": [render_shard(s) for s in shards[:limit]],
            "HasMoreShards": len(shards) > limit,
        }
    }


def describe_stream_summary(world: World, params: Params) -> Answer:
    """DescribeStreamSummary."""
    stream = world.find(params)
    counts: Answer = {
        "OpenShardCount": len(stream.open_shards),
        "ConsumerCount": len(stream.consumers),
        "MaxRecordSizeInKiB": stream.max_record_bytes // 1024,
    }
    if stream.mode == "ON_DEMAND":
        counts["RecordDistributionStrategy"] = stream.record_distribution
    return {"StreamDescriptionSummary": _render_stream(stream) | counts}


def list_streams(world: World, params: Params) -> Answer:
    """ListStreams, sorted by name; NextToken or ExclusiveStartStreamName requests the next page."""
    start = params.get("ExclusiveStartStreamName")
    if params.get("NextToken") is not None:
        parts = decode_token("streams", str(params["NextToken"]), 1)
        if parts is None:
            raise invalid_argument("NextToken is invalid.")
        start = parts[0]
    names = sorted(world.streams)
    names = names if start is None else names[bisect_right(names, str(start)) :]
    limit = params.get("Limit") or _DEFAULT_STREAMS
    page = [world.named(name) for name in names[:limit]]
    members = (
        "StreamName",
        "StreamARN",
        "StreamStatus",
        "StreamModeDetails",
        "StreamCreationTimestamp",
    )
    answer: Answer = {
        "StreamNames": [s.name for s in page],
        "HasMoreStreams": len(names) > limit,
        "StreamSummaries": [{m: _render_stream(s)[m] for m in members} for s in page],
    }
    return (
        answer
        if len(names) <= limit
        else answer | {"NextToken": encode_token("streams", page[-1].name)}
    )


# -- ListShards
# ----------------------------------------------------------------------------


def list_shards(world: World, params: Params) -> Answer:
    """ListShards.

    NextToken alone requests a following page. It contains all parameters except the page size and
    expires after five minutes.
    """
    token = params.get("NextToken")
    if token is not None:
        return _list_next_shards(world, params, str(token))
    if params.get("StreamName") is None and params.get("StreamARN") is None:
        raise invalid_argument("Either NextToken or StreamName should be provided.")
    stream = world.find(params)
    if stream.status == "CREATING":
        raise in_use(
            f"Stream {stream.name} under account {stream.account} not ACTIVE, instead in "
            f"state {stream.status}"
        )
    created = params.get("StreamCreationTimestamp")
    if created is not None and int(created) // 1000 != stream.created_millis // 1000:
        raise KinesisError(
            "ResourceNotFoundException",
            f"Stream {stream.name} under account {stream.account} created at {created} not found.",
        )
    kind, shard_id, at_millis = _read_filter(params.get("ShardFilter"))
    after = params.get("ExclusiveStartShardId")
    start = max((s for s in (after, shard_id) if s is not None), default=None)
    return _shard_page(world, stream, kind, at_millis, start, params.get("MaxResults"))


def _list_next_shards(world: World, params: Params, token: str) -> Answer:
    for name in (
        "StreamName",
        "StreamARN",
        "StreamCreationTimestamp",
        "ExclusiveStartShardId",
        "ShardFilter",
    ):
        if params.get(name) is not None:
            raise invalid_argument(f"NextToken and {name} cannot be provided together.")
    parts = decode_token("shards", token, 6)
    if parts is None:
        raise invalid_argument("NextToken is invalid.")
    made_millis, name, serial, kind, at_millis, after = parts
    if world.now_millis() - made_millis > world.settings.iterator_lifetime_millis:
        raise KinesisError(
            "ExpiredNextTokenException",
            "The pagination token passed to the operation is expired. Tokens expire after "
            "300 seconds.",
        )
    stream = world.named(name)
    if stream.serial != serial:
        raise KinesisError(
            "ResourceNotFoundException", f"Stream {name} under account {stream.account} not found."
        )
    return _shard_page(world, stream, kind, at_millis, after, params.get("MaxResults"))


def _read_filter(shard_filter: Params | None) -> tuple[str, str | None, int | None]:
    if shard_filter is None:
        return "FROM_TRIM_HORIZON", None, None
    kind, shard_id, at_millis = (
        str(shard_filter.get("Type")),
        shard_filter.get("ShardId"),
        shard_filter.get("Timestamp"),
    )
    if kind not in _FILTERS:
        raise constraint(
            "shardFilter.type", kind, f"satisfy enum value set: [{', '.join(_FILTERS)}]"
        )
    if (kind == "AFTER_SHARD_ID") != (shard_id is not None):
        raise invalid_argument(
            f"ShardFilter of type {kind} {'must' if shard_id is None else 'must not'} have a "
            "ShardId."
        )
    if (kind in {"AT_TIMESTAMP", "FROM_TIMESTAMP"}) != (at_millis is not None):
        raise invalid_argument(
            f"ShardFilter of type {kind} {'must' if at_millis is None else 'must not'} have "
            "a Timestamp."
        )
    return kind, shard_id, at_millis


def _matches(
    stream: Stream, shard: ShardLog, kind: str, at_millis: int | None, now_millis: int
) -> bool:
    horizon = stream.horizon_millis(now_millis)
    moment = horizon if at_millis is None else max(at_millis, horizon)
    if kind == "AT_LATEST":
        return shard.is_open
    if kind in {"AT_TRIM_HORIZON", "AT_TIMESTAMP"}:
        return shard.was_open_at(moment)
    if kind == "FROM_TIMESTAMP":
        return shard.closed_millis is None or shard.closed_millis >= moment
    return True


def _shard_page(
    world: World,
    stream: Stream,
    kind: str,
    at_millis: int | None,
    after: str | None,
    max_results: int | None,
) -> Answer:
    now_millis = world.now_millis()
    shards = [
        s for s in stream.shards_after(after) if _matches(stream, s, kind, at_millis, now_millis)
    ]
    limit = min(max_results or MAX_SHARDS_PER_LIST, MAX_SHARDS_PER_LIST)
    answer: Answer = {"Shards": [render_shard(s) for s in shards[:limit]]}
    if len(shards) > limit:
        answer["NextToken"] = encode_token(
            "shards",
            now_millis,
            stream.name,
            stream.serial,
            kind,
            at_millis,
            shards[limit - 1].shard_id,
        )
    return answer


# -- tags
# ----------------------------------------------------------------------------


def list_tags_for_stream(world: World, params: Params) -> Answer:
    """ListTagsForStream, sorted by key, in pages of `Limit` (default 50)."""
    tags = sorted(world.find(params).tags.items())
    start, limit = params.get("ExclusiveStartTagKey"), params.get("Limit") or _DEFAULT_TAGS
    if start is not None:
        tags = [t for t in tags if t[0] > start]
    return {
        "Tags": [{"Key": k, "Value": v} for k, v in tags[:limit]],
        "HasMoreTags": len(tags) > limit,
    }

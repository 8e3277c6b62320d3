"""Convert parts of Kinesis responses to values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from kcl_pipeline.shards import HashKeyRange, Shard


def shard_of(item: Mapping[str, Any]) -> Shard:
    """Return a shard of a ListShards response."""
    keys, numbers = item["HashKeyRange"], item["SequenceNumberRange"]
    return Shard(
        shard_id=item["ShardId"],
        hash_key_range=HashKeyRange(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        starting_sequence_number=numbers["StartingSequenceNumber"],
        ending_sequence_number=numbers.get("EndingSequenceNumber"),
        parent_shard_id=item.get("ParentShardId"),
        adjacent_parent_shard_id=item.get("AdjacentParentShardId"),
    )


def date_of(response: Mapping[str, Any]) -> datetime | None:
    """Return the time of the Date header; None if it is missing or cannot be parsed."""
    header = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    try:
        return None if header is None else parsedate_to_datetime(header).astimezone(UTC)
    except ValueError:
        return None

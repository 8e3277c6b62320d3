"""Compute which shards a query reads: the first ones, and the children of closed shards.

These are pure functions over listings. The children of a shard enter the offset when their last
parent ends, and are read from the next batch on. The parents leave the offset with that batch.
Within a stream, all records of the parents are therefore in earlier batches than those of the
children, and two offsets identify a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kcl_pipeline.shards import ChildShard, Shard
from kcl_pipeline.spark.data_source.offsets import ShardOffset

ShardOffsets = dict[str, ShardOffset]
"""Shard id to offset, of one stream."""


def begin_as_written(
    written: Mapping[str, ShardOffset], shards: Sequence[Shard], now_millis: int, stream: str
) -> ShardOffsets:
    """Convert the user's offsets. LATEST becomes the present time.

    Raises:
        SettingsError: The stream does not have a shard.
    """
    known = {shard.shard_id for shard in shards}
    for shard_id in written:
        if shard_id not in known:
            raise SettingsError(
                f"option startingPosition names {shard_id}, which stream {stream} does not have; "
                f"write some of {', '.join(sorted(known))}"
            )
    now = ShardOffset(AT_TIMESTAMP, timestamp_millis=now_millis)
    return {
        shard_id: now if offset.position == LATEST else offset
        for shard_id, offset in written.items()
    }


def succeed(
    start: Mapping[str, ShardOffset],
    end: Mapping[str, ShardOffset],
    children: Mapping[str, Sequence[ChildShard]],
    shards: Sequence[Shard],
    now_millis: int,
) -> ShardOffsets:
    """Add children whose ancestors have all ended, and remove parents whose children are added.

    All ancestors count, because a parent may not have started yet.

    Args:
        start: The offset at the start of the batch. A parent whose children are all in it leaves.
        end: The offset at the end of the batch.
        children: Children of each ended shard; empty while they are not known.
        shards: The listing of the stream.
        now_millis: Epoch milliseconds.
    """
    offsets = dict(end)
    unread = {shard_id for shard_id, offset in end.items() if not offset.ended}
    unread |= {
        child.shard_id for born in children.values() for child in born if child.shard_id not in end
    }
    for parent, born in children.items():
        if born and all(child.shard_id in start for child in born):
            del offsets[parent]
            continue
        for child in born:
            before = family({child.shard_id, *child.parents}, shards, ancestors=True) - {
                child.shard_id
            }
            if child.shard_id not in offsets and not before & unread:
                offsets[child.shard_id] = ShardOffset(TRIM_HORIZON, read_up_to_millis=now_millis)
    return offsets


def children_in(shards: Sequence[Shard], parent: str) -> tuple[ChildShard, ...]:
    """The children of a shard in a listing.

    Empty if they do not cover the parent's hash keys: the listing is from the middle of a reshard.
    """
    born = [shard for shard in shards if parent in shard.parents]
    whole = next((shard.hash_key_range for shard in shards if shard.shard_id == parent), None)
    if whole is not None:
        keys = sum(
            max(
                min(s.hash_key_range.end, whole.end) - max(s.hash_key_range.start, whole.start) + 1,
                0,
            )
            for s in born
        )
        if keys != whole.end - whole.start + 1:
            return ()
    return tuple(ChildShard(shard.shard_id, shard.parents, shard.hash_key_range) for shard in born)


def missing(offsets: Mapping[str, ShardOffset], shards: Iterable[Shard]) -> list[str]:
    """Shards that were not read to their end and are missing in the (unfiltered) listing."""
    listed = {shard.shard_id for shard in shards}
    return sorted(
        shard_id
        for shard_id, offset in offsets.items()
        if not offset.ended and shard_id not in listed
    )


def without(
    offsets: Mapping[str, ShardOffset], lost: Iterable[str], shards: Sequence[Shard]
) -> ShardOffsets:
    """Remove lost shards from the offsets.

    Listed shards that are neither ancestors nor descendants of the others replace them, from the
    trim horizon on.
    """
    rest = {shard_id: offset for shard_id, offset in offsets.items() if shard_id not in set(lost)}
    covered = family(rest, shards, ancestors=True) | family(rest, shards, ancestors=False)
    uncovered = [shard for shard in shards if shard.shard_id not in covered]
    ids = {shard.shard_id for shard in uncovered}
    return rest | {
        shard.shard_id: ShardOffset(TRIM_HORIZON)
        for shard in uncovered
        if not ids.intersection(shard.parents)
    }


def family(shard_ids: Iterable[str], shards: Sequence[Shard], *, ancestors: bool) -> set[str]:
    """The shards with all their listed ancestors, or all their listed descendants."""
    found = set(shard_ids)
    links: dict[str, set[str]] = {}
    for shard in shards:
        for parent in shard.parents:
            links.setdefault(shard.shard_id if ancestors else parent, set()).add(
                parent if ancestors else shard.shard_id
            )
    waiting = list(found)
    while waiting:
        new = links.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found

"""Where the shards of a query's streams start, and which shards succeed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.kinesis.client import KinesisClient, ShardFilterType
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId
from kcl_pipeline.spark.data_source.feed import ShardKey
from kcl_pipeline.spark.data_source.lineage import (
    ShardOffsets,
    begin_as_written,
    children_in,
    missing,
    succeed,
    without,
)
from kcl_pipeline.spark.data_source.offsets import Offset, ShardOffset
from kcl_pipeline.spark.data_source.options import SourceOptions
from kcl_pipeline.spark.data_source.read import ReadRules

_FILTERS: Final[dict[str, ShardFilterType]] = {
    "TRIM_HORIZON": "AT_TRIM_HORIZON",
    "LATEST": "AT_LATEST",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
}


class ListedStreams:
    """The streams of one query, the positions where their shards start, and the hash ranges.

    Not thread-safe.

    Args:
        kinesis: Lists the shards.
        options: Streams and starting position.
        rules: Decide what happens for shards that do not exist any more.
    """

    def __init__(self, kinesis: KinesisClient, options: SourceOptions, rules: ReadRules) -> None:
        self._kinesis = kinesis
        self._options = options
        self._rules = rules
        self._streams: dict[str, StreamId] = {}
        self._hash_ranges: dict[ShardKey, HashKeyRange] = {}
        self._children: dict[ShardKey, tuple[ChildShard, ...]] = {}

    def initial(self, now_millis: int) -> Offset:
        """The first offset of a new query, at the starting position of the options."""
        return {name: self._initial_shards(name, now_millis) for name in self.by_name()}

    def note_children(self, key: ShardKey, children: tuple[ChildShard, ...]) -> None:
        """Keep the children that the end of a shard named."""
        self._children[key] = children
        self._hash_ranges |= {(key[0], child.shard_id): child.hash_key_range for child in children}

    def by_name(self) -> dict[str, StreamId]:
        """The streams by name.

        Raises:
            NotFoundError: A stream does not exist.
            SettingsError: Two streams have one name.
        """
        if not self._streams:
            self._streams = resolve_streams(self._kinesis, self._options.streams)
        return self._streams

    def complete(self, start: Offset, now_millis: int) -> Offset:
        """Complete the offset of a restarted query: add new streams and replace lost shards."""
        complete: Offset = {}
        for name, stream in self.by_name().items():
            shards = self._list(stream)
            if name not in start:
                complete[name] = self._initial_shards(name, now_millis)
                continue
            offsets = start[name]
            gone = missing(offsets, shards)
            if gone:
                about = "; ".join(
                    f"{shard_id} after {offsets[shard_id].position}" for shard_id in gone
                )
                self._rules.lost(f"shards of {name} do not exist any more: {about}")
                offsets = without(offsets, gone, shards)
            complete[name] = offsets
        return complete

    def succeed(
        self, name: str, start: ShardOffsets, end: ShardOffsets, now_millis: int
    ) -> ShardOffsets:
        """Replace shards that ended by their children; see `lineage.succeed`."""
        shards = self._list(self.by_name()[name])
        ended = [shard_id for shard_id, offset in end.items() if offset.ended]
        children = {
            parent: self._children.get((name, parent)) or children_in(shards, parent)
            for parent in ended
        }
        return succeed(start, end, children, shards, now_millis)

    def hash_range(self, key: ShardKey) -> HashKeyRange | None:
        """The hash keys of a shard; None if the shard does not exist."""
        if key not in self._hash_ranges:
            self._list(self.by_name()[key[0]])
        return self._hash_ranges.get(key)

    def _initial_shards(self, name: str, now_millis: int) -> ShardOffsets:
        place, stream = self._options.starting_position, self.by_name()[name]
        if place.kind == "OFFSETS":
            written = place.offsets_of(name, "startingPosition")
            return begin_as_written(written, self._list(stream), now_millis, name)
        moment = now_millis if place.millis is None else place.millis
        if moment > now_millis:
            raise SettingsError(
                f"option startingPosition='AT_TIMESTAMP {place.timestamp}' is in the future; "
                "write LATEST"
            )
        start = ShardOffset(AT_TIMESTAMP, timestamp_millis=moment)
        if place.kind == "TRIM_HORIZON":
            start = ShardOffset(TRIM_HORIZON)
        shards = self._kinesis.list_shards(stream, _FILTERS[place.kind], place.timestamp)
        return {shard.shard_id: start for shard in shards}

    def _list(self, stream: StreamId) -> tuple[Shard, ...]:
        shards = self._kinesis.list_shards(stream)
        self._hash_ranges |= {
            (stream.name, shard.shard_id): shard.hash_key_range for shard in shards
        }
        return shards


def resolve_streams(kinesis: KinesisClient, names: Sequence[str]) -> dict[str, StreamId]:
    """The streams by name.

    Raises:
        NotFoundError: A stream does not exist.
        SettingsError: Two streams have one name.
    """
    streams = [kinesis.resolve_stream(name, multi_stream=False) for name in names]
    by_name = {stream.name: stream for stream in streams}
    if len(by_name) != len(streams):
        raise SettingsError(
            f"option streamName={', '.join(names)!r} names two streams of one name; read "
            "them as two sources"
        )
    return by_name

"""Ask a sink that stores positions which shards it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kcl_pipeline.position import NOTHING_STORED, StoredPosition
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import Sink, shard_key

StoredShards = Callable[[StreamId, Iterable[str]], Mapping[str, StoredPosition]]
"""Returns what the table stores for shards of a stream, without those that it does not know.

Raises `SinkError` if the table cannot be read.
"""


@dataclass(frozen=True, slots=True)
class SinkShards:
    """The `StoredShards` of a sink.

    Attributes:
        open_sink: Returns the sink that stores positions, also if it is called again.
    """

    open_sink: Callable[[], Sink]

    def __call__(self, stream: StreamId, shard_ids: Iterable[str]) -> Mapping[str, StoredPosition]:
        """See `StoredShards`."""
        keys = {shard_key(stream, one): one for one in shard_ids}
        found = self.open_sink().positions(list(keys)).shards if keys else {}
        return {keys[key]: one for key, one in found.items() if one != NOTHING_STORED}

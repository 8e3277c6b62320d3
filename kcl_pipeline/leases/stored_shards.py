"""Ask a sink that stores positions which shards it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kcl_pipeline.batch import TransactionalSink, shard_key
from kcl_pipeline.errors import SinkError
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import StreamId

StoredShards = Callable[[StreamId, Iterable[str]], Mapping[str, bool]]
"""Returns which shards of a stream have a position in the table, and whether each has ended.

Raises `SinkError` if the table cannot be read.
"""


def position_key(stream: StreamId, lease: Lease) -> str | None:
    """Return the key of the position of a lease in a sink (`batch.shard_key`).

    None: ARN or creation time of the stream are unknown.
    """
    created = stream.creation_epoch
    if created is None and stream.created_millis is not None:
        created = stream.created_millis // 1000
    if stream.arn is None or created is None:
        return None
    return shard_key(lease.transaction_key, f"{stream.arn}/{created}/{lease.shard_id}")


@dataclass(frozen=True, slots=True)
class SinkShards:
    """The `StoredShards` of a sink.

    Attributes:
        open_sink: Returns the sink that stores positions, also if it is called again.
    """

    open_sink: Callable[[], TransactionalSink]

    def __call__(self, stream: StreamId, shard_ids: Iterable[str]) -> Mapping[str, bool]:
        """See `StoredShards`."""
        keys: dict[str, str] = {}
        for shard_id in shard_ids:
            lease = Lease(stream.lease_key(shard_id), TRIM_HORIZON, stream_mark=stream.lease_mark)
            key = position_key(stream, lease)
            if key is None:
                raise SinkError(
                    f"positions of {stream.name} have no name in the table: its ARN or creation "
                    "time is unknown"
                )
            keys[key] = shard_id
        found = self.open_sink().txn_versions(list(keys)) if keys else {}
        return {keys[key]: one.ended for key, one in found.items() if one.number is not None}

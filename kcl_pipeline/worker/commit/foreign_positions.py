"""Keep the two-phase protocol from shards whose position the table stores.

A worker with `commit_protocol` `positions` may have committed past the checkpoint of the row. A
worker that knows only the checkpoint would commit these records again.
"""

from __future__ import annotations

from dataclasses import replace

from kcl_pipeline.batch import PositionStore, TransactionalSink, TxnVersions
from kcl_pipeline.errors import OtherTableError
from kcl_pipeline.worker.consumer import ShardConsumer


def key_in(sink: TransactionalSink, consumer: ShardConsumer) -> str:
    """Return the key that shows everything that the sink stores of a shard."""
    key = consumer.shard_key if isinstance(sink, PositionStore) else None
    return consumer.transaction_key if key is None else key


def without_position(
    sink: TransactionalSink, consumer: ShardConsumer, seen: TxnVersions | None
) -> TxnVersions:
    """Return the versions of the two-phase protocol.

    After a seek to a time or to the beginning, the table stores no position, and the row alone says
    where the shard begins. A fence then refuses a paused worker that stores positions.

    Args:
        sink: The sink.
        consumer: The consumer of the shard.
        seen: What the sink stores under `key_in`. None: it is read now.

    Raises:
        OtherTableError: The table stores the position of the shard.
        SinkError: The table cannot be used now.
    """
    key = key_in(sink, consumer)
    versions = seen if seen is not None else sink.txn_versions([key])[key]
    while versions.number is not None:
        if versions.position is not None or versions.ended:
            raise OtherTableError(
                f"{consumer.lease_key} stands still: the table stores its position, which "
                "batch.commit_protocol='two_phase' does not read; write 'positions' in the "
                "settings of this worker, as in those of the others"
            )
        fenced = sink.fence(key, versions)
        if fenced is not None:
            versions = fenced
            break
        versions = sink.txn_versions([key])[key]
    return replace(versions, number=None)

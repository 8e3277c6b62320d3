"""Report records that are lost because the row of a held lease was deleted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.config.shard_sync import ShardSyncSettings
from kcl_pipeline.errors import AwsError, NotFoundError, StreamReplacedError
from kcl_pipeline.events import AwsTrouble, LossReason, RecordsLost
from kcl_pipeline.kinesis.identity import require_same_stream
from kcl_pipeline.leases.identity_check import is_removed
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.shard_sync import has_not_begun
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies

_COMMITTED: Final = (ConsumerState.ENDING, ConsumerState.ENDED)


class LossCheck:
    """Report records that no worker reads any more after the row of a held lease was deleted.

    A deleted row is restored while the shard's children have not begun. While the shard has no
    children, the audit of hash-range coverage finds the gap. Two cases remain, which are reported:

    - A child has begun, in a worker that starts a child whose parent has no row (KCL).
    - Shard sync starts the shard again at `LATEST`, because the sink does not store positions.

    Thread-safe.

    Args:
        dependencies: The dependencies of the worker.
        shard_sync_of: Returns the initial position of a stream.
        stored: Asks the table for positions of shards. None: the sink stores none.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        shard_sync_of: Callable[[StreamId], ShardSyncSettings],
        stored: StoredShards | None,
    ) -> None:
        self._dependencies = dependencies
        self._shard_sync_of = shard_sync_of
        self._stored = stored
        settings = dependencies.settings
        self._failover_seconds = settings.lease.failover_time_millis / 1000
        keep_seconds = settings.shard_sync.completed_lease_cleanup_interval_millis / 1000
        self._can_tell = keep_seconds > self._failover_seconds

    def look(self, consumer: ShardConsumer) -> None:
        """Check a lease that is not held any more. An error is reported as `AwsTrouble`."""
        try:
            if self._is_deleted(consumer) and self._is_lost(consumer):
                self._dependencies.events(
                    RecordsLost(
                        self._dependencies.worker_id,
                        consumer.lease_key,
                        LossReason.ROW_DELETED,
                        _reached(consumer),
                        stream=consumer.stream.name,
                    )
                )
        except AwsError as error:
            self._dependencies.events(
                AwsTrouble(f"look for the row of {consumer.lease_key}", str(error))
            )

    def _is_deleted(self, consumer: ShardConsumer) -> bool:
        """Return whether the row was deleted by hand.

        It was if it is gone within the failover time after the last renewal. In this time no other
        worker can finish the shard, so no leader deletes its lease.
        """
        if consumer.state in _COMMITTED or not self._can_tell or self._is_expired(consumer):
            return False
        row = self._dependencies.lease_table.get(consumer.lease_key)
        return row is None and not self._is_expired(consumer)

    def _is_expired(self, consumer: ShardConsumer) -> bool:
        return (
            self._dependencies.clock.monotonic() - consumer.held.renewed_at
            >= self._failover_seconds
        )

    def _is_lost(self, consumer: ShardConsumer) -> bool:
        lease = consumer.held.lease
        if is_removed(self._dependencies.coordinator_table, consumer.stream):
            return False  # The leader deleted the leases of a former stream.
        try:
            require_same_stream(self._dependencies.kinesis, consumer.stream)
        except (NotFoundError, StreamReplacedError):
            return False  # Nothing of a deleted stream can be read.
        initial = self._shard_sync_of(consumer.stream).initial_position_in_stream
        if initial == "LATEST" and self._stored is None:
            return (consumer.committed or lease.checkpoint) != LATEST
        try:
            shards = self._dependencies.kinesis.list_shards(consumer.stream)
        except NotFoundError:
            return False
        rows = [
            self._dependencies.lease_table.get(lease.key_of_sibling(shard.shard_id))
            for shard in shards
            if lease.shard_id in shard.parents
        ]
        return any(
            row is not None and row.checkpoint != AT_TIMESTAMP and not has_not_begun(row)
            for row in rows
        )


def _reached(consumer: ShardConsumer) -> Position | None:
    """Return the last position that the sink's table has (inclusive); None if it has none."""
    position = consumer.committed or consumer.held.lease.checkpoint
    return None if position.is_sentinel else position

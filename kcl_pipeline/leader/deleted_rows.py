"""Restore lease rows that were deleted by hand before their shard was read to its end.

The worker of a child restores a deleted parent itself (`worker.shards.parents`). A Java worker does
not: it starts a child whose parent has no row. So the leader restores the row, too, in the first
cycle without it, before the child is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable

from kcl_pipeline.errors import AwsError, SinkError
from kcl_pipeline.events import EventSink, LeasesCreated, LossReason, RecordsLost
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.identity import require_same_stream
from kcl_pipeline.leader.lease_map import LeaseMap
from kcl_pipeline.leader.listing import asks_table
from kcl_pipeline.leader.lock import Leadership
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.shard_sync import has_not_begun, restored_lease, with_initial_time
from kcl_pipeline.shards import StreamId


class DeletedRows:
    """Restores the rows of unfinished leases that a child waits for.

    It keeps the unfinished leases of the last scan in memory. Only a lease that this leader has
    seen unfinished, in this term, is restored. So the lease of a child that is created late, after
    all shards were finished and deleted, restores no row.
    """

    def __init__(
        self,
        table: LeaseTable,
        kinesis: KinesisClient,
        events: EventSink,
        streams: Streams,
        leadership: Leadership,
        stored: StoredShards | None = None,
    ) -> None:
        self._stored = stored
        self._table = table
        self._kinesis = kinesis
        self._events = events
        self._streams = streams
        self._leadership = leadership
        self._term = 0
        self._unfinished: dict[str, Lease] = {}

    def restore(self, context: CycleContext) -> None:
        """Create missing rows that have a child which has not started.

        With the initial position LATEST, a closed shard without a position in the table is not
        read. Then the records are reported as lost. Errors are added to `context.errors`, and the
        next cycle tries again.

        Raises:
            NotLeadingError: This process does not lead any more.
        """
        if self._term != self._leadership.term:
            self._term = self._leadership.term
            self._unfinished.clear()
        known, self._unfinished = self._unfinished, {}
        self._unfinished = {key: row for key, row in context.leases.items() if not row.ended}
        streams = self._streams.known()
        for key, lease in sorted(known.items()):
            if key in context.leases or key in context.unreadable or key in context.deleted:
                continue
            alone = LeaseMap((lease,))
            stream = next((known for known in streams if alone.of_stream(known)), None)
            try:
                if stream is None or not self._settled(context, stream, lease):
                    self._unfinished[key] = lease
            except (AwsError, SinkError, ValueError) as error:
                self._unfinished[key] = lease
                context.errors.append(error)

    def _settled(self, context: CycleContext, stream: StreamId, lease: Lease) -> bool:
        """Decide on one row that the scan did not find. False: try again in the next cycle.

        If a child has not started, its parent has no row, and the stream lists the parent, the
        parent's row was deleted by hand. (The worker deletes the lease of a shard that is not
        listed.) The conditions of the write cover both rows.
        """
        children = _children_of(lease, context.leases.of_stream(stream))
        waiting = [child for child in children if has_not_begun(child)]
        if not waiting:
            return bool(children)
        if self._table.get(lease.lease_key) is not None:
            return False
        if not self._is_listed(stream, lease):
            return True
        shard_sync = self._streams.shard_sync_of(stream)
        position = shard_sync.initial_position_in_stream
        if asks_table(self._stored, shard_sync):
            known = self._stored(stream, [lease.shard_id]).get(lease.shard_id)
            if known is not None:
                position = "TRIM_HORIZON"
            if known is not None and known.ended:
                return True
        found = restored_lease(lease, position)
        if found is None:
            self._report(stream, lease, waiting)
            return True
        (restored,) = with_initial_time((found,), shard_sync.initial_millis)
        self._leadership.check()
        if any(self._table.restore_parents(child, (restored,)) for child in waiting):
            context.leases[lease.lease_key] = self._unfinished[lease.lease_key] = restored
            context.created.append(lease.lease_key)
            reason = f"the row was deleted before its child {waiting[0].shard_id} had begun"
            self._events(LeasesCreated(stream.name, (lease.lease_key,), reason))
        return True

    def _report(self, stream: StreamId, lease: Lease, waiting: list[Lease]) -> None:
        rows = (self._table.get(child.lease_key) for child in waiting)
        if any(row is not None and has_not_begun(row) for row in rows):
            after = None if lease.checkpoint.is_sentinel else lease.checkpoint
            name = self._leadership.owner_name
            self._events(
                RecordsLost(
                    name, lease.lease_key, LossReason.ROW_DELETED, after, stream=stream.name
                )
            )

    def _is_listed(self, stream: StreamId, lease: Lease) -> bool:
        shards = self._kinesis.list_shards(stream)
        require_same_stream(self._kinesis, stream)
        return any(shard.shard_id == lease.shard_id for shard in shards)


def _children_of(lease: Lease, rows: Iterable[Lease]) -> list[Lease]:
    return [
        row for row in rows if row.stream == lease.stream and lease.shard_id in row.parent_shard_ids
    ]

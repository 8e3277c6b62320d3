"""Decide when a child shard may start: after its parents' ends, even if a parent's row is gone.

KCL starts a child whose parent has no row (protocol §6.6), because finished leases are deleted. A
row that was deleted by hand looks the same, but the rest of its shard would never be read. The
child shows the difference. A finished lease is deleted only after all its children have begun
(protocol §8.2). So if a child has not begun and its parent has no row, the row was deleted by hand.
The leader creates it (`leader.sync`), and the child waits. A Java leader does not: while it leads,
the worker of the child creates the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kcl_pipeline.config.shard_sync import ShardSyncSettings
from kcl_pipeline.events import LeasesCreated, LossReason, RecordsLost
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.shard_sync import (
    creation_order,
    has_not_begun,
    is_begun,
    restored_parents,
    with_initial_time,
)
from kcl_pipeline.planning.stored_shards import finished_shards
from kcl_pipeline.shards import ChildShard, Shard, StreamId
from kcl_pipeline.sinks.sink import Positions
from kcl_pipeline.worker.commit import ShardProgress
from kcl_pipeline.worker.dependencies import WorkerDependencies

Lineage = Callable[[ShardProgress], Collection[str]]
"""Returns the ids of all ancestors of a shard that its stream lists. Raises `AwsError`."""


@dataclass(frozen=True, slots=True)
class ParentRows:
    """The parents' rows of one shard, read with strong consistency.

    Attributes:
        ended: Every parent that has a row is at SHARD_END.
        missing: Shard ids of the parents without a row, without the stream part of the lease key.
        reached: Positions of the parents. A changed value means that a parent has moved.
    """

    ended: bool
    missing: frozenset[str] = frozenset()
    reached: tuple[object, ...] = ()


class ParentCheck:
    """Decide whether blocked consumers may start; restore deleted parents beside a Java leader.

    Any thread may call `look`. One thread calls the other methods.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases held by this worker.
        shard_sync_of: Returns the initial position of a stream.
        stored: Asks the table for positions of shards. None: the sink stores none.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        shard_sync_of: Callable[[StreamId], ShardSyncSettings],
        stored: StoredShards | None,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._shard_sync_of = shard_sync_of
        self._stored = stored
        self._identity = StreamIdentityCheck(dependencies.kinesis, dependencies.clock)
        self._listings: dict[StreamId, tuple[Shard, ...]] = {}
        self._closed_cases: set[str] = set()
        """Lease keys of parents that are not restored: not listed any more, or reported as lost."""

    def begin_pass(self) -> None:
        """Forget the listings of the last pass: they are older than the rows of this pass."""
        self._listings.clear()

    def look(self, consumer: ShardProgress) -> ParentRows:
        """Read the parents' rows.

        Raises:
            AwsError: A row cannot be read now.
        """
        lease = consumer.held.lease
        rows = {
            parent: self._dependencies.lease_table.get(lease.key_of_sibling(parent))
            for parent in sorted(lease.parent_shard_ids)
        }
        return ParentRows(
            ended=all(row.ended for row in rows.values() if row is not None),
            missing=frozenset(parent for parent, row in rows.items() if row is None),
            reached=tuple(
                None if row is None else (row.checkpoint, row.pending_checkpoint)
                for row in rows.values()
            ),
        )

    def may_start(
        self, consumer: ShardProgress, rows: ParentRows, stored: Positions | None
    ) -> bool:
        """Return whether the consumer may start now; if Java leads, create rows of deleted parents.

        Args:
            consumer: A blocked consumer.
            rows: Its parents' rows, from `look` in this pass.
            stored: What the table has of the shard. None: it could not be read. If it has a
                position or an end, a worker started this shard after its parents' ends. Then the
                row of the child does not matter: it was created again, or edited.

        Raises:
            AwsError: The stream or the lease table could not be read, or the stream was replaced.
                Nothing is decided.
            SinkError: The positions could not be read. Nothing is decided.
            LeaseLostError: The child has begun in another worker.
        """
        lease = consumer.held.lease
        missing = {p for p in rows.missing if lease.key_of_sibling(p) not in self._closed_cases}
        if not missing or (stored is not None and any(o.has_begun for o in stored.shards.values())):
            return rows.ended
        unfinished = self._unfinished(consumer, missing)
        if not has_not_begun(lease):
            missing &= unfinished
        if not missing:
            return rows.ended
        listed = self._listed(consumer.stream)
        deleted = {shard.shard_id for shard in listed}.intersection(missing)
        deleted -= self._finished(consumer, listed, deleted) if deleted else set()
        self._closed_cases |= {lease.key_of_sibling(p) for p in missing - deleted}
        if not deleted:
            return rows.ended
        if stored is None:
            return False
        shard_sync = self._shard_sync_of(consumer.stream)
        position = shard_sync.initial_position_in_stream
        parents = with_initial_time(
            restored_parents(consumer.stream, listed, deleted, unfinished, position),
            shard_sync.initial_millis,
        )
        if not parents:
            return self._report(lease, deleted, consumer.stream.name) and rows.ended
        # A leader of this package creates the rows (`leader.sync`). One of Java does not.
        if self._java_leads():
            for key in self._leases.restore_parents(consumer.held, parents):
                reason = f"the row was deleted before its child {lease.shard_id} had begun"
                self._dependencies.events(LeasesCreated(consumer.stream.name, (key,), reason))
        return False

    def _java_leads(self) -> bool:
        lock = self._dependencies.coordinator_table.read_lock()
        return lock is not None and self._dependencies.worker_table.is_java(lock.owner_name)

    def _finished(
        self, consumer: ShardProgress, listed: Sequence[Shard], deleted: Collection[str]
    ) -> set[str]:
        """Return the shards that count as ended, because a descendant has begun.

        The leader decides in the same way. A sibling counts, too: a worker that waits for a parent
        which the leader does not create would wait for ever.
        """
        lease = consumer.held.lease
        ordered, lineage = creation_order(listed), set(deleted)
        for shard in ordered:
            if not lineage.isdisjoint(shard.parents):
                lineage.add(shard.shard_id)
        descendants = sorted(lineage - {*deleted, lease.shard_id})
        table = self._dependencies.lease_table
        found = {one: table.get(lease.key_of_sibling(one)) for one in descendants}
        rows = {one: row for one, row in found.items() if row is not None}
        known = {} if self._stored is None else self._stored(consumer.stream, descendants)
        return finished_shards(ordered, rows, known)

    def _unfinished(self, consumer: ShardProgress, missing: set[str]) -> set[str]:
        """Return the parents that the table shows as unfinished, and remove the ended ones.

        A child at LATEST or AT_TIMESTAMP waits for an unfinished parent, too.
        """
        lease = consumer.held.lease
        if self._stored is None or is_begun(lease):
            return set()
        known = self._stored(consumer.stream, sorted(missing))
        ended = {parent for parent, one in known.items() if one.ended}
        missing -= ended
        self._closed_cases |= {lease.key_of_sibling(parent) for parent in ended}
        return set(known) - ended

    def is_passed_over(self, consumer: ShardProgress, shard_id: str) -> bool:
        """Return whether nobody reads a shard that follows, because its descendants have begun.

        At LATEST and AT_TIMESTAMP a stream begins at the shards of that time. A lease in front of
        them can still be created, if the first write of its row failed.

        Args:
            consumer: The consumer of a shard that has ended.
            shard_id: A shard without a row, one of the children of the consumer's shard.

        Raises:
            AwsError: The stream or the table could not be read, or the stream was replaced.
        """
        listed = self._listed(consumer.stream)
        children_of: dict[str, list[str]] = {}
        for shard in listed:
            for parent in shard.parents:
                children_of.setdefault(parent, []).append(shard.shard_id)
        without_row, seen = [shard_id], {shard_id}
        while without_row:
            children = children_of.get(without_row.pop(), [])
            for child in children:
                if child in seen:  # the child of a merge
                    continue
                seen.add(child)
                row = self._dependencies.lease_table.get(consumer.held.lease.key_of_sibling(child))
                if row is None:
                    without_row.append(child)
                elif has_not_begun(row):
                    return False
            if not children:
                return False
        return True

    def ancestors_of(self, consumer: ShardProgress) -> Collection[str]:
        """Return the ids of all ancestors of a shard that its stream lists (`Lineage`).

        Raises:
            AwsError: The stream could not be listed, or was replaced.
        """
        lease = consumer.held.lease
        waiting, found = set(lease.parent_shard_ids), set[str]()
        if not waiting:
            return found
        parents_of = {shard.shard_id: shard.parents for shard in self._listed(consumer.stream)}
        waiting.update(parents_of.get(lease.shard_id, ()))
        while waiting:
            one = waiting.pop()
            if one in parents_of and one not in found:
                found.add(one)
                waiting.update(parents_of[one])
        return found

    def children_of(self, consumer: ShardProgress) -> tuple[ChildShard, ...]:
        """Return the children of a shard that its stream lists.

        Raises:
            AwsError: The stream could not be listed, or was replaced.
        """
        shard_id = consumer.held.lease.shard_id
        return tuple(
            ChildShard(shard.shard_id, shard.parents, shard.hash_key_range)
            for shard in self._listed(consumer.stream)
            if shard_id in shard.parents
        )

    def _listed(self, stream: StreamId) -> tuple[Shard, ...]:
        if stream not in self._listings:
            shards = self._dependencies.kinesis.list_shards(stream)
            self._identity.confirm(stream, self._dependencies.clock.monotonic())
            self._listings[stream] = shards
        return self._listings[stream]

    def _report(self, lease: Lease, deleted: set[str], stream: str) -> bool:
        """Report each deleted parent once, if the child's row, read after theirs, confirms it."""
        row = self._dependencies.lease_table.get(lease.lease_key)
        if row is None or not has_not_begun(row):
            return False
        lost = sorted(lease.key_of_sibling(parent) for parent in deleted)
        self._closed_cases.update(lost)
        for key in lost:
            self._dependencies.events(
                RecordsLost(
                    self._dependencies.worker_id, key, LossReason.ROW_DELETED, stream=stream
                )
            )
        return True

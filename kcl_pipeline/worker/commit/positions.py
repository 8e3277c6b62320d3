"""Commit batches exactly once with positions that the table stores.

For every shard the log of the sink stores a number v and the position p of the last row. One commit
adds the files of a batch, moves p to the end of each of its ranges, and increments v. It is refused
unless v is the number that this worker read together with the beginning of the range. So no row of
a lease is written before a commit, and a paused worker cannot commit a range again. Safety does not
depend on leases.

The lease row has a checkpoint that other workers of the Java KCL continue from. It may be behind
the table: a renewal writes it, and it is flushed when the lease leaves this worker. A worker that
takes a lease continues after the later one of checkpoint and p. If the checkpoint is later, a Java
worker has processed the records between the two. Then p and v are moved first, without files, so
that a paused worker cannot commit these records any more.

Batches of the two-phase protocol may still be pending in a row, and are settled as by that
protocol. Commits of both protocols compare the versions of both, so they refuse each other.

See docs/decisions/0007-positions-in-the-table.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from kcl_pipeline.batch import (
    Batch,
    CommitEntry,
    PositionStore,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import LeaseLostError, OtherTableError, SinkError
from kcl_pipeline.events import EventSink
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.lease.table_mark import TableMark
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.stored_shards import SinkShards, StoredShards
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from kcl_pipeline.worker.commit.protocol import CommitResult
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer

_OVERTAKEN: Final = "the table has another worker's commit"
_CURE: Final = (
    "put the table back, or choose where the shard continues with `kcl-pipeline seek`, or delete "
    "the lease row: then the shard continues after its position in the present table"
)


class PositionsCommit(TwoPhaseCommit):
    """`CommitProtocol` of a sink that stores positions.

    Args:
        leases: The leases of this worker.
        sink: Owns the log. It is a `PositionStore`, too.
        clock: Limits the time of retries.
        events: Receives failed attempts.
        worker_id: Names this worker in events.
        rng: Spreads the waits of workers that fail together.
        stop: Ends the waits. None: nothing ends them early.
        map: Runs the writes of several lease rows.
        flush_seconds: Longest time between a commit and its checkpoint, if that is shorter than
            the renewal interval. None: renewals write all checkpoints.

    Raises:
        TypeError: The sink does not store positions.
    """

    def __init__(
        self,
        leases: HeldLeases,
        sink: TransactionalSink,
        clock: Clock,
        events: EventSink,
        worker_id: str,
        *,
        rng: random.Random | None = None,
        stop: StopSignal | None = None,
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
        flush_seconds: float | None = None,
    ) -> None:
        super().__init__(leases, sink, clock, events, worker_id, rng=rng, stop=stop, map=map)
        if not isinstance(sink, PositionStore):
            raise TypeError(f"{type(sink).__name__} does not store positions")
        self._store: PositionStore = sink
        self._flush_seconds = flush_seconds

    @property
    def stored(self) -> StoredShards | None:
        """See `CommitProtocol`."""
        return SinkShards(lambda: self._sink)

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """See `CommitProtocol`. `resolve` reports a shard that has no name."""
        return super().look_up(one for one in consumers if one.shard_key is not None)

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """See `CommitProtocol`.

        The row was read before the table. So the position in the table is behind the checkpoint
        only if a Java worker, or an earlier two-phase commit, has moved the checkpoint.

        A position that comes from the row is used only if the row is still the same after the
        table was read: a seek, or another worker's two-phase commit, may lie between the two.
        """
        key = self._key(consumer)
        versions = seen if seen is not None else self._sink.txn_versions([key])[key]
        self._require_table(consumer, versions)
        position, versions = self._settled(consumer, key, versions)
        while _depends_on_row(versions, position):
            self._leases.checkpoint(consumer.held, checkpoint=position)
            if not _is_behind(versions, position):
                break
            moved = self._store.move(key, versions, position, ended=versions.ended)
            if moved is not None:
                versions = moved
                break
            versions = self._sink.txn_versions([key])[key]
        position = max(position, versions.position or position)
        checkpoint = consumer.held.lease.checkpoint
        if position == LATEST and versions.number is None and self._knows_parent(consumer):
            position = checkpoint = TRIM_HORIZON
        consumer.settle(position, versions, checkpoint)
        if versions.position is not None:
            self._leases.note_processed(consumer.held, versions.position, TableMark.of(versions))
        return position

    def _require_table(self, consumer: ShardConsumer, now: TxnVersions) -> None:
        """Refuse a table that was replaced or restored since the checkpoint was written.

        The row is written again first, unchanged: if a seek lies between the reads of the row and
        of the table, the write is refused, and the lease is taken again.

        Raises:
            OtherTableError: A person must decide.
            LeaseLostError: The row has changed.
        """
        lease = consumer.held.lease
        doubt = None if lease.table_mark is None else lease.table_mark.doubt(now)
        if doubt is None:
            return
        self._leases.checkpoint(
            consumer.held,
            checkpoint=lease.checkpoint,
            pending=lease.pending_checkpoint,
            pending_state=lease.pending_checkpoint_state,
        )
        raise OtherTableError(f"{lease.lease_key} stands still: {doubt}; {_CURE}")

    def _knows_parent(self, consumer: ShardConsumer) -> bool:
        """Return whether the table stores a position of a parent.

        Then the row is at LATEST because it was created by a leader that does not ask the table.
        """
        parents = consumer.held.lease.parent_shard_ids
        return bool(parents and SinkShards(lambda: self._sink)(consumer.stream, sorted(parents)))

    def preparing(
        self,
        batch: Batch,  # noqa: ARG002
        consumers: dict[str, ShardConsumer],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """See `CommitProtocol`. Nothing is written before a commit."""
        return nullcontext()

    def commit(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        """See `CommitProtocol`. The next renewal of each lease writes the checkpoint."""
        if self._schema is None:
            refused = self._moved_without_files(batch, consumers)
            if refused:
                return CommitResult(landed=False, lost=refused)
        result = super().commit(batch, consumers, written)
        if result.landed:
            for part in batch.ranges:
                consumer = consumers[part.lease_key]
                if self._schema is not None:
                    consumer.versions = consumer.versions.moved_to(part.through, ended=False)
                self._leases.note_processed(
                    consumer.held, part.through, TableMark.of(consumer.versions)
                )
        return result

    def _moved_without_files(
        self, batch: Batch, consumers: dict[str, ShardConsumer]
    ) -> dict[str, str]:
        """Store the ends of ranges before any columns are known: all records are dead letters.

        Returns:
            Why leases are lost, by lease key.
        """
        refused = self._gone(consumers.values())
        for part in batch.ranges:
            consumer = consumers[part.lease_key]
            if part.lease_key in refused or consumer.versions.position == part.through:
                continue
            key, expected = self._key(consumer), consumer.versions
            moved = self._store.move(key, expected, part.through, ended=False)
            if moved is None:
                # A lost answer, or another worker.
                moved = self._sink.txn_versions([key])[key]
            after = expected.moved_to(part.through, ended=False)
            if not (expected.fits(moved) or after.fits(moved)):
                refused[part.lease_key] = _OVERTAKEN
                continue
            consumer.versions = moved
        return refused

    def end(self, consumer: ShardConsumer) -> None:
        """See `CommitProtocol`. Afterwards the table shows that it has all records of the shard."""
        key, versions = self._key(consumer), consumer.versions
        committed = consumer.committed
        position = versions.position if committed is None or committed.is_sentinel else committed
        if versions.ended:
            return
        moved = self._store.move(key, versions, position, ended=True)
        if moved is None:
            # A lost answer, or another worker.
            moved = self._sink.txn_versions([key])[key]
            if not moved.ended or moved.position != position:
                raise LeaseLostError(f"the lease {consumer.lease_key} is lost: {_OVERTAKEN}")
        consumer.versions = moved

    def begin(
        self, consumer: ShardConsumer, ended_parents: Iterable[str], seen: TxnVersions | None
    ) -> None:
        """See `CommitProtocol`. A paused writer of a parent can commit nothing after this call."""
        if seen is not None:
            self._require_table(consumer, seen)
        if seen is not None and seen.number is not None:
            return  # done when the shard was begun
        lease, ended = consumer.held.lease, set(ended_parents)
        # The row of a parent is deleted after the child has begun. Only then, a parent without a
        # row has ended.
        parents = ended if lease.checkpoint.is_sentinel else lease.parent_shard_ids
        keys = {key: one for one in sorted(parents) if (key := consumer.sibling_key(one))}
        for key, versions in (self._sink.txn_versions(list(keys)) if keys else {}).items():
            if versions.ended or (versions.number is None and keys[key] not in ended):
                continue
            if self._store.move(key, versions, versions.position, ended=True) is None:
                raise SinkError(f"the position of the parent {key} has moved; it is read again")

    def flush_due(self, consumer: ShardConsumer, now: float, *, idle: bool) -> bool:  # noqa: ARG002
        """See `CommitProtocol`."""
        since = now - consumer.held.checkpointed_at
        return self._flush_seconds is not None and since >= self._flush_seconds

    def _prepare_all(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> dict[str, str]:
        """Note the id of a table that did not exist when the leases were taken.

        Returns:
            Why leases are lost, by lease key.
        """
        lost: dict[str, str] = {}
        new = [
            c for part in batch.ranges if (c := consumers[part.lease_key]).versions.table is None
        ]
        found = self._sink.txn_versions([self._key(c) for c in new]) if new else {}
        for consumer in new:
            now = found[self._key(consumer)]
            if consumer.versions.fits(now):
                consumer.versions = now
            else:
                lost[consumer.lease_key] = _OVERTAKEN
        return lost

    def _key(self, consumer: ShardConsumer) -> str:
        key = consumer.shard_key
        if key is None:
            raise SinkError(
                f"the position of {consumer.lease_key} has no name in the table: ARN or creation "
                f"time of the stream {consumer.stream.name} are unknown"
            )
        return key

    def _entry(self, consumer: ShardConsumer, end: Position) -> CommitEntry:
        return CommitEntry.to(self._key(consumer), consumer.versions, end)


def _is_behind(versions: TxnVersions, position: Position) -> bool:
    """Return whether the table does not know a position that the row has."""
    is_known = versions.position is not None and versions.position >= position
    return not position.is_sentinel and not is_known


def _depends_on_row(versions: TxnVersions, position: Position) -> bool:
    """Return whether the position comes from the row, or two-phase commits may be newer than it."""
    return not position.is_shard_end and (
        _is_behind(versions, position) or versions.data is not None
    )

"""Report records that no worker reads any more.

`LossCheck` reports records that are lost because the row of a held lease was deleted by hand,
`DeletedStreams` those that are lost with their stream, and `RetentionLosses` those that left
retention before this application read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kcl_pipeline.config.shard_sync import ShardSyncSettings
from kcl_pipeline.errors import (
    AwsError,
    NotFoundError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble, LossReason, RecordsLost
from kcl_pipeline.kinesis.client import MIN_RETENTION_MILLIS
from kcl_pipeline.kinesis.identity import StreamIdentityCheck, StreamKey, stream_key
from kcl_pipeline.kinesis.reader import FoundGap
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leases.identity_check import is_removed
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.shard_sync import (
    has_not_begun,
)
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import MapCallable
from kcl_pipeline.worker.commit import ShardProgress
from kcl_pipeline.worker.dependencies import WorkerDependencies

LOOK_SHARE: Final = 0.2
"""Time between two looks at a lost lease as a share of the failover time. After that time nothing
can be concluded."""


@dataclass(slots=True)
class LostLease:
    """A lease that is not held any more, until it is known whether records are lost.

    Attributes:
        consumer: Its consumer.
        loses_with_stream: Whether records are lost if its stream is deleted.
        due: Earliest time of the next look (monotonic seconds).
    """

    consumer: ShardProgress
    loses_with_stream: bool
    due: float = 0.0


class LossCheck:
    """Report records that no worker reads any more after the row of a held lease was deleted.

    A deleted row is restored while the shard's children have not begun. While the shard has no
    children, the audit of hash-range coverage finds the gap. Two cases remain, which are reported:

    - A child has begun, in a worker that starts a child whose parent has no row (KCL).
    - Shard sync starts the shard again at `LATEST`, because the sink does not store positions.

    If the leader has deleted the row because the stream was deleted and created again, the rest of
    the shard is lost with the stream.

    Args:
        dependencies: The dependencies of the worker.
        shard_sync_of: Returns the initial position of a stream.
        stored: Asks the table for positions of shards. None: the sink stores none.
        deleted: Finds out whether the stream is deleted.
        map: Looks at several leases.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        shard_sync_of: Callable[[StreamId], ShardSyncSettings],
        stored: StoredShards | None,
        deleted: DeletedStreams,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
    ) -> None:
        self._dependencies = dependencies
        self._shard_sync_of = shard_sync_of
        self._stored = stored
        self._deleted = deleted
        self._map = map
        self._waiting: list[LostLease] = []
        settings = dependencies.settings
        self._failover_seconds = settings.lease.failover_time_millis / 1000
        keep_seconds = settings.shard_sync.completed_lease_cleanup_interval_millis / 1000
        self._can_tell = keep_seconds > self._failover_seconds

    def look(self, lost: Collection[LostLease]) -> None:
        """Judge the leases that were lost, and again those of which a call failed.

        Args:
            lost: The leases that were lost since the last look.
        """
        waiting = [*self._waiting, *lost]
        judged = self._map(self._is_judged, waiting)
        self._waiting = [
            one for one, is_judged in zip(waiting, judged, strict=True) if not is_judged
        ]

    def _is_judged(self, lost: LostLease) -> bool:
        consumer, now = lost.consumer, self._dependencies.clock.monotonic()
        if now < lost.due:
            return False
        lost.due = now + LOOK_SHARE * self._failover_seconds
        try:
            if not self._is_deleted(consumer):
                return True
            is_deleted = self._deleted.find_out(consumer.stream)
            if is_deleted and lost.loses_with_stream:
                self._deleted.report(consumer.held.lease, consumer.stream, consumer.committed)
            if is_deleted is False and self._is_lost(consumer):
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
            return False
        return is_deleted is not None

    def _is_deleted(self, consumer: ShardProgress) -> bool:
        """Return whether the row was deleted by hand.

        It was if it is gone within the failover time after the last renewal. In this time no other
        worker can finish the shard, so no leader deletes its lease.
        """
        if not self._can_tell or self._is_expired(consumer):
            return False
        row = self._dependencies.lease_table.get(consumer.lease_key)
        return row is None and not self._is_expired(consumer)

    def _is_expired(self, consumer: ShardProgress) -> bool:
        return (
            self._dependencies.clock.monotonic() - consumer.held.renewed_at
            >= self._failover_seconds
        )

    def _is_lost(self, consumer: ShardProgress) -> bool:
        lease = consumer.held.lease
        if is_removed(self._dependencies.coordinator_table, consumer.stream):
            return False  # The leader deleted the leases of a former stream.
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


def _reached(consumer: ShardProgress) -> Position | None:
    """Return the last position that the sink's table has (inclusive); None if it has none."""
    position = consumer.committed or consumer.held.lease.checkpoint
    return None if position.is_sentinel else position


_Consumer = TypeVar("_Consumer", bound=ShardProgress)


class DeletedStreams:
    """Report what is lost with a deleted stream, once for each lease.

    A reader or a step of a shard finds out that the stream is deleted (`StreamIdentityCheck`). Then
    the shards of the stream that this worker holds are judged, once. Of one that lacked records a
    moment ago, records may have been lost: Kinesis does not tell what came after its position.

    A lease that is gained later is not judged: its former owner did that.

    Thread-safe, but one thread calls `look`.

    Args:
        dependencies: The dependencies of the worker.
        identity: Knows which streams are proven to be deleted.
    """

    def __init__(self, dependencies: WorkerDependencies, identity: StreamIdentityCheck) -> None:
        self._dependencies = dependencies
        self._identity = identity
        self._judged = frozenset[StreamKey]()
        self._reported: set[str] = set()

    def __contains__(self, stream: StreamId) -> bool:
        """Whether the stream was known to be deleted at the last look."""
        return stream_key(stream) in self._judged

    def look(
        self, consumers: Mapping[str, _Consumer], may_lose: Callable[[_Consumer], bool]
    ) -> None:
        """Judge the shards of the streams of which is known since the last look.

        Args:
            consumers: The consumers of the held leases, by lease key.
            may_lose: Returns whether a shard loses records if its stream is deleted now.
        """
        news = self._identity.deleted - self._judged
        if not news:
            return
        self._judged |= news
        for consumer in consumers.values():
            if stream_key(consumer.stream) in news and may_lose(consumer):
                self.report(consumer.held.lease, consumer.stream, consumer.committed)

    def find_out(self, stream: StreamId) -> bool | None:
        """Describe a stream now; return whether it is deleted.

        Returns:
            None: the description failed, which proves nothing. It is reported as `AwsTrouble`.
        """
        try:
            self._identity.confirm(stream, self._dependencies.clock.monotonic())
        except (NotFoundError, StreamReplacedError):
            return True
        except AwsError as error:
            self._dependencies.events(AwsTrouble(f"description of {stream.name}", str(error)))
            return None
        return False

    def report(self, lease: Lease, stream: StreamId, committed: Position | None) -> None:
        """Report that the rest of a shard is lost. A lease that was reported is left out.

        Args:
            lease: The lease.
            stream: Its stream.
            committed: Last position that the table has. None: that of the lease.
        """
        if lease.unique_key in self._reported:
            return
        self._reported.add(lease.unique_key)
        position = committed or lease.checkpoint
        self._dependencies.events(
            RecordsLost(
                self._dependencies.worker_id,
                lease.lease_key,
                LossReason.STREAM_DELETED,
                None if position.is_sentinel else position,
                stream=stream.name,
            )
        )


RETRY_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Waiting:
    """A gap of one consumer. `due` is in monotonic seconds."""

    consumer: ShardProgress
    found_gap: FoundGap
    due: float = 0.0


class RetentionLosses:
    """Judge the gaps that readers have found. Only the processing thread uses it.

    A gap is a loss if two facts hold. The lease was renewed after the gap was found; otherwise
    another worker may have read the records while this one was paused. And the time up to which the
    shard was read is unknown or has left retention; otherwise no record can have arrived and left.

    Args:
        dependencies: The dependencies of the worker.
        retrieval: Has the gaps, and knows the retention period of a stream.
    """

    def __init__(self, dependencies: WorkerDependencies, retrieval: Retrieval) -> None:
        self._dependencies = dependencies
        self._retrieval = retrieval
        self._waiting: list[_Waiting] = []
        self._reported: dict[str, Position] = {}

    def look(self, consumers: Mapping[str, ShardProgress]) -> None:
        """Report the losses that are certain now. Gaps of leases that are not held are dropped.

        Args:
            consumers: The consumers of the held leases, by lease key.
        """
        for found in self._retrieval.gaps.take():
            consumer = consumers.get(found.lease_key)
            if consumer is not None:
                self._waiting.append(_Waiting(consumer, found))
        if self._waiting:
            self._waiting = [
                one
                for one in self._waiting
                if consumers.get(one.found_gap.lease_key) is one.consumer
                and not self._is_judged(one)
            ]

    def _is_judged(self, waiting: _Waiting) -> bool:
        now, found = self._dependencies.clock.monotonic(), waiting.found_gap
        if waiting.consumer.held.renewed_at <= found.found_at or now < waiting.due:
            return False
        if self._reported.get(found.lease_key) == found.gap.after:
            return True
        try:
            lost = self._loss(found)
        except AwsError as error:
            waiting.due = now + RETRY_SECONDS
            self._dependencies.events(AwsTrouble(f"retention of {found.lease_key}", str(error)))
            return False
        if lost is not None:
            self._reported[found.lease_key] = found.gap.after
            self._dependencies.events(lost)
        return True

    def _loss(self, found_gap: FoundGap) -> RecordsLost | None:
        gap, clock = found_gap.gap, self._dependencies.clock
        now = (
            round(clock.wall() * 1000)
            if gap.served_millis is None
            else gap.served_millis + round((clock.monotonic() - found_gap.found_at) * 1000)
        )
        read_up_to = gap.read_up_to_millis
        if read_up_to is not None and now - read_up_to < MIN_RETENTION_MILLIS:
            return None
        oldest = now - self._retention_millis(found_gap.stream)
        if read_up_to is not None and read_up_to > oldest:
            return None
        return RecordsLost(
            self._dependencies.worker_id,
            found_gap.lease_key,
            LossReason.LEFT_RETENTION,
            None if gap.after.is_sentinel else gap.after,
            first_arrival_millis=read_up_to,
            last_arrival_millis=oldest
            if gap.before_millis is None
            else min(oldest, gap.before_millis),
            stream=found_gap.stream.name,
            before=gap.before,
        )

    def _retention_millis(self, stream: StreamId) -> int:
        """Return the retention period; the shortest one if this worker must not ask for it."""
        try:
            return self._retrieval.identity.retention_millis(stream)
        except (ThrottledError, UnavailableError):
            raise
        except AwsError:
            return MIN_RETENTION_MILLIS

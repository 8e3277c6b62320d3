"""The events of workers: leases, shards, batches, and rows and calls that fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kcl_pipeline.events.base import Event
from kcl_pipeline.position import Position


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker has opened its tables and starts to discover leases.

    Example:
        >>> from kcl_pipeline import WorkerStarted
        >>> event = WorkerStarted(worker_id="w-1")
        >>> event.worker_id
        'w-1'
    """

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """A worker has stopped and released its leases.

    Attributes:
        reason: A value of `worker.StopReason`.

    Example:
        >>> from kcl_pipeline import WorkerStopped
        >>> event = WorkerStopped(worker_id="w-1", reason="the lease expired")
        >>> event.reason
        'the lease expired'
    """

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerIdShared(Event):
    """Another process has started under the worker id of this one, which ends.

    Attributes:
        other_run_id: The run id of the other process. That of `kcl-pipeline worker` begins with the
            name of its host.

    Example:
        >>> from kcl_pipeline import WorkerIdShared
        >>> event = WorkerIdShared(worker_id="w-1", other_run_id="host-2@1")
        >>> event.other_run_id
        'host-2@1'
    """

    worker_id: str
    other_run_id: str


@dataclass(frozen=True, slots=True)
class StreamsDiffer(Event):
    """The application reads streams that the settings of a starting worker do not name.

    The worker reads their leases, too.

    Example:
        >>> from kcl_pipeline import StreamsDiffer
        >>> event = StreamsDiffer(worker_id="w-1", unnamed=("w-1",))
        >>> event.unnamed
        ('w-1',)
    """

    worker_id: str
    unnamed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamUnavailable(Event):
    """A stream is missing, is being created or deleted, or must not be described or listed.

    Its leases are kept. The other streams are read on. The leader tries again after at most 30
    seconds, and repeats the event once a minute.

    Attributes:
        reporter: Id of the worker, or owner name of the leader.
        stream: The stream, as in the settings or in the recorded identity.

    Example:
        >>> from kcl_pipeline import StreamUnavailable
        >>> event = StreamUnavailable(
        ...     reporter="text",
        ...     stream="orders",
        ...     error="the call was throttled",
        ... )
        >>> event.reporter
        'text'
    """

    reporter: str
    stream: str
    error: str


@dataclass(frozen=True, slots=True)
class LeaseGained(Event):
    """A worker holds a lease that it did not hold before.

    Example:
        >>> from kcl_pipeline import LeaseGained
        >>> event = LeaseGained(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     lease_counter=3,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    lease_counter: int


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """A worker does not hold a lease any more, and has neither released it nor handed it off.

    Example:
        >>> from kcl_pipeline import LeaseLost
        >>> event = LeaseLost(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     reason="the lease expired",
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased(Event):
    """A stopping worker removed the owner of a lease.

    Example:
        >>> from kcl_pipeline import LeaseReleased
        >>> event = LeaseReleased(worker_id="w-1", lease_key="shardId-000000000000")
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str


@dataclass(frozen=True, slots=True)
class HandoffStarted(Event):
    """The owner of a lease has read that the leader assigned the lease to another worker.

    Example:
        >>> from kcl_pipeline import HandoffStarted
        >>> event = HandoffStarted(
        ...     lease_key="shardId-000000000000",
        ...     from_worker="w-1",
        ...     to_worker="w-2",
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    from_worker: str
    to_worker: str


@dataclass(frozen=True, slots=True)
class HandoffCompleted(Event):
    """The old owner has transferred the lease.

    Attributes:
        forced: Whether the handoff time-out ended the work on the shard.

    Example:
        >>> from kcl_pipeline import HandoffCompleted
        >>> event = HandoffCompleted(
        ...     lease_key="shardId-000000000000",
        ...     from_worker="w-1",
        ...     to_worker="w-2",
        ...     seconds=1.5,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    from_worker: str
    to_worker: str
    seconds: float
    forced: bool = False


@dataclass(frozen=True, slots=True)
class ShardEnded(Event):
    """A shard was read, committed and checkpointed to its end. Its children have leases.

    Example:
        >>> from kcl_pipeline import ShardEnded
        >>> event = ShardEnded(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     child_lease_keys=("w-1",),
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    child_lease_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchCommitted(Event):
    """A batch is in the sink.

    Attributes:
        milliseconds: Duration of each phase: job (executor fetch), write, commit, rewrite.
        table_version: Version of the table. None: the sink has no versions.
        records_by_lease: Number of records by lease key.
        data_bytes_by_lease: Bytes of the data of the records that were read, by lease key.

    Example:
        >>> from kcl_pipeline import BatchCommitted
        >>> event = BatchCommitted(
        ...     worker_id="w-1",
        ...     batch_id="w-1-1",
        ...     records=3,
        ...     bytes=3,
        ...     lease_keys=("shardId-000000000000",),
        ...     milliseconds={},
        ... )
        >>> event.batch_id
        'w-1-1'
    """

    worker_id: str
    batch_id: str
    records: int
    bytes: int
    lease_keys: tuple[str, ...]
    milliseconds: Mapping[str, float]
    table_version: int | None = None
    records_by_lease: Mapping[str, int] = field(default_factory=dict, metadata={"in_line": False})
    data_bytes_by_lease: Mapping[str, int] = field(
        default_factory=dict, metadata={"in_line": False}
    )


@dataclass(frozen=True, slots=True)
class BatchRefused(Event):
    """A batch, or some of its leases, was not committed.

    The owners of these leases read the ranges again.

    Example:
        >>> from kcl_pipeline import BatchRefused
        >>> event = BatchRefused(
        ...     worker_id="w-1",
        ...     batch_id="w-1-1",
        ...     lease_keys=("shardId-000000000000",),
        ...     reason="the lease expired",
        ... )
        >>> event.batch_id
        'w-1-1'
    """

    worker_id: str
    batch_id: str
    lease_keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecordsDeadLettered(Event):
    """Records that the transform cannot process were written as dead letters, or skipped.

    Attributes:
        skipped: Whether they were skipped and not written to the dead-letter table.

    Example:
        >>> from kcl_pipeline import RecordsDeadLettered
        >>> event = RecordsDeadLettered(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     records=3,
        ...     error="the call was throttled",
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    records: int
    error: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class AggregatesRejected(Event):
    """KPL aggregates of one read were not de-aggregated as their producer wrote them.

    Attributes:
        sequence_number: The first record concerned.
        over_limit: Aggregates that exceed a limit; they are delivered as plain records.
        misplaced: KPL aggregates with a user record whose hash key is outside of the shard; they
            are dropped, because the KPL sends these user records again.
        unknown_keys: User records whose partition key is missing; they are delivered with the key
            of their aggregate.

    Example:
        >>> from kcl_pipeline import AggregatesRejected
        >>> event = AggregatesRejected(
        ...     lease_key="shardId-000000000000",
        ...     sequence_number="text",
        ...     over_limit=3,
        ...     misplaced=3,
        ...     unknown_keys=3,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    sequence_number: str
    over_limit: int
    misplaced: int
    unknown_keys: int


class LossReason(StrEnum):
    """Why records of a shard never reach the table.

    ROW_DELETED: the lease row was deleted by hand before the shard was read to its end, and no
    lease covers the rest. SHARD_NOT_LISTED: the shard was not read to its end, and the stream does
    not list it any more. LEFT_RETENTION: records left the retention period of the stream before
    they were read. STREAM_DELETED: the stream was deleted while a drain waited for the shard.
    TABLE_RESTORED: a person restored the table to an earlier version (`TableRestored`).

    Example:
        >>> from kcl_pipeline import LossReason
        >>> LossReason.ROW_DELETED.value
        'row_deleted'
    """

    ROW_DELETED = "row_deleted"
    SHARD_NOT_LISTED = "shard_not_listed"
    LEFT_RETENTION = "left_retention"
    STREAM_DELETED = "stream_deleted"
    TABLE_RESTORED = "table_restored"


@dataclass(frozen=True, slots=True)
class RecordsLost(Event):
    """Records of a shard are not in the table, and this application does not read them any more.

    With LEFT_RETENTION and STREAM_DELETED, records may have been lost: Kinesis does not tell
    whether records arrived between the two times, or after the last position.

    Attributes:
        reporter: Id of the worker, or owner name of the leader, that detected the loss.
        after: Last position known to be in the table (exclusive start of the loss). None: unknown.
        until: Last lost position (inclusive). None: to the end of the shard, or unknown.
        first_arrival_millis: Earliest arrival time of a lost record, epoch milliseconds, if known.
        last_arrival_millis: Latest arrival time of a lost record, epoch milliseconds, if known.
        stream: Name of the stream. None: unknown.
        before: First position after the loss (exclusive end), if it is known.

    Example:
        >>> from kcl_pipeline import LossReason, RecordsLost
        >>> event = RecordsLost(
        ...     reporter="text",
        ...     lease_key="shardId-000000000000",
        ...     reason=LossReason.ROW_DELETED,
        ... )
        >>> event.reporter
        'text'
    """

    reporter: str
    lease_key: str
    reason: LossReason
    after: Position | None = None
    until: Position | None = None
    first_arrival_millis: int | None = None
    last_arrival_millis: int | None = None
    stream: str | None = None
    before: Position | None = None

    @property
    def shard_id(self) -> str:
        """The shard, which is the last part of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]


@dataclass(frozen=True, slots=True)
class TableRestored(Event):
    """A person restored the table to an earlier version (Delta `RESTORE`).

    Rows after that version are gone. The positions of shards stay, so the rows are not read again.
    A RESTORE before the first commit of the application is not reported.

    Attributes:
        version: Version of the table that the RESTORE made.
        restored_to: The restored version or time, as text.
        table_id: Id of the table. A table that is created again has another one.

    Example:
        >>> from kcl_pipeline import TableRestored
        >>> event = TableRestored(version=3, restored_to="text", table_id="text")
        >>> event.version
        3
    """

    version: int
    restored_to: str
    table_id: str


@dataclass(frozen=True, slots=True)
class ShardPaused(Event):
    """A shard is paused. The reason says why, and how the pause ends.

    The transform fails on more records than the settings allow, or the table is not the one for
    which the checkpoint of the lease was written.

    The event is repeated at every failed retry. The time between retries grows.

    Attributes:
        seconds: Time since the first failed attempt.
        retry_seconds: Time until the next attempt.

    Example:
        >>> from kcl_pipeline import ShardPaused
        >>> event = ShardPaused(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     reason="the lease expired",
        ...     attempts=3,
        ...     seconds=1.5,
        ...     retry_seconds=1.5,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    reason: str
    attempts: int
    seconds: float
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class ShardResumed(Event):
    """A shard that was paused is processed again, after `seconds` and `attempts` failures.

    Example:
        >>> from kcl_pipeline import ShardResumed
        >>> event = ShardResumed(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     attempts=3,
        ...     seconds=1.5,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    attempts: int
    seconds: float


class StallStep(StrEnum):
    """What a stalled shard waits for.

    WAITING_FOR_PARENT: the end of its parents. STARTING: the position to read from, which row and
    table decide. READING: records of Kinesis. QUEUED: the processing thread has to take
    its records or its lease. PROCESSING: the commit of a batch that contains it. ENDING: the
    checkpoint at its end. LEAVING: the handoff to another worker. UNKNOWN_STREAM: nothing; this
    worker does not read its stream.

    Example:
        >>> from kcl_pipeline import StallStep
        >>> StallStep.WAITING_FOR_PARENT.value
        'waiting_for_parent'
    """

    WAITING_FOR_PARENT = "waiting_for_parent"
    STARTING = "starting"
    READING = "reading"
    QUEUED = "queued"
    PROCESSING = "processing"
    ENDING = "ending"
    LEAVING = "leaving"
    UNKNOWN_STREAM = "unknown_stream"


@dataclass(frozen=True, slots=True)
class ShardStalled(Event):
    """A held lease has made no progress for `seconds`, and its shard is not finished.

    The event is repeated once per `worker.shard_stalled_after_millis`. A shard makes progress when
    its records are committed, when its parents make progress, and when a read succeeds while no
    record of it waits. So an idle shard always makes progress.

    Attributes:
        seconds: Time without progress.
        error: Last error of the step, if any.

    Example:
        >>> from kcl_pipeline import ShardStalled, StallStep
        >>> event = ShardStalled(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     step=StallStep.WAITING_FOR_PARENT,
        ...     seconds=1.5,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    step: StallStep
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AnnouncementRejected(Event):
    """An announcement cannot be used. Its author commits the batch alone.

    Attributes:
        removed: Whether it was deleted. Otherwise this process does not read it again.

    Example:
        >>> from kcl_pipeline import AnnouncementRejected
        >>> event = AnnouncementRejected(name="text", reason="the lease expired", removed=True)
        >>> event.name
        'text'
    """

    name: str
    reason: str
    removed: bool


@dataclass(frozen=True, slots=True)
class AwsTrouble(Event):
    """An AWS call failed and will be retried.

    Example:
        >>> from kcl_pipeline import AwsTrouble
        >>> event = AwsTrouble(operation="GetRecords", error="the call was throttled")
        >>> event.operation
        'GetRecords'
    """

    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class DefectFound(Event):
    """A step of a shard failed by an error that this package does not expect: a defect.

    The step is repeated with growing waits, and the other shards go on. The log has the traceback,
    once per cause.

    Attributes:
        operation: The step and the lease.
        error: The type of the error and its text.

    Example:
        >>> from kcl_pipeline import DefectFound
        >>> event = DefectFound(operation="GetRecords", error="the call was throttled")
        >>> event.operation
        'GetRecords'
    """

    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class CpuSourceSkipped(Event):
    """A source of the CPU metric cannot be read; the next one is tried. Without any, the worker
    reports no CPU.

    Example:
        >>> from kcl_pipeline import CpuSourceSkipped
        >>> event = CpuSourceSkipped(source="text", error="the call was throttled")
        >>> event.source
        'text'
    """

    source: str
    error: str


@dataclass(frozen=True, slots=True)
class DeadLettersUnreadable(Event):
    """A replay leaves out rows of the dead-letter table, and replays the others.

    A column of the record is null, or its position is not valid. The rows are not marked.

    Attributes:
        table: Address of the dead-letter table.
        rows: How many rows are left out.
        example: The lease, the position and the batch of one of them.

    Example:
        >>> from kcl_pipeline import DeadLettersUnreadable
        >>> event = DeadLettersUnreadable(table="orders", rows=3, example="text")
        >>> event.table
        'orders'
    """

    table: str
    rows: int
    example: str


@dataclass(frozen=True, slots=True)
class RowRejected(Event):
    """A row of one of the tables cannot be read, or belongs to another application.

    The row is not changed, and its lease is neither held nor planned. The event is emitted again
    only when the reason changes.

    Example:
        >>> from kcl_pipeline import RowRejected
        >>> event = RowRejected(
        ...     table="orders",
        ...     key="shardId-000000000000",
        ...     reason="the lease expired",
        ... )
        >>> event.table
        'orders'
    """

    table: str
    key: str
    reason: str

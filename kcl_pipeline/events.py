"""The events that workers and leaders emit.

Logs, metrics, Dagster events and tests are derived from them. Events are values without behaviour.
An `EventSink` receives them. It must be fast and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kcl_pipeline.position import Position
from kcl_pipeline.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Example:
        >>> from kcl_pipeline import Event, LeaseLost
        >>> lost: list[str] = []
        >>> def watch(event: Event) -> None:
        ...     if isinstance(event, LeaseLost):
        ...         lost.append(event.lease_key)
        >>> watch(LeaseLost("w-1", "shardId-000000000000", "it was not renewed in time"))
        >>> lost
        ['shardId-000000000000']
    """


EventSink = Callable[[Event], None]
"""What receives events.

Example:
    >>> from kcl_pipeline import Event, EventSink
    >>> def show(event: Event) -> None:
    ...     print(type(event).__name__)
    >>> sink: EventSink = show
"""


def ignore_events(event: Event) -> None:
    """Drop the event.

    Example:
        >>> from kcl_pipeline import ignore_events
        >>> worker = orders.build_worker("w-1", events=ignore_events)  # doctest: +SKIP
    """


@dataclass(frozen=True, slots=True)
class LeaderElected(Event):
    """This process has acquired the leader lock.

    Attributes:
        stolen_from: Owner of the expired lock that was replaced, if there was one.

    Example:
        >>> from kcl_pipeline import LeaderElected
        >>> event = LeaderElected(owner_name="text")
        >>> event.owner_name
        'text'
    """

    owner_name: str
    stolen_from: str | None = None


TOO_MANY_FAILURES: Final = "too many cycles in a row failed"
"""Reason of a leader that releases the lock because its cycles fail."""


@dataclass(frozen=True, slots=True)
class LeadershipLost(Event):
    """This process does not hold the leader lock any more. `reason` says why.

    Example:
        >>> from kcl_pipeline import LeadershipLost
        >>> event = LeadershipLost(owner_name="text", reason="the lease expired")
        >>> event.owner_name
        'text'
    """

    owner_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClientVersionChanged(Event):
    """A process has noticed, or written, another client version of the application.

    Attributes:
        process: The worker, or the leader outside of a worker.
        before: The former version, as stored.
        after: The new version, as stored.
        modified_by: Who wrote it.

    Example:
        >>> from kcl_pipeline import ClientVersionChanged
        >>> event = ClientVersionChanged(
        ...     process="text",
        ...     before="text",
        ...     after="text",
        ...     modified_by="text",
        ... )
        >>> event.process
        'text'
    """

    process: str
    before: str
    after: str
    modified_by: str


@dataclass(frozen=True, slots=True)
class LeasesCreated(Event):
    """Shard sync created lease rows.

    Example:
        >>> from kcl_pipeline import LeasesCreated
        >>> event = LeasesCreated(
        ...     stream="orders",
        ...     lease_keys=("shardId-000000000000",),
        ...     reason="the lease expired",
        ... )
        >>> event.stream
        'orders'
    """

    stream: str
    lease_keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseDeleted(Event):
    """The leader deleted a lease row, or the worker that had finished its shard.

    Example:
        >>> from kcl_pipeline import LeaseDeleted
        >>> event = LeaseDeleted(lease_key="shardId-000000000000", reason="the lease expired")
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class HoleFound(Event):
    """The leases of a stream do not cover all its hash keys.

    Attributes:
        description: The first gap.
        times: Number of audits in a row that found the same gap.

    Example:
        >>> from kcl_pipeline import HoleFound
        >>> event = HoleFound(stream="orders", description="text", times=3)
        >>> event.stream
        'orders'
    """

    stream: str
    description: str
    times: int


@dataclass(frozen=True, slots=True)
class PlanMade(Event):
    """The leader has computed a plan.

    Attributes:
        unassigned: Leases that the plan leaves without an owner.
        spilled: Leases that no worker has capacity for.

    Example:
        >>> from kcl_pipeline import PlanMade
        >>> event = PlanMade(
        ...     strategy="text",
        ...     moves=3,
        ...     unassigned=3,
        ...     spilled=3,
        ...     milliseconds=1.5,
        ... )
        >>> event.strategy
        'text'
    """

    strategy: str
    moves: int
    unassigned: int
    spilled: int
    milliseconds: float


@dataclass(frozen=True, slots=True)
class LeaseMoved(Event):
    """The leader has written one move.

    Attributes:
        from_worker: Previous owner. None: the lease had none.
        graceful: Whether it started a handoff. Otherwise the move took effect at once.

    Example:
        >>> from kcl_pipeline import LeaseMoved
        >>> event = LeaseMoved(
        ...     lease_key="shardId-000000000000",
        ...     from_worker="w-1",
        ...     to_worker="w-2",
        ...     graceful=True,
        ...     reason="the lease expired",
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    from_worker: str | None
    to_worker: str
    graceful: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MoveRefused(Event):
    """The conditional write of a move was refused. The next cycle plans again.

    Example:
        >>> from kcl_pipeline import MoveRefused
        >>> event = MoveRefused(lease_key="shardId-000000000000", to_worker="w-2")
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    to_worker: str


@dataclass(frozen=True, slots=True)
class DrainRequested(Event):
    """The leader has requested a worker to end. `reason` says why.

    Example:
        >>> from kcl_pipeline import DrainRequested
        >>> event = DrainRequested(worker_id="w-1", reason="the lease expired")
        >>> event.reason
        'the lease expired'
    """

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CycleFailed(Event):
    """A leader cycle had errors.

    Attributes:
        consecutive: Number of failed cycles in a row. At the limit the leader releases the lock. 0:
            the errors concern single rows or streams, and the cycle processed all others.

    Example:
        >>> from kcl_pipeline import CycleFailed
        >>> event = CycleFailed(error="the call was throttled", consecutive=3)
        >>> event.error
        'the call was throttled'
    """

    error: str
    consecutive: int


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
    they were read. STREAM_DELETED: the stream was deleted before the shard was read.
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


class HangStep(StrEnum):
    """What the processing thread of a worker does.

    LEASES: it looks at leases, completes handoffs, and begins and ends shards. READING: it takes
    records that were read; with an executor fetch, it waits for the Spark job that reads and
    transforms them. WRITING: it runs the transform and writes its rows. COMMITTING: it commits
    them. REPORTING: it reports the progress of the worker.

    Example:
        >>> from kcl_pipeline import HangStep
        >>> HangStep.LEASES.value
        'leases'
    """

    LEASES = "leases"
    READING = "reading"
    WRITING = "writing"
    COMMITTING = "committing"
    REPORTING = "reporting"


@dataclass(frozen=True, slots=True)
class WorkerHung(Event):
    """The processing thread of a worker has made no progress for `seconds` while records wait.

    The event is repeated once per `worker.hung_after_millis`. The thread makes progress when it
    begins the next step, for example the transform of the next batch, or of the next part of a
    batch with bad records.

    Attributes:
        step: What the thread does.
        seconds: Time since the step began.
        lease_keys: Held leases that may have records that are not committed.
        stacks: The calls of all threads, the processing thread first. It has names of files and
            functions and line numbers, without variables or source lines, and a bounded length.

    Example:
        >>> from kcl_pipeline import HangStep, WorkerHung
        >>> event = WorkerHung(
        ...     worker_id="w-1",
        ...     step=HangStep.LEASES,
        ...     seconds=1.5,
        ...     lease_keys=("shardId-000000000000",),
        ... )
        >>> event.step
        <HangStep.LEASES: 'leases'>
    """

    worker_id: str
    step: HangStep
    seconds: float
    lease_keys: tuple[str, ...]
    stacks: str = field(default="", metadata={"in_line": False})


@dataclass(frozen=True, slots=True)
class WorkerResumed(Event):
    """A worker that was hung makes progress again, or no record waits any more.

    Example:
        >>> from kcl_pipeline import WorkerResumed
        >>> event = WorkerResumed(worker_id="w-1")
        >>> event.worker_id
        'w-1'
    """

    worker_id: str


@dataclass(frozen=True, slots=True)
class BatchAbandoned(Event):
    """A worker that must end does not wait for its processing thread any longer.

    The batch, if there was one, is read again by the next owners of its leases.

    Attributes:
        step: What the thread does.
        seconds: Time since the step began.

    Example:
        >>> from kcl_pipeline import BatchAbandoned, HangStep
        >>> event = BatchAbandoned(worker_id="w-1", step=HangStep.LEASES, seconds=1.5)
        >>> event.step
        <HangStep.LEASES: 'leases'>
    """

    worker_id: str
    step: HangStep
    seconds: float


@dataclass(frozen=True, slots=True)
class ArrowMemorySkipped(Event):
    """Batches or results of Spark are passed in a slower way than as Arrow columns in memory.

    The rows are the same. The event is emitted again only when the reason changes.

    Example:
        >>> from kcl_pipeline import ArrowMemorySkipped
        >>> event = ArrowMemorySkipped(reason="the lease expired")
        >>> event.reason
        'the lease expired'
    """

    reason: str


@dataclass(frozen=True, slots=True)
class ShardsLeftToOthers(Event):
    """A drain does not wait for shards that other workers hold and read, nor for their children.

    It is emitted when the drain is complete.

    Attributes:
        worker_id: The worker that drains.
        shards: How many shards are not finished.
        elsewhere: How many of them other workers hold, or have to finish the parents of.
        owners: Those workers with their numbers of shards; the first five.

    Example:
        >>> from kcl_pipeline import ShardsLeftToOthers
        >>> event = ShardsLeftToOthers(worker_id="w-1", shards=3, elsewhere=3, owners="text")
        >>> event.shards
        3
    """

    worker_id: str
    shards: int
    elsewhere: int
    owners: str


@dataclass(frozen=True, slots=True)
class DrainWaits(Event):
    """Nothing that a drain waits for has moved for half a minute. It is repeated.

    Attributes:
        worker_id: The worker that drains.
        seconds: Since when nothing has moved.
        reasons: What it waits for, and why; the first five reasons.

    Example:
        >>> from kcl_pipeline import DrainWaits
        >>> event = DrainWaits(worker_id="w-1", seconds=30.0, reasons="text")
        >>> event.seconds
        30.0
    """

    worker_id: str
    seconds: float
    reasons: str


@dataclass(frozen=True, slots=True)
class Measurement(Event):
    """Base of the events that only carry measured values.

    Example:
        >>> from kcl_pipeline import Event, Measurement
        >>> def without_measurements(event: Event) -> bool:
        ...     return not isinstance(event, Measurement)
    """


class LeaseTask(StrEnum):
    """A periodic task of a worker.

    RENEWAL: it renewed its leases. DISCOVERY: it looked for leases that were assigned to it.
    REPORT: it wrote its worker metrics row.

    Example:
        >>> from kcl_pipeline import LeaseTask
        >>> LeaseTask.RENEWAL.value
        'renewal'
    """

    RENEWAL = "renewal"
    DISCOVERY = "discovery"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class TaskFinished(Measurement):
    """A worker has finished one run of a periodic task.

    Attributes:
        leases: Leases that were renewed or discovered. 0 for REPORT.
        succeeded: Whether the task made all its calls. A single lease that could not be renewed has
            an event of its own.

    Example:
        >>> from kcl_pipeline import LeaseTask, TaskFinished
        >>> event = TaskFinished(worker_id="w-1", task=LeaseTask.RENEWAL, milliseconds=1.5)
        >>> event.task
        <LeaseTask.RENEWAL: 'renewal'>
    """

    worker_id: str
    task: LeaseTask
    milliseconds: float
    leases: int = 0
    succeeded: bool = True


@dataclass(frozen=True, slots=True)
class StatusMeasured(Measurement):
    """A worker has measured its status. It does so whenever it renews its leases.

    Attributes:
        status: Its counters since its start, and its gauges now.

    Example:
        >>> from kcl_pipeline import StatusMeasured, WorkerStatus
        >>> event = StatusMeasured("w-1", WorkerStatus(lag_millis=250))
        >>> event.status.lag_millis
        250
    """

    worker_id: str
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class ProcessorCalled(Measurement):
    """A call of `process_records` of a record processor has returned.

    Attributes:
        records: Number of its records.
        milliseconds: How long it took.
        succeeded: Whether it raised no error.

    Example:
        >>> from kcl_pipeline import ProcessorCalled
        >>> event = ProcessorCalled(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     records=3,
        ...     milliseconds=1.5,
        ...     succeeded=True,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    records: int
    milliseconds: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class ReadFinished(Measurement):
    """One call for records of a polled shard has ended.

    Fan-out shards and executor fetches do not emit it.

    Example:
        >>> from kcl_pipeline import ReadFinished
        >>> event = ReadFinished(
        ...     lease_key="shardId-000000000000",
        ...     milliseconds=1.5,
        ...     succeeded=True,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    milliseconds: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class CycleFinished(Measurement):
    """A leader cycle has ended. All attributes but the first four are 0 unless it led.

    Attributes:
        owner_name: Name of this leader in the lock row.
        led: Whether this process led in the cycle.
        milliseconds: Duration of the cycle.
        succeeded: Whether it had no error.
        leases: Number of lease rows.
        expired: Leases whose owner has stopped renewing them.
        unowned: Leases without an owner.
        unreadable: Lease rows that cannot be used.
        workers: Living workers.
        failing_workers: Living workers whose CPU could not be measured in the last interval.
        invalid_workers: Living workers whose metrics have no operating range.
        streams: Streams whose leases the leader manages.
        incomplete_streams: Streams whose leases do not cover all hash keys.
        unavailable_streams: Streams whose last attempt failed.
        sync_skipped: Whether shard sync was due, and the former one was still running.

    Example:
        >>> from kcl_pipeline import CycleFinished
        >>> event = CycleFinished(owner_name="text", led=True, milliseconds=1.5, succeeded=True)
        >>> event.owner_name
        'text'
    """

    owner_name: str
    led: bool
    milliseconds: float
    succeeded: bool
    leases: int = 0
    expired: int = 0
    unowned: int = 0
    unreadable: int = 0
    workers: int = 0
    failing_workers: int = 0
    invalid_workers: int = 0
    streams: int = 0
    incomplete_streams: int = 0
    unavailable_streams: int = 0
    sync_skipped: bool = False


@dataclass(frozen=True, slots=True)
class MetricsEndpointOpened(Event):
    """An exporter serves metrics at this address.

    Example:
        >>> from kcl_pipeline import MetricsEndpointOpened
        >>> event = MetricsEndpointOpened(exporter="text", address="text")
        >>> event.exporter
        'text'
    """

    exporter: str
    address: str


@dataclass(frozen=True, slots=True)
class MetricsExportFailed(Event):
    """An exporter cannot start, or cannot take values. The worker continues without them.

    Example:
        >>> from kcl_pipeline import MetricsExportFailed
        >>> event = MetricsExportFailed(exporter="text", error="the call was throttled")
        >>> event.exporter
        'text'
    """

    exporter: str
    error: str


@dataclass(frozen=True, slots=True)
class MetricsDropped(Event):
    """An exporter has dropped measured values, because its queue was full or a call failed.

    Attributes:
        values: Number of values.

    Example:
        >>> from kcl_pipeline import MetricsDropped
        >>> event = MetricsDropped(exporter="text", values=3, reason="the lease expired")
        >>> event.exporter
        'text'
    """

    exporter: str
    values: int
    reason: str

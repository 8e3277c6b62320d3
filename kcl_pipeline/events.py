"""The closed set of things that can happen.

Logs, metrics, Dagster events and tests are all derived from these; they carry facts, never
behaviour. An `EventSink` takes them; it must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kcl_pipeline.position import Position


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker has its tables and begins to look for leases."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """A worker has released everything.

    `reason` is one of the stop reasons of `worker.StopReason`.
    """

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerIdShared(Event):
    """Another running process uses the same worker id. Nothing is lost, but the two take each
    other's leases all the time.
    """

    worker_id: str
    other_run_id: str


@dataclass(frozen=True, slots=True)
class LeaseGained(Event):
    """A worker holds a lease it did not hold before."""

    worker_id: str
    lease_key: str
    lease_counter: int


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """A worker does not hold a lease any more and did not give it away."""

    worker_id: str
    lease_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased(Event):
    """A stopping worker made a lease ownerless."""

    worker_id: str
    lease_key: str


@dataclass(frozen=True, slots=True)
class HandoffStarted(Event):
    """The owner has seen that its lease is to go to another worker."""

    lease_key: str
    from_worker: str
    to_worker: str


@dataclass(frozen=True, slots=True)
class HandoffCompleted(Event):
    """The old owner transferred the lease. `forced` when the time-out did it."""

    lease_key: str
    from_worker: str
    to_worker: str
    seconds: float
    forced: bool = False


@dataclass(frozen=True, slots=True)
class ShardEnded(Event):
    """A shard was read, committed and checkpointed to its end; the children have leases."""

    worker_id: str
    lease_key: str
    child_lease_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchCommitted(Event):
    """A batch is in the sink. `milliseconds` maps phase to its time: job (of executors that fetch),
    write, prepare (what was left of it when the files were written), commit, rewrite.
    """

    worker_id: str
    batch_id: str
    records: int
    bytes: int
    lease_keys: tuple[str, ...]
    milliseconds: Mapping[str, float]
    table_version: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRefused(Event):
    """A batch, or some of its leases, was not committed; the ranges are read again by the worker
    that owns them.
    """

    worker_id: str
    batch_id: str
    lease_keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PendingResolved(Event):
    """A taker found a pending checkpoint: `landed` says whether the table had it; otherwise a fence
    was written.
    """

    worker_id: str
    lease_key: str
    landed: bool


@dataclass(frozen=True, slots=True)
class RecordsDeadLettered(Event):
    """Records that the transform could not take went to the dead-letter table (or were skipped)."""

    worker_id: str
    lease_key: str
    records: int
    error: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class AggregatesRejected(Event):
    """KPL aggregates of one read were not de-aggregated as their producer wrote them.

    Attributes:
        lease_key: The lease of the shard.
        sequence_number: The first record concerned.
        over_limit: Aggregates that exceed a limit; they are delivered as plain records.
        misplaced: Aggregates of the KPL with a user record that hashes outside of the shard; they
            are dropped, because the KPL sends these user records again.
        unknown_keys: User records whose partition key is missing; they are delivered with the key
            of their aggregate.
    """

    lease_key: str
    sequence_number: str
    over_limit: int
    misplaced: int
    unknown_keys: int


class LossReason(StrEnum):
    """Why records of a shard never reach the table.

    ROW_DELETED: the lease row was deleted by hand before the shard was read to its end, and nothing
    reads the rest. SHARD_NOT_LISTED: the stream does not list the shard any more, which was not
    read to its end.
    """

    ROW_DELETED = "row_deleted"
    SHARD_NOT_LISTED = "shard_not_listed"


@dataclass(frozen=True, slots=True)
class RecordsLost(Event):
    """Records of a shard are not in the table, and this application does not read them any more.

    Attributes:
        reporter: Worker id, or owner name of the leader, that found it.
        lease_key: The lease of the shard.
        reason: Why nothing reads them.
        after: Last position known to be in the table; the loss begins behind it. None: unknown.
        until: Last lost position (inclusive). None: to the end of the shard, or unknown.
        first_arrival_millis: Earliest arrival time of a lost record, epoch milliseconds, if known.
        last_arrival_millis: Latest arrival time of a lost record, epoch milliseconds, if known.
    """

    reporter: str
    lease_key: str
    reason: LossReason
    after: Position | None = None
    until: Position | None = None
    first_arrival_millis: int | None = None
    last_arrival_millis: int | None = None


@dataclass(frozen=True, slots=True)
class ShardPaused(Event):
    """A shard is not processed for `retry_seconds` because its transform fails on more records
    than the settings allow. Repeated while it lasts, ever more rarely.
    """

    worker_id: str
    lease_key: str
    reason: str
    attempts: int
    seconds: float
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class ShardResumed(Event):
    """A shard that was paused for `seconds` is processed again."""

    worker_id: str
    lease_key: str
    attempts: int
    seconds: float


class StallStep(StrEnum):
    """What a shard that stands still waits for.

    WAITING_FOR_PARENT: the end of its parents. RESOLVING: what its previous owner left in flight
    is to be settled with the table. READING: records of Kinesis. QUEUED: its records, or its lease,
    wait for the processing thread. PROCESSING: it is in a batch that is not committed. ENDING: its
    end is to be recorded. LEAVING: it is to be handed to another worker. UNKNOWN_STREAM: this
    worker does not read its stream.
    """

    WAITING_FOR_PARENT = "waiting_for_parent"
    RESOLVING = "resolving"
    READING = "reading"
    QUEUED = "queued"
    PROCESSING = "processing"
    ENDING = "ending"
    LEAVING = "leaving"
    UNKNOWN_STREAM = "unknown_stream"


@dataclass(frozen=True, slots=True)
class ShardStalled(Event):
    """A held lease has not moved for `seconds`, and its shard is not finished. Repeated once per
    `worker.shard_stalled_after_millis` for as long as it lasts.

    A shard moves when records of it are committed, when its parents do, and when it is read with
    success and nothing of it waits, so an idle shard always moves. `error` is the last one of the
    step, if there was one.
    """

    worker_id: str
    lease_key: str
    step: StallStep
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AnnouncementRejected(Event):
    """An announcement beside the Delta log cannot be used. Its owner commits the batch alone.

    `removed`: it was deleted. Otherwise it stays and this process does not read it again.
    """

    name: str
    reason: str
    removed: bool


@dataclass(frozen=True, slots=True)
class AwsTrouble(Event):
    """A call failed and will be tried again."""

    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class CpuSourceSkipped(Event):
    """A source of the CPU metric cannot be read; the next one is tried. Without any, the worker
    reports no CPU.
    """

    source: str
    error: str


@dataclass(frozen=True, slots=True)
class RowRejected(Event):
    """A row of one of the tables cannot be read, or is not of this application. It is left alone,
    and what it stands for is neither held nor planned. Told once, until the reason changes.
    """

    table: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderElected(Event):
    """This process holds the leader lock now."""

    owner_name: str
    stolen_from: str | None = None


@dataclass(frozen=True, slots=True)
class LeadershipLost(Event):
    """This process holds the leader lock no longer. `reason` says why."""

    owner_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeasesCreated(Event):
    """Shard sync created lease rows."""

    stream: str
    lease_keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseDeleted(Event):
    """Cleanup removed a lease row."""

    lease_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class HoleFound(Event):
    """The leases of a stream do not cover its hash keys.

    `times` counts audits in a row with the same hole.
    """

    stream: str
    description: str
    times: int


@dataclass(frozen=True, slots=True)
class PlanMade(Event):
    """The leader made a plan."""

    strategy: str
    moves: int
    unassigned: int
    spilled: int
    milliseconds: float


@dataclass(frozen=True, slots=True)
class LeaseMoved(Event):
    """The leader wrote one move.

    `graceful` when it began a handoff instead of assigning at once.
    """

    lease_key: str
    from_worker: str | None
    to_worker: str
    graceful: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MoveRefused(Event):
    """The condition of a planned move did not hold any more; the next cycle looks again."""

    lease_key: str
    to_worker: str


@dataclass(frozen=True, slots=True)
class CycleFailed(Event):
    """A leader cycle had errors. `consecutive` counts; at the limit the leadership is given up.

    It is 0 when the errors were about single rows or streams only: the others were served.
    """

    error: str
    consecutive: int


EventSink = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """An event sink that drops everything."""

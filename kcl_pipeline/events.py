"""The closed set of things that can happen.

Logs, metrics, Dagster events and tests are all derived from these; they carry facts, never behaviour. An `EventSink` takes
them; it must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker has its tables and begins to look for leases."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """A worker has released everything. `reason` is one of the stop reasons of `worker.StopReason`."""

    worker_id: str
    reason: str


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
    """A batch is in the sink. `milliseconds` maps phase to its time: job (of executors that fetch), write, prepare (what was left of it when the files
    were written), commit, rewrite.
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
    """A batch, or some of its leases, was not committed; the ranges are read again by whoever owns them."""

    worker_id: str
    batch_id: str
    lease_keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PendingResolved(Event):
    """A taker found a pending checkpoint: `landed` says whether the table had it; otherwise a fence was written."""

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
class Stalled(Event):
    """Something that should move has not for `seconds`. `what` names it."""

    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class AwsTrouble(Event):
    """A call failed and will be tried again."""

    operation: str
    error: str


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
    """The leases of a stream do not cover its hash keys. `times` counts audits in a row with the same hole."""

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
    """The leader wrote one move. `graceful` when it began a handoff instead of assigning at once."""

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
    """A leader cycle raised. `consecutive` counts; at the limit the leadership is given up."""

    error: str
    consecutive: int


EventSink = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """An event sink that drops everything."""

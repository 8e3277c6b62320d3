"""The events of the leader: lock, leases created and deleted, plans and moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.events.base import Event


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

"""The context of the phases of a leader cycle: rows and deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NotFoundError,
    ShardSyncError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.leader.lease_map import LeaseMap
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.tables import (
    LeaseTable,
    WorkerListing,
    WorkerMetrics,
    WorkerMetricsTable,
)
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.shards import StreamId

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or a parallel version with results in order, such as `ThreadPoolExecutor.map`."""


class Deadline:
    """A time after which no phase is started. `seconds` None: no deadline."""

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock.monotonic() + seconds

    def passed(self) -> bool:
        """Return whether the time is over."""
        return self._end is not None and self._clock.monotonic() >= self._end


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of both tables.

    Attributes:
        leases: The leases.
        unreadable: Keys of lease rows that cannot be used.
        bad_rows: Rows of both tables that cannot be used.
        workers: The worker metrics rows.
        unreadable_workers: Worker metrics rows that cannot be used. `bad_rows` contains them too.
        scan_started: Start of the scan in monotonic seconds.
        scan_finished: End of the scan in monotonic seconds.
    """

    leases: tuple[Lease, ...]
    unreadable: frozenset[str]
    bad_rows: tuple[BadRow, ...]
    workers: tuple[WorkerMetrics, ...]
    unreadable_workers: tuple[BadRow, ...]
    scan_started: float
    scan_finished: float


@dataclass(slots=True)
class CycleContext:
    """The inputs and results of one cycle.

    Attributes:
        leases: The leases by key, updated by the writes of this cycle.
        bad_rows: Rows of both tables that cannot be used.
        unreadable: Keys of lease rows that cannot be used.
        workers: The living workers, sorted by id.
        scan_started: Start of the scan in monotonic seconds.
        deadline: When the cycle ends.
        created: Keys of the leases that this cycle created.
        deleted: Keys of the leases that this cycle deleted.
        expired: Keys of expired leases, sorted.
        plan: The plan, if one was computed.
        plan_input: The input of the plan.
        errors: Errors of single rows and streams.
    """

    leases: LeaseMap
    bad_rows: tuple[BadRow, ...]
    unreadable: frozenset[str]
    workers: tuple[WorkerMetrics, ...]
    scan_started: float
    deadline: Deadline
    created: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    expired: tuple[str, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    errors: list[Exception] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Scan, workers: tuple[WorkerMetrics, ...], deadline: Deadline) -> Self:
        """Return the context of a cycle with these rows."""
        return cls(
            leases=LeaseMap(rows.leases),
            bad_rows=rows.bad_rows,
            unreadable=rows.unreadable,
            workers=workers,
            scan_started=rows.scan_started,
            deadline=deadline,
        )


def scan(
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    clock: Clock,
    *,
    is_multi_stream: bool,
    workers_may_be_missing: bool = False,
) -> Scan:
    """Read both tables. A lease of the other form, single-stream or multi-stream, is a bad row.

    `workers_may_be_missing`: a missing worker-metrics table counts as empty.
    """
    scan_started = clock.monotonic()
    listing = lease_table.list_leases().of_form(lease_table.name, multi_stream=is_multi_stream)
    try:
        workers = worker_table.scan_workers()
    except NotFoundError:
        if not workers_may_be_missing:
            raise
        workers = WorkerListing(())
    return Scan(
        leases=listing.leases,
        unreadable=frozenset(listing.unreadable),
        bad_rows=(*listing.bad_rows, *workers.bad_rows),
        workers=workers.workers,
        unreadable_workers=workers.bad_rows,
        scan_started=scan_started,
        scan_finished=clock.monotonic(),
    )


def keys_of(keys: Iterable[str], stream: StreamId) -> list[str]:
    """Return the lease keys of a stream, for rows of which only the key can be read."""
    if stream.creation_epoch is None:
        return [key for key in keys if ":" not in key]
    return [key for key in keys if key.startswith(f"{stream.serialized}:")]


def is_local(error: Exception) -> bool:
    """Return whether an error concerns one row or stream, so that every leader would have it.

    Errors of this process (network, permissions for the tables, defects) are not local.
    """
    if isinstance(error, AccessDeniedError | ThrottledError | UnavailableError):
        # Limits are those of the account
        return error.operation in STREAM_OPERATIONS
    return isinstance(error, _LOCAL_ERRORS)


STREAM_OPERATIONS: Final = frozenset({"DescribeStreamSummary", "ListShards"})
_LOCAL_ERRORS: Final = (
    InvalidRequestError,
    NotFoundError,
    StreamReplacedError,
    ShardSyncError,
    UnreadableRowError,
    ValueError,
)

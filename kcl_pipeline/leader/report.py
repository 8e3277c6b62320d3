"""The result of one leader cycle."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.leases.lease import BadRow, Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.leases.worker_status import UnavailableStream
from kcl_pipeline.planning.model import Plan, PlanInput


@dataclass(frozen=True, slots=True)
class StreamCoverage:
    """The hash-range coverage of one stream.

    Attributes:
        stream: The serialized stream.
        complete: Whether the leases cover all hash keys.
        hole: Description of the first gap. None: there is none.
        confidence: Number of audits in a row that found this gap.
    """

    stream: str
    complete: bool
    hole: str | None = None
    confidence: int = 0


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of `LeaderCycle.run_once`.

    If `led` is False, only `lock_owner`, `bad_rows`, `seconds` and `error` may have values.

    Attributes:
        led: Whether this process led in the cycle.
        lock_owner: Owner of the leader lock. None: unknown, or none.
        leases: The leases after the writes of this cycle, sorted by key.
        workers: The living workers, sorted by id.
        expired: Keys of expired leases, sorted.
        unreadable: Keys of lease rows that cannot be used.
        bad_rows: Rows of both tables that cannot be used.
        coverage: Hash-range coverage of each stream.
        unavailable: Streams whose last attempt failed.
        plan: The plan. None: none was computed.
        plan_input: The input of the plan.
        failed_moves: Number of moves that were refused.
        created: Keys of leases that the cycle created.
        deleted: Keys of leases that the cycle deleted.
        seconds: Duration of the cycle.
        error: Errors of the cycle. Other parts of the cycle may have succeeded.
    """

    led: bool
    lock_owner: str | None = None
    leases: tuple[Lease, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()
    expired: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    coverage: tuple[StreamCoverage, ...] = ()
    unavailable: tuple[UnavailableStream, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    failed_moves: int = 0
    created: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None

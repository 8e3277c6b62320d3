"""What one leader cycle saw and did."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.leases.lease import BadRow, Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.model import Plan, PlanInput


@dataclass(frozen=True, slots=True)
class StreamCoverage:
    """Whether the leases of one stream cover all its hash keys. `hole` describes the first gap;
    `confidence` counts audits in a row that saw it.
    """

    stream: str
    complete: bool
    hole: str | None = None
    confidence: int = 0


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of `LeaderCycle.run_once`. When `led` is False only `lock_owner` and `plan_input`
    is what the plan was made from. `seconds` mean something.

    `leases` are the rows after this cycle's own writes, sorted by key; `workers` the living ones,
    sorted by id; `expired` the lease keys whose counter stood still for the failover time;
    `failed_moves` counts moves whose condition did not hold; `seconds` is how long the cycle took.
    `unreadable` are the keys of lease rows that cannot be used, `bad_rows` those of both tables.
    `error`: what went wrong, also when the rest of the cycle was done (`led` is True then).
    """

    led: bool
    lock_owner: str | None = None
    leases: tuple[Lease, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()
    expired: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    coverage: tuple[StreamCoverage, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    failed_moves: int = 0
    created: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None

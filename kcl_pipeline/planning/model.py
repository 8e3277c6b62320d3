"""Input and output of assignment strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One lease in the input of a plan.

    Attributes:
        lease_key: The lease.
        owner: The worker that processes it. None: it has no owner, or has expired.
        throughput_kbps: Throughput in KiB/s. None: no sample.
        unowned_because: Why a lease without an owner has none, as the reason of its move says it.
        waited_seconds: Time without a living owner.
        movable: False: it cannot move now, because of a handoff.
        ended: Whether it is at SHARD_END. Then it has no load and is not balanced. It counts only
            against `PlanLimits.max_leases_for_worker` and `max_leases_for_group`.
        seconds_since_move: Time since the last move between living workers.

    Example:
        >>> from kcl_pipeline import LeaseState
        >>> lease = LeaseState("shardId-000000000000", owner=None, throughput_kbps=120.0)
        >>> lease.movable
        True
    """

    lease_key: str
    owner: str | None
    throughput_kbps: float | None = None
    unowned_because: str = "no owner"
    waited_seconds: float = 0.0
    movable: bool = True
    ended: bool = False
    seconds_since_move: float = math.inf


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One living worker in the input of a plan.

    Attributes:
        worker_id: The worker.
        group: Group of the worker.
        metrics: Moving average in percent of each metric, by its short name. Empty: no metrics.
        own_cpu: Moving average of the CPU in percent, of a worker without a CPU metric.
        limits: Largest percentage of each metric.
        capacity: Relative capacity; 1.0 is the standard.
        accepts_leases: False: it keeps its leases and gets no other ones. Reasons: one of its
            leases has just expired, it has not reported yet, it drains, it is hung, or its metrics
            fail.

    Example:
        >>> from kcl_pipeline import WorkerState
        >>> worker = WorkerState("w-1", metrics={"cpu": 40.0}, limits={"cpu": 80.0})
        >>> worker.accepts_leases
        True
    """

    worker_id: str
    group: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    capacity: float = 1.0
    accepts_leases: bool = True
    own_cpu: float | None = None


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The settings that planning needs, in the units of `config.AssignmentSettings`.

    `kcl_variance` reads none of the fields after `balance`, except `cool_down_seconds`.

    Attributes:
        re_balance_threshold_percentage: Balancing starts when a worker is more than this above its
            fair share.
        balance_target_percentage: Excess over the fair share at which balancing stops.
        dead_band_kbps: A worker keeps its leases while its excess is below this and below
            `dead_band_cpu_percentage`.
        dead_band_cpu_percentage: In percentage points.
        cool_down_seconds: Minimum time between two moves of a lease. It does not apply to a lease
            without a living owner.
        churn_budget_percentage: Share of all leases that one plan may move. It does not apply to a
            lease without a living owner.
        fresh_lease_quantile: A lease without a sample counts as this quantile of the sampled ones.

    Example:
        >>> from kcl_pipeline import PlanLimits
        >>> PlanLimits(max_leases_for_worker=100).balance
        True
    """

    max_leases_for_worker: int = 2**31 - 1
    max_throughput_per_host_kbps: float = math.inf
    re_balance_threshold_percentage: int = 10
    dampening_percentage: int = 60
    allow_throughput_overshoot: bool = True
    balance: bool = True
    """False: only leases without an owner are assigned. No lease moves for balance."""
    balance_target_percentage: float = 5.0
    dead_band_kbps: float = 1.0
    dead_band_cpu_percentage: float = 5.0
    cool_down_seconds: float = 120.0
    churn_budget_percentage: float = 100.0
    fresh_lease_quantile: float = 0.75
    max_leases_for_group: int = 2**31 - 1
    max_throughput_per_group_kbps: float = math.inf


@dataclass(frozen=True, slots=True)
class Move:
    """Assignment of one lease to a worker.

    Attributes:
        lease_key: The lease.
        from_worker: The living owner. None: it has none.
        to_worker: The new owner.
        reason: A sentence.

    Example:
        >>> from kcl_pipeline import Move
        >>> move = Move("shardId-000000000000", None, "w-1", "it had no owner")
        >>> move.to_worker
        'w-1'
    """

    lease_key: str
    from_worker: str | None
    to_worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The output of a strategy.

    Attributes:
        strategy: Name of the strategy.
        moves: Moves by decreasing importance, at most one per lease.
        spilled: Leases that no worker has capacity for.
        notes: Sentences that explain the decision.

    Example:
        >>> from kcl_pipeline import Move, Plan
        >>> move = Move("shardId-000000000000", None, "w-1", "it had no owner")
        >>> len(Plan(strategy="mine", moves=(move,)).moves)
        1
    """

    strategy: str
    moves: tuple[Move, ...]
    spilled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The input of a strategy. The order of leases and workers does not matter.

    Attributes:
        leases: All leases.
        workers: The living workers.
        limits: The settings.
        stop: Returns whether the time for the plan is over. A strategy that may need long asks it
            between moves, and returns the moves that it has so far. It is no part of the equality
            of two inputs.

    Example:
        >>> from kcl_pipeline import LeaseState, PlanInput, WorkerState
        >>> given = PlanInput(
        ...     leases=(LeaseState("shardId-000000000000", owner=None),),
        ...     workers=(WorkerState("w-1"),),
        ... )
        >>> [lease.lease_key for lease in given.leases if lease.owner is None]
        ['shardId-000000000000']
    """

    leases: tuple[LeaseState, ...]
    workers: tuple[WorkerState, ...]
    limits: PlanLimits = PlanLimits()
    stop: Callable[[], bool] = field(default=_never, compare=False, repr=False)


Strategy = Callable[[PlanInput], Plan]
"""A function of its input that is deterministic, but for `PlanInput.stop`.

`planning.strategies.register` registers it under a name.

Example:
    >>> from kcl_pipeline import Plan, PlanInput, Strategy
    >>> def no_moves(given: PlanInput) -> Plan:
    ...     return Plan(strategy="no_moves", moves=())
    >>> strategy: Strategy = no_moves
"""

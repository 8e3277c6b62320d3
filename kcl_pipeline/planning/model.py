"""What a strategy gets and gives: plain values (planning is pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One lease, as the planner sees it.

    `owner` is who processes it now (None: nobody, also when its owner's counter stands still, then
    `last_owner` says who it was). `waited_seconds`: how long it has been without a living owner.
    `movable` False: it may not change hands now (handoff running, or not eligible). `ended`: at
    SHARD_END; costs nothing but is counted. `throughput_kbps` None: no sample yet.
    """

    lease_key: str
    owner: str | None
    throughput_kbps: float | None = None
    last_owner: str | None = None
    waited_seconds: float = 0.0
    movable: bool = True
    ended: bool = False
    records_per_s: float | None = None
    seconds_since_move: float = math.inf


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One living worker.

    `metrics` maps a metric's short name to its moving average in percent, `limits` to the highest
    percentage wanted. Both empty: it reports none. `capacity` is relative (1.0: like the others).
    `accepts_leases` False: never a target (one of its leases has just expired, it has shown no sign
    of life yet, it is draining, its metrics are failing), though it keeps what it has.
    `worker_class`: workers of one class turn the same bytes into the same CPU (an instance type,
    say); the cost model tells classes apart.
    """

    worker_id: str
    group: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    capacity: float = 1.0
    accepts_leases: bool = True
    worker_class: str = ""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The settings that planning needs, in the units of `config.AssignmentSettings`.

    The fields after `balance` are read by `balanced` only, but `cool_down_seconds`, which
    `worker_utilization_aware` reads as well. Its dead-band has two edges: balancing
    starts when a worker is more than `re_balance_threshold_percentage` above its fair share (a
    group: `group_threshold_percentage`) and stops at `balance_target_percentage`. A worker is also
    left alone while its excess is below `dead_band_kbps` and `dead_band_cpu_percentage` (points).
    `min_benefit_per_move` is in fair shares of excess relieved, averaged over the moves made for
    balance. `churn_budget_percentage` is of all leases, per plan; it and `cool_down_seconds` do not
    hold back a lease without a living owner. `fresh_lease_quantile` of the sampled leases is what a
    lease without a sample counts.
    """

    max_leases_for_worker: int = 2**31 - 1
    max_throughput_per_host_kbps: float = math.inf
    re_balance_threshold_percentage: int = 10
    dampening_percentage: int = 60
    allow_throughput_overshoot: bool = True
    balance: bool = True
    """False: only leases without an owner are placed, nothing is moved for balance."""
    balance_target_percentage: float = 5.0
    group_threshold_percentage: float = 5.0
    dead_band_kbps: float = 1.0
    dead_band_cpu_percentage: float = 5.0
    min_benefit_per_move: float = 0.0005
    cool_down_seconds: float = 120.0
    churn_budget_percentage: float = 100.0
    fresh_lease_quantile: float = 0.75
    max_leases_for_group: int = 2**31 - 1
    max_throughput_per_group_kbps: float = math.inf


@dataclass(frozen=True, slots=True)
class Move:
    """Give the lease to `to_worker`. `from_worker` None: it has no living owner.

    `reason` is a sentence for people.
    """

    lease_key: str
    from_worker: str | None
    to_worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order of their importance, at most one per lease. `spilled`: leases that nobody
    could take.
    """

    strategy: str
    moves: tuple[Move, ...]
    spilled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanInput:
    """All that a strategy may look at. The order of leases and workers does not matter: strategies
    sort.
    """

    leases: tuple[LeaseState, ...]
    workers: tuple[WorkerState, ...]
    limits: PlanLimits = PlanLimits()


Strategy = Callable[[PlanInput], Plan]
"""A pure, deterministic function; registered under a name by `planning.strategies.register`."""

"""The settings of lease assignment, a part of `config`."""

from __future__ import annotations

import math

from pydantic import Field

from kcl_pipeline.config.model import StrictSettings


class AssignmentSettings(StrictSettings):
    """Assignment of leases to workers, by the leader (protocol §5) or without one (§5.7)."""

    lease_assignment_strategy: str = Field(
        "balanced",
        min_length=1,
        description="balanced or worker_utilization_aware (load is measured), lease_count_based "
        "(every lease weighs the same), kcl_variance, or a registered strategy",
    )
    lease_assignment_interval_millis: int | None = Field(
        None, ge=10, description="None: twice the failover time"
    )
    max_leases_for_worker: int = Field(2**31 - 1, ge=1, description="Most leases of a worker")
    max_throughput_per_host_kbps: float = Field(
        math.inf, gt=0, description="Most throughput of the leases of a worker"
    )
    re_balance_threshold_percentage: int = Field(
        10,
        ge=0,
        le=100,
        description="Leases move away from a worker that is this far above its fair share",
    )
    dampening_percentage: int = Field(
        60,
        ge=1,
        le=100,
        description="kcl_variance: share of the excess of a worker that one plan moves",
    )
    allow_throughput_overshoot: bool = Field(
        True,
        description="kcl_variance: move one lease also if it has more throughput than the excess",
    )
    variance_balancing_frequency: int = Field(
        3,
        ge=1,
        description="Leases move between live workers in every such number of assignment intervals",
    )
    worker_metrics_ema_alpha: float = Field(
        0.5, gt=0, le=1, description="Weight of the newest sample in the average of worker metrics"
    )
    balance_target_percentage: float = Field(
        5.0,
        ge=0,
        le=100,
        description="balanced: a worker is relieved down to this far above its fair share. "
        "At most the threshold",
    )
    dead_band_kbps: float = Field(
        1.0, ge=0, description="balanced: an excess of throughput below this moves no lease"
    )
    dead_band_cpu_percentage: float = Field(
        5.0,
        ge=0,
        le=100,
        description="balanced: an excess of CPU below this many points moves no lease",
    )
    cool_down_seconds: float = Field(
        120.0,
        ge=0,
        description="A lease that moved does not move again for this time, unless its owner stops",
    )
    churn_budget_percentage: float = Field(
        100.0, ge=0, le=100, description="balanced: largest share of leases that one plan moves"
    )
    fresh_lease_quantile: float = Field(
        0.75,
        ge=0,
        le=1,
        description="balanced: a lease without a sample counts as this quantile of the others",
    )
    max_leases_for_group: int = Field(2**31 - 1, ge=1, description="balanced: per worker group")
    max_throughput_per_group_kbps: float = Field(
        math.inf, gt=0, description="balanced: per worker group"
    )
    max_leases_to_steal_at_one_time: int = Field(
        1, ge=1, description="Without a leader: leases that a worker takes at once from another one"
    )
    enable_priority_lease_assignment: bool = Field(
        True,
        description="Without a leader: leases that were not renewed for three times the failover "
        "time are taken first, also by workers that have their share",
    )
    stale_worker_metrics_entry_cleanup_millis: int = Field(
        86_400_000,
        ge=1_000,
        description="The row of a worker without a report for this time is deleted",
    )
    max_consecutive_failures: int = Field(
        3, ge=1, description="The leader releases the lock after this many failed cycles in a row"
    )

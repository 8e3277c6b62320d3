"""Define one observation of the application, from which the sensor makes its reports."""

from dataclasses import dataclass

from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.status.rows import OwnerChange
from kcl_pipeline.status.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """One observation of the application.

    Attributes:
        snapshot: Its state, with what the sensor has observed.
        lock_owner: The leader; None without one.
        leads: Whether this sensor is the leader.
        plan: The last plan, if this sensor leads.
        plan_input: What the plan was computed from.
        cycle_seconds: Duration of the leader cycle.
        runs: The active runs.
        moves: The last moves, newest first.
    """

    snapshot: Snapshot
    lock_owner: str | None
    leads: bool
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    cycle_seconds: float = 0.0
    runs: tuple[RunView, ...] = ()
    moves: tuple[OwnerChange, ...] = ()

"""Define one observation of the application, from which the sensor makes its reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.application.losses import Losses
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.orchestration.assets.checks.history import ReportPoint
from kcl_pipeline.orchestration.assets.checks.lag import LagObservation
from kcl_pipeline.planning.model import Plan, PlanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView(LagObservation):
    """One observation of the application.

    Attributes:
        lock_owner: The leader; None without one.
        leads: Whether this sensor is the leader.
        plan: The last plan, if this sensor leads.
        plan_input: What the plan was computed from.
        cycle_seconds: Duration of the leader cycle.
        bad_rows: Rows that cannot be parsed.
        unavailable: Streams that are missing or forbidden, of this sensor's cycle or of the
            worker that leads. None: unknown.
        losses: The recorded losses, or why they cannot be read.
        streams: Names or ARNs of all streams: those of the settings, and the other recorded ones.
            Empty: those of the settings.
        checkpoint_ages: By lease key, for how long its checkpoint has not changed, as text.
        retention_seconds: Retention periods by serialized stream.
        points: The last reports of the output. None: none was made yet.
        moves: Rows of the last moves, newest first.
    """

    lock_owner: str | None
    leads: bool
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    cycle_seconds: float = 0.0
    bad_rows: tuple[BadRow, ...] = ()
    unavailable: tuple[UnavailableStream, ...] | None = ()
    losses: Losses | UnreadableRowError = field(default_factory=Losses)
    streams: tuple[str, ...] = ()
    checkpoint_ages: Mapping[str, str] = field(default_factory=dict)
    retention_seconds: Mapping[str, float] = field(default_factory=dict)
    points: tuple[ReportPoint, ...] | None = None
    moves: tuple[dict[str, Any], ...] = ()

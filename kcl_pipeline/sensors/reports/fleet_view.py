"""Define one observation of the application, from which the sensor makes its reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcl_pipeline.assets.checks.history import ReportPoint
from kcl_pipeline.assets.checks.lag import LagObservation
from kcl_pipeline.assets.runs.runs import RunView
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.application.losses import LossLog
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.model import Plan, PlanInput


@dataclass(frozen=True, slots=True)
class FleetView:
    """One observation of the application.

    Attributes:
        leases: All usable rows of the lease table.
        workers: Rows of the live workers.
        lock_owner: The leader; None without one.
        leads: Whether this sensor is the leader.
        waits: By lease key, for how many seconds the lease has had no live owner.
        lag_threshold_seconds: Largest lag that is normal.
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
        checkpoint_seconds: The same as numbers.
        unread_seconds: By lease key, how old the oldest unread record can be.
        retention_seconds: Retention periods by serialized stream.
        points: The last reports of the output. None: none was made yet.
        wall_seconds: Epoch seconds of this observation.
        moves: Rows of the last moves, newest first.
        runs: The active runs.
        pause: The pause of the application. None: not paused.
    """

    leases: tuple[Lease, ...]
    workers: tuple[WorkerMetrics, ...]
    lock_owner: str | None
    leads: bool
    waits: dict[str, float]
    lag_threshold_seconds: float = 60.0
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    cycle_seconds: float = 0.0
    bad_rows: tuple[BadRow, ...] = ()
    unavailable: tuple[UnavailableStream, ...] | None = ()
    losses: LossLog | UnreadableRowError = field(default_factory=LossLog)
    streams: tuple[str, ...] = ()
    checkpoint_ages: Mapping[str, str] = field(default_factory=dict)
    checkpoint_seconds: Mapping[str, float] = field(default_factory=dict)
    unread_seconds: Mapping[str, float] = field(default_factory=dict)
    retention_seconds: Mapping[str, float] = field(default_factory=dict)
    points: tuple[ReportPoint, ...] | None = None
    wall_seconds: float = 0.0
    moves: tuple[dict[str, Any], ...] = ()
    runs: tuple[RunView, ...] = ()
    pause: Pause | None = None

    @property
    def lag(self) -> LagObservation:
        """What the check `lag_below_threshold` is evaluated from."""
        return LagObservation(
            self.leases,
            self.workers,
            self.unread_seconds,
            self.waits,
            self.checkpoint_seconds,
            self.runs,
            self.wall_seconds,
            None if self.pause is None else self.pause.sentence,
        )

    @property
    def ages(self) -> dict[str, float]:
        """How old the oldest unread record of each lease can be, also without a live worker."""
        return self.lag.ages(self.lag_threshold_seconds)

    @property
    def idle(self) -> str | None:
        """Since when nothing has arrived; None while data arrives, or if it is not known."""
        return self.lag.idle(self.lag_threshold_seconds)

    @property
    def lag_millis(self) -> int | None:
        """The lag of the application; None if it is not known."""
        return self.lag.lag_millis(self.lag_threshold_seconds)

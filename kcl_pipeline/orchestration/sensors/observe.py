"""Observe the application in one tick of the leader sensor, and keep what ticks remember."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.tables import WorkerListing, WorkerMetrics
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.checks.history import ReportPoint
from kcl_pipeline.orchestration.assets.checks.leadership import LeaderAbsence
from kcl_pipeline.orchestration.assets.checks.losses import observe_losses
from kcl_pipeline.orchestration.assets.checks.unread import retention_by_stream, unread_seconds
from kcl_pipeline.orchestration.assets.runs.runs import RunView, last_drain, silence_limit_seconds
from kcl_pipeline.orchestration.sensors.reports.application import Cadence, LeaseWaits
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.orchestration.sensors.reports.output import FleetTotals
from kcl_pipeline.orchestration.sensors.reports.tables import CheckpointAges, MoveLog
from kcl_pipeline.orchestration.sensors.scaling.load import Load
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.sentence import LeaderSince

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle


@dataclass(slots=True)
class TickState:
    """State that the code server keeps between ticks. A reload builds it again.

    Attributes:
        cycle: The leader.
        recent_events: Texts of events that no tick has logged yet.
        rejected: Reports worker metrics rows that cannot be read, while another process leads.
        points: The reports of the output in the last hour or more. None: none was made yet.
        retention_seconds: By serialized stream, as the last cycle that led has found them.
        pause: The pause of the application, as of the last tick that could read it.
        open_shards: Number of open shards of the last observation; None before it.
        load: The load of the workers in this tick.
        tick_started: When the running tick started (monotonic seconds); None between ticks.
    """

    cycle: "LeaderCycle"
    recent_events: deque[str]
    rejected: RejectedRows
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    waits: LeaseWaits = field(default_factory=LeaseWaits)
    cadence: Cadence = field(default_factory=Cadence)
    totals: FleetTotals = field(default_factory=FleetTotals)
    ages: CheckpointAges = field(default_factory=CheckpointAges)
    moves: MoveLog = field(default_factory=MoveLog)
    leader: LeaderSince = field(default_factory=LeaderSince)
    absence: LeaderAbsence = field(default_factory=LeaderAbsence)
    points: tuple[ReportPoint, ...] | None = None
    retention_seconds: dict[str, float] = field(default_factory=dict)
    open_shards: int | None = None
    load: Load = field(default_factory=Load)
    tick_started: float | None = None
    pause: Pause | None = None

    def begin_tick(self, now: float) -> bool:
        """Start a tick; False if an earlier tick, which Dagster gave up on, still runs."""
        if self.tick_started is not None:
            return False
        self.tick_started, self.load = now, Load()
        return True


def observe_fleet(
    resources: PipelineResources,
    settings: ConsumerSettings,
    state: TickState,
    report: CycleReport,
    rows: WorkerListing,
    active: tuple[RunView, ...],
    streams: tuple[str, ...],
    *,
    clock: Clock,
    instance: dg.DagsterInstance,
    lag_threshold_seconds: float,
) -> FleetView:
    """Return the view of the application after a leader cycle.

    Args:
        resources: The tables.
        settings: The settings of the application.
        state: Receives since when leases wait.
        report: The leader cycle. If it did not lead, the lease table is read here.
        rows: The worker metrics rows.
        active: The active runs.
        streams: Names or ARNs of all streams.
        clock: The clock.
        instance: The Dagster instance, which knows the last drain.
        lag_threshold_seconds: Largest lag that is normal.
    """
    leases, workers, bad_rows = _rows(resources, settings, state, report, rows)
    if report.led:
        state.retention_seconds = retention_by_stream(report.streams)
    now = clock.monotonic()
    ownerless = {
        le.lease_key
        for le in leases
        if le.actual_owner is not None and le.actual_owner not in {w.worker_id for w in workers}
    }
    state.moves.observe(report.plan if report.led else None, leases, now)
    wall, waits = clock.wall(), state.waits.observe(leases, ownerless | set(report.expired), now)
    drained_at = last_drain(instance, settings.application_name) if waits else None
    return FleetView(
        leases=leases,
        workers=workers,
        lock_owner=report.lock_owner,
        leads=report.led,
        waits=waits,
        plan=report.plan,
        plan_input=report.plan_input,
        cycle_seconds=report.seconds,
        bad_rows=bad_rows,
        unavailable=report.unavailable if report.led else _reported_streams(report, rows),
        pause=state.pause,
        losses=observe_losses(resources.coordinator),
        streams=streams,
        checkpoint_ages=state.ages.observe(leases, now),
        unchanged=state.ages.seconds(now),
        unread=unread_seconds(leases, workers, wall, drained_at),
        retention_seconds=state.retention_seconds,
        points=state.points,
        wall_seconds=wall,
        threshold_seconds=lag_threshold_seconds,
        moves=tuple(state.moves.rows(now)),
        runs=active,
    )


def _rows(
    resources: PipelineResources,
    settings: ConsumerSettings,
    state: TickState,
    report: CycleReport,
    rows: WorkerListing,
) -> tuple[tuple[Lease, ...], tuple[WorkerMetrics, ...], tuple[BadRow, ...]]:
    """Return the leases, the live workers and the rows that cannot be read."""
    if report.led and (report.error is None or report.leases):
        return report.leases, report.workers, report.bad_rows
    listing = resources.leases.list_leases().of_form(
        settings.lease_table_name, multi_stream=settings.is_multi_stream
    )
    return (
        tuple(sorted(listing.leases, key=lambda le: le.lease_key)),
        _living(rows, state.heartbeats, silence_limit_seconds(settings)),
        (*report.bad_rows, *listing.bad_rows, *rows.bad_rows),
    )


def _living(
    rows: WorkerListing, heartbeats: Heartbeats, limit_seconds: float
) -> tuple[WorkerMetrics, ...]:
    """Return the workers whose row has changed within the limit, sorted by id."""
    living = (
        row
        for row in rows.workers
        if (heartbeats.silent_seconds(row.worker_id) or 0.0) <= limit_seconds
    )
    return tuple(sorted(living, key=lambda row: row.worker_id))


def _reported_streams(
    report: CycleReport, rows: WorkerListing
) -> tuple[UnavailableStream, ...] | None:
    """Return the unavailable streams in the row of the worker that leads; None without one."""
    found = (
        row.status.unavailable
        for row in rows.workers
        if row.worker_id == report.lock_owner and row.status is not None
    )
    return next(found, None)

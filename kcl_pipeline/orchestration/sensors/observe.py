"""Observe the application in one tick of the leader sensor, and keep what ticks remember."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from kcl_pipeline.changes import LastChanges
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.application.losses import Losses
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.tables import LeaderLock, WorkerListing, WorkerMetrics
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.runs.runs import RunView, last_drain, silence_limit_seconds
from kcl_pipeline.orchestration.sensors.reports.application import (
    Cadence,
    LeaseWaits,
    stuck_limit_seconds,
)
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.orchestration.sensors.reports.output import FleetTotals
from kcl_pipeline.orchestration.sensors.scaling.load import Load
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.sentence import LeaderSince
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.rows import OwnerChanges
from kcl_pipeline.status.snapshot import Failure, LifeObservation, Snapshot

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle


@dataclass(slots=True)
class CheckpointAges:
    """Since when each lease has had its checkpoint, by observation."""

    since: LastChanges[str] = field(default_factory=LastChanges)

    def observe(self, leases: Sequence[Lease], now: float) -> dict[str, float]:
        """Add one observation. Returns by lease key for how long the checkpoint has not changed."""
        self.since.observe({le.lease_key: le.checkpoint for le in leases}, now)
        return self.since.seconds(now)


@dataclass(slots=True)
class LeaderAbsence:
    """Since when this sensor has observed no leader.

    Attributes:
        since: Monotonic seconds. None: there is a leader.
        reason: Why this sensor does not lead.
    """

    since: float | None = None
    reason: str = ""

    def observe(self, *, led: bool, owner: str | None, problem: str | None, now: float) -> None:
        """Add the result of one leader cycle.

        Args:
            led: Whether the cycle led.
            owner: Owner of the lock.
            problem: Why the cycle did not lead, or could not find out who does.
            now: Monotonic seconds.
        """
        is_present = led or (owner is not None and problem is None)
        if is_present:
            self.since = None
        elif self.since is None:
            self.since = now
        self.reason = problem or "nobody has acquired the leader lock"

    def seconds(self, now: float) -> float:
        """For how long nobody has led."""
        return 0.0 if self.since is None else now - self.since


@dataclass(slots=True)
class TickState:
    """State that the code server keeps between ticks. A reload builds it again.

    Attributes:
        cycle: The leader.
        recent_events: Texts of events that no tick has logged yet.
        rejected: Reports worker metrics rows that cannot be read, while another process leads.
        dead_letters: Records that became dead letters in the last hour, as of the last report of
            the output. None: none was made yet.
        resolved: The streams of the last cycle that led, with their retention periods.
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
    moves: OwnerChanges = field(default_factory=OwnerChanges)
    leader: LeaderSince = field(default_factory=LeaderSince)
    absence: LeaderAbsence = field(default_factory=LeaderAbsence)
    dead_letters: int | None = None
    resolved: tuple[StreamId, ...] = ()
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
    """
    leases, workers, bad_rows = _rows(resources, settings, state, report, rows)
    if report.led:
        state.resolved = report.streams
    now, living = clock.monotonic(), {w.worker_id for w in workers}
    ownerless = {le.lease_key for le in leases if le.actual_owner not in living}
    waits = state.waits.observe(leases, ownerless | set(report.expired), now)
    losses = Losses()
    failures: tuple[Failure, ...] = ()
    try:
        losses = resources.coordinator.read_losses()
    except UnreadableRowError as error:
        failures = (Failure("the record of losses", error),)
    duration = settings.leader.leader_lease_duration_millis
    snapshot = Snapshot(
        application=settings.application_name,
        at=clock.wall(),
        period_seconds=settings.worker.worker_metrics_reporter_freq_in_millis / 1000,
        streams=streams or settings.streams,
        leases=leases,
        workers=workers,
        bad_rows=bad_rows,
        lock=None if report.lock_owner is None else LeaderLock(report.lock_owner, duration, ""),
        pause=state.pause,
        losses=losses,
        failures=failures,
        observed=LifeObservation(
            0.0 if state.tick_started is None else now - state.tick_started,
            stuck_limit_seconds(settings),
            waits=waits,
            unchanged=state.ages.observe(leases, now),
            leader_absent=state.absence.seconds(now),
            leader_reason=state.absence.reason,
            goes_on=True,
        ),
        unavailable=report.unavailable if report.led else _reported_streams(report, rows),
        resolved=state.resolved,
        dead_letters=state.dead_letters,
        drained_at=last_drain(instance, settings.application_name) if waits else None,
    )
    planned = report.plan.moves if report.led and report.plan is not None else ()
    moves = state.moves.observe(snapshot, {move.lease_key: move.reason for move in planned})
    return FleetView(
        snapshot=snapshot,
        lock_owner=report.lock_owner,
        leads=report.led,
        plan=report.plan,
        plan_input=report.plan_input,
        cycle_seconds=report.seconds,
        runs=active,
        moves=tuple(moves),
    )


def observe_outage(
    settings: ConsumerSettings,
    state: TickState,
    clock: Clock,
    owner: str | None,
    run_problems: tuple[str, ...],
) -> Snapshot:
    """Return what is known while the tables cannot be read: who leads, and the runs."""
    duration = settings.leader.leader_lease_duration_millis
    return Snapshot(
        application=settings.application_name,
        at=clock.wall(),
        lock=None if owner is None else LeaderLock(owner, duration, ""),
        observed=LifeObservation(
            0.0,
            stuck_limit_seconds(settings),
            leader_absent=state.absence.seconds(clock.monotonic()),
            leader_reason=state.absence.reason,
            goes_on=True,
        ),
        run_problems=run_problems,
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

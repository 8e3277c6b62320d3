"""Lead an application in a Dagster sensor.

In reading order: the leader cycles of a tick, the sentence about a tick, what a tick observes and
what ticks remember, and the sensor.
"""

import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import dagster as dg
from dagster import DagsterRunStatus

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.clock import Clock, LastChanges, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import NotFoundError, ThrottledError, UnavailableError, UnreadableRowError
from kcl_pipeline.events import Event
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.application import Losses, Pause
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import BadRow, Lease, RejectedRows
from kcl_pipeline.leases.workers import WorkerListing, WorkerMetrics
from kcl_pipeline.metrics.exporters import level_of, text_of
from kcl_pipeline.orchestration.checks import (
    OF_OUTPUT,
    dead_letters_last_hour,
    last_checks,
    number_in,
)
from kcl_pipeline.orchestration.names import REPLACES_TAG, VERSION_TAG, Names, PipelineResources
from kcl_pipeline.orchestration.options import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.reports import (
    SHORTEST_GAP_SECONDS,
    Cadence,
    FleetTotals,
    FleetView,
    LeaseWaits,
    asset_events,
    lease_text,
    move_text,
    outage_events,
    output_events,
    partition_requests,
    run_links,
    stuck_limit_seconds,
)
from kcl_pipeline.orchestration.runs import (
    RunView,
    active_runs,
    last_drain,
    silence_limit_seconds,
    starting_workers,
)
from kcl_pipeline.orchestration.specs import OutputTable, code_version, column_lineage
from kcl_pipeline.orchestration.supervision import (
    AutoscalerMemory,
    Heartbeats,
    Load,
    Observed,
    Scaling,
    ScalingDecision,
    apply_findings,
    cancel_queued,
    find_mismatches,
    open_shards,
    scale,
)
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import idle_text
from kcl_pipeline.status.rows import OwnerChanges
from kcl_pipeline.status.snapshot import Failure, LifeObservation, Snapshot, all_streams
from kcl_pipeline.text import counted
from kcl_pipeline.worker_status import UnavailableStream

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle


# Run the leader cycles of a tick: one, and more if leases can be assigned before the next tick.
#
# Ticks are at least 5 s apart. Without further cycles, a lease that expires a moment after a tick
# stays without a living owner until the next one, and so do the leases of a fleet whose first
# worker is about to report.

LONGEST_SECONDS: Final = 2.0
"""Longest time that a tick waits for the expiry of a lease."""
_LONGEST_SHARE: Final = 0.5
"""The same as a share of the failover time. A living owner has renewed more recently."""
START_SECONDS: Final = 3.0
"""Longest time that a tick waits for a worker that starts. The next tick then continues.

Dagster leaves the next tick out if one lasts longer than the five seconds between two.
"""
_START_STEP_SECONDS: Final = 0.5
_START_DUTY: Final = 3.0
"""The pause between two cycles is at least this multiple of the duration of a cycle."""
_AFTER_EXPIRY_SECONDS: Final = 0.02
_STEP_SECONDS: Final = 0.1


def run_cycles(
    cycle: "LeaderCycle",
    failover_seconds: float,
    deadline_seconds: float,
    clock: Clock,
    is_starting: Callable[[CycleReport], bool] = lambda _: False,
) -> CycleReport:
    """Run a cycle, and others while a worker is about to report or a lease expires shortly.

    There is no further cycle after one that has moved leases, because its report would not be
    reported.

    Args:
        cycle: The leader.
        failover_seconds: The failover time.
        deadline_seconds: Longest duration of all cycles and waits.
        clock: The clock.
        is_starting: Returns whether a worker that the report does not have may report soon. It is
            called only while the application waits for a worker.

    Returns:
        The report of the last cycle.
    """
    began = clock.monotonic()
    report = cycle.run_once(deadline_seconds)
    if report.led and not report.leases and cycle.wait_for_sync(START_SECONDS):
        # The first leases of an application, or those of a stream that was created again
        report = cycle.run_once(deadline_seconds - (clock.monotonic() - began))
    if _misses_workers(cycle, report) and is_starting(report):
        return _until_assigned(cycle, report, began, deadline_seconds, clock, is_starting)
    seconds = clock.monotonic() - began
    if not report.led or _has_news(report):
        return report
    # From the start of the cycle: a lease that expired during the cycle was not seen to expire
    wait_seconds = cycle.next_expiry_seconds(began) - seconds + _AFTER_EXPIRY_SECONDS
    wait_seconds = max(wait_seconds, 0.0)
    if wait_seconds > min(LONGEST_SECONDS, _LONGEST_SHARE * failover_seconds):
        return report
    left_seconds = deadline_seconds - seconds - wait_seconds
    if left_seconds <= seconds or not _wait(wait_seconds, clock, threading.main_thread().is_alive):
        return report
    return cycle.run_once(left_seconds)


def _until_assigned(
    cycle: "LeaderCycle",
    report: CycleReport,
    began: float,
    deadline_seconds: float,
    clock: Clock,
    is_starting: Callable[[CycleReport], bool],
) -> CycleReport:
    """Run cycles until leases are assigned to the worker that starts, or the next tick is due."""
    goes_on = threading.main_thread().is_alive
    while _misses_workers(cycle, report) and is_starting(report):
        pause = max(_START_STEP_SECONDS, _START_DUTY * report.seconds)
        elapsed = clock.monotonic() + pause - began
        if elapsed >= min(START_SECONDS, deadline_seconds) or not _wait(pause, clock, goes_on):
            break
        report = cycle.run_once(deadline_seconds - elapsed)
    return report


def _misses_workers(cycle: "LeaderCycle", report: CycleReport) -> bool:
    """Whether the application waits for a worker, which creates the tables or gets leases."""
    if not report.led:
        return cycle.misses_table
    if report.plan is None or report.plan.moves or report.pause is not None:
        return False
    unowned = any(lease.owner is None and not lease.ended for lease in report.leases)
    return unowned or bool(report.expired)


def _has_news(report: CycleReport) -> bool:
    moves = () if report.plan is None else report.plan.moves
    return report.error is not None or bool(moves or report.created or report.deleted)


def _wait(seconds: float, clock: Clock, goes_on: Callable[[], bool]) -> bool:
    """Wait; return False as soon as the process is to end."""
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0:
        if not goes_on():
            return False
        clock.sleep(min(left, _STEP_SECONDS))
    return goes_on()


# Say in one sentence what a tick of the leader sensor did.
#
# The sentence is the tick's skip reason. Dagster shows that only while the mouse is over the
# tick, so the sentence is also the first entry of the cursor, which is a column of the ticks'
# table.

TICK = "tick"
SHOWN_MOVES = 3
_KINDS = {
    DagsterRunStatus.STARTED: "run",
    DagsterRunStatus.QUEUED: "queued",
    DagsterRunStatus.CANCELING: "stopping",
}


@dataclass(slots=True)
class LeaderSince:
    """Since when this sensor has observed the leader.

    Attributes:
        owner: The leader. None: none, or unknown.
        since: Epoch seconds of the first observation.
        is_exact: Whether this sensor has observed the change.
    """

    owner: str | None = None
    since: float | None = None
    is_exact: bool = False

    def observe(self, owner: str | None, wall_seconds: float) -> None:
        """Add one observation."""
        if self.since is None or owner != self.owner:
            self.is_exact = self.since is not None
            self.owner, self.since = owner, wall_seconds

    def text(self) -> str:
        """The leader and since when, such as `worker orders-7f leads since 12:03 UTC`."""
        if self.owner is None or self.since is None:
            return "nobody leads"
        kind = "sensor" if self.owner.startswith("dagster/") else "worker"
        time = f"{datetime.fromtimestamp(self.since, UTC):%H:%M} UTC"
        return f"{kind} {self.owner} leads since {time}{'' if self.is_exact else ' or earlier'}"


def leading_text(report: CycleReport, problem: str | None, since: LeaderSince) -> str:
    """What the leader cycle did, or why it did not lead."""
    if not report.led:
        return f"did not lead: {problem or since.text()}"
    finished = sum(1 for lease in report.leases if lease.ended)
    text = (
        f"led: {counted(len(report.leases), 'lease')}"
        + (f" ({finished} finished)" if finished else "")
        + f", {counted(len(report.workers), 'worker')}, {moves_text(report)}, "
        f"{report.seconds * 1000:.0f} ms"
    )
    return f"{text}; {problem}" if problem else text


def moves_text(report: CycleReport) -> str:
    """The moves of a cycle with their reasons: the first ones, and how many more there are."""
    moves = () if report.plan is None else report.plan.moves
    if not moves:
        return "no move"
    texts = [
        f"{lease_text(one.lease_key)} {move_text(one.from_worker, one.to_worker)} ({one.reason})"
        for one in moves[:SHOWN_MOVES]
    ]
    more = len(moves) - SHOWN_MOVES
    return f"moved {'; '.join(texts)}" + (f" and {more} more" if more > 0 else "")


def runs_text(
    active: Sequence[RunView], decision: ScalingDecision, problems: Sequence[str] = ()
) -> str:
    """How many of the desired workers run, what the other runs wait for, and the problems."""
    counts = Counter(_KINDS.get(run.status, "starting") for run in active if run.continuous)
    runs, desired = counts.pop("run", 0), decision.memory.desired
    parts = [
        f"{runs} of {counted(desired, 'worker')} {'runs' if runs == 1 else 'run'}"
        if runs <= desired
        else f"{counted(runs, 'worker')} {'runs' if runs == 1 else 'run'}, {desired} "
        f"{'is' if desired == 1 else 'are'} needed",
        *(
            f"{number} {'is' if number == 1 else 'are'} {kind}"
            for kind, number in sorted(counts.items())
        ),
    ]
    _, _, action = decision.reason.partition(": ")
    return "; ".join([", ".join(parts) + (f": {action}" if action else ""), *problems])


def cursor_text(sentence: str, memory: AutoscalerMemory) -> str:
    """The cursor: the sentence, then the memory of the autoscaler without its default values.

    Entries that are not known are ignored when it is read.
    """
    entries = memory.model_dump(mode="json", exclude_defaults=True) | {"desired": memory.desired}
    rounded = {
        name: round(value) if isinstance(value, float) else value for name, value in entries.items()
    }
    ordered = {"desired": rounded.pop("desired")} | rounded
    return json.dumps({TICK: sentence} | ordered, ensure_ascii=False)


# Observe the application in one tick of the leader sensor, and keep what ticks remember.


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
        starting=starting_workers(active, state.heartbeats.rows, clock.wall()),
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
    active: tuple[RunView, ...],
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
        starting=starting_workers(active, state.heartbeats.rows, clock.wall()),
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


# Run the leader sensor: each tick leads the application, scales workers and reconciles runs.
#
# The application does not depend on the sensor: without ticks, a standby leader in a worker leads.
# Everything that a tick does is idempotent. "Preview tick result" in the Dagster UI executes the
# tick, and a tick that timed out keeps running while the next one starts.

INTERVAL_SECONDS: Final = 4
"""Dagster checks sensors every 5 seconds. An interval of 5 would sometimes give 10."""
TICK_GIVE_UP_SECONDS: Final = 120.0
CYCLES_SECONDS: Final = 20.0
"""Longest duration of the leader cycles of a tick."""
TABLE_SECONDS: Final = 2.0
"""Longest wait of a tick for the columns and the number of rows of the output."""
STARTING_SECONDS: Final = 60.0
"""A worker run of this age that does not report yet may do so during a tick."""
DEPLOYMENT_VARIABLE: Final = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
"""Dagster+ sets it in the processes of a deployment."""


def owner_name(context: dg.SensorEvaluationContext, names: Names) -> str:
    """Lock owner of this sensor: `dagster/<instance>/<location>/<sensor>`.

    It is the same after a reload or restart, and differs between Dagster instances and code
    locations. Dagster+ has no id of an instance; there the name of the deployment takes its place.
    """
    storage = getattr(context.instance.run_storage, "get_run_storage_id", None)
    instance = storage()[:8] if storage else os.environ.get(DEPLOYMENT_VARIABLE, "instance")
    location = (
        context.code_location_origin.location_name
        if context.code_location_origin
        else context.repository_name or "location"
    )
    return f"dagster/{instance}/{location}/{names.leader_sensor}"


class LeaderTick:
    """The sensor's evaluation function.

    One object per sensor definition. It lives until the code server reloads.
    """

    def __init__(
        self,
        pipeline: PipelineLike,
        names: Names,
        options: DagsterOptions,
        clock: Clock | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._separator = pipeline.settings.worker.worker_group_separator
        self._names = names
        self._options = options
        self._version = code_version(pipeline)
        self._clock = clock or SystemClock()
        failover_millis = pipeline.settings.lease.failover_time_millis
        self._cycle_seconds = (failover_millis / 1000, CYCLES_SECONDS)
        self._state: TickState | None = None
        lineage = column_lineage(pipeline, names)
        self._table = OutputTable(pipeline.sink, self._clock, lineage)

    def _begin_tick(self, owner: str, clients: Any) -> TickState | None:
        now = self._clock.monotonic()
        state = self._state
        started = None if state is None else state.tick_started
        if state is None or (started is not None and now - started > TICK_GIVE_UP_SECONDS):
            recent_events: deque[str] = deque(maxlen=50)
            cycle = self._pipeline.build_leader(
                owner,
                resume_own_name=True,
                clients=clients,
                clock=self._clock,
                events=_recorder(recent_events),
            )
            rejected = RejectedRows(_recorder(recent_events))
            state = self._state = TickState(cycle, recent_events, rejected)
        return state if state.begin_tick(now) else None

    def __call__(self, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        """Run one tick.

        Raises:
            KclError: Settings, permissions or the table layout must be corrected. Other
                errors are logged, and the next tick tries again.
        """
        clients = PipelineResources(self._names, context).aws.clients(self._settings)
        state = self._begin_tick(owner_name(context, self._names), clients)
        if state is None:
            return dg.SensorResult(
                skip_reason="the previous tick is still running", cursor=context.cursor
            )
        try:
            return self._tick(context, state)
        finally:
            state.tick_started = None

    def _tick(self, context: dg.SensorEvaluationContext, state: TickState) -> dg.SensorResult:
        report, problem = self._lead(state, context.instance)
        state.absence.observe(
            led=report.led, owner=report.lock_owner, problem=problem, now=self._clock.monotonic()
        )
        pause = self._pause(context, report, state)
        active = active_runs(context.instance, self._names.application, self._separator)
        done: tuple[str, ...] = ()
        view: FleetView | None = None
        partitions: list[Any] = []
        try:
            table = PipelineResources(self._names, context).workers
            listing = table.scan_workers()
            if not report.led:  # a leader has reported these rows
                state.rejected.note_all(listing.bad_rows)
            state.heartbeats.observe(
                listing.workers, active, self._clock.monotonic(), unreadable=listing.bad_rows
            )
            state.totals.observe(
                listing.workers,
                self._clock.monotonic(),
                [run.worker_id for run in active if not run.continuous],
            )
            done = apply_findings(
                find_mismatches(state.heartbeats, active, silence_limit_seconds(self._settings)),
                context.instance,
                table,
            )
            if done:
                active = active_runs(context.instance, self._names.application, self._separator)
            streams = self._streams(context)
            view = self._observe(context, state, report, listing, active, streams)
            partitions = self._partitions(context, streams)
        except (NotFoundError, ThrottledError, UnavailableError) as error:
            problem = problem or str(error)
        leases = None if view is None else view.snapshot.leases
        scaling = self._scale(context, state, active, pause, leases, report.lock_owner)
        decision = scaling.decision
        # After the decision, so that the check says what the sentence of this tick says
        events = self._events(context, state, view, report.lock_owner, active, scaling.problems)
        cancel_queued(context.instance, decision.cancel)
        for worker_id in decision.drain:
            PipelineResources(self._names, context).workers.request_drain(worker_id)
        told = state.recent_events
        recent_events = [*(told.popleft() for _ in range(len(told))), *done]
        if decision.start or decision.drain or decision.cancel or scaling.succeeds:
            recent_events.append("; ".join([decision.reason, *scaling.notes]))
        if recent_events:
            context.log.info("\n".join(recent_events))
        state.leader.observe(report.lock_owner, self._clock.wall())
        leading = leading_text(report, problem, state.leader)
        sentence = f"{leading}; {runs_text(active, decision, scaling.notes)}"
        if pause is not None:
            sentence = f"{pause.sentence}; {sentence}"
        requests = [self._request() for _ in range(decision.start)]
        if scaling.succeeds is not None:
            requests.append(self._request(replaces=scaling.succeeds))
        return dg.SensorResult(
            run_requests=requests or None,
            skip_reason=None if requests else sentence,
            cursor=cursor_text(sentence, decision.memory),
            asset_events=events,
            dynamic_partitions_requests=partitions or None,
        )

    def _request(self, replaces: str | None = None) -> dg.RunRequest:
        """The request of one worker run. Dagster never starts a second run with a used key.

        Args:
            replaces: Id of the worker that it replaces. None: of no worker.
        """
        key = f"{self._names.application}-{uuid4().hex}"
        tags = {**self._pipeline.workers.run_tags, **self._names.worker_run_tags}
        if self._version is not None:
            tags[VERSION_TAG] = self._version
        if replaces is not None:
            tags[REPLACES_TAG] = replaces
        return dg.RunRequest(run_key=key, tags=tags)

    def _lead(
        self, state: TickState, instance: dg.DagsterInstance
    ) -> tuple[CycleReport, str | None]:
        def is_starting(report: CycleReport) -> bool:
            reporting, now = {row.worker_id for row in report.workers}, self._clock.wall()
            return any(
                run.continuous
                and run.status is not dg.DagsterRunStatus.CANCELING
                and run.worker_id not in reporting
                and now - run.created < STARTING_SECONDS
                for run in active_runs(instance, self._names.application, self._separator)
            )

        try:
            report = run_cycles(state.cycle, *self._cycle_seconds, self._clock, is_starting)
        except NotFoundError:
            problem = "waiting for the first worker, which creates the tables"
            return CycleReport(led=False), problem
        except (ThrottledError, UnavailableError) as error:
            return CycleReport(led=False), str(error)
        return report, report.error

    def _pause(
        self, context: dg.SensorEvaluationContext, report: CycleReport, state: TickState
    ) -> Pause | None:
        """The pause of the application. While another process leads, it is read here."""
        if report.led:
            state.pause = report.pause
            return state.pause
        try:
            state.pause = PipelineResources(self._names, context).coordinator.read_control().pause
        except NotFoundError:
            state.pause = None
        except (ThrottledError, UnavailableError) as error:  # as at the last tick
            context.log.warning("the pause cannot be read: %s", error)
        return state.pause

    def _streams(self, context: dg.SensorEvaluationContext) -> tuple[str, ...]:
        """The streams of the settings and the other recorded ones."""
        with suppress(UnreadableRowError):  # the leader reports it
            table = PipelineResources(self._names, context).coordinator
            return all_streams(self._settings, table)
        return self._settings.streams

    def _partitions(
        self, context: dg.SensorEvaluationContext, streams: tuple[str, ...]
    ) -> list[Any]:
        if not self._names.selects_streams or not streams:
            return []
        existing = context.instance.get_dynamic_partitions(self._names.stream_partitions)
        return partition_requests(self._names, streams, existing)

    def _observe(
        self,
        context: dg.SensorEvaluationContext,
        state: TickState,
        report: CycleReport,
        rows: WorkerListing,
        active: tuple[RunView, ...],
        streams: tuple[str, ...],
    ) -> FleetView:
        """The view of the application. The shards and the load are for the decision of the tick."""
        view = observe_fleet(
            PipelineResources(self._names, context),
            self._settings,
            state,
            report,
            rows,
            active,
            streams,
            clock=self._clock,
            instance=context.instance,
        )
        snapshot = view.snapshot
        state.open_shards = open_shards(snapshot.leases)
        lag = snapshot.lag_seconds
        state.load = Load.of(None if lag is None else round(1000 * lag), snapshot.live)
        return view

    def _events(
        self,
        context: dg.SensorEvaluationContext,
        state: TickState,
        view: FleetView | None,
        lock_owner: str | None,
        active: tuple[RunView, ...],
        run_problems: tuple[str, ...],
    ) -> list[Any]:
        """The events that are due. Without a view, the tables could not be read."""
        now = self._clock.monotonic()
        if view is None:
            outage = observe_outage(
                self._settings, state, self._clock, lock_owner, active, run_problems
            )
            return outage_events(outage, self._names, self._options, state.cadence, now)
        snapshot = replace(view.snapshot, run_problems=run_problems)
        output = output_events(
            state.totals,
            self._names.output,
            snapshot.live,
            now=now,
            wall_seconds=snapshot.at,
            period_seconds=max(self._options.progress_seconds, SHORTEST_GAP_SECONDS),
            dead_letter_table=dead_letter_address(self._pipeline.sink),
            unowned=[snapshot.unread.get(key, age) for key, age in snapshot.unowned.items()],
            idle=idle_text(snapshot),
            runs=run_links(active) if active else None,
            table=lambda: self._table.metadata_within(TABLE_SECONDS),
        )
        if output:
            recorded = dead_letters_last_hour(context.instance, self._names.output, snapshot.at)
            latest = number_in(output[0].metadata, "dead_letters")
            state.dead_letters = (recorded or 0) + round(latest or 0)
            snapshot = replace(snapshot, dead_letters=state.dead_letters)
        landed = any(isinstance(one, dg.AssetMaterialization) for one in output)
        events = asset_events(
            replace(view, snapshot=snapshot),
            self._names,
            self._settings,
            self._options,
            state.cadence,
            now,
            after_output=landed,
        )
        if landed:
            judged = {one.check_name for one in events if isinstance(one, dg.AssetCheckEvaluation)}
            events += last_checks(context.instance, self._names.output, OF_OUTPUT - judged)
        # The report of the output comes first: its checks follow the materialization.
        return [*output, *events]

    def _scale(
        self,
        context: dg.SensorEvaluationContext,
        state: TickState,
        active: tuple[RunView, ...],
        pause: Pause | None,
        leases: tuple[Lease, ...] | None,
        lock_owner: str | None,
    ) -> Scaling:
        memory = AutoscalerMemory.parse(context.cursor)
        if pause is not None:  # the workers end by themselves, and none is started
            return Scaling(ScalingDecision(memory=memory, reason="paused"))
        return scale(
            context.instance,
            self._pipeline,
            self._names,
            self._options,
            Observed(
                active=active,
                heartbeats=state.heartbeats,
                leases=leases,
                shards=state.open_shards,
                load=state.load,
                lock_owner=lock_owner,
                location=context.code_location_origin.location_name
                if context.code_location_origin
                else None,
                version=self._version,
                now=self._clock.wall(),
            ),
            memory,
        )


def _recorder(recent_events: deque[str]) -> Callable[[Event], None]:
    def record(event: Event) -> None:
        if level_of(event) >= logging.INFO:
            recent_events.append(text_of(event))

    return record


def build_leader_sensor(
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
) -> dg.SensorDefinition:
    """Build the sensor `<name>_leader`.

    It is stopped by default (`options.leader_default_running`), because a running sensor starts
    workers.
    """
    tick = LeaderTick(pipeline, names, options)

    @dg.sensor(
        name=names.leader_sensor,
        # By name: with a job, Dagster copies the sensor and warns about a parameter of its own.
        job_name=names.consume_job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING
        if options.leader_default_running
        else dg.DefaultSensorStatus.STOPPED,
        required_resource_keys={
            names.aws,
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
        },
        description=(
            f"Leader of {names.application}: finds shards, assigns leases, and keeps "
            f"{pipeline.workers.min} to {pipeline.workers.max} workers running. "
            "While the sensor is stopped, running workers continue, and one of them leads."
        ),
    )
    def leader(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return tick(context)

    return leader

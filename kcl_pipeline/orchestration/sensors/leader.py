"""Run the leader sensor: each tick leads the application, scales workers and reconciles runs.

The application does not depend on the sensor: without ticks, a standby leader in a worker leads.
Everything that a tick does is idempotent. "Preview tick result" in the Dagster UI executes the
tick, and a tick that timed out keeps running while the next one starts.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import (
    NotFoundError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import Event
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerListing
from kcl_pipeline.metrics.exporters import level_of, text_of
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.checks import dead_letters_last_hour, number_in
from kcl_pipeline.orchestration.assets.code_version import code_version
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import REPLACES_TAG, VERSION_TAG, Names
from kcl_pipeline.orchestration.assets.runs.runs import RunView, active_runs, silence_limit_seconds
from kcl_pipeline.orchestration.assets.table import OutputTable, column_lineage
from kcl_pipeline.orchestration.sensors.cycles import run_cycles
from kcl_pipeline.orchestration.sensors.observe import TickState, observe_fleet, observe_outage
from kcl_pipeline.orchestration.sensors.reports.application import (
    SHORTEST_GAP_SECONDS,
    asset_events,
    outage_events,
)
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.orchestration.sensors.reports.output import output_events
from kcl_pipeline.orchestration.sensors.reports.streams import partition_requests
from kcl_pipeline.orchestration.sensors.reports.tables import run_links
from kcl_pipeline.orchestration.sensors.scaling.autoscaler import (
    AutoscalerMemory,
    ScalingDecision,
    open_shards,
)
from kcl_pipeline.orchestration.sensors.scaling.load import Load
from kcl_pipeline.orchestration.sensors.scaling.observation import Observed, Scaling, scale
from kcl_pipeline.orchestration.sensors.scaling.reconcile import (
    apply_findings,
    cancel_queued,
    find_mismatches,
)
from kcl_pipeline.orchestration.sensors.sentence import cursor_text, leading_text, runs_text
from kcl_pipeline.status.findings import idle_text
from kcl_pipeline.status.snapshot import all_streams

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
        except NotFoundError as error:
            problem = f"waiting for the first worker, which creates the tables ({error})"
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
            outage = observe_outage(self._settings, state, self._clock, lock_owner, run_problems)
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
        # The report of the output comes first: its checks follow the materialization.
        return [
            *output,
            *asset_events(
                replace(view, snapshot=snapshot),
                self._names,
                self._settings,
                self._options,
                state.cadence,
                now,
                after_output=any(isinstance(one, dg.AssetMaterialization) for one in output),
            ),
        ]

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

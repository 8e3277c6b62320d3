"""The leader sensor: one leader cycle per tick, workers kept in supply, Dagster's runs kept true.

The protocol's leader needs no Dagster: when no tick comes, a worker's standby leader leads.
Everything a tick does is idempotent, because "preview tick result" really runs it, and because a
tick that timed out goes on running beside the next one.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import dagster as dg

from kcl_pipeline.assets.contract import DagsterOptions, LeaderCycleLike, PipelineLike
from kcl_pipeline.assets.names import APPLICATION_TAG, CONTINUOUS, MODE_TAG, Names
from kcl_pipeline.assets.runs import (
    RunView,
    active_runs,
    fleet_lag_age_seconds,
    fleet_lag_millis,
    recent_runs,
    silence_limit_seconds,
    stalled_shards,
)
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import NotFoundError, ThrottledError, UnavailableError
from kcl_pipeline.events import Event
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.metrics.exporters import level_of, text_of
from kcl_pipeline.sensors.autoscaler import AutoscalerMemory, ScalingDecision, decide
from kcl_pipeline.sensors.reconcile import Heartbeats, act, judge
from kcl_pipeline.sensors.report import Cadence, FleetView, LeaseWaits, asset_events

INTERVAL_SECONDS: Final = 4
"""Dagster looks every five seconds; an interval of five would sometimes make it ten."""
GIVE_UP_ON_TICK_SECONDS: Final = 120.0


@dataclass(slots=True)
class LeaderRoom:
    """What survives from tick to tick in the code server's process; all of it can be rebuilt, and
    is after a reload.
    """

    cycle: LeaderCycleLike
    happened: deque[str]
    beats: Heartbeats = field(default_factory=Heartbeats)
    waits: LeaseWaits = field(default_factory=LeaseWaits)
    cadence: Cadence = field(default_factory=Cadence)
    since: float | None = None

    def enter(self, now: float) -> bool:
        """Whether this tick may go in: a tick that Dagster gave up on may still be inside."""
        if self.since is not None:
            return False
        self.since = now
        return True


def owner_name(context: dg.SensorEvaluationContext, names: Names) -> str:
    """The same after a reload or restart, different for every Dagster instance and code location:
    `dagster/<instance>/<location>/<sensor>`.
    """
    storage = getattr(context.instance.run_storage, "get_run_storage_id", None)
    instance = storage()[:8] if storage else "instance"
    location = (
        context.code_location_origin.location_name
        if context.code_location_origin
        else context.repository_name or "location"
    )
    return f"dagster/{instance}/{location}/{names.leader_sensor}"


class LeaderTick:
    """Makes ticks.

    One per sensor definition, which lives as long as the code server has this version of the code.
    """

    def __init__(
        self,
        pipeline: PipelineLike,
        names: Names,
        options: DagsterOptions,
        worker_config: dict[str, Any],
        clock: Clock | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._separator = pipeline.settings.worker.worker_group_separator
        self._names = names
        self._options = options
        self._worker_config = worker_config
        self._clock = clock or SystemClock()
        self._room: LeaderRoom | None = None

    def _enter(self, owner: str, clients: Any) -> LeaderRoom | None:
        now = self._clock.monotonic()
        room = self._room
        if room is None or (room.since is not None and now - room.since > GIVE_UP_ON_TICK_SECONDS):
            happened: deque[str] = deque(maxlen=50)
            cycle = self._pipeline.build_leader(
                owner,
                resume_own_name=True,
                clients=clients,
                clock=self._clock,
                events=_remember(happened),
            )
            room = self._room = LeaderRoom(cycle, happened)
        return room if room.enter(now) else None

    def __call__(self, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        """One tick.

        Raises what only a person can mend (settings, permissions, rows of another layout); the rest
        is tried again by the next tick.
        """
        clients = getattr(context.resources, self._names.aws).clients(self._settings)
        room = self._enter(owner_name(context, self._names), clients)
        if room is None:
            return dg.SensorResult(
                skip_reason="the tick before is still at work", cursor=context.cursor
            )
        try:
            return self._tick(context, room)
        finally:
            room.since = None

    def _tick(self, context: dg.SensorEvaluationContext, room: LeaderRoom) -> dg.SensorResult:
        report, trouble = self._lead(room)
        active = active_runs(context.instance, self._names.application, self._separator)
        done: tuple[str, ...] = ()
        events: list[Any] = []
        try:
            table = getattr(context.resources, self._names.workers_resource).table()
            rows = table.list_workers()
            room.beats.observe(rows, active, self._clock.monotonic())
            done = act(
                judge(room.beats, active, silence_limit_seconds(self._settings)),
                context.instance,
                table,
            )
            if done:
                active = active_runs(context.instance, self._names.application, self._separator)
            events = self._events(context, room, report, rows, active)
        except (NotFoundError, ThrottledError, UnavailableError) as error:
            trouble = trouble or str(error)
        decision = self._supply(context, active)
        for worker_id in decision.drain:
            getattr(context.resources, self._names.workers_resource).table().request_drain(
                worker_id
            )
        happened = [*_taken(room.happened), *done]
        if decision.start or decision.drain:
            happened.append(decision.reason)
        if happened:
            context.log.info("\n".join(happened))
        summary = f"{_summary(report, trouble)}; {decision.reason}"
        requests = [self._request() for _ in range(decision.start)]
        return dg.SensorResult(
            run_requests=requests or None,
            skip_reason=None if requests else summary,
            cursor=decision.memory.model_dump_json(),
            asset_events=events,
        )

    def _lead(self, room: LeaderRoom) -> tuple[CycleReport, str | None]:
        try:
            report = room.cycle.run_once(self._options.tick_deadline_seconds)
        except NotFoundError as error:
            return CycleReport(
                led=False
            ), f"waiting for the first worker, which creates the tables ({error})"
        except (ThrottledError, UnavailableError) as error:
            return CycleReport(led=False), str(error)
        return report, report.error

    def _events(
        self,
        context: dg.SensorEvaluationContext,
        room: LeaderRoom,
        report: CycleReport,
        rows: tuple[WorkerMetrics, ...],
        active: tuple[RunView, ...],
    ) -> list[Any]:
        leases, workers, bad_rows = report.leases, report.workers, report.bad_rows
        if not report.led or (report.error is not None and not report.leases):
            table = getattr(context.resources, self._names.leases_resource).table()
            listing = table.list_leases().of_form(
                self._settings.lease_table_name, multi_stream=self._settings.is_multi_stream
            )
            leases = tuple(sorted(listing.leases, key=lambda le: le.lease_key))
            bad_rows = (*bad_rows, *listing.bad_rows)
            limit = silence_limit_seconds(self._settings)
            workers = tuple(
                sorted(
                    (r for r in rows if (room.beats.silent_seconds(r.worker_id) or 0.0) <= limit),
                    key=lambda r: r.worker_id,
                )
            )
        now = self._clock.monotonic()
        gone = {
            le.lease_key
            for le in leases
            if le.actual_owner is not None and le.actual_owner not in {w.worker_id for w in workers}
        }
        view = FleetView(
            leases=leases,
            workers=workers,
            lock_owner=report.lock_owner,
            leads=report.led,
            waits=room.waits.observe(leases, gone | set(report.expired), now),
            lag_millis=fleet_lag_millis(workers, active),
            lag_age_seconds=fleet_lag_age_seconds(workers, active, self._clock.wall()),
            unread_shards=sum(w.status.unknown_lags for w in workers if w.status is not None),
            stalled_shards=stalled_shards(active),
            plan=report.plan,
            plan_input=report.plan_input,
            cycle_seconds=report.seconds,
            bad_rows=bad_rows,
        )
        return list(
            asset_events(view, self._names, self._settings, self._options, room.cadence, now)
        )

    def _supply(
        self, context: dg.SensorEvaluationContext, active: tuple[RunView, ...]
    ) -> ScalingDecision:
        memory = AutoscalerMemory.parse(context.cursor)
        short = sum(r.continuous for r in active) < max(memory.desired, self._pipeline.workers.min)
        return decide(
            active,
            recent_runs(context.instance, self._names.application, self._separator)
            if short
            else (),
            memory,
            minimum=self._pipeline.workers.min,
            maximum=self._pipeline.workers.max,
            now=self._clock.wall(),
            scale_up_lag_seconds=self._options.scale_up_lag_seconds,
        )

    def _request(self) -> dg.RunRequest:
        return dg.RunRequest(
            run_key=f"{self._names.application}-{uuid4().hex}",
            run_config=self._worker_config,
            tags={
                APPLICATION_TAG: self._names.application,
                MODE_TAG: CONTINUOUS,
                "dagster/max_retries": "0",
            },
        )


def _remember(happened: deque[str]) -> Callable[[Event], None]:
    def remember(event: Event) -> None:
        if level_of(event) >= logging.INFO:
            happened.append(text_of(event))

    return remember


def _taken(happened: deque[str]) -> list[str]:
    return [happened.popleft() for _ in range(len(happened))]


def _summary(report: CycleReport, trouble: str | None) -> str:
    if trouble:
        return trouble
    if not report.led:
        return f"{report.lock_owner or 'nobody'} leads"
    ended = sum(1 for le in report.leases if le.ended)
    moves = len(report.plan.moves) if report.plan else 0
    return (
        f"leading: {len(report.leases)} leases ({ended} finished), {len(report.workers)} "
        f"living workers, {moves} moves; {report.seconds * 1000:.0f} ms"
    )


def build_leader_sensor(
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
    job: Any,
    worker_config: dict[str, Any],
) -> dg.SensorDefinition:
    """The sensor `<name>_leader`. Stopped unless `options.leader_default_running`: a sensor that is
    on starts to consume.
    """
    tick = LeaderTick(pipeline, names, options, worker_config)

    @dg.sensor(
        name=names.leader_sensor,
        job=job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING
        if options.leader_default_running
        else dg.DefaultSensorStatus.STOPPED,
        required_resource_keys={names.aws, names.leases_resource, names.workers_resource},
        description=(
            f"The leader of {names.application}: finds shards, assigns leases, keeps "
            f"{pipeline.workers.min} to {pipeline.workers.max} workers running. "
            "Turned off, the workers go on, and one of them leads."
        ),
    )
    def leader(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return tick(context)

    return leader

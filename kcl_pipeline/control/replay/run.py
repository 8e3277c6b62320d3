"""Replay a time range: plan it, run it, and delete its tables at its end.

A replay is a KCL application of its own. Its leases and batch numbers, and so the application
transactions in the Delta log, have its name. So each record of the range lands exactly once per
replay, also if the replay was killed and is continued with its id. The DynamoDB tables of the
pipeline are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from kcl_pipeline.aws import delete_tables, open_kinesis, open_tables
from kcl_pipeline.batch import NOTHING_WRITTEN
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.control.application import ApplicationControl, is_held
from kcl_pipeline.control.replay.pipeline import ReplayPipeline, replay_pipeline
from kcl_pipeline.control.sinks import position_sink
from kcl_pipeline.errors import ApplicationInUseError, NotFoundError, SettingsError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.sinks.sink import Entry
from kcl_pipeline.text import printable
from kcl_pipeline.worker.retry import StoppedWhileRetryingError
from kcl_pipeline.worker.status import StopReason, WorkerProgress

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients
    from kcl_pipeline.clock import StopSignal
    from kcl_pipeline.control.replay.request import ReplayRequest
    from kcl_pipeline.leases.application.replay_record import ReplayRecord
    from kcl_pipeline.leases.layout.opening import Tables

SETTLE_SECONDS: Final = 5.0
"""Time from the end of the range to the start, until which its last records can be read."""
END_KEY: Final = "replay"
"""In place of a shard: its end in the table says that the replay has ended."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay that can be run.

    Attributes:
        replay_id: Its id.
        name: Name of its application.
        record: What is replayed.
        streams: Names or ARNs of the streams.
        is_continued: Whether it was begun before.
        table: Address of the table. None: a function as the sink chooses it.
    """

    replay_id: str
    name: str
    record: ReplayRecord
    streams: tuple[str, ...]
    is_continued: bool
    table: str | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a run of a replay.

    Attributes:
        plan: The replay.
        reason: Why the run ended.
        total: Counters of this run. None: it read nothing.
        is_complete: Whether all records of the range are in the table, and the tables of the replay
            are deleted.
        error: Why it is not complete. None: it is, or it was stopped.
    """

    plan: ReplayPlan
    reason: StopReason
    total: WorkerProgress | None
    is_complete: bool
    error: str | None = None


class Replaying:
    """Replays records of one pipeline.

    Args:
        app: The application of the pipeline. Its tables are only read.
        pipeline: The `KinesisPipeline`.
        clients: Returns the boto3 clients for settings.
    """

    def __init__(
        self,
        app: ApplicationControl,
        pipeline: object,
        clients: Callable[[ConsumerSettings], AwsClients],
    ) -> None:
        self._app = app
        self._pipeline = pipeline
        self._clients = clients
        self._clock = app.clock

    def plan(self, request: ReplayRequest) -> ReplayPlan:
        """Return the replay that the options mean. Writes nothing.

        Raises:
            SettingsError: An option is missing or wrong, or the replay has ended.
            AwsError: The tables cannot be read.
        """
        replay_id = request.replay_id or uuid4().hex[:8]
        name = f"{self._app.name}-replay-{replay_id}"
        now = self._clock.wall()
        found = None if request.replay_id is None else self._recorded(name)
        if found is not None:
            request.check(found, now)
        record = found or request.record(now)
        streams = self._streams(record.only_stream)
        plan = ReplayPlan(replay_id, name, record, streams, found is not None, None)
        sink = self._derived(plan).sink
        if found is None:
            self._refuse_ended(plan, sink)
        return replace(plan, table=getattr(sink, "uri", None))

    def shards(self, plan: ReplayPlan) -> dict[str, int]:
        """Return how many shards of each stream were open at the begin of the range."""
        settings = self._derived(plan).settings
        kinesis = open_kinesis(settings, self._clients(settings), self._clock)
        streams = [
            kinesis.resolve_stream(one, multi_stream=settings.is_multi_stream)
            for one in plan.streams
        ]
        begin = plan.record.begin
        return {one.name: len(kinesis.list_shards(one, "AT_TIMESTAMP", begin)) for one in streams}

    def run(
        self,
        plan: ReplayPlan,
        stop: StopSignal,
        *,
        session_factory: Any = None,
        events: EventSink = ignore_events,
        on_progress: Callable[[WorkerProgress], None] = lambda _: None,
        progress_seconds: float = 10.0,
    ) -> Replayed:
        """Replay the records, and delete the tables of the replay when all have landed.

        Several processes may run the same replay; they share its shards. If another one has ended
        it meanwhile, it is complete, and `total` is None.

        Args:
            plan: The replay.
            stop: Ends the run; it can be continued with the id of the replay.
            session_factory: Creates the Spark session. None: by `spark_config`.
            events: Receives the events of the worker.
            on_progress: Receives the progress.
            progress_seconds: Minimum time between two progress reports.

        Raises:
            ApplicationInUseError: Another process begins a replay of this id.
            KclError: As `KinesisPipeline.build_worker`.
        """
        derived = self._derived(plan)
        try:
            return self._run(
                plan, derived, stop, session_factory, events, on_progress, progress_seconds
            )
        except NotFoundError:
            if not self._has_ended(plan, derived.sink):
                raise
            # The process that ended the replay has deleted its tables.
            return Replayed(plan, StopReason.DRAINED, None, is_complete=True)

    def _run(
        self,
        plan: ReplayPlan,
        derived: ReplayPipeline,
        stop: StopSignal,
        session_factory: Any,
        events: EventSink,
        on_progress: Callable[[WorkerProgress], None],
        progress_seconds: float,
    ) -> Replayed:
        clock = self._clock
        clients = self._clients(derived.settings)
        worker_id = f"replay-{uuid4().hex[:8]}"
        tables = open_tables(derived.settings, clients, clock)
        try:
            derived.ensure_tables(clients=clients, clock=clock, events=events, stop=stop)
            record = self._begin(tables, plan, worker_id)
            if record.complete or self._has_ended(plan, derived.sink):
                return self._end(plan, derived, tables, None)
            self._settle(record, stop)
            worker = derived.build_worker(
                worker_id,
                session_factory=session_factory,
                clients=clients,
                clock=clock,
                events=events,
                stop=stop,
                run_id=f"{worker_id}@{round(clock.wall() * 1000)}",
            )
        except StoppedWhileRetryingError:
            return Replayed(plan, StopReason.STOPPED, None, is_complete=False)
        summary = worker.run(
            stop, mode="drain", on_progress=on_progress, progress_seconds=progress_seconds
        )
        open_end = Replayed(plan, summary.reason, summary.total, False, summary.error)
        if summary.reason is not StopReason.DRAINED:
            return open_end
        if any(is_held(lease) for lease in tables.lease.list_leases().leases):
            return replace(
                open_end,
                error="another process still runs this replay, or was killed; continue it later",
            )
        return self._end(plan, derived, tables, summary.total)

    def _begin(self, tables: Tables, plan: ReplayPlan, worker_id: str) -> ReplayRecord:
        """Record what is replayed, so that a later run continues with the same range."""
        ensure_client_version(tables.coordinator, worker_id, self._clock)
        found = tables.coordinator.read_replay()
        if found is None and not plan.is_continued:
            if tables.coordinator.put_replay(plan.record, replacing=None):
                return plan.record
            found = tables.coordinator.read_replay()
        if found is None or replace(found, complete=False) != replace(plan.record, complete=False):
            raise ApplicationInUseError(
                f"another process begins or ends the replay {plan.replay_id!r} at this moment; "
                "try again"
            )
        return found

    def _settle(self, record: ReplayRecord, stop: StopSignal) -> None:
        """Wait until the last records of the range can be read."""
        left = record.to_millis / 1000 + SETTLE_SECONDS - self._clock.wall()
        if left > 0:
            stop.wait(min(left, SETTLE_SECONDS))

    def _end(
        self,
        plan: ReplayPlan,
        derived: ReplayPipeline,
        tables: Tables,
        total: WorkerProgress | None,
    ) -> Replayed:
        """Note the end where a later run finds it, then delete the tables.

        In this order a run that was killed in between is continued by the deletion, and never
        begins again.
        """
        found = tables.coordinator.read_replay()
        if found is not None and not found.complete:
            tables.coordinator.put_replay(replace(found, complete=True), replacing=found)
        self._note_end(plan, derived.sink)
        settings = derived.settings
        # The coordinator state, which says what the tables are, is the last one
        names = (
            settings.lease_table_name,
            settings.worker_metrics_table_name,
            settings.coordinator_state_table_name,
        )
        delete_tables(self._clients(settings), names)
        return Replayed(plan, StopReason.DRAINED, total, is_complete=True)

    def _refuse_ended(self, plan: ReplayPlan, sink: Any) -> None:
        """Refuse the id of a replay that has ended: its records are in this table already."""
        if self._has_ended(plan, sink):
            raise SettingsError(
                f"the replay {plan.replay_id!r} has ended, and its records are in the table; write "
                "another id to replay records once more"
            )

    def _has_ended(self, plan: ReplayPlan, sink: Any) -> bool:
        """Return whether the table shows that the replay has ended.

        A process that planned the replay before another one ended it finds no tables, and has
        created them again.
        """
        table = position_sink(sink, plan.name)
        return table is not None and table.positions([END_KEY]).shards[END_KEY].ended

    def _note_end(self, plan: ReplayPlan, sink: Any) -> None:
        table = position_sink(sink, plan.name)
        if table is None:
            return
        found = table.positions([END_KEY])
        stored = found.shards[END_KEY]
        if found.table_id is not None and not stored.ended:
            entry = Entry(END_KEY, stored, None, ended=True)
            table.commit(found.table_id, NOTHING_WRITTEN, [entry])

    def _recorded(self, name: str) -> ReplayRecord | None:
        # only the names of the tables matter here
        settings = ConsumerSettings(application_name=name, streams=("-",))
        tables = open_tables(settings, self._clients(settings), self._clock)
        try:
            return tables.coordinator.read_replay()
        except NotFoundError:
            return None

    def _derived(self, plan: ReplayPlan) -> ReplayPipeline:
        return replay_pipeline(self._pipeline, plan.name, plan.record, plan.streams)

    def _streams(self, only: str | None) -> tuple[str, ...]:
        settings = self._app.settings
        names = settings.streams
        if settings.selects_streams:
            record = self._app.coordinator.read_application()
            names = () if record is None else tuple(one.arn for one in record.identity.streams)
        found = tuple(one for one in names if only in (None, one, one.rpartition("/")[2]))
        if not found:
            raise SettingsError(
                f"the application {self._app.name!r} reads no stream {printable(only or '')}"
                if only
                else f"no streams are recorded for the application {self._app.name!r}"
            )
        return found

"""Run one KCL worker: create its modules, start its threads, process batches, and shut down.

The worker is a set of ticks. Each tick is one bounded step: `lease_tick` (renewal, discovery,
metrics), `fetch_tick` (one read of a shard), `lead_tick` (the standby leader) and `process_tick`
(at most one batch). `run` starts a thread for each. The calling thread waits, so that it can end
the worker while a step hangs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import (
    ApplicationPausedError,
    AwsError,
    NotFoundError,
    SinkError,
    TableMismatchError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    HangStep,
    LeaseTask,
    StatusMeasured,
    StreamsDiffer,
    StreamUnavailable,
    TaskFinished,
    WorkerIdShared,
    WorkerStarted,
    WorkerStopped,
)
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leases.application import streams_as_recorded
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.identity_check import check_application
from kcl_pipeline.leases.stored_shards import SinkShards
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.sinks.sink import CheckedSink
from kcl_pipeline.threads import (
    Background,
    CurrentStop,
    Due,
    InFlight,
    Pools,
    StoppedWhileRetryingError,
    attempt,
    retry_transient,
)
from kcl_pipeline.worker.batch_runner import BatchRunner
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import Lifecycle
from kcl_pipeline.worker.dependencies import (
    Mode,
    OpenedApplication,
    WorkerDependencies,
)
from kcl_pipeline.worker.failures import ShardPause, reason_sentence
from kcl_pipeline.worker.leading.coordination import Coordination
from kcl_pipeline.worker.losses import RetentionLosses
from kcl_pipeline.worker.parents import Lineage
from kcl_pipeline.worker.processing import Processing
from kcl_pipeline.worker.ranges import RangeSource
from kcl_pipeline.worker.sources import BatchSource, BufferedSource
from kcl_pipeline.worker.start import (
    DeletedTables,
    open_application,
    record_application,
    record_missing_streams,
)
from kcl_pipeline.worker.status import (
    Lag,
    LagTracker,
    WorkerStats,
    note_read_up_to,
    worker_status,
)
from kcl_pipeline.worker.stopping.drain import DrainWatch
from kcl_pipeline.worker.stopping.leaving import (
    LAST_SECONDS,
    LEAVE_SECONDS,
    ROW_SECONDS,
    Leaving,
)
from kcl_pipeline.worker.streams import LeaseStreams
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker.watchdog import Activity, Watchdog, WatchedWriter
from kcl_pipeline.worker_status import WorkerStatus

JOIN_SECONDS: Final = 0.5
"""How long a stop waits for threads that may hang in a call."""
STOP_SECONDS: Final = 3 * JOIN_SECONDS + LEAVE_SECONDS + ROW_SECONDS + LAST_SECONDS
"""The longest stop, after the processing has ended or was abandoned."""


class Worker:
    """One worker. Call `run` once.

    Args:
        dependencies: Its dependencies.

    Example:
        >>> from kcl_pipeline import StopReason, Worker
        >>> worker: Worker = orders.build_worker("w-1")  # doctest: +SKIP
        >>> summary = worker.run(stop, mode="drain")  # doctest: +SKIP
        >>> assert summary.reason is StopReason.DRAINED  # doctest: +SKIP
    """

    def __init__(self, dependencies: WorkerDependencies) -> None:
        self.worker_id = dependencies.worker_id
        self._activity = Activity(dependencies.clock, _users_steps(dependencies))
        settings, clock = dependencies.settings, dependencies.clock
        self._stop = CurrentStop(clock.signal())
        dependencies = replace(
            dependencies, writer=WatchedWriter(dependencies.writer, self._activity)
        )
        events = dependencies.events
        self._dependencies = dependencies
        self._application = dependencies.application
        self._streams = LeaseStreams(settings)
        self._pools = Pools(
            settings.lease.max_lease_renewal_threads, clock, parallel=dependencies.parallel
        )
        self.leases = HeldLeases(
            dependencies.lease_table,
            self.worker_id,
            settings.lease,
            clock,
            events,
            multi_stream=settings.is_multi_stream,
            verify_run=self._verify_run,
        )
        self.reporter = WorkerMetricsReporter(
            dependencies.worker_table,
            self.worker_id,
            settings.worker,
            clock,
            dependencies.rng,
            dependencies.metric,
            run_id=dependencies.run_id,
            replaces=dependencies.replaces,
            status=self._reported_status,
        )
        self._retrieval = Retrieval(
            settings, dependencies.kinesis, dependencies.fan_out, clock, events, dependencies.spawn
        )
        self.source: BatchSource = (
            BufferedSource(dependencies, self._retrieval, self.leases.held)
            if dependencies.range_jobs is None
            else RangeSource(dependencies.range_jobs, dependencies, self._retrieval, self._stop)
        )
        self._retention = RetentionLosses(dependencies, self._retrieval)
        sink = dependencies.sink
        if isinstance(sink, ProcessorCalls):
            sink.attach(
                self.worker_id,
                self.leases,
                self.source.lag,
                clock,
                events,
                self._stop.is_set,
                parallel=dependencies.parallel,
            )
        self.lifecycle = Lifecycle(
            dependencies,
            self.leases,
            self.source,
            self._make_progress,
            SinkShards(lambda: sink) if sink.stores_positions else None,
            self._streams,
            self._check_application,
            self._pools.map_commits,
            identity=self._retrieval.identity,
        )
        self.watchdog = Watchdog(
            dependencies,
            self.leases,
            self.lifecycle,
            self.source,
            self._activity,
            self._stop,
            sink.running if isinstance(sink, ProcessorCalls) else tuple,
        )
        self._processing = Processing(dependencies, self._activity, self._ending)
        self.stats, self._lag = WorkerStats(dependencies, self.leases), LagTracker(clock)
        self._is_drain = False
        self._drain: DrainWatch | None = None
        self._runner = BatchRunner(
            dependencies,
            self.source,
            self.lifecycle,
            self._activity,
            self.stats,
            self._lag,
            self._stop.is_set,
        )
        lookups = self._pools.map_lookups
        tables = self._deleted_tables()
        self.lease_tick = LeaseLoop(
            dependencies,
            self.leases,
            self.reporter,
            self.watchdog,
            self.source,
            self._pools.in_flight,
            self._stop,
            status=self.status,
            has_committed=lambda: self.stats.batches > 0,
            is_2x=lambda: self.coordination.version.is_2x,
            no_table=tables.note,
        ).tick
        self.coordination = Coordination(dependencies, self.leases, lookups, self._stop, tables)
        self.lead_tick, self.fetch_tick = self.coordination.tick, self.source.fetch
        self._leaving = Leaving(
            dependencies, self.leases, self.reporter, self.lifecycle, self._pools
        )

    def _deleted_tables(self) -> DeletedTables:
        return DeletedTables(self._dependencies, lambda: self._opened(self._stop), self._stop)

    def _make_progress(self, lineage: Lineage) -> ProgressStore:
        dependencies, lease = self._dependencies, self._dependencies.settings.lease
        lag = lease.checkpoint_lag
        return ProgressStore(
            self.leases,
            dependencies.sink,
            lineage,
            dependencies.clock,
            dependencies.events,
            rng=dependencies.rng,
            stop=self._stop,
            map=self._pools.map_commits,
            flush_seconds=lag / 1000 if lag < lease.renewal_interval_millis else None,
        )

    def start_up(self, stop: StopSignal | None = None) -> None:
        """Run the steps before the first lease. Transient errors are retried.

        The first five errors are raised before other workers can see this worker.

        Raises:
            ApplicationPausedError: An operator has paused the application.
            SettingsError: A setting cannot be used.
            IncompatibleTableError: The tables have another layout, other streams or another sink.
            AccessDeniedError: A permission is missing.
            NotFoundError: A stream or table does not exist.
            TableMismatchError: The output cannot be written.
            ThrottledError: A step was throttled for the time of `threads.START_UP`.
            UnavailableError: A service was unavailable for that time.
            StoppedWhileRetryingError: `stop` was set while a failed step waited.
        """
        dependencies, stop = self._dependencies, stop or self._stop

        def retried(what: str, step: Callable[[], object]) -> None:
            retry_transient(
                what,
                step,
                self._dependencies.clock,
                dependencies.rng,
                self._dependencies.events,
                stop,
            )

        application = self._opened(stop)
        for name, error in application.unavailable.items():
            self._dependencies.events(StreamUnavailable(self.worker_id, name, str(error)))
        retried("look at the client version", self.coordination.version.start)
        identity = record_application(application, dependencies, stop)
        self._streams.open(streams_as_recorded(identity, application.streams))
        self._streams.note_record(identity.streams)
        unnamed = application.unnamed(identity)
        if unnamed and not self._dependencies.settings.selects_streams:
            self._dependencies.events(StreamsDiffer(self.worker_id, unnamed))
        self._retrieval.register_consumers(self._streams.opened())
        self._check_sink()
        retried("first worker metrics report", self.reporter.report)
        self.leases.recover(map=self._pools.map_lookups)
        self._dependencies.events(WorkerStarted(self.worker_id))

    def _check_sink(self) -> None:
        """Refuse an output that cannot be written. One that cannot be reached now is tried later.

        Raises:
            TableMismatchError: The output cannot be written.
        """
        if not isinstance(self._dependencies.sink, CheckedSink):
            return
        try:
            self._dependencies.sink.check()
        except TableMismatchError:
            raise
        except SinkError as error:
            self._dependencies.events(AwsTrouble("check of the output", str(error)))

    def _opened(self, stop: StopSignal) -> OpenedApplication:
        """Return the application. It is opened here unless the dependencies contain it."""
        if self._application is None:
            dependencies = self._dependencies
            self._application = open_application(
                dependencies.settings,
                dependencies.kinesis,
                dependencies.lease_table,
                dependencies.worker_table,
                dependencies.coordinator_table,
                sink_address=dependencies.sink_address,
                clock=dependencies.clock,
                rng=dependencies.rng,
                events=dependencies.events,
                stop=stop,
                select=dependencies.select,
            )
        return self._application

    def _check_application(self) -> None:
        application, dependencies = self._opened(self._stop), self._dependencies
        name = self._dependencies.settings.application_name
        recorded = check_application(name, dependencies.coordinator_table, application.identity)
        if recorded.control.pause is not None:
            self.reporter.note_pause()
        current = record_missing_streams(application, recorded, dependencies, self._stop)
        self._streams.note_record(current.streams)

    def run(
        self,
        stop: StopSignal,
        *,
        mode: Mode = "continuous",
        on_progress: Callable[[WorkerStatus], None] | None = None,
        progress_seconds: float = 60.0,
    ) -> WorkerSummary:
        """Process batches until a stop, a drain request, or the end of a drain.

        At the end, also after an error, committed positions are checkpointed, leases are released,
        and the worker's row is deleted. The error is raised afterwards. A worker that is hung ends
        with reason HUNG after `worker.stop_hung_after_millis`, without checkpoints.

        Args:
            stop: Ends the run when it is set.
            mode: `drain` ends the run when all records that the streams had at its start are in
                the table.
            on_progress: Receives the status with the totals of the time since the last call. None:
                nobody does.
            progress_seconds: Minimum time between two progress reports.
        """
        background = Background(self._dependencies.clock, self._dependencies.spawn)
        reason = StopReason.FAILED
        self._stop.signal = stop
        self._is_drain = mode == "drain"

        def process() -> StopReason:
            self._activity.enter(HangStep.LEASES)
            self.start_up(stop)
            background.start("leases", self.lease_tick, is_last=True)
            for number in range(self.source.fetch_threads):
                background.start(f"fetch-{number}", self.fetch_tick)
            background.start("leader", self.lead_tick)
            drain = self.drain_watch() if self._is_drain else None
            return self._loop(background, drain, on_progress, progress_seconds)

        try:
            reason = self._processing.run(process)
        except StoppedWhileRetryingError:
            reason = StopReason.STOPPED
        except ApplicationPausedError:
            reason = StopReason.APPLICATION_PAUSED
        finally:
            self.shut_down(background, reason)
        return self.summary(reason)

    def _loop(
        self,
        background: Background,
        drain: DrainWatch | None,
        on_progress: Callable[[WorkerStatus], None] | None,
        progress_seconds: float,
    ) -> StopReason:
        told = self.status()
        while True:
            background.check()
            ending = self._ending()
            if ending is not None:
                return ending
            if self.reporter.drain_requested:
                is_pause = self.reporter.drains_for_pause
                return StopReason.APPLICATION_PAUSED if is_pause else StopReason.DRAIN_REQUESTED
            if not self.process_tick():
                self.source.wait(self._stop, self._dependencies.idle_seconds)
            if on_progress is not None:
                told = self._report_progress(on_progress, progress_seconds, told)
            if drain is not None and drain.done():
                return self.reason_of_drain()

    def _report_progress(
        self, on_progress: Callable[[WorkerStatus], None], seconds: float, told: WorkerStatus
    ) -> WorkerStatus:
        """Report what was done since `told`, if that is long ago; return the last status told."""
        if self.stats.seconds() - told.totals.seconds < seconds:
            return told
        self._activity.enter(HangStep.REPORTING)
        now = self.status()
        on_progress(now.since(told))
        self._activity.enter(None)
        return now

    def _ending(self) -> StopReason | None:
        """Return why the worker must end, even in the middle of a batch. None: it goes on."""
        if self.reporter.taken is not None:
            return StopReason.ID_TAKEN
        if self.watchdog.ending is not None:
            return self.watchdog.ending.reason
        return StopReason.STOPPED if self._stop.is_set() else None

    def drain_watch(self) -> DrainWatch:
        """Return a watch that reports when all records now in the streams are in the table."""
        self._drain = DrainWatch(
            self._dependencies,
            self._streams.opened(),
            self.lifecycle,
            self.source,
            self.paused,
        )
        return self._drain

    def reason_of_drain(self) -> StopReason:
        """Return the stop reason of a complete drain: FAILED if it did not read every record."""
        return StopReason.FAILED if self.paused() or self._unread else StopReason.DRAINED

    @property
    def _unread(self) -> str | None:
        return None if self._drain is None else self._drain.unread()

    def summary(self, reason: StopReason) -> WorkerSummary:
        """Return the summary of the worker's lifetime."""
        pauses, was_asked = self._runner.pauses, reason is StopReason.DRAIN_REQUESTED
        paused = pauses.at_the_end() if was_asked else pauses.current()
        status = self.status(paused)
        ending = self.watchdog.ending
        if ending is not None and ending.reason is reason:
            return WorkerSummary(self.worker_id, reason, status, ending.sentence)
        if self.reporter.taken is not None:
            taken = StopReason.ID_TAKEN
            return WorkerSummary(self.worker_id, taken, status, self._taken_sentence())
        error = reason_sentence(paused, self._unread) if reason is StopReason.FAILED else None
        elsewhere = {} if self._drain is None else self._drain.elsewhere
        return WorkerSummary(self.worker_id, reason, status, error, elsewhere)

    def _verify_run(self) -> bool:
        return self.reporter.verify_run()

    def _taken_sentence(self) -> str:
        return (
            f"{self.reporter.taken}; the run of this process was {self._dependencies.run_id}. Give "
            "each worker an id of its own, and let no supervisor restart a worker that ended for "
            "this reason (exit code 4)"
        )

    def process_tick(self) -> bool:
        """Update the consumers, complete handoffs, and process at most one batch.

        Returns:
            Whether there was a batch.
        """
        self._activity.enter(HangStep.LEASES)
        self.lifecycle.sync_with_leases()
        self._retention.look(self.lifecycle.consumers)
        self.stats.count(handoffs=self.lifecycle.hand_over())
        self.lifecycle.advance(self._stop)
        self._lag.track([key for key, c in self.lifecycle.consumers.items() if c.is_behind])
        self._activity.enter(HangStep.READING)
        was_batch = self._runner.step()
        self._activity.enter(None)
        return was_batch

    def lag(self) -> Lag:
        """Return the lag of committed data. Any thread may call it."""
        return self._lag.current(self.source.lag())

    def _reported_status(self) -> WorkerStatus:
        """Return the status for the worker metrics row."""
        note_read_up_to(self._dependencies, self.leases, self.source, self.lag())
        return self.status()

    def status(self, paused: Mapping[str, ShardPause] | None = None) -> WorkerStatus:
        """Return the status now. Any thread may call it.

        Args:
            paused: The paused shards. None: those that are paused now.
        """
        return worker_status(
            self._dependencies,
            self.leases,
            self.source,
            self.lifecycle,
            self.stats,
            self.lag(),
            self.paused() if paused is None else paused,
            sink_failures=self._runner.sink_failures,
            unavailable=self.coordination.standby.unavailable,
            hung=self.watchdog.hung,
            stalled=self.watchdog.stalled,
            is_drain=self._is_drain,
        )

    def paused(self) -> dict[str, ShardPause]:
        """Return the shards whose transform fails, by lease key. Any thread may call it."""
        return self._runner.pauses.current()

    def shut_down(self, background: Background, reason: StopReason) -> None:
        """Release leases and lock, delete the worker's row, and stop the threads.

        Leases are renewed until they are released. A thread that hangs is not waited for.
        """
        background.join(JOIN_SECONDS)
        # A report that lands after the row is deleted would write it again
        self._pools.in_flight.settle([LeaseTask.REPORT], JOIN_SECONDS)
        is_abandoned = self._processing.is_abandoned
        if is_abandoned:
            self._stop.set()
        if self.reporter.taken is None:
            self._leaving.leave(abandoned=is_abandoned)
        else:
            other = self.reporter.taken.other_run_id or "unknown"
            self._dependencies.events(WorkerIdShared(self.worker_id, other))
            self._leaving.leave_to_other()
        background.end(JOIN_SECONDS)
        self._pools.shut_down()
        if self._dependencies.range_jobs is not None:
            self._dependencies.range_jobs.close()
        self._dependencies.events(WorkerStopped(self.worker_id, reason))


def _users_steps(dependencies: WorkerDependencies) -> Collection[HangStep]:
    """Return the steps of the processing thread in which code of the user runs."""
    steps = [HangStep.WRITING]
    if dependencies.range_jobs is not None:  # executors read and transform in one job
        steps.append(HangStep.READING)
    if not dependencies.sink.stores_positions:  # the commit calls the function
        steps.append(HangStep.COMMITTING)
    if isinstance(dependencies.sink, ProcessorCalls):  # begun and ended with their leases
        steps.append(HangStep.LEASES)
    return steps


FIRST_DISCOVERY_SECONDS: Final = 1.0
CHANGING_DISCOVERY_SECONDS: Final = 0.5
"""The default interval for a time after a lease was gained or lost. Other leases often follow, and
nobody reads a lease from its handoff until its new owner discovers it.
"""
CHANGING_SECONDS: Final = 30.0
COMING_DISCOVERY_SECONDS: Final = 0.2
"""The same while a worker hands leases over to this one. Nobody reads them in between."""
COMING_SECONDS_PER_LEASE: Final = 0.01
"""At least, so that the rows of many leases are read as often as those of a few."""
LATE_RENEWAL_SECONDS: Final = 0.25
"""Time between two looks whether a call that waits for another of its lease can begin."""
SECOND_REPORT_SECONDS: Final = 2.0
"""Short, because a leader considers a worker alive only after its row has changed."""


@dataclass(slots=True)
class _Sweep:
    """One renewal of all leases: the calls that it has started, and how they ended.

    Attributes:
        began: When it began (monotonic seconds).
        ended: When its last call ended.
        calls: Number of calls.
        renewed: One item for each call that has ended: whether it renewed its lease.
    """

    began: float
    ended: float
    calls: int = 0
    renewed: list[bool] = field(default_factory=list)


class LeaseLoop:
    """Renew, discover and report, each when it is due. One thread calls `tick`.

    The tick makes no call: it submits calls to `calls`, and a later tick collects them. A call that
    hangs delays only itself: renewals and look-ups have a key for each lease, the query of the
    index and the report have one each. A row has at most one call of this loop in flight. A renewal
    or a forced handoff that is due while one is in flight follows it at once: with the next
    interval the lease could expire, and the handoff never begin. What other threads write is
    excluded by `HeldLeases`, which skips a row that another thread writes.

    `is_2x` returns whether the application was rolled back to KCL 2.x: there may be no index to
    discover leases by, and no table to report to, and the leases come from `LeaseTaker` only.
    `no_table` is called when a table is missing.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        reporter: WorkerMetricsReporter,
        watchdog: Watchdog,
        source: BatchSource,
        calls: InFlight,
        stop: StopSignal,
        *,
        status: Callable[[], WorkerStatus],
        has_committed: Callable[[], bool],
        is_2x: Callable[[], bool],
        no_table: Callable[[], None],
    ) -> None:
        self._no_table = no_table
        self._dependencies = dependencies
        self._leases = leases
        self._reporter = reporter
        self._watchdog = watchdog
        self._status = status
        self._has_committed = has_committed
        self._has_told_commit = False
        self._is_2x = is_2x
        self._source = source
        self._calls = calls
        self._sweep: _Sweep | None = None
        self._errors: dict[LeaseTask, str | None] = {LeaseTask.DISCOVERY: "", LeaseTask.REPORT: ""}
        self._late: dict[str, Callable[[], object]] = {}
        """Renewals and forced handoffs that were due while a call for the lease was in flight."""
        self._stop = stop
        clock, settings = dependencies.clock, dependencies.settings
        self._renewal = Due(clock, settings.lease.renewal_interval_millis / 1000)
        self._discovery_seconds = settings.lease_discovery_interval_millis / 1000
        self._is_discovery_set = settings.lease.lease_discovery_interval_millis is not None
        self._discovered_at = -math.inf
        self._capture = Due(
            clock, settings.worker.in_memory_worker_metrics_capture_frequency_millis / 1000
        )
        period = settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._report = Due(clock, period, first_seconds=min(period, SECOND_REPORT_SECONDS))

    def tick(self) -> float:
        """Run the tasks that are due; return the seconds until the next one is due.

        A task that fails does not prevent the others. After a stop only renewals go on.

        Raises:
            Exception: An unexpected error of a call.
        """
        self._calls.collect()
        self._report_sweep(is_over=False)
        is_2x = self._is_2x()
        if self._reporter.taken is not None:  # another process has the leases
            return FIRST_DISCOVERY_SECONDS
        self._late = {key: call for key, call in self._late.items() if not self._start(key, call)}
        if self._renewal.ready():
            self._report_sweep(is_over=True)
            self._late.clear()
            # First, because a lease has one call in flight, and the transfer ends its renewals
            for held in self._leases.overdue_handoffs():
                handoff = partial(self._force_handoff, held)
                if not self._start(held.lease_key, handoff):
                    self._late[held.lease_key] = handoff
            now = self._dependencies.clock.monotonic()
            self._sweep = _Sweep(began=now, ended=now)
            start = partial(self._start_renewal, self._sweep)
            self._sweep.calls = self._leases.renew_all(start=start)
            self._report_sweep(is_over=False)
            self._watchdog.look(None if is_2x else self._errors)
            self._dependencies.events(StatusMeasured(self._dependencies.worker_id, self._status()))
        if self._seconds_until_discovery() <= 0:
            self._discovered_at = self._dependencies.clock.monotonic()
            if not is_2x:
                self._calls.start(LeaseTask.DISCOVERY, self._discover)
        captures = self._capture.ready()
        is_due = self._report.ready() or self._is_first_commit()
        reports = is_due and not is_2x
        # After a stop the row is deleted, and a late report would write it again
        if (captures or reports) and not self._stop.is_set():
            self._calls.start(
                LeaseTask.REPORT, partial(self._measure, captures=captures, reports=reports)
            )
        return min(
            self._renewal.seconds(),
            self._seconds_until_discovery(),
            self._capture.seconds(),
            self._report.seconds(),
            LATE_RENEWAL_SECONDS if self._late else math.inf,
        )

    def _is_first_commit(self) -> bool:
        """Return True once: after the first commit, whose rows Dagster then shows soon."""
        if self._has_told_commit or not self._has_committed():
            return False
        self._has_told_commit = True
        return True

    def _start(self, lease_key: str, call: Callable[[], Any]) -> bool:
        return self._calls.start(("lease", lease_key), call)

    def _start_renewal(self, sweep: _Sweep, held: Held) -> bool:
        """Start a renewal of a sweep. If the call before for its lease goes on, it follows that."""

        def call() -> None:
            is_renewed = self._leases.renew_one(held)
            sweep.ended = self._dependencies.clock.monotonic()
            sweep.renewed.append(is_renewed)

        if self._start(held.lease_key, call):
            return True
        # The sweep does not count it: the call before may never end. A forced handoff comes first.
        self._late.setdefault(held.lease_key, partial(self._leases.renew_one, held))
        return False

    def _report_sweep(self, *, is_over: bool) -> None:
        """Report the last sweep once all of its calls have ended, or `is_over` ends its time."""
        sweep = self._sweep
        if sweep is None:
            return
        is_complete = len(sweep.renewed) == sweep.calls
        if is_complete or is_over:
            self._sweep = None
            millis, renewed = (sweep.ended - sweep.began) * 1000, sum(sweep.renewed)
            worker_id = self._dependencies.worker_id
            self._dependencies.events(
                TaskFinished(worker_id, LeaseTask.RENEWAL, millis, renewed, is_complete)
            )

    def _discover(self) -> None:
        """Query the index; start a look-up for each new lease, so that none waits for another."""
        if self._stop.is_set():  # also one that was due before, and began now
            return

        def discover() -> int:
            unknown, leaving = self._leases.look_up()
            started = [
                self._start(held.lease_key, partial(self._leases.renew_one, held))
                for held in self._leases.unknown_handoffs(leaving)
            ]
            started += [
                self._start(key, partial(self._leases.discover_one, key)) for key in unknown
            ]
            return sum(started)

        self._run(LeaseTask.DISCOVERY, "discovery", discover)

    def _measure(self, *, captures: bool, reports: bool) -> None:
        """Capture and report in one call, because both use the captured values."""
        if captures:
            self._reporter.capture()
        if reports:
            self._run(LeaseTask.REPORT, "worker metrics report", self._report_metrics)

    def _run(self, task: LeaseTask, what: str, step: Callable[[], int]) -> None:
        """Run a task. An `AwsError` is reported as an event, as by `attempt`.

        Args:
            task: The task.
            what: The task in the event of an error.
            step: Runs it; returns the number of leases that it renewed or found.
        """
        began = self._dependencies.clock.monotonic()
        leases = 0
        try:
            leases, self._errors[task] = step(), None
        except AwsError as error:
            self._errors[task] = str(error)
            self._dependencies.events(AwsTrouble(what, str(error)))
            if isinstance(error, NotFoundError):
                self._no_table()
        millis = (self._dependencies.clock.monotonic() - began) * 1000
        succeeded = self._errors[task] is None
        self._dependencies.events(
            TaskFinished(self._dependencies.worker_id, task, millis, leases, succeeded)
        )

    def _seconds_until_discovery(self) -> float:
        """Return the seconds until the next discovery is due, 0 or more.

        It is due more often while no lease is held, after one was gained or lost, and while one is
        handed over to this worker.
        """
        now, seconds = self._dependencies.clock.monotonic(), self._discovery_seconds
        if not self._leases.held():
            seconds = min(seconds, FIRST_DISCOVERY_SECONDS)
        if not self._is_discovery_set and now - self._leases.changed_at < CHANGING_SECONDS:
            seconds = min(seconds, CHANGING_DISCOVERY_SECONDS)
        if not self._is_discovery_set and (coming := self._leases.coming):
            wait = max(COMING_DISCOVERY_SECONDS, COMING_SECONDS_PER_LEASE * coming)
            seconds = min(seconds, wait)
        return max(self._discovered_at + seconds - now, 0.0)

    def _force_handoff(self, held: Held) -> None:
        """Hand the lease over, unless that has happened while this call waited for another one."""
        if held not in self._leases.overdue_handoffs():
            return
        self._source.end(held.lease_key)
        attempt(
            "handoff time-out",
            lambda: self._leases.complete_handoff(held, forced=True),
            self._dependencies.events,
        )

    def _report_metrics(self) -> int:
        self._reporter.report()
        return 0

"""One KCL worker: hold leases, read their shards, process batches, commit, checkpoint, hand off.

The worker is a set of ticks, each one bounded step: `lease_tick` (renewal, discovery, metrics),
`fetch_tick` (one GetRecords), `lead_tick` (the standby leader) and `process_tick` (one batch at
most). `run` puts them on threads; the processing tick stays on the calling thread, because that is
where Spark and the signal handlers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kcl_pipeline.background import Background, Due
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError, ThrottledError, UnavailableError
from kcl_pipeline.events import (
    AwsTrouble,
    WorkerIdShared,
    WorkerStarted,
    WorkerStopped,
)
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.kinesis.ranges import RangeReader
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.application_check import check_application, ensure_application
from kcl_pipeline.leases.held import INCARNATION_BITS, HeldLeases
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.leases.store import serial_map
from kcl_pipeline.leases.worker_status import PausedLease, WorkerStatus, furthest_behind
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.batch_runner import BatchRunner
from kcl_pipeline.worker.commit import Committer
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import Mode, ProgressCallback, WorkerDependencies
from kcl_pipeline.worker.drain import DrainWatch
from kcl_pipeline.worker.failures.pauses import Pause, pauses_sentence
from kcl_pipeline.worker.monitoring.lag import Lag, LagTracker
from kcl_pipeline.worker.monitoring.stalls import StallWatch
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.shards.admission import Admission
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.shards.losses import LossCheck
from kcl_pipeline.worker.shards.parents import ParentCheck
from kcl_pipeline.worker.sources.batch_source import BatchSource
from kcl_pipeline.worker.sources.buffered import BufferedSource
from kcl_pipeline.worker.sources.ranges import RangeSource
from kcl_pipeline.worker.starting import StoppedWhileStartingError, retry_transient
from kcl_pipeline.worker.summary import StopReason, WorkerProgress, WorkerSummary

JOIN_SECONDS: Final = 10.0
LEAVE_SECONDS: Final = 5.0
"""How long a worker that stops waits for leases on their way to it; its own are released before
that.
"""
LEAVE_POLL_SECONDS: Final = 0.1
SHARED_ID_SECONDS: Final = 60.0
"""How often a worker reports that another process uses its id."""
FIRST_DISCOVERY_SECONDS: Final = 1.0
SECOND_REPORT_SECONDS: Final = 2.0
"""A leader that finds a row does not know whether its worker is alive until the row changes."""


class Worker:
    """One worker; `run` it once."""

    def __init__(self, worker_id: str, parts: WorkerDependencies) -> None:
        self.worker_id = worker_id
        self._parts = parts
        self._settings = parts.settings
        self._clock = parts.clock
        self._events = parts.events
        threads = parts.settings.lease.max_lease_renewal_threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="renew")
        # Not the renewals' pool: prepares that wait for a slow table would keep the other leases
        # from being renewed
        self._commit_pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="commit")
        self.leases = HeldLeases(
            parts.lease_table,
            worker_id,
            parts.settings.lease,
            parts.clock,
            parts.events,
            multi_stream=parts.settings.is_multi_stream,
            incarnation=parts.rng.getrandbits(INCARNATION_BITS),
        )
        self.reporter = WorkerMetricsReporter(
            parts.worker_table,
            worker_id,
            parts.settings.worker,
            parts.clock,
            parts.rng,
            parts.metric,
            run_id=parts.run_id,
            status=self._status,
        )
        self._retrieval = Retrieval(
            parts.settings, parts.kinesis, parts.fan_out, parts.clock, parts.events, parts.spawn
        )
        self._streams: dict[str | None, StreamId] = {}
        self.source = self._make_batch_source()
        self._beside = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
            if parts.parallel
            else None
        )
        self._committer = Committer(
            self.leases,
            parts.sink,
            self.source.rewriter,
            parts.clock,
            parts.events,
            worker_id,
            map=self._commit_map,
            beside=self._beside,
            pause=self._pause,
        )
        self.lifecycle = Lifecycle(
            worker_id=worker_id,
            settings=parts.settings,
            streams=self._streams,
            table=parts.lease_table,
            leases=self.leases,
            source=self.source,
            committer=self._committer,
            parents=ParentCheck(
                worker_id,
                parts.settings.shard_sync,
                parts.lease_table,
                self.leases,
                parts.kinesis,
                parts.clock,
                parts.events,
            ),
            losses=LossCheck(
                worker_id,
                parts.settings,
                parts.lease_table,
                parts.kinesis,
                parts.clock,
                parts.events,
            ),
            clock=parts.clock,
            events=parts.events,
            admits=Admission(self._check_application, parts.clock, parts.events).admits,
            map=self._commit_map,
        )
        self.stalls = StallWatch(
            worker_id,
            self.leases,
            self.lifecycle,
            self.source,
            parts.settings.worker.shard_stalled_after_millis / 1000,
            parts.clock,
            parts.events,
        )
        self.stats = WorkerStats(worker_id, parts.clock)
        self._lag = LagTracker(parts.clock)
        self._processor = BatchRunner(
            parts,
            self.worker_id,
            leases=self.leases,
            source=self.source,
            committer=self._committer,
            lifecycle=self.lifecycle,
            stats=self.stats,
            lag=self._lag,
            is_stopped=self._is_stopped,
        )
        self._absent_since: float | None = None
        # Set: nothing new is begun any more. A worker that goes on taking leases while it stops
        # gives them to others later than it could.
        self._stop: StopSignal = parts.clock.signal()
        lease = parts.settings.lease
        self._renewal = Due(parts.clock, lease.renewal_interval_millis / 1000)
        self._discovery = Due(parts.clock, parts.settings.lease_discovery_interval_millis / 1000)
        self._first_discovery = Due(
            parts.clock,
            min(parts.settings.lease_discovery_interval_millis / 1000, FIRST_DISCOVERY_SECONDS),
        )
        self._capture = Due(
            parts.clock,
            parts.settings.worker.in_memory_worker_metrics_capture_frequency_millis / 1000,
        )
        period = parts.settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._report = Due(parts.clock, period, first_seconds=min(period, SECOND_REPORT_SECONDS))
        self._shared_due = Due(parts.clock, SHARED_ID_SECONDS)

    def prepare(self, stop: StopSignal | None = None) -> None:
        """Tables, client version, streams, this worker's row, and leases that already carry its
        name. What is throttled or fails is tried again for a while.

        Raises `SettingsError`, `IncompatibleTableError` (also for an application with other streams
        or another sink), `AccessDeniedError` or `NotFound` before anything is written that a peer
        could see as a worker; `ThrottledError` and `UnavailableError` when that lasts;
        `StoppedWhileStartingError`.
        """
        parts = self._parts
        signal = stop or self._clock.signal()

        def patient(what: str, step: Callable[[], object]) -> None:
            retry_transient(what, step, self._clock, parts.rng, self._events, signal)

        for name in self._settings.streams:
            stream = parts.kinesis.resolve_stream(name, multi_stream=self._settings.is_multi_stream)
            self._streams[stream.serialized if self._settings.is_multi_stream else None] = stream
        for table in (parts.lease_table, parts.worker_table, parts.coordinator_table):
            patient("look at the tables", table.ensure_exists)
        patient(
            "look at the client version",
            lambda: ensure_client_version(parts.coordinator_table, self.worker_id, self._clock),
        )
        patient("look at the identity of the application", self._ensure_application)
        self._retrieval.prepare(self._streams.values())
        patient("first worker metrics report", self.reporter.report)
        self.leases.recover(map=self._map)
        self._events(WorkerStarted(self.worker_id))

    def _ensure_application(self) -> None:
        parts = self._parts
        ensure_application(
            self._settings.application_name,
            parts.coordinator_table,
            parts.lease_table,
            self._identity(),
            lambda: parts.kinesis.list_shards(next(iter(self._streams.values()))),
        )

    def _check_application(self) -> None:
        name = self._settings.application_name
        check_application(name, self._parts.coordinator_table, self._identity())

    def _identity(self) -> ApplicationIdentity:
        return ApplicationIdentity.of(
            self._streams.values(),
            is_multi_stream=self._settings.is_multi_stream,
            sink=self._parts.sink_address,
        )

    def run(
        self,
        stop: StopSignal,
        *,
        mode: Mode = "continuous",
        on_progress: ProgressCallback | None = None,
        progress_seconds: float = 60.0,
    ) -> WorkerSummary:
        """Work until `stop` is set, a drain is asked for, or (mode drain) all that is there now is
        in the table.

        Whatever ends it, also an error (which is raised again): committed work is checkpointed,
        leases are released, the worker's row is deleted.
        """
        background = Background(self._clock, self._parts.spawn)
        reason = StopReason.FAILED
        self._stop = stop
        try:
            self.prepare(stop)
            self._start(background)
            reason = self._loop(
                stop,
                background,
                self.drain_watch() if mode == "drain" else None,
                on_progress,
                progress_seconds,
            )
        except StoppedWhileStartingError:
            reason = StopReason.STOPPED
        finally:
            self.shut_down(background, reason)
        return self.summary(reason)

    def _start(self, background: Background) -> None:
        background.start("leases", self.lease_tick)
        for number in range(self.source.fetch_threads):
            background.start(f"fetch-{number}", self.fetch_tick)
        if self._parts.leader is not None:
            background.start("leader", self.lead_tick)

    def _loop(
        self,
        stop: StopSignal,
        background: Background,
        drain: DrainWatch | None,
        on_progress: ProgressCallback | None,
        progress_seconds: float,
    ) -> StopReason:
        while True:
            background.check()
            if stop.is_set():
                return StopReason.STOPPED
            if self.reporter.drain_requested:
                return StopReason.DRAIN_REQUESTED
            if not self.process_tick():
                self.source.wait(stop, self._parts.idle_seconds)
            if on_progress is not None and self.stats.period_seconds() >= progress_seconds:
                on_progress(self._progress())
            if drain is not None and drain.done():
                return self.reason_of_drain()

    def drain_watch(self) -> DrainWatch:
        """Tells when all that was in the streams at this call is in the table."""
        return DrainWatch(
            self.worker_id,
            self._settings,
            self._parts.lease_table,
            self.lifecycle,
            self.source,
            self.paused,
            self._clock,
            self._events,
        )

    def reason_of_drain(self) -> StopReason:
        """Why a worker stops whose drain is done: what is in a paused shard is not in the table."""
        return StopReason.FAILED if self.paused() else StopReason.DRAINED

    def summary(self, reason: StopReason) -> WorkerSummary:
        """The worker's life."""
        paused = self._processor.pauses.reasons()
        total = self.stats.total(lag=self.lag(), paused=paused)
        error = pauses_sentence(paused) if reason is StopReason.FAILED else None
        return WorkerSummary(reason, total, error)

    def process_tick(self) -> bool:
        """Bring consumers up to date with the leases, hand over, and process one batch at most;
        True when a batch was processed.
        """
        self.lifecycle.sync_with_leases()
        self.stats.handoffs(self.lifecycle.hand_over())
        self.lifecycle.advance(self._stop)
        self._lag.hold([key for key, c in self.lifecycle.consumers.items() if c.is_behind])
        return self._processor.step()

    def _is_stopped(self) -> bool:
        return self._stop.is_set()

    def lag(self) -> Lag:
        """The lag of committed data. May be called by any thread."""
        return self._lag.current(self.source.lag())

    def _status(self) -> WorkerStatus:
        """For this worker's row, from the thread that renews leases."""
        lag, pauses, now = self.lag(), self.paused(), self._clock.monotonic()
        paused = tuple(
            PausedLease(key, pauses[key].reason, now - pauses[key].since) for key in sorted(pauses)
        )
        return WorkerStatus(
            lag.worst_millis,
            len(lag.unknown),
            paused,
            len(paused),
            furthest_behind(lag.millis),
            self.stats.dead_letters,
            *self._processor.sink_failures,
        )

    def paused(self) -> dict[str, Pause]:
        """The shards that pause because their transform fails. May be called by any thread."""
        return self._processor.pauses.current()

    def lease_tick(self) -> float:
        """What is due of renewal, discovery and metrics; returns seconds until something is due.

        One that fails does not hold up the others.
        """
        if self._renewal.ready():
            self._guard("renewal", lambda: self.leases.renew_all(map=self._map))
            self._guard("handoff time-out", self._force_overdue_handoffs)
            self.stalls.look()
        if self._is_discovery_due() and not self._stop.is_set():
            self._guard("discovery", lambda: self.leases.discover(map=self._map))
        if self._capture.ready():
            self.reporter.capture()
        if self._report.ready():
            self._guard("worker metrics report", self._report_metrics)
        discovery = self._discovery if self.leases.held() else self._first_discovery
        return min(
            self._renewal.seconds(),
            discovery.seconds(),
            self._capture.seconds(),
            self._report.seconds(),
        )

    def _report_metrics(self) -> None:
        self.reporter.report()
        other, self.reporter.other_run_id = self.reporter.other_run_id, None
        self.leases.shares_its_id = other is not None
        if other is not None and self._shared_due.ready():
            self._events(WorkerIdShared(self.worker_id, other))

    def _is_discovery_due(self) -> bool:
        """A worker that has no lease at all, as at its start, looks more often."""
        is_due, is_first_due = self._discovery.ready(), self._first_discovery.ready()
        return is_due or (is_first_due and not self.leases.held())

    def _force_overdue_handoffs(self) -> None:
        for held in self.leases.overdue_handoffs():
            self.source.end(held.lease.lease_key)
            self.leases.complete_handoff(held, forced=True)

    def fetch_tick(self) -> float:
        """One GetRecords if one is due and the buffer has room; returns seconds until the next may
        be.
        """
        return self.source.fetch()

    def lead_tick(self) -> float:
        """One leader cycle, once nobody has led for the time of the lock; returns seconds until the
        next.
        """
        leader = self._parts.leader
        interval = (
            min(
                self._settings.lease_assignment_interval_millis,
                self._settings.leader.leader_heartbeat_period_millis,
            )
            / 1000
        )
        if leader is not None and not self._stop.is_set() and self._may_lead():
            self._take(leader.run_once())
        return interval

    def _take(self, report: CycleReport) -> None:
        """What this process's own leader has just assigned to this worker need not wait to be
        discovered.
        """
        mine = [
            lease.lease_key
            for lease in report.leases
            if lease.owner == self.worker_id and not lease.in_handoff
        ]
        if mine and not self._stop.is_set():
            self.leases.discover(mine, map=self._map)

    def _may_lead(self) -> bool:
        """A lock that is absent is taken only after some patience: the sensor, if there is one,
        goes first.
        """
        if self._parts.leader_patience_seconds <= 0:
            return True
        try:
            absent = self._parts.coordinator_table.observe_lock() is None
        except AwsError as error:
            self._events(AwsTrouble("GetItem Leader", str(error)))
            return False
        now = self._clock.monotonic()
        if not absent:
            self._absent_since = None
            return True
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since >= self._parts.leader_patience_seconds

    def shut_down(self, background: Background, reason: StopReason) -> None:
        """Stop the threads, delete the worker's row, checkpoint, release leases and lock. Errors of
        one step do not hold up the next.

        The row goes first: a leader that looks at the tables from then on gives nothing more to
        this worker, the released leases least of all.
        """
        background.join(JOIN_SECONDS)
        self._guard("deregistration", self.reporter.deregister)
        self._guard("release", lambda: self.lifecycle.release_all(last=False))
        if self._parts.leader is not None:
            self._guard("release of the leader lock", self._parts.leader.release)
        self._guard("last discovery", self._give_back_what_still_comes)
        for pool in (self._pool, self._commit_pool, self._beside):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        if self._parts.range_jobs is not None:
            self._parts.range_jobs.close()
        self._events(WorkerStopped(self.worker_id, reason))

    def _give_back_what_still_comes(self) -> None:
        """What carries this worker's name still, or comes to carry it for a short while, would wait
        for its expiry.

        That is a lease whose time here ran out while threads were joined, one that a leader was
        just assigning, or one that its old owner is handing over.
        """
        deadline = self._clock.monotonic() + LEAVE_SECONDS
        while True:
            last = (
                not self._settings.lease.release_leases_on_shutdown
                or self._clock.monotonic() >= deadline
            )
            self.leases.drop_expired()
            self._guard("last discovery", lambda: self.leases.discover(map=self._map))
            self.lifecycle.release_all(last=last)
            # What is not in a handoff is either given back by now, or another process under this
            # name has it: nothing to wait for
            if last or not (self.leases.held() or self._is_something_on_its_way()):
                return
            self._clock.sleep(LEAVE_POLL_SECONDS)

    def _is_something_on_its_way(self) -> bool:
        """Whether a lease is being handed to this worker; also when that cannot be told now."""
        try:
            keys = self._parts.lease_table.lease_keys_of(self.worker_id)
            return any(self._is_on_its_way(key) for key in keys)
        except (ThrottledError, UnavailableError) as error:
            self._events(AwsTrouble("last discovery", str(error)))
            return True

    def _is_on_its_way(self, lease_key: str) -> bool:
        try:
            row = self._parts.lease_table.get(lease_key)
        except ValueError:  # it cannot be read, as discovery has just reported
            return False
        return row is not None and row.in_handoff and row.owner == self.worker_id

    def _progress(self) -> WorkerProgress:
        return self.stats.close_period(
            lag=self.lag(),
            positions=self._positions(),
            stalled=self.stalls.stalled,
            paused=self._processor.pauses.reasons(),
        )

    def _positions(self) -> dict[str, str]:
        return {
            key: str(c.committed)
            for key, c in self.lifecycle.consumers.items()
            if c.committed is not None
        }

    def _make_batch_source(self) -> BatchSource:
        parts = self._parts
        if parts.range_jobs is not None:
            reader = RangeReader(
                parts.kinesis,
                parts.settings.retrieval,
                parts.settings.shard_sync.initial_timestamp,
                parts.clock,
            )
            return RangeSource(
                parts.range_jobs,
                reader,
                parts.writer,
                parts.settings,
                parts.clock,
                parts.rng,
                parts.events,
                self._retrieval.witness,
            )
        prefetcher = Prefetcher(parts.settings.retrieval, parts.clock, parts.rng, parts.events)
        return BufferedSource(
            prefetcher,
            self._reader,
            parts.writer,
            parts.settings.batch,
            parts.settings.retrieval.fetch_threads,
        )

    def _reader(self, consumer: ShardConsumer) -> ShardReader:
        lease = consumer.held.lease
        if consumer.committed is None:
            raise ValueError(f"the lease {lease.lease_key} has no position yet")
        held = len(self.leases.held())
        return self._retrieval.reader(
            consumer.stream,
            lease.lease_key,
            lease.shard_id,
            consumer.committed,
            lease.hash_key_range,
            held_leases=held,
        )

    def _map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._map_on(self._pool, call, items)

    def _pause(self, seconds: float) -> bool:
        """Wait, or less when the worker stops; returns whether it does."""
        return self._stop.wait(seconds)

    def _commit_map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._map_on(self._commit_pool, call, items)

    def _map_on(
        self, pool: ThreadPoolExecutor, call: Callable[[Any], Any], items: Sequence[Any]
    ) -> list[Any]:
        return (
            list(pool.map(call, items))
            if self._parts.parallel and len(items) > 1
            else serial_map(call, items)
        )

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except AwsError as error:
            self._events(AwsTrouble(what, str(error)))

"""One KCL worker: hold leases, read their shards, process batches, commit, checkpoint, hand off.

The worker is a set of ticks, each one bounded step: `lease_tick` (renewal, discovery, metrics), `fetch_tick` (one GetRecords),
`lead_tick` (the stand-by leader) and `process_tick` (one batch at most). `run` puts them on threads; the processing tick stays on the
calling thread, because that is where Spark and the signal handlers are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

from kcl_pipeline.batch import BatchWriter, TransactionalSink
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink, WorkerStarted, WorkerStopped
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.leases.store import serial_map
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.metrics.provider import MetricProvider
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.records.fanout_subscription import FanOutClient
from kcl_pipeline.records.kinesis import KinesisClient
from kcl_pipeline.records.prefetch import Prefetcher
from kcl_pipeline.records.ranges import RangeJobs, RangeReader
from kcl_pipeline.records.reader import ShardReader
from kcl_pipeline.records.retrieval import Retrieval
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.background import Background, Due, Spawn, spawn_thread
from kcl_pipeline.worker.commit import Committer
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.drain import DrainWatch
from kcl_pipeline.worker.figures import Figures
from kcl_pipeline.worker.lifecycle import Lifecycle
from kcl_pipeline.worker.processing import Processor
from kcl_pipeline.worker.ranges import RangeSupply
from kcl_pipeline.worker.starting import StoppedWhileStarting, patiently
from kcl_pipeline.worker.summary import StopReason, WorkerProgress, WorkerSummary
from kcl_pipeline.worker.supply import BufferedSupply, Supply

Mode = Literal["continuous", "drain"]
ProgressCallback = Callable[[WorkerProgress], None]

JOIN_SECONDS: Final = 10.0
LEAVE_SECONDS: Final = 5.0
"""How long a worker that stops waits for leases on their way to it; its own are released before that."""
LEAVE_POLL_SECONDS: Final = 0.1
FIRST_DISCOVERY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker is made of.

    `metric` None reports no CPU; `leader` None: somebody else leads. `spawn` starts the threads, and `parallel` False makes renewals one after
    the other: a simulation sets both. `fan_out` None: shards can only be polled. `range_jobs` None: this process reads the shards itself.
    `idle_seconds`: how long the processing thread waits for data before it looks at its leases again.
    """

    settings: ConsumerSettings
    lease_table: LeaseTable
    worker_table: WorkerMetricsTable
    coordinator_table: CoordinatorStateTable
    kinesis: KinesisClient
    writer: BatchWriter
    sink: TransactionalSink
    clock: Clock
    rng: random.Random
    events: EventSink
    metric: MetricProvider | None = None
    leader: LeaderCycle | None = None
    leader_patience_seconds: float = 0.0
    run_id: str | None = None
    spawn: Spawn = spawn_thread
    parallel: bool = True
    fan_out: FanOutClient | None = None
    range_jobs: RangeJobs | None = None
    idle_seconds: float = 0.05


class Worker:
    """One worker; `run` it once."""

    def __init__(self, worker_id: str, parts: WorkerParts) -> None:
        self.worker_id = worker_id
        self._parts = parts
        self._settings = parts.settings
        self._clock = parts.clock
        self._events = parts.events
        threads = parts.settings.lease.max_lease_renewal_threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="renew")
        # Not the renewals' pool: prepares that wait for a slow table would keep the other leases from being renewed
        self._commit_pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="commit")
        self.leases = HeldLeases(parts.lease_table, worker_id, parts.settings.lease, parts.clock, parts.events)
        self.reporter = WorkerMetricsReporter(parts.worker_table, worker_id, parts.settings.worker, parts.clock, parts.rng, parts.metric, run_id=parts.run_id)
        self._retrieval = Retrieval(parts.settings, parts.kinesis, parts.fan_out, parts.clock, parts.events, parts.spawn)
        self._streams: dict[str | None, StreamId] = {}
        self.supply = self._make_supply()
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") if parts.parallel else None
        self._committer = Committer(
            self.leases, parts.sink, self.supply.rewriter, parts.clock, parts.events, worker_id, map=self._commit_map, beside=self._beside
        )
        self.lifecycle = Lifecycle(
            worker_id=worker_id,
            settings=parts.settings,
            streams=self._streams,
            table=parts.lease_table,
            leases=self.leases,
            supply=self.supply,
            committer=self._committer,
            clock=parts.clock,
            events=parts.events,
            map=self._commit_map,
        )
        self.figures = Figures(worker_id, parts.clock)
        self._processor = Processor(parts, self.worker_id, self.leases, self.supply, self._committer, self.lifecycle, self.figures)
        self._absent_since: float | None = None
        # Set: nothing new is begun any more. A worker that goes on taking leases while it stops gives them to others later than it could.
        self._stop: StopSignal = parts.clock.signal()
        lease = parts.settings.lease
        self._renewal = Due(parts.clock, lease.renewal_interval_millis / 1000)
        self._discovery = Due(parts.clock, parts.settings.lease_discovery_interval_millis / 1000)
        self._first_discovery = Due(parts.clock, min(parts.settings.lease_discovery_interval_millis / 1000, FIRST_DISCOVERY_SECONDS))
        self._capture = Due(parts.clock, parts.settings.worker.in_memory_worker_metrics_capture_frequency_millis / 1000)
        period = parts.settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._report = Due(parts.clock, period, first_seconds=period)

    def prepare(self, stop: StopSignal | None = None) -> None:
        """Tables, client version, streams, this worker's row, and leases that already carry its name. What is throttled or fails is tried again for a while.

        Raises `SettingsError`, `NotACompatibleTable`, `AccessDenied` or `NotFound` before anything is written that a peer could see as a worker;
        `Throttled` and `Unavailable` when that lasts; `StoppedWhileStarting`.
        """
        parts = self._parts
        signal = stop or self._clock.signal()

        def patient(what: str, step: Callable[[], object]) -> None:
            patiently(what, step, self._clock, parts.rng, self._events, signal)

        for name in self._settings.streams:
            stream = parts.kinesis.resolve_stream(name, multi_stream=self._settings.is_multi_stream)
            self._streams[stream.serialized if self._settings.is_multi_stream else None] = stream
        self._retrieval.prepare(self._streams.values())
        for table in (parts.lease_table, parts.worker_table, parts.coordinator_table):
            patient("look at the tables", table.ensure_exists)
        patient("look at the client version", lambda: ensure_client_version(parts.coordinator_table, self.worker_id, self._clock))
        patient("first worker metrics report", self.reporter.report)
        self.leases.recover(map=self._map)
        self._events(WorkerStarted(self.worker_id))

    def run(self, stop: StopSignal, *, mode: Mode = "continuous", on_progress: ProgressCallback | None = None, progress_seconds: float = 60.0) -> WorkerSummary:
        """Work until `stop` is set, a drain is asked for, or (mode drain) all that is there now is in the table.

        Whatever ends it, also an error (which is raised again): committed work is checkpointed, leases are released, the worker's row is deleted.
        """
        background = Background(self._clock, self._parts.spawn)
        reason = StopReason.FAILED
        self._stop = stop
        try:
            self.prepare(stop)
            self._start(background)
            reason = self._loop(stop, background, DrainWatch(self._parts, self, self._clock) if mode == "drain" else None, on_progress, progress_seconds)
        except StoppedWhileStarting:
            reason = StopReason.STOPPED
        finally:
            self.shut_down(background, reason)
        return WorkerSummary(reason, self.figures.total(lag=self.supply.lag(), positions={}))

    def _start(self, background: Background) -> None:
        background.start("leases", self.lease_tick)
        for number in range(self.supply.fetch_threads):
            background.start(f"fetch-{number}", self.fetch_tick)
        if self._parts.leader is not None:
            background.start("leader", self.lead_tick)

    def _loop(
        self, stop: StopSignal, background: Background, drain: DrainWatch | None, on_progress: ProgressCallback | None, progress_seconds: float
    ) -> StopReason:
        while True:
            background.check()
            if stop.is_set():
                return StopReason.STOPPED
            if self.reporter.drain_requested:
                return StopReason.DRAIN_REQUESTED
            if not self.process_tick():
                self.supply.wait(stop, self._parts.idle_seconds)
            if on_progress is not None and self.figures.period_seconds() >= progress_seconds:
                on_progress(self._progress())
            if drain is not None and drain.done():
                return StopReason.DRAINED

    def process_tick(self) -> bool:
        """Bring consumers up to date with the leases, hand over, and process one batch at most; True when a batch was processed."""
        self.lifecycle.sync_with_leases()
        self.figures.handoffs(self.lifecycle.hand_over())
        self.lifecycle.advance(self._stop)
        return self._processor.step()

    def lease_tick(self) -> float:
        """What is due of renewal, discovery and metrics; returns seconds until something is due. One that fails does not hold up the others."""
        if self._renewal.ready():
            self._guard("renewal", lambda: self.leases.renew_all(map=self._map))
            self._guard("handoff time-out", self._force_overdue_handoffs)
        if self._is_discovery_due() and not self._stop.is_set():
            self._guard("discovery", lambda: self.leases.discover(map=self._map))
        if self._capture.ready():
            self.reporter.capture()
        if self._report.ready():
            self._guard("worker metrics report", self.reporter.report)
        discovery = self._discovery if self.leases.held() else self._first_discovery
        return min(self._renewal.seconds(), discovery.seconds(), self._capture.seconds(), self._report.seconds())

    def _is_discovery_due(self) -> bool:
        """A worker that has no lease at all, as at its start, looks more often."""
        is_due, is_first_due = self._discovery.ready(), self._first_discovery.ready()
        return is_due or (is_first_due and not self.leases.held())

    def _force_overdue_handoffs(self) -> None:
        for held in self.leases.overdue_handoffs():
            self.supply.end(held.lease.lease_key)
            self.leases.complete_handoff(held, forced=True)

    def fetch_tick(self) -> float:
        """One GetRecords if one is due and the buffer has room; returns seconds until the next may be."""
        return self.supply.fetch()

    def lead_tick(self) -> float:
        """One leader cycle, once nobody has led for the time of the lock; returns seconds until the next."""
        leader = self._parts.leader
        interval = min(self._settings.lease_assignment_interval_millis, self._settings.leader.leader_heartbeat_period_millis) / 1000
        if leader is not None and not self._stop.is_set() and self._may_lead():
            self._take(leader.run_once())
        return interval

    def _take(self, report: CycleReport) -> None:
        """What this process's own leader has just assigned to this worker need not wait to be discovered."""
        mine = [lease.lease_key for lease in report.leases if lease.owner == self.worker_id and not lease.in_handoff]
        if mine and not self._stop.is_set():
            self.leases.discover(mine, map=self._map)

    def _may_lead(self) -> bool:
        """A lock that is absent is taken only after some patience: the sensor, if there is one, goes first."""
        if self._parts.leader_patience_seconds <= 0:
            return True
        try:
            absent = self._parts.coordinator_table.read_lock() is None
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
        """Stop the threads, delete the worker's row, checkpoint, release leases and lock. Errors of one step do not hold up the next.

        The row goes first: a leader that looks at the tables from then on gives nothing more to this worker, the released leases least of all.
        """
        background.join(JOIN_SECONDS)
        self._guard("deregistration", self.reporter.deregister)
        self._guard("release", self.lifecycle.release_all)
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
        """What carries this worker's name still, or comes to carry it for a short while, would wait for its expiry.

        That is a lease whose time here ran out while threads were joined, one that a leader was just assigning, or one that its old owner is handing over.
        """
        deadline = self._clock.monotonic() + LEAVE_SECONDS
        while True:
            self.leases.drop_expired()
            self.leases.discover(map=self._map)
            self.lifecycle.release_all()
            if not self._settings.lease.release_leases_on_shutdown or self._clock.monotonic() >= deadline:
                return
            # What is not in a handoff is either given back by now, or another process under this name has it: nothing to wait for
            on_its_way = any(self._is_on_its_way(key) for key in self._parts.lease_table.lease_keys_of(self.worker_id))
            if not on_its_way and not self.leases.held():
                return
            self._clock.sleep(LEAVE_POLL_SECONDS)

    def _is_on_its_way(self, lease_key: str) -> bool:
        try:
            row = self._parts.lease_table.get(lease_key)
        except ValueError:  # it cannot be read, as discovery has just reported
            return False
        return row is not None and row.in_handoff and row.owner == self.worker_id

    def _progress(self) -> WorkerProgress:
        return self.figures.close_period(lag=self.supply.lag(), positions=self._positions())

    def _positions(self) -> dict[str, str]:
        return {key: str(c.committed) for key, c in self.lifecycle.consumers.items() if c.committed is not None}

    def _make_supply(self) -> Supply:
        parts = self._parts
        if parts.range_jobs is not None:
            reader = RangeReader(parts.kinesis, parts.settings.retrieval, parts.settings.shard_sync.initial_timestamp, parts.clock)
            return RangeSupply(parts.range_jobs, reader, parts.writer, parts.settings, parts.clock, parts.rng, parts.events)
        prefetcher = Prefetcher(parts.settings.retrieval, parts.clock, parts.rng, parts.events)
        return BufferedSupply(prefetcher, self._reader, parts.writer, parts.settings.batch, parts.settings.retrieval.fetch_threads)

    def _reader(self, consumer: ShardConsumer) -> ShardReader:
        lease = consumer.held.lease
        if consumer.committed is None:
            raise ValueError(f"the lease {lease.lease_key} has no position yet")
        held = len(self.leases.held())
        return self._retrieval.reader(consumer.stream, lease.lease_key, lease.shard_id, consumer.committed, lease.hash_key_range, held_leases=held)

    def _map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._map_on(self._pool, call, items)

    def _commit_map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._map_on(self._commit_pool, call, items)

    def _map_on(self, pool: ThreadPoolExecutor, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return list(pool.map(call, items)) if self._parts.parallel and len(items) > 1 else serial_map(call, items)

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except AwsError as error:
            self._events(AwsTrouble(what, str(error)))

"""The simulated world: one Kinesis, three tables, one sink table, a producer, and hosts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from kcl_pipeline.batch import BatchWriter
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ApplicationPausedError, AwsError, OtherApplicationError
from kcl_pipeline.events import (
    AwsTrouble,
    BatchCommitted,
    Event,
    LeaderElected,
    LeaseLost,
    LossReason,
    Measurement,
    PlanMade,
    RecordsLost,
    StreamUnavailable,
    WorkerStarted,
)
from kcl_pipeline.kinesis.ranges import RangeReader
from kcl_pipeline.testing.row_store import MemoryStore
from kcl_pipeline.testing.sink import MemoryBatchWriter
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import Mode, WorkerDependencies
from kcl_pipeline.worker.summary import StopReason
from kcl_pipeline.worker.worker import Worker
from verification.simulation.checks.drains import DrainCheck
from verification.simulation.checks.leader import LockWatch, WatchedLeader
from verification.simulation.checks.leases import Role
from verification.simulation.checks.sink import Checks
from verification.simulation.checks.stillness import StillnessWatch
from verification.simulation.environment.calls import Calls, Weather
from verification.simulation.environment.hooks import after_hook, before_hook
from verification.simulation.environment.kinesis import SimulatedKinesis
from verification.simulation.environment.machines import (
    Machine,
    SimulatedCpu,
    SimulatedHost,
    is_drawn,
    is_expected,
)
from verification.simulation.environment.range_jobs import InlineRangeJobs
from verification.simulation.environment.scheduler import Host, Scheduler, SimulatedClock
from verification.simulation.environment.sinks import (
    CheckedTable,
    NotedSink,
    StoreFunction,
    stored_shards,
)
from verification.simulation.environment.streams import Streams
from verification.simulation.environment.traffic import IS_BROKEN, Producer, transform
from verification.simulation.incidents.choices import RARE_SITES
from verification.simulation.scenario import Scenario, settings

QUIET_EVENTS = (BatchCommitted, AwsTrouble, PlanMade, Measurement)
TRANSFORM_SECONDS = 0.01
SLOW_TRANSFORM_SECONDS = 3.0
JOBS = 0.3
_LAST_CHECKPOINT = "last checkpoint of "


@dataclass
class World:
    """All objects that a seed controls.

    Attributes:
        lines: The timeline: (virtual seconds, text).
        configured: The streams in the settings of processes that start from now on.
        unavailable: ARNs of streams that were reported as unavailable.
        returning: Deleted streams that are created again, and with how many shards.
        seeks: Number of seeks that run.
    """

    seed: int
    scenario: Scenario
    scheduler: Scheduler = field(init=False)
    machines: dict[str, Machine] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slow_until: float = 0.0
    broken_until: float = 0.0
    unreadable: set[str] = field(default_factory=set)
    unavailable: set[str] = field(default_factory=set)
    returning: dict[str, int] = field(default_factory=dict)
    seeks: int = 0
    index_lag_seconds: float = 0.0
    scan_lag_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.seed)
        self.rng = random.Random(self.seed * 2 + 1)
        self.ground = Host("ground", self.scheduler)
        clock = SimulatedClock(self.ground)
        steered, call = self.scenario.steered, self.scenario.steered_call
        self.weather = Weather(
            random.Random(self.seed * 2 + 2),
            note=self.note,
            steered=steered,
            steered_call=call,
            rare_sites=RARE_SITES,
        )
        self.configured = self.scenario.streams
        self._page_rows = self.scenario.scan_page_rows
        self._stores: list[MemoryStore] = []
        self.streams = Streams(clock, is_multi=len(self.configured) > 1)
        self.leases = InMemoryLeaseTable(clock=clock, exists=False)
        self.workers = InMemoryWorkerMetricsTable(clock=clock, exists=False)
        self.coordinator = InMemoryCoordinatorStateTable(clock=clock, exists=False)
        self.checks = Checks(self.leases, self.streams, self.scenario, lambda: self.scheduler.now)
        self.lock_watch = LockWatch(self.coordinator, lambda: self.scheduler.now)
        self.sink_table = CheckedTable(self.checks)
        self.stillness = StillnessWatch(self)
        rng, checks = random.Random(f"{self.seed}/producer"), self.checks
        self.producer = Producer(
            self.streams, checks.ledger, rng, self.scenario.aggregates, checks.published
        )

    def small_pages(self, rows: int) -> None:
        """Let scans have pages of `rows` rows from now on."""
        self._page_rows = rows
        for store in self._stores:
            store.scan_page_rows = rows

    def return_stream(self, ref: str) -> None:
        """Create a deleted stream again, unless this was done before."""
        shards = self.returning.pop(ref, None)
        if shards is not None:
            self.note(f"creates the stream {self.streams.create(ref, shards).label}")

    def note(self, text: str) -> None:
        """Add a line to the timeline."""
        self.lines.append((self.scheduler.now, text))

    def start(
        self,
        name: str,
        *,
        strategy: str,
        is_worker: bool,
        worker_id: str | None = None,
        mode: Mode = "continuous",
        quirky: bool = False,
        streams: tuple[str, ...] | None = None,
    ) -> Machine:
        """Start a host with a worker, or with the leader that represents the sensor."""
        host = SimulatedHost(
            f"{name}#{len(self.lines)}",
            self.scheduler,
            skew_seconds=self.rng.uniform(-300, 300),
            monotonic_base=self.rng.uniform(0, 1e6),
        )
        host.crashing = partial(self.checks.excuse_worker, worker_id or name)
        # Only a transactional sink accepts files that executors wrote
        in_jobs = (
            is_worker and self.scenario.exactly_once and is_drawn(self.seed, name, "jobs", JOBS)
        )
        machine = Machine(
            name,
            host,
            SimulatedClock(host).signal(),
            strategy,
            is_worker,
            worker_id or name,
            mode,
            quirky,
            in_jobs,
            streams,
            self.configured,
        )
        self.machines[name] = machine
        host.spawn("main", partial(self._work if is_worker else self._lead, machine))
        traits = "".join(
            f", {trait}" for trait, has in (("quirky", quirky), ("fetches in jobs", in_jobs)) if has
        )
        kind = (
            f" as worker {machine.worker_id}, {mode}, {strategy}{traits}"
            if is_worker
            else f" as leader, {strategy}"
        )
        self.note(f"{host.name} starts{kind}")
        return machine

    def workers_at_work(self) -> list[Machine]:
        """The workers that should hold leases: running, and not requested to stop."""
        return [
            m
            for m in self.machines.values()
            if m.is_worker and not m.host.crashed and not m.stop.is_set() and not m.streams
        ]

    def _work(self, machine: Machine) -> None:
        """Run a worker; restart it after a failure or a pause, as a supervisor would."""
        host = machine.host
        clock = SimulatedClock(host)
        for attempt in range(200):
            try:
                drain, parts = DrainCheck(self.checks, machine), self._parts(machine, clock)
                summary = Worker(parts).run(machine.stop, mode=machine.mode)
                self.failures += drain.failures(summary)
                self.note(f"{host.name} has ended: {summary.reason}")
                if summary.reason is not StopReason.APPLICATION_PAUSED or machine.stop.is_set():
                    machine.stop.set()
                    return
            except OtherApplicationError as error:
                self.note(f"{host.name} is refused: {error}")
                if machine.streams is None:
                    self.failures.append(f"{host.name} is refused: {error}")
                machine.stop.set()
                return
            except ApplicationPausedError as error:
                self.note(f"{host.name} waits: {error}")
            except Exception as error:  # noqa: BLE001 (the checks decide whether it may fail so)
                self.checks.excuse_worker(machine.worker_id)
                self.note(f"{host.name} failed: {type(error).__name__}: {error}")
                if not is_expected(error):
                    self.failures.append(f"{host.name} failed: {type(error).__name__}: {error}")
                    return
            clock.sleep(0.5 + 0.1 * min(attempt, 10))

    def _lead(self, machine: Machine) -> None:
        leader = self._leader(
            machine,
            "dagster/sensor" if machine.streams is None else f"dagster/{machine.name}",
            Calls(machine.host, self.weather),
            SimulatedClock(machine.host),
            resume_own_name=True,
        )
        while not machine.stop.wait(0.8 + 0.4 * self.rng.random()):
            leader.run_once(5.0)
        try:
            leader.release()
        except AwsError as error:
            self.note(f"{machine.host.name} could not release the lock: {error}")
        self.note(f"{machine.host.name} has ended")

    def _parts(self, machine: Machine, clock: SimulatedClock) -> WorkerDependencies:
        calls = Calls(machine.host, self.weather)
        leases, workers, coordinator = self.tables(machine, calls, "worker")
        faults = lambda op, _keys: calls.sink_fault(f"sink.{op}")  # noqa: E731 (small)
        chosen = self.settings_of(machine)
        kinesis = SimulatedKinesis(self.streams, calls)
        writer: BatchWriter = MemoryBatchWriter(self.sink_table, self._transform_on(machine.host))
        table, latency, sink = self.sink_table, calls.latency(), None
        if not self.scenario.exactly_once:
            writer = sink = StoreFunction(
                table,
                machine.worker_id,
                writer,
                clock=clock,
                faults=faults,
                latency_seconds=latency,
            )
        reader = RangeReader(kinesis, chosen.retrieval, chosen.shard_sync.initial_timestamp, clock)
        return WorkerDependencies(
            worker_id=machine.worker_id,
            settings=chosen,
            lease_table=leases,
            worker_table=workers,
            coordinator_table=coordinator,
            kinesis=kinesis,
            writer=writer,
            range_jobs=InlineRangeJobs(reader, writer) if machine.fetches_in_jobs else None,
            sink=sink or NotedSink(table, clock=clock, faults=faults, latency_seconds=latency),
            clock=clock,
            rng=random.Random(f"{self.seed}/{machine.host.name}"),
            events=self._events_of(machine),
            metric=SimulatedCpu(machine) if self.scenario.reports_cpu else None,
            leader=self._leader(machine, machine.worker_id, calls, clock),
            leader_patience_seconds=2.0,
            run_id=machine.host.name,
            spawn=machine.host.spawn,
            parallel=False,
            idle_seconds=0.25,
            sink_address=self.scenario.sink_address,
        )

    def _leader(
        self,
        machine: Machine,
        owner: str,
        calls: Calls,
        clock: SimulatedClock,
        *,
        resume_own_name: bool = False,
    ) -> WatchedLeader:
        leases, workers, coordinator = self.tables(machine, calls, "leader")
        machine.leaders += 1
        # A process that starts again on a host must not draw the lock versions of the one before.
        process = "" if machine.leaders == 1 else f"/{machine.leaders}"
        return WatchedLeader(
            self.settings_of(machine),
            leases,
            workers,
            coordinator,
            SimulatedKinesis(self.streams, calls),
            clock,
            self._events_of(machine),
            owner,
            resume_own_name=resume_own_name,
            rng=random.Random(f"{self.seed}/{machine.host.name}/leader{process}"),
            spawn=machine.host.spawn,
            stored=stored_shards(self.sink_table, clock, calls),
        )

    def settings_of(self, machine: Machine) -> ConsumerSettings:
        """The settings of the process on a machine."""
        streams = machine.streams or machine.configured
        scenario = replace(self.scenario, streams=streams)
        return settings(scenario, machine.strategy, quirky=machine.quirky)

    def tables(
        self, machine: Machine, calls: Calls, role: Role
    ) -> tuple[InMemoryLeaseTable, InMemoryWorkerMetricsTable, InMemoryCoordinatorStateTable]:
        """The three tables as a machine sees them in a role; the checks see its writes."""
        after_lease_call, after_call = after_hook(calls, "leases"), after_hook(calls, "coordinator")

        def lease_applied(operation: str, key: str) -> None:
            if operation in ("PutItem", "UpdateItem", "DeleteItem", "TransactWriteItems"):
                for written in key.split(","):
                    self.checks.row_written(written, role, machine.worker_id)

        def after_lease(operation: str, key: str) -> None:
            lease_applied(operation, key)
            after_lease_call(operation, key)

        def lock_applied(operation: str, _key: str) -> None:
            if operation != "GetItem":
                self.lock_watch.look()

        def after_lock(operation: str, key: str) -> None:
            lock_applied(operation, key)
            after_call(operation, key)

        leases = self.leases.view(
            before_call=before_hook(calls, "leases", lease_applied), after_call=after_lease
        )
        leases.store.index_lag_seconds = lambda: self.index_lag_seconds
        leases.store.scan_lag_seconds = lambda: self.scan_lag_seconds
        workers = self.workers.view(
            before_call=before_hook(calls, "workers"), after_call=after_hook(calls, "workers")
        )
        coordinator = self.coordinator.view(
            before_call=before_hook(calls, "coordinator", lock_applied), after_call=after_lock
        )
        for store in (leases.store, workers.store):
            store.scan_page_rows = self._page_rows
            self._stores.append(store)
        return leases, workers, coordinator

    def _events_of(self, machine: Machine) -> Callable[[Event], None]:
        name = machine.host.name

        def take(event: Event) -> None:
            match event:
                case LeaseLost():
                    self.checks.excuse(event.lease_key)
                case RecordsLost(reason=LossReason.SHARD_NOT_LISTED):
                    self.checks.not_listed(event.lease_key)
                case AwsTrouble() if event.operation.startswith(_LAST_CHECKPOINT):
                    self.checks.excuse(event.operation.removeprefix(_LAST_CHECKPOINT))
                case AwsTrouble(operation="commit"):
                    self.checks.excuse_worker(machine.worker_id)
                case StreamUnavailable():
                    self.unavailable.add(self.streams.arn_of(event.stream))
                case WorkerStarted() | LeaderElected() if machine.streams is not None:
                    self.failures.append(f"{name} reads other streams and is not refused: {event}")
                case _:
                    pass
            self.stillness.take(machine, event)
            if not isinstance(event, QUIET_EVENTS):
                self.note(f"{name}: {event}")

        return take

    def _transform_on(self, host: Host) -> Callable[[pa.Table], pa.Table]:
        def run(records: pa.Table) -> pa.Table:
            self.scheduler.pause(
                SLOW_TRANSFORM_SECONDS
                if self.scheduler.now < self.slow_until
                else TRANSFORM_SECONDS
            )
            host.check()
            if self.scheduler.now < self.broken_until:
                raise ValueError(IS_BROKEN)
            return transform(self.checks.lease_of, records, hands_back=self.scenario.hands_back)

        return run

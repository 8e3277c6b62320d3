"""The simulated world: one Kinesis, three tables, one sink table, a producer, and hosts that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, SinkError
from kcl_pipeline.events import AwsTrouble, BatchCommitted, Event, PlanMade
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.memory import InMemoryCoordinatorStateTable, InMemoryLeaseTable, InMemoryWorkerMetricsTable
from kcl_pipeline.testing.kinesis_model import KinesisModel
from kcl_pipeline.testing.scheduler import Host, Scheduler, SimulatedClock
from kcl_pipeline.testing.simulation.calls import Calls, Weather
from kcl_pipeline.testing.simulation.checks import EVENT_SCHEMA, POISON, CheckedTable, Checks
from kcl_pipeline.testing.simulation.kinesis import SimulatedKinesis
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter
from kcl_pipeline.worker.worker import Worker, WorkerParts

STREAM = "events"
KEYS = 12
QUIET_EVENTS = (BatchCommitted, AwsTrouble, PlanMade)


def settings(strategy: str, *, failed_records: str = "dead_letter") -> ConsumerSettings:
    """Short times, so that a storm of half a minute holds many failovers."""
    return ConsumerSettings.model_validate(
        {
            "application_name": "simulated",
            "streams": (STREAM,),
            "lease": {"failover_time_millis": 2_000, "lease_discovery_interval_millis": 500, "graceful_lease_handoff_timeout_millis": 2_000},
            "assignment": {"lease_assignment_interval_millis": 1_000, "lease_assignment_strategy": strategy},
            "leader": {"leader_lease_duration_millis": 2_500, "leader_heartbeat_period_millis": 800},
            "worker": {
                "worker_metrics_reporter_freq_in_millis": 1_000,
                "in_memory_worker_metrics_capture_frequency_millis": 1_000,
                "parent_shard_poll_interval_millis": 500,
                "task_backoff_time_millis": 200,
            },
            "shard_sync": {
                "completed_lease_cleanup_interval_millis": 1_000,
                "garbage_lease_cleanup_interval_millis": 3_000,
                "leases_recovery_auditor_execution_frequency_millis": 1_000,
                "list_shards_backoff_time_millis": 50,
            },
            "retrieval": {"fetch_threads": 1, "idle_time_between_reads_in_millis": 300, "max_records": 50},
            "batch": {"min_batch_interval_millis": 200, "failed_records": failed_records},
        }
    )


@dataclass(eq=False)
class Machine:
    """A host with the process that runs on it. `stop` asks it to end in good order."""

    name: str
    host: Host
    stop: StopSignal
    strategy: str
    is_worker: bool
    worker_id: str


@dataclass
class World:
    """Everything that a seed decides about. `lines` is the timeline: (virtual seconds, text)."""

    seed: int
    scheduler: Scheduler = field(init=False)
    machines: dict[str, Machine] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slow_until: float = 0.0
    index_lag_seconds: float = 0.0
    scan_lag_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.seed)
        self.rng = random.Random(self.seed * 2 + 1)
        self.ground = Host("ground", self.scheduler)
        clock = SimulatedClock(self.ground)
        self.weather = Weather(random.Random(self.seed * 2 + 2), note=self.note)
        self.model = KinesisModel(clock=clock)
        self.leases = InMemoryLeaseTable(clock=clock, exists=False)
        self.workers = InMemoryWorkerMetricsTable(clock=clock, exists=False)
        self.coordinator = InMemoryCoordinatorStateTable(clock=clock, exists=False)
        self.checks = Checks(self.leases)
        self.sink_table = CheckedTable()
        self.sink_table.checks = self.checks

    def note(self, text: str) -> None:
        """Add a line to the timeline."""
        self.lines.append((self.scheduler.now, text))

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def start(self, name: str, *, strategy: str, is_worker: bool, worker_id: str | None = None) -> Machine:
        """Boot a host with a worker, or with the leader that stands for the sensor."""
        host = Host(f"{name}#{len(self.lines)}", self.scheduler, skew_seconds=self.rng.uniform(-300, 300), monotonic_base=self.rng.uniform(0, 1e6))
        machine = Machine(name, host, SimulatedClock(host).signal(), strategy, is_worker, worker_id or name)
        self.machines[name] = machine
        target = (lambda: self._work(machine, worker_id or name)) if is_worker else (lambda: self._lead(machine))
        host.spawn("main", target)
        self.note(f"{host.name} starts" + (f" as worker {worker_id or name}" if is_worker else " as leader"))
        return machine

    def _work(self, machine: Machine, worker_id: str) -> None:
        """Run a worker; one that fails is started again, as a supervisor would."""
        host = machine.host
        clock = SimulatedClock(host)
        for attempt in range(200):
            try:
                Worker(worker_id, self._parts(machine, worker_id, clock)).run(machine.stop)
                self.note(f"{host.name} has ended")
                return
            except Exception as error:  # noqa: BLE001 (a worker may fail visibly; whether it may is for the checks)
                self.note(f"{host.name} failed: {type(error).__name__}: {error}")
                if not _expected(error):
                    self.failures.append(f"{host.name} failed: {type(error).__name__}: {error}")
                    return
            clock.sleep(0.5 + 0.1 * min(attempt, 10))

    def _lead(self, machine: Machine) -> None:
        clock = SimulatedClock(machine.host)
        leader = self._leader(machine, "dagster/sensor", Calls(machine.host, self.weather), clock, resume_own_name=True)
        while not machine.stop.wait(0.8 + 0.4 * self.rng.random()):
            leader.run_once(5.0)

    def _parts(self, machine: Machine, worker_id: str, clock: SimulatedClock) -> WorkerParts:
        calls = Calls(machine.host, self.weather)
        leases, workers, coordinator = self._tables(calls)
        sink = InMemorySink(self.sink_table, clock=clock, latency_seconds=calls.latency(), faults=lambda op, _keys: calls.sink_fault(f"sink.{op}"))
        return WorkerParts(
            settings=settings(machine.strategy),
            lease_table=leases,
            worker_table=workers,
            coordinator_table=coordinator,
            kinesis=SimulatedKinesis(self.model, calls),
            writer=MemoryBatchWriter(self.sink_table, self._transform_on(machine.host)),
            sink=_NotedSink(sink, self.checks),
            clock=clock,
            rng=random.Random(f"{self.seed}/{machine.host.name}"),
            events=self._events_of(machine.host),
            leader=self._leader(machine, worker_id, calls, clock),
            leader_patience_seconds=2.0,
            spawn=machine.host.spawn,
            parallel=False,
            idle_seconds=0.25,
        )

    def _leader(self, machine: Machine, owner: str, calls: Calls, clock: SimulatedClock, *, resume_own_name: bool = False) -> LeaderCycle:
        leases, workers, coordinator = self._tables(calls)
        return LeaderCycle(
            settings(machine.strategy),
            leases,
            workers,
            coordinator,
            SimulatedKinesis(self.model, calls),
            clock,
            self._events_of(machine.host),
            owner,
            resume_own_name=resume_own_name,
            rng=random.Random(f"{self.seed}/{machine.host.name}/leader"),
        )

    def _tables(self, calls: Calls) -> tuple[InMemoryLeaseTable, InMemoryWorkerMetricsTable, InMemoryCoordinatorStateTable]:
        def after_lease(operation: str, key: str) -> None:
            if operation in ("PutItem", "UpdateItem", "DeleteItem"):
                self.checks.row_written(key)
            _after(calls, "leases")(operation, key)

        leases = self.leases.view(before_call=_before(calls, "leases"), after_call=after_lease)
        leases.store.index_lag_seconds = lambda: self.index_lag_seconds
        leases.store.scan_lag_seconds = lambda: self.scan_lag_seconds
        workers = self.workers.view(before_call=_before(calls, "workers"), after_call=_after(calls, "workers"))
        coordinator = self.coordinator.view(before_call=_before(calls, "coordinator"), after_call=_after(calls, "coordinator"))
        return leases, workers, coordinator

    def _events_of(self, host: Host) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            if not isinstance(event, QUIET_EVENTS):
                self.note(f"{host.name}: {event}")

        return take

    def _transform_on(self, host: Host) -> Callable[[pa.Table], pa.Table]:
        def transform(records: pa.Table) -> pa.Table:
            wait = 3.0 if self.scheduler.now < self.slow_until else 0.01
            self.scheduler.pause(wait)
            host.check()
            return _events(records)

        return transform

    # -- traffic -------------------------------------------------------------------------------------------------------

    def publish(self, count: int, *, poison: bool = False) -> None:
        """Put records, each acknowledged; the order per key is the order of the calls."""
        for _ in range(count):
            key = f"k{self.rng.randrange(KEYS)}"
            number = self.checks.ledger.numbers[key]
            self.checks.ledger.numbers[key] += 1
            one = f"{POISON if poison else 'event'}-{key}-{number}"
            self.model.call("PutRecord", StreamName=STREAM, PartitionKey=key, Data=f"{one}|{key}|{number}".encode())
            self.checks.ledger.ids.add(one)
            if poison:
                self.checks.ledger.poison.add(one)


class _NotedSink(InMemorySink):
    """The in-memory sink, whose dead letters are seen by the checks."""

    def __init__(self, inner: InMemorySink, checks: Checks) -> None:
        self.__dict__.update(inner.__dict__)
        self._checks = checks

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `TransactionalSink.write_dead_letters`."""
        super().write_dead_letters(records)
        self._checks.dead_lettered(records)


def _events(records: pa.Table) -> pa.Table:
    parts = [data.decode().split("|") for data in records["data"].to_pylist()]
    if any(one.startswith(POISON) for one, _, _ in parts):
        raise ValueError("a record is poison")
    columns = {
        "id": [one for one, _, _ in parts],
        "key": [key for _, key, _ in parts],
        "number": [int(number) for _, _, number in parts],
        "lease_key": records["shard_id"].to_pylist(),
        "sequence_number": records["sequence_number"].to_pylist(),
    }
    return pa.table(columns, schema=EVENT_SCHEMA)


def _before(calls: Calls, table: str) -> Callable[[str, str], None]:
    def hook(operation: str, _key: str) -> None:
        if operation != "DescribeTable":
            calls.before(f"{table}.{operation}")

    return hook


def _after(calls: Calls, table: str) -> Callable[[str, str], None]:
    def hook(operation: str, _key: str) -> None:
        if operation != "DescribeTable":
            calls.after(f"{table}.{operation}")

    return hook


def _expected(error: Exception) -> bool:
    """Errors with which a worker may end under faults: AWS or the sink did not answer for long enough."""
    return isinstance(error, AwsError | SinkError)

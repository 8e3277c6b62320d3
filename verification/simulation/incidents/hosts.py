"""Incidents of hosts: crashes, pauses, starts, stops, partitions and shared worker ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from kcl_pipeline.errors import AwsError
from kcl_pipeline.leader.preview import preview
from verification.simulation.environment.calls import LOCK_WRITES, Calls
from verification.simulation.environment.kinesis import SimulatedKinesis
from verification.simulation.environment.machines import Machine
from verification.simulation.environment.scheduler import SimulatedClock
from verification.simulation.world import World

STRATEGIES: Final = ("balanced", "kcl_variance", "lease_count_based")
SENSOR: Final = "sensor"
FOREIGN_STREAM: Final = "foreign"
FOREIGN_WORKERS: Final = 0.7
FOREIGN_SECONDS: Final = 6.0


class HostIncidents:
    """Incidents, one per method."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.serial = 0

    def _one_worker(self) -> Machine | None:
        found = self.world.workers_at_work()
        return self.rng.choice(found) if found else None

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call `what` after some seconds, unless the run has ended by then."""

        def wait() -> None:
            self.world.scheduler.pause(seconds)
            what()

        self.world.ground.spawn("later", wait)

    def _restart(self, machine: Machine, *, name: str | None = None) -> None:
        self.later(self.rng.uniform(0.2, 6.0), lambda: self._boot(machine, name or machine.name))

    def _boot(self, old: Machine, name: str) -> None:
        if self.world.machines.get(old.name) is old and old.host.crashed:
            del self.world.machines[old.name]
            self.world.start(
                name, strategy=old.strategy, is_worker=old.is_worker, quirky=old.quirky
            )

    def _next(self, letter: str) -> str:
        self.serial += 1
        return f"{letter}{self.serial}"

    def crash(self) -> None:
        """Kill a worker and restart it with the same id."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.crash()
            self._restart(machine)

    def crash_and_rename(self) -> None:
        """Kill a worker and start another one with a new id."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.crash()
            self._restart(machine, name=self._next("n"))

    def pause(self) -> None:
        """Pause a worker for longer than the failover time."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.pause(self.rng.uniform(1.0, 8.0))

    def deploy(self) -> None:
        """Stop a worker gracefully and start its successor."""
        machine = self._one_worker()
        if machine is not None:
            machine.stop.set()
            self.world.start(self._next("d"), strategy=machine.strategy, is_worker=True)

    def join(self) -> None:
        """Start one more worker."""
        self.world.start(self._next("j"), strategy=STRATEGIES[0], is_worker=True)

    def join_quirky(self) -> None:
        """Start a worker without graceful handoff and release at shutdown, like old peers."""
        self.world.start(
            self._next("q"), strategy=self.rng.choice(STRATEGIES), is_worker=True, quirky=True
        )

    def short_lived_workers(self) -> None:
        """Start two workers and kill them for good after their first report.

        Soon after that another process becomes leader and finds their rows.
        """
        for _ in range(2):
            name = self._next("s")
            machine = self.world.start(name, strategy=STRATEGIES[0], is_worker=True)
            self.later(self.rng.uniform(0.1, 1.5), partial(self._kill_for_good, machine))
        self.later(self.rng.uniform(2.0, 6.0), self.leader_deploy)

    def foreign_application(self) -> None:
        """Start the application with another stream: a worker or a leader that must be refused."""
        world = self.world
        exists = world.coordinator.store.exists()
        if not exists or world.coordinator.read_application() is None:
            return
        model = world.streams.model
        if FOREIGN_STREAM not in model.call("ListStreams")["StreamNames"]:
            model.call("CreateStream", StreamName=FOREIGN_STREAM, ShardCount=2)
        machine = world.start(
            self._next("f"),
            strategy=STRATEGIES[0],
            is_worker=self.rng.random() < FOREIGN_WORKERS,
            streams=(FOREIGN_STREAM,),
        )
        self.later(FOREIGN_SECONDS, machine.stop.set)

    def _kill_for_good(self, machine: Machine) -> None:
        machine.host.crash()
        if self.world.machines.get(machine.name) is machine:
            del self.world.machines[machine.name]

    def failing_handoff(self) -> None:
        """Let a leader hand off a lease while some writes to the lease table fail."""
        world = self.world
        ids = sorted({machine.worker_id for machine in world.workers_at_work()})
        held = [row for row in world.checks.rows() if row.owner in ids and not row.ended]
        free = [row for row in held if not row.in_handoff]
        if not free or len(ids) < 2:  # noqa: PLR2004 (from one to another)
            return
        lease = self.rng.choice(free)
        target = self.rng.choice([worker_id for worker_id in ids if worker_id != lease.owner])
        world.note(f"hands {lease.lease_key} from {lease.owner} to {target}")
        if world.leases.initiate_handoff(lease, target) is not None:
            world.checks.row_written(lease.lease_key, "leader", "")
        world.weather.throttled.add("leases")
        self.later(self.rng.uniform(0.5, 2.0), lambda: world.weather.throttled.discard("leases"))

    def drain_run(self) -> None:
        """Materialize the output by hand: start a worker that ends when everything is committed."""
        self.world.start(self._next("m"), strategy=STRATEGIES[0], is_worker=True, mode="drain")

    def drain_request(self) -> None:
        """Request through its row that a worker leaves; another one starts.

        While the table does not exist, the operator's command fails.
        """
        machine = self._one_worker()
        exists = self.world.workers.store.exists()
        if exists and machine is not None and machine.mode == "continuous":
            self.world.workers.request_drain(machine.worker_id)
            self.world.start(self._next("r"), strategy=machine.strategy, is_worker=True)

    def duplicate_worker_id(self) -> None:
        """Start a second worker with the id of a running one."""
        machine = self._one_worker()
        if machine is not None and machine.mode == "continuous":
            self.world.checks.shared_ids.add(machine.worker_id)
            self.world.checks.excuse_worker(machine.worker_id)
            self.world.start(
                self._next("twin"),
                strategy=machine.strategy,
                is_worker=True,
                worker_id=machine.worker_id,
            )

    def _cut_off(self, machine: Machine) -> None:
        self.world.weather.partitioned.add(machine.host.name)
        self.later(
            self.rng.uniform(1.0, 7.0),
            lambda: self.world.weather.partitioned.discard(machine.host.name),
        )

    def partition(self) -> None:
        """Cut a host off from DynamoDB and Kinesis for a while."""
        self._cut_off(self.rng.choice(list(self.world.machines.values())))

    def leader_partition(self) -> None:
        """Cut the sensor off from AWS."""
        self._cut_off(self.world.machines[SENSOR])

    def leader_crash(self) -> None:
        """Kill the sensor."""
        machine = self.world.machines[SENSOR]
        if not machine.host.crashed:
            machine.host.crash()
            self._restart(machine)

    def no_leader(self) -> None:
        """Fail all writes of the leader lock, and kill a worker: nobody can lead meanwhile."""
        world, sites = self.world, set(LOCK_WRITES)
        world.weather.down_sites |= sites
        self.later(self.rng.uniform(3.0, 15.0), world.weather.down_sites.clear)
        self.later(self.rng.uniform(0.5, 2.0), self.crash_and_rename)

    def leader_pause(self) -> None:
        """Pause the sensor; it continues in the middle of its cycle."""
        self.world.machines[SENSOR].host.pause(self.rng.uniform(2.0, 8.0))

    def leader_deploy(self) -> None:
        """Reload the code server.

        The old sensor ends. A new one starts under the same name while the old one may still be in
        a cycle.
        """
        self.world.machines[SENSOR].stop.set()
        self.world.start(SENSOR, strategy=STRATEGIES[0], is_worker=False)

    def mixed_strategy(self) -> None:
        """Kill the sensor and restart it with a strategy that differs from the workers'."""
        self.world.machines[SENSOR].host.crash()
        self.world.start(SENSOR, strategy=self.rng.choice(STRATEGIES), is_worker=False)

    def clock_jump(self) -> None:
        """Move the wall clock of a host by up to five minutes."""
        self.rng.choice(list(self.world.machines.values())).host.skew_seconds += self.rng.uniform(
            -300, 300
        )

    def expired_credentials(self) -> None:
        """Reject all calls of a host for a while, because its credentials have expired."""
        denied = self.world.weather.denied
        name = self.rng.choice(list(self.world.machines.values())).host.name
        denied.add(name)
        self.later(self.rng.uniform(0.5, 4.0), lambda: denied.discard(name))

    def dry_run(self) -> None:
        """Plan on a host without writes, as the CLI's dry run does."""
        world, machine = self.world, self.rng.choice(list(self.world.machines.values()))
        observed = self.rng.choice((0.0, 4.0))
        calls = Calls(machine.host, world.weather)
        leases, workers, _ = world.tables(machine, calls, "reader")

        def body() -> None:
            clock = SimulatedClock(machine.host)
            kinesis, settings = SimulatedKinesis(world.streams, calls), world.settings_of(machine)
            try:
                found = preview(settings, leases, workers, kinesis, clock, observe_seconds=observed)
            except AwsError as error:
                world.note(f"dry run: {error}")
            else:
                world.note(f"dry run: {len(found.create)} to create, {found.plan.moves}")

        machine.host.spawn("dry run", body)

    def hot_worker(self) -> None:
        """Raise the utilization of a worker near or above the end of its range."""
        machine = self._one_worker()
        if machine is not None:
            machine.cpu_percent = self.rng.choice((75.0, 90.0, 100.0))

    def _throttle(self, what: str) -> None:
        self.world.weather.throttled.add(what)
        self.later(self.rng.uniform(1.0, 5.0), lambda: self.world.weather.throttled.discard(what))

    def throttled_tables(self) -> None:
        """Throttle every other request to one of the tables."""
        self._throttle(self.rng.choice(("leases", "workers", "coordinator")))

    def _outage(self, what: str) -> None:
        self.world.weather.down.add(what)
        self.later(self.rng.uniform(3.0, 12.0), lambda: self.world.weather.down.discard(what))

    def stream_outage(self) -> None:
        """Fail all calls of Kinesis."""
        self._outage("kinesis")

    def sink_outage(self) -> None:
        """Fail all reads and writes of the sink."""
        self._outage("sink")

    def throttled_stream(self) -> None:
        """Throttle every other request to Kinesis."""
        self._throttle("kinesis")

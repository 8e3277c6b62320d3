"""Incidents of hosts: workers and leaders that die, stand still, come, go, are cut off, or are two under one name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from kcl_pipeline.testing.simulation.world import Machine, World

STRATEGIES: Final = ("balanced", "worker_utilization_aware", "lease_count_based")
SENSOR: Final = "sensor"


HOST_INCIDENTS: Final = (
    "crash",
    "crash_and_rename",
    "pause",
    "deploy",
    "join",
    "join_quirky",
    "drain_run",
    "drain_request",
    "duplicate_worker_id",
    "partition",
    "leader_partition",
    "leader_crash",
    "leader_pause",
    "leader_deploy",
    "clock_jump",
    "mixed_strategy",
    "throttled_tables",
    "throttled_stream",
)
"""The names of the methods below that are incidents."""


class HostIncidents:
    """Each method is one incident."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.serial = 0

    def _one_worker(self) -> Machine | None:
        found = self.world.workers_at_work()
        return self.rng.choice(found) if found else None

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something after a while, unless the run has ended by then."""

        def wait() -> None:
            self.world.scheduler.pause(seconds)
            what()

        self.world.ground.spawn("later", wait)

    def _restart(self, machine: Machine, *, name: str | None = None) -> None:
        self.later(self.rng.uniform(0.2, 6.0), lambda: self._boot(machine, name or machine.name))

    def _boot(self, old: Machine, name: str) -> None:
        if self.world.machines.get(old.name) is old and old.host.crashed:
            del self.world.machines[old.name]
            self.world.start(name, strategy=old.strategy, is_worker=old.is_worker, quirky=old.quirky)

    def _next(self, letter: str) -> str:
        self.serial += 1
        return f"{letter}{self.serial}"

    def crash(self) -> None:
        """Kill a worker; it comes back under its own name."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.crash()
            self._restart(machine)

    def crash_and_rename(self) -> None:
        """Kill a worker; another one takes its place."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.crash()
            self._restart(machine, name=self._next("n"))

    def pause(self) -> None:
        """Let a worker stand still for longer than its leases live."""
        machine = self._one_worker()
        if machine is not None:
            machine.host.pause(self.rng.uniform(1.0, 8.0))

    def deploy(self) -> None:
        """Stop a worker in good order and start its successor."""
        machine = self._one_worker()
        if machine is not None:
            machine.stop.set()
            self.world.start(self._next("d"), strategy=machine.strategy, is_worker=True)

    def join(self) -> None:
        """One worker more."""
        self.world.start(self._next("j"), strategy=STRATEGIES[0], is_worker=True)

    def join_quirky(self) -> None:
        """One more that hands nothing over gracefully and releases nothing when it stops, as older peers do."""
        self.world.start(self._next("q"), strategy=self.rng.choice(STRATEGIES), is_worker=True, quirky=True)

    def drain_run(self) -> None:
        """Somebody materializes the output by hand: a worker that ends when everything is in the table."""
        self.world.start(self._next("m"), strategy=STRATEGIES[0], is_worker=True, mode="drain")

    def drain_request(self) -> None:
        """A worker is asked through its row to leave; another one comes."""
        machine = self._one_worker()
        if machine is not None and machine.mode == "continuous":
            self.world.workers.request_drain(machine.worker_id)
            self.world.start(self._next("r"), strategy=machine.strategy, is_worker=True)

    def duplicate_worker_id(self) -> None:
        """Somebody starts a second worker under the name of a living one."""
        machine = self._one_worker()
        if machine is not None and machine.mode == "continuous":
            self.world.checks.twins.add(machine.worker_id)
            self.world.checks.excuse_worker(machine.worker_id)
            self.world.start(self._next("twin"), strategy=machine.strategy, is_worker=True, worker_id=machine.worker_id)

    def _cut_off(self, machine: Machine) -> None:
        self.world.weather.partitioned.add(machine.host.name)
        self.later(self.rng.uniform(1.0, 7.0), lambda: self.world.weather.partitioned.discard(machine.host.name))

    def partition(self) -> None:
        """A host reaches neither DynamoDB nor Kinesis for a while."""
        self._cut_off(self.rng.choice(list(self.world.machines.values())))

    def leader_partition(self) -> None:
        """The sensor is cut off."""
        self._cut_off(self.world.machines[SENSOR])

    def leader_crash(self) -> None:
        """Kill the sensor."""
        machine = self.world.machines[SENSOR]
        if not machine.host.crashed:
            machine.host.crash()
            self._restart(machine)

    def leader_pause(self) -> None:
        """Let the sensor stand still; it wakes in the middle of what it did."""
        self.world.machines[SENSOR].host.pause(self.rng.uniform(2.0, 8.0))

    def leader_deploy(self) -> None:
        """The code server reloads: the old sensor ends, a new one begins under the same name while the old one may still be in a cycle."""
        self.world.machines[SENSOR].stop.set()
        self.world.start(SENSOR, strategy=STRATEGIES[0], is_worker=False)

    def mixed_strategy(self) -> None:
        """The sensor is killed and comes back with another strategy than the workers have."""
        self.world.machines[SENSOR].host.crash()
        self.world.start(SENSOR, strategy=self.rng.choice(STRATEGIES), is_worker=False)

    def clock_jump(self) -> None:
        """The wall clock of a host jumps by up to five minutes."""
        self.rng.choice(list(self.world.machines.values())).host.skew_seconds += self.rng.uniform(-300, 300)

    def _throttle(self, what: str) -> None:
        self.world.weather.throttled.add(what)
        self.later(self.rng.uniform(1.0, 5.0), lambda: self.world.weather.throttled.discard(what))

    def throttled_tables(self) -> None:
        """Every other request to one of the tables is throttled."""
        self._throttle(self.rng.choice(("leases", "workers", "coordinator")))

    def throttled_stream(self) -> None:
        """Every other request to Kinesis is throttled."""
        self._throttle("kinesis")

"""Incidents of a simulated fleet: a seeded list over half a minute of virtual time, then calm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from verification.simulation.environment.machines import CALM_CPU_PERCENT
from verification.simulation.incidents.choices import INCIDENTS
from verification.simulation.incidents.data import DataIncidents
from verification.simulation.incidents.hosts import SENSOR, STRATEGIES, HostIncidents
from verification.simulation.incidents.streams import StreamIncidents
from verification.simulation.incidents.table import TableIncidents
from verification.simulation.scenario import REACHED_BY
from verification.simulation.world import World


@dataclass(frozen=True, slots=True)
class StormOptions:
    """Options of a storm.

    Attributes:
        incidents: Minimum and maximum number of incidents, inclusive.
        call_fault_chance: Probability of a fault per I/O call.
        records_per_second: Mean rate of published records.
        skipped: Indexes of incidents that are left out, for shrinking.
        steer: False leaves out the fault of the seed, for shrinking.
    """

    workers: int = 3
    shards: int = 3
    storm_seconds: float = 20.0
    incidents: tuple[int, int] = (3, 9)
    call_fault_chance: float = 0.012
    records_per_second: float = 20.0
    settle_seconds: float = 30.0
    skipped: frozenset[int] = frozenset()
    steer: bool = True


class Storm:
    """Draws incidents and makes them happen. Every incident has a name, which is counted."""

    def __init__(self, world: World, options: StormOptions) -> None:
        self.world = world
        self.options = options
        self.rng = random.Random(f"{world.seed}/storm")
        hosts = HostIncidents(world, self.rng)
        data = DataIncidents(world, self.rng, options.shards, hosts.later)
        streams = StreamIncidents(world, self.rng, options.shards, hosts.later)
        table = TableIncidents(world, self.rng, hosts.later, data.delete_rows)
        kinds = (hosts, data, streams, table)
        self.incidents: dict[str, Callable[[], None]] = {
            name: next(getattr(one, name) for one in kinds if hasattr(one, name))
            for name in INCIDENTS
        }
        self.plan = self._plan()

    def _plan(self) -> list[tuple[float, str]]:
        """Return (time, incident) in order of time.

        The seed selects one incident, chance some, and the steered fault those that lead to it.
        """
        options, names = self.options, INCIDENTS
        rng = random.Random(f"{self.world.seed}/plan")
        chosen = [names[self.world.seed % len(names)]]
        chosen += [rng.choice(names) for _ in range(max(rng.randint(*options.incidents) - 1, 0))]
        steered = self.world.scenario.steered
        chosen += REACHED_BY.get(steered[0], ()) if steered is not None else ()
        plan = sorted((rng.uniform(1.0, options.storm_seconds), name) for name in chosen)
        return [step for place, step in enumerate(plan) if place not in options.skipped]

    def begin(self) -> None:
        """Create the streams, the fleet and the sensor."""
        for name in self.world.scenario.streams:
            self.world.streams.create(name, self.options.shards)
        self.world.start(SENSOR, strategy=STRATEGIES[0], is_worker=False)
        for number in range(self.options.workers):
            self.world.start(f"w{number}", strategy=self.rng.choice(STRATEGIES), is_worker=True)

    def drive(self) -> None:
        """Run the storm as the body of a task: steady traffic, and incidents at their times."""
        world, options = self.world, self.options
        world.weather.chance = options.call_fault_chance
        left = list(self.plan)
        while world.scheduler.now < options.storm_seconds:
            world.producer.publish(self.rng.randint(0, 4))
            while left and left[0][0] <= world.scheduler.now:
                self.strike(left.pop(0)[1])
            world.scheduler.pause(self.rng.expovariate(options.records_per_second / 2))
        self.calm()

    def strike(self, name: str) -> None:
        """Start one incident."""
        self.world.weather.counts[("incident", name)] += 1
        self.world.note(f"-- {name}")
        self.incidents[name]()

    def calm(self) -> None:
        """End the storm: no more faults, all hosts run again, and a little more traffic."""
        world = self.world
        world.note("-- calm")
        world.weather.clear()
        for ref in list(world.returning):
            world.return_stream(ref)
        world.index_lag_seconds = world.scan_lag_seconds = 0.0
        world.slow_until = world.broken_until = 0.0
        world.sink_table.land_late()
        for machine in list(world.machines.values()):
            machine.host.paused_until = 0.0
            ours = machine.mode == "continuous" and machine.streams is None
            machine.cpu_percent = CALM_CPU_PERCENT
            if machine.host.crashed and ours:
                world.start(
                    machine.name,
                    strategy=machine.strategy,
                    is_worker=machine.is_worker,
                    quirky=machine.quirky,
                )
        if not any(m.configured == world.configured for m in world.workers_at_work()):
            world.start("last", strategy=STRATEGIES[0], is_worker=True)
        world.producer.publish(10)

"""What happens to the fleet: a seeded list of incidents over half a minute of virtual time, then calm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.testing.kinesis_errors import KinesisError
from kcl_pipeline.testing.simulation.world import STREAM, Machine, World

STRATEGIES: Final = ("balanced", "worker_utilization_aware", "lease_count_based")


@dataclass(frozen=True, slots=True)
class StormOptions:
    """How bad it gets. `incidents` are drawn between the two numbers, inclusive; `call_fault_chance` is per I/O call; a mean `records_per_second`."""

    workers: int = 3
    shards: int = 3
    storm_seconds: float = 20.0
    incidents: tuple[int, int] = (3, 9)
    call_fault_chance: float = 0.012
    records_per_second: float = 20.0
    settle_seconds: float = 120.0


class Storm:
    """Draws incidents and makes them happen. Every incident has a name, which is counted."""

    def __init__(self, world: World, options: StormOptions) -> None:
        self.world = world
        self.options = options
        self.rng = world.rng
        self.serial = 0
        self.incidents: dict[str, Callable[[], None]] = {
            "crash": self.crash,
            "crash_and_rename": self.crash_and_rename,
            "pause": self.pause,
            "deploy": self.deploy,
            "join": self.join,
            "duplicate_worker_id": self.duplicate_worker_id,
            "partition": self.partition,
            "leader_crash": self.leader_crash,
            "leader_pause": self.leader_pause,
            "clock_jump": self.clock_jump,
            "split": self.split,
            "merge": self.merge,
            "update_shard_count": self.update_shard_count,
            "poison": self.poison,
            "slow_transform": self.slow_transform,
            "stale_index": self.stale_index,
            "stale_scan": self.stale_scan,
            "edit_row": self.edit_row,
            "late_commit": self.late_commit,
            "mixed_strategy": self.mixed_strategy,
        }

    def begin(self) -> None:
        """The stream, the fleet, and the sensor that leads it."""
        self.world.model.call("CreateStream", StreamName=STREAM, ShardCount=self.options.shards)
        self.world.start("sensor", strategy=STRATEGIES[0], is_worker=False)
        for number in range(self.options.workers):
            self.world.start(f"w{number}", strategy=self.rng.choice(STRATEGIES), is_worker=True)

    def drive(self) -> None:
        """The body of the task that makes weather: traffic all the time, incidents at their times."""
        world, options = self.world, self.options
        count = self.rng.randint(*options.incidents)
        times = sorted(self.rng.uniform(1.0, options.storm_seconds) for _ in range(count))
        world.weather.chance = options.call_fault_chance
        while world.scheduler.now < options.storm_seconds:
            world.publish(self.rng.randint(0, 4))
            while times and times[0] <= world.scheduler.now:
                times.pop(0)
                self.strike(self.rng.choice(sorted(self.incidents)))
            world.scheduler.pause(self.rng.expovariate(options.records_per_second / 2))
        self.calm()

    def strike(self, name: str) -> None:
        """Make one incident happen."""
        self.world.weather.counts[("incident", name)] += 1
        self.world.note(f"-- {name}")
        self.incidents[name]()

    def calm(self) -> None:
        """End the storm: no faults any more, everything that is down comes up again, and a little more traffic."""
        world = self.world
        world.note("-- calm")
        world.weather.chance = 0.0
        world.weather.partitioned.clear()
        world.index_lag_seconds = world.scan_lag_seconds = 0.0
        world.slow_until = 0.0
        world.sink_table.land_late()
        for machine in list(world.machines.values()):
            machine.host.paused_until = 0.0
            if machine.host.crashed:
                world.start(machine.name, strategy=machine.strategy, is_worker=machine.is_worker)
        world.publish(10)

    # -- incidents -----------------------------------------------------------------------------------------------------

    def _workers(self) -> list[Machine]:
        return [m for m in self.world.machines.values() if m.is_worker and not m.host.crashed and not m.stop.is_set()]

    def _one_worker(self) -> Machine | None:
        found = self._workers()
        return self.rng.choice(found) if found else None

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        def wait() -> None:
            self.world.scheduler.pause(seconds)
            what()

        self.world.ground.spawn("later", wait)

    def _restart(self, machine: Machine, *, name: str | None = None) -> None:
        strategy = machine.strategy
        self._later(self.rng.uniform(0.2, 6.0), lambda: self._boot(machine, name or machine.name, strategy))

    def _boot(self, old: Machine, name: str, strategy: str) -> None:
        if self.world.machines.get(old.name) is old and old.host.crashed:
            del self.world.machines[old.name]
            self.world.start(name, strategy=strategy, is_worker=old.is_worker)

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
            self.serial += 1
            machine.host.crash()
            self._restart(machine, name=f"n{self.serial}")

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
            self.serial += 1
            self.world.start(f"d{self.serial}", strategy=machine.strategy, is_worker=True)

    def join(self) -> None:
        """One worker more."""
        self.serial += 1
        self.world.start(f"j{self.serial}", strategy=STRATEGIES[0], is_worker=True)

    def duplicate_worker_id(self) -> None:
        """Somebody starts a second worker under the name of a living one."""
        machine = self._one_worker()
        if machine is not None:
            self.serial += 1
            self.world.start(f"twin{self.serial}", strategy=machine.strategy, is_worker=True, worker_id=machine.name)

    def partition(self) -> None:
        """A host reaches neither DynamoDB nor Kinesis for a while."""
        machine = self.rng.choice(list(self.world.machines.values()))
        self.world.weather.partitioned.add(machine.host.name)
        self._later(self.rng.uniform(1.0, 7.0), lambda: self.world.weather.partitioned.discard(machine.host.name))

    def leader_crash(self) -> None:
        """Kill the sensor."""
        machine = self.world.machines["sensor"]
        if not machine.host.crashed:
            machine.host.crash()
            self._restart(machine)

    def leader_pause(self) -> None:
        """Let the sensor stand still; it wakes in the middle of what it did."""
        self.world.machines["sensor"].host.pause(self.rng.uniform(2.0, 8.0))

    def clock_jump(self) -> None:
        """The wall clock of a host jumps by up to five minutes."""
        self.rng.choice(list(self.world.machines.values())).host.skew_seconds += self.rng.uniform(-300, 300)

    def _open_shards(self) -> list[dict[str, object]]:
        shards = self.world.model.call("ListShards", StreamName=STREAM, ShardFilter={"Type": "AT_LATEST"})["Shards"]
        return sorted(shards, key=lambda s: int(s["HashKeyRange"]["StartingHashKey"]))

    def _reshard(self, operation: str, **params: object) -> None:
        try:
            self.world.model.call(operation, StreamName=STREAM, **params)
        except KinesisError as error:
            self.world.note(f"{operation} refused: {error}")

    def split(self) -> None:
        """Split a shard in the middle."""
        shards = self._open_shards()
        if len(shards) < 3 * self.options.shards:
            shard = self.rng.choice(shards)
            keys: dict[str, str] = shard["HashKeyRange"]  # type: ignore[assignment]
            middle = (int(keys["StartingHashKey"]) + int(keys["EndingHashKey"])) // 2
            self._reshard("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))

    def merge(self) -> None:
        """Merge two neighbours."""
        shards = self._open_shards()
        if len(shards) > 1:
            at = self.rng.randrange(len(shards) - 1)
            self._reshard("MergeShards", ShardToMerge=shards[at]["ShardId"], AdjacentShardToMerge=shards[at + 1]["ShardId"])

    def update_shard_count(self) -> None:
        """Reshard the whole stream."""
        target = max(1, min(len(self._open_shards()) + self.rng.choice((-1, 1)), 2 * self.options.shards))
        self._reshard("UpdateShardCount", TargetShardCount=target, ScalingType="UNIFORM_SCALING")

    def poison(self) -> None:
        """A record that the transform cannot take."""
        self.world.publish(1, poison=True)

    def slow_transform(self) -> None:
        """The transform takes longer than a lease lives."""
        self.world.slow_until = self.world.scheduler.now + 4.0

    def stale_index(self) -> None:
        """The index lags."""
        self.world.index_lag_seconds = self.rng.uniform(0.5, 3.0)
        self._later(4.0, lambda: setattr(self.world, "index_lag_seconds", 0.0))

    def stale_scan(self) -> None:
        """Scans are eventually consistent, and how."""
        self.world.scan_lag_seconds = self.rng.uniform(0.2, 2.0)
        self._later(4.0, lambda: setattr(self.world, "scan_lag_seconds", 0.0))

    def edit_row(self) -> None:
        """Somebody edits a lease row by hand: removes the owner, moves the counter, adds an attribute."""
        rows = self.world.leases.rows()
        if rows:
            key = self.rng.choice(sorted(rows))
            item = dict(rows[key])
            change = self.rng.randrange(3)
            if change == 0:
                item.pop("leaseOwner", None)
                item.pop("checkpointOwner", None)
            elif change == 1:
                item["leaseCounter"] = {"N": str(int(item["leaseCounter"]["N"]) + 3)}
            else:
                item["note"] = {"S": "looked at by hand"}
            self.world.leases.plant(item)
            self.world.checks.row_written(key)

    def late_commit(self) -> None:
        """Writes to the log that were under way arrive now."""
        self.world.sink_table.land_late()

    def mixed_strategy(self) -> None:
        """The sensor is deployed with another strategy than the workers have."""
        machine = self.world.machines["sensor"]
        machine.host.crash()
        del self.world.machines["sensor"]
        self.world.start("sensor", strategy=self.rng.choice(STRATEGIES), is_worker=False)

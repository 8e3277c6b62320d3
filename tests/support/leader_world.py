"""A small fleet on in-memory tables and a virtual clock, for the leader's tests.

Workers here do what the protocol asks of them, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)
from kcl_pipeline.worker_status import HungState, WorkerStatus


class World:
    """Tables, stream, clock, workers and leaders; `run` lets time pass in steps of one second,
    leaders tick every five. `kbps` returns the throughput of a lease at its renewal.
    """

    def __init__(self, shards=4, streams=("orders",), tables_exist=True, kinesis=None, **overrides):
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock, kinesis)
        for stream in streams:
            self.model.create_stream(stream, shards)
        self.kinesis = InMemoryKinesis(self.model)
        self.leases = InMemoryLeaseTable(clock=self.clock, exists=tables_exist)
        self.rows = InMemoryWorkerMetricsTable(clock=self.clock, exists=tables_exist)
        self.coordinator = InMemoryCoordinatorStateTable(clock=self.clock, exists=tables_exist)
        base = {"lease_assignment_strategy": "lease_count_based", **overrides.pop("assignment", {})}
        self.settings = ConsumerSettings(
            application_name="orders-app", streams=streams, assignment=base, **overrides
        )
        self.events: list[object] = []
        self.workers: dict[str, FakeWorker] = {}
        self.leaders: dict[str, LeaderCycle] = {}
        self.reports = []
        self.kbps = lambda key: None

    def leader(self, name="leader", **options):
        cycle = LeaderCycle(
            self.settings,
            self.leases,
            self.rows,
            self.coordinator,
            self.kinesis,
            self.clock,
            self.events.append,
            name,
            rng=Random(name),
            **options,
        )
        self.leaders[name] = cycle
        return cycle

    def join(self, *names, **options):
        for name in names:
            self.workers[name] = FakeWorker(name, self, **options)

    def kill(self, name):
        """As kill -9: nothing is released."""
        del self.workers[name]

    def run(self, seconds, tick=5):
        for _ in range(seconds):
            for worker in list(self.workers.values()):
                worker.second()
            if int(self.clock.monotonic()) % tick == 0:
                for cycle in list(self.leaders.values()):
                    self.reports.append(cycle.run_once())
            self.clock.advance(1)

    def run_until(self, condition, limit=300):
        began = self.clock.monotonic()
        while not condition():
            assert self.clock.monotonic() - began < limit, f"not within {limit} s: {self.owners()}"
            self.run(1)
        return self.clock.monotonic() - began

    def table(self):
        return {lease.lease_key: lease for lease in self.leases.list_leases().leases}

    def owners(self):
        return {key: lease.actual_owner for key, lease in sorted(self.table().items())}

    def held(self, *, ended=False):
        """Unfinished leases by owner, as the workers see it."""
        return {
            name: sorted(k for k, le in w.held.items() if ended or not le.ended)
            for name, w in self.workers.items()
        }

    def happened(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class FakeWorker:
    """Renews every 3 s, discovers every 2 s and reports every 10 s, finishes handoffs
    `slow_handoff` seconds after it saw them. With `is_java`, it has no run id and discovers every
    10 s.
    """

    name: str
    world: World
    cpu: float | None = None
    slow_handoff: float = 1.0
    report_seconds: int = 10
    paused: bool = False
    renews: bool = True
    hung: bool = False
    is_java: bool = False
    replaces: str | None = None
    silent: set = field(default_factory=set)
    held: dict = field(default_factory=dict)
    handoffs: dict = field(default_factory=dict)
    age: int = 0
    checkpoints: int = 0

    def second(self):
        if self.paused:
            return
        if self.age % self.report_seconds == 0:
            self.report()
        if self.age % (10 if self.is_java else 2) == 0 and self.renews:
            self.discover()
        if self.age % 3 == 0 and self.renews:
            self.renew()
        self.hand_over()
        self.age += 1

    def report(self):
        stats = {} if self.cpu is None else {"C": (self.cpu,) * 3}
        limits = {} if self.cpu is None else {"C": (100,)}
        status = WorkerStatus(hung=HungState("writing", 900.0, 1) if self.hung else None)
        run_id = None if self.is_java else f"{self.name}-run"
        self.world.rows.report(
            WorkerMetrics(
                self.name,
                int(self.world.clock.wall()),
                stats,
                limits,
                run_id=run_id,
                status=status,
                replaces=self.replaces,
            )
        )

    def discover(self):
        for key in self.world.leases.lease_keys_of(self.name):
            lease = self.world.leases.get(key)
            if (
                lease is not None
                and key not in self.held
                and lease.owner == self.name
                and not lease.in_handoff
            ):
                self.held[key] = lease

    def renew(self):
        for key, lease in list(self.held.items()):
            if key in self.silent:
                continue
            renewed = self.world.leases.renew(lease, throughput_kbps=self.world.kbps(key))
            if renewed is None:
                del self.held[key]
                self.handoffs.pop(key, None)
            else:
                self.held[key] = renewed
                if renewed.in_handoff:
                    self.handoffs.setdefault(key, self.world.clock.monotonic())

    def hand_over(self):
        if self.hung:
            return  # its processing thread would do it
        for key, since in list(self.handoffs.items()):
            if self.world.clock.monotonic() - since >= self.slow_handoff:
                lease = self.held.pop(key)
                del self.handoffs[key]
                self.world.leases.assign(lease, lease.owner)

    def checkpoint(self, key, position):
        self.held[key] = self.world.leases.update_checkpoint(self.held[key], checkpoint=position)
        assert self.held[key] is not None

    def start_reading(self):
        """Every held lease gets a checkpoint that is a number."""
        for key, lease in list(self.held.items()):
            if lease.checkpoint.is_sentinel and not lease.ended:
                self.checkpoint(key, Position("1000"))

    def finish(self, key):
        """The end of a shard as the protocol wants it: children, their ids, SHARD_END."""
        shards = self.world.kinesis.list_shards(
            self.world.kinesis.resolve_stream("orders", multi_stream=False)
        )
        children = [
            ChildShard(s.shard_id, s.parents, s.hash_key_range)
            for s in shards
            if self.held[key].shard_id in s.parents
        ]
        from kcl_pipeline.planning.shard_sync import child_leases  # noqa: PLC0415

        present = frozenset(le.shard_id for le in self.world.table().values())
        for lease in child_leases(self.held[key], children, existing=present):
            create_lease(self.world.leases, lease)
        self.world.leases.set_child_shard_ids(key, [c.shard_id for c in children])
        self.checkpoint(key, SHARD_END)

    def stop(self):
        """In good order: leases without owner, no row."""
        for lease in self.held.values():
            self.world.leases.evict(lease)
        self.held.clear()
        self.world.rows.deregister(self.name)
        del self.world.workers[self.name]


def settled(world, *workers, **options):
    """A fleet at work: every lease held by a living worker, evenly."""
    world.join(*workers, **options)
    if not world.leaders:
        world.leader()
    world.run_until(
        lambda: (
            all(world.held().values())
            and sum(map(len, world.held().values())) == len(world.table())
        )
    )
    return world

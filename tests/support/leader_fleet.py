"""Leaders and workers of one application as tasks in virtual time, with slow or failing services.

Unlike `leader_world`, a call that takes long delays only the task that makes it.
"""

from __future__ import annotations

import random
from contextlib import suppress

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, ThrottledError, UnavailableError
from kcl_pipeline.events import LeaderElected, LeadershipLost
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.orchestration.leader import run_cycles
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from verification.simulation.environment.scheduler import Host, Scheduler, SimulatedClock

FAULTS = {
    "is throttled": (7.5, ThrottledError),
    "hangs for 30 s": (30.0, UnavailableError),
    "fails at once": (0.0, UnavailableError),
}
"""Seconds of a call to Kinesis and its error: five throttled attempts of DescribeStreamSummary."""
_CALLS = {"resolve_stream": "DescribeStreamSummary", "list_shards": "ListShards"}


class TroubledKinesis:
    """Describe and list calls last for some time, and then fail, while `fault` is set."""

    def __init__(self, fleet, clock):
        self.fleet, self.clock = fleet, clock
        self.real = InMemoryKinesis(fleet.model)

    def __getattr__(self, name):
        real = getattr(self.real, name)
        if name not in _CALLS:
            return real

        def call(*given, **named):
            if self.fleet.fault is not None:
                seconds, error = FAULTS[self.fleet.fault]
                self.clock.sleep(seconds)
                raise error("no answer", operation=_CALLS[name])
            return real(*given, **named)

        return call


class LeaderFleet:
    """An application with default settings.

    `before_call` of a store may sleep on `clock_of_call`, which is the caller's clock.
    """

    def __init__(self, shards=4, seed=1, **settings):
        self.scheduler = Scheduler(seed)
        self.ground = Host("ground", self.scheduler)
        self.clock = SimulatedClock(self.ground)
        self.model = KinesisModel(self.clock)
        self.model.create_stream("orders", shards)
        self.fault: str | None = None
        self.leases = InMemoryLeaseTable(clock=self.clock)
        self.rows = InMemoryWorkerMetricsTable(clock=self.clock)
        self.coordinator = InMemoryCoordinatorStateTable(clock=self.clock)
        self.settings = ConsumerSettings(
            application_name="orders-app", streams=("orders",), **settings
        )
        self.events: list[object] = []
        self.hosts: dict[str, Host] = {}
        self.denied: set[str] = set()
        """Workers that may not update the lease table."""
        self.slow_calls = lambda _clock, _operation: None
        """Called before each call of a leader to the lease table, with the clock of the caller."""

    def host(self, name):
        return self.hosts.setdefault(name, Host(name, self.scheduler))

    def worker(self, name):
        """Start a worker: it reports, discovers and renews as the protocol asks."""
        host = self.host(name)
        clock = SimulatedClock(host)
        self.host(name).spawn("worker", lambda: self._work(name, clock))

    def _work(self, name, clock):
        held, second = {}, 0
        while True:
            with suppress(AwsError):
                self._second(name, clock, held, second)
            second += 1
            clock.sleep(1)

    def _second(self, name, clock, held, second):
        if second % 10 == 0:
            self.rows.report(WorkerMetrics(name, int(clock.wall()), {}, {}, run_id=f"{name}-run"))
        if second % 3 == 0 and name not in self.denied:
            for key in self.leases.lease_keys_of(name):
                lease = self.leases.get(key)
                if lease is not None and lease.owner == name and not lease.in_handoff:
                    held.setdefault(key, lease)
            for key, lease in list(held.items()):
                renewed = self.leases.renew(lease)
                if renewed is None:
                    del held[key]
                elif renewed.in_handoff:
                    self.leases.assign(renewed, renewed.owner)
                    del held[key]
                else:
                    held[key] = renewed

    def leader(self, name, *, is_sensor=False):
        """Start a leader: in a worker one cycle a second, in the sensor one tick in 5 s."""
        host = self.host(name)
        clock = SimulatedClock(host)
        leases = self.leases.view(
            before_call=lambda operation, _key: self.slow_calls(clock, operation)
        )
        cycle = LeaderCycle(
            self.settings,
            leases,
            self.rows,
            self.coordinator,
            TroubledKinesis(self, clock),
            clock,
            lambda event: self.events.append((self.scheduler.now, name, event)),
            name,
            resume_own_name=is_sensor,
            rng=random.Random(name),
            spawn=host.spawn,
        )

        def lead():
            while True:
                if is_sensor:
                    run_cycles(cycle, 10.0, 45.0, clock)
                    clock.sleep(5.0)
                else:
                    cycle.run_once()
                    clock.sleep(1.0)

        host.spawn("lead", lead)
        return cycle

    def outage(self, seconds):
        """Let every call to DynamoDB fail for some time."""

        def fail(operation, _key):
            raise UnavailableError("no answer", operation=operation)

        self.slow_calls = lambda _clock, operation: fail(operation, "")
        stores = [table.store for table in (self.leases, self.rows, self.coordinator)]
        for store in stores:
            store.before_call = fail
        self.run(seconds)
        self.slow_calls = lambda *_: None
        for store in stores:
            store.before_call = lambda *_: None

    def run(self, seconds):
        self.scheduler.run(seconds=seconds)
        errors = [task.error for task in self.scheduler.tasks if task.error is not None]
        assert not errors, errors

    def run_until(self, condition, limit):
        """Run until the condition holds; return the seconds. Fails after `limit`."""
        began = self.scheduler.now
        assert self.scheduler.run(condition, seconds=limit), (
            f"not within {limit} s: {self.owners()}"
        )
        return self.scheduler.now - began

    def kill(self, name):
        self.hosts[name].crash()

    def owners(self):
        return {lease.lease_key: lease.actual_owner for lease in self.leases.list_leases().leases}

    def leader_changes(self, since):
        kinds = (LeaderElected, LeadershipLost)
        return [one for one in self.events if one[0] >= since and isinstance(one[2], kinds)]

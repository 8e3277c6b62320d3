"""The waits after throttled calls to Kinesis, and a stop during a call that hangs."""

from __future__ import annotations

import threading
from itertools import pairwise
from random import Random

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from tests.support.leader_world import World, settled

WAIT_SECONDS = 30.0
DESCRIBE_SECONDS = 7.5
"""Five attempts of a throttled DescribeStreamSummary, with the waits between them."""


class SlowKinesis:
    """Calls of some operations last for `seconds` of virtual time, and then fail."""

    def __init__(self, world, operations, seconds):
        self.world, self.real = world, world.kinesis
        self.operations, self.seconds, self.calls = operations, seconds, []

    def __getattr__(self, name):
        real = getattr(self.real, name)
        if name not in self.operations:
            return real

        def slow(*_, **__):
            self.calls.append(self.world.clock.monotonic())
            self.world.clock.advance(self.seconds)
            raise ThrottledError("rate exceeded", operation="DescribeStreamSummary")

        return slow


def live(world, seconds, leaders):
    """Workers renew all the time; each candidate runs one cycle after the other, side by side."""
    end = world.clock.monotonic() + seconds
    while world.clock.monotonic() < end:
        for cycle in leaders:
            before = world.clock.monotonic()
            cycle.run_once()
            # a cycle that waited for Kinesis did not stop the workers meanwhile
            for _ in range(max(round(world.clock.monotonic() - before), 1)):
                for worker in list(world.workers.values()):
                    worker.second()
        world.clock.advance(0.2)


def test_the_waits_after_a_throttled_describe_begin_at_its_end_and_are_spread():
    waits = {}
    for seed in ("one", "two"):
        world = settled(World(shards=1), "a")
        kinesis = SlowKinesis(world, ("resolve_stream",), DESCRIBE_SECONDS)
        world.kinesis = kinesis
        cycle = world.leader(seed)
        kinesis.operations = ()
        world.leaders.clear()
        world.clock.advance(60)
        cycle.run_once()
        world.clock.advance(60)
        cycle.run_once()
        kinesis.operations = ("resolve_stream",)
        live(world, 120, [cycle])
        gaps = [b - a - DESCRIBE_SECONDS for a, b in pairwise(kinesis.calls)]
        assert min(gaps) >= 2.5, gaps
        assert max(gaps) <= 31
        waits[seed] = gaps
    assert waits["one"] != waits["two"]


class Real:
    """Candidates on the real clock, with threads for the calls to Kinesis."""

    def __init__(self):
        self.clock = SystemClock()
        model = KinesisModel(self.clock)
        model.create_stream("orders", 2)
        self.end, self.entered = threading.Event(), threading.Event()
        self.end.set()
        world = self

        class Kinesis(InMemoryKinesis):
            def list_shards(self, *given, **named):
                world.entered.set()
                assert world.end.wait(WAIT_SECONDS)
                return super().list_shards(*given, **named)

            def resolve_stream(self, *given, **named):
                world.entered.set()
                if not world.end.wait(WAIT_SECONDS):
                    raise UnavailableError("no answer", operation="DescribeStreamSummary")
                return super().resolve_stream(*given, **named)

        self.kinesis = Kinesis(model)
        self.tables = (
            InMemoryLeaseTable(clock=self.clock),
            InMemoryWorkerMetricsTable(clock=self.clock),
            InMemoryCoordinatorStateTable(clock=self.clock),
        )
        self.events: list[object] = []

    def candidate(self, name):
        settings = ConsumerSettings(
            application_name="orders-app",
            streams=("orders",),
            lease={"failover_time_millis": 1_000},
            leader={"leader_lease_duration_millis": 400, "leader_heartbeat_period_millis": 100},
        )

        def spawn(thread_name, target):
            thread = threading.Thread(target=target, name=thread_name, daemon=True)
            thread.start()
            return thread

        return LeaderCycle(
            settings,
            *self.tables,
            self.kinesis,
            self.clock,
            self.events.append,
            name,
            rng=Random(name),
            spawn=spawn,
        )


@pytest.fixture
def real():
    world = Real()
    yield world
    world.end.set()


def hanging_leader(real):
    """Return a leader whose call of ListShards hangs, and the thread of its cycle."""
    leader = real.candidate("first")
    real.end.clear()
    real.entered.clear()
    identity = real.kinesis.__class__.__mro__[1].resolve_stream
    real.kinesis.resolve_stream = lambda *given, **named: identity(real.kinesis, *given, **named)
    cycle = threading.Thread(target=leader.run_once, daemon=True)
    cycle.start()
    assert real.entered.wait(WAIT_SECONDS)
    return leader, cycle


def test_a_release_does_not_wait_for_a_call_that_hangs(real):
    leader, cycle = hanging_leader(real)
    began = real.clock.monotonic()
    leader.release()
    assert real.clock.monotonic() - began < WAIT_SECONDS / 3
    assert real.tables[2].read_lock() is None
    cycle.join(WAIT_SECONDS)
    assert not cycle.is_alive()

"""A lease that cannot be read for whatever reason does not stop the others; a call that hangs
delays only its own lease.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kcl_pipeline import threads as pools
from kcl_pipeline.aws.configs import MIN_TIMEOUT_SECONDS, dynamodb_config
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import AwsTrouble, DefectFound, ShardStalled
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.threads import DaemonPool, InFlight
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered

BAD = "shardId-000000000001"


@pytest.mark.parametrize("buffered", shortened([True, False], bool), ids=["buffered", "executors"])
def test_a_row_at_a_timestamp_without_the_setting_is_its_own_problem(buffered):
    world = World(shards=2, buffered=buffered)
    shards = world.kinesis.list_shards(world.kinesis.resolve_stream("orders", multi_stream=False))
    create_lease(world.leases, Lease(BAD, AT_TIMESTAMP, hash_key_range=shards[1].hash_key_range))
    create_lease(
        world.leases,
        Lease(shards[0].shard_id, TRIM_HORIZON, hash_key_range=shards[0].hash_key_range),
    )
    world.put(*numbered(20))
    world.run(150.0)
    first = world.data()
    assert first, "the other shard is read"
    assert any("initial_timestamp" in e.error for e in world.of(AwsTrouble) if BAD in e.operation)
    stalled = [event for event in world.of(ShardStalled) if event.lease_key == BAD]
    assert "initial_timestamp" in stalled[0].error


def test_an_unexpected_error_of_one_lease_is_its_own_problem():
    world = World(shards=2, buffered=True)
    begin = world.worker.source.begin

    def broken(consumer):
        if consumer.lease_key == BAD:
            raise RuntimeError("a defect")
        begin(consumer)

    world.worker.source.begin = broken
    world.put(*numbered(20))
    world.run(20.0)
    assert world.data()
    assert any("RuntimeError: a defect" in e.error for e in world.of(DefectFound))
    world.worker.source.begin = begin
    world.run(60.0)
    assert world.data() == sorted(world.sent)


@pytest.mark.parametrize(
    ("failover", "timeout", "expected"),
    [(10_000, 60_000, MIN_TIMEOUT_SECONDS), (30_000, 60_000, 9.975), (10_000, 500, 0.5)],
)
def test_the_time_out_of_calls_follows_from_the_renewal_interval(failover, timeout, expected):
    settings = ConsumerSettings(
        application_name="app",
        streams=("s",),
        lease={
            "failover_time_millis": failover,
            "dynamo_db_request_timeout_millis": timeout,
        },
    )
    config = dynamodb_config(settings)
    assert config.read_timeout == expected
    assert config.connect_timeout <= expected


class Calls:
    """Calls in flight by number, of which some hang until `go_on`."""

    def __init__(self, hanging, slots):
        self.clock = ShiftedClock()
        self.name = f"test-{id(self)}"
        self.pool = DaemonPool(slots, self.name, slow_seconds=1.0, clock=self.clock)
        self.in_flight = InFlight(self.pool)
        self.hanging = frozenset(hanging)
        self.calls: list[int] = []
        self.go_on = threading.Event()

    def call(self, number):
        self.calls.append(number)
        if number in self.hanging:
            self.go_on.wait(30)

    def run_until(self, condition, numbers):
        until = SystemClock().monotonic() + 20
        while not condition():
            assert SystemClock().monotonic() < until, sorted(set(self.calls))
            self.in_flight.collect()
            for number in numbers:
                self.in_flight.start(number, partial(self.call, number))
            self.clock.advance(0.1)
            SystemClock().sleep(0.002)  # the threads of the pool run

    def threads(self):
        """Number of threads of the pool: those that were started, also if none has run yet."""
        return sum(thread.name.startswith(f"{self.name}-") for thread in threading.enumerate())

    def end(self):
        self.go_on.set()
        self.pool.shutdown()


@pytest.fixture
def calls():
    made = []

    def make(hanging, slots=4):
        made.append(Calls(hanging, slots))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_call_that_hangs_does_not_delay_the_others_and_is_not_made_twice(calls):
    one = calls({1})
    one.run_until(lambda: one.calls.count(0) > 3 and one.calls.count(2) > 3, range(3))
    assert one.calls.count(1) == 1
    assert not one.in_flight.settle([1], 0.01)
    one.go_on.set()
    assert one.in_flight.settle([1], 20)
    one.run_until(lambda: one.calls.count(1) > 1, range(3))


def test_more_calls_than_slots_that_hang_do_not_delay_the_others(calls):
    one = calls(range(7), slots=2)
    one.run_until(lambda: {7, 8, 9} <= set(one.calls), range(10))
    hung = [number for number in one.calls if number < 7]
    assert len(hung) == len(set(hung)), "a call that hangs is not made twice"


def test_calls_that_hang_have_a_limit_of_threads(calls, monkeypatch):
    monkeypatch.setattr(pools, "MAX_SLOW", 2)
    one = calls(range(99), slots=2)
    one.run_until(lambda: len(one.calls) == 2 + 2 * 2, range(99))
    rounds = iter(range(100))
    one.run_until(lambda: next(rounds) == 99, range(99))
    assert one.threads() == len(one.calls) == 2 + 2 * 2


def test_an_error_of_a_call_is_raised_when_it_is_collected(calls):
    one = calls(())

    def failing():
        raise RuntimeError("a defect")

    assert one.in_flight.start("failing", failing)
    assert one.in_flight.settle(["failing"], 20)
    with pytest.raises(RuntimeError, match="a defect"):
        one.in_flight.collect()
    one.in_flight.collect()


def test_calls_that_wait_for_a_slot_are_canceled_at_the_end(calls):
    one = calls({0}, slots=1)
    hung, waiting = one.pool.submit(one.call, 0), one.pool.submit(one.call, 1)
    one.run_until(lambda: one.calls == [0], ())
    assert one.threads() == 1, "a slot for each call that runs"
    one.pool.shutdown()
    assert waiting.cancelled()
    assert not hung.done()
    with pytest.raises(RuntimeError, match="shut down"):
        one.pool.submit(one.call, 2)


def test_a_map_keeps_the_order_and_raises_the_first_error(calls):
    one = calls(())
    assert one.pool.map(str, range(20)) == [str(number) for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        one.pool.map(lambda number: 1 // number, [1, 0, 2])

"""A lease that cannot be read for whatever reason does not stop the others; a call that hangs
delays only its own lease.
"""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from kcl_pipeline.aws.configs import MIN_TIMEOUT_SECONDS, dynamodb_config
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import AwsTrouble, ShardStalled
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker import threads
from kcl_pipeline.worker.threads import Pools
from tests.support.worker_world import World, numbered

BAD = "shardId-000000000001"


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "executors"])
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
    assert any("RuntimeError: a defect" in e.error for e in world.of(AwsTrouble))
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


class Renewals:
    """Calls through `map_within`, of which some hang until `end`."""

    def __init__(self, hanging, threads):
        self.hanging, self.pools = frozenset(hanging), Pools(threads, parallel=True)
        self.calls: list[int] = []
        self.go_on = threading.Event()

    def renew(self, number):
        self.calls.append(number)
        if number in self.hanging:
            self.go_on.wait(30)
        return number

    def run(self, count, seconds=0.2):
        return self.pools.map_within(self.renew, range(count), seconds)

    def run_until(self, numbers, count):
        until = SystemClock().monotonic() + 20
        while not set(numbers) <= set(self.calls):
            assert SystemClock().monotonic() < until, sorted(set(self.calls))
            self.run(count)

    def end(self):
        self.go_on.set()
        self.pools.shut_down()


@pytest.fixture
def renewals():
    made = []

    def make(hanging, threads=4):
        made.append(Renewals(hanging, threads))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_one_renewal_that_hangs_does_not_hold_up_the_others(renewals):
    assert sorted(renewals({1}).run(3)) == [0, 2]


def test_a_single_renewal_that_hangs_does_not_hold_up_its_thread(renewals):
    assert renewals({0}).run(1) == []


def test_more_renewals_than_threads_that_hang_do_not_hold_up_the_others(renewals):
    one = renewals(range(7), threads=2)
    one.run_until({7, 8, 9}, 10)
    hung = [number for number in one.calls if number < 7]
    assert len(hung) == len(set(hung)), "a call that hangs is not made twice"
    assert set(one.run(10, seconds=5)) >= {7, 8, 9}


def test_renewals_that_hang_have_a_limit_of_threads(renewals, monkeypatch):
    monkeypatch.setattr(threads, "MAX_HUNG", 2)
    one = renewals(range(9), threads=2)
    for _ in range(5):
        one.run(9, seconds=0.1)
    assert len(one.calls) <= 4 + 2, "the limit, and the slots of the last pool"


def test_renewals_that_hang_do_not_hold_up_a_discovery(renewals):
    one = renewals(range(4), threads=4)
    one.run(4)
    assert one.pools.map_within(str, range(2), 5) == ["0", "1"]
    assert one.pools.map_lookups(str, range(2)) == ["0", "1"]


def test_an_error_of_a_call_that_ends_late_is_raised(renewals):
    one = renewals({0})

    def failing(number):
        one.renew(number)
        raise RuntimeError("a defect")

    assert one.pools.map_within(failing, [0], 0.1) == []
    one.go_on.set()
    wait(one.pools._renewals._calls.values(), timeout=20)
    with pytest.raises(RuntimeError, match="a defect"):
        one.pools.map_within(str, [1], 5)


def test_a_call_that_has_ended_is_made_again(renewals):
    one = renewals({0})
    assert one.run(2) == [1]
    one.go_on.set()
    until = SystemClock().monotonic() + 20
    while 0 not in one.run(2):
        assert SystemClock().monotonic() < until
    assert one.calls.count(0) == 2

"""A lease that cannot be read for whatever reason does not stop the others; a call that hangs
delays only its own lease.
"""

from __future__ import annotations

import threading

import pytest

from kcl_pipeline.aws import MIN_TIMEOUT_SECONDS, dynamodb_config
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import AwsTrouble, ShardStalled
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
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
    assert any(e.error == "a defect" for e in world.of(AwsTrouble))
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


def test_one_renewal_that_hangs_does_not_hold_up_the_others():
    pools, go_on = Pools(4, parallel=True), threading.Event()

    def renew(number):
        if number == 1:
            go_on.wait(5)
        return number

    try:
        assert sorted(pools.map_within(renew, range(3), 0.2)) == [0, 2]
    finally:
        go_on.set()
        pools.shut_down()

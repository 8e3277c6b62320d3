"""Enhanced fan-out in a worker: takeovers, reshards and retrieval modes."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import (
    AccessDeniedError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.kinesis.fan_out.source import FanOutReader
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.local.kinesis import codec
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.threads import spawn_thread
from tests.support.fan_out_world import (
    DEADLINE_SECONDS,
    FanOutWorld,
    break_connections,
    close,
    data_of,
    end_subscriptions,
    put,
    read_until_it_raises,
    settings,
    subscriptions,
    take,
    wait_for,
)
from tests.support.local_aws import ZERO


def test_a_second_owner_takes_the_shard_over(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    old = world.reader()
    assert data_of(take(old, 1)) == [b"a"]
    new = world.reader()
    with pytest.raises(ThrottledError, match="ResourceInUse"):
        new.read()
    end_subscriptions(aws, 6)
    assert data_of(take(new, 1, tolerate=(ThrottledError,))) == [b"a"]
    with pytest.raises(ThrottledError, match="ResourceInUse"):
        read_until_it_raises(old, [])
    close(old, new)


def test_the_buffer_of_a_subscription_with_a_thread_is_bounded(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws, settings(fan_out_http="1.1")).prepared()
    reader = world.reader()
    assert reader.read() is None
    for _ in range(12):
        put(aws, b"x" * 1_000_000)
    subscription = reader._kinesis._subscription
    wait_for(lambda: subscription._capacity is not None, "an event waits for capacity")
    assert len(subscription._buffer) == 1
    assert subscription.silent_seconds() == 0
    world.stall_clock.advance(3600)
    assert len(data_of(take(reader, 12))) == 12
    close(reader)


# In the prefetcher of the worker


def test_all_records_across_a_reshard_with_breaking_connections(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    rng = random.Random(7)
    prefetcher = Prefetcher(world.settings.retrieval, SystemClock(), rng, world.events.append)
    prefetcher.add(world.reader())
    sent: dict[str, list[bytes]] = {}
    got: dict[str, list[bytes]] = {}
    through: dict[str, Position] = {}
    ended: set[str] = set()
    deadline = time.monotonic() + 2 * DEADLINE_SECONDS
    turn = 0
    while turn < 60 or sum(map(len, got.values())) < sum(map(len, sent.values())):
        assert time.monotonic() < deadline, (sent, got, world.events)
        if turn < 60:
            key = str(rng.random())
            value = b"%d" % turn
            aws.kinesis.put("orders", [(key, value)])
            sent.setdefault("all", []).append(value)
        if turn == 20:
            aws.kinesis.split("orders", ZERO)
        if turn in (10, 30, 45):
            break_connections(aws)
            end_subscriptions(aws, 6)
        turn += 1
        time.sleep(min(prefetcher.step(), 0.02))
        for chunk in prefetcher.take(1000, 1 << 20):
            assert chunk.after == through.get(chunk.lease_key, TRIM_HORIZON)
            through[chunk.lease_key] = chunk.through
            got.setdefault("all", []).extend(chunk.records.column("data").to_pylist())
            for child in chunk.shard_end or ():
                prefetcher.add(world.reader(shard_id=child.shard_id))
            if chunk.shard_end is not None:
                ended.add(chunk.lease_key)
    assert sorted(got["all"]) == sorted(sent["all"])
    assert ended == {ZERO}
    for key in through:
        prefetcher.remove(key)


def test_a_lost_lease_closes_its_subscription_at_once(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    prefetcher = Prefetcher(
        world.settings.retrieval, SystemClock(), random.Random(1), world.events.append
    )
    reader = world.reader()
    prefetcher.add(reader)
    put(aws, b"a")
    wait_for(lambda: prefetcher.step() >= 0 and prefetcher._bytes > 0, "something is buffered")
    assert prefetcher.caught_up(ZERO) is False
    assert len(prefetcher.take(10, 1000)) == 1
    assert prefetcher.caught_up(ZERO) is True
    prefetcher.remove(ZERO)
    wait_for(lambda: subscriptions() == 0, "the thread ends without waiting for an event")
    put(aws, b"b")
    assert reader.read() is None
    assert subscriptions() == 0


def test_a_shard_is_not_at_its_tip_before_its_first_event(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    prefetcher = Prefetcher(
        world.settings.retrieval, SystemClock(), random.Random(1), world.events.append
    )
    put(aws, b"a")
    aws.fault_rules.replace(
        [FaultRule(service="kinesis", operation="SubscribeToShard", kind="throttle", count=1)]
    )
    reader = world.reader()
    prefetcher.add(reader)
    seen = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not prefetcher._bytes:
        assert time.monotonic() < deadline
        prefetcher.step()
        seen.append(prefetcher.caught_up(ZERO))
    assert not any(seen)
    prefetcher.remove(ZERO)


# Choice between polling and subscription


def test_modes(aws: EmbeddedAws) -> None:
    polling = FanOutWorld(aws, settings("polling")).prepared()
    assert type(polling.reader()) is ShardReader
    assert polling.consumers() == []
    few = FanOutWorld(aws, settings("auto", fan_out_max_shards=2)).prepared()
    assert isinstance(few.reader(held=2), FanOutReader)
    assert type(few.reader(held=3)) is ShardReader
    assert few.consumers() == ["orders-app"]
    named = FanOutWorld(aws, settings("fan_out", consumer_name="mine")).prepared()
    assert isinstance(named.reader(held=500), FanOutReader)
    assert sorted(named.consumers()) == ["mine", "orders-app"]


def test_auto_polls_where_it_may_not_register(aws: EmbeddedAws) -> None:
    aws.fault_rules.replace(
        [FaultRule(service="kinesis", operation="RegisterStreamConsumer", kind="deny")]
    )
    world = FanOutWorld(aws, settings("auto")).prepared()
    assert type(world.reader()) is ShardReader
    assert [type(e) for e in world.events] == [AwsTrouble]
    with pytest.raises(AccessDeniedError, match="kinesis:RegisterStreamConsumer"):
        FanOutWorld(aws).prepared()


def test_a_given_consumer_is_used_as_it_is(aws: EmbeddedAws) -> None:
    arn = aws.kinesis.call(
        "RegisterStreamConsumer", StreamARN=aws.kinesis.stream("orders").arn, ConsumerName="given"
    )["Consumer"]["ConsumerARN"]
    aws.fault_rules.replace(
        [
            FaultRule(service="kinesis", operation=f"{verb}StreamConsumer", kind="deny")
            for verb in ("Register", "Describe")
        ]
    )
    world = FanOutWorld(aws, settings(consumer_arns={"orders": arn})).prepared()
    put(aws, b"a")
    reader = world.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    close(reader)


def test_what_cannot_work_is_refused(aws: EmbeddedAws) -> None:
    with pytest.raises(ValueError, match="is not the ARN of a consumer"):
        RetrievalSettings(
            consumer_arns={"orders": "arn:aws:kinesis:us-east-1:123456789012:stream/orders"}
        )
    world = FanOutWorld(aws)
    with pytest.raises(SettingsError, match="cannot subscribe"):
        Retrieval(
            world.settings, world.kinesis, None, SystemClock(), world.events.append, spawn_thread
        ).register_consumers([world.stream])
    aws.kinesis.call("DeleteStream", StreamName="orders")
    with pytest.raises(NotFoundError):
        world.prepared()


def test_a_broken_event_is_delivered_again(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    real = codec.encode_event
    monkeypatch.setattr(codec, "encode_event", lambda *args: real(*args)[:-3])
    reader = world.reader()
    with pytest.raises(UnavailableError, match="cannot be read"):
        read_until_it_raises(reader, [])
    monkeypatch.setattr(codec, "encode_event", real)
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(ThrottledError,))) == [b"a"]
    close(reader)


def test_a_worker_drains_a_stream_by_fan_out_into_its_table(
    aws: EmbeddedAws, tmp_path: Path
) -> None:
    """From start to end: consumer registered under the application's name, every record once in the
    table, no subscription left behind.
    """
    aws.kinesis.call("CreateStream", StreamName="many", ShardCount=3)
    sent = [b"%d" % n for n in range(300)]
    aws.kinesis.put("many", [(str(n), value) for n, value in enumerate(sent)])
    quick = {"lease": {"failover_time_millis": 500}, "retrieval": {"retrieval_mode": "fan_out"}}
    options = SessionOptions(
        "us-east-1", endpoint_url=aws.endpoint_url, aws_access_key_id="k", aws_secret_access_key="s"
    )
    pipeline = KinesisPipeline(
        name="drains",
        streams=["many"],
        sink=DeltaSink(str(tmp_path / "t")),
        settings_overrides=quick,
    )
    worker = pipeline.build_worker("w-1", clients=AwsClients(pipeline.settings, options))
    summary = worker.run(SystemClock().signal(), mode="drain")
    assert str(summary.reason) == "drained"
    assert sorted(
        DeltaTable(str(tmp_path / "t")).to_pyarrow_table().column("data").to_pylist()
    ) == sorted(sent)
    names = aws.kinesis.call("ListStreamConsumers", StreamARN=aws.kinesis.stream("many").arn)[
        "Consumers"
    ]
    assert [c["ConsumerName"] for c in names] == ["drains"]
    wait_for(lambda: subscriptions() == 0, "the worker's subscriptions end with it")

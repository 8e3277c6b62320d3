"""Enhanced fan-out reads the same records as polling, after every end of a subscription."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kcl_pipeline.batch import NO_RECORDS
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import NotFoundError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.fan_out.consumers import Consumers
from kcl_pipeline.kinesis.fan_out.source import SubscribedShard
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.testing.clock import ShiftedClock, VirtualClock
from kcl_pipeline.testing.kinesis import subscriptions as kinesis_subscriptions
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from kcl_pipeline.threads import spawn_thread
from tests.support.fan_out_world import (
    FanOutWorld,
    break_connections,
    close,
    data_of,
    end_subscriptions,
    put,
    read_until_it_raises,
    subscriptions,
    take,
    wait_for,
)
from tests.support.kpl_encoder import aggregate_of
from tests.support.local_aws import ZERO


def test_records_come_in_order_and_equal_to_polling(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a", aggregate_of([("k", None, b"b"), ("k", None, b"c")]), b"d")
    reader = world.reader()
    chunks = take(reader, 4)
    polled = ShardReader(
        world.kinesis,
        world.stream,
        ZERO,
        ZERO,
        TRIM_HORIZON,
        None,
        world.settings.retrieval,
        SystemClock(),
    ).read()
    assert polled is not None
    assert chunks[0].records.equals(polled.records)
    assert (chunks[0].after, chunks[-1].through, chunks[0].bytes) == (
        polled.after,
        polled.through,
        polled.bytes,
    )
    put(aws, b"e")
    later = take(reader, 1)
    assert data_of(later) == [b"e"]
    assert later[0].after == chunks[-1].through
    assert reader.millis_behind_latest == 0
    close(reader)


def test_a_silent_subscription_claims_no_time(aws: EmbeddedAws) -> None:
    """The time up to which all records were read comes from events, not from their absence."""
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    reader = world.reader()
    take(reader, 1)
    wait_for(lambda: reader.read() is None and reader.read_up_to_millis is not None, "an event")
    known = reader.read_up_to_millis
    assert known is not None
    assert abs(known - aws.kinesis.world.now_millis()) < 10_000
    world.stall_clock.advance(15)
    for _ in range(5):
        assert reader.read() is None
    assert reader.read_up_to_millis <= known + 7_000, "events come every five seconds"
    close(reader)


class HandedEvents:
    """A fan-out client with one subscription, whose events the test hands over."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.error = None
        self.received = 0
        self.is_over = False
        self.events: list[RecordsPage] = []
        self.waits_since: float | None = clock.monotonic()

    def subscribe(self, *_: Any, **__: Any) -> HandedEvents:
        return self

    def start(self, _name: str, _spawn: Any) -> None:
        pass

    def take(self) -> RecordsPage | None:
        return self.events.pop(0) if self.events else None

    def silent_seconds(self) -> float:
        return 0.0 if self.waits_since is None else self.clock.monotonic() - self.waits_since

    def close(self) -> None:
        pass


@pytest.mark.parametrize("was_on_its_way", [True, False])
def test_an_event_that_a_full_buffer_kept_on_its_way_has_its_own_time(
    was_on_its_way: bool,
) -> None:
    """It says what was true when it was sent, also if nothing could be taken shortly before."""
    clock = VirtualClock()
    model = KinesisModel(clock)
    model.create_stream("orders")
    kinesis = InMemoryKinesis(model)
    stream = kinesis.resolve_stream("orders", multi_stream=False)
    handed: Any = HandedEvents(clock)
    consumers = Consumers(handed, "orders-app", {str(stream.arn): "consumer"}, clock)
    shard = SubscribedShard(
        kinesis, handed, consumers, RetrievalSettings(), clock, spawn_thread, ZERO
    )
    sent = model.world.now_millis()
    assert shard.get_records(stream, ZERO, "TRIM_HORIZON", 1).served_millis is None
    clock.advance(60)  # the reader waits for memory
    handed.waits_since = None if was_on_its_way else clock.monotonic() - 1
    assert shard.get_records(stream, ZERO, "TRIM_HORIZON", 1).served_millis is None
    handed.events.append(RecordsPage(NO_RECORDS, "1", 0))
    page = shard.get_records(stream, ZERO, "TRIM_HORIZON", 1)
    assert page.served_millis == (sent if was_on_its_way else sent + 60_000)


def test_a_record_without_a_key_has_a_null_key(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    arn = aws.kinesis.world.arn("orders")
    aws.kinesis.call(
        "UpdateStreamMode", StreamARN=arn, StreamModeDetails={"StreamMode": "ON_DEMAND"}
    )
    aws.kinesis.call(
        "UpdateStreamRecordDistributionStrategy", StreamARN=arn, RecordDistributionStrategy="AUTO"
    )
    aws.kinesis.put("orders", [(None, b"a"), ("k", b"b"), (None, b"c")])
    reader = world.reader()
    rows = [row for chunk in take(reader, 3) for row in chunk.records.to_pylist()]
    assert [(row["partition_key"], row["data"]) for row in rows] == [
        (None, b"a"),
        ("k", b"b"),
        (None, b"c"),
    ]
    close(reader)


def test_reading_begins_where_polling_would(aws: EmbeddedAws) -> None:
    put(aws, b"old")
    numbers = put(aws, b"a", aggregate_of([("k", None, b"b"), ("k", None, b"c")]), b"d")
    world = FanOutWorld(aws).prepared()
    inside = world.reader(Position(numbers[1], 0))
    first = take(inside, 2)
    assert data_of(first) == [b"c", b"d"]
    assert first[0].after == Position(numbers[1], 0)
    close(inside)
    end_subscriptions(aws, 6)
    after_last = world.reader(Position(numbers[2]))
    assert after_last.read() is None
    wait_for(
        lambda: after_last.read() is None and after_last.millis_behind_latest == 0,
        "the first event",
    )
    put(aws, b"new")
    assert data_of(take(after_last, 1)) == [b"new"]
    close(after_last)


def test_latest_is_subscribed_to_once(aws: EmbeddedAws) -> None:
    """A subscription at LATEST that fails before its first event is not repeated at LATEST."""
    world = FanOutWorld(aws).prepared()
    put(aws, b"old")
    end_subscriptions(aws, 3)  # the time of the service has whole seconds
    world.stall_clock.advance(1)
    reader = world.reader(LATEST)
    assert reader.read() is None
    shard = reader._kinesis
    shard._drop()
    end_subscriptions(aws, 6)
    put(aws, b"between")
    assert data_of(take(reader, 1, tolerate=(ThrottledError,))) == [b"between"]
    close(reader)


def test_at_timestamp(aws: EmbeddedAws) -> None:
    put(aws, b"before")
    end_subscriptions(aws, 60)
    moment = datetime.fromtimestamp(aws.clock.wall() - 30, UTC)
    put(aws, b"after")
    chosen = ConsumerSettings(
        application_name="orders-app",
        streams=("orders",),
        retrieval=RetrievalSettings(retrieval_mode="fan_out"),
        shard_sync=ShardSyncSettings(
            initial_position_in_stream="AT_TIMESTAMP", initial_timestamp=moment
        ),
    )
    reader = FanOutWorld(aws, chosen).prepared().reader(AT_TIMESTAMP)
    assert data_of(take(reader, 1)) == [b"after"]
    close(reader)


def test_five_minutes_are_over_and_nothing_is_missed_or_repeated(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"0")
    reader = world.reader()
    got = data_of(take(reader, 1))
    for number in range(1, 6):
        end_subscriptions(aws)
        put(aws, str(number).encode())
        got += data_of(take(reader, 1))
    assert got == [str(n).encode() for n in range(6)]
    close(reader)


def test_renewals_of_short_subscriptions_while_records_flow() -> None:
    lifetime = KinesisSettings(subscription_lifetime_millis=300)
    with EmbeddedAws(clock=ShiftedClock(), settings=lifetime) as aws:
        aws.kinesis.create_stream("orders")
        world = FanOutWorld(aws).prepared()
        reader = world.reader()
        sent = [str(n).encode() for n in range(40)]
        got: list[bytes] = []
        for value in sent:
            put(aws, value)
            end_subscriptions(aws, 6)
            got += data_of(take(reader, 1, tolerate=(ThrottledError, UnavailableError)))
        assert got == sent
        close(reader)


@pytest.mark.parametrize("kind", ["throttle", "error500", "drop_before", "drop_after"])
def test_a_subscription_that_cannot_be_made_is_made_later(aws: EmbeddedAws, kind: Any) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    aws.fault_rules.replace(
        [FaultRule(service="kinesis", operation="SubscribeToShard", kind=kind, count=2)]
    )
    reader = world.reader()
    for _ in range(2):
        with pytest.raises(ThrottledError if kind == "throttle" else UnavailableError):
            reader.read()
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(ThrottledError,))) == [b"a"]
    close(reader)


def test_a_dropped_connection_goes_on_after_the_last_record_given_out(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    reader = world.reader()
    put(aws, b"a")
    got = data_of(take(reader, 1))
    for number in range(3):
        break_connections(aws)
        put(aws, b"during %d" % number)
        end_subscriptions(aws, 6)
        with pytest.raises(UnavailableError):
            read_until_it_raises(reader, got)
        put(aws, b"after %d" % number)
        while len(got) < 3 + 2 * number:
            got += data_of(take(reader, 1, tolerate=(ThrottledError, UnavailableError)))
    assert got == [b"a", b"during 0", b"after 0", b"during 1", b"after 1", b"during 2", b"after 2"]
    close(reader)


def test_a_silent_subscription_is_renewed(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is open but silent, which only the watchdog detects."""
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    reader = world.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    real = kinesis_subscriptions.next_event
    monkeypatch.setattr(kinesis_subscriptions, "next_event", lambda *_: None)
    put(aws, b"b")
    world.stall_clock.advance(19)
    wait_for(lambda: reader.read() is None, "not stalled yet")
    world.stall_clock.advance(3)
    with pytest.raises(UnavailableError, match="silent for 2"):
        reader.read()
    monkeypatch.setattr(kinesis_subscriptions, "next_event", real)
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(ThrottledError,))) == [b"b"]
    close(reader)


def test_the_end_of_a_shard_names_its_children(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    reader = world.reader()
    chunks = take(reader, 1)
    aws.kinesis.split("orders", ZERO)
    chunks += take(reader, 100)
    assert reader.ended
    assert [c.shard_end is None for c in chunks[:-1]] == [True] * (len(chunks) - 1)
    last = chunks[-1].shard_end
    assert last is not None
    assert [(c.shard_id[-1], c.parents) for c in last] == [("1", (ZERO,)), ("2", (ZERO,))]
    assert reader.read() is None
    wait_for(lambda: subscriptions() == 0, "the thread ends with the shard")


def test_a_consumer_that_is_gone_is_registered_again_and_the_shard_has_not_ended(
    aws: EmbeddedAws,
) -> None:
    world = FanOutWorld(aws).prepared()
    put(aws, b"a")
    reader = world.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    aws.kinesis.call(
        "DeregisterStreamConsumer", StreamARN=world.stream.arn, ConsumerName="orders-app"
    )
    with pytest.raises(UnavailableError, match="consumer of orders does not exist"):
        read_until_it_raises(reader, [])
    put(aws, b"b")
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(ThrottledError, UnavailableError))) == [b"b"]
    assert world.consumers() == ["orders-app"]
    close(reader)


def test_a_shard_of_a_deleted_stream_has_not_ended(aws: EmbeddedAws) -> None:
    world = FanOutWorld(aws).prepared()
    reader = world.reader()
    assert reader.read() is None
    aws.kinesis.call("DeleteStream", StreamName="orders", EnforceConsumerDeletion=True)
    with pytest.raises(NotFoundError):
        take(reader, 1)
    assert not reader.ended

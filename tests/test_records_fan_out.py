"""Enhanced fan-out against the embedded AWS: the same records as polling, whatever ends a subscription."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from kpl_encoder import aggregate_of
from local_aws import ZERO

from kcl_pipeline.aws import AwsClients, SessionOptions, open_fan_out, open_kinesis
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import AccessDenied, NotFound, SettingsError, Throttled, Unavailable
from kcl_pipeline.events import AwsTrouble, Event
from kcl_pipeline.local import EmbeddedAws, codec
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.records.fanout import FanOutReader
from kcl_pipeline.records.kinesis import Chunk
from kcl_pipeline.records.prefetch import Prefetcher
from kcl_pipeline.records.reader import ShardReader
from kcl_pipeline.records.retrieval import Retrieval
from kcl_pipeline.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.spark.delta import DeltaSink
from kcl_pipeline.testing import kinesis_subscriptions
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.kinesis_state import KinesisSettings
from kcl_pipeline.worker.background import spawn_thread

DEADLINE_SECONDS = 15.0


def settings(mode: str = "fan_out", **retrieval: Any) -> ConsumerSettings:
    return ConsumerSettings(application_name="orders-app", streams=("orders",), retrieval=RetrievalSettings(retrieval_mode=mode, **retrieval))


class HastyClock(ShiftedClock):
    """Sleeps (which only registration does) are short."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 50)


@dataclass
class House:
    """One worker's retrieval of one stream."""

    aws: EmbeddedAws
    settings: ConsumerSettings = field(default_factory=settings)
    stall_clock: ShiftedClock = field(default_factory=HastyClock)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = SessionOptions("us-east-1", endpoint_url=self.aws.endpoint_url, aws_access_key_id="k", aws_secret_access_key="s")
        self.clients = AwsClients(self.settings, options)
        self.kinesis = open_kinesis(self.settings, self.clients, SystemClock())
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        client = open_fan_out(self.settings, self.clients)
        self.retrieval = Retrieval(self.settings, self.kinesis, client, self.stall_clock, self.events.append, spawn_thread)

    def prepared(self) -> House:
        self.retrieval.prepare([self.stream])
        return self

    def reader(self, position: Position = TRIM_HORIZON, shard_id: str = ZERO, keys: HashKeyRange | None = None, held: int = 1) -> ShardReader:
        return self.retrieval.reader(self.stream, shard_id, shard_id, position, keys, held_leases=held)

    def consumers(self) -> list[str]:
        found = self.aws.kinesis.call("ListStreamConsumers", StreamARN=self.stream.arn)["Consumers"]
        return [c["ConsumerName"] for c in found]


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws(clock=ShiftedClock()) as running:
        running.kinesis.create_stream("orders")
        before = subscriptions()
        yield running
        running.stop()
        wait_for(lambda: subscriptions() <= before, "every subscription's thread ends")


def subscriptions() -> int:
    return sum(t.name.startswith("subscription-") for t in threading.enumerate())


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def take(reader: ShardReader, records: int, *, tolerate: tuple[type[Exception], ...] = ()) -> list[Chunk]:
    """Chunks with so many records, or up to the shard's end."""
    chunks: list[Chunk] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while sum(c.records.num_rows for c in chunks) < records and not reader.ended:
        assert time.monotonic() < deadline, f"{chunks} after {DEADLINE_SECONDS} s"
        try:
            chunk = reader.read()
        except tolerate:
            chunk = None
        if chunk is not None:
            chunks.append(chunk)
        else:
            time.sleep(0.01)
    return chunks


def data_of(chunks: list[Chunk]) -> list[bytes]:
    return [value for chunk in chunks for value in chunk.records.column("data").to_pylist()]


def put(aws: EmbeddedAws, *data: bytes) -> list[str]:
    return [str(p.sequence_number) for p in aws.kinesis.put("orders", [("k", d) for d in data])]


def end_subscriptions(aws: EmbeddedAws, seconds: float = 301) -> None:
    """The model's clock passes the five minutes of every subscription."""
    assert isinstance(aws.clock, ShiftedClock)
    aws.clock.advance(seconds)


def close(*readers: ShardReader) -> None:
    for reader in readers:
        assert isinstance(reader, FanOutReader)
        reader.close()


def test_records_come_in_order_and_equal_to_polling(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    put(aws, b"a", aggregate_of([("k", None, b"b"), ("k", None, b"c")]), b"d")
    reader = house.reader()
    chunks = take(reader, 4)
    polled = ShardReader(house.kinesis, house.stream, ZERO, ZERO, TRIM_HORIZON, None, house.settings.retrieval, SystemClock()).read()
    assert polled is not None
    assert chunks[0].records.equals(polled.records)
    assert (chunks[0].after, chunks[-1].through, chunks[0].bytes) == (polled.after, polled.through, polled.bytes)
    put(aws, b"e")
    later = take(reader, 1)
    assert data_of(later) == [b"e"]
    assert later[0].after == chunks[-1].through
    assert reader.millis_behind_latest == 0
    close(reader)


def test_reading_begins_where_polling_would(aws: EmbeddedAws) -> None:
    put(aws, b"old")
    numbers = put(aws, b"a", aggregate_of([("k", None, b"b"), ("k", None, b"c")]), b"d")
    house = House(aws).prepared()
    inside = house.reader(Position(numbers[1], 0))
    first = take(inside, 2)
    assert data_of(first) == [b"c", b"d"]
    assert first[0].after == Position(numbers[1], 0)
    close(inside)
    end_subscriptions(aws, 6)
    after_last = house.reader(Position(numbers[2]))
    assert after_last.read() is None
    wait_for(lambda: after_last.read() is None and after_last.millis_behind_latest == 0, "the first event")
    put(aws, b"new")
    assert data_of(take(after_last, 1)) == [b"new"]
    close(after_last)


def test_latest_is_subscribed_to_once(aws: EmbeddedAws) -> None:
    """A subscription at LATEST that breaks before its first event must not be made again at a later LATEST."""
    house = House(aws).prepared()
    put(aws, b"old")
    end_subscriptions(aws, 1)
    house.stall_clock.advance(1)
    reader = house.reader(LATEST)
    assert reader.read() is None
    shard = reader._kinesis
    shard._drop()
    end_subscriptions(aws, 6)
    put(aws, b"between")
    assert data_of(take(reader, 1, tolerate=(Throttled,))) == [b"between"]
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
        shard_sync=ShardSyncSettings(initial_position_in_stream="AT_TIMESTAMP", initial_timestamp=moment),
    )
    reader = House(aws, chosen).prepared().reader(AT_TIMESTAMP)
    assert data_of(take(reader, 1)) == [b"after"]
    close(reader)


def test_five_minutes_are_over_and_nothing_is_missed_or_repeated(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    put(aws, b"0")
    reader = house.reader()
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
        house = House(aws).prepared()
        reader = house.reader()
        sent = [str(n).encode() for n in range(40)]
        got: list[bytes] = []
        for value in sent:
            put(aws, value)
            end_subscriptions(aws, 6)
            got += data_of(take(reader, 1, tolerate=(Throttled, Unavailable)))
        assert got == sent
        close(reader)


@pytest.mark.parametrize("kind", ["throttle", "error500", "drop_before", "drop_after"])
def test_a_subscription_that_cannot_be_made_is_made_later(aws: EmbeddedAws, kind: Any) -> None:
    house = House(aws).prepared()
    put(aws, b"a")
    aws.fault_rules.replace([FaultRule(service="kinesis", operation="SubscribeToShard", kind=kind, count=2)])
    reader = house.reader()
    for _ in range(2):
        with pytest.raises(Throttled if kind == "throttle" else Unavailable):
            reader.read()
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(Throttled,))) == [b"a"]
    close(reader)


def test_a_dropped_connection_goes_on_after_the_last_record_given_out(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    reader = house.reader()
    put(aws, b"a")
    got = data_of(take(reader, 1))
    for number in range(3):
        break_connections(aws)
        put(aws, b"during %d" % number)
        end_subscriptions(aws, 6)
        with pytest.raises(Unavailable):
            read_until_it_raises(reader, got)
        put(aws, b"after %d" % number)
        while len(got) < 3 + 2 * number:
            got += data_of(take(reader, 1, tolerate=(Throttled, Unavailable)))
    assert got == [b"a", b"during 0", b"after 0", b"during 1", b"after 1", b"during 2", b"after 2"]
    close(reader)


def read_until_it_raises(reader: ShardReader, got: list[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        chunk = reader.read()
        got += data_of([chunk] if chunk else [])
        time.sleep(0.01)


def break_connections(aws: EmbeddedAws) -> None:
    server = aws._server
    assert server is not None
    for connection in list(server._connections):
        connection.shutdown(socket.SHUT_RDWR)


def test_a_silent_subscription_is_made_anew(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stands and says nothing: only the watchdog can tell."""
    house = House(aws).prepared()
    put(aws, b"a")
    reader = house.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    real = kinesis_subscriptions.next_event
    monkeypatch.setattr(kinesis_subscriptions, "next_event", lambda *_: None)
    put(aws, b"b")
    house.stall_clock.advance(19)
    wait_for(lambda: reader.read() is None, "not stalled yet")
    house.stall_clock.advance(3)
    with pytest.raises(Unavailable, match="silent for 2"):
        reader.read()
    monkeypatch.setattr(kinesis_subscriptions, "next_event", real)
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(Throttled,))) == [b"b"]
    close(reader)


def test_the_end_of_a_shard_names_its_children(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    put(aws, b"a")
    reader = house.reader()
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


def test_a_consumer_that_is_gone_is_registered_again_and_the_shard_has_not_ended(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    put(aws, b"a")
    reader = house.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    aws.kinesis.call("DeregisterStreamConsumer", StreamARN=house.stream.arn, ConsumerName="orders-app")
    with pytest.raises(Unavailable, match="consumer of orders is gone"):
        read_until_it_raises(reader, [])
    put(aws, b"b")
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(Throttled, Unavailable))) == [b"b"]
    assert house.consumers() == ["orders-app"]
    close(reader)


def test_a_deleted_stream_ends_without_children(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    reader = house.reader()
    assert reader.read() is None
    aws.kinesis.call("DeleteStream", StreamName="orders", EnforceConsumerDeletion=True)
    chunks = take(reader, 1)
    assert [c.shard_end for c in chunks] == [()]
    assert reader.ended


def test_a_second_owner_takes_the_shard_over(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    put(aws, b"a")
    old = house.reader()
    assert data_of(take(old, 1)) == [b"a"]
    new = house.reader()
    with pytest.raises(Throttled, match="ResourceInUse"):
        new.read()
    end_subscriptions(aws, 6)
    assert data_of(take(new, 1, tolerate=(Throttled,))) == [b"a"]
    with pytest.raises(Throttled, match="ResourceInUse"):
        read_until_it_raises(old, [])
    close(old, new)


def test_the_buffer_of_a_subscription_is_bounded(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    reader = house.reader()
    assert reader.read() is None
    for _ in range(12):
        put(aws, b"x" * 1_000_000)
    subscription = reader._kinesis._subscription
    wait_for(lambda: subscription._room is not None, "an event waits for room")
    assert len(subscription._pages) == 4
    assert subscription.silent_seconds() == 0
    house.stall_clock.advance(3600)
    assert len(data_of(take(reader, 12))) == 12
    close(reader)


# -- in the worker's prefetcher ----------------------------------------------------------------------------------------


def test_all_records_across_a_reshard_with_breaking_connections(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    rng = random.Random(7)
    prefetcher = Prefetcher(house.settings.retrieval, SystemClock(), rng, house.events.append)
    prefetcher.add(house.reader())
    sent: dict[str, list[bytes]] = {}
    got: dict[str, list[bytes]] = {}
    through: dict[str, Position] = {}
    ended: set[str] = set()
    deadline = time.monotonic() + 2 * DEADLINE_SECONDS
    turn = 0
    while turn < 60 or sum(map(len, got.values())) < sum(map(len, sent.values())):
        assert time.monotonic() < deadline, (sent, got, house.events)
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
                prefetcher.add(house.reader(shard_id=child.shard_id))
            if chunk.shard_end is not None:
                ended.add(chunk.lease_key)
    assert sorted(got["all"]) == sorted(sent["all"])
    assert ended == {ZERO}
    for key in through:
        prefetcher.remove(key)


def test_a_lost_lease_closes_its_subscription_at_once(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    prefetcher = Prefetcher(house.settings.retrieval, SystemClock(), random.Random(1), house.events.append)
    reader = house.reader()
    prefetcher.add(reader)
    put(aws, b"a")
    wait_for(lambda: prefetcher.step() >= 0 and prefetcher.buffered_bytes > 0, "something is buffered")
    assert prefetcher.caught_up(ZERO) is False
    assert len(prefetcher.take(10, 1000)) == 1
    assert prefetcher.caught_up(ZERO) is True
    prefetcher.remove(ZERO)
    wait_for(lambda: subscriptions() == 0, "the thread ends without waiting for an event")
    put(aws, b"b")
    assert reader.read() is None
    assert subscriptions() == 0


def test_a_shard_is_not_at_its_tip_before_its_first_event(aws: EmbeddedAws) -> None:
    house = House(aws).prepared()
    prefetcher = Prefetcher(house.settings.retrieval, SystemClock(), random.Random(1), house.events.append)
    put(aws, b"a")
    aws.fault_rules.replace([FaultRule(service="kinesis", operation="SubscribeToShard", kind="throttle", count=1)])
    reader = house.reader()
    prefetcher.add(reader)
    seen = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not prefetcher.buffered_bytes:
        assert time.monotonic() < deadline
        prefetcher.step()
        seen.append(prefetcher.caught_up(ZERO))
    assert not any(seen)
    prefetcher.remove(ZERO)


# -- which way a shard is read -----------------------------------------------------------------------------------------


def test_modes(aws: EmbeddedAws) -> None:
    polling = House(aws, settings("polling")).prepared()
    assert type(polling.reader()) is ShardReader
    assert polling.consumers() == []
    few = House(aws, settings("auto", fan_out_max_shards=2)).prepared()
    assert isinstance(few.reader(held=2), FanOutReader)
    assert type(few.reader(held=3)) is ShardReader
    assert few.consumers() == ["orders-app"]
    named = House(aws, settings("fan_out", consumer_name="mine")).prepared()
    assert isinstance(named.reader(held=500), FanOutReader)
    assert sorted(named.consumers()) == ["mine", "orders-app"]


def test_auto_polls_where_it_may_not_register(aws: EmbeddedAws) -> None:
    aws.fault_rules.replace([FaultRule(service="kinesis", operation="RegisterStreamConsumer", kind="deny")])
    house = House(aws, settings("auto")).prepared()
    assert type(house.reader()) is ShardReader
    assert [type(e) for e in house.events] == [AwsTrouble]
    with pytest.raises(AccessDenied, match="kinesis:RegisterStreamConsumer"):
        House(aws).prepared()


def test_a_given_consumer_is_used_as_it_is(aws: EmbeddedAws) -> None:
    arn = aws.kinesis.call("RegisterStreamConsumer", StreamARN=aws.kinesis.stream("orders").arn, ConsumerName="given")["Consumer"]["ConsumerARN"]
    aws.fault_rules.replace([FaultRule(service="kinesis", operation=f"{verb}StreamConsumer", kind="deny") for verb in ("Register", "Describe")])
    house = House(aws, settings(consumer_arns={"orders": arn})).prepared()
    put(aws, b"a")
    reader = house.reader()
    assert data_of(take(reader, 1)) == [b"a"]
    close(reader)


def test_what_cannot_work_is_refused(aws: EmbeddedAws) -> None:
    with pytest.raises(ValueError, match="is not a consumer's ARN"):
        RetrievalSettings(consumer_arns={"orders": "arn:aws:kinesis:us-east-1:123456789012:stream/orders"})
    house = House(aws)
    with pytest.raises(SettingsError, match="cannot subscribe"):
        Retrieval(house.settings, house.kinesis, None, SystemClock(), house.events.append, spawn_thread).prepare([house.stream])
    aws.kinesis.call("DeleteStream", StreamName="orders")
    with pytest.raises(NotFound):
        house.prepared()


def test_a_broken_event_is_delivered_again(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(aws).prepared()
    put(aws, b"a")
    real = codec.encode_event
    monkeypatch.setattr(codec, "encode_event", lambda *args: real(*args)[:-3])
    reader = house.reader()
    with pytest.raises(Unavailable, match="cannot be read"):
        read_until_it_raises(reader, [])
    monkeypatch.setattr(codec, "encode_event", real)
    end_subscriptions(aws, 6)
    assert data_of(take(reader, 1, tolerate=(Throttled,))) == [b"a"]
    close(reader)


def test_a_worker_drains_a_stream_by_fan_out_into_its_table(aws: EmbeddedAws, tmp_path: Path) -> None:
    """The whole way: consumer registered under the application's name, every record once in the table, no subscription left behind."""
    aws.kinesis.call("CreateStream", StreamName="many", ShardCount=3)
    sent = [b"%d" % n for n in range(300)]
    aws.kinesis.put("many", [(str(n), value) for n, value in enumerate(sent)])
    quick = {"lease": {"failover_time_millis": 500}, "retrieval": {"retrieval_mode": "fan_out"}}
    options = SessionOptions("us-east-1", endpoint_url=aws.endpoint_url, aws_access_key_id="k", aws_secret_access_key="s")
    pipeline = KinesisPipeline(name="drains", streams=["many"], sink=DeltaSink(str(tmp_path / "t")), settings_overrides=quick)
    worker = pipeline.build_worker("w-1", clients=AwsClients(pipeline.settings, options))
    summary = worker.run(SystemClock().signal(), mode="drain")
    assert str(summary.reason) == "drained"
    assert sorted(DeltaTable(str(tmp_path / "t")).to_pyarrow_table().column("data").to_pylist()) == sorted(sent)
    names = aws.kinesis.call("ListStreamConsumers", StreamARN=aws.kinesis.stream("many").arn)["Consumers"]
    assert [c["ConsumerName"] for c in names] == ["drains"]
    wait_for(lambda: subscriptions() == 0, "the worker's subscriptions end with it")

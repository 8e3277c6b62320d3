"""Fan-out over HTTP/2: shared connections, windows, TLS, and connections that fail."""

from __future__ import annotations

import sys
import threading

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.fan_out.http2_connections import (
    MAX_STREAMS,
    WINDOW_BYTES,
)
from kcl_pipeline.local import EmbeddedAws
from tests.support.fan_out_world import (
    FanOutWorld,
    break_connections,
    close,
    connections_of,
    data_of,
    end_subscriptions,
    read_until_it_raises,
    settings,
    streams_of,
    subscriptions,
    take,
    wait_for,
)
from tests.support.local_aws import ZERO

LONG_MILLIS = 60_000


@pytest.fixture
def over() -> str:
    """`aws` needs this fixture; every world here sets its HTTP version itself."""
    return "2"


def house_of(aws: EmbeddedAws, shards: int = 1) -> FanOutWorld:
    """A stream `orders` with this many shards, and a world that subscribes over HTTP/2."""
    if shards > 1:
        aws.kinesis.call("DeleteStream", StreamName="orders", EnforceConsumerDeletion=True)
        aws.kinesis.call("CreateStream", StreamName="orders", ShardCount=shards)
    return FanOutWorld(aws, settings(fan_out_http="2")).prepared()


def shard_ids(world: FanOutWorld) -> list[str]:
    return [shard.shard_id for shard in world.kinesis.list_shards(world.stream)]


def put_everywhere(aws: EmbeddedAws, world: FanOutWorld, data: bytes) -> None:
    for shard in world.kinesis.list_shards(world.stream):
        params = {
            "StreamName": "orders",
            "Data": data,
            "PartitionKey": "k",
            "ExplicitHashKey": str(shard.hash_key_range.start),
        }
        aws.kinesis.call("PutRecord", **params)


def test_subscriptions_share_connections_and_one_thread(aws: EmbeddedAws) -> None:
    world = house_of(aws, MAX_STREAMS + 3)
    before = set(threading.enumerate())
    readers = [world.reader(shard_id=shard_id) for shard_id in shard_ids(world)]
    put_everywhere(aws, world, b"a")
    assert [data_of(take(reader, 1)) for reader in readers] == [[b"a"]] * len(readers)
    connections = world.clients.http2_fan_out.connections
    assert len(connections_of(connections)) == 2
    assert streams_of(connections) == MAX_STREAMS + 3
    new = {t.name for t in set(threading.enumerate()) - before}
    # the deadlines of a process have one thread, which the first call of any test starts
    assert {n for n in new if not n.startswith("local-aws-")} - {"deadlines"} == {"http2"}
    close(*readers)
    wait_for(lambda: streams_of(connections) == 0, "closing a reader ends its response")
    assert len(connections_of(connections)) == 2


def test_a_dead_connection_ends_all_its_subscriptions_which_go_on(aws: EmbeddedAws) -> None:
    world = house_of(aws, 4)
    readers = [world.reader(shard_id=shard_id) for shard_id in shard_ids(world)]
    put_everywhere(aws, world, b"a")
    got = [data_of(take(reader, 1)) for reader in readers]
    break_connections(aws)
    put_everywhere(aws, world, b"b")
    for reader, data in zip(readers, got, strict=True):
        with pytest.raises(UnavailableError, match="was interrupted"):
            read_until_it_raises(reader, data)
    end_subscriptions(aws, 6)
    for reader, data in zip(readers, got, strict=True):
        data.extend(data_of(take(reader, 1, tolerate=(ThrottledError,))))
    assert got == [[b"a", b"b"]] * 4
    assert len(connections_of(world.clients.http2_fan_out.connections)) == 1
    close(*readers)


def test_who_does_not_take_holds_up_nobody_else_and_little_memory(aws: EmbeddedAws) -> None:
    world = house_of(aws, 2)
    slow, quick = (world.reader(shard_id=shard_id) for shard_id in shard_ids(world))
    assert slow.read() is None
    got: list[bytes] = []
    sent = [b"%d" % n + b"x" * 1_000_000 for n in range(12)]
    for data in sent:
        put_everywhere(aws, world, data)
        got += data_of(take(quick, 1))
    assert got == sent
    exchange = slow._kinesis._subscription._exchange
    wait_for(lambda: exchange._message_bytes() <= len(exchange._body), "the first event is whole")
    assert len(exchange._body) <= exchange._message_bytes() + WINDOW_BYTES
    assert data_of(take(slow, 12)) == sent
    close(slow, quick)


def test_closing_ends_everything(aws: EmbeddedAws) -> None:
    world = house_of(aws)
    reader = world.reader()
    assert reader.read() is None
    http2_threads = [t for t in threading.enumerate() if t.name == "http2"]
    assert len(http2_threads) == 1
    world.clients.close()
    http2_threads[0].join(10)
    assert not http2_threads[0].is_alive()
    with pytest.raises(UnavailableError):
        read_until_it_raises(reader, [])
    assert subscriptions() == 0


def test_without_the_extra_one_sentence_says_what_to_install(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "kcl_pipeline.kinesis.fan_out"
    for name in (f"{package}.http2", f"{package}.http2_connections"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "h2", None)
    with pytest.raises(SettingsError, match=r"pip install 'kcl-pipeline\[http2\]'"):
        FanOutWorld(aws, settings(fan_out_http="2"))


def test_polling_needs_no_extra(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kcl_pipeline.kinesis.fan_out.http2", None)
    assert (
        FanOutWorld(aws, settings("polling", fan_out_http="2")).prepared().reader().read() is None
    )
    assert (
        ConsumerSettings(application_name="orders-app", streams=("s",)).retrieval.fan_out_http
        == "1.1"
    )


# Exchange


# Connections


def test_the_shard_is_named_when_an_event_is_cut_short(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = house_of(aws)
    reader = world.reader()
    assert reader.read() is None
    exchange = reader._kinesis._subscription._exchange
    wait_for(lambda: reader.read() is None and exchange.received_bytes > 0, "the first event")
    exchange.received(b"\0\0\1\0 and then", 20)
    exchange.ended(None)
    with pytest.raises(UnavailableError, match=f"{ZERO} of orders"):
        read_until_it_raises(reader, [])
    close(reader)

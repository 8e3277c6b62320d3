"""Fixtures and helpers of the enhanced fan-out tests, on the embedded AWS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions, open_fan_out, open_kinesis
from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings
from kcl_pipeline.events import Event
from kcl_pipeline.kinesis.fan_out.source import FanOutReader
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.threads import spawn_thread
from tests.support.local_aws import ZERO

if TYPE_CHECKING:
    from kcl_pipeline.kinesis.fan_out.http2_connections import Http2Connections

DEADLINE_SECONDS = 15.0


FAN_OUT_HTTP: ContextVar[str] = ContextVar("FAN_OUT_HTTP", default="1.1")
"""HTTP version of the subscriptions in this test; set by the fixture `over`."""


def settings(mode: str = "fan_out", **retrieval: Any) -> ConsumerSettings:
    chosen: Any = {"retrieval_mode": mode, "fan_out_http": FAN_OUT_HTTP.get()} | retrieval
    return ConsumerSettings(
        application_name="orders-app", streams=("orders",), retrieval=RetrievalSettings(**chosen)
    )


class HastyClock(ShiftedClock):
    """Shortens sleeps, which only the registration of consumers uses."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 50)


@dataclass
class FanOutWorld:
    """The retrieval of one stream by one worker."""

    aws: EmbeddedAws
    settings: ConsumerSettings = field(default_factory=settings)
    stall_clock: ShiftedClock = field(default_factory=HastyClock)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = SessionOptions(
            "us-east-1",
            endpoint_url=self.aws.endpoint_url,
            aws_access_key_id="k",
            aws_secret_access_key="s",
        )
        self.clients = AwsClients(self.settings, options)
        self.kinesis = open_kinesis(self.settings, self.clients, SystemClock())
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        client = open_fan_out(self.settings, self.clients)
        WORLDS.append(self)
        self.retrieval = Retrieval(
            self.settings, self.kinesis, client, self.stall_clock, self.events.append, spawn_thread
        )

    def prepared(self) -> FanOutWorld:
        self.retrieval.register_consumers([self.stream])
        return self

    def reader(
        self,
        position: Position = TRIM_HORIZON,
        shard_id: str = ZERO,
        keys: HashKeyRange | None = None,
        held: int = 1,
    ) -> ShardReader:
        return self.retrieval.reader(
            self.stream, shard_id, shard_id, position, keys, held_leases=held
        )

    def consumers(self) -> list[str]:
        found = self.aws.kinesis.call("ListStreamConsumers", StreamARN=self.stream.arn)["Consumers"]
        return [c["ConsumerName"] for c in found]


WORLDS: list[FanOutWorld] = []


@pytest.fixture(params=["1.1", "2"], ids=["http1.1", "http2"])
def over(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with both HTTP versions of subscriptions."""
    token = FAN_OUT_HTTP.set(request.param)
    yield request.param
    FAN_OUT_HTTP.reset(token)


@pytest.fixture
def aws(over: str) -> Iterator[EmbeddedAws]:
    with EmbeddedAws(clock=ShiftedClock()) as running:
        running.kinesis.create_stream("orders")
        before = subscriptions()
        yield running
        running.stop()
        wait_for(lambda: subscriptions() <= before, "every subscription ends")
    for world in WORLDS:
        world.clients.close()
    WORLDS.clear()


def subscriptions() -> int:
    """Number of subscription threads, and of responses in progress over HTTP/2."""
    threads = sum(t.name.startswith("subscription-") for t in threading.enumerate())
    return threads + sum(
        streams_of(world.clients.http2_fan_out.connections)
        for world in WORLDS
        if world.settings.retrieval.fan_out_http == "2"
    )


def connections_of(client: Http2Connections) -> list[Any]:
    """The open connections."""
    found = {} if client._loop is None else client._loop.open
    return [one for of_address in list(found.values()) for one in list(of_address) if one.is_open]


def streams_of(client: Http2Connections) -> int:
    """Number of responses that are being received."""
    return sum(len(one.exchanges) for one in connections_of(client))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def take(
    reader: ShardReader, records: int, *, tolerate: tuple[type[Exception], ...] = ()
) -> list[Chunk]:
    """Read chunks until they have `records` records, or to the end of the shard."""
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
    """Advance the clock of the model by more than the five minutes of a subscription."""
    assert isinstance(aws.clock, ShiftedClock)
    aws.clock.advance(seconds)


def close(*readers: ShardReader) -> None:
    for reader in readers:
        assert isinstance(reader, FanOutReader)
        reader.close()


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
        with suppress(OSError):  # closed already
            connection.shutdown(socket.SHUT_RDWR)

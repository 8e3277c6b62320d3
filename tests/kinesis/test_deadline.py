"""A response whose body never ends blocks its thread for a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import HTTPClientError

from kcl_pipeline import aws_calls
from kcl_pipeline.aws_calls import Deadlines, limit_bodies
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis.boto import BotoKinesis
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\n"
    b"Content-Length: 10000000\r\n\r\n"
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server that sends a byte of its response every 20 ms, without end."""
    with serving(HEAD, b" ") as url:
        yield url


@contextlib.contextmanager
def serving(head: bytes, piece: bytes) -> Iterator[str]:
    """A server that sends a head, and then a piece every 20 ms, without end."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        connection.sendall(head)
                        while not stop.wait(0.02):
                            connection.sendall(piece)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def client_of(service: str, endpoint: str):
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=10),
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_calls, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr("kcl_pipeline.kinesis.boto.BODY_SECONDS", 0.3)


@pytest.mark.usefixtures("quick")
def test_get_records_gives_up_a_body_that_drips(endpoint: str) -> None:
    kinesis = BotoKinesis(
        client_of("kinesis", endpoint), RetrievalSettings(), ShardSyncSettings(), SystemClock()
    )
    with pytest.raises(UnavailableError):
        kinesis.get_records(StreamId("orders"), "shardId-000000000000", "iterator", 10)


@pytest.mark.usefixtures("quick")
def test_dynamodb_gives_up_a_body_that_drips(endpoint: str) -> None:
    client = client_of("dynamodb", endpoint)
    limit_bodies(client, 0.3)
    with pytest.raises(HTTPClientError):
        client.list_tables()


LARGE = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 1067009492\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b" " * 5_000,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n" + b" " * 1_000,
)
"""By its length, until the connection ends, and in chunks that never end."""


@pytest.mark.parametrize("head", LARGE, ids=["length", "no length", "chunked"])
@pytest.mark.parametrize("service", ["kinesis", "dynamodb"])
def test_a_body_over_the_limit_is_given_up_without_being_read(
    service: str, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_calls, "MAX_BODY_BYTES", 3_000)
    with serving(head, b"\r\n3e8\r\n" + b" " * 1_000) as endpoint:
        client = client_of(service, endpoint)
        if service == "kinesis":
            kinesis = BotoKinesis(client, RetrievalSettings(), ShardSyncSettings(), SystemClock())
            with pytest.raises(UnavailableError, match="more than 3000"):
                kinesis.get_records(StreamId("orders"), "shardId-000000000000", "iterator", 10)
        else:
            limit_bodies(client, 10)
            with pytest.raises(HTTPClientError, match="more than 3000"):
                client.list_tables()


def test_a_connection_is_shut_down_at_its_deadline_and_not_before() -> None:
    clock = VirtualClock()
    deadlines = Deadlines(clock, in_background=False)
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    shut_down = pytest.raises(TimeoutError, match="5 s")
    with ours, theirs, shut_down, deadlines.limited(ours, 5.0):
        clock.advance(4.9)
        deadlines.expire()
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
        clock.advance(0.2)
        deadlines.expire()
        assert ours.recv(1) == b""


def test_what_has_ended_is_not_shut_down() -> None:
    clock = VirtualClock()
    deadlines = Deadlines(clock, in_background=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with deadlines.limited(ours, 1.0):
            pass
        clock.advance(60)
        deadlines.expire()
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"

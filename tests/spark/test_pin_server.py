"""The server that tasks report to: what it keeps, and what anybody gets who can connect to it."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from kcl_pipeline.errors import SinkError
from kcl_pipeline.kinesis.ranges import FetchedShard
from kcl_pipeline.kinesis.reader import Resume
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, ChildShard, HashKeyRange
from kcl_pipeline.spark.pins import server as pin_server
from kcl_pipeline.spark.pins.pins import FETCHED, PinAddress, Pins
from kcl_pipeline.spark.pins.server import PinServer

FIRST = FetchedShard(
    "k",
    TRIM_HORIZON,
    Position("9" * 56, 3),
    1,
    shard_end=(ChildShard("c", ("k",), HashKeyRange(0, MAX_HASH_KEY)),),
    resume=Resume("iterator", "123", datetime(2026, 1, 1, tzinfo=UTC)),
    arrival_micros=(1, 2),
)


@pytest.fixture
def server() -> Iterator[PinServer]:
    made = PinServer("127.0.0.1", "127.0.0.1")
    made.begin("job", ["k", "l"])
    yield made
    made.close()


def connected(server: PinServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address.port), 5)


def answer(connection: socket.socket) -> bytes:
    """What comes until a line ends or the connection does."""
    connection.settimeout(10)
    found = b""
    try:
        while not found.endswith(b"\n") and (part := connection.recv(65536)):
            found += part
    except ConnectionError:
        pass
    return found


def hello(server: PinServer) -> bytes:
    return json.dumps({"token": server.address.token}).encode() + b"\n"


def test_the_first_report_counts(server: PinServer) -> None:
    second = FetchedShard("k", TRIM_HORIZON, TRIM_HORIZON, 2)
    with closing(Pins(server.address, "job")) as pins:
        assert pins.get("k") is None
        assert (pins.pin(FIRST), pins.pin(second), pins.get("k")) == (FIRST, FIRST, FIRST)
        assert server.end("job") == (FIRST,)
        with pytest.raises(SinkError, match="the job is over"):
            pins.pin(FIRST)


def test_tasks_without_the_token_or_after_the_job_are_refused(server: PinServer) -> None:
    with pytest.raises(SinkError, match="the token is wrong"):
        Pins(PinAddress("127.0.0.1", server.address.port, "guess"), "job")
    with pytest.raises(SinkError, match="the token is wrong"):
        Pins(PinAddress("127.0.0.1", server.address.port, "é" * 32), "job")
    with (
        closing(Pins(server.address, "other")) as pins,
        pytest.raises(SinkError, match="the job is over"),
    ):
        pins.get("k")
    with (
        closing(Pins(server.address, "job")) as pins,
        pytest.raises(SinkError, match="does not read"),
    ):
        pins.get("m")
    server.close()
    with pytest.raises(SinkError, match="cannot reach the driver"):
        Pins(server.address, "job")


HELLOS: dict[str, bytes] = {
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "a list": b"[]\n",
    "null": b"null\n",
    "no text": b"\xff\xfe\n",
    "no token": b"{}\n",
    "a number": b'{"token": 5}\n',
    "a list as token": b'{"token": ["a"]}\n',
    "more": b'{"token": "x", "more": 1}\n',
    "deep": b"[" * 250 + b"\n",
    "not ASCII": '{"token": "é"}\n'.encode(),
    "nothing": b"",
    "an empty line": b"\n",
    "a request": b'{"job": "job", "key": "k", "report": null}\n',
    "too long": b'{"token": "' + b"x" * 300 + b'"}\n',
    "no end": b"x" * 100_000,
}


@pytest.mark.parametrize("first", HELLOS.values(), ids=HELLOS.keys())
def test_before_the_token_nothing_is_answered_and_nothing_printed(
    server: PinServer,
    first: bytes,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        with connected(server) as stranger:
            try:
                stranger.sendall(first)
                stranger.shutdown(socket.SHUT_WR)
            except OSError:  # the other side has hung up in the middle of a long line
                pass
            assert answer(stranger) in (b"", b'{"report":null,"error":"the token is wrong"}\n')
    with closing(Pins(server.address, "job")) as pins:
        assert pins.pin(FIRST) == FIRST
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    # In a run with a Spark session py4j's threads log at any time; only our own logger counts here
    own = [record for record in caplog.records if record.name.startswith("kcl_pipeline")]
    assert len(own) <= 1
    assert not any(record.exc_info for record in own)
    assert server.address.token not in caplog.text


REQUESTS: dict[str, Any] = {
    "no object": 5,
    "no key": {"job": "job"},
    "number as key": {"job": "job", "key": 5},
    "list as report": {"job": "job", "key": "k", "report": []},
    "long key": {"job": "job", "key": "k" * 10_000},
    "more": {"job": "job", "key": "k", "report": None, "token": "x"},
}
REPORTS: dict[str, str] = {
    "no JSON": "x",
    "deep": "[" * 100_000,
    "empty": "{}",
    "another lease": FETCHED.dump_json(FIRST).decode().replace('"k"', '"l"', 1),
    "a float": FETCHED.dump_json(FIRST).decode().replace('"records":1', '"records":1.5'),
}


@pytest.mark.parametrize("message", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_malformed_request_ends_its_connection_alone(
    server: PinServer, message: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(server) as task, closing(Pins(server.address, "job")) as other:
        task.sendall(hello(server))
        assert answer(task) == b'{"report":null,"error":null}\n'
        task.sendall(json.dumps(message).encode() + b"\n")
        assert answer(task) == b""
        assert other.pin(FIRST) == FIRST
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_a_malformed_report_is_not_kept(server: PinServer, report: str) -> None:
    with connected(server) as task:
        task.sendall(hello(server))
        answer(task)
        message = json.dumps({"job": "job", "key": "k", "report": report}).encode()
        task.sendall(message + b"\n")
        assert json.loads(answer(task))["error"] is not None
    assert server.end("job") == ()


def test_two_messages_in_one_packet(server: PinServer) -> None:
    request = b'{"job": "job", "key": "k"}\n'
    with connected(server) as task:
        task.sendall(hello(server) + request + request)
        with task.makefile("rb") as lines:
            assert [json.loads(lines.readline())["error"] for _ in range(3)] == [None] * 3


def test_who_says_nothing_or_too_little_is_ended(
    server: PinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_server, "HELLO_SECONDS", 0.3)
    with connected(server) as silent, connected(server) as slow:
        began = time.monotonic()
        assert answer(silent) == b""
        ended = threading.Event()

        def drip() -> None:
            try:
                while not ended.wait(0.05):
                    slow.sendall(b" ")
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        assert answer(slow) == b"", "a byte now and then is not enough"
        ended.set()
        thread.join()
        assert time.monotonic() - began < 5
    assert server._waiting == {}


def test_many_connections_that_say_nothing_keep_no_task_out(
    server: PinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_server, "MAX_WAITING", 10)
    before = set(threading.enumerate())
    with closing(Pins(server.address, "job")) as early:
        strangers = [connected(server) for _ in range(100)]
        try:
            with closing(Pins(server.address, "job")) as late:
                assert late.pin(FIRST) == FIRST
            assert early.get("k") == FIRST
            assert len(server._waiting) <= 10
            assert answer(strangers[0]) == b"", "the oldest is ended"
            assert len(set(threading.enumerate()) - before) < 50
        finally:
            for stranger in strangers:
                stranger.close()


def test_the_number_of_tasks_is_bounded(server: PinServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr("kcl_pipeline.spark.pins.pins._RETRY_SECONDS", 0.01)
    with closing(Pins(server.address, "job")) as one, closing(Pins(server.address, "job")) as two:
        with pytest.raises(SinkError, match="cannot reach"):
            Pins(server.address, "job")
        assert (one.get("k"), two.get("k")) == (None, None)
    for _ in range(100):  # the server notices that they have hung up
        if not server._authenticated:
            break
        time.sleep(0.02)
    with closing(Pins(server.address, "job")) as three:
        assert three.get("k") is None


def test_a_task_tries_again_when_it_is_cut_off_before_the_token_counts(
    server: PinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcl_pipeline.spark.pins.pins._RETRY_SECONDS", 0.01)
    admit, refused = server.admit, []

    def admit_third(connection: socket.socket) -> bool:
        refused.append(connection)
        return len(refused) > 2 and admit(connection)

    monkeypatch.setattr(server, "admit", admit_third)
    with closing(Pins(server.address, "job")) as pins:
        assert pins.get("k") is None
    assert len(refused) == 3


def test_the_token_is_compared_in_constant_time(
    server: PinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = pin_server.hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(pin_server.hmac, "compare_digest", noted)
    with closing(Pins(server.address, "job")):
        pass
    token = server.address.token.encode()
    assert compared == [(token, token)]


def test_the_token_is_in_no_text(server: PinServer) -> None:
    address = server.address
    assert len(address.token) == 32
    for text in (repr(address), str(address), f"{address}", repr(server), repr([address])):
        assert address.token not in text
    assert pickle.loads(pickle.dumps(address)) == address
    with pytest.raises(SinkError) as caught:
        Pins(PinAddress("127.0.0.1", 1, address.token), "job")
    assert address.token not in str(caught.value)

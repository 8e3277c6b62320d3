"""The replay server answers alike over HTTP/1.1 and HTTP/2, and nothing that a benchmark starts
outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded

from benchmarks.peers.tied import tied
from benchmarks.replay_server import CBOR, JSON, records_of, replay_server
from benchmarks.throughput import running
from kcl_pipeline.kinesis.decode import decode_page
from kcl_pipeline.local.demo.processes import session_members

DEADLINE_SECONDS = 60.0
PARENT = """
import subprocess, sys, time
from benchmarks.peers.tied import tied
child = subprocess.Popen(tied([sys.executable, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with replay_server(200, shards=2) as url:
        yield url


def headers_of(operation: str, kind: str) -> dict[str, str]:
    return {"content-type": kind, "x-amz-target": f"Kinesis_20131202.{operation}"}


def by_http1(url: str, operation: str, body: bytes, kind: str) -> bytes:
    request = urllib.request.Request(url, body, headers_of(operation, kind))
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
        return bytes(answer.read())


def by_http2(url: str, operation: str, bodies: list[bytes], kind: str) -> list[bytes]:
    """All requests at once on one connection, with the small windows that h2 begins with."""
    host, _, port = url.removeprefix("http://").partition(":")
    got: dict[int, bytearray] = {}
    connection, open_streams = H2Connection(), set()
    connection.initiate_connection()
    for body in bodies:
        stream = connection.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", host)]
        connection.send_headers(stream, [*pseudo, *headers_of(operation, kind).items()])
        connection.send_data(stream, body, end_stream=True)
        got[stream] = bytearray()
        open_streams.add(stream)
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as wire:
        wire.sendall(connection.data_to_send())
        while open_streams:
            data = wire.recv(65_536)
            assert data, "the server hung up"
            for event in connection.receive_data(data):
                if isinstance(event, ResponseReceived):
                    assert dict(event.headers)[b":status"] == b"200"
                elif isinstance(event, DataReceived):
                    got[event.stream_id] += event.data
                    connection.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )
                elif isinstance(event, StreamEnded):
                    open_streams.discard(event.stream_id)
            wire.sendall(connection.data_to_send())
    return [bytes(body) for body in got.values()]


def test_both_protocols_give_the_same_bytes(url: str) -> None:
    asked = [
        json.dumps({"ShardIterator": f"1024-at-answer-{number:012d}"}).encode()
        for number in range(5)
    ]
    answers = by_http2(url, "GetRecords", asked, JSON)
    assert answers == [by_http1(url, "GetRecords", body, JSON) for body in asked]
    pages = [decode_page(body, JSON, "orders-1024", "shardId-000000000000") for body in answers]
    numbers = [
        int(number)
        for page in pages
        for number in page.records.column("sequence_number").to_pylist()
    ]
    assert len(numbers) == 1000
    assert numbers == sorted(set(numbers))


def test_json_and_cbor_hold_the_same_records(url: str) -> None:
    import cbor2  # noqa: PLC0415 (only here)

    iterator = {"ShardIterator": "100-at-answer-000000000003"}
    texts = decode_page(
        by_http1(url, "GetRecords", json.dumps(iterator).encode(), JSON), JSON, "s", "t"
    )
    binary = decode_page(by_http1(url, "GetRecords", cbor2.dumps(iterator), CBOR), CBOR, "s", "t")
    assert texts.records.equals(binary.records)
    assert texts.next_iterator == binary.next_iterator == "100-at-answer-000000000004"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_a_tied_process_ends_when_its_parent_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(child)


def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    command = tied(["true"])
    command[2] = "1"
    assert subprocess.run(command, check=False, timeout=DEADLINE_SECONDS).returncode == 1


def test_what_a_consumer_left_behind_is_ended_too(tmp_path: Path) -> None:
    script = "sleep 600 & echo $!; exec sleep 600"
    with running(["sh", "-c", script], dict(os.environ), tmp_path / "log") as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.kill()
        process.wait(DEADLINE_SECONDS)
        assert [member.pid for member in session_members(process.pid)] == [left]
    wait_until_gone(left)


def test_records_of_text_are_json_of_the_exact_size():
    for size in (100, 1024):
        found = [record["Data"] for record in records_of(size, 300, text=True)]
        assert {len(data) for data in found} == {size}
        orders = [json.loads(data) for data in found]
        assert {tuple(order) for order in orders} == {("order_id", "customer", "amount", "note")}
        assert len({order["order_id"] for order in orders}) == 300

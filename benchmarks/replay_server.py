"""Kinesis server with prepared responses, so that benchmarks measure the reader only.

`python -m benchmarks.replay_server` listens on a free port of 127.0.0.1 and prints `{"port": …}` as
its first line. It ends when its standard input closes. There is one stream per record size:
`orders-1024` and `orders-100`, or the sizes of `--sizes`. Each stream has `--shards` open shards.

Every GetRecords response holds `--records` records, or as many as fit into 10 MiB. They are random
bytes, or with `--text` JSON text. Only the digits that differ between responses are rewritten, so
that sequence numbers increase. The content type of the request selects JSON or CBOR. The server
supports HTTP/1.1 and HTTP/2 in cleartext.

`GET /cpu` returns the processor seconds of the server. An iterator that consists of a record size
only always returns response 0, without rewritten digits.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cbor2
import numpy as np

from benchmarks.peers.from_json import texts
from benchmarks.peers.tied import tied
from benchmarks.replay_http2 import PREFACE, Http2Connection

JSON = "application/x-amz-json-1.1"
CBOR = "application/x-amz-cbor-1.1"
SIZES = (1024, 100)
MAX_ANSWER_BYTES = 10 * 1024 * 1024
ARRIVAL_MILLIS = 1_760_000_000_000
PREFIX = "495903382714902566085596925383615710"
DIGITS = 12
NEXT = b"-at-answer-"
ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/"
MAX_HASH = 2**128 - 1


def records_of(size: int, records: int, *, text: bool = False) -> list[dict[str, Any]]:
    """Return the records of response 0; contents are random bytes or JSON text, sizes exact."""
    rng = random.Random(size)
    contents = texts(size, records) if text else [rng.randbytes(size) for _ in range(records)]
    return [
        {
            "SequenceNumber": sequence_number(0, i),
            "Data": contents[i],
            "PartitionKey": f"key-{rng.randrange(10**8):08d}",
            "ApproximateArrivalTimestamp": ARRIVAL_MILLIS + i,
        }
        for i in range(records)
    ]


def sequence_number(answer: int, row: int) -> str:
    return f"{PREFIX}{answer:0{DIGITS}d}{row:08d}"


class Prepared:
    """Body of one response in one encoding, from which all responses are made.

    `at` contains the offsets of the digits that differ between responses.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        marks = [
            m.end() for m in re.finditer(re.escape(PREFIX.encode()) + rb"(?=0{%d})" % DIGITS, body)
        ]
        self.at = np.array(marks)[:, None] + np.arange(DIGITS)
        self.next_at = body.rindex(NEXT) + len(NEXT) + np.arange(DIGITS)
        self.local = threading.local()

    def answer(self, number: int) -> memoryview:
        """Return the body of response `number`, which names the next response.

        The memory belongs to the calling thread and is valid until the thread's next call.
        """
        if not hasattr(self.local, "body"):
            self.local.body = np.frombuffer(self.body, np.uint8).copy()
        body = self.local.body
        body[self.at] = np.frombuffer(f"{number:0{DIGITS}d}".encode(), np.uint8)
        body[self.next_at] = np.frombuffer(f"{number + 1:0{DIGITS}d}".encode(), np.uint8)
        return memoryview(body)


def prepared(size: int, records: int, *, text: bool = False) -> dict[str, Prepared]:
    """Return the bodies in JSON and CBOR."""
    rows = records_of(size, records, text=text)
    tail = {
        "NextShardIterator": f"{size}{NEXT.decode()}{1:0{DIGITS}d}",
        "MillisBehindLatest": 60_000,
    }
    as_json = [
        row
        | {
            "Data": base64.b64encode(row["Data"]).decode(),
            "ApproximateArrivalTimestamp": row["ApproximateArrivalTimestamp"] / 1000,
        }
        for row in rows
    ]
    tagged = [
        row | {"ApproximateArrivalTimestamp": cbor2.CBORTag(1, row["ApproximateArrivalTimestamp"])}
        for row in rows
    ]
    json_body = json.dumps({"Records": as_json} | tail, separators=(",", ":")).encode()
    return {JSON: Prepared(json_body), CBOR: Prepared(cbor2.dumps({"Records": tagged} | tail))}


def head(length: int, content_type: str) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: "
        f"{length}\r\nx-amzn-RequestId: 0\r\n\r\n"
    ).encode()


class Replay(socketserver.BaseRequestHandler):
    """Handler of one connection in its own thread.

    A body is sent to the kernel without copies.
    """

    answers: dict[tuple[str, str], Prepared]
    same: dict[tuple[str, str], bytes]
    shards: int

    def handle(self) -> None:
        """Respond to all requests of the connection, with HTTP/2 if it begins with that preface."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = b""
        with suppress(ConnectionError):
            while data := self.request.recv(65_536):
                buffer += data
                if buffer.startswith(PREFACE):
                    self.speak_http2(buffer)
                    return
                if not PREFACE.startswith(buffer):
                    buffer = self.answer_all(buffer)

    def speak_http2(self, data: bytes) -> None:
        """Serve HTTP/2 until the client closes the connection."""
        http2 = Http2Connection(self.request.sendall, self.answer)
        while data:
            http2.data_received(data)
            data = self.request.recv(65_536)

    def answer_all(self, buffer: bytes) -> bytes:
        """Respond to all complete requests and return the remaining bytes."""
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            lines = buffer[:end].decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:])
            }
            stop = end + 4 + int(headers.get("content-length", 0))
            if len(buffer) < stop:
                return buffer
            body, buffer = buffer[end + 4 : stop], buffer[stop:]
            kind, answer = self.answer(lines[0].split(" ")[1], headers, body)
            self.request.sendall(head(len(answer), kind))
            self.request.sendall(answer)
        return buffer

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[str, bytes | memoryview]:
        """Return content type and body of the response."""
        if path == "/cpu":
            return "application/json", json.dumps({"cpu_s": time.process_time()}).encode()
        kind = CBOR if headers.get("content-type", "").startswith(CBOR) else JSON
        params = cbor2.loads(body) if kind == CBOR else json.loads(body or b"{}")
        operation = headers.get("x-amz-target", ".GetRecords").rpartition(".")[2]
        if operation == "GetRecords":
            size, _, number = params["ShardIterator"].partition(NEXT.decode())
            return kind, self.answers[kind, size].answer(int(number)) if number else self.same[
                kind, size
            ]
        answer = self.describe(operation, params)
        return kind, json.dumps(answer).encode() if kind == JSON else cbor2.dumps(answer)

    def describe(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a call that consumers make before they read."""
        name = params.get("StreamName") or str(params.get("StreamARN", "")).rpartition("/")[2]
        if operation == "GetShardIterator":
            after = params.get("StartingSequenceNumber", "")[len(PREFIX) : len(PREFIX) + DIGITS]
            number = int(after or 0) + (params["ShardIteratorType"] == "AFTER_SEQUENCE_NUMBER")
            return {"ShardIterator": f"{name.rpartition('-')[2]}{NEXT.decode()}{number:0{DIGITS}d}"}
        if operation == "ListShards":
            return {"Shards": self.shard_list()}
        about: dict[str, Any] = {
            "StreamName": name,
            "StreamARN": ARN + name,
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": 24,
            "EnhancedMonitoring": [],
        }
        if operation == "DescribeStreamSummary":
            return {
                "StreamDescriptionSummary": about
                | {"OpenShardCount": self.shards, "StreamCreationTimestamp": ARRIVAL_MILLIS / 1000}
            }
        if operation == "DescribeStream":
            return {
                "StreamDescription": about
                | {
                    "Shards": self.shard_list(),
                    "HasMoreShards": False,
                    "StreamCreationTimestamp": ARRIVAL_MILLIS / 1000,
                }
            }
        return {}

    def shard_list(self) -> list[dict[str, Any]]:
        """Return open shards that divide the hash keys evenly."""
        edges = [MAX_HASH * i // self.shards for i in range(self.shards)] + [MAX_HASH + 1]
        return [
            {
                "ShardId": f"shardId-{i:012d}",
                "HashKeyRange": {
                    "StartingHashKey": str(edges[i]),
                    "EndingHashKey": str(edges[i + 1] - 1),
                },
                "SequenceNumberRange": {"StartingSequenceNumber": sequence_number(0, 0)},
            }
            for i in range(self.shards)
        ]


def answer_records(size: int, records: int) -> int:
    """Return how many records a response holds, at most as many as Kinesis permits."""
    return min(records, MAX_ANSWER_BYTES // size)


class Server(socketserver.ThreadingTCPServer):
    """TCP server whose threads end with the process."""

    daemon_threads = True
    request_queue_size = 128


def serve(records: int, shards: int, sizes: tuple[int, ...] = SIZES, *, text: bool = False) -> None:
    Replay.answers = {
        (kind, str(size)): body
        for size in sizes
        for kind, body in prepared(size, answer_records(size, records), text=text).items()
    }
    Replay.same = {of: bytes(body.answer(0)) for of, body in Replay.answers.items()}
    Replay.shards = shards
    with Server(("127.0.0.1", 0), Replay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps({"port": server.server_address[1]}), flush=True)
        sys.stdin.buffer.read()
        server.shutdown()


@contextmanager
def replay_server(
    records: int, shards: int = 16, sizes: tuple[int, ...] = SIZES, *, text: bool = False
) -> Iterator[str]:
    """Run the server in a separate process and yield its address."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.replay_server",
        "--records",
        str(records),
        "--shards",
        str(shards),
    ]
    command += ["--sizes", *map(str, sizes)]
    command += ["--text"] if text else []
    with subprocess.Popen(tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="of a record's data, bytes"
    )
    parser.add_argument("--text", action="store_true", help="records are JSON text")
    options = parser.parse_args()
    serve(options.records, options.shards, tuple(options.sizes), text=options.text)

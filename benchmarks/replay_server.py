"""A Kinesis of one stream that answers GetRecords with prepared bodies, so that what is measured is the reader and not the server.

`python -m benchmarks.replay_server` listens on a free port of 127.0.0.1, prints `{"port": …}` as its first line, and ends with its standard input.
The iterator names the record size in bytes ("1024", "100"); every answer holds `--records` records and the same iterator again. JSON and CBOR,
by the request's content type. `GET /cpu` gives the seconds of processor time that the server has used.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cbor2

JSON = "application/x-amz-json-1.1"
CBOR = "application/x-amz-cbor-1.1"
SIZES = (1024, 100)
ARRIVAL_MILLIS = 1_760_000_000_000
FIRST_NUMBER = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898


def prepared(size: int, records: int) -> dict[str, bytes]:
    """The two bodies of one answer; record contents are random, sizes exact."""
    rng = random.Random(size)
    rows: list[dict[str, Any]] = [
        {
            "SequenceNumber": str(FIRST_NUMBER + i * 16),
            "Data": rng.randbytes(size),
            "PartitionKey": f"key-{rng.randrange(10**8):08d}",
            "ApproximateArrivalTimestamp": ARRIVAL_MILLIS + i,
        }
        for i in range(records)
    ]
    tail = {"NextShardIterator": str(size), "MillisBehindLatest": 60_000}
    texts = [row | {"Data": base64.b64encode(row["Data"]).decode(), "ApproximateArrivalTimestamp": row["ApproximateArrivalTimestamp"] / 1000} for row in rows]
    tagged = [row | {"ApproximateArrivalTimestamp": cbor2.CBORTag(1, row["ApproximateArrivalTimestamp"])} for row in rows]
    return {JSON: json.dumps({"Records": texts} | tail, separators=(",", ":")).encode(), CBOR: cbor2.dumps({"Records": tagged} | tail)}


def response(body: bytes, content_type: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nx-amzn-RequestId: 0\r\n\r\n"
    return head.encode() + body


class Replay(asyncio.Protocol):
    """One connection. Requests are small and come whole or in few pieces."""

    def __init__(self, answers: dict[tuple[str, str], bytes]) -> None:
        self.answers = answers
        self.buffer = b""
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            lines = self.buffer[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            stop = end + 4 + int(headers.get("content-length", 0))
            if len(self.buffer) < stop:
                return
            body, self.buffer = self.buffer[end + 4 : stop], self.buffer[stop:]
            self.transport.write(self.answer(lines[0], headers, body))

    def answer(self, request: str, headers: dict[str, str], body: bytes) -> bytes:
        """The whole response, head and body."""
        if request.startswith("GET /cpu"):
            return response(json.dumps({"cpu_s": time.process_time()}).encode(), "application/json")
        kind = CBOR if headers.get("content-type", "").startswith(CBOR) else JSON
        params = cbor2.loads(body) if kind == CBOR else json.loads(body or b"{}")
        return self.answers[kind, params["ShardIterator"]]


async def serve(records: int) -> None:
    answers = {(kind, str(size)): response(body, kind) for size in SIZES for kind, body in prepared(size, records).items()}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Replay(answers), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


@contextmanager
def replay_server(records: int) -> Iterator[str]:
    """The server in a process of its own; gives its address."""
    command = [sys.executable, "-m", "benchmarks.replay_server", "--records", str(records)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000)
    asyncio.run(serve(parser.parse_args().records))

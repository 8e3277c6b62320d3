"""The server that tasks of executors report to: what anybody sends who can connect."""

from __future__ import annotations

import functools
import json
import socket
from random import Random
from typing import Any, Final

from kcl_pipeline.spark.pins.server import PinServer
from tests.fuzz import values
from tests.fuzz.boundaries.rows import READ, REFUSED
from tests.fuzz.boundaries.table import raw_bytes
from tests.fuzz.boundary import Boundary


@functools.cache
def _server() -> PinServer:
    server = PinServer("127.0.0.1", "127.0.0.1")
    server.begin("job", ["k"])
    return server


def draw_messages(random: Random) -> dict[str, Any]:
    """The lines of one connection; the token is put in where it is to be right."""
    hello: Any = {"token": random.choice(("TOKEN",) * 4 + (values.text(random)[:300],))}
    request: Any = {"job": random.choice(("job", "x")), "key": "k", "report": None}
    if random.random() < 0.5:
        request["report"] = raw_bytes(
            random, {"lease_key": "k", "after": {}, "through": {}}
        ).decode("utf-8", "replace")
    lines = [raw_bytes(random, one) for one in (hello, request, request)[: random.randrange(1, 4)]]
    if random.random() < 0.05:
        lines.append(b"x" * 1_100_000)
    return {"raw": b"\n".join(lines) + random.choice((b"\n", b"\n", b"")), "parts": random.random()}


def check_messages(value: dict[str, Any]) -> str:
    """Answers, or the end of the connection."""
    server = _server()
    raw = value["raw"].replace(b"TOKEN", server.address.token.encode())
    at = int(len(raw) * value["parts"])
    answers = b""
    # Not over TCP: a port that was used is free again after a minute only
    task, accepted = socket.socketpair()
    with task:
        task.settimeout(20)
        assert server.admit(accepted)
        server._server.process_request(accepted, ("fuzz", 0))
        try:
            task.sendall(raw[:at])
            task.sendall(raw[at:])
            task.shutdown(socket.SHUT_WR)
            while part := task.recv(65536):
                answers += part
        except OSError:  # ended before all was sent
            pass
    lines = [json.loads(line) for line in answers.splitlines()]
    assert all(set(line) == {"report", "error"} for line in lines)
    assert not lines or lines[0]["report"] is None
    assert server._jobs["job"][1] == {}, "a report that is not one was kept"
    if not lines or lines[0]["error"]:
        return REFUSED
    return "answered" if len(lines) > 1 else READ


BOUNDARIES: Final = (
    Boundary(
        "report_server",
        draw_messages,
        check_messages,
        frozenset({READ, REFUSED, "answered"}),
        short_inputs=100,
    ),
)

"""The driver's side of `pins`: a server on the address where Spark's driver listens.

Everybody who reaches the driver can connect. Before the token of this server has come, a connection
may send one short line within a few seconds, and there may be `MAX_WAITING` such connections: a
further one ends the oldest. What is wrong in whatever way ends the connection without a trace in
the log except the first time. Messages are not encrypted, as those of Spark are not by default.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Collection
from typing import Final

import msgspec
from pydantic import ValidationError

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.kinesis.ranges import FetchedShard
from kcl_pipeline.spark.pins import (
    CONNECT_SECONDS,
    FETCHED,
    MAX_LINE,
    Answer,
    Hello,
    PinAddress,
    Request,
)

IDLE_SECONDS: Final = 600.0
"""Between two requests of a task."""
HELLO_SECONDS: Final = 10.0
MAX_HELLO: Final = 256
"""Bytes of the first line."""
MAX_WAITING: Final = 256
"""Connections that have not sent the token."""
MAX_CONNECTIONS: Final = 2048
"""Connections that have: one per running task."""
_PART_BYTES: Final = 64 * 1024
_HELLO: Final = msgspec.json.Decoder(Hello)
_REQUEST: Final = msgspec.json.Decoder(Request)
_LOG: Final = logging.getLogger(__name__)


class PinServer:
    """Serves the pins of one driver until `close`.

    `bind_host` is listened on, `host` is what tasks connect to; `port` 0: any free one. Raises
    `SinkError` when the address cannot be listened on.
    """

    def __init__(self, bind_host: str, host: str, port: int = 0) -> None:
        self.clock = SystemClock()
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[frozenset[str], dict[str, FetchedShard]]] = {}
        self._waiting: dict[socket.socket, None] = {}
        self._authenticated: set[socket.socket] = set()
        self._complained = False
        # Not from a seeded generator: what can be guessed protects nothing
        self._token = secrets.token_hex(16)
        try:
            self._server = _Server((bind_host, port), _Handler)
        except OSError as error:
            raise SinkError(
                f"the driver cannot listen on {bind_host}:{port} for its tasks: {error}; see "
                "spark.driver.bindAddress"
            ) from error
        self._server.pins = self
        self.address = PinAddress(host, self._server.server_address[1], self._token)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="pins",
            daemon=True,
        )
        self._thread.start()

    def begin(self, job: str, lease_keys: Collection[str]) -> None:
        """Take pins for these leases of this job."""
        with self._lock:
            self._jobs[job] = frozenset(lease_keys), {}

    def end(self, job: str) -> tuple[FetchedShard, ...]:
        """What was pinned, by lease key; the job's tasks are refused from now on."""
        with self._lock:
            _, pinned = self._jobs.pop(job, (frozenset(), {}))
        return tuple(pinned[key] for key in sorted(pinned))

    def close(self) -> None:
        """Stop listening, and end the connections."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            left = [*self._waiting, *self._authenticated]
        for connection in left:
            _hang_up(connection)
        self._thread.join(CONNECT_SECONDS)

    def admit(self, connection: socket.socket) -> bool:
        """Take a new connection, which has to send the token. The oldest of too many is ended."""
        with self._lock:
            if len(self._authenticated) >= MAX_CONNECTIONS:
                self.complain("there are too many connections")
                return False
            oldest = next(iter(self._waiting)) if len(self._waiting) >= MAX_WAITING else None
            if oldest is not None:
                self._waiting.pop(oldest)
            self._waiting[connection] = None
        if oldest is not None:
            self.complain("too many connections have not sent the token")
            _hang_up(oldest)
        return True

    def authenticate(self, connection: socket.socket, line: bytes) -> bool:
        """Whether the first line of a connection has the token."""
        good = hmac.compare_digest(_HELLO.decode(line).token.encode(), self._token.encode())
        with self._lock:
            if good and connection in self._waiting:
                self._waiting.pop(connection)
                self._authenticated.add(connection)
        return good

    def forget(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._authenticated.discard(connection)

    def answer(self, request: Request) -> Answer:
        """The pin of a shard, which is the report that comes with the request unless there was one
        before.
        """
        shard: FetchedShard | None = None
        if request.report is not None:
            try:
                shard = FETCHED.validate_json(request.report)
            except (ValidationError, RecursionError):
                return Answer(error="the report is malformed")
            if shard.lease_key != request.key:
                return Answer(error="the report is for another lease")
        with self._lock:
            keys, pinned = self._jobs.get(request.job, (None, {}))
            if keys is None:
                return Answer(error="the job is over")
            if request.key not in keys:
                return Answer(error="the job does not read this lease")
            if shard is not None:
                shard = pinned.setdefault(request.key, shard)
            found = pinned.get(request.key)
        return Answer(report=None if found is None else FETCHED.dump_json(found).decode())

    def complain(self, reason: str) -> None:
        """Log the first connection that is ended by this side."""
        if not self._complained:
            self._complained = True
            _LOG.warning(
                "the driver ended a connection to its report server: %s; the next ones are not "
                "logged",
                reason,
            )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    pins: PinServer

    def verify_request(self, request: object, _client_address: object) -> bool:
        return isinstance(request, socket.socket) and self.pins.admit(request)

    def handle_error(self, request: object, _client_address: object) -> None:
        # The inherited one prints a traceback
        if isinstance(request, socket.socket):
            self.pins.forget(request)
        self.pins.complain("it could not be served")


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        pins, lines = self.server.pins, _Lines(self.request, self.server.pins.clock)
        try:
            hello = lines.next(MAX_HELLO, HELLO_SECONDS)
            if not hello:
                return
            if not pins.authenticate(self.request, hello):
                pins.complain("the token is wrong")
                self._send(Answer(error="the token is wrong"))
                return
            self._send(Answer())
            while line := lines.next(MAX_LINE, IDLE_SECONDS):
                self._send(pins.answer(_REQUEST.decode(line)))
        except (OSError, ValueError, RecursionError) as error:
            pins.complain(type(error).__name__)
        finally:
            pins.forget(self.request)

    def _send(self, answer: Answer) -> None:
        self.request.settimeout(CONNECT_SECONDS)
        self.request.sendall(msgspec.json.encode(answer) + b"\n")


class _Lines:
    """The lines that a connection sends, each within a length and a time."""

    def __init__(self, connection: socket.socket, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._left = b""

    def next(self, limit: int, seconds: float) -> bytes:
        """The next line; empty when the other side has hung up. Raises `OSError`, `ValueError`."""
        deadline = self._clock.monotonic() + seconds
        parts = bytearray(self._left)
        while (end := parts.find(b"\n")) < 0:
            if len(parts) > limit:
                raise ValueError("a line is too long")
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise TimeoutError("a line is late")
            self._connection.settimeout(left)
            part = self._connection.recv(_PART_BYTES)
            if not part:
                return b""
            parts += part
        if end > limit:
            raise ValueError("a line is too long")
        self._left = bytes(parts[end + 1 :])
        return bytes(parts[:end])


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return

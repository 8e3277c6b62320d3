"""Serve `pins` on the address of Spark's driver.

Every host that reaches the driver can connect. Before a connection has sent the server's token, it
may send one short line within a few seconds. At most `MAX_WAITING` connections may be in this
state; another one closes the oldest. An invalid message closes the connection, and only the first
such event is logged. Messages are not encrypted, as in Spark's default configuration.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Final

import msgspec
from pydantic import ValidationError

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.kinesis.ranges import FetchedShard
from kcl_pipeline.spark.pins.pins import (
    CONNECT_SECONDS,
    FETCHED,
    MAX_LINE,
    Answer,
    Hello,
    PinAddress,
    PinRequest,
)

IDLE_SECONDS: Final = 600.0
"""Longest time between two requests of a task."""
HELLO_SECONDS: Final = 10.0
MAX_HELLO: Final = 256
"""Bytes of the first line."""
MAX_WAITING: Final = 256
"""Connections that have not sent the token."""
MAX_CONNECTIONS: Final = 2048
"""Connections that have sent the token: one per running task."""
_PART_BYTES: Final = 64 * 1024
_HELLO: Final = msgspec.json.Decoder(Hello)
_REQUEST: Final = msgspec.json.Decoder(PinRequest)
_LOG: Final = logging.getLogger(__name__)


class PinServer:
    """Serve the pins of one driver until `close`.

    Args:
        bind_host: Host to listen on.
        host: Host that tasks connect to.
        port: Port to listen on; 0 chooses a free port.

    Raises:
        SinkError: The address cannot be used.
    """

    def __init__(self, bind_host: str, host: str, port: int = 0) -> None:
        self.clock = SystemClock()
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[frozenset[str], dict[str, FetchedShard]]] = {}
        self._waiting: dict[socket.socket, None] = {}
        self._authenticated: set[socket.socket] = set()
        self._complained = False
        # Not from a seeded generator, because the token must not be predictable.
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
        """Accept pins for these leases of this job."""
        with self._lock:
            self._jobs[job] = frozenset(lease_keys), {}

    def end(self, job: str) -> tuple[FetchedShard, ...]:
        """Return the pinned ranges sorted by lease key, and refuse the job's tasks from now on."""
        with self._lock:
            _, pinned = self._jobs.pop(job, (frozenset(), {}))
        return tuple(pinned[key] for key in sorted(pinned))

    def close(self) -> None:
        """Stop listening and close the connections."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            left = [*self._waiting, *self._authenticated]
        for connection in left:
            _hang_up(connection)
        self._thread.join(CONNECT_SECONDS)

    def admit(self, connection: socket.socket) -> bool:
        """Accept a new connection, which must send the token.

        With too many such connections, the oldest one is closed.
        """
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
        is_valid = hmac.compare_digest(_HELLO.decode(line).token.encode(), self._token.encode())
        with self._lock:
            if is_valid and connection in self._waiting:
                self._waiting.pop(connection)
                self._authenticated.add(connection)
        return is_valid

    def forget(self, connection: socket.socket) -> None:
        """Remove a closed connection."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._authenticated.discard(connection)

    def answer(self, request: PinRequest) -> Answer:
        """Return the pinned range of a shard.

        The report in the request pins it, unless a range is pinned already.
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
        """Log the first connection that this server closes."""
        if not self._complained:
            self._complained = True
            _LOG.warning(
                "the driver closed a connection to its pin server: %s; further ones are not logged",
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
        # The inherited method prints a traceback.
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
        """The next line; empty if the peer has closed the connection.

        Raises:
            OSError: The connection failed, or the line came too late.
            ValueError: The line is too long.
        """
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
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""HTTP/1.1 server for loopback connections of AWS SDKs.

The server keeps connections alive and uses one thread per connection. It parses only what AWS SDKs
send. A connection that begins with the HTTP/2 preface is served by `local.http2` if the extra
`local` is installed. Otherwise it is closed.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from io import BufferedReader
from typing import BinaryIO, Final, cast

from kcl_pipeline.local.http.messages import Handler, Request, Response

_MAX_HEADER_BYTES: Final = 65_536
_MAX_HEADERS: Final = 200
_MAX_BODY_BYTES: Final = 1 << 31
_BUFFER_BYTES: Final = 262_144
_JOIN_SECONDS: Final = 5.0
_REASONS: Final = {
    100: "Continue",
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request",
    403: "Forbidden",
}
_REASONS_MORE: Final = {
    404: "Not Found",
    409: "Conflict",
    412: "Precondition Failed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_HTTP2_PREFACE: Final = b"PRI * HTTP/2"
_NO_BODY: Final = frozenset({204, 304})


class _BadRequestError(Exception):
    pass


def _read_head(reader: BinaryIO) -> tuple[str, str, dict[str, str]] | None:
    line = reader.readline(_MAX_HEADER_BYTES)
    while line in (b"\r\n", b"\n"):
        line = reader.readline(_MAX_HEADER_BYTES)
    if not line:
        return None
    parts = line.decode("latin-1").split()
    # method, target, version
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):  # noqa: PLR2004
        raise _BadRequestError
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = reader.readline(_MAX_HEADER_BYTES)
        if line in (b"\r\n", b"\n"):
            return parts[0], parts[1], headers
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise _BadRequestError
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    raise _BadRequestError


def _read_chunked(reader: BinaryIO) -> bytes:
    pieces: list[bytes] = []
    while True:
        size = int(reader.readline(_MAX_HEADER_BYTES).partition(b";")[0], 16)
        if size == 0:
            break
        if size > _MAX_BODY_BYTES:
            raise _BadRequestError
        pieces.append(reader.read(size))
        reader.readline(_MAX_HEADER_BYTES)
    while reader.readline(_MAX_HEADER_BYTES) not in (b"\r\n", b"\n", b""):
        pass
    return b"".join(pieces)


def _read_request(reader: BinaryIO, connection: socket.socket) -> Request | None:
    head = _read_head(reader)
    if head is None:
        return None
    method, target, headers = head
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _read_chunked(reader)
    else:
        length = int(headers.get("content-length") or 0)
        if not 0 <= length <= _MAX_BODY_BYTES:
            raise _BadRequestError
        body = reader.read(length) if length else b""
        if len(body) < length:
            return None
    return Request(method, target, headers, body)


def _head_bytes(response: Response, *, close: bool, length: int | None) -> bytes:
    reason = _REASONS.get(response.status) or _REASONS_MORE.get(response.status, "Status")
    lines = [f"HTTP/1.1 {response.status} {reason}"]
    lines += [
        f"{k}: {v}"
        for k, v in response.headers.items()
        if k.lower() not in {"content-length", "transfer-encoding", "connection"}
    ]
    if length is None:
        lines.append("Transfer-Encoding: chunked")
    elif response.status not in _NO_BODY:
        lines.append(f"Content-Length: {length}")
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class HttpServer:
    """HTTP server that listens on 127.0.0.1 only.

    An exception of the handler results in a response with status 500. The server continues.

    Args:
        handler: Function that returns the response to a request.
        port: Port to listen on; 0 selects a free port.
    """

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256, reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._guard = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stopping = False
        self._acceptor = threading.Thread(
            target=self._accept, name=f"local-aws-{self.port}", daemon=True
        )

    def start(self) -> None:
        """Start to accept connections."""
        self._acceptor.start()

    def stop(self) -> None:
        """Close the listener and every connection.

        The method waits for each connection's thread, up to a fixed time.
        """
        with self._guard:
            self._stopping = True
            open_connections = list(self._connections.items())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection, _ in open_connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_JOIN_SECONDS)
        for _, thread in open_connections:
            thread.join(_JOIN_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve,
                args=(connection,),
                name=f"local-aws-{self.port}-connection",
                daemon=True,
            )
            with self._guard:
                if self._stopping:
                    connection.close()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with cast("BufferedReader", connection.makefile("rb", _BUFFER_BYTES)) as reader:
                if reader.peek(len(_HTTP2_PREFACE)).startswith(_HTTP2_PREFACE):
                    # HTTP/2 needs an optional extra, so it is imported only when a client uses it.
                    from kcl_pipeline.local.http.http2 import Http2Connection  # noqa: PLC0415

                    Http2Connection(
                        connection, reader, self._handler, threading.current_thread().name
                    ).serve()
                    return
                while self._serve_one(reader, connection):
                    pass
        except (OSError, _BadRequestError, ValueError, ImportError):
            # The connection is closed when the client has left, when stop() closed the socket, or
            # when the protocol is unsupported (HTTP/2 without h2).
            pass
        finally:
            with self._guard:
                self._connections.pop(connection, None)
            connection.close()

    def _serve_one(self, reader: BinaryIO, connection: socket.socket) -> bool:
        request = _read_request(reader, connection)
        if request is None:
            return False
        try:
            response = self._handler(request)
        except Exception as error:  # noqa: BLE001
            # AWS services also report their internal errors as a response.
            response = Response(500, f"{type(error).__name__}: {error}".encode())
        if response is None:
            return False
        close = request.headers.get("connection", "").lower() == "close"
        if response.stream is not None:
            self._send_stream(connection, response)
            return False
        length = len(response.body)
        if request.method == "HEAD":
            length = int(
                next(
                    (v for k, v in response.headers.items() if k.lower() == "content-length"),
                    length,
                )
            )
        head = _head_bytes(response, close=close, length=length)
        body = b"" if request.method == "HEAD" or response.status in _NO_BODY else response.body
        connection.sendall(head + body)
        return not close

    def _send_stream(self, connection: socket.socket, response: Response) -> None:
        connection.sendall(_head_bytes(response, close=True, length=None))
        for piece in response.stream or ():
            if self._stopping:
                return
            if piece:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")

"""HTTP/2 in cleartext for the handlers of `local.http`.

`local.http` passes every connection that begins with the HTTP/2 preface to this module. The library
h2 (the extra `http2`) implements the protocol. Every request has its own thread. Responses are
therefore streamed concurrently, and each response waits only for flow control.
"""

from __future__ import annotations

import io
import socket
import threading
from contextlib import suppress
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from kcl_pipeline.local.http.messages import Handler, Request, Response

MAX_STREAMS: Final = 128
_READ_BYTES: Final = 65_536
_JOIN_SECONDS: Final = 5.0
_CONNECTION_HEADERS: Final = frozenset({"connection", "content-length", "transfer-encoding"})


class Http2Connection:
    """One HTTP/2 connection.

    Args:
        connection: Socket to write to.
        reader: Reader of the same socket.
        handler: Function that returns the response to a request.
        name: Prefix of the names of the request threads.
    """

    def __init__(
        self, connection: socket.socket, reader: io.BufferedReader, handler: Handler, name: str
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._handler = handler
        self._name = name
        self._changed = threading.Condition()
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._h2.local_settings = Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS}
        )
        self._requests: dict[int, tuple[dict[str, str], bytearray]] = {}
        self._answering: dict[int, threading.Thread] = {}
        self._over = False

    def serve(self) -> None:
        """Serve requests until the client or `HttpServer.stop` closes the connection.

        Then the method waits for the threads of its requests, up to a fixed time per thread.
        """
        try:
            with self._changed:
                self._h2.initiate_connection()
                self._flush()
            while data := self._reader.read1(_READ_BYTES):
                with self._changed:
                    for event in self._h2.receive_data(data):
                        self._on(event)
                    self._flush()
                    self._changed.notify_all()
        except (OSError, ProtocolError, ValueError):
            # As with HTTP/1.1, the connection is closed when the client has left or violates the
            # protocol.
            pass
        finally:
            with self._changed:
                self._over = True
                threads = list(self._answering.values())
                self._changed.notify_all()
            for thread in threads:
                thread.join(_JOIN_SECONDS)

    def _on(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._requests[event.stream_id] = (
                {str(name): str(value) for name, value in event.headers},
                bytearray(),
            )
        elif isinstance(event, DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.stream_id in self._requests:
                self._requests[event.stream_id][1].extend(event.data)
        elif isinstance(event, StreamEnded) and event.stream_id in self._requests:
            headers, body = self._requests.pop(event.stream_id)
            request = Request(
                headers.pop(":method"),
                headers.pop(":path"),
                {"host": headers.pop(":authority", "")} | headers,
                bytes(body),
            )
            thread = threading.Thread(
                target=self._answer,
                args=(event.stream_id, request),
                name=f"{self._name}-{event.stream_id}",
                daemon=True,
            )
            self._answering[event.stream_id] = thread
            thread.start()
        elif isinstance(event, StreamReset):
            self._requests.pop(event.stream_id, None)
            self._answering.pop(event.stream_id, None)
        elif isinstance(event, ConnectionTerminated):
            self._over = True

    # -- methods that run in the thread of a request
    # ----------------------------------------------------------------------------

    def _answer(self, number: int, request: Request) -> None:
        try:
            response = self._handler(request)
        except Exception as error:  # noqa: BLE001
            # AWS services also report their internal errors as a response.
            response = Response(500, f"{type(error).__name__}: {error}".encode())
        with suppress(OSError, ProtocolError):
            if response is None:
                self._reset(number)
            else:
                self._send(number, response, without_body=request.method == "HEAD")
        with self._changed:
            self._answering.pop(number, None)

    def _reset(self, number: int) -> None:
        with self._changed:
            if self._is_wanted(number):
                self._h2.reset_stream(number, ErrorCodes.INTERNAL_ERROR)
                self._flush()

    def _send(self, number: int, response: Response, *, without_body: bool) -> None:
        headers = [(":status", str(response.status))]
        headers += [
            (k.lower(), v)
            for k, v in response.headers.items()
            if k.lower() not in _CONNECTION_HEADERS
        ]
        with self._changed:
            if not self._is_wanted(number):
                return
            self._h2.send_headers(number, headers, end_stream=without_body)
            self._flush()
        if without_body:
            return
        for piece in response.stream if response.stream is not None else (response.body,):
            if not self._send_piece(number, piece):
                return
        with self._changed:
            if self._is_wanted(number):
                self._h2.end_stream(number)
                self._flush()

    def _send_piece(self, number: int, piece: bytes) -> bool:
        """Send `piece` as flow control permits; return False if the stream is closed."""
        rest = memoryview(piece)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        not self._is_wanted(number)
                        or self._h2.local_flow_control_window(number) > 0
                    )
                )
                if not self._is_wanted(number):
                    return False
                size = min(
                    len(rest),
                    self._h2.local_flow_control_window(number),
                    self._h2.max_outbound_frame_size,
                )
                if size:
                    self._h2.send_data(number, rest[:size])
                    self._flush()
            rest = rest[size:]
            if not rest:
                return True

    def _is_wanted(self, number: int) -> bool:
        return not self._over and number in self._answering

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._connection.sendall(data)

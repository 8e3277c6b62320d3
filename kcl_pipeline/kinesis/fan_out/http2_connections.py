"""Send HTTP/2 requests: many responses on few connections, with one thread for all of them.

The library h2 implements the protocol. Connections to `http` URLs start in cleartext (prior
knowledge), those to `https` URLs by ALPN. The window of a response is opened only for bytes that
its receiver has taken, or that the current message needs. This limits the memory of a response.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from kcl_pipeline.errors import InvalidRequestError, SettingsError
from kcl_pipeline.kinesis.fan_out.http2_exchange import Exchange

_T = TypeVar("_T")

WINDOW_BYTES: Final = 512 * 1024
"""Flow-control window of one response; the same as in the Java KCL."""

MAX_STREAMS: Final = 32
"""Largest number of responses on one connection. The service may set a lower limit."""

PING_SECONDS: Final = 20.0
"""A connection without data for this time gets a ping. After the same time again it is closed."""

_CONNECTION_WINDOW_BYTES: Final = 2**31 - 1 - 65_535
_FRAME_BYTES: Final = 256 * 1024
_MAX_BODY_BYTES: Final = 16_384
_PORTS: Final = {"http": 80, "https": 443}
_NOT_IN_HTTP2: Final = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "upgrade",
        "expect",
    }
)

TlsContext = Callable[[], ssl.SSLContext]


class Http2Connections:
    """Connections by address, opened when needed. Thread-safe.

    The first request starts a daemon thread for all connections.

    Args:
        connect_timeout_seconds: Longest time to connect, and again to negotiate.
        tls_context: Creates the TLS context of `https` addresses.
    """

    def __init__(
        self, connect_timeout_seconds: float, tls_context: TlsContext = ssl.create_default_context
    ) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._tls_context = tls_context
        self._guard = threading.Lock()
        self._loop: _Loop | None = None

    def request(
        self, method: str, url: str, headers: Mapping[str, str | bytes], body: bytes
    ) -> Exchange:
        """Send a request. The `Exchange` receives the response.

        Raises:
            EndpointConnectionError: The connection failed.
            ConnectTimeoutError: The connection took too long.
            SettingsError: The address does not support HTTP/2.
            InvalidRequestError: The body has more than 16 KiB.
        """
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"a request of {len(body)} bytes is too long for this client; the limit is "
                f"{_MAX_BODY_BYTES} bytes",
                code="TooLong",
            )
        address = urlsplit(url)
        key = (address.scheme, address.hostname or "", address.port or _PORTS[address.scheme])
        fields = [
            (":method", method),
            (":scheme", address.scheme),
            (":authority", address.netloc.rpartition("@")[2]),
            (":path", (address.path or "/") + (f"?{address.query}" if address.query else "")),
        ]
        fields += [
            (name.lower(), _text(value))
            for name, value in headers.items()
            if name.lower() not in _NOT_IN_HTTP2
        ]
        with self._guard:
            if self._loop is None:
                self._loop = _Loop(asyncio.new_event_loop())
                threading.Thread(target=self._loop.run, name="http2", daemon=True).start()
            work = self._begin(self._loop, key, fields, body)
            future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        try:
            return future.result(2 * self._connect_timeout_seconds + PING_SECONDS)
        except (FutureTimeout, CancelledError) as error:
            future.cancel()  # otherwise the request may be sent after the caller has given up
            raise EndpointConnectionError(endpoint_url=url, error=error) from error

    def close(self) -> None:
        """Close all connections, which ends their responses, and end the thread.

        The next request starts the thread again.
        """
        with self._guard:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.loop.call_soon_threadsafe(loop.loop.stop)

    # In the thread of the connections

    async def _begin(
        self, loop: _Loop, key: tuple[str, str, int], fields: list[tuple[str, str]], body: bytes
    ) -> Exchange:
        async with loop.connecting.setdefault(key, asyncio.Lock()):
            found = loop.open.setdefault(key, [])
            found[:] = [connection for connection in found if connection.is_open]
            connection = next((connection for connection in found if connection.has_capacity), None)
            if connection is None:
                connection = await self._connect(key)
                found.append(connection)
            return connection.begin(fields, body)

    async def _connect(self, key: tuple[str, str, int]) -> _Connection:
        scheme, host, port = key
        loop = asyncio.get_running_loop()
        context = self._tls_context() if scheme == "https" else None
        if context is not None:
            context.set_alpn_protocols(["h2"])
        url = f"{scheme}://{host}:{port}"
        connection = _Connection(loop)
        try:
            await self._in_time(loop.create_connection(lambda: connection, host, port, ssl=context))
            if context is not None and connection.protocol() != "h2":
                connection.end(ConnectionAbortedError("not HTTP/2"))
                raise SettingsError(
                    f"{url} does not support HTTP/2; write retrieval.fan_out_http='1.1'"
                )
            await self._in_time(connection.ready)
        except TimeoutError as error:
            connection.end(error)
            raise ConnectTimeoutError(endpoint_url=url) from error
        except (OSError, ProtocolError) as error:
            connection.end(error)
            raise EndpointConnectionError(endpoint_url=url, error=error) from error
        except asyncio.CancelledError:
            connection.end(ConnectionAbortedError("closed"))
            raise
        return connection

    async def _in_time(self, work: Awaitable[_T]) -> _T:
        # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives at the moment
        # when the work is done
        async with asyncio.timeout(self._connect_timeout_seconds):
            return await work


@dataclass(frozen=True, slots=True)
class _Loop:
    """An event loop in its own thread, and its connections."""

    loop: asyncio.AbstractEventLoop
    open: dict[tuple[str, str, int], list[_Connection]] = field(default_factory=dict)
    connecting: dict[tuple[str, str, int], asyncio.Lock] = field(default_factory=dict)

    def run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end())
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for connection in [connection for found in self.open.values() for connection in found]:
            connection.end(ConnectionAbortedError("closed"))
        await asyncio.sleep(0)  # transports close in the next iteration of the loop


class _Connection(asyncio.Protocol):
    """One connection. Its methods run in the thread of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
            },
        )
        self._h2.max_inbound_frame_size = _FRAME_BYTES
        self._transport: asyncio.Transport | None = None
        self._has_received = True
        self._ping_sent = False
        self._timer: asyncio.TimerHandle | None = None
        self.exchanges: dict[int, Exchange] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_open = True

    @property
    def has_capacity(self) -> bool:
        return self.is_open and len(self.exchanges) < min(
            MAX_STREAMS, self._h2.remote_settings.max_concurrent_streams
        )

    def protocol(self) -> str | None:
        tls = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return None if tls is None else tls.selected_alpn_protocol()

    def begin(self, fields: list[tuple[str, str]], body: bytes) -> Exchange:
        if not self.is_open:
            raise EndpointConnectionError(
                endpoint_url=dict(fields)[":authority"], error="the connection is closed"
            )
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, fields)
            self._h2.send_data(number, body, end_stream=True)
        except ProtocolError as error:
            self.end(error)
            raise EndpointConnectionError(
                endpoint_url=dict(fields)[":authority"], error=error
            ) from error
        exchange = self.exchanges[number] = Exchange(
            lambda size: self._soon(self._acknowledge, number, size),
            lambda: self._soon(self._cancel, number),
        )
        self._flush()
        return exchange

    def end(self, error: Exception) -> None:
        """Close the connection. All its responses end with this error."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved, if there is no waiting task
        exchanges, self.exchanges = self.exchanges, {}
        for exchange in exchanges.values():
            exchange.ended(error)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (what create_connection makes)
        self._transport = transport
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._flush()
        self._timer = self._loop.call_later(PING_SECONDS, self._check_alive)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        try:
            for event in self._h2.receive_data(data):
                self._on(event)
            self._flush()
        except ProtocolError as error:
            self._flush()
            self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc or ConnectionResetError("the service closed the connection"))

    def _on(self, event: Event) -> None:
        if isinstance(event, RemoteSettingsChanged) and not self.ready.done():
            self.ready.set_result(None)
        elif isinstance(event, ConnectionTerminated):
            self.end(
                ConnectionResetError(f"the service is closing the connection ({event.error_code})")
            )
        elif (
            isinstance(event, ResponseReceived)
            and (exchange := self.exchanges.get(event.stream_id)) is not None
        ):
            headers = {_text(name): _text(value) for name, value in event.headers}
            exchange.head_received(int(headers.pop(":status")), headers)
        elif isinstance(event, DataReceived):
            exchange = self.exchanges.get(event.stream_id)
            free = (
                event.flow_controlled_length
                if exchange is None
                else exchange.received(event.data, event.flow_controlled_length)
            )
            self._h2.acknowledge_received_data(free, event.stream_id)
        elif (
            isinstance(event, StreamEnded | StreamReset)
            and (exchange := self.exchanges.pop(event.stream_id, None)) is not None
        ):
            exchange.ended(
                None
                if isinstance(event, StreamEnded)
                else ConnectionResetError(f"the service reset the response ({event.error_code})")
            )

    def _acknowledge(self, number: int, size: int) -> None:
        self._h2.acknowledge_received_data(size, number)
        self._flush()

    def _cancel(self, number: int) -> None:
        if self.exchanges.pop(number, None) is not None:
            self._h2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush()

    def _soon(self, work: Callable[..., None], *arguments: int) -> None:
        def unless_closed() -> None:
            if self.is_open:
                work(*arguments)

        with suppress(RuntimeError):  # the loop is closed, and all responses have ended
            self._loop.call_soon_threadsafe(unless_closed)

    def _flush(self) -> None:
        if self._transport is not None and (data := self._h2.data_to_send()):
            self._transport.write(data)

    def _check_alive(self) -> None:
        """Send a ping after a period without data; close the connection after two."""
        if not self._has_received and self._ping_sent:
            self.end(
                ConnectionResetError(f"the connection was silent for {2 * PING_SECONDS:.0f} s")
            )
            return
        self._ping_sent = not self._has_received
        if self._ping_sent:
            self._h2.ping(bytes(8))
            self._flush()
        self._has_received = False
        self._timer = self._loop.call_later(PING_SECONDS, self._check_alive)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value

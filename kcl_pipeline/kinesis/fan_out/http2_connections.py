"""Requests over HTTP/2: many answers at a time on few connections, and no thread but one for all of
them.

The protocol is h2's. A connection to an `http` address begins in cleartext (prior knowledge), one
to an `https` address by ALPN. What an answer may hold in memory is decided by who takes it: its
window is opened again only for what was taken, or for what the message under way still lacks.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
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
"""Of one answer; what the Java library asks for too."""

MAX_STREAMS: Final = 32
"""On one connection, or fewer if the service says so. They all end with it."""

PING_SECONDS: Final = 20.0
"""A connection that is silent for so long is asked whether it lives, and closed when it is silent
once more.
"""

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
    """Connections by address, made when needed. Any thread; its own thread, a daemon, starts with
    the first request.

    `tls_context` makes what `https` addresses are checked with.
    """

    def __init__(
        self, connect_timeout_seconds: float, tls_context: TlsContext = ssl.create_default_context
    ) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._tls_context = tls_context
        self._guard = threading.Lock()
        self._room: _Room | None = None

    def request(
        self, method: str, url: str, headers: Mapping[str, str | bytes], body: bytes
    ) -> Exchange:
        """Send a request; its answer comes into the `Exchange`.

        Raises botocore's connection errors when there is no connection to be had, `SettingsError`
        when the address does not speak HTTP/2, and `InvalidRequestError` for a body above 16 KiB.
        """
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"a request of {len(body)} bytes is too long for this client, which sends "
                "short ones",
                code="TooLong",
            )
        address = urlsplit(url)
        key = (address.scheme, address.hostname or "", address.port or _PORTS[address.scheme])
        fields = [
            (":method", method),
            (":scheme", address.scheme),
            (":authority", address.netloc.rpartition("@")[2]),
            (":path", _path(url)),
        ]
        fields += [
            (name.lower(), _text(value))
            for name, value in headers.items()
            if name.lower() not in _NOT_IN_HTTP2
        ]
        return self._wait_for(lambda room: self._begin(room, key, fields, body), url)

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum(connection.is_open for connection in self._known())

    @property
    def streams(self) -> int:
        """How many answers are under way."""
        return sum(len(connection.exchanges) for connection in self._known())

    def _known(self) -> list[_Connection]:
        room = self._room
        return (
            []
            if room is None
            else [connection for found in list(room.open.values()) for connection in list(found)]
        )

    def close(self) -> None:
        """Close all connections, which ends their answers, and the thread.

        The next request begins anew.
        """
        with self._guard:
            room, self._room = self._room, None
        if room is not None:
            room.loop.call_soon_threadsafe(room.loop.stop)

    def _wait_for(self, work: Callable[[_Room], Coroutine[Any, Any, _T]], url: str) -> _T:
        with self._guard:
            if self._room is None:
                self._room = _Room(asyncio.new_event_loop())
                threading.Thread(target=self._room.run, name="http2", daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(work(self._room), self._room.loop)
        try:
            return future.result(2 * self._connect_timeout_seconds + PING_SECONDS)
        except (FutureTimeout, CancelledError) as error:
            future.cancel()  # else it may send what nobody waits for any more
            raise EndpointConnectionError(endpoint_url=url, error=error) from error

    # -- in the thread of the connections
    # ----------------------------------------------------------------------------

    async def _begin(
        self, room: _Room, key: tuple[str, str, int], fields: list[tuple[str, str]], body: bytes
    ) -> Exchange:
        async with room.making.setdefault(key, asyncio.Lock()):
            found = room.open.setdefault(key, [])
            found[:] = [connection for connection in found if connection.is_open]
            connection = next((connection for connection in found if connection.has_room), None)
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
                    f"{url} does not speak HTTP/2; write retrieval.fan_out_http='1.1'"
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
        # Not `wait_for`: before Python 3.12 it forgets a cancellation that comes in the moment in
        # which the work is done
        async with asyncio.timeout(self._connect_timeout_seconds):
            return await work


@dataclass(frozen=True, slots=True)
class _Room:
    """A loop, run by one thread, and what belongs to it."""

    loop: asyncio.AbstractEventLoop
    open: dict[tuple[str, str, int], list[_Connection]] = field(default_factory=dict)
    making: dict[tuple[str, str, int], asyncio.Lock] = field(default_factory=dict)

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
        await asyncio.sleep(0)  # transports close in the loop's next turn


class _Connection(asyncio.Protocol):
    """One connection; everything but the exchanges' own part happens in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        values = {
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
        }
        self._h2.local_settings = Settings(client=True, initial_values=values)
        self._h2.max_inbound_frame_size = _FRAME_BYTES
        self._transport: asyncio.Transport | None = None
        self._heard = True
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None
        self.exchanges: dict[int, Exchange] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_open = True

    @property
    def has_room(self) -> bool:
        return self.is_open and len(self.exchanges) < min(
            MAX_STREAMS, self._h2.remote_settings.max_concurrent_streams
        )

    def protocol(self) -> str | None:
        tls = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return None if tls is None else tls.selected_alpn_protocol()

    def begin(self, fields: list[tuple[str, str]], body: bytes) -> Exchange:
        if not self.is_open:
            raise EndpointConnectionError(
                endpoint_url=dict(fields)[":authority"], error="the connection is gone"
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
        """Close it; whatever is under way ends with this error."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may be waiting any more
        exchanges, self.exchanges = self.exchanges, {}
        for exchange in exchanges.values():
            exchange.ended(error)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's protocol
    # ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (what create_connection makes)
        self._transport = transport
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._flush()
        self._timer = self._loop.call_later(PING_SECONDS, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            for event in self._h2.receive_data(data):
                self._on(event)
            self._flush()
        except ProtocolError as error:
            self._flush()
            self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc or ConnectionResetError("the other side closed the connection"))

    # -- inside
    # ----------------------------------------------------------------------------

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
            exchange.answered(int(headers.pop(":status")), headers)
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
                else ConnectionResetError(f"the service reset the answer ({event.error_code})")
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

        with suppress(RuntimeError):  # the loop is closed, and all answers with it
            self._loop.call_soon_threadsafe(unless_closed)

    def _flush(self) -> None:
        if self._transport is not None and (data := self._h2.data_to_send()):
            self._transport.write(data)

    def _look(self) -> None:
        """Every so often: has anything been heard?"""
        if not self._heard and self._asked:
            self.end(
                ConnectionResetError(f"the connection was silent for {2 * PING_SECONDS:.0f} s")
            )
            return
        self._asked = not self._heard
        if self._asked:
            self._h2.ping(bytes(8))
            self._flush()
        self._heard = False
        self._timer = self._loop.call_later(PING_SECONDS, self._look)


def _path(url: str) -> str:
    address = urlsplit(url)
    return (address.path or "/") + (f"?{address.query}" if address.query else "")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value

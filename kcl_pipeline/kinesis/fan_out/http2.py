"""Subscribe to shards over HTTP/2 (extra `http2`), without a thread per subscription.

Many subscriptions share few connections. botocore creates and signs the request, and interprets the
response. Only the sending is replaced, by a `before-send` handler. The receiver decodes events, so
a subscription holds at most one message and one flow-control window (`http2_exchange`).
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.eventstream import EventStreamBuffer
from botocore.httpsession import get_cert_path

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.extras import require
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.fan_out.boto import (
    BotoFanOut,
    is_event,
    page_of,
    subscription_errors,
)
from kcl_pipeline.threads import Spawn

require("http2", "retrieval.fan_out_http='2'", "write '1.1'")

from kcl_pipeline.kinesis.fan_out.http2_connections import Http2Connections  # noqa: E402 (an extra)
from kcl_pipeline.kinesis.fan_out.http2_exchange import Exchange  # noqa: E402 (likewise)

if TYPE_CHECKING:
    from botocore.compat import HTTPHeaders
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient

_HTTP_ERROR: Final = 300


class Http2FanOut(BotoFanOut):
    """The `FanOutClient` whose subscriptions use HTTP/2. All other calls use HTTP/1.1.

    Proxies are not used. `close` ends all subscriptions.

    Args:
        client: The boto3 client. No other code may subscribe with it.
    """

    def __init__(self, client: BotoKinesisClient) -> None:
        super().__init__(client, Http2Subscription)
        # The stubs of botocore declare neither the options of a Config nor that the return value
        # of a before-send handler replaces the response.
        config: Any = client.meta.config
        events: Any = client.meta.events
        self._timeout_seconds = float(config.read_timeout)
        self.connections = Http2Connections(
            float(config.connect_timeout), lambda: tls_context(client)
        )
        events.register(
            "before-send.kinesis.SubscribeToShard", self._send, unique_id="kcl-pipeline-http2"
        )

    def close(self) -> None:
        """End all subscriptions and connections."""
        self.connections.close()

    def _send(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        body: Any = request.body or b""
        exchange = self.connections.request(
            request.method, request.url, dict(request.headers.items()), body
        )
        try:
            status, headers = exchange.head(self._timeout_seconds)
        except BaseException:
            exchange.close()
            raise
        return AWSResponse(
            request.url,
            status,
            cast("HTTPHeaders", headers),
            _Body(exchange, self._timeout_seconds, framed=status < _HTTP_ERROR),
        )


def tls_context(client: BotoKinesisClient) -> ssl.SSLContext:
    """Return a TLS context with the CA bundle of a client, or without verification as it has."""
    verify: Any = getattr(
        getattr(getattr(client, "_endpoint", None), "http_session", None), "_verify", True
    )
    context = ssl.create_default_context(cafile=get_cert_path(verify))
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Body:
    """The body of a response with the methods that botocore calls."""

    def __init__(self, exchange: Exchange, timeout_seconds: float, *, framed: bool) -> None:
        self.exchange = exchange
        self._timeout_seconds = timeout_seconds
        self._framed = framed

    def stream(self) -> Iterator[bytes]:
        if self._framed:
            yield from self.exchange.messages(self._timeout_seconds)
        else:
            yield self.exchange.whole_body(self._timeout_seconds)

    def close(self) -> None:
        self.exchange.close()


class Http2Subscription:
    """A `Subscribed` without a thread: `take` decodes the next event in the caller's thread.

    botocore has read the first message of `events`.
    """

    def __init__(self, events: Any, stream_name: str, shard_id: str, clock: Clock) -> None:
        # the body that `Http2FanOut` returned to botocore
        self._exchange: Exchange = events._raw_stream.exchange  # noqa: SLF001
        self._stream_name = stream_name
        self._shard_id = shard_id
        self._clock = clock
        self._parser = EventStreamBuffer()
        self._closed = False
        self._received_bytes = 0
        self._received_at = clock.monotonic()
        self.is_over = False
        self.error: Exception | None = None
        self.received = 0

    def start(self, _name: str, _spawn: Spawn) -> None:
        """See `Subscribed`. No effect: there is no thread."""

    def take(self) -> RecordsPage | None:
        """See `Subscribed`. Not thread-safe."""
        if self._closed or self.is_over:
            return None
        try:
            with subscription_errors(f"{self._shard_id} of {self._stream_name}"):
                page = self._next_page()
        except Exception as error:  # noqa: BLE001 (`SubscribedShard` raises it)
            self._end(error)
            return None
        received = self._exchange.received_bytes
        if page is not None or received != self._received_bytes:
            self._received_bytes, self._received_at = received, self._clock.monotonic()
        if page is not None:
            self.received += 1
            if page.next_iterator is None:
                self._end(None)
        return page

    def silent_seconds(self) -> float:
        """See `Subscribed`. Counted from the last `take` that found new bytes."""
        return 0.0 if self.is_over else self._clock.monotonic() - self._received_at

    def close(self) -> None:
        """See `Subscribed`."""
        self._closed = True
        self._exchange.close()

    def _next_page(self) -> RecordsPage | None:
        while True:
            over = self._exchange.is_over
            raw = self._exchange.message()
            if raw is None:
                if over:
                    self._end(None)
                    if (error := self._exchange.error) is not None:
                        raise error
                return None
            self._parser.add_data(raw)
            message = next(self._parser, None)
            if message is None:
                raise self._exchange.error or UnavailableError(
                    f"an event of {self._shard_id} of {self._stream_name} is truncated",
                    code="BrokenEvent",
                    operation="SubscribeToShard",
                )
            if is_event(message):
                return page_of(message, self._stream_name, self._shard_id)

    def _end(self, error: Exception | None) -> None:
        if self._closed:
            error = None
        self.error, self.is_over = error, True
        self._exchange.close()

"""Connections that are slow, silent, wrong or refused."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, HTTPClientError, ReadTimeoutError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.kinesis.fan_out import http2_connections as http2
from kcl_pipeline.kinesis.fan_out.http2_connections import (
    Http2Connections,
)
from kcl_pipeline.kinesis.fan_out.http2_exchange import Exchange
from kcl_pipeline.local.http.http2 import Http2Connection
from kcl_pipeline.local.http.messages import Request, Response
from kcl_pipeline.local.kinesis.event_stream import event
from tests.support.fan_out_world import connections_of


def exchange_of() -> tuple[Exchange, list[int]]:
    acknowledged: list[int] = []
    return Exchange(acknowledged.append, lambda: None), acknowledged


def test_the_window_opens_for_what_lacks_and_for_what_was_taken() -> None:
    exchange, later = exchange_of()
    message = event("SubscribeToShardEvent", "application/json", b"x" * 1000)
    assert exchange.received(message[:600], 600) == 600
    assert exchange.message() is None
    assert exchange.received(message[600:], 700) == 0
    assert exchange.received(message, len(message)) == 0
    assert exchange.message() == message
    assert later == []
    assert exchange.message() == message
    assert later == [700 + len(message)]
    exchange.ended(None)
    assert (exchange.message(), exchange.is_over, exchange.error) == (None, True, None)


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\0" * 40])
def test_a_length_that_cannot_be_is_not_waited_for(garbage: bytes) -> None:
    exchange, _ = exchange_of()
    exchange.received(garbage, len(garbage))
    assert exchange.message() == garbage[:16]


def test_what_is_waited_for_has_an_end() -> None:
    exchange, _ = exchange_of()
    with pytest.raises(ReadTimeoutError):
        exchange.head(0.01)
    with pytest.raises(ReadTimeoutError):
        next(exchange.messages(0.01))
    with pytest.raises(ReadTimeoutError):
        exchange.whole_body(0.01)
    exchange.ended(ConnectionResetError("pulled out"))
    for wait in (
        exchange.head,
        exchange.whole_body,
        lambda seconds: next(exchange.messages(seconds)),
    ):
        with pytest.raises(HTTPClientError, match="pulled out"):
            wait(60)


@contextmanager
def listening(context: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[socket.socket]]]:
    """A server of `Http2Connection` on its own socket, under TLS if asked; gives its port and its
    connections.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def respond(request: Request) -> Response:
        return Response(
            200,
            b"%s %s" % (request.headers["host"].encode(), request.body),
            {"Content-Type": "text/plain"},
        )

    def serve() -> None:
        while True:
            try:
                raw, _ = listener.accept()
                connection = (
                    context.wrap_socket(raw, server_side=True) if context is not None else raw
                )
            except ssl.SSLError:
                continue
            except OSError:
                return
            accepted.append(connection)
            served = Http2Connection(connection, connection.makefile("rb"), respond, "served")
            threading.Thread(target=served.serve, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], accepted
    listener.close()
    for connection in accepted:
        connection.close()


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
    )
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
    )
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "certificate.pem"
    path.write_bytes(private + pem)
    return path


def test_tls_is_checked_and_speaks_http2_or_says_so(tmp_path: Path) -> None:
    path = certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    server.set_alpn_protocols(["h2"])
    with listening(server) as (port, _):
        url = f"https://127.0.0.1:{port}/"
        trusting = Http2Connections(5, lambda: ssl.create_default_context(cafile=path))
        exchange = trusting.request(
            "POST", url, {"Connection": "close", "X-Number": b"1"}, b"hello"
        )
        assert exchange.head(10)[0] == 200
        assert exchange.whole_body(10) == b"127.0.0.1:%d hello" % port
        stranger = Http2Connections(5)
        with pytest.raises(BotoCoreError, match="Could not connect"):
            stranger.request("POST", url, {}, b"hello")
        trusting.close()
        stranger.close()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.load_cert_chain(path)
    with listening(old) as (port, _):
        client = Http2Connections(5, lambda: ssl.create_default_context(cafile=path))
        with pytest.raises(
            SettingsError, match=r"does not support HTTP/2; write retrieval.fan_out_http='1.1'"
        ):
            client.request("POST", f"https://127.0.0.1:{port}/", {}, b"hello")
        client.close()


def test_an_address_without_a_listener_or_a_response() -> None:
    client = Http2Connections(0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BotoCoreError, match="Connect timeout"):
            client.request("POST", f"http://127.0.0.1:{port}/", {}, b"")
    with pytest.raises(BotoCoreError, match="Could not connect"):
        client.request("POST", f"http://127.0.0.1:{port}/", {}, b"")
    assert connections_of(client) == []
    client.close()


def test_closing_ends_a_request_that_waits_for_its_connection_and_later_ones_start_again() -> None:
    """Repeated, because the moment in which the connection exists and the request does not
    know it yet is a short one.
    """
    client = Http2Connections(60)
    errors: list[Exception] = []

    def ask(port: int) -> None:
        try:
            client.request("POST", f"http://127.0.0.1:{port}/", {}, b"")
        except BotoCoreError as error:
            errors.append(error)

    for number in range(200):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            thread = threading.Thread(target=ask, args=(silent.getsockname()[1],))
            thread.start()
            connection, _ = silent.accept()
            client.close()
            thread.join(10)
            assert len(errors) == number + 1
            connection.close()
    with listening() as (port, _):
        assert client.request("POST", f"http://127.0.0.1:{port}/", {}, b"1").head(10)[0] == 200
        client.close()


def test_a_connection_that_is_silent_is_asked_and_then_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server responds to pings by itself, unless its thread does not read any more."""
    monkeypatch.setattr(http2, "PING_SECONDS", 0.1)
    client = Http2Connections(5)
    with listening() as (port, accepted):
        url = f"http://127.0.0.1:{port}/"
        assert client.request("POST", url, {}, b"1").head(10)[0] == 200
        living = threading.Event()
        checks = 0
        original = http2._Connection._check_alive

        def check_alive(self: http2._Connection) -> None:
            nonlocal checks
            checks += 1
            if checks > 6:
                living.set()
            original(self)

        monkeypatch.setattr(http2._Connection, "_check_alive", check_alive)
        assert living.wait(10)
        assert len(connections_of(client)) == 1
        assert len(accepted) == 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(
            target=_greet_and_say_nothing, args=(listener, done := threading.Event())
        )
        thread.start()
        exchange = client.request("POST", f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, b"")
        with pytest.raises(HTTPClientError, match="silent for"):
            exchange.head(10)
        done.set()
        thread.join()
    client.close()


def _greet_and_say_nothing(listener: socket.socket, done: threading.Event) -> None:
    connection, _ = listener.accept()
    connection.sendall(bytes.fromhex("000000040000000000"))  # an empty SETTINGS frame
    done.wait(30)
    connection.close()


def test_long_requests_are_refused() -> None:
    with pytest.raises(Exception, match="too long"):
        Http2Connections(1).request("POST", "http://127.0.0.1:1/", {}, bytes(20_000))

"""A proxy before the embedded AWS, mostly its S3: a store that answers as a test wants it to."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
EXPIRED_JSON = b'{"__type": "ExpiredTokenException", "message": "The token has expired."}'


@dataclass(frozen=True)
class Request:
    """One request: its method, its path without the query, its access key, and the query."""

    method: str
    path: str
    key: str
    query: str = ""


@dataclass
class S3Proxy:
    """What the proxy does with requests. A test changes it while the proxy runs.

    Attributes:
        url: Its endpoint.
        conditional: False: it ignores `If-None-Match`, as some stores do.
        keys: Access keys that are valid. None: all are.
        fault: What is wrong with a request. `slow down`: it is answered 503 and not passed on.
            `expired`: its credentials are. `lost`: it is passed on and not answered.
        before: Called before each request is passed on.
        after: Called after each request, before its answer is sent.
    """

    url: str = ""
    conditional: bool = True
    keys: frozenset[str] | None = None
    fault: Callable[[Request], str | None] = lambda _: None
    before: Callable[[Request], None] = lambda _: None
    after: Callable[[Request], None] = lambda _: None
    requests: list[Request] = field(default_factory=list)

    def paths(self, method: str) -> list[str]:
        return [one.path for one in self.requests if one.method == method]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Report nothing about a client that has gone away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def s3_proxy(target: str, *, keep_host: bool = False) -> Iterator[S3Proxy]:
    """Run a proxy before the endpoint `target`.

    Args:
        target: The endpoint.
        keep_host: Whether the header `Host` stays. A server that checks signatures needs it.
    """
    proxy = S3Proxy()
    address = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            signed = self.headers.get("Authorization", "")
            key = signed.partition("Credential=")[2].partition("/")[0]
            url = urlsplit(self.path)
            request = Request(self.command, url.path, key, url.query)
            proxy.requests.append(request)
            fault = proxy.fault(request)
            if fault == "slow down":
                self._answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
                return
            is_known = proxy.keys is None or key in proxy.keys
            if fault == "expired" or not is_known:
                kind = self.headers.get("Content-Type", "application/xml")
                is_json = "json" in kind or "cbor" in kind
                headers = {"Content-Type": "application/x-amz-json-1.1" if is_json else kind}
                self._answer(400, headers, EXPIRED_JSON if is_json else EXPIRED)
                return
            proxy.before(request)
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in {"connection", "host"}
                and (proxy.conditional or name.lower() != "if-none-match")
            }
            connection = http.client.HTTPConnection(address, timeout=30)
            host = self.headers.get("Host", address) if keep_host else address
            connection.request(self.command, self.path, body, {**headers, "Host": host})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            proxy.after(request)
            if fault == "lost":
                self.close_connection = True
                return
            self._answer(answer.status, dict(answer.getheaders()), content)

        def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                    self.send_header(name, value)
            known = {name.lower(): value for name, value in headers.items()}
            is_head = self.command == "HEAD"
            length = known.get("content-length", "0") if is_head else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            if not is_head:
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with _Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()

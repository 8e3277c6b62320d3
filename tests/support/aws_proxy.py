"""A proxy before the embedded AWS that holds back the requests that a test names."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class AwsRequest:
    """One request.

    Attributes:
        operation: The operation of a JSON service, or the method and path of a request to S3.
        body: Its body.
    """

    operation: str
    body: bytes


@dataclass
class AwsProxy:
    """Attributes: `url` of the endpoint; `hangs` says which requests are held back until the end;
    `entered` is set when one of them has arrived.
    """

    url: str = ""
    hangs: Callable[[AwsRequest], bool] = lambda _: False
    entered: threading.Event = field(default_factory=threading.Event)
    end: threading.Event = field(default_factory=threading.Event)

    def hang(self, hangs: Callable[[AwsRequest], bool]) -> None:
        self.entered.clear()
        self.hangs = hangs


@contextmanager
def aws_proxy(target: str) -> Iterator[AwsProxy]:
    """Run a proxy before the endpoint `target`."""
    proxy = AwsProxy()
    address = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            target = self.headers.get("X-Amz-Target")  # such as DynamoDB_20120810.UpdateItem
            path = f"{self.command} {self.path}"
            operation = path if target is None else target.rpartition(".")[2]
            if proxy.hangs(AwsRequest(operation, body)):
                proxy.entered.set()
                proxy.end.wait(LONGEST_SECONDS)
                self.close_connection = True
                return
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in {"connection", "host"}
            }
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(self.command, self.path, body, {**headers, "Host": address})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self.send_response(answer.status)
            length = str(len(content))
            for name, value in answer.getheaders():
                if name.lower() == "content-length":
                    length = value if self.command == "HEAD" else length
                elif name.lower() not in {"connection", "transfer-encoding"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.end.set()
            server.shutdown()
            thread.join()

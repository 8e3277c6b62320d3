"""DynamoDB, S3, STS and CloudWatch, served by moto in this process.

Each request goes to the service that it is signed for. moto's own dispatcher is not used. It also
serves ``/moto-api``, which resets all data, writes files and sends requests to other hosts.

moto's DynamoDB has no lock. With several threads, two writers can both pass the same condition.
This module processes one request at a time under one lock, so each request is atomic.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, cast
from urllib.parse import unquote_to_bytes

from kcl_pipeline.local.http.messages import Request, Response

SERVICES: Final = {
    "dynamodb": "dynamodb",
    "s3": "s3",
    "sts": "sts",
    "monitoring": "cloudwatch",
}
"""Service names in AWS signatures, mapped to moto's names of the same services."""

_FIRST_ACCOUNT: Final = 123456789012
_FORGET_EVERY: Final = 5_000

_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_lock = threading.Lock()
_accounts: set[int] = set()


class MotoServices:
    """The moto services of a default account, and of the accounts that requests name.

    Several instances in one process do not share tables or buckets, except those of accounts that
    requests name. Bucket names are global, as in AWS.
    """

    def __init__(self) -> None:
        self._applications: dict[str, _Application] = {}
        self._requests = 0
        self._account: int | None = None
        self._named: set[str] = set()

    def load(self) -> None:
        """Import moto and its DynamoDB before the first request; this takes half a second."""
        with _lock:
            self._application("dynamodb")

    def _application(self, service: str) -> _Application:
        if service not in self._applications:
            # moto is slow to import, and many tests do not need it.
            from moto.moto_server.werkzeug_app import create_backend_app  # noqa: PLC0415

            from kcl_pipeline.local import moto_items  # noqa: PLC0415 (it imports moto)

            moto_items.install()
            self._applications[service] = create_backend_app(cast("Any", SERVICES[service]))
        return self._applications[service]

    @property
    def account(self) -> str:
        """The account number that requests are processed for.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._account is None:
            raise RuntimeError("the embedded AWS is not started")
        return f"{self._account:012d}"

    def start(self) -> None:
        """Reserve an account number that no other instance in this process uses."""
        with _lock:
            self._account = next(
                a
                for a in range(_FIRST_ACCOUNT, _FIRST_ACCOUNT + len(_accounts) + 1)
                if a not in _accounts
            )
            _accounts.add(self._account)

    def stop(self) -> None:
        """Delete all data of the accounts and release the number of the default account."""
        with _lock:
            if self._account is not None:
                if self._applications:
                    for account in (self.account, *self._named):
                        _forget(account)
                self._named.clear()
                _accounts.discard(self._account)
                self._account = None

    def handle(self, service: str, request: Request, account: str | None = None) -> Response:
        """Return the response to one request.

        Args:
            service: A key of `SERVICES`.
            request: The request as received.
            account: The account that the request is for. None: the default account.
        """
        environ = _environ(request)
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = account or self.account
        status = 500
        headers: dict[str, str] = {}

        def start_response(status_line: str, header_list: list[tuple[str, str]], *_: Any) -> None:
            nonlocal status
            status = int(status_line.split(" ", 1)[0])
            headers.update(header_list)

        with _lock:
            application = self._application(service)
            if account is not None:
                self._named.add(account)
            self._requests += 1
            if self._requests % _FORGET_EVERY == 0:
                _forget_instances()
            answer = application(environ, start_response)
            try:
                body = b"".join(answer)
            finally:
                close = getattr(answer, "close", None)
                if close is not None:
                    close()
        # moto's CORS headers permit every origin, so they would open the server to web pages.
        own = {k: v for k, v in headers.items() if not k.lower().startswith("access-control-")}
        return Response(status, body, own)


def _environ(request: Request) -> dict[str, Any]:
    path, _, query = request.target.partition("?")
    host, _, port = request.headers.get("host", "127.0.0.1:80").partition(":")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "REQUEST_URI": request.target,
        "RAW_URI": request.target,
        "SERVER_NAME": host,
        "SERVER_PORT": port or "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in request.headers.items():
        if name == "content-type":
            environ["CONTENT_TYPE"] = value
        elif name not in {"content-length", "transfer-encoding", "expect"}:
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    return environ


def _forget_instances() -> None:
    # moto keeps a reference to every object it creates, for a dashboard that is not served here.
    from moto.core.model_instances import reset_model_data  # noqa: PLC0415 (see MotoServices._load)

    reset_model_data()


def _forget(account: str) -> None:
    from moto.core.base_backend import BackendDict  # noqa: PLC0415 (see MotoServices._load)

    every: list[Any] = list(
        vars(BackendDict)["_instances"]
    )  # moto has no public way to reset one account
    for backends in every:
        if account in backends:
            backends[account].reset()
            del backends[account]
    _forget_instances()

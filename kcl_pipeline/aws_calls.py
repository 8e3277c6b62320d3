"""Every call to AWS: how long its response may take, and which error of this package it raises.

A read time-out bounds the wait for the next byte, not for the whole body: an endpoint that sends
one byte per second blocks its thread without end. `Deadlines` shuts down connections whose response
takes longer than its deadline, or is too large. One daemon thread per process checks all deadlines
once per second, so a response costs two dictionary operations.

`aws_errors` translates the errors of botocore. `error_codes` has the table of codes.
`docs/errors.md` describes what a worker does with each class.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, cast

import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoAuthTokenError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.error_codes import class_of
from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    InvalidRequestError,
    UnavailableError,
)
from kcl_pipeline.settings_errors import without_credentials
from kcl_pipeline.text import printable

CHECK_SECONDS: Final = 1.0
_LENGTH_DIGITS: Final = 18
BODY_SECONDS: Final = 60.0
"""Longest time for the body of one AWS response: 10 MiB at 175 KB/s."""

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Our own limit. The largest is a GetRecords response: 10 MiB of data, 14 MiB as base64, and up to
10,000 partition keys of 256 characters.
"""


class Deadlines:
    """Deadlines of the responses that are being read in this process. Thread-safe.

    Args:
        clock: Clock of the deadlines.
        in_background: Start the thread that calls `expire`. Tests call `expire` themselves.
    """

    def __init__(self, clock: Clock, *, in_background: bool = True) -> None:
        self._clock = clock
        self._in_background = in_background
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[float, socket.socket]] = {}
        self._expired: set[int] = set()
        self._watch: threading.Thread | None = None

    @contextlib.contextmanager
    def limited(self, connection: socket.socket | None, seconds: float) -> Iterator[None]:
        """Shut `connection` down if the body of the `with` statement takes longer than `seconds`.

        Args:
            connection: None: the connection is unknown, and there is no limit.
            seconds: Time from now.

        Raises:
            TimeoutError: The connection was shut down. The response is incomplete.
        """
        if connection is None:
            yield
            return
        number = next(self._numbers)
        with self._lock:
            self._open[number] = (self._clock.monotonic() + seconds, connection)
            if self._watch is None and self._in_background:
                self._watch = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._watch.start()
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(number, None)
                expired = number in self._expired
                self._expired.discard(number)
            if expired:
                raise TimeoutError(f"the response took more than {seconds:g} s")

    def expire(self) -> None:
        """Shut down every connection whose deadline has passed."""
        now = self._clock.monotonic()
        with self._lock:
            late = [number for number, (deadline, _) in self._open.items() if deadline <= now]
            for number in late:
                self._expired.add(number)
                with contextlib.suppress(OSError):
                    self._open.pop(number)[1].shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            self._clock.sleep(CHECK_SECONDS)
            with self._lock:
                if not self._open:
                    self._watch = None
                    return
            self.expire()


DEADLINES: Final = Deadlines(SystemClock())


def socket_of(response: object) -> socket.socket | None:
    """Return the socket of a urllib3 response, or None if its private attributes have changed."""
    found: object = getattr(getattr(response, "_connection", None), "sock", None)
    if found is None:
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        found = getattr(getattr(reader, "raw", None), "_sock", None)
    return found if isinstance(found, socket.socket) else None


def read_body(response: Any) -> bytes:
    """Read the body of a response of urllib3.

    Raises `OSError` when it has more than `MAX_BODY_BYTES`, without reading more than these.
    """
    if _has_length(response):
        return bytes(response.read())
    body = bytes(response.read(MAX_BODY_BYTES + 1))
    if len(body) > MAX_BODY_BYTES:
        raise OSError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


def _has_length(response: Any) -> bool:
    """Whether the response states the length of its body, which is then not read any further.

    Raises `OSError` when it is over `MAX_BODY_BYTES`.
    """
    length = str(response.headers.get("content-length", ""))
    if not (length.isascii() and length.isdigit()):
        return False
    if len(length) > _LENGTH_DIGITS or int(length) > MAX_BODY_BYTES:
        raise OSError(f"the body has {length[:40]} bytes, more than {MAX_BODY_BYTES}")
    return True


def limit_bodies(client: object, seconds: float = BODY_SECONDS) -> None:
    """Limit the time and the size of response bodies of a boto3 client, except of event streams.

    botocore has no public hook between sending and reading, so this replaces a private method. If
    botocore has no such method, the client is not changed.
    """
    endpoint: Any = getattr(client, "_endpoint", None)
    send = getattr(endpoint, "_send", None)
    if endpoint is None or send is None or getattr(send, "limits_bodies", False):
        return

    def send_and_read(request: AWSPreparedRequest) -> AWSResponse:
        if request.stream_output:
            return cast("AWSResponse", send(request))
        # otherwise botocore reads the body before it returns the response
        request.stream_output = True
        response: AWSResponse = send(request)
        try:
            with DEADLINES.limited(socket_of(response.raw), seconds):
                # the response keeps the body, and botocore parses these bytes later
                if _has_length(response.raw):
                    _ = response.content
                else:
                    cast("Any", response)._content = read_body(response.raw)  # noqa: SLF001
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise HTTPClientError(error=error) from error
        return response

    send_and_read.limits_bodies = True  # type: ignore[attr-defined] # (checked above)
    endpoint._send = send_and_read  # noqa: SLF001 (see above)


Service = Literal["cloudwatch", "dynamodb", "kinesis"]

_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_UNREADABLE_RESPONSE: Final = (
    ResponseParserError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
)
"""What botocore raises for a response that is malformed or nested too deeply."""

_MESSAGE_CHARACTERS: Final = 1000
"""Largest part of a service's message that is kept (our own limit).

Messages of AWS are shorter, except those that repeat a long expression.
"""

Special = Callable[[ClientError, str, str], AwsError | None]
"""Translates the errors of one operation: takes the error, its code and our message."""


@contextmanager
def aws_errors(
    service: Service, operation: str, about: str, special: Special | None = None
) -> Iterator[None]:
    """Raise an `AwsError` for an error of botocore in the block.

    A call whose outcome is unknown may have been applied: `UnavailableError`.

    Args:
        service: As in the names of its permissions.
        operation: Name of the API operation, such as ``PutItem``.
        about: The table, stream or shard, for the message.
        special: Is called first. If it returns None, the table of codes decides.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        is_shown = without_credentials(str(error)) == str(error)
        own = translated(error, service, operation, about, special)
        raise own from error if is_shown else None
    except _UNREADABLE_RESPONSE as error:
        detail = printable(f"{type(error).__name__}: {error}")
        raise UnavailableError(
            f"{operation} on {about}: the response cannot be read: {detail}",
            code=type(error).__name__,
            operation=operation,
        ) from error


def translated(
    error: ClientError | BotoCoreError,
    service: Service,
    operation: str,
    about: str,
    special: Special | None = None,
) -> AwsError:
    """Return the error of this package for an error of botocore; see `aws_errors`."""
    where = f"{operation} on {about}"
    if isinstance(error, ClientError):
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        text = printable(f"{where}: {code}: {detail.get('Message', '')}", _MESSAGE_CHARACTERS)
        own = special(error, code, text) if special is not None else None
        if own is not None:
            return own
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = class_of(code, status)
    else:
        code = type(error).__name__
        # It may name the endpoint, or a proxy with its password.
        text = printable(f"{where}: {without_credentials(str(error))}", _MESSAGE_CHARACTERS)
        if isinstance(error, _CREDENTIALS):
            kind = AccessDeniedError
        elif isinstance(error, ParamValidationError | NoRegionError):
            kind = InvalidRequestError
        else:
            kind = UnavailableError
    if kind is AccessDeniedError:
        text = f"{text} ({_required_action(service, operation)})"
    return kind(text, code=code, operation=operation)


def _required_action(service: Service, operation: str) -> str:
    # IAM has no action for transactions; each of their writes needs its own
    if operation == "TransactWriteItems":
        return (
            "the actions are dynamodb:PutItem and dynamodb:UpdateItem on the lease table, "
            "dynamodb:ConditionCheckItem on the coordinator-state table"
        )
    return f"the action is {service}:{operation}"

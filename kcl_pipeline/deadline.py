"""Shut down connections whose response takes longer than its deadline, or is too large.

A read time-out bounds the wait for the next byte, not for the whole body: an endpoint that sends
one byte per second blocks its thread without end. `limited` bounds the whole response. One daemon
thread per process checks all deadlines once per second, so a response costs two dictionary
operations.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import HTTPClientError

from kcl_pipeline.clock import Clock, SystemClock

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

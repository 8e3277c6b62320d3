"""End connections whose response takes longer than its deadline.

A read time-out bounds the wait for the next byte, not for the whole body: an endpoint that sends
one byte a second holds its thread for ever. `limited` bounds the whole. One daemon thread per
process looks at all deadlines once per second, so a response costs two operations on a dictionary.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import urllib3
from botocore.exceptions import HTTPClientError

from kcl_pipeline.clock import Clock, SystemClock

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse

LOOK_SECONDS: Final = 1.0
BODY_SECONDS: Final = 60.0
"""What the body of one response of AWS may take: 10 MiB at 175 KB/s."""


class Deadlines:
    """Deadlines of the responses that are being read in this process. Thread-safe.

    Args:
        clock: Tells the time.
        in_background: Start the thread that calls `expire`. A test calls it itself.
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
        """Shut `connection` down when the body of the `with` statement takes longer.

        None: the connection is not known, and nothing is limited.

        Raises:
            TimeoutError: The connection was shut down. What was read is only a part.
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
            self._clock.sleep(LOOK_SECONDS)
            with self._lock:
                if not self._open:
                    self._watch = None
                    return
            self.expire()


DEADLINES: Final = Deadlines(SystemClock())


def socket_of(response: object) -> socket.socket | None:
    """Return the socket under a response of urllib3; None where its inside is not as expected."""
    found: object = getattr(getattr(response, "_connection", None), "sock", None)
    if found is None:
        reader = getattr(getattr(response, "_fp", None), "fp", None)
        found = getattr(getattr(reader, "raw", None), "_sock", None)
    return found if isinstance(found, socket.socket) else None


def limit_bodies(client: object, seconds: float = BODY_SECONDS) -> None:
    """Have the bodies of a boto3 client read within `seconds`, event streams excepted.

    There is no public hook between sending and reading. Where botocore's inside is not as
    expected, the client stays as it is.
    """
    endpoint: Any = getattr(client, "_endpoint", None)
    send = getattr(endpoint, "_send", None)
    if endpoint is None or send is None or getattr(send, "limits_bodies", False):
        return

    def send_and_read(request: AWSPreparedRequest) -> AWSResponse:
        if request.stream_output:
            return cast("AWSResponse", send(request))
        # otherwise botocore reads the body before it gives the response out
        request.stream_output = True
        response: AWSResponse = send(request)
        try:
            with DEADLINES.limited(socket_of(response.raw), seconds):
                # kept by the response: botocore gets the same bytes afterwards
                _ = response.content
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise HTTPClientError(error=error) from error
        return response

    send_and_read.limits_bodies = True  # type: ignore[attr-defined] # (so that it is done once)
    endpoint._send = send_and_read  # noqa: SLF001 (see above)

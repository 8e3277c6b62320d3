"""One HTTP/2 answer between the thread of the connections, which fills it, and its receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from botocore.exceptions import HTTPClientError, ReadTimeoutError

MAX_MESSAGE_BYTES: Final = 24 * 1024 * 1024
"""Of an event stream: botocore's own limit.

A longer one is handed out as it is, for the parser to refuse.
"""

_LENGTH_BYTES: Final = 4
_MIN_MESSAGE_BYTES: Final = 16


class Exchange:
    """A request that was sent, and its answer: status, headers, and a body that is taken as bytes
    or as event-stream messages.

    It holds at most the first message that is complete, or under way, and one window. `acknowledge`
    opens the window again by so many bytes and `cancel` ends the answer; both are called from any
    thread and do not wait.
    """

    def __init__(self, acknowledge: Callable[[int], None], cancel: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self._cancel = cancel
        self._changed = threading.Condition()
        self._body = bytearray()
        self._unacknowledged = 0
        self._status: int | None = None
        self._headers: Mapping[str, str] = {}
        self._over = False
        self._error: Exception | None = None
        self.heard_bytes = 0

    # -- filled by the connection
    # ----------------------------------------------------------------------------

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of the answer is here."""
        with self._changed:
            self._status, self._headers = status, headers
            self._changed.notify_all()

    def received(self, data: bytes, size: int) -> int:
        """A piece of the body, which took `size` bytes of the window; returns how many of them may
        be opened again at once.
        """
        with self._changed:
            self.heard_bytes += size
            if self._over:
                return size
            self._body += data
            self._unacknowledged += size
            self._changed.notify_all()
            return self._free()

    def ended(self, error: Exception | None) -> None:
        """Nothing will come any more; None: because the answer is complete."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
            self._changed.notify_all()

    # -- taken by anybody
    # ----------------------------------------------------------------------------

    def head(self, timeout_seconds: float) -> tuple[int, Mapping[str, str]]:
        """Status and headers, waited for.

        Raises `ReadTimeoutError`, or `HTTPClientError` when the connection breaks first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None or self._over, timeout_seconds)
            if self._status is not None:
                return self._status, self._headers
            raise (
                self._broken()
                if self._over
                else ReadTimeoutError(endpoint_url="http2", error="no answer")
            )

    def message(self) -> bytes | None:
        """The next whole message of the body if it is there.

        At the end of the answer whatever is left, which then is no whole message.
        """
        with self._changed:
            size = self._message_bytes()
            if size > len(self._body) and not self._over:
                return None
            message = bytes(memoryview(self._body)[:size])
            del self._body[:size]
            free = self._free()
        if free:
            self._acknowledge(free)
        return message or None

    def messages(self, timeout_seconds: float) -> Iterator[bytes]:
        """Messages as they come, to the end of the answer. Raises as `head`."""
        while self._wait(timeout_seconds):
            message = self.message()
            if message is not None:
                yield message

    def whole_body(self, timeout_seconds: float) -> bytes:
        """A body that is no event stream, and short. Raises as `head`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_seconds):
                raise ReadTimeoutError(endpoint_url="http2", error="the answer does not end")
            if self._error is not None:
                raise self._broken()
            return bytes(self._body)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left and nothing will come."""
        with self._changed:
            return self._over and not self._body

    @property
    def error(self) -> HTTPClientError | None:
        """What ended the answer, None while it goes on and when it is complete."""
        with self._changed:
            return self._broken() if self._error is not None else None

    def close(self) -> None:
        """End it and forget what is there. Any thread, any number of times."""
        with self._changed:
            free, self._unacknowledged = self._unacknowledged, 0
            self._over = True
            self._body.clear()
            self._changed.notify_all()
        self._cancel()
        if free:
            self._acknowledge(free)

    def _wait(self, timeout_seconds: float) -> bool:
        """Until there is a message; False at the end."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._over or self._message_bytes() <= len(self._body), timeout_seconds
            ):
                raise ReadTimeoutError(endpoint_url="http2", error="no event")
            if self._over and not self._body and self._error is not None:
                raise self._broken()
            return bool(self._body)

    def _message_bytes(self) -> int:
        """How long the first message is; more than there is while it is not known."""
        if len(self._body) < _LENGTH_BYTES:
            return _MIN_MESSAGE_BYTES
        size = int.from_bytes(self._body[:_LENGTH_BYTES], "big")
        return size if _MIN_MESSAGE_BYTES <= size <= MAX_MESSAGE_BYTES else _MIN_MESSAGE_BYTES

    def _free(self) -> int:
        """What may be acknowledged: nothing while a whole message waits to be taken."""
        if self._message_bytes() <= len(self._body):
            return 0
        free, self._unacknowledged = self._unacknowledged, 0
        return free

    def _broken(self) -> HTTPClientError:
        return HTTPClientError(error=self._error or "the answer was closed")

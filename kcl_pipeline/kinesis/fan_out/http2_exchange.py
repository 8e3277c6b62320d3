"""Pass one HTTP/2 response from the thread of the connections to its receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from botocore.exceptions import HTTPClientError, ReadTimeoutError

MAX_MESSAGE_BYTES: Final = 24 * 1024 * 1024
"""Longest message of an event stream: botocore's limit. Its parser refuses a longer message."""

_LENGTH_BYTES: Final = 4
_MIN_MESSAGE_BYTES: Final = 16


class Exchange:
    """The response to a request: status, headers, and a body of bytes or event-stream messages.

    It buffers at most one message and one flow-control window.

    Args:
        acknowledge: Opens the window by this number of bytes. Thread-safe; does not wait.
        cancel: Ends the response. Thread-safe; does not wait.

    Attributes:
        received_bytes: Bytes of the body that were received.
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
        self.received_bytes = 0

    # Called by the thread of the connections

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        """Store status and headers."""
        with self._changed:
            self._status, self._headers = status, headers
            self._changed.notify_all()

    def received(self, data: bytes, size: int) -> int:
        """Append a piece of the body, which used `size` bytes of the window.

        Returns:
            Bytes by which the window can be opened now.
        """
        with self._changed:
            self.received_bytes += size
            if self._over:
                return size
            self._body += data
            self._unacknowledged += size
            self._changed.notify_all()
            return self._free()

    def ended(self, error: Exception | None) -> None:
        """Note the end of the response. `error` None: it is complete."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
            self._changed.notify_all()

    # Called by the receiver, in any thread

    def head(self, timeout_seconds: float) -> tuple[int, Mapping[str, str]]:
        """Wait for status and headers.

        Raises:
            ReadTimeoutError: The time is over.
            HTTPClientError: The connection was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None or self._over, timeout_seconds)
            if self._status is not None:
                return self._status, self._headers
            raise (
                self._broken()
                if self._over
                else ReadTimeoutError(endpoint_url="http2", error="no response")
            )

    def message(self) -> bytes | None:
        """Return the next complete message of the body; None if there is none.

        At the end of the response, an incomplete message is returned.
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
        """Yield messages until the end of the response. Raises as `head`."""
        while self._wait(timeout_seconds):
            message = self.message()
            if message is not None:
                yield message

    def whole_body(self, timeout_seconds: float) -> bytes:
        """Return a short body that is not an event stream. Raises as `head`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_seconds):
                raise ReadTimeoutError(endpoint_url="http2", error="the response does not end")
            if self._error is not None:
                raise self._broken()
            return bytes(self._body)

    @property
    def is_over(self) -> bool:
        """Whether the response has ended and all its bytes were taken."""
        with self._changed:
            return self._over and not self._body

    @property
    def error(self) -> HTTPClientError | None:
        """The error that ended the response. None: it continues, or is complete."""
        with self._changed:
            return self._broken() if self._error is not None else None

    def close(self) -> None:
        """End the response and drop its bytes. Thread-safe. May be called repeatedly."""
        with self._changed:
            free, self._unacknowledged = self._unacknowledged, 0
            self._over = True
            self._body.clear()
            self._changed.notify_all()
        self._cancel()
        if free:
            self._acknowledge(free)

    def _wait(self, timeout_seconds: float) -> bool:
        """Wait for a message. Return False at the end."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._over or self._message_bytes() <= len(self._body), timeout_seconds
            ):
                raise ReadTimeoutError(endpoint_url="http2", error="no event")
            if self._over and not self._body and self._error is not None:
                raise self._broken()
            return bool(self._body)

    def _message_bytes(self) -> int:
        """Return the length of the first message. If unknown, it is more than the buffer has."""
        if len(self._body) < _LENGTH_BYTES:
            return _MIN_MESSAGE_BYTES
        size = int.from_bytes(self._body[:_LENGTH_BYTES], "big")
        return size if _MIN_MESSAGE_BYTES <= size <= MAX_MESSAGE_BYTES else _MIN_MESSAGE_BYTES

    def _free(self) -> int:
        """Return the bytes to acknowledge; 0 while a complete message is buffered."""
        if self._message_bytes() <= len(self._body):
            return 0
        free, self._unacknowledged = self._unacknowledged, 0
        return free

    def _broken(self) -> HTTPClientError:
        return HTTPClientError(error=self._error or "the response was closed")

"""HTTP requests and responses of the embedded AWS, independent of the HTTP version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request.

    Attributes:
        method: HTTP method.
        target: Path and query as sent.
        headers: Values by header name in lower case.
        body: Complete body.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """The path without the query, still percent-encoded."""
        return self.target.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response.

    Attributes:
        status: HTTP status code.
        body: Complete body, if `stream` is None.
        headers: Values by header name.
        stream: Parts of the body. The server sends each part when it is available. Over HTTP/1.1 it
            uses chunked encoding and closes the connection after the last part.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterable[bytes] | None = None


Handler = Callable[[Request], "Response | None"]
"""Function that returns the response to a request; None drops the request without a response."""

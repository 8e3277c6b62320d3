"""HTTP requests and responses of the embedded AWS, independent of the HTTP version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Header names are in lower case; `target` is path and query as sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """The path without the query, still quoted."""
        return self.target.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Response:
    """One answer.

    With `stream`, its pieces follow the headers as they come (chunked), and the connection ends
    with them.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterable[bytes] | None = None


Handler = Callable[[Request], "Response | None"]
"""Answers a request; None drops the connection without an answer."""

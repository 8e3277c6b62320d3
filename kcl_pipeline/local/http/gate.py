"""Rejection of requests that web pages and foreign hosts send to the embedded AWS.

The server listens on 127.0.0.1 only. A browser on the same machine can reach it on behalf of any
web page. Three rules reject such requests. None of them affects an AWS SDK.

1. The ``Host`` header must be a loopback name. This stops DNS rebinding, where a foreign name
   resolves to 127.0.0.1.
2. An ``Origin`` header must be the server's own address. Browsers send it with every request of a
   web page that can change something.
3. ``Sec-Fetch-Site`` must not indicate that another site sent the request. Browsers send it with
   images and links, which have no ``Origin``.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from kcl_pipeline.local.http.messages import Request, Response

_OWN_SITES: Final = frozenset({"same-origin", "none"})
_HOST: Final = re.compile(
    r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?"
)


def refused(request: Request) -> Response | None:
    """Return the error response to a request that no SDK on this machine sends, else None."""
    host = request.headers.get("host", "")
    if not is_loopback(host):
        return _forbidden(f"Host {host[:100]!r} is not a loopback name; use 127.0.0.1")
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return _forbidden(f"requests of the web page {origin[:100]!r} are refused")
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in _OWN_SITES:
        return _forbidden("requests of web pages are refused")
    return None


def is_loopback(host: str) -> bool:
    """Return whether a ``Host`` header names this machine only, with or without a port.

    Loopback names are ``localhost``, names below it (S3 buckets as ``bucket.localhost``),
    addresses in 127.0.0.0/8 and ``[::1]``.
    """
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = (found["name"] or found["address"]).lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _forbidden(why: str) -> Response:
    return Response(403, why.encode(), {"Content-Type": "text/plain; charset=utf-8"})

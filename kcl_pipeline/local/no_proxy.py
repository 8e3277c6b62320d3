"""Exclude this host from the proxies of a process that uses the embedded AWS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def no_proxy_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that exclude this host from the proxies of an environment.

    Programs read the name in lower case, in upper case, or both. Empty without a proxy.
    """
    given = {name.lower(): value for name, value in environment.items()}
    if not any(given.get(name) for name in _PROXIES):
        return {}
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, map(str.strip, before.split(","))), *_LOOPBACK])
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))

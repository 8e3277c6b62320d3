"""Names of the application transactions with which a Delta table stores positions.

There are two schemes. The names of the first one are long: they contain the application, the ARN of
the stream, its creation time and the shard as text. The names of the second one are short: they
begin with a hash of application, stream and creation time. Every writer of a commit stores and
parses all names of the commit, so short names make a log smaller and faster.

Versions of this package that know only long names must never miss a position with short names. So
the first commit of a shard with short names also writes its long name ``v`` with the version
`MARKER`, alone. Such a version finds an incomplete position, and leaves the shard alone.

The table decides which names a shard has: long ones if its long ``v`` is a number, short ones if it
is the marker. Only a shard without either gets the names that its writer prefers. A worker prefers
what the record of the application says (`leases.application.identity`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final

LONG: Final = ("v", "p0", "p1", "p2", "s")
"""Ends of the five long names of a shard."""
SHORT: Final = ("v", "l", "m", "h")
"""Ends of the four short names of a shard."""
MARKER: Final = 0
"""Version of the long name ``v`` of a shard with short names."""

_HASH_BYTES: Final = 12
_CANONICAL: Final = re.compile(r"shardId-([0-9]{12})")

Transaction = Callable[[str], int | None]
"""Returns the version of an application transaction. None: it was never written."""


def long_id(application: str, shard_name: str) -> str:
    """Return the beginning of the long names of a shard."""
    return f"{application}/{shard_name}"


@lru_cache(maxsize=100_000)
def short_id(long: str) -> str:
    """Return the beginning of the short names of a shard: a hash and the shard.

    A shard id of the usual form becomes its number. Short names never contain a slash, so they
    differ from all other names that this package writes.

    Args:
        long: The `long_id`: application, stream and creation time, and after the last slash the id
            of the shard.
    """
    stream, _, shard = long.rpartition("/")
    digest = hashlib.sha256(stream.encode()).digest()[:_HASH_BYTES]
    hashed = base64.urlsafe_b64encode(digest).decode()
    canonical = _CANONICAL.fullmatch(shard)
    return f"{hashed}.{int(canonical[1])}" if canonical else f"{hashed}:{shard}"


@lru_cache(maxsize=20_000)
def names(long: str, *, short: bool) -> tuple[str, ...]:
    """Return the names of the transactions of a shard, in the order of `SHORT` or `LONG`."""
    if not short:
        return tuple(f"{long}/{end}" for end in LONG)
    begin = short_id(long)
    return tuple(begin + end for end in SHORT)


def marker_name(long: str) -> str:
    """Return the long name that has a number, or the marker of short names."""
    return f"{long}/{LONG[0]}"


def has_short_names(transaction: Transaction, long: str, *, preferred: bool) -> bool:
    """Return whether the position of a shard has, or will have, short names.

    Args:
        transaction: Reads the table.
        long: The `long_id` of the shard.
        preferred: Whether a shard without a position gets short names.
    """
    first = transaction(marker_name(long))
    if first is not None:
        return first == MARKER
    for short in (False, True):
        if any(transaction(one) is not None for one in names(long, short=short)):
            return short  # incomplete, which is refused when it is read
    return preferred


def long_ids_with_marker(application: str, transactions: Mapping[str, int]) -> list[str]:
    """Return the `long_id` of every shard of an application that has short names."""
    return [name for name, first in _first_names(application, transactions) if first == MARKER]


def prefers_short(application: str, transactions: Mapping[str, int]) -> bool:
    """Return whether an application without a record gets short names in this table.

    Workers that know only long names may still use a table in which all names are long.
    """
    firsts = [first for _, first in _first_names(application, transactions)]
    return not firsts or MARKER in firsts


def _first_names(application: str, transactions: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    begin, end = f"{application}/", f"/{LONG[0]}"
    for name, number in transactions.items():
        if name.startswith(begin) and name.endswith(end):
            yield name.removesuffix(end), number

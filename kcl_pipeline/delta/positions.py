"""Encode the position of a shard as application transactions of a Delta table.

One commit sets all four transactions of a shard. Their names begin with a hash of application,
stream and creation time, and the number of the shard: every writer of a commit stores and parses
all names of the commit, so short names make a log smaller and faster.

* ``l``, ``m``, ``h``: the sequence number, 62 bits each, the lowest first. The next bit of ``h`` is
  set when the shard has ended;
* ``v``: v · 2²⁸ + s + 1, where v is how many times the position was set, and s the sub-sequence
  number, −1 if there is no position.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import Position
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition

SUFFIXES: Final = ("v", "l", "m", "h")
"""Ends of the four names of a shard."""

_HASH_BYTES: Final = 12
_CANONICAL: Final = re.compile(r"shardId-([0-9]{12})")
_PART_BITS: Final = 62
_PART: Final = 2**_PART_BITS - 1
_LIMIT: Final = 2 ** (3 * _PART_BITS)
_ENDED: Final = 2**_PART_BITS
_NO_POSITION: Final = -1
_SUB_BITS: Final = 28
_SUB: Final = 2**_SUB_BITS - 1
_MAX_SET: Final = 2**35 - 1
"""Hundred commits per second for ten years."""

Transaction = Callable[[str], int | None]
"""Returns the version of an application transaction. None: it was never written."""


@lru_cache(maxsize=100_000)
def names(key: str) -> tuple[str, ...]:
    """Return the names of the transactions of a shard, in the order of `SUFFIXES`.

    A shard id of the usual form becomes its number. The names never contain a slash.

    Args:
        key: Application, stream and creation time, and after the last slash the id of the shard.
    """
    stream, _, shard = key.rpartition("/")
    digest = hashlib.sha256(stream.encode()).digest()[:_HASH_BYTES]
    hashed = base64.urlsafe_b64encode(digest).decode()
    canonical = _CANONICAL.fullmatch(shard)
    begin = f"{hashed}.{int(canonical[1])}" if canonical else f"{hashed}:{shard}"
    return tuple(begin + suffix for suffix in SUFFIXES)


def transactions(key: str, stored: StoredPosition) -> dict[str, int]:
    """Return the transactions of a shard with their versions.

    Raises:
        SinkError: The sequence number has more than 186 bits, the sub-sequence number more than 28,
            or the number of commits more than 35.
    """
    position = stored.position
    sequence = 0 if position is None else int(position.sequence_number)
    sub = _NO_POSITION if position is None else position.sub_sequence_number
    for what, value, limit, bits in (
        ("sequence number", sequence, _LIMIT, 3 * _PART_BITS),
        ("sub-sequence number", sub, _SUB, _SUB_BITS),
        ("number of commits", stored.number, _MAX_SET + 1, 35),
    ):
        if value >= limit:
            raise SinkError(
                f"the {what} {value} of {key} has more than {bits} bits, which the table cannot "
                "store; write to another table"
            )
    parts = [sequence >> _PART_BITS * part & _PART for part in range(3)]
    parts[2] += _ENDED if stored.ended else 0
    values = ((stored.number << _SUB_BITS) + sub + 1, *parts)
    return dict(zip(names(key), values, strict=True))


def stored(key: str, transaction: Transaction) -> StoredPosition:
    """Read what a log stores for a shard.

    Raises:
        TableMismatchError: The position cannot be read, because another program removed or changed
            some of its transactions.
    """
    try:
        return _decoded(tuple(map(transaction, names(key))))
    except ValueError as error:
        raise TableMismatchError(f"the position of {key} cannot be read: {error}") from error


@lru_cache(maxsize=10_000)
def _decoded(values: tuple[int | None, ...]) -> StoredPosition:
    found = [value for value in values if value is not None]
    if not found:
        return NOTHING_STORED
    if len(found) != len(SUFFIXES):
        raise ValueError(f"{len(found)} of {len(SUFFIXES)} of its transactions are there")
    first, low, middle, high = found
    number, sub = first >> _SUB_BITS, (first & _SUB) - 1
    ended, high = high >= _ENDED, high & _PART if high >= 0 else high
    if number < 1 or not all(0 <= part <= _PART for part in (low, middle, high)):
        raise ValueError("its transactions are outside their limits")
    if sub == _NO_POSITION:
        return StoredPosition(number, None, ended)
    sequence_number = low | middle << _PART_BITS | high << 2 * _PART_BITS
    return StoredPosition(number, Position(str(sequence_number), sub), ended)

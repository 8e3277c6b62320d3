"""Encode the position of a shard as application transactions of a Delta table.

One commit sets all transactions of a shard. With long names (see `names`) there are five:

* ``v``: how many times the position was set;
* ``p0``, ``p1``, ``p2``: the sequence number, 62 bits each, the lowest first. The next bit of
  ``p2`` is set when the table has all records of the shard;
* ``s``: the sub-sequence number; −1 if no record of the shard is in the table.

With short names there are four: ``l``, ``m``, ``h`` are ``p0``, ``p1``, ``p2``, and ``v`` is
v · 2²⁸ + s + 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kcl_pipeline.batch import TxnVersions
from kcl_pipeline.delta.commits.names import (
    LONG,
    MARKER,
    SHORT,
    Transaction,
    marker_name,
    names,
)
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import Position

_PART_BITS: Final = 62
_PART: Final = 2**_PART_BITS - 1
_LIMIT: Final = 2 ** (3 * _PART_BITS)
_ENDED: Final = 2**_PART_BITS
_NO_POSITION: Final = -1
_SUB_BITS: Final = 28
_SUB: Final = 2**_SUB_BITS - 1
_MAX_SET: Final = 2**35 - 1
"""With short names: hundred commits per second for ten years."""


def encoded(sets: TxnVersions, *, short: bool) -> tuple[int, ...]:
    """Return the versions of the transactions, in the order of `SHORT` or `LONG`.

    Raises:
        SinkError: The sequence number has more than 186 bits, or, with short names, the
            sub-sequence number more than 28.
    """
    position = sets.position
    sequence = 0 if position is None else int(position.sequence_number)
    if sequence >= _LIMIT:
        raise SinkError(_too_large("sequence number", sequence, 3 * _PART_BITS))
    parts = [sequence >> _PART_BITS * part & _PART for part in range(3)]
    parts[2] += _ENDED if sets.ended else 0
    sub = _NO_POSITION if position is None else position.sub_sequence_number
    number = sets.number or 0
    if not short:
        return (number, *parts, sub)
    if sub >= _SUB:
        raise SinkError(_too_large("sub-sequence number", sub, _SUB_BITS))
    if number > _MAX_SET:
        raise SinkError(_too_large("number of commits", number, 35))
    return ((number << _SUB_BITS) + sub + 1, *parts)


def named(long: str, sets: TxnVersions, *, short: bool) -> dict[str, int]:
    """Return the transactions of the shard with this `long_id`, by name; see `encoded`."""
    return dict(zip(names(long, short=short), encoded(sets, short=short), strict=True))


def _too_large(what: str, value: int, bits: int) -> str:
    return (
        f"the {what} {value} has more than {bits} bits, which the table cannot store; move the "
        "positions to the lease rows with `kcl-pipeline downgrade`, and write "
        "batch.commit_protocol='two_phase'"
    )


@lru_cache(maxsize=10_000)
def decoded(
    data: int | None, fence: int | None, position: tuple[int | None, ...] | None, *, short: bool
) -> TxnVersions:
    """Return the versions of a lease.

    Args:
        data: Version of the data transaction.
        fence: Version of the fence.
        position: Versions of its transactions, in the order of `SHORT` or `LONG`. None: not read.
        short: Whether these have short names.

    Raises:
        ValueError: Some of the transactions are missing, or outside their limits.
    """
    found = [value for value in position or () if value is not None]
    if not found:
        return TxnVersions(data, fence)
    expected = len(SHORT if short else LONG)
    if len(found) != expected:
        raise ValueError(f"{len(found)} of {expected} transactions of a position are there")
    number, low, middle, high = found[:4]
    number, sub = (number >> _SUB_BITS, (number & _SUB) - 1) if short else (number, found[4])
    ended, high = high >= _ENDED, high & _PART if high >= 0 else high
    if number < 1 or sub < _NO_POSITION or not all(0 <= p <= _PART for p in (low, middle, high)):
        raise ValueError("the transactions of a position are outside their limits")
    if sub == _NO_POSITION:
        return TxnVersions(data, fence, number, None, ended)
    sequence_number = low | middle << _PART_BITS | high << 2 * _PART_BITS
    return TxnVersions(data, fence, number, Position(str(sequence_number), sub), ended)


def versions_of(
    transaction: Transaction,
    data_id: str,
    fence_id: str,
    long: str | None,
    *,
    short: bool,
) -> TxnVersions:
    """Read what a log stores for a lease.

    Args:
        transaction: Returns the version of an application transaction.
        data_id: Name of the data transaction.
        fence_id: Name of the fence.
        long: The `long_id` of the shard. None: no position is read.
        short: Whether its position has short names.

    Raises:
        TableMismatchError: The position cannot be read, because another program removed or
            changed some of its transactions, or it has the names of the other scheme.
    """
    position = None
    if long is not None:
        position = tuple(map(transaction, names(long, short=short)))
    try:
        found = decoded(transaction(data_id), transaction(fence_id), position, short=short)
        if long is not None and short:
            _check_marker(transaction(marker_name(long)), found)
    except ValueError as error:
        raise TableMismatchError(f"{long} cannot be read: {error}") from error
    return found


def _check_marker(marker: int | None, found: TxnVersions) -> None:
    """Refuse a position with short names without its marker, and a marker without its position."""
    if marker != (None if found.number is None else MARKER):
        raise ValueError("the marker of short names does not fit the position")

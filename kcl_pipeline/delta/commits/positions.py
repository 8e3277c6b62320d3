"""Encode the position of a shard as application transactions of a Delta table.

A shard has five transactions. Their names begin with the application, the ARN of the stream, its
creation time and the shard. One commit sets all of them:

* ``v``: how many times the position was set;
* ``p0``, ``p1``, ``p2``: the sequence number, 62 bits each, the lowest first. The next bit of
  ``p2`` is set when the table has all records of the shard;
* ``s``: the sub-sequence number; −1 if no record of the shard is in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kcl_pipeline.batch import TxnVersions
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import Position

NAMES: Final = ("v", "p0", "p1", "p2", "s")
_PART_BITS: Final = 62
_PART: Final = 2**_PART_BITS - 1
_LIMIT: Final = 2 ** (3 * _PART_BITS)
_ENDED: Final = 2**_PART_BITS
_NO_POSITION: Final = -1


def encoded(sets: TxnVersions) -> tuple[int, ...]:
    """Return the five versions, in the order of `NAMES`.

    Raises:
        SinkError: The sequence number has more than 186 bits.
    """
    position = sets.position
    number = 0 if position is None else int(position.sequence_number)
    if number >= _LIMIT:
        raise SinkError(
            f"the sequence number {number} has more than 186 bits, which the table cannot store; "
            "write batch.commit_protocol='two_phase'"
        )
    parts = [number >> _PART_BITS * part & _PART for part in range(3)]
    parts[2] += _ENDED if sets.ended else 0
    sub = _NO_POSITION if position is None else position.sub_sequence_number
    return (sets.number or 0, *parts, sub)


def decoded(
    data: int | None, fence: int | None, position: Sequence[int | None] | None
) -> TxnVersions:
    """Return the versions of a lease.

    Args:
        data: Version of the data transaction.
        fence: Version of the fence.
        position: Versions of the five transactions, in the order of `NAMES`. None: not read.

    Raises:
        ValueError: Some of the five are missing, or outside their limits.
    """
    found = [value for value in position or () if value is not None]
    if not found:
        return TxnVersions(data, fence)
    if len(found) != len(NAMES):
        raise ValueError(f"{len(found)} of {len(NAMES)} transactions of a position are there")
    number, low, middle, high, sub = found
    ended, high = high >= _ENDED, high & _PART if high >= 0 else high
    if number < 1 or sub < _NO_POSITION or not all(0 <= p <= _PART for p in (low, middle, high)):
        raise ValueError("the transactions of a position are outside their limits")
    if sub == _NO_POSITION:
        return TxnVersions(data, fence, number, None, ended)
    sequence_number = low | middle << _PART_BITS | high << 2 * _PART_BITS
    return TxnVersions(data, fence, number, Position(str(sequence_number), sub), ended)


def ids(base: str) -> tuple[str, ...]:
    """Return the names of the five transactions of a shard."""
    return tuple(f"{base}/{name}" for name in NAMES)


def versions_of(
    transaction: Callable[[str], int | None], data_id: str, fence_id: str, base: str | None
) -> TxnVersions:
    """Read what a log stores for a lease.

    Args:
        transaction: Returns the version of an application transaction.
        data_id: Name of the data transaction.
        fence_id: Name of the fence.
        base: Beginning of the names of the position. None: no position is read.

    Raises:
        TableMismatchError: The position cannot be read, because another program removed or
            changed some of its transactions.
    """
    position = None if base is None else [transaction(one) for one in ids(base)]
    try:
        return decoded(transaction(data_id), transaction(fence_id), position)
    except ValueError as error:
        raise TableMismatchError(f"{base} cannot be read: {error}") from error

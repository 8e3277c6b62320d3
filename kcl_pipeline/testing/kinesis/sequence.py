"""Sequence numbers in the service's layout: 56 decimal digits that compare like the records they
name.

The number, in 47 hexadecimal digits: `2`, the shard's creation second (9), the low digit of the
shard's index (1), the record's index in the shard (16), two zeros, the arrival second (9), the
shard's index (8), the layout version `2`. So numbers of one shard increase with the record index,
and those of a shard created later are higher. Only the order and the uniqueness are documented by
the service; the layout is what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_END_INDEX: Final = 0x7FFFFFFFFFFFFFFF
_VERSION: Final = 2
_DIGITS: Final = 56


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """What a sequence number says: seconds are epoch seconds, `record_index` counts from 1 (0: the
    shard's start).
    """

    shard_created_seconds: int
    record_index: int
    shard_index: int


def base_of(shard_created_seconds: int, shard_index: int) -> int:
    """The part of the number that all records of a shard share."""
    return (
        (2 << 184)
        | (shard_created_seconds << 148)
        | ((shard_index & 0xF) << 144)
        | (shard_index << 4)
        | _VERSION
    )


def number(base: int, record_index: int, arrival_seconds: int) -> str:
    """The sequence number of a record, as a decimal string of 56 digits."""
    return str(base | (record_index << 80) | (arrival_seconds << 36))


def starting(shard_created_seconds: int, shard_index: int) -> str:
    """A shard's StartingSequenceNumber: below its first record, above everything in its parents."""
    return number(base_of(shard_created_seconds, shard_index), 0, shard_created_seconds)


def ending(shard_created_seconds: int, shard_index: int, closed_seconds: int) -> str:
    """A closed shard's EndingSequenceNumber: above its last record, below everything in its
    children.
    """
    return number(base_of(shard_created_seconds, shard_index), _END_INDEX, closed_seconds)


def parse(text: str) -> SequenceParts | None:
    """Read a sequence number; None when it is not one."""
    if len(text) != _DIGITS or not (text.isascii() and text.isdigit()):
        return None
    value = int(text)
    if value >> 184 != 2 or value & 0xF != _VERSION:  # noqa: PLR2004 (the layout's leading digit)
        return None
    shard_index = (value >> 4) & 0xFFFFFFFF
    if (value >> 144) & 0xF != shard_index & 0xF:
        return None
    return SequenceParts(
        (value >> 148) & 0xFFFFFFFFF, (value >> 80) & 0xFFFFFFFFFFFFFFFF, shard_index
    )

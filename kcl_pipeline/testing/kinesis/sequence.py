"""Sequence numbers in the service's layout: 56 decimal digits that sort like their records.

The number has 47 hexadecimal digits: `2`, the shard's creation second (9), the low digit of the
shard's index (1), the record's index in the shard (16), two zeros, the arrival second (9), the
shard's index (8), the layout version `2`. Numbers of one shard increase with the record index.
Numbers of a shard that is created later are higher.

The service documents only the order and the uniqueness. The layout is observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_END_INDEX: Final = 0x7FFFFFFFFFFFFFFF
_VERSION: Final = 2
_DIGITS: Final = 56


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """The parts of a sequence number.

    Seconds are epoch seconds. `record_index` counts from 1; 0 is the start of the shard.
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
    """A shard's StartingSequenceNumber: below its first record, above all of its parents."""
    return number(base_of(shard_created_seconds, shard_index), 0, shard_created_seconds)


def ending(shard_created_seconds: int, shard_index: int, closed_seconds: int) -> str:
    """A closed shard's EndingSequenceNumber.

    It is above the shard's last record and below all numbers of its children.
    """
    return number(base_of(shard_created_seconds, shard_index), _END_INDEX, closed_seconds)


def parse(text: str) -> SequenceParts | None:
    """Parse a sequence number; None if `text` is not one."""
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

"""The position of a consumer in a shard.

A `Position` is KCL's *extended sequence number*: a Kinesis sequence number and, inside a KPL
aggregate, the index of the user record. Four sentinels are positions without a number. The order is
KCL's (protocol §9.1): ``AT_TIMESTAMP < TRIM_HORIZON < LATEST < any number < SHARD_END``.

A `StoredPosition` is what a table stores for a shard; a commit replaces it by the one that follows
(`check_entries`). This module loads no library of tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.text import printable

MAX_SEQUENCE_NUMBER_DIGITS: Final = 129
"""Kinesis: the pattern of SequenceNumber. Current numbers have 186 bits, which is 56 digits."""
MAX_SUB_SEQUENCE_NUMBER: Final = 2**63 - 1
"""KCL stores it in a Java `long`."""

_SENTINEL_RANK: Final = {"AT_TIMESTAMP": -3, "TRIM_HORIZON": -2, "LATEST": -1}
_SHARD_END: Final = "SHARD_END"


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A position in a shard. All records up to and including it have been processed.

    Comparison is numeric: "9" < "10", and "07" equals "7". Two SHARD_END are equal for all
    sub-sequence numbers.

    Attributes:
        sequence_number: Decimal string or name of a sentinel. It is not normalized, because the
            original string is sent to Kinesis and stored in the lease row.
        sub_sequence_number: Index of the user record inside its aggregate, from 0.

    Raises:
        ValueError: The sequence number is neither a sentinel nor 1 to 129 digits, or the
            sub-sequence number is not from 0 to 2^63 - 1.
    """

    sequence_number: str
    sub_sequence_number: int = 0

    def __post_init__(self) -> None:
        text = self.sequence_number
        if not (text in _SENTINEL_RANK or text == _SHARD_END or _is_number(text)):
            raise ValueError(
                f"'{printable(text, MAX_SEQUENCE_NUMBER_DIGITS)}' is neither a Kinesis sequence "
                f"number nor one of {[*_SENTINEL_RANK, _SHARD_END]}"
            )
        if not 0 <= self.sub_sequence_number <= MAX_SUB_SEQUENCE_NUMBER:
            raise ValueError(
                f"sub-sequence number {self.sub_sequence_number} is not from 0 to 2^63 - 1"
            )

    @property
    def is_sentinel(self) -> bool:
        """Whether this is one of the four sentinels and not the position of a record."""
        return self.sequence_number in _SENTINEL_RANK or self.sequence_number == _SHARD_END

    @property
    def is_shard_end(self) -> bool:
        """Whether the shard has been read to its end. The position does not change any more."""
        return self.sequence_number == _SHARD_END

    def _key(self) -> tuple[int, int, int]:
        if self.sequence_number == _SHARD_END:
            return (2, 0, 0)
        rank = _SENTINEL_RANK.get(self.sequence_number)
        if rank is not None:
            return (0, rank, self.sub_sequence_number)
        return (1, int(self.sequence_number), self.sub_sequence_number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Position):
            return NotImplemented
        mine, its = self.sequence_number, other.sequence_number
        if mine == its:
            return self.sub_sequence_number == other.sub_sequence_number or mine == _SHARD_END
        # Strings of the same length are the same position only if they are equal.
        return len(mine) != len(its) and self._key() == other._key()

    def __lt__(self, other: Position) -> bool:
        mine, its = self.sequence_number, other.sequence_number
        if len(mine) == len(its) and mine[0] <= "9" and its[0] <= "9":
            # With the same number of digits, strings have the order of their numbers.
            return (mine, self.sub_sequence_number) < (its, other.sub_sequence_number)
        return self._key() < other._key()

    def __gt__(self, other: Position) -> bool:
        return other < self

    def __le__(self, other: Position) -> bool:
        return not other < self

    def __ge__(self, other: Position) -> bool:
        return not self < other

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return (
            self.sequence_number
            if not self.sub_sequence_number
            else f"{self.sequence_number}/{self.sub_sequence_number}"
        )


def _is_number(text: str) -> bool:
    return len(text) <= MAX_SEQUENCE_NUMBER_DIGITS and text.isascii() and text.isdigit()


AT_TIMESTAMP: Final = Position("AT_TIMESTAMP")
TRIM_HORIZON: Final = Position("TRIM_HORIZON")
LATEST: Final = Position("LATEST")
SHARD_END: Final = Position(_SHARD_END)


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """What a table stores for a shard. `StoredPosition()`: nothing yet.

    Attributes:
        number: How many times the position was set. It never falls.
        position: Position of the last row (inclusive). None: no row of the shard is in the table,
            or a seek has removed the position.
        ended: Whether the shard takes no more rows.
    """

    number: int = 0
    position: Position | None = None
    ended: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether the table has a position or an end of the shard."""
        return self.position is not None or self.ended

    def moved(self, position: Position | None, *, ended: bool = False) -> StoredPosition:
        """Return what the table stores after a commit that sets this position (inclusive).

        Args:
            position: The new position.
            ended: Whether the shard takes no more rows.
        """
        return StoredPosition(self.number + 1, position, ended)


NOTHING_STORED = StoredPosition()
"""What a table stores for a shard that it does not know."""


def check_entries(
    expected: Mapping[str, StoredPosition], becomes: Mapping[str, StoredPosition]
) -> None:
    """Raise `ValueError` unless there are shards, each with the next number of what is expected."""
    numbers = {key: stored.number + 1 for key, stored in expected.items()}
    if not numbers or numbers != {key: stored.number for key, stored in becomes.items()}:
        raise ValueError(f"a commit needs shards, each with the next number: {dict(becomes)}")

"""Where a consumer stands in a shard.

A `Position` is KCL's *extended sequence number*: a Kinesis sequence number and, inside a KPL aggregate, the index of the
user record. Four sentinels stand for places that have no number. The order is KCL's (protocol §9.1):
``AT_TIMESTAMP < TRIM_HORIZON < LATEST < any number < SHARD_END``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

_SENTINEL_RANK: Final = {"AT_TIMESTAMP": -3, "TRIM_HORIZON": -2, "LATEST": -1}
_SHARD_END: Final = "SHARD_END"


@functools.total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A place in a shard: everything up to and including it has been dealt with.

    `sequence_number` is a decimal string or one of the sentinel names; it is kept as given, because the original string
    goes back to Kinesis and into the lease row. `sub_sequence_number` counts user records inside an aggregate, from 0.

    Raises `ValueError` when the text is neither digits nor a sentinel, or the sub-sequence number is negative.
    Comparison is numeric: "9" < "10", "07" and "7" are equal, and two SHARD_END are equal whatever their sub-sequence.
    """

    sequence_number: str
    sub_sequence_number: int = 0

    def __post_init__(self) -> None:
        text = self.sequence_number
        if not (text in _SENTINEL_RANK or text == _SHARD_END or (text.isascii() and text.isdigit())):
            msg = f"{text!r} is neither a Kinesis sequence number nor one of {[*_SENTINEL_RANK, _SHARD_END]}"
            raise ValueError(msg)
        if self.sub_sequence_number < 0:
            msg = f"sub-sequence number {self.sub_sequence_number} is negative"
            raise ValueError(msg)

    @property
    def is_sentinel(self) -> bool:
        """Whether this is one of the four named places instead of a record."""
        return self.sequence_number in _SENTINEL_RANK or self.sequence_number == _SHARD_END

    @property
    def is_shard_end(self) -> bool:
        """Whether the shard has been read to its end (terminal)."""
        return self.sequence_number == _SHARD_END

    def _key(self) -> tuple[int, int, int]:
        if self.sequence_number == _SHARD_END:
            return (2, 0, 0)
        rank = _SENTINEL_RANK.get(self.sequence_number)
        if rank is not None:
            return (0, rank, self.sub_sequence_number)
        return (1, int(self.sequence_number), self.sub_sequence_number)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Position) else NotImplemented

    def __lt__(self, other: Position) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return self.sequence_number if not self.sub_sequence_number else f"{self.sequence_number}/{self.sub_sequence_number}"


AT_TIMESTAMP: Final = Position("AT_TIMESTAMP")
TRIM_HORIZON: Final = Position("TRIM_HORIZON")
LATEST: Final = Position("LATEST")
SHARD_END: Final = Position(_SHARD_END)

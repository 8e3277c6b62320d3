"""The mark of a lease row: the table of the sink when this package wrote the checkpoint.

A sink that stores positions may be emptied, replaced, or restored from a backup, while the lease
rows stay. Then a checkpoint is ahead of the table, as it is after a Java worker has processed
records. The mark tells the two apart: a table that has less than the mark is not the one that the
checkpoint was written for. A checkpoint after the position of the mark was written by Java.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kcl_pipeline.position import Position

if TYPE_CHECKING:
    from kcl_pipeline.batch import TxnVersions

_PARTS = 4
_NONE = "-"


@dataclass(frozen=True, slots=True)
class TableMark:
    """What the table had when the checkpoint was written.

    Attributes:
        table: Id of the table.
        number: How many times the position was set.
        position: The position. None: the table had none, after a seek to a time or to a sentinel.
    """

    table: str
    number: int
    position: Position | None

    @classmethod
    def of(cls, versions: TxnVersions) -> Self | None:
        """Return the mark of what a table stores. None: it stores no number of the shard."""
        if versions.table is None or versions.number is None:
            return None
        return cls(versions.table, versions.number, versions.position)

    def __str__(self) -> str:
        place = self.position
        number, sub = (
            (_NONE, 0) if place is None else (place.sequence_number, place.sub_sequence_number)
        )
        return f"{self.number} {number} {sub} {self.table}"

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the mark that a row has as text. Raises `ValueError`."""
        parts = text.split(" ", _PARTS - 1)
        if (
            len(parts) != _PARTS
            or not parts[3]
            or not all(p.isdigit() for p in (parts[0], parts[2]))
        ):
            raise ValueError("the mark of the table has another form")
        place = None if parts[1] == _NONE else Position(parts[1], int(parts[2]))
        return cls(parts[3], int(parts[0]), place)

    def doubt(self, now: TxnVersions) -> str | None:
        """Return why the table is not the one of the mark, or an older state of it; None if it is.

        Args:
            now: What the table has of the shard, read after the row.
        """
        if now.table is None:
            return "the table does not exist any more"
        if now.table != self.table:
            return f"the table was replaced: its id is {now.table} instead of {self.table}"
        if now.number is None or now.number < self.number:
            return (
                f"the table was restored to an older state: the number of the shard is "
                f"{now.number or 0}, after it was {self.number}"
            )
        if self.position is not None and (now.position is None or now.position < self.position):
            return (
                f"the table was restored to an older state: its position is {now.position}, after "
                f"it was {self.position}"
            )
        return None

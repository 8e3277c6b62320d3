"""The interface to delete a table of a retired application."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Presence(Enum):
    """Whether something that is deleted still exists."""

    THERE = "there"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class TableFound:
    """A table of an application.

    Attributes:
        name: Its name.
        table_id: Distinguishes it from a later table of the same name.
        rows: Number of the application's rows.
        foreign_rows: Number of rows of other programs. With such rows the table is shared: only
            the rows of the application are deleted.
        created_seconds: When it was created, in epoch seconds of the service.
        is_protected: Whether its deletion protection is on.
    """

    name: str
    table_id: str
    rows: int = 0
    foreign_rows: int = 0
    created_seconds: float | None = None
    is_protected: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether other programs have rows in it."""
        return self.foreign_rows > 0


class TableDeletion(Protocol):
    """Deletes one table, or the rows of an application in it.

    Attributes:
        name: Name of the table.
    """

    name: str

    def find(self) -> TableFound | None:
        """Return the table; None if it does not exist.

        Raises:
            IncompatibleTableError: It is the table of another program.
        """
        ...

    def presence(self, target: TableFound) -> Presence:
        """Return whether the table, or a row of the application in a shared table, exists."""
        ...

    def delete(self, target: TableFound) -> None:
        """Request the deletion once.

        The caller repeats it until `presence` is `GONE`. A table that another process creates
        under the name meanwhile is not deleted.
        """
        ...

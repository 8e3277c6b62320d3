"""Find the entries of a Delta log with which a table was restored to an earlier version.

A RESTORE removes the files that were added after that version, and no application transaction. So
the positions of shards stay, and the rows that were removed are not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

MAX_RESTORES: Final = 16
"""Only the newest are kept: each has the names of all transactions."""


@dataclass(frozen=True, slots=True)
class Restore:
    """An entry that restored the table.

    Attributes:
        version: Version of the entry.
        restored_to: The restored version or time, as text.
        transactions: Names of the application transactions that the table had before. None: they
            cannot be read.
    """

    version: int
    restored_to: str
    transactions: frozenset[str] | None

    def is_after_first_commit(self, name: str) -> bool:
        """Return whether a transaction that the table has now was set before this entry."""
        return self.transactions is None or name in self.transactions


class Restores:
    """The newest entries of one log that restored the table."""

    def __init__(self) -> None:
        self._restores: dict[int, Restore] = {}

    def __iter__(self) -> Iterator[Restore]:
        return iter(tuple(self._restores.values()))

    def note(self, version: int, restored_to: str, before: Mapping[str, int | None] | None) -> None:
        """Note an entry, unless it is known.

        Args:
            version: Version of the entry.
            restored_to: See `Restore`.
            before: The transactions directly before the entry, with their versions; the version
                None is that of a transaction that was never written. None: they cannot be read.
        """
        if version not in self._restores:
            names = None
            if before is not None:
                names = frozenset(name for name, number in before.items() if number is not None)
            self._restores[version] = Restore(version, restored_to, names)
            while len(self._restores) > MAX_RESTORES:
                del self._restores[min(self._restores)]

    def clear(self) -> None:
        """Forget all entries."""
        self._restores.clear()

"""What a table stores for a shard. This module loads no library of tables."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.position import Position


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

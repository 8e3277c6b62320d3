"""Where an application has the rows that are not leases, as one process follows it (§4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kcl_pipeline.leases.layout.migration_row import TableMigration


class Where(StrEnum):
    """Where the rows that are not leases are."""

    THREE = "three tables"
    DEPLOYED = "three tables, all workers can move to the single table"
    PENDING = "moving to the single table"
    SINGLE = "single table"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where rows that are not leases are read and written by this process.

    Attributes:
        where: The effective status.
        stored: The row `TableMigration3.5`. None: there is none.
    """

    where: Where
    stored: TableMigration | None = None

    @property
    def is_single(self) -> bool:
        """Whether all rows are in the lease table."""
        return self.where is Where.SINGLE

    @property
    def writes_to_lease_table(self) -> bool:
        """Whether new rows, except for the leader lock, are written to the lease table."""
        return self.where in (Where.PENDING, Where.SINGLE)

    @property
    def reads_lease_table(self) -> bool:
        """Whether rows may be in the lease table."""
        return self.where is not Where.THREE

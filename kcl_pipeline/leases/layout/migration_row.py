"""The row `TableMigration3.5`: how far an application has moved to the single table.

See protocol §4.3. An application that began in the single table has no such row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kcl_pipeline.leases.attributes import readable
from kcl_pipeline.leases.coordinator_keys import TABLE_MIGRATION_KEY
from kcl_pipeline.leases.state.serialization import (
    HISTORY_LENGTH,
    changed_state_attributes,
    changed_state_of,
)
from kcl_pipeline.leases.state.values import StateChange
from kcl_pipeline.leases.store import Item

STATUS: Final = "tm"
TABLE_MIGRATION_ENTITY: Final = "TABLE_MIGRATION"


class MigrationStatus(StrEnum):
    """A stored status. The values are those of the Java KCL."""

    INIT = "TABLE_MIGRATION_STATUS_INIT"
    DEPLOYED = "TABLE_MIGRATION_STATUS_DEPLOYED"
    PENDING = "TABLE_MIGRATION_STATUS_PENDING"
    COMPLETE = "TABLE_MIGRATION_STATUS_COMPLETE"


@dataclass(frozen=True, slots=True)
class TableMigration:
    """The row `TableMigration3.5`.

    Attributes:
        status: The status (`tm`).
        modified_by: The worker that wrote it (`mb`).
        modified_millis: When, in epoch milliseconds (`mts`).
        history: Former states (tm, mb, mts), newest first, at most ten.
    """

    status: MigrationStatus
    modified_by: str
    modified_millis: int
    history: tuple[StateChange, ...] = ()

    def followed_by(
        self, status: MigrationStatus, modified_by: str, modified_millis: int
    ) -> TableMigration:
        """Return the row of a later status, with this one in its history."""
        past = ((self.status.value, self.modified_by, self.modified_millis), *self.history)
        return TableMigration(status, modified_by, modified_millis, past[:HISTORY_LENGTH])


def migration_attributes(state: TableMigration) -> Item:
    """Return the attributes of the row without the key."""
    current = (state.status.value, state.modified_by, state.modified_millis)
    return changed_state_attributes(TABLE_MIGRATION_ENTITY, STATUS, current, state.history)


def migration_from_item(item: Item) -> TableMigration:
    """Parse the row. A missing history is empty.

    Raises:
        UnreadableRowError: An attribute is missing or invalid, or the status is unknown.
    """
    with readable(f"the row {TABLE_MIGRATION_KEY} is not a table migration that can be read"):
        (status, modified_by, modified_millis), history = changed_state_of(item, STATUS)
        return TableMigration(MigrationStatus(status), modified_by, modified_millis, history)

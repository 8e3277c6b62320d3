"""The row `TableMigration3.5`: how far an application has moved to the single table.

See protocol §4.3. An application that began in the single table has no such row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kcl_pipeline.leases.attributes import (
    MAX_KEY_BYTES,
    int_of,
    list_of,
    name_of,
    readable,
    required,
)
from kcl_pipeline.leases.serialization import ENTITY_TYPE, number, string
from kcl_pipeline.leases.serialization_state import (
    HISTORY,
    HISTORY_LENGTH,
    MAX_HISTORY,
    MODIFIED_BY,
    MODIFIED_MILLIS,
    TABLE_MIGRATION_KEY,
)
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
    history: tuple[tuple[str, str, int], ...] = ()

    def followed_by(
        self, status: MigrationStatus, modified_by: str, modified_millis: int
    ) -> TableMigration:
        """Return the row of a later status, with this one in its history."""
        past = ((self.status.value, self.modified_by, self.modified_millis), *self.history)
        return TableMigration(status, modified_by, modified_millis, past[:HISTORY_LENGTH])


def migration_attributes(state: TableMigration) -> Item:
    """Return the attributes of the row without the key."""
    history = [{"M": _attributes(*entry)} for entry in state.history[:HISTORY_LENGTH]]
    return {
        ENTITY_TYPE: string(TABLE_MIGRATION_ENTITY),
        **_attributes(state.status.value, state.modified_by, state.modified_millis),
        HISTORY: {"L": history},
    }


def migration_from_item(item: Item) -> TableMigration:
    """Parse the row. A missing history is empty.

    Raises:
        UnreadableRowError: An attribute is missing or invalid, or the status is unknown.
    """
    with readable(f"the row {TABLE_MIGRATION_KEY} is not a table migration that can be read"):
        entries = list_of(item, HISTORY, MAX_HISTORY)
        history = tuple(_entry(entry["M"]) for entry in entries if "M" in entry)
        status, modified_by, modified_millis = _entry(item)
        return TableMigration(MigrationStatus(status), modified_by, modified_millis, history)


def _attributes(status: str, modified_by: str, modified_millis: int) -> Item:
    return {
        STATUS: string(status),
        MODIFIED_BY: string(modified_by),
        MODIFIED_MILLIS: number(modified_millis),
    }


def _entry(item: Item) -> tuple[str, str, int]:
    return (
        required(name_of(item, STATUS), STATUS),
        required(name_of(item, MODIFIED_BY, MAX_KEY_BYTES), MODIFIED_BY),
        required(int_of(item, MODIFIED_MILLIS), MODIFIED_MILLIS),
    )

"""Bring the client version of an application to 3.x, unless a Java fleet is migrating.

See protocol §3.5.
"""

from __future__ import annotations

from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import IncompatibleTableError
from kcl_pipeline.leases.coordinator_keys import MIGRATION_KEY
from kcl_pipeline.leases.serialization_state import (
    HISTORY_LENGTH,
)
from kcl_pipeline.leases.tables import CoordinatorStateTable, MigrationState

VERSION_INIT: Final = "CLIENT_VERSION_INIT"
VERSION_3X_WITH_ROLLBACK: Final = "CLIENT_VERSION_3X_WITH_ROLLBACK"
VERSION_3X: Final = "CLIENT_VERSION_3X"

ATTEMPTS: Final = 5


def ensure_client_version(
    coordinator_table: CoordinatorStateTable, worker_id: str, clock: Clock
) -> MigrationState:
    """Ensure that the client version is 3X, and return the row.

    A missing row is created. 3X_WITH_ROLLBACK and INIT become 3X, with the old state in the
    history. If another worker writes first, the row is read again.

    Raises:
        IncompatibleTableError: The application uses KCL 2.x, is being migrated from it, or has an
            unknown client version.
    """
    for _ in range(ATTEMPTS):
        found = coordinator_table.read_migration()
        if found is not None and found.client_version == VERSION_3X:
            return found
        wanted = _successor(coordinator_table.name, found, worker_id, int(clock.wall() * 1000))
        if coordinator_table.put_migration(wanted, replacing=found):
            return wanted
    raise IncompatibleTableError(
        f"the row {MIGRATION_KEY} of the table {coordinator_table.name} changed {ATTEMPTS} "
        "times while this worker was starting"
    )


def _successor(
    table: str, found: MigrationState | None, worker_id: str, now_millis: int
) -> MigrationState:
    if found is None:
        return MigrationState(
            VERSION_3X, worker_id, now_millis, ((VERSION_INIT, worker_id, now_millis),)
        )
    if found.client_version not in {VERSION_3X_WITH_ROLLBACK, VERSION_INIT}:
        raise IncompatibleTableError(
            f"the row {MIGRATION_KEY} of the table {table} has the client version "
            f"{found.client_version} (set by {found.modified_by}): the application runs in a mode "
            "of KCL 2.x that this version does not support; finish its migration to 3.x first"
        )
    past = ((found.client_version, found.modified_by, found.modified_millis), *found.history)
    return MigrationState(VERSION_3X, worker_id, now_millis, past[:HISTORY_LENGTH])

"""Find and follow the client version of an application: the migration from KCL 2.x to 3.x.

See protocol §3.5. A process that starts decides once which version it wants to be stored, by what
is stored and by its setting `client_version_config`. Then it follows what others store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import IncompatibleTableError
from kcl_pipeline.leases.coordinator_keys import MIGRATION_KEY
from kcl_pipeline.leases.state.serialization import (
    HISTORY_LENGTH,
)
from kcl_pipeline.leases.tables import CoordinatorStateTable, MigrationState

VERSION_INIT: Final = "CLIENT_VERSION_INIT"
VERSION_UPGRADE_FROM_2X: Final = "CLIENT_VERSION_UPGRADE_FROM_2X"
VERSION_2X: Final = "CLIENT_VERSION_2X"
VERSION_3X_WITH_ROLLBACK: Final = "CLIENT_VERSION_3X_WITH_ROLLBACK"
VERSION_3X: Final = "CLIENT_VERSION_3X"

ClientVersionConfig = Literal[
    "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X", "CLIENT_VERSION_CONFIG_3X"
]
CONFIG_3X: Final = "CLIENT_VERSION_CONFIG_3X"

ATTEMPTS: Final = 5
LOOK_SECONDS: Final = 60.0
"""Time between two looks at the stored version, as in KCL."""

_KEPT: Final = frozenset({VERSION_UPGRADE_FROM_2X, VERSION_2X, VERSION_3X})
"""Versions that a start does not change, whatever its setting."""


def ensure_client_version(
    coordinator_table: CoordinatorStateTable,
    worker_id: str,
    clock: Clock,
    config: ClientVersionConfig = CONFIG_3X,
) -> MigrationState:
    """Store the client version of a start, and return the row.

    A missing row is created: 3X, or UPGRADE_FROM_2X by the setting. 3X_WITH_ROLLBACK becomes 3X
    with the setting 3X. Other versions stay. If another worker writes first, the row is read again.

    Args:
        coordinator_table: The coordinator-state table.
        worker_id: Written as the author of a change.
        clock: The clock.
        config: The setting.

    Raises:
        IncompatibleTableError: The client version is unknown.
    """
    for _ in range(ATTEMPTS):
        found = coordinator_table.read_migration()
        version = version_of_start(coordinator_table.name, found, config)
        if found is not None and found.client_version == version:
            return found
        wanted = followed_by(found, version, worker_id, int(clock.wall() * 1000))
        if coordinator_table.put_migration(wanted, replacing=found):
            return wanted
    raise IncompatibleTableError(
        f"the row {MIGRATION_KEY} of the table {coordinator_table.name} changed {ATTEMPTS} "
        "times while this worker was starting"
    )


def version_of_start(
    table: str, state: MigrationState | None, config: ClientVersionConfig = CONFIG_3X
) -> str:
    """Return the version that is stored after a start with this setting.

    Raises:
        IncompatibleTableError: The stored version is unknown.
    """
    stored = VERSION_INIT if state is None else state.client_version
    if stored in _KEPT:
        return stored
    if stored == VERSION_3X_WITH_ROLLBACK:
        return VERSION_3X if config == CONFIG_3X else stored
    if stored == VERSION_INIT:
        return VERSION_3X if config == CONFIG_3X else VERSION_UPGRADE_FROM_2X
    raise IncompatibleTableError(
        f"the row {MIGRATION_KEY} of the table {table} has the client version {stored}, which this "
        "version does not know; update this package, or check the row"
    )


def followed_by(
    state: MigrationState | None, version: str, worker_id: str, now_millis: int
) -> MigrationState:
    """Return the row with a new version, and the former one in its history."""
    if state is None:
        history = ((VERSION_INIT, worker_id, now_millis),)
        return MigrationState(version, worker_id, now_millis, history)
    past = ((state.client_version, state.modified_by, state.modified_millis), *state.history)
    return MigrationState(version, worker_id, now_millis, past[:HISTORY_LENGTH])


class ClientVersion:
    """The client version as one process knows it.

    One thread calls `start` and `look`; any thread may read the properties.

    Args:
        table: The coordinator-state table.
        worker_id: Name of the process.
        clock: The clock.
        config: The setting `client_version_config`.
        changed: Called after a change that `look` finds, with the former and the new row.
    """

    def __init__(
        self,
        table: CoordinatorStateTable,
        worker_id: str,
        clock: Clock,
        config: ClientVersionConfig,
        changed: Callable[[MigrationState, MigrationState], None] = lambda _before, _after: None,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._clock = clock
        self._config = config
        self._changed = changed
        self._next_look = math.inf
        self.state: MigrationState | None = None

    def start(self) -> None:
        """Store the version of a start.

        Raises:
            IncompatibleTableError: The stored version is unknown.
            AwsError: The row cannot be read or written.
        """
        self._follow(ensure_client_version(self._table, self._worker_id, self._clock, self._config))

    def look(self) -> None:
        """Read the version if it is time to. The version 3X is final.

        Raises:
            AwsError: The row cannot be read.
        """
        if self.is_final or self._clock.monotonic() < self._next_look:
            return
        found = self._table.read_migration()
        if found is None:
            self.start()
        else:
            version_of_start(self._table.name, found, self._config)
            self._follow(found)

    def write(self, version: str) -> bool:
        """Store another version, unless somebody else has changed it.

        Raises:
            AwsError: The row cannot be written.
        """
        found = self.state
        wanted = followed_by(found, version, self._worker_id, int(self._clock.wall() * 1000))
        if found is None or not self._table.put_migration(wanted, replacing=found):
            self._next_look = -math.inf
            return False
        self._follow(wanted)
        return True

    def _follow(self, state: MigrationState) -> None:
        before, self.state = self.state, state
        self._next_look = self._clock.monotonic() + LOOK_SECONDS
        if before is not None and before.client_version != state.client_version:
            self._changed(before, state)

    @property
    def is_final(self) -> bool:
        """Whether the version is 3X, which never changes."""
        return self.state is not None and self.state.client_version == VERSION_3X

    @property
    def is_leaderless(self) -> bool:
        """Whether workers take leases from each other, because workers of KCL 2.x may run."""
        return self.state is not None and self.state.client_version in _LEADERLESS

    @property
    def is_upgrading(self) -> bool:
        """Whether a leader has to wait until every owner of a lease knows KCL 3.x."""
        return self.state is not None and self.state.client_version == VERSION_UPGRADE_FROM_2X

    @property
    def is_2x(self) -> bool:
        """Whether the application was rolled back: there may be no index and no worker rows."""
        return self.state is not None and self.state.client_version == VERSION_2X


_LEADERLESS: Final = frozenset({VERSION_UPGRADE_FROM_2X, VERSION_2X})

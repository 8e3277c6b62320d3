"""End the 2.x mode of an application when every worker knows KCL 3.x (protocol §3.5)."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, ClientVersionChanged, EventSink
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leases.migration import VERSION_3X_WITH_ROLLBACK, ClientVersion
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, MigrationState

READY_SECONDS: Final = 600.0
"""Time for which an application must be ready without a break, as in KCL."""
CHECK_SECONDS: Final = 60.0
"""Time between two checks, as in KCL."""


def followed_version(
    settings: ConsumerSettings,
    table: CoordinatorStateTable,
    process: str,
    clock: Clock,
    events: EventSink,
) -> ClientVersion:
    """Return the client version of a process, which reports each change as an event."""

    def changed(before: MigrationState, after: MigrationState) -> None:
        versions = (before.client_version, after.client_version)
        events(ClientVersionChanged(process, *versions, after.modified_by))

    return ClientVersion(table, process, clock, settings.client_version_config, changed)


class UpgradeFrom2x:
    """Changes the client version from UPGRADE_FROM_2X to 3X_WITH_ROLLBACK.

    An application is ready when every unfinished lease has an owner, every owner reports worker
    metrics, and the index of the lease table can be queried.

    Args:
        version: The client version of this process.
        lease_table: The lease table.
        clock: The clock.
        events: Receives errors.
    """

    def __init__(
        self, version: ClientVersion, lease_table: LeaseTable, clock: Clock, events: EventSink
    ) -> None:
        self._version = version
        self._lease_table = lease_table
        self._clock = clock
        self._events = events
        self._next_check = 0.0
        self.ready_since: float | None = None

    def restart(self) -> None:
        """Count the time anew, because others may have led meanwhile."""
        self.ready_since = None
        self._next_check = 0.0

    def advance(self, context: CycleContext) -> None:
        """Check whether the application is ready, and change the version after `READY_SECONDS`."""
        now = self._clock.monotonic()
        if not self._version.is_upgrading or now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            if not self._is_ready(context):
                self.ready_since = None
            elif self.ready_since is None:
                self.ready_since = now
            elif now - self.ready_since >= READY_SECONDS:
                self._version.write(VERSION_3X_WITH_ROLLBACK)
        except AwsError as error:
            self.ready_since = None
            self._events(AwsTrouble("migration from KCL 2.x", str(error)))

    def _is_ready(self, context: CycleContext) -> bool:
        owners = {lease.owner for lease in context.leases.values() if not lease.ended}
        if not owners or not owners <= {row.worker_id for row in context.workers}:
            return False
        self._lease_table.lease_keys_of(next(iter(sorted(filter(None, owners)))))
        return True

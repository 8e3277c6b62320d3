"""Find the layout of an application, follow its migration, and create missing tables.

The layout is found from the rows (protocol §4.2, §4.3):

* There is a coordinator-state table. Its row `TableMigration3.5` has the status of the migration to
  the single table. Without the row, the application has three tables.
* There is none, and the lease table has a row of the coordinator state: the single table.
* There is neither. The application is new, and the settings decide.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final, Literal

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import (
    AccessDeniedError,
    IncompatibleTableError,
    NotFoundError,
    UnavailableError,
)
from kcl_pipeline.leases.attributes import int_of, text_of
from kcl_pipeline.leases.coordinator_keys import COORDINATOR_KEYS, TABLE_MIGRATION_KEY
from kcl_pipeline.leases.layout.entity_rows import WorkerEntityRows
from kcl_pipeline.leases.layout.migration_row import (
    MigrationStatus,
    TableMigration,
    migration_from_item,
)
from kcl_pipeline.leases.layout.placement import Placement, Where
from kcl_pipeline.leases.state.serialization import (
    LAST_UPDATE,
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
)
from kcl_pipeline.leases.store import Item, LeaseStore, RowStore
from kcl_pipeline.text import printable

TableLayout = Literal["auto", "three", "single"]

LOOK_SECONDS: Final = 60.0
"""Time between two looks at the status while the application has a coordinator-state table."""
PENDING_LOOK_SECONDS: Final = 5.0
"""The same while the migration can complete."""
SETTLING_SECONDS: Final = 2 * LOOK_SECONDS
"""Age of the status `DEPLOYED` from which rows are written to the lease table.

By then, every process has seen the status, and reads both tables.
"""
CREATION_SECONDS: Final = 10.0
"""How long a start waits for the program that has created an empty lease table."""
SUPPORT_SECONDS: Final = 90
"""A support code is expired when `slu` is older than this (protocol §2.4: three Java reports)."""
OLD_WORKER_SECONDS: Final = 600
"""Age of a row in an abandoned worker-metrics table above which its worker has ended."""


@dataclass(frozen=True, slots=True)
class TableUse:
    """A table of the application, and which rows it has.

    Attributes:
        name: Its name.
        key_name: Name of its primary key.
        has_leases: Whether it has the leases.
        has_workers: Whether it has worker metrics rows.
        has_state: Whether it has coordinator-state rows.
    """

    name: str
    key_name: str
    has_leases: bool = False
    has_workers: bool = False
    has_state: bool = False


class Layout:
    """The layout of one application, as one process follows it. Thread-safe.

    Args:
        leases: The lease table.
        workers: The worker-metrics table of the three-table layout.
        coordinator: The coordinator-state table of the three-table layout.
        wanted: The setting `table_layout`.
        migrates: The setting `migrate_all_entities_to_lease_table`.
        clock: The clock.
    """

    def __init__(
        self,
        leases: LeaseStore,
        workers: RowStore,
        coordinator: RowStore,
        *,
        wanted: TableLayout = "auto",
        migrates: bool = False,
        clock: Clock,
    ) -> None:
        self.leases = leases
        self.workers = workers
        self.coordinator = coordinator
        self.wanted = wanted
        self.migrates = migrates
        self._clock = clock
        self._lock = threading.Lock()
        self._known: Placement | None = None
        self._next_look = 0.0
        self._first_empty: float | None = None
        self._is_settled = False
        self._ensured: list[RowStore] = []
        """Tables that a start has looked at together with the lease table."""
        self.shared_workers = WorkerEntityRows(leases, workers.key_name)

    @property
    def known(self) -> Placement:
        """The placement as last seen, without a call."""
        if self._known is not None:
            return self._known
        return Placement(Where.SINGLE if self.wanted == "single" else Where.THREE)

    def placement(self) -> Placement:
        """Return the placement. Reads the status again when it may have changed.

        Raises:
            AwsError: The status cannot be read.
            IncompatibleTableError: The status is unknown to this version.
        """
        known = self._known
        if known is not None and (known.is_single or self._clock.monotonic() < self._next_look):
            return known
        with self._lock:
            return self._look()

    def look_again(self) -> None:
        """Read the status before the next use, if the application is in its migration."""
        if self._known is not None and self._known.stored is not None:
            self._next_look = 0.0

    def forget(self) -> None:
        """Find the layout anew at the next use. A table was missing."""
        self._known = None
        self._is_settled = False

    def note(self, stored: TableMigration) -> None:
        """Take over a status that this process has written."""
        with self._lock:
            self._keep(self._effective(stored))

    def tables(self) -> tuple[TableUse, ...]:
        """Return the tables that may have rows of the application. The lease table is the first."""
        here = self.placement()
        shared = here.reads_lease_table
        lease = TableUse(
            self.leases.name,
            self.leases.key_name,
            has_leases=True,
            has_workers=shared,
            has_state=shared,
        )
        if here.is_single:
            return (lease,)
        return lease, *self.former_tables()

    def three_tables(self) -> tuple[TableUse, ...]:
        """Return the tables of the three-table layout, without a call."""
        lease = TableUse(self.leases.name, self.leases.key_name, has_leases=True)
        return lease, *self.former_tables()

    def former_tables(self) -> tuple[TableUse, TableUse]:
        """Return the two tables that the single table replaces."""
        workers, state = self.workers, self.coordinator
        return (
            TableUse(workers.name, workers.key_name, has_workers=True),
            TableUse(state.name, state.key_name, has_state=True),
        )

    def ensure(self, store: RowStore) -> bool:
        """Create one of the tables if the layout has it and it is missing.

        The lease table is created last. So another worker that finds an empty lease table without a
        coordinator-state table knows that a Java worker is creating a single table.

        Returns:
            Whether this call created it.

        Raises:
            IncompatibleTableError: The layout is not the one of the settings, or the tables have
                rows of programs that cannot work in it.
            UnavailableError: Another program seems to create the tables now. Try again.
        """
        here = self.placement() if self._is_settled else self._settle()
        self._is_settled = True
        if here.is_single:
            return store is self.leases and store.ensure_exists()
        if here.where is Where.PENDING and store is self.workers:
            return False
        if store is not self.leases:
            if store in self._ensured:
                self._ensured.remove(store)
                return False
            return store.ensure_exists()
        for former in (self.workers, self.coordinator):
            self.ensure(former)
        self._ensured = [self.workers, self.coordinator]
        self.refuse_two_layouts()
        return store.ensure_exists()

    def refuse_two_layouts(self) -> None:
        """Refuse rows of a single table when three tables exist. Writes nothing.

        Raises:
            IncompatibleTableError: The lease table has a row of the coordinator state, but the
                coordinator-state table has no migration.
        """
        here = self.placement()
        if here.where is not Where.THREE or here.stored is not None:
            return
        try:
            key = self._shared_key()
        except NotFoundError:
            return
        if key is not None:
            raise IncompatibleTableError(
                f"the table {self.leases.name} has the row {key}, as in the single-table layout "
                f"of KCL 3.5, but there is a table {self.coordinator.name} without a migration: "
                "a version of the KCL before 3.5 has created it, or somebody by hand; stop such a "
                f"worker and delete the table {self.coordinator.name}, or use another "
                "application name"
            )

    def refuse_old_workers(self) -> None:
        """Refuse a single table that a worker of a version before KCL 3.5 uses (protocol §4.1).

        Raises:
            IncompatibleTableError: There is such a worker.
        """
        try:
            for item in self.shared_workers.scan():
                if not _supports_single_table(item):
                    self._refuse_worker(item, self.leases)
        except NotFoundError:  # a new application
            return
        try:
            rows = list(self.workers.scan())
        except NotFoundError:
            return
        except AccessDeniedError:
            if self.wanted != "single":
                raise
            return  # the settings say that there never was such a table
        for item in rows:
            age = self._clock.wall() - (seconds_of(item, LAST_UPDATE) or 0)
            if age < OLD_WORKER_SECONDS and not _supports_single_table(item):
                self._refuse_worker(item, self.workers)

    def _look(self) -> Placement:
        known = self._known
        if known is not None and known.is_single:
            return known
        try:
            item = self.coordinator.get(TABLE_MIGRATION_KEY)
        except NotFoundError:
            return self._without_coordinator()
        except AccessDeniedError:
            if self.wanted != "single":
                raise
            return self._without_coordinator()
        return self._keep(self._effective(None if item is None else migration_from_item(item)))

    def _without_coordinator(self) -> Placement:
        try:
            is_single = self.wanted == "single" or self._shared_key() is not None
        except (NotFoundError, AccessDeniedError):  # as a new application; a later use tells more
            is_single = False
        if not is_single:
            self._known = None  # it may get tables at any moment
            return Placement(Where.THREE)
        return self._keep(Placement(Where.SINGLE))

    def _keep(self, found: Placement) -> Placement:
        is_near = found.where is Where.PENDING or (
            found.stored is not None and found.stored.status is MigrationStatus.PENDING
        )
        seconds = PENDING_LOOK_SECONDS if is_near else LOOK_SECONDS
        self._next_look = self._clock.monotonic() + seconds
        self._known = found
        return found

    def _effective(self, stored: TableMigration | None) -> Placement:
        """Return what the stored status means with the settings (protocol §4.3)."""
        status = None if stored is None else stored.status
        if status is MigrationStatus.COMPLETE:
            return Placement(Where.SINGLE, stored)
        if stored is not None and status is MigrationStatus.PENDING:
            return Placement(Where.PENDING if self.migrates else Where.DEPLOYED, stored)
        if stored is not None and status is MigrationStatus.DEPLOYED:
            age = self._clock.wall() - stored.modified_millis / 1000
            was_pending = any(one[0] == MigrationStatus.PENDING for one in stored.history)
            moves = self.migrates and (age >= SETTLING_SECONDS or was_pending)
            return Placement(Where.PENDING if moves else Where.DEPLOYED, stored)
        return Placement(Where.THREE, stored)

    def _shared_key(self) -> str | None:
        """Return the key of a coordinator-state row in the lease table, if there is one."""
        keys = reversed(COORDINATOR_KEYS)
        return next((key for key in keys if self.leases.get(key) is not None), None)

    def _settle(self) -> Placement:
        """Find the layout at a start, and refuse what does not fit. Writes nothing."""
        with self._lock:
            here = self._look()
        if here.is_single:
            if self.wanted == "three":
                raise IncompatibleTableError(
                    f"table_layout='three', but the application has all rows in the table "
                    f"{self.leases.name}; write table_layout='auto' or 'single', or another "
                    "application name"
                )
            self.refuse_old_workers()
            return here
        if self._known is None:  # there is no coordinator-state table
            self._await_creator()
        elif self.wanted == "single" and not here.reads_lease_table:
            raise IncompatibleTableError(
                f"table_layout='single', but the application has the table "
                f"{self.coordinator.name}; write table_layout='auto', or another application "
                "name, or move it with leader.migrate_all_entities_to_lease_table=True"
            )
        self.refuse_two_layouts()
        return here

    def _await_creator(self) -> None:
        try:
            is_empty = next(self.leases.scan(consistent=True), None) is None
        except NotFoundError:
            return
        if not is_empty:
            return
        now = self._clock.monotonic()
        if self._first_empty is None:
            self._first_empty = now
        if now < self._first_empty + CREATION_SECONDS:
            raise UnavailableError(
                f"the table {self.leases.name} is empty, and {self.coordinator.name} does not "
                "exist: another program may be creating the application at this moment",
                operation="GetItem",
            )

    def _refuse_worker(self, item: Item, store: RowStore) -> None:
        worker = printable(text_of(item, self.workers.key_name) or "without an id")
        raise IncompatibleTableError(
            f"the worker {worker} in the table {store.name} is of a version before KCL 3.5, which "
            f"cannot work on the single table {self.leases.name}; update or stop that worker, and "
            f"delete its row if it has ended"
        )


def _supports_single_table(item: Item) -> bool:
    """Return whether the worker of a row says that it works on a single table."""
    if (seconds_of(item, SUPPORT_CODE) or 0) < 1:
        return False
    reported, supported = seconds_of(item, LAST_UPDATE), seconds_of(item, SUPPORT_CODE_UPDATE)
    # an older version under the same id updates `lut`, and leaves `sup` and `slu` as they are
    return reported is None or supported is None or reported - supported <= SUPPORT_SECONDS


def seconds_of(item: Item, name: str) -> int | None:
    """Return a number of a worker metrics row; None if it is missing or unreadable."""
    try:
        return int_of(item, name)
    except ValueError:
        return None

"""Find the layout of an application, create missing tables, and notice a move.

The layout is found from the rows (protocol §4.2, §4.3):

* There is a coordinator-state table. Its row `TableMigration3.5` has a status that Java workers
  write. `COMPLETE` is the single table. No row, `INIT` and `DEPLOYED` are three tables: a fleet of
  the Java KCL 3.5 with default settings stays at `DEPLOYED`. `PENDING` is refused, because the
  rows of the application are in two tables then.
* There is none, and the lease table has a row of the coordinator state: the single table.
* There is neither. The application is new or of KCL 2.x, and the settings decide.

An application keeps its layout. Only Java workers move it to the single table, while none of this
package runs: in three tables our workers publish no support code and report in the worker-metrics
table, so a Java leader completes no move while one of them lives.
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
    UnreadableRowError,
)
from kcl_pipeline.leases.attributes import int_of, text_of
from kcl_pipeline.leases.coordinator_keys import (
    COORDINATOR_KEYS,
    MIGRATION_KEY,
    TABLE_MIGRATION_KEY,
)
from kcl_pipeline.leases.layout.entity_rows import EntityRows, WorkerEntityRows
from kcl_pipeline.leases.state.serialization import (
    LAST_UPDATE,
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
)
from kcl_pipeline.leases.store import (
    Absent,
    Elsewhere,
    Equals,
    Item,
    LeaseStore,
    Present,
    Put,
    RowStore,
)
from kcl_pipeline.text import printable

TableLayout = Literal["auto", "three", "single"]

STATUS: Final = "tm"
"""The attribute of `TableMigration3.5` with the status."""
INIT: Final = "TABLE_MIGRATION_STATUS_INIT"
DEPLOYED: Final = "TABLE_MIGRATION_STATUS_DEPLOYED"
PENDING: Final = "TABLE_MIGRATION_STATUS_PENDING"
COMPLETE: Final = "TABLE_MIGRATION_STATUS_COMPLETE"
CREATION_SECONDS: Final = 10.0
"""How long a start waits for the program that has created an empty lease table."""
SUPPORT_SECONDS: Final = 90
"""A support code is expired when `slu` is older than this (protocol §2.4: three Java reports)."""
OLD_WORKER_SECONDS: Final = 600
"""Age of a row in an abandoned worker-metrics table above which its worker has ended."""
SINGLE_TABLE_SUPPORT: Final = 1
"""The support code of a worker that can work on the single table (protocol §2.2)."""


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
    """The layout of one application, as one process knows it. Thread-safe.

    Args:
        leases: The lease table.
        workers: The worker-metrics table of the three-table layout.
        coordinator: The coordinator-state table of the three-table layout.
        configured: The setting `table_layout`.
        clock: The clock.
    """

    def __init__(
        self,
        leases: LeaseStore,
        workers: RowStore,
        coordinator: RowStore,
        *,
        configured: TableLayout = "auto",
        clock: Clock,
    ) -> None:
        self.leases = leases
        self.workers = workers
        self.coordinator = coordinator
        self.configured = configured
        self._clock = clock
        self._lock = threading.Lock()
        self._is_single: bool | None = None
        """None: not found yet, or the application has no tables yet."""
        self.status: str | None = None
        """The status of `TableMigration3.5` as last read. None: there is no such row."""
        self._first_empty: float | None = None
        self._is_settled = False
        self._ensured: list[RowStore] = []
        """Tables that a start has looked at together with the lease table."""
        self.shared_workers = WorkerEntityRows(leases, workers.key_name)
        self.shared_state = EntityRows(leases, coordinator.key_name)

    @property
    def is_known_single(self) -> bool:
        """Whether it is the single table, as far as this process knows. Calls nothing."""
        return self.configured == "single" if self._is_single is None else self._is_single

    def is_single(self) -> bool:
        """Return whether all rows are in the lease table. Reads the tables until this is known.

        Raises:
            AwsError: The status cannot be read.
            IncompatibleTableError: Java workers move the application at this moment.
            UnreadableRowError: The status is unknown.
        """
        if self._is_single is not None:
            return self._is_single
        found = self._find()
        with self._lock:
            if self._is_single is None:
                self._is_single = found
        return bool(found)

    @property
    def may_have_shared_rows(self) -> bool:
        """Whether the lease table of an application with three tables may have other rows.

        Java workers that run with `migrateAllEntitiesToLeaseTable` report there from `DEPLOYED` on,
        and their leader moves the client version there before it writes `PENDING`.
        """
        return self.status == DEPLOYED

    def verify(self) -> None:
        """Read the status again, and undo the begin of a move. Three tables alone can be moved.

        Raises:
            AwsError: The status cannot be read.
            IncompatibleTableError: Java workers move the application, or have moved it.
            UnreadableRowError: The status is unknown.
        """
        if self._is_single is not False:
            return
        try:
            has_moved = self._read_status()
        except NotFoundError:  # the table was deleted; a later write creates it again
            return
        if has_moved:
            raise IncompatibleTableError(
                f"Java workers have moved the application to the single table {self.leases.name} "
                "while this process ran; start it again, and it uses the single table"
            )
        self.return_client_version()

    def return_client_version(self) -> None:
        """Move the client version back from the lease table, if a Java leader has begun a move.

        Java ends the move when a worker of ours starts, and leaves the row where it is. It has the
        pause and the record of the application, and the leader proves it when it creates leases.

        Raises:
            AwsError: The rows cannot be read or written.
        """
        if self._is_single is not False or not self.may_have_shared_rows:
            return
        if self.coordinator.get(MIGRATION_KEY) is not None:
            return
        moved = self.shared_state.get(MIGRATION_KEY)
        if moved is None:
            return
        key_name = self.coordinator.key_name
        unchanged = [Equals(name, value) for name, value in moved.items() if name != key_name]
        # If it is refused, a row has changed meanwhile, and the next report tries again.
        self.coordinator.transact(
            [
                Put(moved, [Absent(key_name)]),
                Elsewhere(self.leases, MIGRATION_KEY, [Present(self.leases.key_name), *unchanged]),
            ]
        )

    def forget(self) -> None:
        """Find the layout anew at the next use. A table was missing."""
        self._is_single = None
        self._is_settled = False

    def tables(self) -> tuple[TableUse, ...]:
        """Return the tables that may have rows of the application. The lease table is the first."""
        is_single = self.is_single()
        lease = TableUse(
            self.leases.name,
            self.leases.key_name,
            has_leases=True,
            has_workers=is_single or self.may_have_shared_rows,
            has_state=is_single,
        )
        return (lease,) if is_single else (lease, *self.former_tables())

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
        is_single = self.is_single() if self._is_settled else self._settle()
        self._is_settled = True
        if is_single:
            return store is self.leases and store.ensure_exists()
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
                coordinator-state table has no status of a move.
        """
        if self.is_single() or self.status is not None:
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
            if self.configured != "single":
                raise
            return  # the settings say that there never was such a table
        for item in rows:
            age = self._clock.wall() - (seconds_of(item, LAST_UPDATE) or 0)
            if age < OLD_WORKER_SECONDS and not _supports_single_table(item):
                self._refuse_worker(item, self.workers)

    def _find(self) -> bool | None:
        """Return whether it is the single table; None if the application has no tables yet."""
        try:
            return self._read_status()
        except NotFoundError:
            return self._without_coordinator()
        except AccessDeniedError:
            # The settings say that there never was such a table.
            if self.configured != "single":
                raise
            return True

    def _read_status(self) -> bool:
        """Return whether the coordinator-state table says that the application has moved.

        Raises:
            NotFoundError: There is no such table.
            IncompatibleTableError: The move is under way.
            UnreadableRowError: The status is unknown.
        """
        item = self.coordinator.get(TABLE_MIGRATION_KEY)
        status = None if item is None else text_of(item, STATUS) or ""
        if status == PENDING:
            raise IncompatibleTableError(
                f"Java workers move the application to the single table {self.leases.name} at "
                f"this moment (the row {TABLE_MIGRATION_KEY} of {self.coordinator.name} is at "
                f"{PENDING}); start this worker when the row is at {COMPLETE}, or end the move "
                "with migrateAllEntitiesToLeaseTable=false in all Java workers"
            )
        if status not in (None, INIT, DEPLOYED, COMPLETE):
            raise UnreadableRowError(
                f"the row {TABLE_MIGRATION_KEY} of {self.coordinator.name} has the unknown status "
                f"{printable(status)!r}; find out which program wrote it"
            )
        self.status = status
        return status == COMPLETE

    def _without_coordinator(self) -> bool | None:
        try:
            is_single = self.configured == "single" or self._shared_key() is not None
        except (NotFoundError, AccessDeniedError):  # as a new application; a later use tells more
            is_single = False
        return True if is_single else None

    def _shared_key(self) -> str | None:
        """Return the key of a coordinator-state row in the lease table, if there is one."""
        keys = reversed(COORDINATOR_KEYS)
        return next((key for key in keys if self.leases.get(key) is not None), None)

    def _settle(self) -> bool:
        """Find the layout at a start, and refuse what does not fit. Writes nothing."""
        is_single = self.is_single()
        if is_single:
            if self.configured == "three":
                raise IncompatibleTableError(
                    f"table_layout='three', but the application has all rows in the table "
                    f"{self.leases.name}; write table_layout='auto' or 'single', or another "
                    "application name"
                )
            self.refuse_old_workers()
            return True
        if self._is_single is None:  # there is no coordinator-state table
            self._await_creator()
        elif self.configured == "single":
            raise IncompatibleTableError(
                f"table_layout='single', but the application has the table "
                f"{self.coordinator.name}; write table_layout='auto', or another application name"
            )
        self.refuse_two_layouts()
        return False

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
    # a Java worker before 3.5 under the same id updates `lut`, and leaves `sup` and `slu`
    return reported is None or supported is None or reported - supported <= SUPPORT_SECONDS


def seconds_of(item: Item, name: str) -> int | None:
    """Return a number of a worker metrics row; None if it is missing or unreadable."""
    try:
        return int_of(item, name)
    except ValueError:
        return None

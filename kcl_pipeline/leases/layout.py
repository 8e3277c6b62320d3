"""Where the rows of an application are: in three tables, or in the single table of KCL 3.5.

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

At the end of the file is the client version: the migration from KCL 2.x to 3.x (protocol §3.5).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import (
    AccessDeniedError,
    IncompatibleTableError,
    NotFoundError,
    SettingsError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.leases.coordinator import HISTORY_LENGTH, CoordinatorStateTable, MigrationState
from kcl_pipeline.leases.row import (
    COORDINATOR_KEYS,
    COUNTER,
    ENTITY_TYPE,
    LEADER_KEY,
    LEASE_ENTITY,
    MIGRATION_KEY,
    TABLE_MIGRATION_KEY,
    int_of,
    string,
    text_of,
)
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Condition,
    ConditionCheck,
    Elsewhere,
    Equals,
    Item,
    LeaseStore,
    Outcome,
    Present,
    RowStore,
)
from kcl_pipeline.leases.workers import (
    LAST_UPDATE,
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
    WORKER_ENTITY,
    WorkerMetricsTable,
)
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.text import printable


class EntityRows:
    """The coordinator-state rows in the lease table, as a `RowStore` with the key `key`.

    Only the name of the key differs from the table `<application>-CoordinatorState`. The keys of
    these rows are fixed, so no other row is ever meant.

    Args:
        inner: The lease table.
        key_name: Name of the key in the three-table layout.
    """

    def __init__(self, inner: RowStore, key_name: str) -> None:
        self.name = inner.name
        self.key_name = key_name
        self._inner = inner

    def ensure_exists(self) -> bool:
        """See `store.RowStore`."""
        return self._inner.ensure_exists()

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        return self._outside(self._inner.get(key, consistent=consistent))

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._outcome(self._inner.put(self._inside(item), self._conditions(conditions)))

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        return self._outcome(self._inner.update(key, self._conditions(conditions), changes))

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._outcome(self._inner.delete(key, self._conditions(conditions)))

    def check(self, key: str, conditions: Sequence[Condition]) -> ConditionCheck:
        """See `store.RowStore`."""
        return self._inner.check(key, self._conditions(conditions))

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`."""
        for item in self._inner.scan(consistent=consistent):
            found = self._outside(item)
            if found is not None:
                yield found

    def _is_own(self, item: Item) -> bool:
        return text_of(item, self._inner.key_name) in COORDINATOR_KEYS

    def _outside(self, item: Item | None) -> Item | None:
        if item is None or not self._is_own(item):
            return None
        found = dict(item)
        found[self.key_name] = found.pop(self._inner.key_name)
        return found

    def _inside(self, item: Item) -> Item:
        found = dict(item)
        found[self._inner.key_name] = found.pop(self.key_name)
        return found

    def _outcome(self, outcome: Outcome) -> Outcome:
        return Outcome(outcome.applied, self._outside(outcome.item))

    def _conditions(self, conditions: Sequence[Condition]) -> list[Condition]:
        return [
            replace(one, attribute=self._inner.key_name) if one.attribute == self.key_name else one
            for one in conditions
        ]


class WorkerEntityRows(EntityRows):
    """The worker metrics rows in the lease table, as a `RowStore` with the key `wid`.

    A worker id is chosen by a user. It may be the key of a row of another type, which is never
    changed: the conditions of every write exclude it.
    """

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`. Raise `SettingsError` if the key is that of another row."""
        if key in COORDINATOR_KEYS:
            raise SettingsError(
                f"the worker id {key!r} is the key of a row of the KCL in the table {self.name}; "
                "give the worker another id"
            )
        outcome = self._inner.update(key, self._conditions(self._of_worker(conditions)), changes)
        if not outcome.applied and outcome.item is not None and not self._is_own(outcome.item):
            entity = text_of(outcome.item, ENTITY_TYPE) or LEASE_ENTITY
            raise SettingsError(
                f"the worker id {printable(key)!r} is the key of a row of the type "
                f"{printable(entity)} in the table {self.name}; give the worker another id"
            )
        return self._outcome(outcome)

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return super().delete(key, self._of_worker(conditions))

    def _is_own(self, item: Item) -> bool:
        return text_of(item, ENTITY_TYPE) == WORKER_ENTITY

    def _of_worker(self, conditions: Sequence[Condition]) -> list[Condition]:
        is_worker = AbsentOrEquals(ENTITY_TYPE, string(WORKER_ENTITY))
        return [*conditions, is_worker, Absent(COUNTER)]


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
        attributes = {name: value for name, value in moved.items() if name != key_name}
        unchanged = [Equals(name, value) for name, value in attributes.items()]
        # If it is refused, a row has changed meanwhile, and the next report tries again.
        self.leases.transact(
            [
                Elsewhere(self.coordinator, MIGRATION_KEY, [Absent(key_name)], Changes(attributes)),
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


EMPTY_SCAN_SECONDS: Final = 30.0
"""Time after which a lease table without worker rows is scanned for them again."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of one application.

    Attributes:
        lease: The leases.
        workers: The worker metrics rows.
        coordinator: The coordinator-state rows.
        layout: Where they are.
    """

    lease: LeaseTable
    workers: WorkerMetricsTable
    coordinator: CoordinatorStateTable
    layout: Layout


def open_rows(layout: Layout, clock: Clock) -> Tables:
    """Return the rows of an application. This reads no table.

    Args:
        layout: The layout.
        clock: The clock.
    """
    leases = layout.leases
    return Tables(
        LeaseTable(leases, lambda: layout.ensure(leases), layout.refuse_two_layouts),
        WorkerMetricsTable(
            WorkerStore(layout, clock),
            lambda: SINGLE_TABLE_SUPPORT if layout.is_single() else None,
            layout.verify,
        ),
        CoordinatorStateTable(StateStore(layout, layout.coordinator, layout.shared_state)),
        layout,
    )


class PlacedStore:
    """The rows of one entity: in their own table, or in the lease table (protocol §4.4).

    Args:
        layout: Says which of the two is used.
        own: The table of the three-table layout.
        shared: The rows of the entity in the lease table.
    """

    def __init__(self, layout: Layout, separate: RowStore, shared: EntityRows) -> None:
        self.key_name = separate.key_name
        self._layout = layout
        self._separate = separate
        self._shared = shared

    @property
    def name(self) -> str:
        """Name of the table that is used, as far as it is known. Calls nothing."""
        return (self._shared if self._layout.is_known_single else self._separate).name

    def ensure_exists(self) -> bool:
        """See `store.RowStore`. The layout checks the existing tables."""
        return self._layout.ensure(self._separate)

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        return self._on(lambda place: place.get(key, consistent=consistent))

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._on(lambda place: place.put(item, conditions))

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        return self._on(lambda place: place.update(key, conditions, changes))

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._on(lambda place: place.delete(key, conditions))

    def check(self, key: str, conditions: Sequence[Condition]) -> ConditionCheck:
        """See `store.RowStore`."""
        return self._place().check(key, conditions)

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`."""
        try:
            yield from self._place().scan(consistent=consistent)
        except NotFoundError:
            self._layout.forget()
            raise

    def _place(self) -> RowStore:
        return self._shared if self._layout.is_single() else self._separate

    def _on(self, call: Callable[[RowStore], _T]) -> _T:
        try:
            return call(self._place())
        except NotFoundError:
            # The application was retired, and may be created again in another layout.
            self._layout.forget()
            raise

    def _has_two_places(self) -> bool:
        return not self._layout.is_single() and self._layout.may_have_shared_rows


class StateStore(PlacedStore):
    """The coordinator-state rows."""

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`.

        The client version is created only if the lease table has none: Java moves no row that both
        tables have, so it could never move the application again.
        """
        key = text_of(item, self.key_name)
        if key == LEADER_KEY:
            # After a move, the lock of the other leaders is in the lease table. A lock in the
            # former table would make this process a second leader.
            self._layout.verify()
        if key == MIGRATION_KEY and self._has_two_places() and self._shared.get(MIGRATION_KEY):
            self._layout.return_client_version()
            return Outcome(applied=False, item=self.get(MIGRATION_KEY))
        return super().put(item, conditions)


class WorkerStore(PlacedStore):
    """The worker metrics rows.

    A Java worker that is about to move its application reports in the lease table while the layout
    is still three tables. Such a row counts as a worker, and can be drained and deleted.

    Args:
        layout: The layout.
        clock: Times the scans of the lease table.
    """

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self._shared_workers: WorkerEntityRows = layout.shared_workers
        super().__init__(layout, layout.workers, self._shared_workers)
        self._clock = clock
        self._next_scan: float | None = None

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`. Deletes both rows, if both tables have one."""
        outcome = super().delete(key, conditions)
        if not self._has_two_places():
            return outcome
        other = self._shared_workers.delete(key, conditions)
        if outcome.applied or other.applied:
            return Outcome(applied=True, item=None)
        return outcome if outcome.item is not None else other

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`. Of two rows with one key, that of the worker-metrics table."""
        seen_keys: set[str] = set()
        for item in super().scan(consistent=consistent):
            seen_keys.add(text_of(item, self.key_name) or "")
            yield item
        # The lease table is large: it is left alone shortly after it had no such row.
        now = self._clock.monotonic()
        is_recent = self._next_scan is not None and now < self._next_scan
        if not self._has_two_places() or is_recent:
            return
        rows = list(self._shared_workers.scan(consistent=consistent))
        self._next_scan = None if rows else now + EMPTY_SCAN_SECONDS
        for item in rows:
            if (text_of(item, self.key_name) or "") not in seen_keys:
                yield item


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

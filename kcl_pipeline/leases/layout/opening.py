"""Open the rows of an application, wherever its layout has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY, MIGRATION_KEY
from kcl_pipeline.leases.layout.entity_rows import EntityRows, WorkerEntityRows
from kcl_pipeline.leases.layout.layout import SINGLE_TABLE_SUPPORT, Layout
from kcl_pipeline.leases.state.coordinator_rows import CoordinatorRows
from kcl_pipeline.leases.state.worker_rows import WorkerRows
from kcl_pipeline.leases.store import (
    Changes,
    Condition,
    ConditionCheck,
    Item,
    Outcome,
    RowStore,
    Write,
)
from kcl_pipeline.leases.writes import LeaseTable

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
    workers: WorkerRows
    coordinator: CoordinatorRows
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
        WorkerRows(
            WorkerStore(layout, clock),
            lambda: SINGLE_TABLE_SUPPORT if layout.is_single() else None,
            layout.verify,
        ),
        CoordinatorRows(StateStore(layout, layout.coordinator, layout.shared_state)),
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

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.RowStore`."""
        return self._on(lambda place: place.transact(writes))

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

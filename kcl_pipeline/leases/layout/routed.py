"""Send each read and write of a row that is no lease to the table of the current layout.

See protocol §4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leases.attributes import int_of, text_of
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY
from kcl_pipeline.leases.layout.entity_rows import EntityRows
from kcl_pipeline.leases.layout.layout import Layout
from kcl_pipeline.leases.state.serialization import (
    LAST_UPDATE,
)
from kcl_pipeline.leases.store import (
    Changes,
    Check,
    Condition,
    Item,
    Outcome,
    Present,
    RowStore,
    Write,
)

EMPTY_SCAN_SECONDS: Final = 30.0
"""Time after which a lease table without such rows is scanned for them again."""

_T = TypeVar("_T")


class RoutedStore:
    """The rows of one entity, wherever the layout has them.

    While rows are in two tables, a row is read from its own table first, then from the lease table.
    An update or a deletion of a row that exists is tried in the same order.

    Args:
        layout: Says which of the two is used.
        own: The table of the three-table layout.
        shared: The rows of the entity in the lease table.
        clock: The clock.
    """

    def __init__(self, layout: Layout, own: RowStore, shared: EntityRows, clock: Clock) -> None:
        self.key_name = own.key_name
        self._layout = layout
        self._own = own
        self._shared = shared
        self._clock = clock
        self._next_scan: float | None = None

    @property
    def name(self) -> str:
        """Name of the table that is written to, as far as it is known. Calls nothing."""
        return (self._shared if self._layout.known.writes_to_lease_table else self._own).name

    def ensure_exists(self) -> bool:
        """See `store.RowStore`. The layout checks the existing tables."""
        return self._layout.ensure(self._own)

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        for place in self._places(key):
            item = self._read(place, lambda one: one.get(key, consistent=consistent))
            if item is not None:
                return item
        return None

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        key = text_of(item, self.key_name) or ""
        if key == LEADER_KEY:
            self._layout.look_again()
        return self._on(self._target(key), lambda one: one.put(item, conditions))

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        has_row = any(
            isinstance(one, Present) and one.attribute == self.key_name for one in conditions
        )
        places = self._places(key) if has_row else (self._target(key),)
        outcome = Outcome(applied=False, item=None)
        for place in places:
            outcome = self._on(place, lambda one: one.update(key, conditions, changes))
            if outcome.applied or outcome.item is not None:
                return outcome
        return outcome

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`. Deletes both rows, if both have one."""
        places = self._places(key)
        outcomes = [self._on(place, lambda one: one.delete(key, conditions)) for place in places]
        if any(one.applied for one in outcomes):
            return Outcome(applied=True, item=None)
        return Outcome(False, next((one.item for one in outcomes if one.item is not None), None))

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.RowStore`."""
        return self._target().transact(writes)

    def check(self, key: str, conditions: Sequence[Condition]) -> Check:
        """See `store.RowStore`. The condition is of the table that has the row now."""
        places = self._places(key)
        for place in places[:-1]:
            if self._read(place, lambda one: one.get(key)) is not None:
                return place.check(key, conditions)
        return places[-1].check(key, conditions)

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`. Of two rows with one key, the newer one."""
        places = self._places()
        if len(places) == 1:
            try:
                yield from places[0].scan(consistent=consistent)
            except NotFoundError:
                self._layout.forget()
                raise
            return
        found: dict[str, Item] = {}
        for place in self._worth_scanning(places):
            rows = self._read(place, lambda one: list(one.scan(consistent=consistent))) or []
            if place is self._shared:
                self._next_scan = None if rows else self._clock.monotonic() + EMPTY_SCAN_SECONDS
            for item in rows:
                key = text_of(item, self.key_name) or ""
                if key not in found or _updated(item) >= _updated(found[key]):
                    found[key] = item
        yield from found.values()

    def _places(self, key: str = "") -> tuple[RowStore, ...]:
        """Return where a row of this key is, in the order of reading."""
        placement = self._layout.placement()
        if placement.is_single:
            return (self._shared,)
        if key == LEADER_KEY or not placement.reads_lease_table:
            return (self._own,)
        return (self._own, self._shared)

    def _worth_scanning(self, places: tuple[RowStore, ...]) -> tuple[RowStore, ...]:
        """Leave out the lease table, which is large, shortly after it had no such row."""
        is_recent = self._next_scan is not None and self._clock.monotonic() < self._next_scan
        if is_recent and not self._layout.known.writes_to_lease_table:
            return places[:1]
        return places

    def _target(self, key: str = "") -> RowStore:
        """Return where a new row of this key is written."""
        places = self._places(key)
        return places[-1] if self._layout.known.writes_to_lease_table else places[0]

    def _read(self, place: RowStore, call: Callable[[RowStore], _T]) -> _T | None:
        """Read a table that may be missing while the rows are in two tables."""
        if place is self._own and self._layout.known.reads_lease_table:
            try:
                return call(place)
            except NotFoundError:
                return None
        return self._on(place, call)

    def _on(self, place: RowStore, call: Callable[[RowStore], _T]) -> _T:
        try:
            return call(place)
        except NotFoundError:
            # The application was retired, and may be created again in another layout
            self._layout.forget()
            raise


def _updated(item: Item) -> int:
    try:
        return int_of(item, LAST_UPDATE) or 0
    except ValueError:  # the row is unreadable
        return 0

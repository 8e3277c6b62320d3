"""The rows of one entity in the lease table, under the key name of the table that it replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.coordinator_keys import COORDINATOR_KEYS
from kcl_pipeline.leases.lease.serialization import COUNTER, ENTITY_TYPE, LEASE_ENTITY, string
from kcl_pipeline.leases.state.serialization import (
    WORKER_ENTITY,
)
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Condition,
    ConditionCheck,
    Elsewhere,
    Item,
    Outcome,
    Put,
    RowStore,
    Update,
    Write,
)
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

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.RowStore`."""
        return self._inner.transact([self._write(write) for write in writes])

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

    def _write(self, write: Write) -> Write:
        if isinstance(write, ConditionCheck | Elsewhere):
            return write
        conditions = self._conditions(write.conditions)
        if isinstance(write, Put):
            return Put(self._inside(write.item), conditions)
        return Update(write.key, conditions, write.changes)


class WorkerEntityRows(EntityRows):
    """The worker metrics rows in the lease table, as a `RowStore` with the key `wid`.

    A worker id is chosen by a user. It may be the key of a row of another type, which is never
    changed: the conditions of every write exclude it.
    """

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`. Raise `SettingsError` if the key is that of another row."""
        self._refuse_reserved(key)
        own: list[Condition] = [
            *conditions,
            AbsentOrEquals(ENTITY_TYPE, string(WORKER_ENTITY)),
            Absent(COUNTER),
        ]
        outcome = self._inner.update(key, self._conditions(own), changes)
        if not outcome.applied and outcome.item is not None and not self._is_own(outcome.item):
            entity = text_of(outcome.item, ENTITY_TYPE) or LEASE_ENTITY
            raise SettingsError(
                f"the worker id {printable(key)!r} is the key of a row of the type "
                f"{printable(entity)} in the table {self.name}; give the worker another id"
            )
        return self._outcome(outcome)

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        own: list[Condition] = [
            *conditions,
            AbsentOrEquals(ENTITY_TYPE, string(WORKER_ENTITY)),
            Absent(COUNTER),
        ]
        return super().delete(key, own)

    def _is_own(self, item: Item) -> bool:
        return text_of(item, ENTITY_TYPE) == WORKER_ENTITY

    def _refuse_reserved(self, key: str) -> None:
        if key in COORDINATOR_KEYS:
            raise SettingsError(
                f"the worker id {key!r} is the key of a row of the KCL in the table {self.name}; "
                "give the worker another id"
            )

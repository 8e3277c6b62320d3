"""Tables in memory that count DynamoDB's capacity units.

The rules are those of "Read and write operations" in DynamoDB's developer guide:

- A read costs 1 RCU per 4 KB, half when it is eventually consistent. GetItem rounds each row up,
  and Scan and Query round each page of 1 MB up. A missing row costs the same as a small one.
- A write costs 1 WCU per 1 KB of the larger of the old and the new row. A refused write costs the
  same. A write that changes an index costs 1 WCU more for each entry that it removes or adds.
- Each write and each condition check of a transaction costs twice as much.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.row import OWNER, text_of
from kcl_pipeline.leases.store import Changes, Condition, Item, Outcome, Put, Write
from kcl_pipeline.testing.row_store import MemoryStore

_PAGE_BYTES: Final = 1_048_576
_READ_BYTES: Final = 4_096
_WRITE_BYTES: Final = 1_024
_INDEX_ENTRY_BYTES: Final = 150


@dataclass(slots=True)
class Meter:
    """Requests and capacity units by operation, of one process."""

    requests: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    rcu: dict[str, float] = field(default_factory=dict)
    wcu: dict[str, float] = field(default_factory=dict)

    def note(
        self, operation: str, *, rcu: float = 0.0, wcu: float = 0.0, requests: int = 1
    ) -> None:
        """Add requests of one operation."""
        self.requests[operation] += requests
        self.rcu[operation] = self.rcu.get(operation, 0.0) + rcu
        self.wcu[operation] = self.wcu.get(operation, 0.0) + wcu

    def add(self, other: Meter, factor: float = 1.0) -> None:
        """Add the counts of another meter, multiplied by `factor`."""
        for operation in other.requests:
            self.requests[operation] += other.requests[operation] * factor
            self.rcu[operation] = self.rcu.get(operation, 0.0) + other.rcu[operation] * factor
            self.wcu[operation] = self.wcu.get(operation, 0.0) + other.wcu[operation] * factor

    def by_operation(self, factor: float = 1.0, digits: int = 2) -> dict[str, dict[str, float]]:
        """Return requests, RCU and WCU by operation, multiplied by `factor`."""
        return {
            operation: {
                "requests": round(factor * self.requests[operation], digits),
                "rcu": round(factor * self.rcu[operation], digits),
                "wcu": round(factor * self.wcu[operation], digits),
            }
            for operation in sorted(self.requests)
        }

    @property
    def total_rcu(self) -> float:
        """All read capacity units."""
        return sum(self.rcu.values())

    @property
    def total_wcu(self) -> float:
        """All write capacity units."""
        return sum(self.wcu.values())


class MeteredStore(MemoryStore):
    """A `MemoryStore` that counts the capacity units of its requests.

    Args:
        name: Name of the table.
        key_name: Name of the primary key.
        clock: The clock.
        is_indexed: Whether the table has a keys-only index by `leaseOwner`.

    Attributes:
        meter: Receives the counts. It can be replaced at any time.
    """

    def __init__(self, name: str, key_name: str, clock: Clock, *, is_indexed: bool = False) -> None:
        super().__init__(name, key_name, clock=clock)
        self.meter = Meter()
        self._is_indexed = is_indexed
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._by_owner: dict[str, set[str]] = {}

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        units = max(math.ceil(self._sizes.get(key, 0) / _READ_BYTES), 1)
        self.meter.note("GetItem", rcu=units if consistent else units / 2)
        return super().get(key, consistent=consistent)

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        key = text_of(item, self.key_name) or ""
        return self._metered(
            "PutItem", key, lambda: super(MeteredStore, self).put(item, conditions)
        )

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        return self._metered(
            "UpdateItem", key, lambda: super(MeteredStore, self).update(key, conditions, changes)
        )

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._metered(
            "DeleteItem", key, lambda: super(MeteredStore, self).delete(key, conditions)
        )

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.RowStore`."""
        keys = [
            text_of(write.item, self.key_name) or "" if isinstance(write, Put) else write.key
            for write in writes
        ]
        before = [self._sizes.get(key, 0) for key in keys]
        refused = super().transact(writes)
        units = sum(
            2 * max(math.ceil(max(size, self._sizes.get(key, 0)) / _WRITE_BYTES), 1)
            for key, size in zip(keys, before, strict=True)
        )
        self.meter.note("TransactWriteItems", wcu=units)
        return refused

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`."""
        pages = max(math.ceil(self._bytes / _PAGE_BYTES), 1)
        units = max(math.ceil(self._bytes / _READ_BYTES), pages)
        self.meter.note("Scan", rcu=units if consistent else units / 2, requests=pages)
        return iter(list(self._rows.values()))

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """See `store.RowStore`."""
        keys = self._by_owner.get(owner, set())
        size = len(keys) * _INDEX_ENTRY_BYTES
        units = max(math.ceil(size / _READ_BYTES), 1)
        self.meter.note("Query", rcu=units / 2, requests=max(math.ceil(size / _PAGE_BYTES), 1))
        return tuple(sorted(keys))

    def has_owned(self, owner: str) -> bool:
        """Return whether a row has this owner, without counting it."""
        return bool(self._by_owner.get(owner))

    def replace_all(self, changed: Callable[[Item], Mapping[str, Any]]) -> None:
        """Change attributes of rows without counting it, as other processes would.

        Args:
            changed: Returns the new attributes of a row. Their sizes must not differ much.
        """
        for key, item in self._rows.items():
            attributes = changed(item)
            if attributes:
                self._rows[key] = {**item, **attributes}

    def _metered(self, operation: str, key: str, write: Callable[[], Outcome]) -> Outcome:
        size, owner = self._sizes.get(key, 0), self._owner(key)
        outcome = write()
        units = max(math.ceil(max(size, self._sizes.get(key, 0)) / _WRITE_BYTES), 1)
        if self._is_indexed and self._owner(key) != owner:
            units += (owner is not None) + (self._owner(key) is not None)
        self.meter.note(operation, wcu=units)
        return outcome

    def _owner(self, key: str) -> str | None:
        item = self.find(key)
        return None if item is None else text_of(item, OWNER)

    def _replace(self, key: str, item: Item | None) -> None:
        owner = self._owner(key)
        if owner is not None:
            self._by_owner[owner].discard(key)
        if item is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = item
        size = 0 if item is None else size_of(item)
        self._bytes += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size
        owner = self._owner(key)
        if owner is not None:
            self._by_owner.setdefault(owner, set()).add(key)


def size_of(item: Item) -> int:
    """Return the size of a row as DynamoDB counts it: names and values."""
    return sum(len(name.encode()) + _size_of_value(value) for name, value in item.items())


def _size_of_value(value: Mapping[str, Any]) -> int:
    ((kind, content),) = value.items()
    if kind == "S":
        return len(content.encode())
    if kind == "N":
        return len(str(content).lstrip("-").replace(".", "")) // 2 + 2
    if kind == "B":
        return len(content)
    if kind in {"SS", "BS", "NS"}:
        return sum(len(str(part)) for part in content)
    if kind == "L":
        return 3 + sum(1 + _size_of_value(part) for part in content)
    if kind == "M":
        return 3 + sum(
            1 + len(name.encode()) + _size_of_value(part) for name, part in content.items()
        )
    return 1

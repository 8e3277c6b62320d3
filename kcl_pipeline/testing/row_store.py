"""A `leases.store.RowStore` that keeps its rows in a dictionary.

Two hooks see every request. Tests use them to inject faults, waits and scheduling.
`before_call(operation, key)` runs before the request is applied, `after_call(operation, key)` after
it. An error that `after_call` raises stands for a lost response.

`operation` is DynamoDB's name of the request (`UpdateItem`, `Query`, ...). `key` is the row's key.
It is the owner for Query, all keys joined by commas for TransactWriteItems, and empty for Scan and
DescribeTable.

Scans, index queries and reads that are not strongly consistent can have a lag. They then return the
table as it was that many seconds ago.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leases.dynamodb import PageRetry
from kcl_pipeline.leases.row import OWNER, text_of
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Condition,
    ConditionCheck,
    Differs,
    Elsewhere,
    Equals,
    FirstEquals,
    Item,
    Outcome,
    Present,
    Put,
    Update,
    Write,
    same_value,
)

CallHook = Callable[[str, str], None]
Lag = float | Callable[[], float]
_T = TypeVar("_T")

_PLAIN: Final = frozenset({"S", "N", "B", "BOOL", "NULL"})

HISTORY_SECONDS = 120.0


class LandsLate(Exception):  # noqa: N818 (it is what happens to a request)
    """A write that is applied after its caller got an error.

    `before_call` raises it for a write. The caller gets `answer` at once. `schedule` receives the
    write and can apply it at any time, like a request that the network delayed.
    """

    def __init__(self, answer: Exception, schedule: Callable[[Callable[[], object]], None]) -> None:
        super().__init__(str(answer))
        self.answer = answer
        self.schedule = schedule


def no_hook(operation: str, key: str) -> None:
    """Do nothing."""


class MemoryStore:
    """`store.RowStore` in a dictionary.

    Rows are returned as they are stored, without a copy, because no caller changes an `Item` in
    place. Lags are seconds, or a function that returns them. They can change at any time. At most
    `HISTORY_SECONDS` of history are kept.

    Attributes:
        scan_page_rows: Rows per call of a scan, in the order of their keys. None: one call for all.
    """

    def __init__(
        self, name: str, key_name: str, *, clock: Clock | None = None, exists: bool = True
    ) -> None:
        self.name = name
        self.key_name = key_name
        self.before_call: CallHook = no_hook
        self.after_call: CallHook = no_hook
        self.scan_lag_seconds: Lag = 0.0
        self.index_lag_seconds: Lag = 0.0
        self.read_lag_seconds: Lag = 0.0
        self.scan_page_rows: int | None = None
        self._clock = clock or SystemClock()
        self._rng = random.Random(name)
        self._state = {"exists": exists}
        self._lock = threading.Lock()
        self._rows: dict[str, Item] = {}
        self._history: dict[str, list[tuple[float, Item | None]]] = {}

    def exists(self) -> bool:
        """Return whether the table exists."""
        return self._state["exists"]

    def ensure_exists(self) -> bool:
        """See `store.RowStore`."""
        self.before_call("DescribeTable", "")
        with self._lock:
            created = not self._state["exists"]
            self._state["exists"] = True
        self.after_call("DescribeTable", "")
        return created

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        self._begin("GetItem", key)
        with self._lock:
            item = (
                self._rows.get(key)
                if consistent
                else self._as_of(_seconds(self.read_lag_seconds)).get(key)
            )
        self.after_call("GetItem", key)
        return item

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        key = text_of(item, self.key_name) or ""
        return self._write("PutItem", key, conditions, lambda _: _copied(item))

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        return self._write(
            "UpdateItem",
            key,
            conditions,
            lambda row: changed(row, self.key_name, key, changes),
        )

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.LeaseStore`; the hooks receive the keys of the written rows, with commas."""
        keys = [
            text_of(write.item, self.key_name) or "" if isinstance(write, Put) else write.key
            for write in writes
        ]

        def apply() -> frozenset[int]:
            with self._lock:
                found = [
                    write.store.find(key)
                    if isinstance(write, ConditionCheck | Elsewhere)
                    and isinstance(write.store, MemoryStore)
                    else self._rows.get(key)
                    for key, write in zip(keys, writes, strict=True)
                ]
                refused = frozenset(
                    place
                    for place, (write, item) in enumerate(zip(writes, found, strict=True))
                    if not all(holds(condition, item) for condition in write.conditions)
                )
                for key, write, item in zip(keys, writes, found, strict=True):
                    if not refused and isinstance(write, Update):
                        self._replace(key, changed(item, self.key_name, key, write.changes))
                    elif not refused and isinstance(write, Put):
                        self._replace(key, _copied(write.item))
                    elif not refused and isinstance(write, Elsewhere):
                        self._write_elsewhere(write, item)
            return refused

        written = (
            key
            for key, write in zip(keys, writes, strict=True)
            if not isinstance(write, ConditionCheck)
        )
        return self._applied("TransactWriteItems", ",".join(written), apply)

    def check(self, key: str, conditions: Sequence[Condition]) -> ConditionCheck:
        """See `store.RowStore`."""
        return ConditionCheck(self, key, conditions)

    def _write_elsewhere(self, write: Elsewhere, item: Item | None) -> None:
        store = write.store
        if isinstance(store, MemoryStore):
            row = None
            if write.changes is not None:
                row = changed(item, store.key_name, write.key, write.changes)
            store._replace(write.key, row)

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._write("DeleteItem", key, conditions, lambda _: None)

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`; all rows of one page are from one instant.

        A throttled page is read again, as in the DynamoDB table.
        """
        last = ""
        retry = PageRetry(self._clock, self._rng)
        while True:
            retry.page(lambda: self._begin("Scan", ""))
            with self._lock:
                lag = 0.0 if consistent else _seconds(self.scan_lag_seconds)
                rows = self._as_of(lag)
            if self.scan_page_rows is None:
                page, more = list(rows), False
            else:
                left = sorted(key for key in rows if key > last)
                page, more = left[: self.scan_page_rows], len(left) > self.scan_page_rows
            self.after_call("Scan", "")
            yield from (rows[key] for key in page)
            if not more:
                return
            last = page[-1]

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """See `store.RowStore`."""
        self._begin("Query", owner)
        with self._lock:
            found = self._as_of(_seconds(self.index_lag_seconds))
        self.after_call("Query", owner)
        return tuple(sorted(key for key, item in found.items() if text_of(item, OWNER) == owner))

    def find(self, key: str) -> Item | None:
        """Return the current row without a call of the hooks."""
        return self._rows.get(key)

    def rows(self) -> dict[str, Item]:
        """Return a copy of all rows, sorted by key, without a call of the hooks."""
        with self._lock:
            return {key: _copied(self._rows[key]) for key in sorted(self._rows)}

    def view(self) -> MemoryStore:
        """Return a store with the same rows and lags, and without hooks.

        Later changes of hooks and lags apply to one of the two stores only.
        """
        other = copy.copy(self)
        other.before_call = other.after_call = no_hook
        return other

    def plant(self, item: Item) -> None:
        """Store a row without conditions and hooks, as another program would."""
        with self._lock:
            self._replace(text_of(item, self.key_name) or "", _copied(item))

    def erase(self, key: str) -> None:
        """Remove a row without conditions and hooks, as another program or an operator would.

        An unknown key is ignored.
        """
        with self._lock:
            if key in self._rows:
                self._replace(key, None)

    def drop(self) -> None:
        """Remove the table with its rows, as an operator would."""
        with self._lock:
            for key in list(self._rows):
                self._replace(key, None)
            self._state["exists"] = False

    def _begin(self, operation: str, key: str) -> None:
        self.before_call(operation, key)
        if not self._state["exists"]:
            raise NotFoundError(
                f"{operation} on table {self.name}: the table does not exist",
                code="ResourceNotFoundException",
                operation=operation,
            )

    def _write(
        self,
        operation: str,
        key: str,
        conditions: Sequence[Condition],
        make: Callable[[Item | None], Item | None],
    ) -> Outcome:
        def apply() -> Outcome:
            with self._lock:
                found = self._rows.get(key)
                applied = all(holds(condition, found) for condition in conditions)
                result = make(found) if applied else found
                if applied:
                    self._replace(key, result)
            return Outcome(applied, result)

        return self._applied(operation, key, apply)

    def _applied(self, operation: str, key: str, apply: Callable[[], _T]) -> _T:
        """Apply a write between the two hooks, or later if `before_call` raises `LandsLate`."""
        try:
            self._begin(operation, key)
        except LandsLate as late:
            late.schedule(apply)
            raise late.answer from None
        outcome = apply()
        self.after_call(operation, key)
        return outcome

    def _replace(self, key: str, item: Item | None) -> None:
        now = self._clock.monotonic()
        if item is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = item
        versions = self._history.setdefault(key, [])
        versions.append((now, item))
        while len(versions) > 1 and versions[1][0] <= now - HISTORY_SECONDS:
            del versions[0]

    def _as_of(self, lag_seconds: float) -> dict[str, Item]:
        if lag_seconds <= 0:
            return dict(self._rows)
        horizon = self._clock.monotonic() - lag_seconds
        found: dict[str, Item] = {}
        for key, versions in self._history.items():
            item = next((item for at, item in reversed(versions) if at <= horizon), None)
            if item is not None:
                found[key] = item
        return found


def _copied(item: Item) -> Item:
    """Copy a row so that no mutable part is shared.

    Most attributes are one plain value under the name of its type, which makes a deep copy
    unnecessary.
    """
    return {
        name: dict(value) if _PLAIN.issuperset(value) else _deep(value)
        for name, value in item.items()
    }


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _deep(part) for name, part in value.items()}
    return [_deep(part) for part in value] if isinstance(value, list) else value


def _seconds(lag: Lag) -> float:
    return lag() if callable(lag) else lag


def holds(condition: Condition, item: Item | None) -> bool:
    """Return whether a row satisfies the condition. None: there is no row."""
    value = None if item is None else item.get(condition.attribute)
    match condition:
        case Absent():
            return value is None
        case Present():
            return value is not None
        case Equals(_, wanted):
            return same_value(value, wanted)
        case AbsentOrEquals(_, wanted):
            return value is None or same_value(value, wanted)
        case Differs(_, unwanted):
            return value is not None and not same_value(value, unwanted)
        case FirstEquals(_, fallback, wanted):
            first = value if value is not None or item is None else item.get(fallback)
            return same_value(first, wanted)


def changed(item: Item | None, key_name: str, key: str, changes: Changes) -> Item:
    """Return the row after an update of `item`. None: there is no row."""
    result = dict(item) if item is not None else {key_name: {"S": key}}
    result.update(changes.put)
    for name in changes.remove:
        result.pop(name, None)
    for name, amount in changes.add.items():
        result[name] = {"N": str(Decimal(str(result.get(name, {"N": "0"})["N"])) + amount)}
    return result

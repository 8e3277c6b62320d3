"""In-memory twins of the three tables: the same operations on rows that are shaped as DynamoDB's, for tests and the simulation.

Every request is announced by hooks, through which a test injects faults, waits and scheduling: `before_call(operation, key)` runs before
anything is applied, `after_call(operation, key)` when it has been; an error raised by the second is an answer that was lost. `operation`
is DynamoDB's name of the request (`UpdateItem`, `Query`, ...), `key` the row's key, the owner for Query, and empty for Scan.
Scans, index queries and reads that are not strongly consistent may be given a lag: they then see the table as it was that long ago.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import NotFound
from kcl_pipeline.leases.coordinator_rows import CoordinatorRows
from kcl_pipeline.leases.lease_rows import LeaseRows
from kcl_pipeline.leases.serialization import LEASE_KEY, OWNER, text_of
from kcl_pipeline.leases.store import Changes, Condition, Item, Outcome, RowStore, changed, holds
from kcl_pipeline.leases.worker_rows import WorkerRows

CallHook = Callable[[str, str], None]
Lag = float | Callable[[], float]

_PLAIN: Final = frozenset({"S", "N", "B", "BOOL", "NULL"})

HISTORY_SECONDS = 120.0


def no_hook(operation: str, key: str) -> None:
    """A hook that does nothing."""


class MemoryStore:
    """`store.RowStore` in a dictionary. Lags (seconds, or a function that gives them) may be changed at any time; at most `HISTORY_SECONDS` are remembered."""

    def __init__(self, name: str, key_name: str, *, clock: Clock | None = None, exists: bool = True) -> None:
        self.name = name
        self.key_name = key_name
        self.before_call: CallHook = no_hook
        self.after_call: CallHook = no_hook
        self.scan_lag_seconds: Lag = 0.0
        self.index_lag_seconds: Lag = 0.0
        self.read_lag_seconds: Lag = 0.0
        self._clock = clock or SystemClock()
        self._state = {"exists": exists}
        self._lock = threading.Lock()
        self._rows: dict[str, Item] = {}
        self._history: dict[str, list[tuple[float, Item | None]]] = {}

    def ensure_exists(self, check: Callable[[], None]) -> bool:
        """See `store.RowStore`."""
        self.before_call("DescribeTable", "")
        with self._lock:
            created = not self._state["exists"]
            self._state["exists"] = True
        self.after_call("DescribeTable", "")
        if not created:
            check()
        return created

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        self._begin("GetItem", key)
        with self._lock:
            item = self._rows.get(key) if consistent else self._as_of(_seconds(self.read_lag_seconds)).get(key)
        self.after_call("GetItem", key)
        return None if item is None else _copied(item)

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        key = text_of(item, self.key_name) or ""
        return self._write("PutItem", key, conditions, lambda _: _copied(item))

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        return self._write("UpdateItem", key, conditions, lambda found: _copied(changed(found, self.key_name, key, changes)))

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        return self._write("DeleteItem", key, conditions, lambda _: None)

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`; the rows are those of one instant."""
        self._begin("Scan", "")
        with self._lock:
            found = dict(self._rows) if consistent else self._as_of(_seconds(self.scan_lag_seconds))
        self.after_call("Scan", "")
        yield from (_copied(item) for item in found.values())

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """See `store.RowStore`."""
        self._begin("Query", owner)
        with self._lock:
            found = self._as_of(_seconds(self.index_lag_seconds))
        self.after_call("Query", owner)
        return tuple(sorted(key for key, item in found.items() if text_of(item, OWNER) == owner))

    def rows(self) -> dict[str, Item]:
        """A copy of all rows by key, sorted; no hook runs."""
        with self._lock:
            return {key: _copied(self._rows[key]) for key in sorted(self._rows)}

    def view(self) -> MemoryStore:
        """The same rows under other hooks and lags."""
        other = copy.copy(self)
        other.before_call = other.after_call = no_hook
        return other

    def plant(self, item: Item) -> None:
        """Put a row as another program might have written it: no condition, no hook."""
        with self._lock:
            self._replace(text_of(item, self.key_name) or "", _copied(item))

    def erase(self, key: str) -> None:
        """Remove a row as another program, or somebody by hand, might: no condition, no hook. An unknown key is ignored."""
        with self._lock:
            if key in self._rows:
                self._replace(key, None)

    def _begin(self, operation: str, key: str) -> None:
        self.before_call(operation, key)
        if not self._state["exists"]:
            raise NotFound(f"{operation} on table {self.name}: the table does not exist", code="ResourceNotFoundException", operation=operation)

    def _write(self, operation: str, key: str, conditions: Sequence[Condition], make: Callable[[Item | None], Item | None]) -> Outcome:
        self._begin(operation, key)
        with self._lock:
            found = self._rows.get(key)
            applied = all(holds(condition, found) for condition in conditions)
            result = make(found) if applied else found
            if applied:
                self._replace(key, result)
        self.after_call(operation, key)
        return Outcome(applied, None if result is None else _copied(result))

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
    """A copy of a row that shares nothing with it that can change; most attributes are a plain value under the name of its type."""
    return {name: dict(value) if _PLAIN.issuperset(value) else _deep(value) for name, value in item.items()}


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _deep(part) for name, part in value.items()}
    return [_deep(part) for part in value] if isinstance(value, list) else value


def _seconds(lag: Lag) -> float:
    return lag() if callable(lag) else lag


class _Inspectable:
    """What all three twins offer to tests beyond their table protocol. `store` has the hooks and lags."""

    _store: RowStore

    def __init__(self, store: MemoryStore, before_call: CallHook | None, after_call: CallHook | None) -> None:
        self.store = store
        self.hook(before_call, after_call)

    def hook(self, before_call: CallHook | None, after_call: CallHook | None) -> None:
        """Replace both hooks; None: none."""
        self.store.before_call = before_call or no_hook
        self.store.after_call = after_call or no_hook

    def view(self, *, before_call: CallHook | None = None, after_call: CallHook | None = None) -> Self:
        """The same table as another process sees it: the same rows, hooks and lags of its own."""
        other = copy.copy(self)
        other.store = other._store = self.store.view()  # noqa: SLF001 (a copy of itself)
        other.hook(before_call, after_call)
        return other

    def rows(self) -> dict[str, Item]:
        """A copy of all rows by key, sorted, as DynamoDB would give them; no hook runs."""
        return self.store.rows()

    def plant(self, item: Item) -> None:
        """Put a row as another program might have written it: no condition, no hook."""
        self.store.plant(item)

    def erase(self, key: str) -> None:
        """Remove a row as somebody by hand might: no condition, no hook. An unknown key is ignored."""
        self.store.erase(key)


class InMemoryLeaseTable(LeaseRows, _Inspectable):
    """The lease table in memory. With `exists` False it must be created by `ensure_exists` first, as a real one."""

    def __init__(
        self,
        name: str = "leases",
        *,
        clock: Clock | None = None,
        exists: bool = True,
        before_call: CallHook | None = None,
        after_call: CallHook | None = None,
        index_lag_seconds: Lag = 0.0,
        scan_lag_seconds: Lag = 0.0,
    ) -> None:
        store = MemoryStore(name, LEASE_KEY, clock=clock, exists=exists)
        store.index_lag_seconds, store.scan_lag_seconds = index_lag_seconds, scan_lag_seconds
        LeaseRows.__init__(self, store)
        _Inspectable.__init__(self, store, before_call, after_call)


class InMemoryWorkerMetricsTable(WorkerRows, _Inspectable):
    """The worker-metrics table in memory."""

    def __init__(
        self,
        name: str = "leases-WorkerMetricStats",
        *,
        clock: Clock | None = None,
        exists: bool = True,
        before_call: CallHook | None = None,
        after_call: CallHook | None = None,
        scan_lag_seconds: Lag = 0.0,
    ) -> None:
        store = MemoryStore(name, "wid", clock=clock, exists=exists)
        store.scan_lag_seconds = scan_lag_seconds
        WorkerRows.__init__(self, store)
        _Inspectable.__init__(self, store, before_call, after_call)


class InMemoryCoordinatorStateTable(CoordinatorRows, _Inspectable):
    """The coordinator-state table in memory."""

    def __init__(
        self,
        name: str = "leases-CoordinatorState",
        *,
        clock: Clock | None = None,
        exists: bool = True,
        before_call: CallHook | None = None,
        after_call: CallHook | None = None,
    ) -> None:
        store = MemoryStore(name, "key", clock=clock, exists=exists)
        CoordinatorRows.__init__(self, store)
        _Inspectable.__init__(self, store, before_call, after_call)

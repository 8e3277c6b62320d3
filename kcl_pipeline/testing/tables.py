"""In-memory versions of the lease, worker-metrics and coordinator-state tables.

They run the same operations as the DynamoDB tables, on rows of the same format. Tests and the
simulation use them. `row_store` describes hooks and lags.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, Generic, Self, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.row import LEASE_KEY, Lease, lease_from_item, lease_to_item
from kcl_pipeline.leases.store import Absent, Item, same_item
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.testing.row_store import CallHook, Lag, MemoryStore, no_hook

_MOST_DECODED: Final = 10_000
_T = TypeVar("_T")


class _Decoded(Generic[_T]):
    """Cache of decoded rows, because a simulation reads most rows many times.

    The key is the identity of the row. It stays valid because the cache keeps the row, and rows
    never change.
    """

    def __init__(self, decode: Callable[[Item], _T]) -> None:
        self._decode = decode
        self._known: dict[int, tuple[Item, _T]] = {}

    def __call__(self, item: Item) -> _T:
        known = self._known.get(id(item))
        if known is not None:
            return known[1]
        row = self._decode(item)
        if len(self._known) >= _MOST_DECODED:
            self._known.clear()
        self._known[id(item)] = item, row
        return row


def create_lease(table: LeaseTable, lease: Lease) -> bool:
    """Put one new row without a proof, as no worker or leader does.

    Returns:
        Whether the row of this key equals the new one. A row that exists is not changed.
    """
    item = lease_to_item(lease)
    outcome = table._store.put(item, [Absent(LEASE_KEY)])  # noqa: SLF001
    return outcome.applied or same_item(outcome.item, item)


class _Inspectable:
    """What the three in-memory tables offer to tests in addition to their protocol.

    `store` has the hooks and lags.
    """

    _store: Any

    def __init__(
        self, store: MemoryStore, before_call: CallHook | None, after_call: CallHook | None
    ) -> None:
        self.store = store
        self.hook(before_call, after_call)

    def hook(self, before_call: CallHook | None, after_call: CallHook | None) -> None:
        """Replace both hooks; None removes a hook."""
        self.store.before_call = before_call or no_hook
        self.store.after_call = after_call or no_hook

    def view(
        self, *, before_call: CallHook | None = None, after_call: CallHook | None = None
    ) -> Self:
        """Return the same table as another process sees it, with separate hooks and lags."""
        other = copy.copy(self)
        other.store = other._store = self.store.view()  # noqa: SLF001 (a copy of itself)
        other.hook(before_call, after_call)
        return other

    def rows(self) -> dict[str, Item]:
        """Return a copy of all rows in DynamoDB's format, by key, without a call of the hooks."""
        return self.store.rows()

    def plant(self, item: Item) -> None:
        """Store a row without conditions and hooks, as another program would."""
        self.store.plant(item)

    def erase(self, key: str) -> None:
        """Remove a row without conditions and hooks, as an operator would.

        An unknown key is ignored.
        """
        self.store.erase(key)


class InMemoryLeaseTable(LeaseTable, _Inspectable):
    """The lease table in memory.

    With `exists=False`, `ensure_exists` must create it first, like a real table.
    """

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
        LeaseTable.__init__(self, store)
        self._decode = _Decoded(lease_from_item)
        _Inspectable.__init__(self, store, before_call, after_call)

    def row(self, key: str) -> Lease | None:
        """Return the current lease, or None, without a call of the hooks."""
        item = self.store.find(key)
        return None if item is None else self._decode(item)


class InMemoryWorkerMetricsTable(WorkerMetricsTable, _Inspectable):
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
        WorkerMetricsTable.__init__(self, store)
        self._decode = _Decoded(self._decode)
        _Inspectable.__init__(self, store, before_call, after_call)


class InMemoryCoordinatorStateTable(CoordinatorStateTable, _Inspectable):
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
        CoordinatorStateTable.__init__(self, store)
        _Inspectable.__init__(self, store, before_call, after_call)

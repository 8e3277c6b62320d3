"""The worker-metrics table's operations (protocol §2)."""

from __future__ import annotations

from kcl_pipeline.leases import serialization_state as state
from kcl_pipeline.leases.serialization import number
from kcl_pipeline.leases.store import AbsentOrEquals, Changes, Equals, Present, RowStore
from kcl_pipeline.leases.tables import WorkerMetrics


class WorkerRows:
    """`tables.WorkerMetricsTable` on any row store. Every write is one that may be repeated: it sets the same values, or removes what is gone."""

    def __init__(self, store: RowStore) -> None:
        self.name = store.name
        self._store = store

    def ensure_exists(self) -> bool:
        """See `tables.WorkerMetricsTable`."""
        return self._store.ensure_exists(lambda: None)

    def report(self, row: WorkerMetrics) -> WorkerMetrics:
        """See `tables.WorkerMetricsTable`. A drain request was for the run whose id stands in the row: another run under the same worker id removes it."""
        attributes = state.worker_attributes(row)
        mine = [] if row.run_id is None else [AbsentOrEquals(state.RUN_ID, attributes[state.RUN_ID])]
        outcome = self._store.update(row.worker_id, mine, Changes(attributes))
        if not outcome.applied:
            outcome = self._store.update(row.worker_id, [], Changes(attributes, (state.DRAIN,)))
        return row if outcome.item is None else state.worker_from_item(outcome.item, self._store.key_name)

    def list_workers(self) -> tuple[WorkerMetrics, ...]:
        """See `tables.WorkerMetricsTable`."""
        found = []
        for item in self._store.scan():
            if state.is_worker(item):
                try:
                    found.append(state.worker_from_item(item, self._store.key_name))
                except ValueError:  # as if it had no row: no leases until its next report, which writes these attributes anew
                    continue
        return tuple(found)

    def request_drain(self, worker_id: str) -> bool:
        """See `tables.WorkerMetricsTable`."""
        return self._store.update(worker_id, [Present(self._store.key_name)], Changes({state.DRAIN: number(1)})).applied

    def delete(self, row: WorkerMetrics) -> bool:
        """Done when there is no row."""
        outcome = self._store.delete(row.worker_id, [Equals(state.LAST_UPDATE, number(row.last_update_seconds))])
        return outcome.applied or outcome.item is None

    def deregister(self, worker_id: str) -> None:
        """See `tables.WorkerMetricsTable`."""
        self._store.delete(worker_id, [])

"""Read and write worker metrics rows (protocol §2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kcl_pipeline.errors import NotFoundError, UnreadableRowError, WorkerIdTakenError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.lease.serialization import number, string
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.state import serialization as state
from kcl_pipeline.leases.state.values import WorkerListing, WorkerMetrics
from kcl_pipeline.leases.store import AbsentOrEquals, Changes, Equals, Present, RowStore

_OF_ONE_RUN: Final = (state.DRAIN, state.DRAIN_REASON, state.OWN_CPU, state.REPLACES)


class WorkerRows:
    """The worker-metrics table of one application, on a row store. All writes are idempotent.

    Args:
        store: The rows.
        support_code: Returns what is published with every report (`sup`). None: nothing.
        verify_layout: Runs before every report. Raises `IncompatibleTableError` if the application
            has another layout now.
    """

    def __init__(
        self,
        store: RowStore,
        support_code: Callable[[], int | None] = lambda: None,
        verify_layout: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._support_code = support_code
        self._verify_layout = verify_layout

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._store.name

    def ensure_exists(self) -> bool:
        """Create the table if it is missing, wait for it, and return whether it was created."""
        return self._store.ensure_exists()

    def report(self, row: WorkerMetrics, *, takes_over: bool = True) -> WorkerMetrics:
        """Update the row of this worker. Returns the stored row, with a drain request if any.

        A drain request is for the run whose id is in the row. Another run with the same worker id
        removes it, the CPU if it reports that as a metric of KCL, and the worker that the former
        run replaced.

        Args:
            row: The row.
            takes_over: Write the row also if it has another run id: the worker id belongs to the
                process that has started last. A process takes over with its first report.

        Raises:
            WorkerIdTakenError: The row has another run id, and `takes_over` is False.
            IncompatibleTableError: The application has another layout now (protocol §4.3). The
                worker must end: what it writes would be in a table that nobody reads.
        """
        self._verify_layout()
        if row.support_code is None:
            row = replace(row, support_code=self._support_code())
        attributes = state.worker_attributes(row)
        same_run = (
            [] if row.run_id is None else [AbsentOrEquals(state.RUN_ID, attributes[state.RUN_ID])]
        )
        outcome = self._store.update(row.worker_id, same_run, Changes(attributes))
        if not outcome.applied and not takes_over:
            raise self._taken(row.worker_id, text_of(outcome.item or {}, state.RUN_ID))
        if not outcome.applied:
            of_the_former = tuple(name for name in _OF_ONE_RUN if name not in attributes)
            outcome = self._store.update(row.worker_id, [], Changes(attributes, of_the_former))
        if outcome.item is None:
            return row
        try:
            stored = state.worker_from_item(outcome.item, self._store.key_name)
        except UnreadableRowError:
            # This worker has not written the attributes that make its row unreadable
            foreign = tuple(name for name in state.OPTIONAL_ATTRIBUTES if name not in attributes)
            self._store.update(row.worker_id, [], Changes(attributes, foreign))
            stored = row
        return stored

    def verify_run(self, worker_id: str, run_id: str) -> None:
        """Read the row of a worker. A row that is missing, or has no run id, belongs to nobody.

        So do the rows of a table that is missing: the table was deleted, or this is a fleet of
        KCL 2.x, which has none.

        Raises:
            WorkerIdTakenError: The row has another run id.
        """
        try:
            other = text_of(self._store.get(worker_id) or {}, state.RUN_ID)
        except NotFoundError:
            return
        if other not in (None, run_id):
            raise self._taken(worker_id, other)

    def _taken(self, worker_id: str, other: str | None) -> WorkerIdTakenError:
        return WorkerIdTakenError(
            f"another process has started under the worker id {worker_id!r}: its run is {other}",
            other,
        )

    def scan_workers(self) -> WorkerListing:
        """Return all rows, including those that cannot be read. Eventually consistent.

        The worker of an unreadable row is assigned no leases until its next report, which repairs
        the row.
        """
        found: list[WorkerMetrics] = []
        bad_rows: list[BadRow] = []
        key_name = self._store.key_name
        for item in self._store.scan():
            if state.is_worker(item):
                try:
                    found.append(state.worker_from_item(item, key_name))
                except UnreadableRowError as error:
                    bad_rows.append(
                        BadRow(
                            self.name,
                            text_of(item, key_name) or "",
                            str(error),
                            state.heartbeat_of(item),
                        )
                    )
        return WorkerListing(tuple(found), tuple(bad_rows))

    def request_drain(self, worker_id: str, *, for_pause: bool = False) -> bool:
        """Request a worker to stop. False if it has no row.

        Args:
            worker_id: The worker.
            for_pause: The application is paused; the worker may start again after the pause.
        """
        put = {state.DRAIN: number(1)}
        if for_pause:
            put[state.DRAIN_REASON] = string(state.FOR_PAUSE)
        remove = () if for_pause else (state.DRAIN_REASON,)
        return self._store.update(
            worker_id, [Present(self._store.key_name)], Changes(put, remove)
        ).applied

    def delete(self, row: WorkerMetrics) -> bool:
        """Delete the row if its `lut` equals that of `row`. True: there is no row now.

        Applied if there is no row.
        """
        outcome = self._store.delete(
            row.worker_id, [Equals(state.LAST_UPDATE, number(row.last_update_seconds))]
        )
        return outcome.applied or outcome.item is None

    def deregister(self, worker_id: str, run_id: str | None = None) -> None:
        """Delete the row of a worker that stops, unless it has another run id.

        Args:
            worker_id: The worker.
            run_id: Its run id. None: the row is deleted in any case.
        """
        run = [] if run_id is None else [AbsentOrEquals(state.RUN_ID, string(run_id))]
        self._store.delete(worker_id, run)

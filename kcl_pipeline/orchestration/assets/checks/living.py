"""Observe which workers are alive: those whose row changes."""

from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.tables import WorkerMetrics, WorkerMetricsTable

POLL_SECONDS: Final = 1.0


class LiveWorkers:
    """The workers whose row has changed since the first observation.

    The time in a row is not compared with a clock of this host.

    Args:
        table: The worker metrics table.
        rejected: Reports rows that cannot be read. They have no values for a check.
    """

    def __init__(self, table: WorkerMetricsTable, rejected: RejectedRows) -> None:
        self._table = table
        self._rejected = rejected
        self._first: dict[str, WorkerMetrics] | None = None
        self._living: dict[str, WorkerMetrics] = {}
        self._latest: dict[str, WorkerMetrics] = {}

    def observe(self) -> None:
        """Read the table once."""
        listing = self._table.scan_workers()
        self._rejected.note_all(listing.bad_rows)
        rows = {row.worker_id: row for row in listing.workers}
        self._latest = rows
        if self._first is None:
            self._first = rows
            return
        self._living = {
            worker_id: row
            for worker_id, row in rows.items()
            if worker_id in self._living
            or worker_id not in self._first
            or _has_reported(self._first[worker_id], row)
        }

    @property
    def is_complete(self) -> bool:
        """Whether every worker that has a row has reported."""
        return self._first is not None and self._latest.keys() <= self._living.keys()

    @property
    def rows(self) -> tuple[WorkerMetrics, ...]:
        """The newest rows of the live workers, sorted by id."""
        return tuple(self._living[key] for key in sorted(self._living))

    @property
    def all_rows(self) -> tuple[WorkerMetrics, ...]:
        """The newest rows of all workers, sorted by id."""
        return tuple(self._latest[key] for key in sorted(self._latest))


def _has_reported(before: WorkerMetrics, row: WorkerMetrics) -> bool:
    """Whether the worker wrote its row in between. A drain request is written by others."""
    return (before.last_update_seconds, before.stats) != (row.last_update_seconds, row.stats)


def observe_live_workers(
    table: WorkerMetricsTable, seconds: float, clock: Clock, rejected: RejectedRows
) -> tuple[WorkerMetrics, ...]:
    """Find the workers whose row changes within the given time.

    It returns as soon as all have reported. Rows that cannot be read are reported to `rejected`.
    """
    begin, workers = clock.monotonic(), LiveWorkers(table, rejected)
    workers.observe()
    while not workers.is_complete and clock.monotonic() - begin < seconds:
        clock.sleep(POLL_SECONDS)
        workers.observe()
    return workers.rows

"""Read both tables, or only the worker metrics rows and single leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.liveness.liveness import Liveness
from kcl_pipeline.leader.phase import Map, Scan, scan
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.migration import ClientVersion
from kcl_pipeline.leases.tables import LeaseTable, WorkerListing, WorkerMetricsTable

LEASES_PER_PROBE: Final = 16
"""Reading one lease costs as much as scanning this number of leases. So a table with fewer leases
per worker is scanned instead.
"""


class TableReads:
    """The reads of one process that leads or stands by. All are eventually consistent.

    Args:
        settings: Whether leases have the multi-stream form.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        clock: The clock.
        liveness: Receives all rows.
        run: Reads single leases, possibly in parallel.
        version: In the version 2X there may be no worker-metrics table.
        leases_per_probe: See `LEASES_PER_PROBE`.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        clock: Clock,
        liveness: Liveness,
        run: Map,
        version: ClientVersion,
        leases_per_probe: int = LEASES_PER_PROBE,
    ) -> None:
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._clock = clock
        self._liveness = liveness
        self._run = run
        self._is_multi_stream = settings.is_multi_stream
        self._leases_per_probe = leases_per_probe
        self._version = version

    def scan(self) -> Scan:
        """Read and observe both tables."""
        found = scan(
            self._lease_table,
            self._worker_table,
            self._clock,
            is_multi_stream=self._is_multi_stream,
            workers_may_be_missing=self._version.is_2x,
        )
        times, bad = (found.scan_started, found.scan_finished), found.unreadable_workers
        self._liveness.observe(found.leases, found.workers, *times, unreadable=bad)
        return found

    def workers(self) -> WorkerListing:
        """Read the worker metrics rows, without observing them."""
        return self._worker_table.scan_workers()

    def probe(
        self, keys: Iterable[str], *, with_workers: bool = True
    ) -> tuple[dict[str, Lease], WorkerListing | None]:
        """Read and observe these leases and, `with_workers`, the worker metrics rows.

        Returns:
            The leases that exist, by key, and the worker metrics rows if they were read.

        Raises:
            AwsError: A row cannot be read now.
            ValueError: A row is not a lease that can be used.
        """
        began = self._clock.monotonic()
        workers = self.workers() if with_workers else None
        get = partial(self._lease_table.get, consistent=False)
        leases = {one.lease_key: one for one in self._run(get, tuple(keys)) if one is not None}
        self._liveness.observe_some(leases.values(), workers, began, self._clock.monotonic())
        return leases, workers

    def is_small(self, leases: int, owners: int) -> bool:
        """Return whether a scan costs no more than probes."""
        return leases < self._leases_per_probe * max(owners, 1)


def choose_probes(leases: Iterable[Lease], before: Mapping[str, str]) -> dict[str, str]:
    """Return for each owner the key of the lease to read next: the one after the former.

    A lease that is probed must have been read before, so that its counter shows a renewal.

    Args:
        leases: The leases of a scan.
        before: The former result.
    """
    found: dict[str, tuple[bool, str]] = {}
    for lease in leases:
        owner = lease.owner
        if owner is None or lease.ended:
            continue
        candidate = (lease.lease_key <= before.get(owner, ""), lease.lease_key)
        found[owner] = min(found.get(owner, candidate), candidate)
    return {owner: key for owner, (_, key) in found.items()}

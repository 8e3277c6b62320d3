"""Change the streams or the sink of an application on purpose.

The leases of a single-stream application do not say which stream they belong to, so its stream can
only be changed together with them. The steps are conditional and can be repeated: mark the record
as changing, which refuses every start and makes a leader give up its lock; take the lock; delete
the leases; record the new streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NoReturn

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ApplicationInUseError
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leader.phase import WRITES_AT_ONCE
from kcl_pipeline.leases.application import (
    ACCEPT_STREAMS,
    ApplicationIdentity,
    ApplicationRecord,
)
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable

POLL_SECONDS: Final = 1.0
LOCK_SECONDS: Final = 150.0
"""A Java leader's lock lasts 120 s after its last heartbeat."""

REPORTS: Final = 2.5
"""Reporting periods without a new row after which a worker counts as stopped."""

QUIET_SCANS: Final = 2
"""Scans in a row that must find no lease: a scan may show the table as it was a moment ago."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was recorded before and after, and how many leases were deleted."""

    before: ApplicationIdentity | None
    after: ApplicationIdentity
    deleted: int = 0


class ApplicationChange:
    """One change. `election` is a candidate of its own, which holds no lock yet."""

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        coordinator_table: CoordinatorStateTable,
        clock: Clock,
        election: LeaderElection,
    ) -> None:
        self._settings = settings
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._election = election

    def accept_streams(self, wanted: ApplicationIdentity) -> Acceptance:
        """Record these streams, whatever was recorded.

        Between two sets of several streams nothing else is done. In all other cases all leases are
        deleted, and with them all positions. Raises `ApplicationInUseError` while workers run, and
        when another process changes the record; repeat it then.
        """
        ensure_client_version(self._coordinator_table, self._election.owner_name, self._clock)
        record = self._coordinator_table.read_application()
        before = None if record is None else record.identity
        after = replace(wanted, sink=wanted.sink if before is None else before.sink, changing=False)
        if before == after:
            return Acceptance(before, after)
        if before is not None and {before.mode, after.mode} == {"multi_stream"}:
            self._record(after, record)
            return Acceptance(before, after)
        self._require_no_workers()
        marked = replace(after, changing=True)
        self._record(marked, record)
        try:
            self._take_the_lock()
            deleted = self._delete_leases()
            self._record(after, self._coordinator_table.read_application())
        finally:
            self._election.release()
        return Acceptance(before, after, deleted)

    def accept_sink(self, wanted: ApplicationIdentity) -> Acceptance:
        """Record this sink. No lease is touched: the new sink goes on where the former one ends.

        Raises `ApplicationInUseError` while workers run, and while a lease has a batch in flight:
        only the former sink can tell whether that one landed.
        """
        record = self._coordinator_table.read_application()
        if record is None or record.identity.sink == wanted.sink:
            return Acceptance(None if record is None else record.identity, wanted)
        leases = self._require_no_workers()
        pending = next((lease for lease in leases if lease.pending_checkpoint is not None), None)
        if pending is not None:
            raise ApplicationInUseError(
                f"the lease {pending.lease_key} has a batch in flight, and only the former sink "
                f"{record.identity.sink} tells whether it landed; run one worker with that sink "
                "and --drain first"
            )
        after = replace(record.identity, sink=wanted.sink)
        self._record(after, record)
        return Acceptance(record.identity, after)

    def _record(self, identity: ApplicationIdentity, record: ApplicationRecord | None) -> None:
        if not self._coordinator_table.put_application(identity, replacing=record):
            raise ApplicationInUseError(
                "another process changed the identity of the application "
                f"{self._settings.application_name!r} at this moment; run the command again"
            )

    def _require_no_workers(self) -> tuple[Lease, ...]:
        leases = self._leases_of_nobody()
        rows = {row.worker_id: row for row in self._worker_table.list_workers()}
        if rows:
            period = self._settings.worker.worker_metrics_reporter_freq_in_millis / 1000
            self._clock.sleep(REPORTS * period)
            for row in self._worker_table.list_workers():
                if rows.get(row.worker_id) != row:
                    self._refuse(f"the worker {row.worker_id} is running")
        return leases

    def _leases_of_nobody(self) -> tuple[Lease, ...]:
        listing = self._lease_table.list_leases()
        for lease in listing.leases:
            if lease.actual_owner is not None:
                self._refuse(f"the lease {lease.lease_key} belongs to {lease.actual_owner}")
        return listing.leases

    def _refuse(self, reason: str) -> NoReturn:
        raise ApplicationInUseError(
            f"{reason}: stop all workers of the application "
            f"{self._settings.application_name!r} and wait until their leases have no owner, then "
            "run the command again"
        )

    def _take_the_lock(self) -> None:
        deadline = self._clock.monotonic() + LOCK_SECONDS
        while not self._election.try_lead():
            if self._clock.monotonic() >= deadline:
                raise ApplicationInUseError(
                    f"{self._election.seen_owner} leads the application and does not give up its "
                    f"lock within {LOCK_SECONDS:.0f} s; stop it, then run {ACCEPT_STREAMS} again"
                )
            self._clock.sleep(POLL_SECONDS)

    def _delete_leases(self) -> int:
        deleted, quiet = 0, 0
        while quiet < QUIET_SCANS:
            leases = self._leases_of_nobody()
            quiet = 0 if leases else quiet + 1
            for number, lease in enumerate(leases):
                if number % WRITES_AT_ONCE == 0 and not self._election.confirm():
                    raise ApplicationInUseError(
                        "the leader's lock was taken over; run the command again"
                    )
                deleted += self._lease_table.delete(lease)
            self._clock.sleep(POLL_SECONDS)
        unreadable = self._lease_table.list_leases().unreadable
        if unreadable:
            raise ApplicationInUseError(
                f"the rows {sorted(unreadable)} of the table {self._lease_table.name} cannot be "
                "read as leases; delete them by hand, then run the command again"
            )
        return deleted

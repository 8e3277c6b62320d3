"""Change the recorded streams or the recorded sink of an application.

The lease keys of a single-stream application do not contain the stream, so a change of the stream
requires that all leases are deleted. The steps are conditional and can be repeated:

1. Record that the streams are changing. This refuses every start and makes a leader release its
   lock.
2. Acquire the lock.
3. Delete the leases.
4. Record the new streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ApplicationInUseError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.leader.lock import WRITES_AT_ONCE, LeaderElection
from kcl_pipeline.leases.application import ACCEPT_STREAMS, ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.layout import VERSION_3X, ensure_client_version
from kcl_pipeline.leases.row import BadRow, Lease, RejectedRows
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.leases.writes import MAX_SEEKS, LeaseSeek, LeaseTable
from kcl_pipeline.text import printable

POLL_SECONDS: Final = 1.0
LOCK_SECONDS: Final = 150.0
"""Longest wait for the lock. The lock of a Java leader expires 120 s after its last heartbeat."""

REPORTS: Final = 2.5
"""Reporting periods without a report after which a worker counts as stopped."""

EMPTY_SCANS: Final = 2
"""Scans in a row that must find no lease, because a scan is eventually consistent."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of a change: the record before and after, and the number of deleted leases."""

    before: ApplicationIdentity | None
    after: ApplicationIdentity
    deleted: int = 0


class ApplicationChange:
    """Changes the record of one application.

    Args:
        settings: All settings.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        clock: The clock.
        election: A candidate for this change alone, which does not hold the lock.
        events: Receives `RowRejected` for each worker metrics row that cannot be read.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        coordinator_table: CoordinatorStateTable,
        clock: Clock,
        election: LeaderElection,
        events: EventSink = ignore_events,
    ) -> None:
        self._settings = settings
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._election = election
        self._rejected = RejectedRows(events)

    def accept_streams(self, configured: ApplicationIdentity) -> Acceptance:
        """Replace the recorded streams.

        If the application had several streams and still has, only the record changes. Otherwise all
        leases are deleted, and with them all positions.

        Raises:
            ApplicationInUseError: Workers are running, or another process changes the record. The
                call can be repeated.
        """
        owner = self._election.owner_name
        config = self._settings.client_version_config
        version = ensure_client_version(self._coordinator_table, owner, self._clock, config)
        if version.client_version != VERSION_3X:
            raise ApplicationInUseError(
                f"the application {self._settings.application_name!r} has the client version "
                f"{version.client_version}; finish its migration from KCL 2.x first"
            )
        record = self._coordinator_table.read_application()
        before = None if record is None else record.identity
        after = _with_sink(configured, before)
        if before is not None and before.mode == after.mode == "single_stream":
            known = before.streams[0]
            after = replace(after, streams=(known,)) if known.is_same(after.streams[0]) else after
        if before == after:
            return Acceptance(before, after)
        if before is not None and {before.mode, after.mode} == {"multi_stream"}:
            self._record(after, record)
            return Acceptance(before, after)
        self._require_no_workers()
        changing = replace(after, changing=True)
        self._record(changing, record)
        try:
            self._acquire_lock()
            deleted = self._delete_leases()
            self._record(after, self._coordinator_table.read_application())
        finally:
            self._election.release()
        return Acceptance(before, after, deleted)

    def accept_sink(self, configured: ApplicationIdentity, token: str) -> Acceptance:
        """Replace the recorded sink. The checkpoints do not change: the new sink continues there.

        The marks of the former table are removed from the leases, so that the new one is accepted.

        Args:
            configured: Has the new sink.
            token: Unique text of this call.

        Raises:
            ApplicationInUseError: Workers are running, or another process changes a row.
        """
        record = self._coordinator_table.read_application()
        if record is None or record.identity.sink == configured.sink:
            return Acceptance(None if record is None else record.identity, configured)
        self._remove_marks(self._require_no_workers(), record, token)
        after = replace(record.identity, sink=configured.sink)
        self._record(after, record)
        return Acceptance(record.identity, after)

    def _remove_marks(self, leases: Sequence[Lease], record: ApplicationRecord, token: str) -> None:
        seeks = [
            LeaseSeek(one, one.checkpoint, one.initial_millis)
            for one in leases
            if one.table_mark is not None
        ]
        proof = self._coordinator_table.proof_of_application(record)
        for begin in range(0, len(seeks), MAX_SEEKS):
            refused = self._lease_table.seek(seeks[begin : begin + MAX_SEEKS], token, proof)
            if refused is None or refused:
                changed = "the record" if refused is None else f"the lease {refused[0]}"
                raise ApplicationInUseError(
                    f"another process changed {changed} of the application "
                    f"{self._settings.application_name!r} at this moment; run the command again"
                )

    def _record(self, identity: ApplicationIdentity, record: ApplicationRecord | None) -> None:
        if not self._coordinator_table.put_application(identity, replacing=record):
            raise ApplicationInUseError(
                "another process changed the identity of the application "
                f"{self._settings.application_name!r} at this moment; run the command again"
            )

    def _require_no_workers(self) -> tuple[Lease, ...]:
        leases = self._unowned_leases()
        rows = self._worker_rows()
        if rows:
            period = self._settings.worker.worker_metrics_reporter_freq_in_millis / 1000
            self._clock.sleep(REPORTS * period)
            for worker_id, row in self._worker_rows().items():
                if rows.get(worker_id) != row:
                    self._refuse(f"the worker {printable(worker_id)} is running")
        return leases

    def _worker_rows(self) -> dict[str, WorkerMetrics | BadRow]:
        """Return all rows by worker id. A row that cannot be read may belong to a live worker."""
        listing = self._worker_table.scan_workers()
        self._rejected.note_all(listing.bad_rows)
        readable = {row.worker_id: row for row in listing.workers}
        return readable | {row.key: row for row in listing.bad_rows}

    def _unowned_leases(self) -> tuple[Lease, ...]:
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

    def _acquire_lock(self) -> None:
        deadline = self._clock.monotonic() + LOCK_SECONDS
        while not self._election.try_lead():
            if self._clock.monotonic() >= deadline:
                raise ApplicationInUseError(
                    f"{self._election.seen_owner} leads the application and does not release its "
                    f"lock within {LOCK_SECONDS:.0f} s; stop it, then run {ACCEPT_STREAMS} again"
                )
            self._clock.sleep(POLL_SECONDS)

    def _delete_leases(self) -> int:
        deleted, empty_scans = 0, 0
        while empty_scans < EMPTY_SCANS:
            leases = self._unowned_leases()
            empty_scans = 0 if leases else empty_scans + 1
            for number, lease in enumerate(leases):
                if number % WRITES_AT_ONCE == 0 and not self._election.confirm():
                    raise ApplicationInUseError(
                        "another process has acquired the leader lock; run the command again"
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


def _with_sink(
    configured: ApplicationIdentity, before: ApplicationIdentity | None
) -> ApplicationIdentity:
    """Return the identity of a start with the recorded sink, if there is a record."""
    if before is None:
        return configured
    return replace(configured, sink=before.sink, changing=False)

"""Drain a worker, balance the leases now, and hand a lease to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import ApplicationInUseError, NotFoundError, SettingsError
from kcl_pipeline.leases.application.control import BalanceRequest, words
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.text import printable

POLL_SECONDS: Final = 0.5
REPORTS: Final = 3.0
"""Reporting periods without a change of its row after which a worker gets no lease."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a drain.

    Attributes:
        worker_id: The worker.
        leases: Keys of the leases that it held at the beginning.
        ended: Whether it has ended: its row is gone, or another process uses its name.
    """

    worker_id: str
    leases: tuple[str, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move.

    Attributes:
        lease_key: The lease.
        from_worker: Its owner before. None: it had none.
        to_worker: Its owner afterwards.
        graceful: Whether the former owner hands the lease over.
        done: Whether the new owner has the lease. False: the handoff runs.
    """

    lease_key: str
    from_worker: str | None
    to_worker: str
    graceful: bool
    done: bool


class Moving:
    """Moves leases of one application."""

    def __init__(self, app: ApplicationControl) -> None:
        self._app = app

    def drain(self, worker_id: str, *, wait_seconds: float, dry_run: bool = False) -> Drained:
        """Request a worker to end. Its leases go to the other workers.

        Raises:
            NotFoundError: There is no such worker.
            SettingsError: It is a worker of the Java KCL, which knows no request.
        """
        row = self._own_worker(worker_id)
        leases = tuple(
            one.lease_key for one in self._app.held_leases() if one.actual_owner == worker_id
        )
        if dry_run:
            return Drained(worker_id, leases, ended=False)
        if not row.drain_requested and not self._app.workers.request_drain(worker_id):
            return Drained(worker_id, leases, ended=True)
        deadline = self._app.clock.monotonic() + wait_seconds
        while True:
            found = self._row(worker_id)
            if found is None or found.run_id != row.run_id:
                return Drained(worker_id, leases, ended=True)
            if self._app.clock.monotonic() >= deadline:
                return Drained(worker_id, leases, ended=False)
            self._app.clock.sleep(POLL_SECONDS)

    def balance(self, request_id: UUID, *, wait_seconds: float) -> bool:
        """Request the leader to balance the leases in its next cycle.

        Returns:
            Whether a leader took the request within the time. A Java leader never does.

        Raises:
            ApplicationInUseError: The application is paused, has never been started, or another
                process requested it at this moment.
        """
        table, clock = self._app.coordinator, self._app.clock
        found = table.read_control()
        if found.pause is not None:
            raise ApplicationInUseError(
                f"the application {self._app.name!r} is {found.pause.sentence}; resume it first"
            )
        request = BalanceRequest(str(request_id), words(self._app.by))
        if not table.put_balance(request, replacing=found):
            raise ApplicationInUseError(
                f"the request for the application {self._app.name!r} was not stored: no worker has "
                "started yet, or another process stored one at this moment; try again"
            )
        deadline = clock.monotonic() + wait_seconds
        while table.read_control().balance == request:
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(POLL_SECONDS)
        return True

    def move(
        self, lease_key: str, to_worker: str, *, wait_seconds: float, dry_run: bool = False
    ) -> Moved:
        """Hand a lease to a worker: by a handoff from a living owner, else at once.

        The write is conditional on the owner that was read. The leader may move the lease again
        when it balances.

        Raises:
            NotFoundError: There is no such lease or worker.
            SettingsError: The lease or the worker takes part in no move now.
            ApplicationInUseError: The lease changed at this moment, or the application is paused.
        """
        lease = self._movable(lease_key, to_worker)
        self._require_living(to_worker)
        control = self._app.coordinator.read_control()
        if control.pause is not None:
            raise ApplicationInUseError(
                f"the application {self._app.name!r} is {control.pause.sentence}; resume it first"
            )
        graceful = (
            lease.owner is not None and self._app.settings.lease.is_graceful_lease_handoff_enabled
        )
        before = lease.owner
        if dry_run:
            return Moved(lease_key, before, to_worker, graceful, done=False)
        row = (
            self._app.leases.initiate_handoff(lease, to_worker)
            if graceful
            else self._app.leases.assign(lease, to_worker, unrenewed=before is None)
        )
        if row is None:
            raise ApplicationInUseError(
                f"the lease {printable(lease_key)} changed at this moment; look with "
                "`kcl-pipeline status`, and try again"
            )
        done = self._wait_for(lease_key, to_worker, wait_seconds)
        return Moved(lease_key, before, to_worker, graceful, done=done)

    def _movable(self, lease_key: str, to_worker: str) -> Lease:
        lease = self._app.leases.get(lease_key)
        shown = printable(lease_key)
        if lease is None:
            raise NotFoundError(
                f"there is no lease {shown}; `kcl-pipeline status` lists them", operation="GetItem"
            )
        if lease.ended:
            raise SettingsError(f"the shard of the lease {shown} is finished; nothing is left")
        if lease.in_handoff:
            raise SettingsError(
                f"the lease {shown} is in a handoff from {lease.checkpoint_owner} to {lease.owner};"
                " wait until it is complete"
            )
        if lease.owner == to_worker:
            raise SettingsError(f"the worker {printable(to_worker)} has the lease {shown} already")
        return lease

    def _require_living(self, worker_id: str) -> None:
        """Refuse a worker that ends, or has not reported while this process looks."""
        clock = self._app.clock
        row = self._row(worker_id)
        if row is None:
            raise NotFoundError(
                f"there is no worker {printable(worker_id)}; `kcl-pipeline status` lists them",
                operation="Scan",
            )
        if row.drain_requested:
            raise SettingsError(f"the worker {printable(worker_id)} is requested to end")
        limit = REPORTS * self._app.report_seconds
        # The clocks of two hosts are compared only to save the wait for a report.
        if abs(clock.wall() - row.last_update_seconds) <= limit:
            return
        deadline = clock.monotonic() + limit
        while self._row(worker_id) == row:
            if clock.monotonic() >= deadline:
                raise SettingsError(
                    f"the worker {printable(worker_id)} has not reported for {limit:.0f} s; name a "
                    "worker that runs"
                )
            clock.sleep(POLL_SECONDS)

    def _own_worker(self, worker_id: str) -> WorkerMetrics:
        row = self._row(worker_id)
        if row is None:
            raise NotFoundError(
                f"there is no worker {printable(worker_id)}; `kcl-pipeline status` lists them",
                operation="Scan",
            )
        if row.run_id is None:
            raise SettingsError(
                f"{printable(worker_id)} is a worker of the Java KCL, which knows no request to "
                "end; stop its process"
            )
        return row

    def _row(self, worker_id: str) -> WorkerMetrics | None:
        rows = self._app.workers.scan_workers().workers
        return next((row for row in rows if row.worker_id == worker_id), None)

    def _wait_for(self, lease_key: str, to_worker: str, wait_seconds: float) -> bool:
        clock = self._app.clock
        deadline = clock.monotonic() + wait_seconds
        while True:
            row = self._app.leases.get(lease_key)
            if row is None or (row.owner == to_worker and not row.in_handoff):
                return row is not None
            if row.owner != to_worker or clock.monotonic() >= deadline:
                return False
            clock.sleep(POLL_SECONDS)

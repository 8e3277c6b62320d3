"""Request a worker to end, and wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import NotFoundError, SettingsError
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.text import printable

POLL_SECONDS: Final = 0.5


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


def drain(
    app: ApplicationControl, worker_id: str, *, wait_seconds: float, dry_run: bool = False
) -> Drained:
    """Request a worker to end. Its leases go to the other workers.

    Raises:
        NotFoundError: There is no such worker.
        SettingsError: It is a worker of the Java KCL, which knows no request.
    """
    row = _row(app, worker_id)
    if row is None:
        raise NotFoundError(
            f"there is no worker {printable(worker_id)}; `kcl-pipeline status` lists them",
            operation="Scan",
        )
    if row.run_id is None:
        raise SettingsError(
            f"{printable(worker_id)} is a worker of the Java KCL, which knows no request to end; "
            "stop its process"
        )
    leases = tuple(le.lease_key for le in app.held_leases() if le.actual_owner == worker_id)
    if dry_run:
        return Drained(worker_id, leases, ended=False)
    if not row.drain_requested and not app.workers.request_drain(worker_id):
        return Drained(worker_id, leases, ended=True)
    deadline = app.clock.monotonic() + wait_seconds
    while True:
        current = _row(app, worker_id)
        if current is None or current.run_id != row.run_id:
            return Drained(worker_id, leases, ended=True)
        if app.clock.monotonic() >= deadline:
            return Drained(worker_id, leases, ended=False)
        app.clock.sleep(POLL_SECONDS)


def _row(app: ApplicationControl, worker_id: str) -> WorkerMetrics | None:
    rows = app.workers.scan_workers().workers
    return next((row for row in rows if row.worker_id == worker_id), None)

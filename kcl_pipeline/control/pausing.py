"""Pause and resume an application, and request one worker to end.

A pause is stored in the coordinator-state table. The leader assigns nothing while it is there, no
worker starts, and the workers are requested to end. They commit what is in flight, write their
checkpoints and release their leases. A worker of the Java KCL knows no pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import ApplicationInUseError, NotFoundError, SettingsError
from kcl_pipeline.leases.application import Control, Pause, words
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.text import counted, printable

POLL_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 120.0
"""Default time that a command waits for the workers. A batch may take that long."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The result of a pause.

    Attributes:
        pause: The pause that is stored.
        is_new: Whether this call stored it.
        held: Leases of workers of this package that are not released yet, by key.
        java: Leases that workers of the Java KCL hold, by key. A pause does not stop them.
        evicted: Leases whose owner had stopped renewing, and which this call released.
    """

    pause: Pause
    is_new: bool
    held: dict[str, str] = field(default_factory=dict)
    java: dict[str, str] = field(default_factory=dict)
    evicted: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """What the pause has achieved."""
        lines = [self.pause.sentence if self.is_new else f"already {self.pause.sentence}"]
        if self.evicted:
            leases = counted(len(self.evicted), "lease")
            lines.append(f"released {leases} of workers that had stopped")
        if self.held:
            names = ", ".join(sorted(set(self.held.values())))
            lines.append(f"{counted(len(self.held), 'lease')} still held by {names}")
        else:
            lines.append("no lease is held by a worker of this package")
        if self.java:
            names = ", ".join(sorted(set(self.java.values())))
            lines.append(
                f"warning: {counted(len(self.java), 'lease')} held by workers of the Java KCL, "
                f"which a pause does not stop: {names}"
            )
        return lines


class Pausing:
    """Pauses and resumes one application.

    Args:
        app: The application.
    """

    def __init__(self, app: ApplicationControl) -> None:
        self._app = app
        self._counters: dict[str, tuple[int, float]] = {}
        self._evicted: list[str] = []

    def pause(self, reason: str = "", *, wait_seconds: float = WAIT_SECONDS) -> Paused:
        """Store the pause, request the workers to end, and wait until no lease is held.

        Args:
            reason: Shown wherever the pause is shown.
            wait_seconds: Longest wait. 0: the workers end after their next report.

        Raises:
            ApplicationInUseError: The application has never been started, or another process
                changed the pause at this moment.
        """
        found = self._app.coordinator.read_control()
        pause, is_new = found.pause, found.pause is None
        if pause is None:
            pause = Pause(words(self._app.by), int(self._app.clock.wall() * 1000), words(reason))
            if not self._app.coordinator.put_pause(pause, replacing=found):
                raise ApplicationInUseError(_refusal(self._app.name))
        clock = self._app.clock
        deadline = clock.monotonic() + wait_seconds
        while True:
            held, java = self._look()
            if not held or clock.monotonic() >= deadline:
                return Paused(pause, is_new, held, java, tuple(self._evicted))
            clock.sleep(POLL_SECONDS)

    def _look(self) -> tuple[dict[str, str], dict[str, str]]:
        """Request drains, release expired leases, and return the leases that are held by owner."""
        rows = self._app.workers.scan_workers().workers
        for row in rows:
            if row.run_id is not None and not row.drain_requested:
                self._app.workers.request_drain(row.worker_id, for_pause=True)
        java_ids = {row.worker_id for row in rows if row.run_id is None}
        held: dict[str, str] = {}
        java: dict[str, str] = {}
        for lease in self._app.held_leases():
            owner = lease.actual_owner or ""
            if owner in java_ids:
                java[lease.lease_key] = owner
            elif not self._is_evicted(lease):
                held[lease.lease_key] = owner
        return held, java

    def _is_evicted(self, lease: Lease) -> bool:
        """Release a lease that nobody has renewed for the failover time. The write is conditional.

        A leader does this with an assignment, but a paused application may have no leader. The time
        is that of this process: it began to look when it was called.
        """
        now, settings = self._app.clock.monotonic(), self._app.settings
        counter, since = self._counters.setdefault(lease.lease_key, (lease.counter, now))
        if counter != lease.counter:
            self._counters[lease.lease_key] = (lease.counter, now)
            return False
        grace = settings.lease.failover_time_millis + settings.lease_discovery_interval_millis
        if now - since <= grace / 1000:
            return False
        row = self._app.leases.evict(lease)
        if row is None or row.owner is not None:  # a cancelled handoff leaves the owner
            return False
        self._evicted.append(lease.lease_key)
        return True

    def resume(self) -> Control:
        """Remove the pause.

        Returns:
            What was stored before. Without a pause, nothing was changed.

        Raises:
            ApplicationInUseError: Another process changed the pause at this moment.
        """
        found = self._app.coordinator.read_control()
        if found.pause is not None and not self._app.coordinator.put_pause(None, replacing=found):
            raise ApplicationInUseError(_refusal(self._app.name))
        return found


def _refusal(name: str) -> str:
    return (
        f"the pause of the application {name!r} was not changed: no worker has started yet, or "
        "another process changed it at this moment; look with `kcl-pipeline doctor`, and try again"
    )


DRAIN_POLL_SECONDS: Final = 0.5


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

    @property
    def sentence(self) -> str:
        """What the drain has achieved."""
        verb = "has ended" if self.ended else "is requested to end"
        return f"{self.worker_id} {verb}; it had {counted(len(self.leases), 'lease')}"


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
        app.clock.sleep(DRAIN_POLL_SECONDS)


def _row(app: ApplicationControl, worker_id: str) -> WorkerMetrics | None:
    rows = app.workers.scan_workers().workers
    return next((row for row in rows if row.worker_id == worker_id), None)

"""Pause and resume an application.

A pause is stored in the coordinator-state table. The leader assigns nothing while it is there, no
worker starts, and the workers are requested to end. They commit what is in flight, write their
checkpoints and release their leases. A worker of the Java KCL knows no pause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import ApplicationInUseError
from kcl_pipeline.leases.application.control import Control, Pause, words
from kcl_pipeline.leases.lease.values import Lease

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


class Pausing:
    """Pauses and resumes one application.

    Args:
        app: The application.
        on_wait: Called after each look with the number of leases that are still held.
    """

    def __init__(
        self, app: ApplicationControl, on_wait: Callable[[int], None] = lambda _: None
    ) -> None:
        self._app = app
        self._on_wait = on_wait
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
        return self.wait(pause, wait_seconds, is_new=is_new)

    def wait(self, pause: Pause, wait_seconds: float, *, is_new: bool = False) -> Paused:
        """Request the workers to end, and wait until no lease of this package is held."""
        clock = self._app.clock
        deadline = clock.monotonic() + wait_seconds
        while True:
            held, java = self._look()
            self._on_wait(len(held))
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

"""Release the leases and the lock of a worker that stops."""

from __future__ import annotations

from typing import Final, Protocol

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.store import MapCallable
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.retry import attempt
from kcl_pipeline.worker.shards.lifecycle import Lifecycle

LEAVE_SECONDS: Final = 5.0
"""How long a stopping worker waits for leases that are in a handoff to it.

Its own leases are released before this wait.
"""
LEAVE_POLL_SECONDS: Final = 0.1
_LAST: Final = "last discovery"


class Release(Protocol):
    """Releases the leases that are held."""

    def __call__(self, *, last: bool) -> None:
        """Release them. `last`: there is no further call."""


class Leaving:
    """Delete the row of a worker, and release its leases and the leader lock."""

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        reporter: WorkerMetricsReporter,
        lifecycle: Lifecycle,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._map = map

    def leave(self, *, hung: bool = False) -> None:
        """Delete the worker's row, write checkpoints, and release leases and lock.

        If the worker is `hung`, no checkpoints are written: its processing thread may use the
        consumers. The next owner resolves a pending batch, as after a crash.

        An error of one step does not prevent the next. The row is deleted first, so that a leader
        assigns no more leases to this worker, in particular not the released ones.
        """
        attempt("deregistration", self._reporter.deregister, self._dependencies.events)
        release = self._abandon if hung else self._lifecycle.release_all
        attempt("release", lambda: release(last=False), self._dependencies.events)
        if self._dependencies.leader is not None:
            attempt(
                "release of the leader lock",
                self._dependencies.leader.release,
                self._dependencies.events,
            )
        attempt(_LAST, lambda: self._release_late_leases(release), self._dependencies.events)

    def _abandon(self, *, last: bool) -> None:  # noqa: ARG002 (as `Lifecycle.release_all`)
        """Release all leases of a hung worker. None of its own writes is possible afterwards."""
        list(self._map(self._abandon_one, self._leases.held()))

    def _abandon_one(self, held: Held) -> None:
        if self._dependencies.settings.lease.release_leases_on_shutdown:
            attempt(
                f"release of {held.lease_key}",
                lambda: self._leases.release(held, wait=False),
                self._dependencies.events,
            )
        self._leases.drop(held, "the worker is hung")

    def _release_late_leases(self, release: Release) -> None:
        """Release leases that still name this worker, or are assigned to it during shutdown.

        Otherwise they would stay unread until they expire. These are leases that expired locally
        while threads were joined, that a leader was just assigning, or whose handoff to this worker
        is not complete.
        """
        clock = self._dependencies.clock
        deadline = clock.monotonic() + LEAVE_SECONDS
        while True:
            last = (
                not self._dependencies.settings.lease.release_leases_on_shutdown
                or clock.monotonic() >= deadline
            )
            self._leases.drop_expired()
            attempt(_LAST, lambda: self._leases.discover(map=self._map), self._dependencies.events)
            release(last=last)
            # A lease that is not in a handoff is released by now, or another process with this
            # worker id holds it. There is no reason to wait for it.
            if last or not (self._leases.held() or self._is_something_on_its_way()):
                return
            clock.sleep(LEAVE_POLL_SECONDS)

    def _is_something_on_its_way(self) -> bool:
        """Return whether a handoff to this worker is in progress, or this is unknown now."""
        try:
            keys = self._dependencies.lease_table.lease_keys_of(self._dependencies.worker_id)
            return any(self._is_on_its_way(key) for key in keys)
        except (ThrottledError, UnavailableError) as error:
            self._dependencies.events(AwsTrouble(_LAST, str(error)))
            return True

    def _is_on_its_way(self, lease_key: str) -> bool:
        try:
            row = self._dependencies.lease_table.get(lease_key)
        except ValueError:  # Discovery has just reported that the row is unreadable.
            return False
        return row is not None and row.in_handoff and row.owner == self._dependencies.worker_id

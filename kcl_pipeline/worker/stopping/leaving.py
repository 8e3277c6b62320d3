"""Release the leases and the lock of a worker that stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.threads import MapCallable, Pools, attempt
from kcl_pipeline.worker.consumer import Lifecycle
from kcl_pipeline.worker.dependencies import WorkerDependencies

LEAVE_SECONDS: Final = 4.0
"""How long a stopping worker writes rows, and waits for leases that are in a handoff to it."""
ROW_SECONDS: Final = 1.0
"""How long the release of the leases waits for the deletion of the worker's row."""
LAST_SECONDS: Final = 1.0
"""How long the last release of leases may take, after the time for leaving."""
LEAVE_POLL_SECONDS: Final = 0.1
_LAST: Final = "last discovery"


class Release(Protocol):
    """Releases the leases that are held."""

    def __call__(self, *, last: bool, map: MapCallable) -> None:  # noqa: A002 (as the builtin)
        """Release them through `map`. `last`: there is no further call."""


class Leaving:
    """Delete the row of a worker, and release its leases and the leader lock.

    The thread of the leases renews meanwhile: a lease whose release waits for a slow call does not
    expire. A call that hangs is not waited for: it delays neither the other leases nor the end of
    the process.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        reporter: WorkerMetricsReporter,
        lifecycle: Lifecycle,
        pools: Pools,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._pools = pools

    def leave(self, *, abandoned: bool = False) -> None:
        """Delete the worker's row, write checkpoints, and release leases and lock.

        If the processing thread was `abandoned`, its consumers are not used: it may use them. Then
        the checkpoints are those that renewals would have written.

        An error of one step does not prevent the next. The row is deleted first, so that a leader
        assigns no more leases to this worker, in particular not the released ones.
        """
        clock, worker = self._dependencies.clock, self._dependencies.settings.worker
        deadline = clock.monotonic() + LEAVE_SECONDS
        self._bounded("deregistration", self._reporter.deregister, ROW_SECONDS)
        release: Release = self._abandon if abandoned else self._lifecycle.release_all

        def map_first(call: Callable[[Any], Any], items: Any) -> list[Any]:
            """The checkpoints have half of the time, and the releases the other half."""
            latest = clock.monotonic() + LEAVE_SECONDS / 2
            return self._pools.map_until(call, items, deadline=latest)

        # A record processor may checkpoint before its lease is released
        longest = worker.stop_timeout_millis / 1000 + LEAVE_SECONDS
        self._bounded("release", lambda: release(last=False, map=map_first), longest)
        leader = self._dependencies.leader
        if leader is not None:
            self._bounded("release of the leader lock", leader.release, ROW_SECONDS)
        late = max(deadline - self._dependencies.clock.monotonic(), 0.0) + LAST_SECONDS
        self._bounded(_LAST, lambda: self._release_late_leases(release, deadline), late)

    def leave_to_other(self) -> None:
        """Give the lock up, and write no row of a lease: another process has the worker id.

        It has the rows of the leases, or recovers them. Its own row gets a note, which `status` and
        `doctor` show: a supervisor may start both processes again and again.
        """
        for held in self._leases.held():
            self._leases.drop(held, "another process has taken the worker id")
        leader = self._dependencies.leader
        if leader is not None:
            self._bounded("release of the leader lock", leader.release, ROW_SECONDS)
        self._bounded("note in the row of the worker", self._reporter.note_taken, LEAVE_SECONDS)

    def _bounded(self, what: str, step: Callable[[], object], seconds: float) -> None:
        """Run a step, and wait at most `seconds` for it."""
        self._pools.map_until(
            lambda _: attempt(what, step, self._dependencies.events),
            [None],
            deadline=self._dependencies.clock.monotonic() + seconds,
        )

    def _abandon(self, *, last: bool, map: MapCallable) -> None:  # noqa: A002, ARG002
        """Release all leases of a worker whose processing thread was abandoned."""
        list(map(self._abandon_lease, self._leases.held()))

    def _abandon_lease(self, held: Held) -> None:
        if self._dependencies.settings.lease.release_leases_on_shutdown:
            attempt(
                f"release of {held.lease_key}",
                lambda: self._leases.release(held, flushes=True),
                self._dependencies.events,
            )
        self._leases.drop(held, "its worker has ended without its processing thread")

    def _release_late_leases(self, release: Release, deadline: float) -> None:
        """Release leases that still name this worker, or are assigned to it during shutdown.

        Otherwise they would stay unread until they expire. These are leases that expired locally
        while threads were joined, that a leader was just assigning, or whose handoff to this worker
        is not complete.
        """
        clock = self._dependencies.clock

        def map_late(call: Callable[[Any], Any], items: Any) -> list[Any]:
            return self._pools.map_until(call, items, deadline=deadline + LAST_SECONDS)

        while True:
            last = (
                not self._dependencies.settings.lease.release_leases_on_shutdown
                or clock.monotonic() >= deadline
            )
            self._leases.drop_expired()
            attempt(_LAST, lambda: self._leases.discover(map=map_late), self._dependencies.events)
            release(last=last, map=map_late)
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

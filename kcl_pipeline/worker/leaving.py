"""The end of a worker: which leases it gives back, and for how long it waits for more."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.store import MapCallable
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.retry import attempt
from kcl_pipeline.worker.shards.lifecycle import Lifecycle

LEAVE_SECONDS: Final = 5.0
"""How long a worker that stops waits for leases on their way to it; its own are released before
that.
"""
LEAVE_POLL_SECONDS: Final = 0.1
_LAST: Final = "last discovery"


class Leaving:
    """Gives back everything that carries the name of a worker."""

    def __init__(
        self,
        worker_id: str,
        parts: WorkerDependencies,
        leases: HeldLeases,
        reporter: WorkerMetricsReporter,
        lifecycle: Lifecycle,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
    ) -> None:
        self._worker_id = worker_id
        self._parts = parts
        self._events = parts.events
        self._leases = leases
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._map = map

    def leave(self) -> None:
        """Delete the worker's row, checkpoint, and release leases and lock.

        An error of one step does not hold up the next. The row goes first: a leader that looks at
        the tables from then on gives nothing more to this worker, least of all the leases that it
        releases.
        """
        attempt("deregistration", self._reporter.deregister, self._events)
        attempt("release", lambda: self._lifecycle.release_all(last=False), self._events)
        if self._parts.leader is not None:
            attempt("release of the leader lock", self._parts.leader.release, self._events)
        attempt(_LAST, self._release_late_leases, self._events)

    def _release_late_leases(self) -> None:
        """Release what carries this worker's name still, or comes to carry it for a short while; it
        would wait for its expiry otherwise.

        That is a lease whose time here ran out while threads were joined, one that a leader was
        just assigning, or one that its old owner is handing over.
        """
        clock = self._parts.clock
        deadline = clock.monotonic() + LEAVE_SECONDS
        while True:
            last = (
                not self._parts.settings.lease.release_leases_on_shutdown
                or clock.monotonic() >= deadline
            )
            self._leases.drop_expired()
            attempt(_LAST, lambda: self._leases.discover(map=self._map), self._events)
            self._lifecycle.release_all(last=last)
            # What is not in a handoff is either given back by now, or another process under this
            # name has it: nothing to wait for
            if last or not (self._leases.held() or self._is_something_on_its_way()):
                return
            clock.sleep(LEAVE_POLL_SECONDS)

    def _is_something_on_its_way(self) -> bool:
        """Whether a lease is being handed to this worker; also when that cannot be told now."""
        try:
            keys = self._parts.lease_table.lease_keys_of(self._worker_id)
            return any(self._is_on_its_way(key) for key in keys)
        except (ThrottledError, UnavailableError) as error:
            self._events(AwsTrouble(_LAST, str(error)))
            return True

    def _is_on_its_way(self, lease_key: str) -> bool:
        try:
            row = self._parts.lease_table.get(lease_key)
        except ValueError:  # it cannot be read, as discovery has just reported
            return False
        return row is not None and row.in_handoff and row.owner == self._worker_id

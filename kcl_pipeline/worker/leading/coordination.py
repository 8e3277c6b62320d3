"""Lead, or take leases without a leader, as KCL 2.x does (protocol §5.7)."""

from __future__ import annotations

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leader.kcl2 import (
    LeaseTaker,
    RollForward,
    followed_version,
    workers_take_leases,
)
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.threads import MapCallable, attempt
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.leading.standby import StandbyLeader
from kcl_pipeline.worker.start import DeletedTables


class Coordination:
    """Decide for one worker whether a leader assigns its leases. One thread calls it.

    In a leaderless application, and while workers of KCL 2.x may run (client version
    UPGRADE_FROM_2X or 2X), the worker takes leases, and the owner of the lock creates and deletes
    them. In other applications only a leader assigns leases: while nobody can lead, no lease is
    assigned.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that it holds.
        map: Reads the leases that it has been given or has taken, possibly in parallel.
        stop: Ends the worker.
        tables: Creates deleted tables.

    Attributes:
        standby: Its standby leader.
        version: The client version of the application, as this worker knows it.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
        stop: StopSignal,
        tables: DeletedTables,
    ) -> None:
        self._tables = tables
        self._dependencies = dependencies
        self._leases = leases
        self.standby = StandbyLeader(dependencies, leases, map, stop)
        self._map = map
        self._stop = stop
        settings = dependencies.settings
        self.version = followed_version(
            settings,
            dependencies.coordinator_table,
            dependencies.worker_id,
            dependencies.clock,
            dependencies.events,
        )
        self._roll_forward = RollForward(
            self.version,
            (dependencies.worker_table, dependencies.lease_table),
            dependencies.events,
            dependencies.spawn,
        )
        self._soon_seconds = settings.lease.renewal_interval_millis / 1000
        failover_millis = settings.lease.failover_time_millis + settings.lease.epsilon_millis
        self._usual_seconds = 2 * failover_millis / 1000
        self._taker = LeaseTaker(
            dependencies.worker_id,
            settings,
            dependencies.lease_table,
            dependencies.clock,
            dependencies.events,
            dependencies.rng,
        )
        self._next_run = dependencies.clock.monotonic()

    def tick(self) -> float:
        """Run what is due; return the seconds until the next call."""
        self._tables.restore(self.version.start)
        attempt("look at the client version", self.version.look, self._dependencies.events)
        self._roll_forward.look()
        pause = self.standby.tick()
        if self._dependencies.leader is not None and self._dependencies.leader.misses_table:
            self._tables.note()
        if self._stop.is_set() or not self._takes_leases():
            return pause
        now = self._dependencies.clock.monotonic()
        if now >= self._next_run:
            self._next_run = now + self._run()
        return min(pause, max(self._next_run - self._dependencies.clock.monotonic(), 0.0))

    def _takes_leases(self) -> bool:
        """Return whether workers take leases from each other; forget what was seen if not."""
        takes = workers_take_leases(self._dependencies.settings, self.version)
        if not takes:
            self._taker.forget()
        return takes

    def _run(self) -> float:
        """Take leases; return the seconds until the next run.

        After a refused write, and while the worker has no lease, the next run comes soon. As in
        KCL, others follow after twice the failover time.
        """
        try:
            result = self._taker.run()
        except AwsError as error:
            self._dependencies.events(AwsTrouble("scan of a worker without a leader", str(error)))
            return self._soon_seconds
        if result.taken and not self._stop.is_set():
            self._leases.discover(result.taken, map=self._map)
        is_soon = result.must_repeat or not self._leases.held()
        return self._soon_seconds if is_soon else self._usual_seconds

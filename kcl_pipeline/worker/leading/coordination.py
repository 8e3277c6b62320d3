"""Lead, or take leases without a leader: as configured, and while nobody leads (protocol §5.7)."""

from __future__ import annotations

import math
from typing import Final

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, CoordinationChanged
from kcl_pipeline.leader.migration.client_version import followed_version
from kcl_pipeline.leader.taking import LeaseTaker
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.store import MapCallable
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaderLock, UnreadableLock
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.leading.standby import StandbyLeader
from kcl_pipeline.worker.retry import attempt
from kcl_pipeline.worker.tables import DeletedTables

LOOKS: Final = 6
"""Reads of the lock, by a worker that never leads, in the time after which it falls back."""


class Coordination:
    """Decide for one worker whether a leader assigns its leases. One thread calls it.

    In a leaderless application, and while workers of KCL 2.x may run (client version
    UPGRADE_FROM_2X or 2X), the worker takes leases, and whoever has the lock creates and deletes
    them. In other applications it takes leases from the time when nobody has led for
    `leaderless_after_millis` until somebody does.

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
        self._is_leaderless = settings.coordination == "leaderless"
        self.version = followed_version(
            settings,
            dependencies.coordinator_table,
            dependencies.worker_id,
            dependencies.clock,
            dependencies.events,
        )
        self._was_2x = False
        self._after_seconds = settings.assignment.leaderless_after_millis / 1000
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
        looks = self._after_seconds / LOOKS
        self._watch = LockWatch(dependencies.coordinator_table, dependencies.clock, looks)
        self._has_fallen_back = False
        self._next_run = dependencies.clock.monotonic()

    def tick(self) -> float:
        """Run what is due; return the seconds until the next call."""
        self._tables.restore(self.version.start)
        attempt("look at the client version", self.version.look, self._dependencies.events)
        self._restore_tables()
        pause = self.standby.tick()
        if self._dependencies.leader is not None and self._dependencies.leader.misses_table:
            self._tables.note()
        if self._stop.is_set() or not self._takes_leases():
            return pause
        now = self._dependencies.clock.monotonic()
        if now >= self._next_run:
            self._next_run = now + self._run()
        return min(pause, max(self._next_run - self._dependencies.clock.monotonic(), 0.0))

    def _restore_tables(self) -> None:
        """Create index and worker-metrics table again after a roll forward from the version 2X.

        KCL's migration tool deletes both in a rollback. The index may take minutes.
        """
        was_2x, self._was_2x = self._was_2x, self.version.is_2x
        if was_2x and not self._was_2x:
            tables = (self._dependencies.worker_table, self._dependencies.lease_table)

            def restore() -> None:
                for table in tables:
                    attempt("creation of tables", table.ensure_exists, self._dependencies.events)

            self._dependencies.spawn("tables", restore)

    def _shares_leases(self) -> bool:
        """Return whether no leader assigns leases in this application."""
        return self._is_leaderless or self.version.is_leaderless

    def _takes_leases(self) -> bool:
        if self._shares_leases():
            return True
        seconds = self._dependencies.clock.monotonic() - self._led_at()
        is_absent = seconds >= self._after_seconds
        if is_absent != self._has_fallen_back:
            self._has_fallen_back = is_absent
            self._taker.forget()
            reason = f"nobody has led for {seconds:.0f} s" if is_absent else "somebody leads"
            self._dependencies.events(
                CoordinationChanged(self._dependencies.worker_id, is_absent, reason)
            )
        return is_absent

    def _led_at(self) -> float:
        """Return when somebody was last known to lead, in monotonic seconds."""
        leader = self._dependencies.leader
        if leader is not None:
            return leader.led_at
        attempt("GetItem Leader", self._watch.look, self._dependencies.events)
        return self._watch.led_at

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


class LockWatch:
    """Observes the leader lock for a worker that never leads.

    Args:
        table: The coordinator-state table.
        clock: The clock.
        pause_seconds: Time between two reads.

    Attributes:
        led_at: When a new version was last seen, in monotonic seconds; first the creation time.
    """

    def __init__(self, table: CoordinatorStateTable, clock: Clock, pause_seconds: float) -> None:
        self._table = table
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._next_look = -math.inf
        self._last: LeaderLock | UnreadableLock | None = None
        self.led_at = clock.monotonic()

    def look(self) -> None:
        """Read the lock if it is time to.

        Raises:
            AwsError: It cannot be read.
        """
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._pause_seconds
        found = self._table.observe_lock(consistent=False)
        if found != self._last and isinstance(found, LeaderLock) and not found.is_released:
            self.led_at = now
        self._last = found

"""Run leader cycles inside a worker while no other process leads."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.threads import MapCallable
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker_status import UnavailableStream

_WATCHER_SECONDS: Final = 0.5
_STANDBY_SECONDS: Final = 2.0
_SHORTEST_SECONDS: Final = 0.2
_SECONDS_PER_LEASE: Final = 0.001
"""A scan of 1,000 leases costs 40 to 50 read units: a leader uses half of a table of 100."""
_DUTY: Final = 3.0
"""A cycle takes at most a quarter of the time."""
_FEW_LEASES: Final = 1_000


class StandbyLeader:
    """Run leader cycles when the lock has not been renewed for its duration. One thread calls it.

    Leases that a cycle assigns to its own worker are read by key at once, without the index.
    Handoffs from its own worker are noticed at once, without the next renewal. While another
    process leads, and a worker seems to have stopped, the own worker looks for leases more often.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
        stop: StopSignal,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._map = map
        self._stop = stop
        self._absent_since: float | None = None
        self.unavailable: tuple[UnavailableStream, ...] | None = None
        """Streams that the last cycle could not use. None: this worker did not lead in it."""

    def tick(self) -> float:
        """Run a cycle if this process may lead; return the seconds until the next."""
        leader = self._dependencies.leader
        if leader is None or self._stop.is_set():
            return self._longest_pause
        if not self._may_lead():
            return self._longest_pause
        report = leader.run_once()
        self.unavailable = report.unavailable if report.led else None
        self._take(report)
        if not report.led and leader.is_a_lease_silent():
            self._leases.expect_changes()
        return self._pause_seconds(report, is_watcher=leader.is_watcher)

    def _pause_seconds(self, report: CycleReport, *, is_watcher: bool) -> float:
        """Return the seconds until the next cycle. An interval in the settings is kept.

        A short pause finds an expired lease soon. The cost of scans bounds it from below: their
        time, and the read units of the table. The failover time bounds it from above: a scan that
        takes longer than a quarter of it is throttled, and may take all of it.
        """
        settings, longest = self._dependencies.settings, self._longest_pause
        if settings.assignment.lease_assignment_interval_millis is not None:
            return longest
        if not report.led:
            return min(_WATCHER_SECONDS if is_watcher else _STANDBY_SECONDS, longest)
        failover_seconds = settings.lease.failover_time_millis / 1000
        leases = len(report.leases)
        share = 10 if leases <= _FEW_LEASES else 4
        usual = failover_seconds / share
        if report.seconds > failover_seconds / 4:
            usual = failover_seconds
        if report.error is not None:
            return usual
        shortest = max(_SHORTEST_SECONDS, _SECONDS_PER_LEASE * leases)
        return min(max(shortest, _DUTY * report.seconds), usual)

    @property
    def _longest_pause(self) -> float:
        leader, settings = self._dependencies.leader, self._dependencies.settings
        lock = settings.leader if leader is None else leader.lock_settings
        return (
            min(settings.lease_assignment_interval_millis, lock.leader_heartbeat_period_millis)
            / 1000
        )

    def _take(self, report: CycleReport) -> None:
        leaving = [
            lease.lease_key
            for lease in report.leases
            if lease.checkpoint_owner == self._dependencies.worker_id
        ]
        if leaving:
            self._leases.note_handoffs(leaving, map=self._map)
        mine = [
            lease.lease_key
            for lease in report.leases
            if lease.owner == self._dependencies.worker_id and not lease.in_handoff
        ]
        if mine and not self._stop.is_set():
            self._leases.discover(mine, map=self._map)

    def _may_lead(self) -> bool:
        """Return whether to try to lead. For `leader_patience_seconds` the sensor goes first.

        The wait applies only while the lock row is absent.
        """
        if self._dependencies.leader_patience_seconds <= 0:
            return True
        try:
            is_absent = self._dependencies.coordinator_table.observe_lock(consistent=False) is None
        except AwsError as error:
            self._dependencies.events(AwsTrouble("GetItem Leader", str(error)))
            return False
        now = self._dependencies.clock.monotonic()
        if not is_absent:
            self._absent_since = None
            return True
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since >= self._dependencies.leader_patience_seconds

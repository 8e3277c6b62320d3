"""Run leader cycles inside a worker while no other process leads."""

from __future__ import annotations

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.store import MapCallable
from kcl_pipeline.worker.dependencies import WorkerDependencies


class StandbyLeader:
    """Run leader cycles when the lock has not been renewed for its duration. One thread calls it.

    Leases that a cycle assigns to its own worker are read by key at once, without the index.
    """

    def __init__(
        self,
        worker_id: str,
        parts: WorkerDependencies,
        leases: HeldLeases,
        map: MapCallable,  # noqa: A002 (it stands for the builtin)
        stop: StopSignal,
    ) -> None:
        self._worker_id = worker_id
        self._parts = parts
        self._leases = leases
        self._map = map
        self._stop = stop
        self._absent_since: float | None = None

    def tick(self) -> float:
        """Run a cycle if this process may lead; return the seconds until the next."""
        leader = self._parts.leader
        if leader is not None and not self._stop.is_set() and self._may_lead():
            self._take(leader.run_once())
        settings = self._parts.settings
        return (
            min(
                settings.lease_assignment_interval_millis,
                settings.leader.leader_heartbeat_period_millis,
            )
            / 1000
        )

    def _take(self, report: CycleReport) -> None:
        mine = [
            lease.lease_key
            for lease in report.leases
            if lease.owner == self._worker_id and not lease.in_handoff
        ]
        if mine and not self._stop.is_set():
            self._leases.discover(mine, map=self._map)

    def _may_lead(self) -> bool:
        """Return whether to try to lead. For `leader_patience_seconds` the sensor goes first.

        The wait applies only while the lock row is absent.
        """
        if self._parts.leader_patience_seconds <= 0:
            return True
        try:
            is_absent = self._parts.coordinator_table.observe_lock() is None
        except AwsError as error:
            self._parts.events(AwsTrouble("GetItem Leader", str(error)))
            return False
        now = self._parts.clock.monotonic()
        if not is_absent:
            self._absent_since = None
            return True
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since >= self._parts.leader_patience_seconds

"""A drain that ends as drained has committed what the streams had at its start (L10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcl_pipeline.worker.summary import StopReason, WorkerSummary

if TYPE_CHECKING:
    from verification.simulation.checks.sink import Checks
    from verification.simulation.environment.machines import Machine

SHUTDOWN_SECONDS: Final = 10.0
"""In this time before the summary, other workers owned what the drain did not wait for."""


class DrainCheck:
    """Create it when a drain starts. The events that are not committed then are waited for."""

    def __init__(self, checks: Checks, machine: Machine) -> None:
        self._checks = checks
        self._machine = machine
        self._waiting = checks.missing() if machine.mode == "drain" else set()
        self._rewinds = checks.rewinds

    def failures(self, summary: WorkerSummary) -> list[str]:
        """Return the failed check, if the drain says that it is complete and it is not.

        What it has committed may be gone if a seek, or a copy of the table, came after.
        """
        if summary.reason is not StopReason.DRAINED or self._checks.rewinds != self._rewinds:
            return []
        events, elsewhere = self._checks.ledger.events, self._elsewhere()
        left = sorted(
            one
            for one in self._waiting & self._checks.missing()
            if self._reads(events[one].lease_name) and events[one].lease_name not in elsewhere
        )
        if not left:
            return []
        name = self._machine.host.name
        return [f"L10: {name} says that it has drained; {len(left)} events are left: {left[:3]}"]

    def _reads(self, lease_name: str) -> bool:
        stream = self._checks.streams.of_name(lease_name)
        return stream is not None and stream.ref in self._machine.configured

    def _elsewhere(self) -> set[str]:
        """Names of leases that another worker owns, or owned when the drain looked last.

        Also those of their descendants, which may have no row yet.
        """
        checks, own = self._checks, (None, self._machine.worker_id)
        begin = checks.now() - SHUTDOWN_SECONDS
        owned = {row.unique_key for row in checks.rows() if row.actual_owner not in own}
        owned |= {
            move.lease_key for move in checks.moves if move.at >= begin and move.before not in own
        }
        names = {checks.ledger.events[one].lease_name for one in self._waiting}
        return {one for one in names if not owned.isdisjoint(checks.ancestry(one))}

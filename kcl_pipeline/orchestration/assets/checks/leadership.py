"""Evaluate the check `leader_present`."""

from dataclasses import dataclass
from typing import Final

import dagster as dg

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaderLock, UnreadableLock
from kcl_pipeline.orchestration.assets.checks.health import Health
from kcl_pipeline.text import duration_text, printable

LEADER: Final = "leader_present"
LEADER_ADVICE: Final = (
    "Without a leader no lease is assigned; workers go on with the leases that they hold. Look at "
    "the tick of the sensor for the error, and run `kcl-pipeline doctor`. See "
    "docs/checks-and-events.md"
)
POLL_SECONDS: Final = 1.0


@dataclass(slots=True)
class LeaderAbsence:
    """Since when this sensor has observed no leader.

    Attributes:
        since: Monotonic seconds. None: there is a leader.
        reason: Why this sensor does not lead.
    """

    since: float | None = None
    reason: str = ""

    def observe(self, *, led: bool, owner: str | None, problem: str | None, now: float) -> None:
        """Add the result of one leader cycle.

        Args:
            led: Whether the cycle led.
            owner: Owner of the lock.
            problem: Why the cycle did not lead, or could not find out who does.
            now: Monotonic seconds.
        """
        is_present = led or (owner is not None and problem is None)
        if is_present:
            self.since = None
        elif self.since is None:
            self.since = now
        self.reason = problem or "nobody has acquired the leader lock"

    def health(self, owner: str | None, now: float, limit_seconds: float) -> Health:
        """Evaluate the check at `now` (monotonic seconds)."""
        seconds = 0.0 if self.since is None else now - self.since
        return leader(owner, seconds, limit_seconds, self.reason)


def leader(owner: str | None, absent_seconds: float, limit_seconds: float, reason: str) -> Health:
    """Whether somebody has led within the limit.

    Args:
        owner: Who leads. None: nobody, or unknown.
        absent_seconds: For how long nobody has led.
        limit_seconds: Longest time that passes.
        reason: Why nobody leads.
    """
    passed = absent_seconds <= limit_seconds
    if absent_seconds:
        text = f"nobody has led for {duration_text(absent_seconds)}: {reason.rstrip('.')}"
    else:
        text = f"{printable(owner or 'unknown')} leads"
    return Health(
        LEADER,
        passed,
        text if passed else f"{text}. {LEADER_ADVICE}",
        dg.AssetCheckSeverity.ERROR,
        {"absent_seconds": round(absent_seconds, 1)},
    )


def observe_leader(table: CoordinatorStateTable, limit_seconds: float, clock: Clock) -> Health:
    """Evaluate the check by observing the lock: a leader changes it with every heartbeat.

    It returns at the first change, at the latest after the limit.
    """
    begin = clock.monotonic()
    first = found = table.observe_lock()
    while not isinstance(found, LeaderLock) or found.is_released or found == first:
        seconds = clock.monotonic() - begin
        if seconds > limit_seconds:
            return leader(None, seconds, limit_seconds, _reason(found))
        clock.sleep(POLL_SECONDS)
        found = table.observe_lock()
    return leader(found.owner_name, 0.0, limit_seconds, "")


def _reason(lock: LeaderLock | UnreadableLock | None) -> str:
    if isinstance(lock, UnreadableLock):
        return lock.reason
    if lock is None:
        return "there is no leader lock; no worker has started yet"
    if lock.is_released:
        return "the leader lock is released"
    return f"{printable(lock.owner_name)} does not renew its leader lock"

"""Find out which workers and leaders of an application are alive.

Rows of stopped workers stay for a day, and a lock without a heartbeat stays until it is taken. So
the existence of a row proves nothing. The rows are read twice or more, and what changes between
two reads of this process belongs to a living process. Clocks of two hosts are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leases.state.values import LeaderLock, UnreadableLock
from kcl_pipeline.text import printable

POLL_SECONDS: Final = 1.0
REPORTS: Final = 3.0
"""Reporting periods without a change after which a worker counts as stopped."""
JAVA_PERIOD_SECONDS: Final = 30.0
"""Longest default period of the Java KCL, for reports and for heartbeats of the lock."""
SHORTEST_PERIOD_SECONDS: Final = 1.0
"""`lut` has whole seconds, so a row does not change more often."""
_MOST_LOCK_SECONDS: Final = 150.0


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """The rows of one read.

    Attributes:
        workers: By worker id, what each report of the worker changes.
        leases: By lease key, the owner and the counter, which each renewal increments.
        leader: Owner of the leader lock and what each heartbeat changes. None: nobody holds it.
        has_unknown: Whether a row may be that of a Java worker, whose period is longer.
        lock_seconds: Duration of the lock.
    """

    workers: Mapping[str, Hashable] = field(default_factory=dict)
    leases: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    leader: tuple[str, Hashable] | None = None
    has_unknown: bool = False
    lock_seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no row can belong to a living process."""
        return not self.workers and not self.leases and self.leader is None


class ProcessObserver:
    """Observes the rows of one application."""

    def __init__(self, app: ApplicationControl) -> None:
        self._app = app

    def look(self) -> ObservedRows:
        """Read the rows. A missing table has none.

        Raises:
            AwsError: A table cannot be read.
        """
        workers: dict[str, Hashable] = {}
        has_unknown = False
        try:
            listing = self._app.workers.scan_workers()
        except NotFoundError:
            pass
        else:
            for row in listing.workers:
                values = tuple(sorted((name, tuple(v)) for name, v in row.stats.items()))
                workers[row.worker_id] = (row.last_update_seconds, values, row.run_id)
                has_unknown |= row.run_id is None
            for bad in listing.bad_rows:
                workers[bad.key] = bad.heartbeat
                has_unknown = True
        leases = self._leases()
        owner, seconds = self._leader()
        return ObservedRows(workers, leases, owner, has_unknown, seconds)

    def seconds(self, rows: ObservedRows) -> float:
        """Return how long the rows must not change. 0: there is nothing to observe."""
        if rows.is_empty:
            return 0.0
        settings = self._app.settings
        period = max(self._app.report_seconds, SHORTEST_PERIOD_SECONDS)
        if rows.has_unknown:
            period = max(period, JAVA_PERIOD_SECONDS)
        lease = settings.lease.failover_time_millis + settings.lease_discovery_interval_millis
        lock = min(rows.lock_seconds, _MOST_LOCK_SECONDS)
        return max(REPORTS * period if rows.workers else 0.0, lease / 1000, lock)

    def living(
        self, on_wait: Callable[[float], None] = lambda _: None
    ) -> tuple[ObservedRows, tuple[str, ...]]:
        """Observe the rows.

        The wait ends early, one reporting period after its start, if a process is alive.

        Args:
            on_wait: Called once with the seconds of the observation.

        Returns:
            The last read, and one sentence per living process.
        """
        clock = self._app.clock
        first = last = self.look()
        began, seconds = clock.monotonic(), self.seconds(first)
        found: dict[str, None] = {}
        if seconds:
            on_wait(seconds)
        while clock.monotonic() - began < seconds:
            clock.sleep(min(POLL_SECONDS, seconds))
            last, before = self.look(), last
            found |= dict.fromkeys(changes(before, last))
            if found and clock.monotonic() - began >= self._app.report_seconds:
                break
        return last, tuple(found)

    def _leases(self) -> dict[str, tuple[str, int]]:
        try:
            listing = self._app.leases.list_leases()
        except NotFoundError:
            return {}
        return {
            one.lease_key: (one.actual_owner or one.owner or "", one.counter)
            for one in listing.leases
            if one.owner is not None or one.checkpoint_owner is not None
        }

    def _leader(self) -> tuple[tuple[str, Hashable] | None, float]:
        try:
            lock = self._app.coordinator.observe_lock()
        except NotFoundError:
            return None, 0.0
        match lock:
            case LeaderLock(is_released=False):
                return (lock.owner_name, lock.version), lock.lease_duration_millis / 1000
            case UnreadableLock():
                values = tuple(sorted((name, str(v)) for name, v in lock.attributes.items()))
                return ("an unknown process", values), _MOST_LOCK_SECONDS
            case _:
                return None, 0.0


def changes(before: ObservedRows, after: ObservedRows) -> tuple[str, ...]:
    """Return one sentence per process that wrote between two reads."""
    found = [
        f"the worker {printable(worker_id)} has reported"
        for worker_id, row in sorted(after.workers.items())
        if before.workers.get(worker_id) != row
    ]
    renewing = {
        owner
        for key, (owner, counter) in after.leases.items()
        if before.leases.get(key) != (owner, counter)
    }
    found += [f"the worker {printable(owner)} renews its leases" for owner in sorted(renewing)]
    if after.leader is not None and after.leader != before.leader:
        found.append(f"the leader {printable(after.leader[0])} has renewed its lock")
    return tuple(found)


def candidates(rows: ObservedRows) -> tuple[str, ...]:
    """Return the processes that the rows name, alive or not."""
    owners = {owner for owner, _ in rows.leases.values()}
    names = [f"worker {printable(one)}" for one in sorted(owners | set(rows.workers))]
    if rows.leader is not None:
        names.append(f"leader {printable(rows.leader[0])}")
    return tuple(names)

"""Acquire and hold the leader lock without comparing clocks of two hosts (protocol §3.3)."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Final, TypeVar

from kcl_pipeline.clock import Clock, LastChanges
from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS, ConsumerSettings, LeaderSettings
from kcl_pipeline.errors import AwsError, ThrottledError, UnavailableError
from kcl_pipeline.events import EventSink, LeaderElected, LeadershipLost, RowRejected
from kcl_pipeline.leases.coordinator import CoordinatorStateTable, LeaderLock, UnreadableLock
from kcl_pipeline.leases.row import LEADER_KEY
from kcl_pipeline.leases.store import ConditionCheck
from kcl_pipeline.threads import Spawn

SENSOR_LOCK_MILLIS: Final = 15_000
_SHORTEST_MILLIS: Final = 2_000
_LONGEST_MILLIS: Final = 30_000
UNKNOWN_OWNER: Final = "(unknown: its row cannot be read)"
WRITES_AT_ONCE: Final = 64
"""Number of writes between two checks of lock and deadline."""
_POLL_SECONDS: Final = 0.2
_T = TypeVar("_T")


class NotLeadingError(Exception):
    """Another process has the lock. This process must not write as the leader any more."""


def lock_settings(settings: ConsumerSettings, *, is_sensor: bool) -> LeaderSettings:
    """Return the times of the leader lock.

    A duration that is not set follows the failover time, so that the lock of a leader that stopped
    expires before its leases do. Standbys have watched the leases meanwhile.

    Args:
        settings: All settings.
        is_sensor: Whether the sensor holds the lock. Its ticks are at least 5 s apart.
    """
    leader, chosen = settings.leader, settings.leader.model_fields_set
    if "leader_lease_duration_millis" in chosen:
        return leader
    duration = settings.lease.failover_time_millis * 4 // 5
    duration = min(max(duration, _SHORTEST_MILLIS), _LONGEST_MILLIS)
    if is_sensor:
        duration = max(duration, SENSOR_LOCK_MILLIS)
    heartbeat = duration * 5 // 16
    if "leader_heartbeat_period_millis" in chosen:
        heartbeat = leader.leader_heartbeat_period_millis
    return leader.model_copy(
        update={
            "leader_lease_duration_millis": max(duration, 2 * heartbeat),
            "leader_heartbeat_period_millis": heartbeat,
        }
    )


class LeaderElection:
    """One candidate for the leader lock.

    It belongs to `assign`, whose thread runs `try_lead` once per cycle and `check` before each
    group of writes. `sync` calls `check_term` and `proof` only.

    A lock has expired when its version has not changed for its stored duration. The candidate
    measures this on its own monotonic clock, from its first read of the version.

    With `resume_own_name`, a lock with the name of this candidate is replaced at once. This is for
    the sensor, whose name is used by one process at a time and survives code reloads. If two
    processes use the name for a while (an old code server that still runs a tick), each replacement
    changes the version. So the next heartbeat of the other process is refused, and every phase that
    writes starts with a heartbeat. Writes that run at that time are conditional on the lease rows.

    Args:
        table: The coordinator-state table.
        owner_name: Name of this candidate in the lock row.
        clock: The clock.
        events: Receives events.
        settings: Duration of the lock.
        rng: Creates lock versions.
        resume_own_name: See above.

    Attributes:
        confirmed_at: Start of the last successful write of the lock in monotonic seconds.
        held: The lock, if this candidate holds it.
        seen_owner: Owner of the lock in the last read. None: it had none.
        term: Number of acquisitions. Between two of them, others may have led.
        unreadable: Why the lock could not be read in the last read. None: it could.
        stolen_from: Owner of the expired lock that this candidate has replaced. None: the lock was
            free.
        patience_seconds: How long others may acquire a free or expired lock first. Those who
            observe the leases all the time know at once which have expired.
    """

    def __init__(
        self,
        table: CoordinatorStateTable,
        owner_name: str,
        clock: Clock,
        events: EventSink,
        settings: LeaderSettings,
        rng: Random,
        *,
        resume_own_name: bool = False,
    ) -> None:
        self.owner_name = owner_name
        self.held: LeaderLock | None = None
        self.seen_owner: str | None = None
        self.term = 0
        self.unreadable: str | None = None
        self.stolen_from: str | None = None
        self._table = table
        self._clock = clock
        self._events = events
        self._settings = settings
        self._rng = rng
        self._resume_own_name = resume_own_name
        self.confirmed_at = 0.0
        self._next_version: str | None = None
        self._claim: LeaderLock | None = None
        self._claimed_at = 0.0
        self._changes = LastChanges[str]()
        """Since when the lock of another process has its version."""
        self.patience_seconds = 0.0
        self._free_since: float | None = None

    def try_lead(self) -> bool:
        """Keep the lock by a heartbeat if one is due, or acquire it if it is free or expired.

        Returns:
            Whether this candidate leads.

        Raises:
            AwsError: A call to the table failed. A lock that was held still counts as held.
        """
        if self.held is not None and (not self._is_heartbeat_due() or self.confirm()):
            return True
        return self._acquire()

    def _is_heartbeat_due(self) -> bool:
        return (
            self._next_version is not None
            or self.may_have_expired()
            or self._clock.monotonic() - self.confirmed_at
            >= self._settings.leader_heartbeat_period_millis / 1000
        )

    def confirm(self) -> bool:
        """Send a conditional heartbeat.

        A heartbeat that timed out is repeated with the same version. If it had been applied, the
        table recognises it.

        Returns:
            False if the lock is lost.

        Raises:
            AwsError: A call to the table failed.
        """
        held = self.held
        if held is None:
            return False
        version = self._next_version or self._new_version()
        self._next_version = version
        began = self._clock.monotonic()
        lock = replace(held, lease_duration_millis=self._settings.leader_lease_duration_millis)
        try:
            kept = self._table.heartbeat_lock(lock, version)
        except (UnavailableError, ThrottledError):
            kept = self._table.heartbeat_lock(lock, version)
        self._next_version = None
        if kept:
            self.held = replace(lock, version=version)
            self.confirmed_at = began
            return True
        self.held = None
        self._events(LeadershipLost(self.owner_name, "another process has acquired the lock"))
        return False

    def check(self) -> None:
        """Send a heartbeat of the lock before a group of writes.

        Raises:
            NotLeadingError: Another process has the lock.
        """
        if not self.confirm():
            raise NotLeadingError

    def keep_during(self, call: Callable[[], _T], spawn: Spawn | None) -> _T:
        """Return the result of a call during which heartbeats are sent when they are due.

        A scan of a throttled table and a plan for many leases may last longer than the lock.

        Args:
            call: The call. It uses no method of this object.
            spawn: Starts the thread of the call. None: it runs on the calling thread.

        Raises:
            NotLeadingError: Another process has the lock. The result of the call is dropped.
            Exception: An error of the call.
        """
        if spawn is None:
            return call()
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 (raised below, by the waiting thread)
                errors.append(error)

        thread = spawn("leader-call", run)
        while True:
            thread.join(_POLL_SECONDS)
            if errors:
                raise errors[0]
            if results:
                return results[0]
            if self._is_heartbeat_due():
                with suppress(AwsError):  # the next heartbeat reports trouble with the table
                    self.check()

    def may_have_expired(self) -> bool:
        """Return whether the last heartbeat is so old that another candidate may have the lock."""
        held = self.held
        return (
            held is None
            or self._clock.monotonic() - self.confirmed_at >= held.lease_duration_millis / 1000
        )

    def release(self, reason: str = "released") -> None:
        """Delete the lock row, if the lock is held. Afterwards it counts as not held in any case.

        Raises:
            AwsError: A call to the table failed.
        """
        held, version = self.held, self._next_version
        if held is None:
            return
        self.held = self._next_version = None
        self.seen_owner = None
        self._events(LeadershipLost(self.owner_name, reason))
        if version is not None:
            # The outcome of a heartbeat is unknown; one of the two versions is stored.
            self._table.release_lock(replace(held, version=version))
        self._table.release_lock(held)

    # What `sync` asks on its own thread. It reads memory and makes no call

    def check_term(self, term: int) -> None:
        """Check before a group of writes that this process has led since it began the term.

        If the lock was lost meanwhile, also if it was acquired again, others may have led.

        Raises:
            NotLeadingError: Another process may have the lock.
        """
        if self.term != term or self.may_have_expired():
            raise NotLeadingError

    def proof(self, term: int) -> ConditionCheck:
        """Return the condition that this process holds the lock, as it has since the term began.

        A heartbeat changes the version of the lock, and with it the proof.

        Raises:
            NotLeadingError: Another process may have the lock.
        """
        held = self.held
        self.check_term(term)
        if held is None:
            raise NotLeadingError
        return self._table.proof_of_lock(held)

    # How a candidate acquires the lock

    def _is_held_by_another(self) -> bool:
        """Return whether another process holds the lock, as an eventually consistent read shows.

        This read costs half. A lock that is free or may have expired is read again, consistently.
        """
        if LEADER_KEY not in self._changes or self._claim is not None:
            return False
        read_started = self._clock.monotonic()
        item = self._table.observe_lock(consistent=False)
        if (
            not isinstance(item, LeaderLock)
            or item.is_released
            or item.owner_name == self.owner_name
        ):
            return False
        self.unreadable, self.seen_owner = None, item.owner_name
        return self._age(item.version, read_started) <= item.lease_duration_millis / 1000

    def _age(self, value: object, read_started: float) -> float:
        """Return for how long the lock had this value when the read of it began.

        A change counts from the end of the read, so that a pause of this process during the read
        is not silence of the leader.
        """
        self._changes.observe({LEADER_KEY: value}, self._clock.monotonic())
        return read_started - self._changes.since(LEADER_KEY)

    def _acquire(self) -> bool:
        if self._is_held_by_another():
            return False
        scan_started = self._clock.monotonic()
        item = self._table.observe_lock()
        if isinstance(item, UnreadableLock):
            return self._replace_unreadable(item, scan_started)
        self.unreadable = None
        if item is None or item.is_released:
            self.seen_owner = None
            if self._free_since is None:
                self._free_since = scan_started
            if scan_started - self._free_since < self.patience_seconds:
                return False
            return self._put(item, stolen_from=None)
        self.seen_owner, self._free_since = item.owner_name, None
        if self._claim is not None and item.version == self._claim.version:
            return self._now_leading(self._claim, None, self._claimed_at)
        if self._resume_own_name and item.owner_name == self.owner_name:
            return self._put(item, stolen_from=None)
        lock_seconds = item.lease_duration_millis / 1000
        if self._age(item.version, scan_started) <= lock_seconds + self.patience_seconds:
            return False
        return self._put(item, stolen_from=item.owner_name)

    def _replace_unreadable(self, item: UnreadableLock, scan_started: float) -> bool:
        """Replace an unreadable lock that has not changed for the longest duration of a lock.

        Before that, an unknown process may hold it. Its heartbeats would change the row.
        """
        self.seen_owner = UNKNOWN_OWNER
        if self.unreadable != item.reason:
            self.unreadable = item.reason
            self._events(RowRejected(self._table.name, LEADER_KEY, item.reason))
        if self._age(item.attributes, scan_started) <= MAX_LOCK_DURATION_MILLIS / 1000:
            return False
        return self._put(item, stolen_from=UNKNOWN_OWNER)

    def _put(self, replacing: LeaderLock | UnreadableLock | None, stolen_from: str | None) -> bool:
        lock = LeaderLock(
            self.owner_name, self._settings.leader_lease_duration_millis, self._new_version()
        )
        # If the outcome is unknown, a later read recognises this write by its version.
        self._claim, self._claimed_at = lock, self._clock.monotonic()
        if not self._table.put_lock(lock, replacing=replacing):
            self._claim = None
            return False
        return self._now_leading(lock, stolen_from, self._claimed_at)

    def _now_leading(self, lock: LeaderLock, stolen_from: str | None, confirmed_at: float) -> bool:
        self._claim = self._free_since = None
        self.confirmed_at = confirmed_at
        self._changes = LastChanges[str]()  # the next lock of another process is a new one
        self.term += 1
        self.held = lock
        self.unreadable = None
        self.seen_owner = self.owner_name
        self.stolen_from = stolen_from
        self._events(LeaderElected(self.owner_name, stolen_from))
        return True

    def _new_version(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

"""The leader's lock (protocol §3.3): who leads, without a thread and without comparing the clocks
of two hosts.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from random import Random
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS, LeaderSettings
from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import EventSink, LeaderElected, LeadershipLost, RowRejected
from kcl_pipeline.leases.serialization_state import LEADER_KEY
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaderLock, UnreadableLock

UNKNOWN_OWNER: Final = "(unknown: its row cannot be read)"


class LeaderElection:
    """One candidate. It has no thread: `try_lead` is called once a cycle, `confirm` before each
    phase that writes.

    A lock is stolen when its version has not changed for its own stored duration, measured on the
    observer's monotonic clock from when the observer first had that version in hand. With
    `resume_own_name` a lock that carries this candidate's own name is taken over at once: that is
    for a name which only one process at a time should use and which survives its reloads (the
    sensor's). Should two processes use it for a while (an old code server that is still in a tick),
    each take-over changes the version, so the other one's next heartbeat is refused, and every
    phase that writes begins with a heartbeat; what was already under way is conditional on the
    lease rows.
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
        """Who held the lock when it was last read; None when nobody did."""
        self.term = 0
        """Counts how often this candidate won the lock; between two wins others may have led."""
        self.unreadable: str | None = None
        """Why the lock could not be read when it was last read; None when it could."""
        self.stolen_from: str | None = None
        """Whose expired lock this candidate has taken; None when the lock was free."""
        self._table = table
        self._clock = clock
        self._events = events
        self._settings = settings
        self._rng = rng
        self._resume_own_name = resume_own_name
        self._confirmed_at = 0.0
        self._next_version: str | None = None
        self._claim: LeaderLock | None = None
        self._claimed_at = 0.0
        self._observed: tuple[object, float] | None = None

    def try_lead(self) -> bool:
        """Hold on to the lock, or get it if it is to be had; returns whether this candidate leads.

        Raises the errors of the table; a lock that was held is then still held as far as is known.
        """
        if self.held is not None and self.confirm():
            return True
        return self._acquire()

    def confirm(self) -> bool:
        """A conditional heartbeat: False, and the lock is not held any more, when somebody else has
        it.

        A heartbeat that was applied although it timed out does not cost the lock: the same write is
        asked for again, and the table reads back.
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
            self._confirmed_at = began
            return True
        self.held = None
        self._observed = None
        self._events(LeadershipLost(self.owner_name, "the lock was taken over"))
        return False

    def may_have_expired(self) -> bool:
        """Whether the last heartbeat is so old that somebody else may have the lock by now."""
        held = self.held
        return (
            held is None
            or self._clock.monotonic() - self._confirmed_at >= held.lease_duration_millis / 1000
        )

    def release(self, reason: str = "released") -> None:
        """Give the lock back by deleting the item, if it is held. Raises the errors of the table;
        it counts as not held in any case.
        """
        held, version = self.held, self._next_version
        if held is None:
            return
        self.held = self._next_version = self._observed = None
        self.seen_owner = None
        self._events(LeadershipLost(self.owner_name, reason))
        if version is not None:
            # A heartbeat of unknown outcome: whichever version is stored, it is ours.
            self._table.release_lock(replace(held, version=version))
        self._table.release_lock(held)

    def _acquire(self) -> bool:
        scan_started = self._clock.monotonic()
        item = self._table.observe_lock()
        if isinstance(item, UnreadableLock):
            return self._wait_out(item, scan_started)
        self.unreadable = None
        if item is None or item.is_released:
            self.seen_owner = None
            return self._put(item, stolen_from=None)
        self.seen_owner = item.owner_name
        if self._claim is not None and item.version == self._claim.version:
            return self._now_leading(self._claim, None, self._claimed_at)
        if self._resume_own_name and item.owner_name == self.owner_name:
            return self._put(item, stolen_from=None)
        if self._observed is None or self._observed[0] != item.version:
            self._observed = (item.version, self._clock.monotonic())
            return False
        if scan_started - self._observed[1] <= item.lease_duration_millis / 1000:
            return False
        return self._put(item, stolen_from=item.owner_name)

    def _wait_out(self, item: UnreadableLock, scan_started: float) -> bool:
        """Take over a lock that cannot be read when it has not changed for the longest time that
        a lock may last: until then somebody unknown may hold it. A holder's heartbeat changes it.
        """
        self.seen_owner = UNKNOWN_OWNER
        if self.unreadable != item.reason:
            self.unreadable = item.reason
            self._events(RowRejected(self._table.name, LEADER_KEY, item.reason))
        if self._observed is None or self._observed[0] != item.attributes:
            self._observed = (item.attributes, self._clock.monotonic())
            return False
        if scan_started - self._observed[1] <= MAX_LOCK_DURATION_MILLIS / 1000:
            return False
        return self._put(item, stolen_from=UNKNOWN_OWNER)

    def _put(self, replacing: LeaderLock | UnreadableLock | None, stolen_from: str | None) -> bool:
        lock = LeaderLock(
            self.owner_name, self._settings.leader_lease_duration_millis, self._new_version()
        )
        # Until the outcome is known: an item with this version, found later, is this very write.
        self._claim, self._claimed_at = lock, self._clock.monotonic()
        if not self._table.put_lock(lock, replacing=replacing):
            self._claim = None
            return False
        return self._now_leading(lock, stolen_from, self._claimed_at)

    def _now_leading(self, lock: LeaderLock, stolen_from: str | None, confirmed_at: float) -> bool:
        self._claim = None
        self._confirmed_at = confirmed_at
        self._observed = None
        self.term += 1
        self.held = lock
        self.unreadable = None
        self.seen_owner = self.owner_name
        self.stolen_from = stolen_from
        self._events(LeaderElected(self.owner_name, stolen_from))
        return True

    def _new_version(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

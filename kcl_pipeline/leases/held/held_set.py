"""The set of leases that a worker holds, and the locks for writing their rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError, LeaseLostError
from kcl_pipeline.events import AwsTrouble, DefectFound, EventSink, LeaseGained
from kcl_pipeline.events import LeaseLost as LeaseLostEvent
from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import Position
from kcl_pipeline.unexpected import described

EXPIRED: Final = "it was not renewed in time"


class HeldSet:
    """The leases held by one worker, by key.

    Thread-safe. A lease that is gained again gets a new `Held`; writes through the older one are
    refused. One thread at a time writes a lease. It holds the lock of the lease during the call.
    """

    def __init__(
        self, worker_id: str, failover_seconds: float, clock: Clock, events: EventSink
    ) -> None:
        self._worker_id = worker_id
        self._failover_seconds = failover_seconds
        self._clock = clock
        self._events = events
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._has_lost = False
        """Whether a lease was lost since this process last verified that it has its worker id."""
        self.changed_at = clock.monotonic()
        """Monotonic second at which a lease was gained, lost or expected last; at first, now."""
        self._coming: set[str] = set()

    def held(self) -> tuple[Held, ...]:
        """Return the leases that are held and not locally expired, sorted by key."""
        now = self._clock.monotonic()
        return tuple(held for held in self._all() if not self._expired(held, now))

    @property
    def coming(self) -> int:
        """Number of leases that other workers hand over to this one, as of the last discovery."""
        with self._lock:
            return len(self._coming)

    def get(self, lease_key: str) -> Held | None:
        """Return the lease if it is held and not locally expired."""
        now = self._clock.monotonic()
        with self._lock:
            held = self._held.get(lease_key)
            return None if held is None or self._expired(held, now) else held

    def handoffs(self) -> tuple[Held, ...]:
        """Return the held leases that are in a handoff.

        Each of them has `handoff_deadline` (monotonic seconds).
        """
        return tuple(held for held in self.held() if held.handoff_deadline is not None)

    def overdue_handoffs(self) -> tuple[Held, ...]:
        """Return the handoffs whose deadline has passed.

        They are completed even if a batch of the shard is still being processed.
        """
        now = self._clock.monotonic()
        return tuple(
            held
            for held in self.handoffs()
            if held.handoff_deadline is not None and held.handoff_deadline <= now
        )

    def record_bytes(self, lease_key: str, count: int) -> None:
        """Add `count` processed bytes to the throughput of a lease, if it is held."""
        with self._lock:
            held = self._held.get(lease_key)
            if held is not None:
                held.throughput.record(count)

    def note_read_up_to(self, lease_key: str, millis: int) -> None:
        """Note that all records of a shard that arrived by this time are in the table."""
        with self._lock:
            held = self._held.get(lease_key)
            if held is not None:
                held.read_up_to_millis = max(millis, held.read_up_to_millis or 0)

    def note_processed(self, held: Held, position: Position, *, in_table: bool) -> None:
        """Note a processed position (inclusive). A renewal writes it as the checkpoint.

        Args:
            held: The lease.
            position: The position.
            in_table: Whether a table has it. Then it is the mark of the row, too.
        """
        held.processed, held.mark = position, position if in_table else None

    def drop(self, held: Held, reason: str) -> None:
        """Stop holding the lease without a write.

        Do nothing when this incarnation is not held any more. A finished lease is not reported as
        lost: a leader deletes its row.
        """
        if self._remove(held) and not held.lease.ended:
            self._has_lost = True
            self._events(LeaseLostEvent(self._worker_id, held.lease_key, reason))

    def expect_changes(self) -> None:
        """Note that leases may be gained soon. Discovery then runs as often as after a change."""
        with self._lock:
            self.changed_at = self._clock.monotonic()

    def drop_expired(self) -> None:
        """Stop holding the leases that were not renewed in time.

        Discovery finds those that still belong to this worker.
        """
        now = self._clock.monotonic()
        for held in self._all():
            if self._expired(held, now):
                self.drop(held, EXPIRED)

    def _report(self, what: str, error: Exception) -> None:
        """Report a step that failed. An error that nobody expects is no trouble with AWS."""
        kind = AwsTrouble if isinstance(error, KclError) else DefectFound
        self._events(kind(what, described(error, what)))

    def _gain(self, lease: Lease, read_at: float) -> Held | None:
        held = Held(lease, read_at, self._clock.lock())
        with self._lock:
            if lease.lease_key in self._held:
                return None
            self._held[lease.lease_key] = held
            self.changed_at = self._clock.monotonic()
        self._events(LeaseGained(self._worker_id, lease.lease_key, lease.counter))
        return held

    def _all(self) -> list[Held]:
        with self._lock:
            return [held for _, held in sorted(self._held.items())]

    def _expired(self, held: Held, now: float) -> bool:
        return now - held.renewed_at >= self._failover_seconds

    @contextmanager
    def _entered(self, held: Held, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock for writing this lease.

        Yields:
            True: this thread holds the lock. False: `wait` is False and another thread holds it
                or waits for it.
        """
        with self._lock:
            entered = wait or not held.busy
            held.busy += entered
        if not entered:
            yield False
            return
        try:
            with held.lock:
                yield True
        finally:
            with self._lock:
                held.busy -= 1

    def _require(self, held: Held) -> None:
        if not self._is_current(held):
            raise LeaseLostError(f"the lease {held.lease_key} is not held any more")
        if self._expired(held, self._clock.monotonic()):
            raise LeaseLostError(f"the lease {held.lease_key} is lost: {EXPIRED}")

    def _is_current(self, held: Held) -> bool:
        with self._lock:
            return self._held.get(held.lease_key) is held

    def _remove(self, held: Held) -> bool:
        with self._lock:
            if self._held.get(held.lease_key) is not held:
                return False
            del self._held[held.lease_key]
            self.changed_at = self._clock.monotonic()
            return True

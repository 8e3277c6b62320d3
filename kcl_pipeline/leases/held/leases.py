"""Gain, hand off, release and delete leases (protocol §6.2 to §6.5, §6.8).

This module starts no threads. Each method is one bounded step, and any thread may call it. A
renewal skips a lease that another thread is writing, because every write is a renewal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    AwsError,
    LeaseLostError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import AwsTrouble, EventSink, HandoffCompleted, LeaseReleased
from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.held.writes import LeaseWrites
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import BadRow, Lease, other_form
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable


class HeldLeases(LeaseWrites):
    """Gain, write, hand off and release the leases of one worker.

    Thread-safe. Events are emitted without the lock of the set.

    Args:
        table: The lease table.
        worker_id: The worker that holds the leases.
        settings: Failover time, handoff time-out and consistency of reads.
        clock: Measures the time since the last renewal.
        events: Receives gained, lost and released leases, handoffs and errors.
        multi_stream: Leases of the other form are not taken (protocol §1.3). None: both forms are.
        verify_run: Returns whether this process still has its worker id. Called before a refused
            write counts as applied, and before a discovery after a lease was lost: the row may be
            that of another process of the same id.
    """

    def __init__(
        self,
        table: LeaseTable,
        worker_id: str,
        settings: LeaseSettings,
        clock: Clock,
        events: EventSink,
        *,
        multi_stream: bool | None = None,
        verify_run: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(table, worker_id, settings, clock, events, verify_run)
        self._multi_stream = multi_stream
        self._rejected = RejectedRows(events)

    # `map` replaces the builtin.
    def recover(self, *, map: MapCallable = serial_map) -> tuple[Held, ...]:  # noqa: A002
        """Renew and hold the leases that name this worker as owner at its start (protocol §6.2).

        Expired leases are renewed too. Leases in a handoff are skipped. Throttling and lost
        responses are reported as events; discovery finds the leases that were missed.

        Raises:
            AccessDeniedError: A permission is missing.
            NotFoundError: The table does not exist.
        """
        try:
            listing = self._table.list_leases()
        except (ThrottledError, UnavailableError) as error:
            self._events(AwsTrouble("recovery of leases", str(error)))
            return ()
        mine = [
            lease
            for lease in listing.leases
            if self._acceptable(lease) and self.get(lease.lease_key) is None
        ]
        return tuple(held for held in map(self._recover_one, mine) if held is not None)

    def _recover_one(self, scanned: Lease) -> Held | None:
        began = self._clock.monotonic()
        try:
            row = self._table.get(scanned.lease_key)
            renewed = self._table.renew(row) if row is not None and self._acceptable(row) else None
        except (AwsError, ValueError) as error:
            self._report(f"recovery of {scanned.lease_key}", error)
            return None
        return (
            self._gain(renewed, began)
            if renewed is not None and self._acceptable(renewed)
            else None
        )

    def discover(
        self,
        keys: Iterable[str] | None = None,
        *,
        map: MapCallable = serial_map,  # noqa: A002
    ) -> tuple[Held, ...]:
        """Find leases that were newly assigned to this worker (protocol §6.3).

        Nothing is written. A row that cannot be read now is left for the next call.

        Args:
            keys: Candidates. None: the index supplies them.
            map: Runs the reads of the rows.

        Raises:
            AwsError: The index cannot be queried, or the row of the worker cannot be read.
        """
        if self._has_lost:
            self._has_lost = False
            if not self._is_verified():
                return ()
        found = set(self._table.lease_keys_of(self._worker_id) if keys is None else keys)
        with self._lock:
            unknown = sorted(key for key in found if key not in self._held)
            missing = [key for key in self._held if key not in found]
            if keys is None:
                self._coming &= found
        if keys is None:
            # The index has another owner: a handoff has begun, or the lease is lost.
            self.note_handoffs(missing, map=map)
        return tuple(held for held in map(self._discover_one, unknown) if held is not None)

    def _is_verified(self) -> bool:
        try:
            return self._verify_run()
        except AwsError:
            self._has_lost = True
            raise

    def note_handoffs(
        self,
        keys: Iterable[str],
        *,
        map: MapCallable = serial_map,  # noqa: A002
    ) -> None:
        """Renew held leases that may be in a handoff, unless the handoff is known.

        Args:
            keys: The leases. Those that are not held are ignored.
            map: Runs the renewals.
        """
        found = (self.get(key) for key in keys)
        unknown = [held for held in found if held is not None and held.handoff_deadline is None]
        list(map(self._renew_one, unknown))

    def _discover_one(self, key: str) -> Held | None:
        began = self._clock.monotonic()
        try:
            row = self._table.get(key, consistent=self._settings.consistent_reads)
        except UnreadableRowError as error:
            self._rejected.note(BadRow(self._table.name, key, str(error)))
            return None
        except (AwsError, ValueError) as error:
            self._report(f"discovery of {key}", error)
            return None
        is_coming = row is not None and row.owner == self._worker_id and row.in_handoff
        with self._lock:
            (self._coming.add if is_coming else self._coming.discard)(key)
        return self._gain(row, began) if row is not None and self._acceptable(row) else None

    def _acceptable(self, lease: Lease) -> bool:
        if lease.owner != self._worker_id or lease.in_handoff:
            return False
        if self._multi_stream is not None:
            reason = other_form(lease, multi_stream=self._multi_stream)
            if reason is not None:
                self._rejected.note(BadRow(self._table.name, lease.lease_key, reason))
                return False
        self._rejected.forget(self._table.name, lease.lease_key)
        return True

    def complete_handoff(self, held: Held, *, forced: bool = False) -> bool:
        """Assign the lease to the worker that the leader chose, and stop holding it.

        Args:
            held: The lease.
            forced: Whether the time-out of the handoff is the reason. Then the call does not wait
                for another thread that writes the row: its call may hang.

        Returns:
            False: the lease is not in a handoff or not held, another assignment came first, or
                `forced` is set and another thread writes the row. In the last case, call again.

        Raises:
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held, wait=not forced) as entered:
            if not (entered and self._is_current(held) and held.lease.in_handoff):
                return False
            if not forced:
                # The worker may have forgotten the shard: the lease had expired on its clock, and
                # the answer of a slow renewal came later.
                self._flush_processed(held)
            return self._is_current(held) and self._transfer(held, forced=forced)

    def _transfer(self, held: Held, *, forced: bool) -> bool:
        lease = held.lease
        target = lease.owner or ""
        with self._noting(held, "transfer"):
            row = self._table.assign(lease, target)
        if row is None:
            self.drop(held, "another assignment overtook its handoff")
            return False
        if self._remove(held):
            seconds = self._clock.monotonic() - (
                held.handoff_since if held.handoff_since is not None else self._clock.monotonic()
            )
            self._events(
                HandoffCompleted(lease.lease_key, self._worker_id, target, seconds, forced)
            )
        return True

    def release(self, held: Held, *, wait: bool = True, flushes: bool = False) -> bool:
        """Remove the owner of the lease, so that a leader can assign it at once.

        A lease in a handoff goes to its new owner.

        Args:
            held: The lease.
            wait: False: the call does not wait for another thread that writes the row.
            flushes: Write the checkpoint that the next renewal would write, before.

        Returns:
            False: this worker did not own the lease any more, or another thread writes its row and
                `wait` is False.

        Raises:
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held, wait=wait) as entered:
            if flushes and entered and self._is_current(held):
                self._flush_processed(held)
            return (entered and self._is_current(held)) and (
                self._transfer(held, forced=False) if held.lease.in_handoff else self._evict(held)
            )

    def delete(self, held: Held) -> None:
        """Delete the row of a shard that is not needed any more, and stop holding the lease.

        Raises:
            LeaseLostError: The row has another checkpoint than this worker wrote.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            self._settle(held)
            self._require(held)
            with self._noting(held, "deletion"):
                deleted = self._table.delete(held.lease)
            if not deleted:
                raise self._lose(held)
            self._remove(held)

    def _evict(self, held: Held) -> bool:
        if held.unsure != "eviction":
            try:
                self._settle(held)
            except LeaseLostError:
                return False
        with self._noting(held, "eviction"):
            row = self._table.evict(held.lease)
        if row is None:
            found = self._table.get(held.lease_key)
            if found is not None and found.checkpoint_owner == self._worker_id:
                held.lease = found
                self._note_handoff(held, found)
                return self._transfer(held, forced=False)
            self._lose(held)
            return False
        if self._remove(held):
            self._events(LeaseReleased(self._worker_id, held.lease_key))
        return True

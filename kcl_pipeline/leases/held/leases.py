"""The leases that a worker holds, from gaining to giving back (protocol §6.2 to §6.5, §6.8).

No threads: each method is one bounded step, and may be called from any thread. A renewal that finds
another thread writing the lease leaves it, because every write is a renewal.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from kcl_pipeline.leases.lease import BadRow, Lease, other_form
from kcl_pipeline.leases.rejected import RejectedRows
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable


class HeldLeases(LeaseWrites):
    """Gains leases, writes through them, and gives them away; thread-safe.

    Events are emitted outside of the set's lock. With `multi_stream` set, a lease of the other form
    is not taken (protocol §1.3).
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
        incarnation: int = 0,
    ) -> None:
        super().__init__(table, worker_id, settings, clock, events, incarnation=incarnation)
        self._multi_stream = multi_stream
        self._rejected = RejectedRows(events)

    # it stands for the builtin
    def recover(self, *, map: MapCallable = serial_map) -> tuple[Held, ...]:  # noqa: A002
        """Take back what already carries this worker's name, at its start: renewed even if expired;
        leases in a handoff are left (protocol §6.2).

        Throttling and lost answers are reported as events; discovery finds what was missed. Raises
        `AccessDeniedError` and `NotFound`.
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
            self._events(AwsTrouble(f"recovery of {scanned.lease_key}", str(error)))
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
        """Find leases newly assigned to this worker: by the index, or among `keys`, then row by row
        through `map` (protocol §6.3).

        Nothing is written. A row that cannot be read now is left for the next time. Raises
        `AwsError` when the index cannot be asked.
        """
        found = self._table.lease_keys_of(self._worker_id) if keys is None else keys
        with self._lock:
            unknown = [key for key in found if key not in self._held]
        return tuple(held for held in map(self._discover_one, unknown) if held is not None)

    def _discover_one(self, key: str) -> Held | None:
        began = self._clock.monotonic()
        try:
            row = self._table.get(key, consistent=self._settings.consistent_reads)
        except UnreadableRowError as error:
            self._rejected.note(BadRow(self._table.name, key, str(error)))
            return None
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble(f"discovery of {key}", str(error)))
            return None
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
        """Give the lease to the worker that the leader chose, and hold it no longer. False when
        there was nothing to give, or another assignment was faster.

        Raises `AwsError`: the lease is still held, call again. `forced` says that the time-out does
        it.
        """
        with self._entered(held):
            return (
                self._is_current(held)
                and held.lease.in_handoff
                and self._transfer(held, forced=forced)
            )

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

    def release(self, held: Held) -> bool:
        """Make the lease ownerless, so that any leader may assign it at once; one in a handoff goes
        to its new owner. False when it was not ours any more.

        Raises `AwsError`: the lease is still held, call again.
        """
        with self._entered(held):
            return self._is_current(held) and (
                self._transfer(held, forced=False) if held.lease.in_handoff else self._evict(held)
            )

    def delete(self, held: Held) -> None:
        """Delete the row of a shard that does not exist any more, and stop holding the lease.

        Raises `LeaseLostError` when the row has another checkpoint than this worker wrote, and
        `AwsError`: the lease is still held, call again.
        """
        with self._entered(held):
            self._settle(held)
            self._require(held)
            with self._noting(held, "deletion"):
                deleted = self._table.delete(held.lease)
            if not deleted:
                self.drop(held, self._taken)
                raise LeaseLostError(f"the lease {held.lease_key} is lost: {self._taken}")
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
            self.drop(held, self._taken)
            return False
        if self._remove(held):
            self._events(LeaseReleased(self._worker_id, held.lease_key))
        return True

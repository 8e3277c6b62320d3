"""Read and write lease rows with conditional writes (protocol §1.4).

A write may have been applied although its response was lost. The caller then retries it. The retry
is refused because of the first attempt, and returns the current row. The docstrings below say when
a refused write counts as applied. Leases are written only with conditions on counter or owners, so
a row with the values of a write was written by it, or by an equal write with the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.lease import serialization as rows
from kcl_pipeline.leases.lease.creation import checkpoint_conditions, recreated_condition
from kcl_pipeline.leases.lease.seek import LeasePositions
from kcl_pipeline.leases.lease.serialization import (
    is_lease,
    lease_from_item,
    number,
    string,
    string_set,
)
from kcl_pipeline.leases.lease.values import BadRow, Lease, LeaseListing
from kcl_pipeline.leases.store import (
    Absent,
    Changes,
    Condition,
    Equals,
    FirstEquals,
    Item,
    LeaseStore,
    Present,
)
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange


class LeaseRows(LeasePositions):
    """The lease table of one application, on a row store.

    A `Lease` argument is the row as the caller knows it. Writes compare its counter or owners with
    those of the row.

    Args:
        store: The rows.
        ensure: Creates the tables of the layout. None: creates this table alone.
        refuse_other_layout: Raises `IncompatibleTableError` if rows of both layouts exist.
    """

    def __init__(
        self,
        store: LeaseStore,
        ensure: Callable[[], bool] | None = None,
        refuse_other_layout: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(store)
        self._ensure = ensure
        self._refuse_other_layout = refuse_other_layout
        self._decode: Callable[[Item], Lease] = lease_from_item

    def _lease(self, item: Item | None) -> Lease | None:
        return self._decode(item) if item is not None and is_lease(item) else None

    def ensure_exists(self) -> bool:
        """Create the table and its index `LeaseOwnerToLeaseKeyIndex` if they are missing.

        Waits until they can be used. Returns whether this call created the table. A table that is
        refused is not changed.

        Raises:
            IncompatibleTableError: The layout is not the one of the settings (protocol §4.2).
        """
        return self._store.ensure_exists() if self._ensure is None else self._ensure()

    def refuse_other_layout(self) -> None:
        """Raise `IncompatibleTableError` if the table has rows that the layout does not have."""
        self._refuse_other_layout()

    def get(self, lease_key: str, *, consistent: bool = True) -> Lease | None:
        """Return a lease, or None. Raises `UnreadableRowError` if the row cannot be read.

        None also for a row that is not a lease.
        """
        return self._lease(self._store.get(lease_key, consistent=consistent))

    def list_leases(self) -> LeaseListing:
        """Scan all lease rows. Eventually consistent.

        Rows of another entity type are skipped. Unreadable rows are in the listing.
        """
        leases: list[Lease] = []
        bad_rows: list[BadRow] = []
        for item in self._store.scan():
            if not is_lease(item):
                continue
            try:
                leases.append(self._decode(item))
            except UnreadableRowError as error:
                bad_rows.append(BadRow(self.name, text_of(item, rows.LEASE_KEY) or "", str(error)))
        return LeaseListing(tuple(leases), tuple(bad_rows))

    def lease_keys_of(self, owner: str) -> tuple[str, ...]:
        """Return the keys whose `leaseOwner` is `owner`, by the index.

        Eventually consistent; the index may lag by seconds.
        """
        return self._store.keys_by_owner(owner)

    def renew(
        self,
        lease: Lease,
        throughput_kbps: float | None = None,
        read_up_to_millis: int | None = None,
        *,
        verify: Callable[[], bool] = lambda: True,
    ) -> Lease | None:
        """Increment the counter if it and the actual owner equal those of `lease`.

        Also succeeds if a handoff has started since (protocol §1.4.1).

        Applied if counter, actual owner and positions are as expected.
        That is: the counter is one higher, the same worker processes the shard, and both positions
        equal those of `lease`. Unlike KCL's check, this also works during a handoff (protocol
        §1.4.1). The positions distinguish this write from a write of another process with the same
        worker id. Without them, this worker would adopt the counter of the other process, would not
        see its progress, and would commit its records again.

        Args:
            lease: The row as the caller knows it.
            throughput_kbps: New throughput. None: it is not changed.
            read_up_to_millis: New value of `Lease.read_up_to_millis`. None: it is not changed.
            verify: Called before a refused write counts as applied. Returns whether this process
                still has its worker id: another process of this id writes the same.

        Returns:
            The current lease; `in_handoff` if a handoff has started. None: the lease is lost.
        """
        put: Item = {
            rows.COUNTER: number(lease.counter + 1),
            **rows.observed_attributes(throughput_kbps, read_up_to_millis),
        }
        conditions: list[Condition] = [
            Equals(rows.COUNTER, number(lease.counter)),
            recreated_condition(lease),
            *_actual_owner_of(lease),
        ]
        changes = Changes(put)
        outcome = self._store.update(
            lease.lease_key,
            conditions if lease.in_handoff else [*conditions, Absent(rows.CHECKPOINT_OWNER)],
            changes,
        )
        row = self._lease(outcome.item)
        if (
            not outcome.applied
            and not lease.in_handoff
            and row is not None
            and row.in_handoff
            and row.counter == lease.counter
        ):
            if row.actual_owner != lease.actual_owner or row.checkpoint_owner == row.owner:
                return None
            outcome = self._store.update(lease.lease_key, conditions, changes)
            row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        return (
            row
            if _is_next(row, lease)
            and row.checkpoint_owner != row.owner
            and _same_progress(row, lease)
            and verify()
            else None
        )

    def update_checkpoint(
        self,
        lease: Lease,
        *,
        checkpoint: Position,
        pending: Position | None = None,
        pending_state: bytes | None = None,
        throughput_kbps: float | None = None,
        read_up_to_millis: int | None = None,
        table_mark: Position | None = None,
        verify: Callable[[], bool] = lambda: True,
    ) -> Lease | None:
        """Write checkpoint and pending checkpoint, and increment the counter.

        The condition is that counter, checkpoint and actual owner equal those of `lease`. If the
        checkpoint changes, `ownerSwitchesSinceCheckpoint` becomes 0. The child shard ids and hash
        range of `lease` are written, too. Owners and parents are not changed.

        Applied if the counter is one higher, the same worker processes the shard, and both
        positions and the state are those of this write. The write is conditional on the checkpoint
        of `lease`, too. So a checkpoint never goes back, even if a row was deleted and created
        again with the same counter.

        Args:
            lease: The row as the caller knows it.
            checkpoint: The new checkpoint.
            pending: The new pending checkpoint. None removes it.
            pending_state: Batch number of the pending checkpoint.
            throughput_kbps: New throughput. None: it is not changed.
            read_up_to_millis: New value of `Lease.read_up_to_millis`. None: it is not changed.
            table_mark: New value of `Lease.table_mark`. None: it is not changed.
            verify: See `renew`.

        Returns:
            The new lease. None: the lease is lost.

        Raises:
            ValueError: `checkpoint` is before that of `lease`.
        """
        if checkpoint < lease.checkpoint:
            what = f"{lease.lease_key} is {lease.checkpoint} and must not go back to {checkpoint}"
            raise ValueError(f"the checkpoint of {what}")
        switches = lease.owner_switches_since_checkpoint if checkpoint == lease.checkpoint else 0
        put: Item = {
            rows.COUNTER: number(lease.counter + 1),
            rows.OWNER_SWITCHES: number(switches),
            **rows.position_attributes(rows.CHECKPOINT, rows.CHECKPOINT_SUB, checkpoint),
            **rows.stream_attributes(lease),
            **rows.observed_attributes(throughput_kbps, read_up_to_millis),
            **rows.pending_attributes(pending, pending_state),
            **rows.shard_attributes(lease),
            **rows.table_attributes(table_mark),
        }
        remove = {rows.PENDING, rows.PENDING_SUB, rows.PENDING_STATE} - put.keys()
        conditions = [
            Equals(rows.COUNTER, number(lease.counter)),
            *checkpoint_conditions(lease),
            *_actual_owner_of(lease),
        ]
        outcome = self._store.update(
            lease.lease_key, conditions, Changes(put, tuple(sorted(remove)))
        )
        row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        state = (pending_state or None) if pending is not None else None
        same = (
            row.checkpoint == checkpoint
            and row.pending_checkpoint == pending
            and row.pending_checkpoint_state == state
        )
        return row if same and _is_next(row, lease) and verify() else None

    def assign(self, lease: Lease, owner: str, *, unrenewed: bool = False) -> Lease | None:
        """Set the owner, remove the checkpoint owner, and increment the counter.

        Applied if the row has the new owner and a higher counter.

        There must be no handoff. The new owner may have renewed since, so the counter may be higher
        by more than one. Assigning to the current owner would not change the conditions, and a
        retry would be applied again. In this case the counter is a condition, too.

        Args:
            lease: Owner and checkpoint owner of the row must equal those of this lease.
            owner: The new owner.
            unrenewed: The counter must be equal, too.

        Returns:
            The new lease. None if the condition does not hold.
        """
        conditions = [Present(rows.LEASE_KEY), *_owners_of(lease)]
        if unrenewed or (lease.owner == owner and not lease.in_handoff):
            conditions.append(Equals(rows.COUNTER, number(lease.counter)))
        changes = Changes(
            {rows.OWNER: string(owner)},
            (rows.CHECKPOINT_OWNER,),
            {rows.COUNTER: 1, **_switch(lease, owner)},
        )
        return self._update(
            lease,
            conditions,
            changes,
            lambda row: row.owner == owner and not row.in_handoff and row.counter > lease.counter,
        )

    def initiate_handoff(self, lease: Lease, owner: str) -> Lease | None:
        """Start a handoff: set the owner, and the former owner as checkpoint owner.

        The counter is not changed. None if the condition (protocol §1.4) does not hold.

        Applied if the row has both workers of this handoff.

        None for a lease without an owner, in a handoff, or of `owner`.
        """
        if lease.owner is None or lease.in_handoff or lease.owner == owner:
            return None
        return self._update(
            lease,
            [Present(rows.LEASE_KEY), *_owners_of(lease)],
            Changes({rows.OWNER: string(owner), rows.CHECKPOINT_OWNER: string(lease.owner)}),
            lambda row: row.owner == owner and row.checkpoint_owner == lease.owner,
        )

    def evict(self, lease: Lease) -> Lease | None:
        """Remove the owner and increment the counter.

        In a handoff, the handoff is cancelled and the owner stays (protocol §1.4). The condition is
        that owner, checkpoint owner and counter equal those of `lease`. None if it does not hold.

        Applied if counter and owners are as expected.
        That is: the counter is one higher, there is no handoff, and no owner. If a handoff was
        cancelled, the owner is the same.
        """
        remove = (
            (rows.CHECKPOINT_OWNER,) if lease.in_handoff else (rows.OWNER, rows.CHECKPOINT_OWNER)
        )
        conditions = [
            Present(rows.LEASE_KEY),
            *_owners_of(lease),
            Equals(rows.COUNTER, number(lease.counter)),
        ]
        remaining = lease.owner if lease.in_handoff else None
        return self._update(
            lease,
            conditions,
            Changes(remove=remove, add={rows.COUNTER: 1}),
            lambda row: (
                row.owner == remaining and not row.in_handoff and row.counter == lease.counter + 1
            ),
        )

    def _update(
        self,
        lease: Lease,
        conditions: Sequence[Condition],
        changes: Changes,
        is_applied: Callable[[Lease], bool],
    ) -> Lease | None:
        """Update a row. A refused write counts as applied if `is_applied` holds for the row."""
        outcome = self._store.update(lease.lease_key, conditions, changes)
        row = self._lease(outcome.item)
        return row if outcome.applied or (row is not None and is_applied(row)) else None

    def set_child_shard_ids(self, lease_key: str, child_shard_ids: Sequence[str]) -> bool:
        """Set the children of a row, without changing the counter. False if there is no row.

        Idempotent.

        Raises:
            ValueError: There are no children. A string set cannot be empty.
        """
        return self._store.update(
            lease_key,
            [Present(rows.LEASE_KEY)],
            Changes({rows.CHILDREN: string_set(child_shard_ids)}),
        ).applied

    def set_hash_key_range(self, lease_key: str, hash_key_range: HashKeyRange) -> bool:
        """Set the hash range of a row, without changing the counter. False if there is no row.

        Idempotent.
        """
        return self._store.update(
            lease_key,
            [Present(rows.LEASE_KEY)],
            Changes(rows.hash_range_attributes(hash_key_range)),
        ).applied

    def delete(self, lease: Lease) -> bool:
        """Delete the row if its checkpoint equals that of `lease`. True: there is no row now.

        Applied if there is no row.
        """
        outcome = self._store.delete(lease.lease_key, checkpoint_conditions(lease))
        return outcome.applied or outcome.item is None


def _is_next(row: Lease, lease: Lease) -> bool:
    return (
        row.counter == lease.counter + 1
        and lease.actual_owner is not None
        and row.actual_owner == lease.actual_owner
    )


def _same_progress(row: Lease, lease: Lease) -> bool:
    return (
        row.checkpoint == lease.checkpoint
        and row.pending_checkpoint == lease.pending_checkpoint
        and row.pending_checkpoint_state == lease.pending_checkpoint_state
    )


def _owners_of(lease: Lease) -> list[Condition]:
    pairs = ((rows.OWNER, lease.owner), (rows.CHECKPOINT_OWNER, lease.checkpoint_owner))
    return [Absent(name) if value is None else Equals(name, string(value)) for name, value in pairs]


def _actual_owner_of(lease: Lease) -> list[Condition]:
    # Only a row that was deleted and created again can have the counter of a former owner. KCL does
    # not look at the owner (protocol §1.4).
    if lease.actual_owner is None:
        return []
    return [FirstEquals(rows.CHECKPOINT_OWNER, rows.OWNER, string(lease.actual_owner))]


def _switch(lease: Lease, owner: str) -> dict[str, int]:
    # KCL counts a switch when the owner changes, and when a worker gets its lease back during a
    # handoff, but not when a handoff ends (protocol §1.4).
    switched = (lease.owner is not None and lease.owner != owner) or (
        lease.checkpoint_owner is not None and lease.checkpoint_owner == owner
    )
    return {rows.OWNER_SWITCHES: 1} if switched else {}

"""Read and write lease rows with conditional writes (protocol §1.4).

A write may have been applied although its response was lost. The caller then retries it. The retry
is refused because of the first attempt, and returns the current row. The docstrings below say when
a refused write counts as applied. Leases are written only with conditions on counter or owners, so
a row with the values of a write was written by it, or by an equal write with the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcl_pipeline.errors import IncompatibleTableError, UnreadableRowError
from kcl_pipeline.leases import serialization as rows
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.lease import BadRow, Lease, LeaseListing
from kcl_pipeline.leases.serialization import (
    is_lease,
    lease_from_item,
    lease_to_item,
    number,
    string,
    string_set,
)
from kcl_pipeline.leases.serialization_state import LEADER_KEY
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Check,
    Condition,
    Differs,
    Equals,
    Item,
    Present,
    Put,
    RowStore,
    Update,
    same_item,
)
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import HashKeyRange


class LeaseRows:
    """`tables.LeaseTable` on a row store."""

    def __init__(self, store: RowStore) -> None:
        self.name = store.name
        self._store = store
        self._decode: Callable[[Item], Lease] = lease_from_item

    def _lease(self, item: Item | None) -> Lease | None:
        return self._decode(item) if item is not None and is_lease(item) else None

    def ensure_exists(self) -> bool:
        """See `tables.LeaseTable`. A table that is refused is not changed."""
        return self._store.ensure_exists(self._refuse_single_table_layout)

    def _refuse_single_table_layout(self) -> None:
        for item in self._store.scan(consistent=True):
            key, entity = text_of(item, rows.LEASE_KEY), text_of(item, rows.ENTITY_TYPE)
            if entity in rows.NON_LEASE_ENTITIES or key == LEADER_KEY:
                raise IncompatibleTableError(
                    f"the lease table {self.name} has the row {key} of type "
                    f"{entity or 'LEADER'}, so it has the single-table layout of KCL 3.5, which "
                    "this version does not support; use another application name, or three "
                    "separate tables"
                )

    def create_lease(self, lease: Lease) -> bool:
        """See `tables.LeaseTable`. Applied if the existing row equals the new one."""
        item = lease_to_item(lease)
        outcome = self._store.put(item, [Absent(rows.LEASE_KEY)])
        return outcome.applied or same_item(outcome.item, item)

    def create_leases(self, leases: Sequence[Lease], proof: Check) -> tuple[str, ...] | None:
        """See `tables.LeaseTable`. Applied if all rows exist; see `create_successors`."""
        return self._put_missing(proof, leases)

    def create_successors(self, lease: Lease, successors: Sequence[Lease]) -> bool:
        """See `tables.LeaseTable`. Applied if all rows exist.

        If the worker of another parent, or a former attempt, has created a row, the transaction is
        repeated without it.
        """
        unfinished: list[Condition] = [
            Present(rows.LEASE_KEY),
            Differs(rows.CHECKPOINT, string(SHARD_END.sequence_number)),
            _mark_of(lease),
        ]
        children = string_set(successor.shard_id for successor in successors)
        parent = Update(lease.lease_key, unfinished, Changes({rows.CHILDREN: children}))
        return self._put_missing(parent, successors) is not None

    def restore_parents(self, child: Lease, parents: Sequence[Lease]) -> tuple[str, ...] | None:
        """See `tables.LeaseTable`. Applied if all rows exist; see `create_successors`."""
        has_not_begun = [*_checkpoint_of(child), Absent(rows.PENDING)]
        # An update in a transaction needs a change; the parents are set to the same value.
        same = Changes({rows.PARENTS: string_set(child.parent_shard_ids)})
        return self._put_missing(Update(child.lease_key, has_not_begun, same), parents)

    def _put_missing(
        self, proof: Update | Check, leases: Sequence[Lease]
    ) -> tuple[str, ...] | None:
        """Create the leases that have no row, in one transaction with `proof`.

        Returns:
            The keys that this call created. None if `proof` was refused.
        """
        missing = list(leases)
        while refused := self._store.transact(
            [proof, *(Put(lease_to_item(lease), [Absent(rows.LEASE_KEY)]) for lease in missing)]
        ):
            if 0 in refused:
                return None
            missing = [lease for index, lease in enumerate(missing, 1) if index not in refused]
        return tuple(lease.lease_key for lease in missing)

    def get(self, lease_key: str, *, consistent: bool = True) -> Lease | None:
        """See `tables.LeaseTable`. None also for a row that is not a lease."""
        return self._lease(self._store.get(lease_key, consistent=consistent))

    def list_leases(self) -> LeaseListing:
        """See `tables.LeaseTable`."""
        leases: list[Lease] = []
        bad_rows: list[BadRow] = []
        for item in self._store.scan():
            if not is_lease(item):
                continue
            try:
                leases.append(self._decode(item))
            except UnreadableRowError as error:
                key = text_of(item, rows.LEASE_KEY) or ""
                bad_rows.append(BadRow(self.name, key, str(error)))
        return LeaseListing(tuple(leases), tuple(bad_rows))

    def lease_keys_of(self, owner: str) -> tuple[str, ...]:
        """See `tables.LeaseTable`."""
        return self._store.keys_by_owner(owner)

    def renew(self, lease: Lease, throughput_kbps: float | None = None) -> Lease | None:
        """See `tables.LeaseTable`. Applied if counter, actual owner and positions are as expected.

        That is: the counter is one higher, the same worker processes the shard, and both positions
        equal those of `lease`. Unlike KCL's check, this also works during a handoff (protocol
        §1.4.1). The positions distinguish this write from a write of another process with the same
        worker id. Without them, this worker would adopt the counter of the other process, would not
        see its progress, and would commit its records again.
        """
        put: Item = {rows.COUNTER: number(lease.counter + 1)}
        if throughput_kbps is not None:
            put[rows.THROUGHPUT] = number(float(throughput_kbps))
        conditions: list[Condition] = [
            Equals(rows.COUNTER, number(lease.counter)),
            _mark_of(lease),
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
            else None
        )

    def update_checkpoint(
        self,
        lease: Lease,
        *,
        checkpoint: Position,
        pending: Position | None = None,
        pending_state: bytes | None = None,
    ) -> Lease | None:
        """See `tables.LeaseTable`. Applied if counter, actual owner and positions are as expected.

        That is: the counter is one higher, the same worker processes the shard, and both positions
        and the state are those of this write. The write is conditional on the checkpoint of
        `lease`, too. So a checkpoint never goes back, even if a row was deleted and created again
        with the same counter.
        """
        if checkpoint < lease.checkpoint:
            raise ValueError(
                f"the checkpoint of {lease.lease_key} is {lease.checkpoint} and must not go back "
                f"to {checkpoint}"
            )
        switches = lease.owner_switches_since_checkpoint if checkpoint == lease.checkpoint else 0
        put: Item = {
            rows.COUNTER: number(lease.counter + 1),
            rows.OWNER_SWITCHES: number(switches),
            **rows.position_attributes(rows.CHECKPOINT, rows.CHECKPOINT_SUB, checkpoint),
            **rows.stream_attributes(lease),
        }
        remove: tuple[str, ...] = (rows.PENDING, rows.PENDING_SUB, rows.PENDING_STATE)
        if pending is not None:
            put |= rows.position_attributes(rows.PENDING, rows.PENDING_SUB, pending)
            remove = () if pending_state else (rows.PENDING_STATE,)
            if pending_state:
                put[rows.PENDING_STATE] = {"B": pending_state}
        if lease.child_shard_ids:
            put[rows.CHILDREN] = string_set(lease.child_shard_ids)
        if lease.hash_key_range is not None:
            put |= rows.hash_range_attributes(lease.hash_key_range)
        conditions = [Equals(rows.COUNTER, number(lease.counter)), *_checkpoint_of(lease)]
        outcome = self._store.update(lease.lease_key, conditions, Changes(put, remove))
        row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        state = (pending_state or None) if pending is not None else None
        same = (
            row.checkpoint == checkpoint
            and row.pending_checkpoint == pending
            and row.pending_checkpoint_state == state
        )
        return row if same and _is_next(row, lease) else None

    def assign(self, lease: Lease, owner: str, *, unrenewed: bool = False) -> Lease | None:
        """See `tables.LeaseTable`. Applied if the row has the new owner and a higher counter.

        There must be no handoff. The new owner may have renewed since, so the counter may be higher
        by more than one. Assigning to the current owner would not change the conditions, and a
        retry would be applied again. In this case the counter is a condition, too.
        """
        conditions = [Present(rows.LEASE_KEY), *_owners_of(lease)]
        if unrenewed or (lease.owner == owner and not lease.in_handoff):
            conditions.append(Equals(rows.COUNTER, number(lease.counter)))
        changes = Changes(
            {rows.OWNER: string(owner)},
            (rows.CHECKPOINT_OWNER,),
            {rows.COUNTER: 1, **_switch(lease, owner)},
        )
        outcome = self._store.update(lease.lease_key, conditions, changes)
        row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        return (
            row
            if row.owner == owner and not row.in_handoff and row.counter > lease.counter
            else None
        )

    def initiate_handoff(self, lease: Lease, owner: str) -> Lease | None:
        """See `tables.LeaseTable`. Applied if the row has both workers of this handoff.

        None for a lease without an owner, in a handoff, or of `owner`.
        """
        if lease.owner is None or lease.in_handoff or lease.owner == owner:
            return None
        conditions = [Present(rows.LEASE_KEY), *_owners_of(lease)]
        changes = Changes({rows.OWNER: string(owner), rows.CHECKPOINT_OWNER: string(lease.owner)})
        outcome = self._store.update(lease.lease_key, conditions, changes)
        row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        return row if row.owner == owner and row.checkpoint_owner == lease.owner else None

    def evict(self, lease: Lease) -> Lease | None:
        """See `tables.LeaseTable`. Applied if counter and owners are as expected.

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
        outcome = self._store.update(
            lease.lease_key, conditions, Changes(remove=remove, add={rows.COUNTER: 1})
        )
        row = self._lease(outcome.item)
        if outcome.applied or row is None:
            return row
        remaining = lease.owner if lease.in_handoff else None
        return (
            row
            if row.owner == remaining and not row.in_handoff and row.counter == lease.counter + 1
            else None
        )

    def set_child_shard_ids(self, lease_key: str, child_shard_ids: Sequence[str]) -> bool:
        """See `tables.LeaseTable`. Idempotent.

        Raises:
            ValueError: There are no children. A string set cannot be empty.
        """
        return self._store.update(
            lease_key,
            [Present(rows.LEASE_KEY)],
            Changes({rows.CHILDREN: string_set(child_shard_ids)}),
        ).applied

    def set_hash_key_range(self, lease_key: str, hash_key_range: HashKeyRange) -> bool:
        """See `tables.LeaseTable`. Idempotent."""
        return self._store.update(
            lease_key,
            [Present(rows.LEASE_KEY)],
            Changes(rows.hash_range_attributes(hash_key_range)),
        ).applied

    def delete(self, lease: Lease) -> bool:
        """See `tables.LeaseTable`. Applied if there is no row."""
        outcome = self._store.delete(lease.lease_key, _checkpoint_of(lease))
        return outcome.applied or outcome.item is None


def _is_next(row: Lease, lease: Lease) -> bool:
    return (
        row.counter == lease.counter + 1
        and lease.actual_owner is not None
        and row.actual_owner == lease.actual_owner
    )


def _same_progress(row: Lease, lease: Lease) -> bool:
    pending = (
        row.pending_checkpoint == lease.pending_checkpoint
        and row.pending_checkpoint_state == lease.pending_checkpoint_state
    )
    return pending and row.checkpoint == lease.checkpoint


def _checkpoint_of(lease: Lease) -> list[Condition]:
    """Return the conditions that the row has the checkpoint of `lease`, compared as strings."""
    attributes = rows.position_attributes(rows.CHECKPOINT, rows.CHECKPOINT_SUB, lease.checkpoint)
    # A missing sub-sequence number is 0.
    sub_condition = Equals if lease.checkpoint.sub_sequence_number else AbsentOrEquals
    return [
        Equals(rows.CHECKPOINT, attributes[rows.CHECKPOINT]),
        sub_condition(rows.CHECKPOINT_SUB, attributes[rows.CHECKPOINT_SUB]),
        _mark_of(lease),
    ]


def _mark_of(lease: Lease) -> Condition:
    """Return the condition that the row is of the stream of `lease`, and not of a later one.

    A single stream that was created again has the same lease keys.
    """
    if lease.stream_mark is None:
        return Absent(rows.STREAM_CREATED)
    return Equals(rows.STREAM_CREATED, number(lease.stream_mark))


def _owners_of(lease: Lease) -> list[Condition]:
    pairs = ((rows.OWNER, lease.owner), (rows.CHECKPOINT_OWNER, lease.checkpoint_owner))
    return [Absent(name) if value is None else Equals(name, string(value)) for name, value in pairs]


def _switch(lease: Lease, owner: str) -> dict[str, int]:
    # KCL counts a switch when the owner changes, and when a worker gets its lease back during a
    # handoff, but not when a handoff ends (protocol §1.4).
    switched = (lease.owner is not None and lease.owner != owner) or (
        lease.checkpoint_owner is not None and lease.checkpoint_owner == owner
    )
    return {rows.OWNER_SWITCHES: 1} if switched else {}

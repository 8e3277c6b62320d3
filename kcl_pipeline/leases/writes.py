"""The lease table: every conditional write of a lease row, in the order of a row's life.

A row is created, assigned to a worker, renewed, handed over and released, and in the end deleted
(protocol §1.4). The conditions are Java's, so that both can write one table; where ours has one
more, the comment at the condition says what it excludes.

Each write is conditional on counter, owners or checkpoint. A write may have been applied although
its response was lost. The caller then repeats it. The repetition is refused because of the first
attempt. A row with the values of a write was written by it, or by an equal write with the same
effect; so each docstring says when a refused write counts as applied. Renewals and checkpoints do
not: `HeldLeases`, which alone writes them, knows what it has sent.

No row is read, modified and put back: attributes of other programs survive. Only a new row is put.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.leases import row as rows
from kcl_pipeline.leases.row import (
    LEASE_ROW,
    BadRow,
    Lease,
    LeaseListing,
    is_lease,
    lease_from_item,
    lease_to_item,
    number,
    read_rows,
    string,
    string_set,
    text_of,
)
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Condition,
    ConditionCheck,
    Differs,
    Equals,
    FirstEquals,
    Item,
    LeaseStore,
    Present,
    Put,
    Update,
)
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import HashKeyRange

MAX_SEEKS: Final = 99
"""A transaction has at most 100 writes. One of them is the proof."""


@dataclass(frozen=True, slots=True)
class LeaseSeek:
    """The new position of one lease.

    Attributes:
        lease: The row as it was read; a lease to create has the counter 0 and `exists` False.
        position: The new checkpoint.
        initial_millis: The time of AT_TIMESTAMP or LATEST.
        exists: Whether there is a row.
    """

    lease: Lease
    position: Position
    initial_millis: int | None = None
    exists: bool = True


class LeaseTable:
    """The lease table of one application, on a row store.

    A `Lease` argument is the row as the caller knows it. Writes compare its counter or owners with
    those of the row. See `store` for the rules of all methods.

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
        self.name = store.name
        self._store = store
        self._ensure = ensure
        self._refuse_other_layout = refuse_other_layout
        self._decode: Callable[[Item], Lease] = lease_from_item

    def _lease(self, item: Item | None) -> Lease | None:
        return self._decode(item) if item is not None and is_lease(item) else None

    # -- reading

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

        def bad(item: Item, reason: str) -> BadRow:
            return BadRow(self.name, text_of(item, rows.LEASE_KEY) or "", reason)

        return LeaseListing(*read_rows(filter(is_lease, self._store.scan()), self._decode, bad))

    def lease_keys_of(self, owner: str) -> tuple[str, ...]:
        """Return the keys whose `leaseOwner` is `owner`, by the index.

        Eventually consistent; the index may lag by seconds.
        """
        return self._store.keys_by_owner(owner)

    # -- creation: by a leader, by the owner of a parent, by the owner of a child

    def create_leases(
        self, leases: Sequence[Lease], proof: ConditionCheck | Update
    ) -> tuple[str, ...] | None:
        """Put the rows that do not exist, in one transaction whose condition is `proof` (§1.4).

        Applied if all rows exist; see `create_successors`.

        Args:
            leases: The new rows, at most 99.
            proof: The condition, see `CoordinatorStateTable.proof_of_lock`; or an update of another
                row with its conditions.

        Returns:
            The keys that this call created. None if `proof` does not hold; nothing was written.
        """
        # Absent(leaseKey): a row that exists keeps its progress. The proof excludes a former
        # leader, and a worker that was paused until the shards were finished and deleted.
        missing = list(leases)
        while refused := self._store.transact(
            [proof, *(Put(lease_to_item(lease), [Absent(rows.LEASE_KEY)]) for lease in missing)]
        ):
            if 0 in refused:
                return None
            missing = [lease for index, lease in enumerate(missing, 1) if index not in refused]
        return tuple(lease.lease_key for lease in missing)

    def create_successors(self, lease: Lease, successors: Sequence[Lease]) -> bool:
        """Put the rows of the shards that follow the shard of `lease`, and set its children.

        Rows that exist are not changed. All writes are one transaction. Its condition is that the
        row of `lease` exists and is not at SHARD_END. This proves that no successor was finished
        and deleted before: rows of finished shards are kept as long as a row of a parent (protocol
        §8.2), and a shard starts after the ends of its parents. So a worker that was paused never
        creates a deleted row again.

        False if the condition does not hold; nothing was written.

        Applied if all rows exist.

        If the worker of another parent, or a former attempt, has created a row, the transaction is
        repeated without it.

        Raises:
            ValueError: There are no successors.
        """
        # SHARD_END is excluded, because rows of successors may be deleted from then on.
        unfinished: list[Condition] = [
            Present(rows.LEASE_KEY),
            Differs(rows.CHECKPOINT, string(SHARD_END.sequence_number)),
            recreated_condition(lease),
        ]
        children = string_set(successor.shard_id for successor in successors)
        parent = Update(lease.lease_key, unfinished, Changes({rows.CHILDREN: children}))
        return self.create_leases(successors, parent) is not None

    def restore_parents(self, child: Lease, parents: Sequence[Lease]) -> tuple[str, ...] | None:
        """Put the missing rows of the parents of `child`.

        All writes are one transaction. Its condition is that the row of `child` has the checkpoint
        of `child` and no pending checkpoint. A child at TRIM_HORIZON proves that no leader has
        deleted the rows of its parents (protocol §8.2).

        Applied if all rows exist; see `create_successors`.

        Returns:
            The keys that this call created. None if the condition does not hold; nothing was
            written.

        Raises:
            ValueError: `child` has no parents.
        """
        # Absent(pendingCheckpoint): a record processor may have begun, and prepared its first
        # checkpoint, while the row is still at TRIM_HORIZON.
        has_not_begun = [*checkpoint_conditions(child), Absent(rows.PENDING)]
        # An update in a transaction needs a change; the parents are set to the same value.
        same = Changes({rows.PARENTS: string_set(child.parent_shard_ids)})
        return self.create_leases(parents, Update(child.lease_key, has_not_begun, same))

    # -- assignment: by a leader, and by the former owner at the end of a handoff

    def assign(self, lease: Lease, owner: str, *, unrenewed: bool = False) -> Lease | None:
        """Set the owner, remove the checkpoint owner, and raise the counter (§1.4, assignLease).

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
        # The owners exclude a plan that another assignment has overtaken. Without Present, a
        # deleted row without owners would be created again, with no checkpoint.
        conditions = [Present(rows.LEASE_KEY), *_owners_of(lease)]
        if unrenewed or (lease.owner == owner and not lease.in_handoff):
            # An owner that has renewed since the leader has seen its lease expire keeps it.
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
        """Start a handoff: set the owner, and the former owner as checkpoint owner (§1.4).

        The counter is not changed. None if the condition does not hold.

        Applied if the row has both workers of this handoff.

        None for a lease without an owner, in a handoff, or of `owner`.
        """
        if lease.owner is None or lease.in_handoff or lease.owner == owner:
            return None
        # The counter stays: a higher one would look to the owner like the loss of its lease.
        return self._update(
            lease,
            [Present(rows.LEASE_KEY), *_owners_of(lease)],
            Changes({rows.OWNER: string(owner), rows.CHECKPOINT_OWNER: string(lease.owner)}),
            lambda row: row.owner == owner and row.checkpoint_owner == lease.owner,
        )

    # -- the owner: renewal, checkpoint, release

    def renew(
        self,
        lease: Lease,
        throughput_kbps: float | None = None,
        read_up_to_millis: int | None = None,
    ) -> Lease | None:
        """Increment the counter if it and the actual owner equal those of `lease` (§1.4, §1.4.1).

        Also succeeds if a handoff has started since (protocol §1.4.1). `HeldLeases` decides what a
        refusal means after an answer was lost.

        Args:
            lease: The row as the caller knows it.
            throughput_kbps: New throughput. None: it is not changed.
            read_up_to_millis: New value of `Lease.read_up_to_millis`. None: it is not changed.

        Returns:
            The current lease; `in_handoff` if a handoff has started. None: the row is another.
        """
        put = LEASE_ROW.attributes(
            counter=lease.counter + 1,
            throughput_kbps=throughput_kbps,
            read_up_to_millis=read_up_to_millis,
        )
        # The counter excludes each write of position or owner since `lease` was read: all change
        # it, but the start of a handoff. The two further conditions exclude a row that was deleted
        # and created again, whose counter begins at 0: for another worker, or a later stream.
        conditions: list[Condition] = [
            Equals(rows.COUNTER, number(lease.counter)),
            recreated_condition(lease),
            *_actual_owner_of(lease),
        ]
        changes = Changes(put)
        # Absent(checkpointOwner): a handoff has not changed the counter. The write is refused once,
        # so that the worker gets to know of it, and repeated without this condition, as in Java.
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
        return row if outcome.applied else None

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
    ) -> Lease | None:
        """Write checkpoint and pending checkpoint, and increment the counter (§1.4, updateLease).

        The condition is that counter, checkpoint and actual owner equal those of `lease`. If the
        checkpoint changes, `ownerSwitchesSinceCheckpoint` becomes 0. The child shard ids and hash
        range of `lease` are written, too. Owners and parents are not changed.

        So a checkpoint never goes back, even if a row was deleted and created again with the same
        counter. `HeldLeases` decides what a refusal means after an answer was lost.

        Args:
            lease: The row as the caller knows it.
            checkpoint: The new checkpoint.
            pending: The new pending checkpoint. None removes it.
            pending_state: Batch number of the pending checkpoint.
            throughput_kbps: New throughput. None: it is not changed.
            read_up_to_millis: New value of `Lease.read_up_to_millis`. None: it is not changed.
            table_mark: New value of `Lease.table_mark`. None: it is not changed.

        Returns:
            The new lease. None: the row is another.

        Raises:
            ValueError: `checkpoint` is before that of `lease`.
        """
        if checkpoint < lease.checkpoint:
            what = f"{lease.lease_key} is {lease.checkpoint} and must not go back to {checkpoint}"
            raise ValueError(f"the checkpoint of {what}")
        switches = lease.owner_switches_since_checkpoint if checkpoint == lease.checkpoint else 0
        put = rows.stream_attributes(lease) | LEASE_ROW.attributes(
            counter=lease.counter + 1,
            owner_switches_since_checkpoint=switches,
            checkpoint=checkpoint,
            throughput_kbps=throughput_kbps,
            read_up_to_millis=read_up_to_millis,
            pending_checkpoint=pending,
            pending_checkpoint_state=None if pending is None else pending_state,
            child_shard_ids=lease.child_shard_ids,
            hash_key_range=lease.hash_key_range,
            table_mark=table_mark,
        )
        remove = {rows.PENDING, rows.PENDING_SUB, rows.PENDING_STATE} - put.keys()
        # Java compares the counter alone. The checkpoint excludes a row that was deleted and
        # created again with this counter, and a write of a process with the same worker id:
        # neither is written over with an older position.
        conditions = [
            Equals(rows.COUNTER, number(lease.counter)),
            *checkpoint_conditions(lease),
            *_actual_owner_of(lease),
        ]
        outcome = self._store.update(
            lease.lease_key, conditions, Changes(put, tuple(sorted(remove)))
        )
        return self._lease(outcome.item) if outcome.applied else None

    def evict(self, lease: Lease) -> Lease | None:
        """Remove the owner and increment the counter (§1.4, evictLease).

        In a handoff, the handoff is cancelled and the owner stays (protocol §1.4). The condition is
        that owner, checkpoint owner and counter equal those of `lease`. None if it does not hold.

        Applied if counter and owners are as expected.
        That is: the counter is one higher, there is no handoff, and no owner. If a handoff was
        cancelled, the owner is the same.
        """
        remove = (
            (rows.CHECKPOINT_OWNER,) if lease.in_handoff else (rows.OWNER, rows.CHECKPOINT_OWNER)
        )
        # Java's evictLease has no counter. It excludes a lease that was assigned to this worker
        # again since.
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

    # -- deletion, and completion of rows that older programs have created

    def delete(self, lease: Lease) -> bool:
        """Delete the row if it has checkpoint and seek of `lease` (§8.2). True: no row is left.

        Applied if there is no row.
        """
        # Java deletes without a condition. A seek sets a row back, and since then its shard may
        # have been read to the end again: its children need the row until they have begun again.
        conditions = [*checkpoint_conditions(lease), seek_condition(lease)]
        outcome = self._store.delete(lease.lease_key, conditions)
        return outcome.applied or outcome.item is None

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
            Changes(LEASE_ROW.attributes(hash_key_range=hash_key_range)),
        ).applied

    # -- a seek, while the application is paused and nobody owns a lease

    def seek(
        self, seeks: Sequence[LeaseSeek], token: str, proof: ConditionCheck
    ) -> tuple[str, ...] | None:
        """Set positions, and create missing rows, in one transaction with `proof`.

        The condition of each row is that nobody owns it, and that its counter and checkpoint equal
        those of the lease. The counter is raised by a number that is drawn from the token, so that
        no later write of a former owner is applied, also if its row was deleted and created again.
        The mark and a pending checkpoint are removed.

        Applied if the row has the token.

        Args:
            seeks: The new positions, at most `MAX_SEEKS`.
            token: Unique text of this call and its repetitions.
            proof: The condition, see `CoordinatorStateTable.proof_of_pause`.

        Returns:
            Keys of the rows that do not fit. They were not changed; the others were. None: `proof`
            does not hold, and nothing was written.
        """
        wanted, refused = list(seeks), list[str]()
        while wanted:
            failed = self._store.transact([proof, *(_write(one, token) for one in wanted)])
            if not failed:
                break
            if 0 in failed:
                return None
            unfit = [one for index, one in enumerate(wanted, 1) if index in failed]
            for one in unfit:
                row = self._store.get(one.lease.lease_key)
                if row is None or row.get(rows.SEEK) != string(token):
                    refused.append(one.lease.lease_key)
            wanted = [one for one in wanted if one not in unfit]
        return tuple(refused)

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


def checkpoint_conditions(lease: Lease) -> list[Condition]:
    """Return the conditions that the row has the checkpoint of `lease`, compared as strings."""
    attributes = LEASE_ROW.attributes(checkpoint=lease.checkpoint)
    # A missing sub-sequence number is 0.
    sub_condition = Equals if lease.checkpoint.sub_sequence_number else AbsentOrEquals
    return [
        Equals(rows.CHECKPOINT, attributes[rows.CHECKPOINT]),
        sub_condition(rows.CHECKPOINT_SUB, attributes[rows.CHECKPOINT_SUB]),
        recreated_condition(lease),
    ]


def recreated_condition(lease: Lease) -> Condition:
    """Return the condition that the row is of the stream of `lease`, and not of a later one.

    A single stream that was created again has the same lease keys.
    """
    if lease.recreated_millis is None:
        return Absent(rows.STREAM_CREATED)
    return Equals(rows.STREAM_CREATED, number(lease.recreated_millis))


def seek_condition(lease: Lease) -> Condition:
    """Return the condition that no seek has been made since `lease` was read."""
    return Absent(rows.SEEK) if lease.seek is None else Equals(rows.SEEK, string(lease.seek))


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


def _write(seek: LeaseSeek, token: str) -> Put | Update:
    lease, millis = seek.lease, seek.initial_millis
    # A row that was deleted counts from 0 again. So it could reach the counter of its former
    # holder, who would then write a checkpoint of before the seek over the sought position.
    counter = lease.counter + _jump(token)
    if not seek.exists:
        created = lease.with_(
            checkpoint=seek.position,
            counter=counter,
            initial_millis=millis,
            table_mark=None,
            seek=token,
        )
        return Put(lease_to_item(created), [Absent(rows.LEASE_KEY)])
    put = LEASE_ROW.attributes(
        seek=token,
        counter=counter,
        owner_switches_since_checkpoint=0,
        checkpoint=seek.position,
        initial_millis=millis,
    )
    others = {rows.PENDING, rows.PENDING_SUB, rows.PENDING_STATE, rows.READ_UP_TO}
    remove = (others | {rows.INITIAL_TIMESTAMP, rows.TABLE}) - put.keys()
    # Counter and checkpoint exclude a row that was written since the operator's plan was made. The
    # owners exclude a worker that could write its own position over the sought one.
    conditions: list[Condition] = [
        Equals(rows.COUNTER, number(lease.counter)),
        Absent(rows.OWNER),
        Absent(rows.CHECKPOINT_OWNER),
        *checkpoint_conditions(lease),
    ]
    return Update(lease.lease_key, conditions, Changes(put, tuple(sorted(remove))))


def _jump(token: str) -> int:
    """Return a number from 2 to 2^40 + 1 that differs between tokens. KCL's counter has 63 bits.

    A worker adopts a counter that is one higher than the one it knows (`HeldLeases`).
    """
    return 2 + int.from_bytes(hashlib.sha256(token.encode()).digest()[:5])

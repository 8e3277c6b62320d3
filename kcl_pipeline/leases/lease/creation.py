"""Create lease rows in a transaction that proves that no row comes back.

A row that exists is never changed. A write counts as applied if the rows exist afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from kcl_pipeline.leases.lease import serialization as rows
from kcl_pipeline.leases.lease.serialization import (
    lease_to_item,
    number,
    string,
    string_set,
)
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    Changes,
    Condition,
    ConditionCheck,
    Differs,
    Equals,
    LeaseStore,
    Present,
    Put,
    Update,
)
from kcl_pipeline.position import SHARD_END


class LeaseCreation:
    """The methods of a lease table that create rows."""

    def __init__(self, store: LeaseStore) -> None:
        self.name = store.name
        self._store = store

    def create_leases(
        self, leases: Sequence[Lease], proof: ConditionCheck | Update
    ) -> tuple[str, ...] | None:
        """Put the rows that do not exist, in one transaction whose condition is `proof`.

        Applied if all rows exist; see `create_successors`.

        Args:
            leases: The new rows, at most 99.
            proof: The condition, see `CoordinatorStateTable.proof_of_lock`; or an update of another
                row with its conditions.

        Returns:
            The keys that this call created. None if `proof` does not hold; nothing was written.
        """
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
        has_not_begun = [*checkpoint_conditions(child), Absent(rows.PENDING)]
        # An update in a transaction needs a change; the parents are set to the same value.
        same = Changes({rows.PARENTS: string_set(child.parent_shard_ids)})
        return self.create_leases(parents, Update(child.lease_key, has_not_begun, same))


def checkpoint_conditions(lease: Lease) -> list[Condition]:
    """Return the conditions that the row has the checkpoint of `lease`, compared as strings."""
    attributes = rows.position_attributes(rows.CHECKPOINT, rows.CHECKPOINT_SUB, lease.checkpoint)
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

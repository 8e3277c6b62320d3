"""Set the positions of leases that nobody owns, while the application is paused (protocol §1.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.leases.lease import serialization as rows
from kcl_pipeline.leases.lease.creation import LeaseCreation, checkpoint_conditions
from kcl_pipeline.leases.lease.serialization import lease_to_item, number, string
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import (
    Absent,
    Changes,
    Condition,
    ConditionCheck,
    Equals,
    Item,
    Put,
    Update,
)
from kcl_pipeline.position import Position

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


class LeasePositions(LeaseCreation):
    """The methods of a lease table that set positions."""

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


def _write(seek: LeaseSeek, token: str) -> Put | Update:
    lease, millis = seek.lease, seek.initial_millis
    # A row that was deleted counts from 0 again. So it could reach the counter of its former
    # holder, who would then write a checkpoint of before the seek over the sought position.
    counter = lease.counter + _jump(token)
    if not seek.exists:
        created = lease.with_(
            checkpoint=seek.position, counter=counter, initial_millis=millis, table_mark=None
        )
        return Put(lease_to_item(created) | {rows.SEEK: string(token)}, [Absent(rows.LEASE_KEY)])
    put: Item = {
        rows.COUNTER: number(counter),
        rows.OWNER_SWITCHES: number(0),
        rows.SEEK: string(token),
        **rows.position_attributes(rows.CHECKPOINT, rows.CHECKPOINT_SUB, seek.position),
        **({rows.INITIAL_TIMESTAMP: number(millis)} if millis is not None else {}),
    }
    others = {rows.PENDING, rows.PENDING_SUB, rows.PENDING_STATE, rows.READ_UP_TO}
    remove = (others | {rows.INITIAL_TIMESTAMP, rows.TABLE}) - put.keys()
    conditions: list[Condition] = [
        Equals(rows.COUNTER, number(lease.counter)),
        Absent(rows.OWNER),
        Absent(rows.CHECKPOINT_OWNER),
        *checkpoint_conditions(lease),
    ]
    return Update(lease.lease_key, conditions, Changes(put, tuple(sorted(remove))))


def _jump(token: str) -> int:
    """Return a number from 1 to 2^40 that differs between tokens. KCL's counter has 63 bits."""
    return 1 + int.from_bytes(hashlib.sha256(token.encode()).digest()[:5])

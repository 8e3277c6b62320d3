"""Compute the new positions of the leases of one stream. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcl_pipeline.control.seek.target import SeekTarget
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.leases.lease.seek import LeaseSeek
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.planning.shard_sync import creation_order, new_lease
from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition


@dataclass(frozen=True, slots=True)
class PositionChange:
    """The change of one lease.

    Attributes:
        seek: The write.
        note: What is repeated or skipped, as far as it is known.
    """

    seek: LeaseSeek
    note: str

    @property
    def lease_key(self) -> str:
        """The lease."""
        return self.seek.lease.lease_key


def changes_of_stream(
    stream: StreamId,
    leases: Sequence[Lease],
    listed: Sequence[Shard],
    begin: Iterable[Shard],
    target: SeekTarget,
    *,
    also_same: bool = False,
) -> tuple[PositionChange, ...]:
    """Return the changes of all leases of a stream, in the order of their shards.

    A shard that is open at the position gets it. Shards that follow it begin at TRIM_HORIZON, even
    if their rows are gone. Shards that ended before the position stay as they are, or end at once.

    Args:
        stream: The stream.
        leases: Its leases.
        listed: All its shards, also closed ones.
        begin: The shards that are open at the position.
        target: TRIM_HORIZON, LATEST or AT_TIMESTAMP.
        also_same: Whether rows that have the position already are changes, too: the table may have
            another one.
    """
    rows = {lease.shard_id: lease for lease in leases}
    first = {shard.shard_id for shard in begin}
    later = _descendants(first, listed)
    # Shards that have left retention are left out: their rest cannot be read.
    changes = (
        _change(stream, one, rows.get(one.shard_id), target, first, later, also_same=also_same)
        for one in creation_order(listed)
    )
    return tuple(change for change in changes if change is not None)


def _change(
    stream: StreamId,
    shard: Shard,
    row: Lease | None,
    target: SeekTarget,
    first: set[str],
    later: set[str],
    *,
    also_same: bool,
) -> PositionChange | None:
    position, millis = target.position, target.millis
    if target.kind == "LATEST":
        if row is None and shard.shard_id not in first:
            return None
        if row is not None and row.ended:
            return None
    elif shard.shard_id in later:
        position, millis = TRIM_HORIZON, None
    elif shard.shard_id not in first and (row is None or row.ended):
        return None
    if row is None:
        lease = new_lease(stream, shard, position)
        seek = LeaseSeek(lease, position, millis, exists=False)
        return PositionChange(seek, "its row was deleted; it is created again")
    if row.checkpoint == position and row.initial_millis == millis and not also_same:
        return None
    return PositionChange(LeaseSeek(row, position, millis), note_of(row, target))


def changes_of_shards(
    stream: StreamId,
    leases: Sequence[Lease],
    listed: Sequence[Shard],
    named: Iterable[Lease],
    target: SeekTarget,
    stored: Mapping[str, StoredPosition],
) -> tuple[PositionChange, ...]:
    """Return the changes of named leases, and of the shards that follow those that are read again.

    A descendant of a shard that is read again begins at TRIM_HORIZON, also if it has no row: else
    its rows would be in the table before those of the ancestor.

    Args:
        stream: The stream.
        leases: All its leases.
        listed: All its shards, also closed ones.
        named: The leases to change.
        target: The wanted position.
        stored: What the table has, by shard id. Empty: the sink stores no positions.

    Raises:
        SettingsError: The sequence number does not belong to the shard, or the shard is gone.
    """
    shards = {one.shard_id: one for one in listed}
    changes: dict[str, PositionChange] = {}
    again: set[str] = set()
    for lease in named:
        _check_target(lease, shards.get(lease.shard_id), target)
        if _reads_again(lease, target, stored.get(lease.shard_id, NOTHING_STORED)):
            again.add(lease.shard_id)
        seek = LeaseSeek(lease, target.position, target.millis)
        changes[lease.shard_id] = PositionChange(seek, note_of(lease, target))
    rows = {lease.shard_id: lease for lease in leases}
    later = _descendants(again, listed) - changes.keys()
    for shard in creation_order([shards[one] for one in later]):
        row = rows.get(shard.shard_id)
        seek = LeaseSeek(
            row or new_lease(stream, shard, TRIM_HORIZON), TRIM_HORIZON, exists=row is not None
        )
        note = "follows a shard that is read again; all its records in retention are repeated"
        changes[shard.shard_id] = PositionChange(seek, note)
    return tuple(changes.values())


def _check_target(lease: Lease, shard: Shard | None, target: SeekTarget) -> None:
    if shard is None:
        raise SettingsError(
            f"the stream does not list the shard {lease.shard_id} any more; nothing can be read"
        )
    if target.kind == "AFTER":
        number, end = int(target.position.sequence_number), shard.ending_sequence_number
        if number < int(shard.starting_sequence_number) or (end is not None and number > int(end)):
            raise SettingsError(
                f"{target.position} is not a sequence number of the shard {lease.shard_id}, which "
                f"begins at {shard.starting_sequence_number}"
                + (f" and ends at {end}" if end is not None else "")
            )


def _reads_again(lease: Lease, target: SeekTarget, stored: StoredPosition) -> bool:
    """Return whether records may be read again that were read before."""
    if target.kind == "LATEST":
        return False
    if target.kind != "AFTER" or lease.ended or stored.ended:
        return True
    return target.position < max(lease.checkpoint, stored.position or lease.checkpoint)


def note_of(lease: Lease, target: SeekTarget) -> str:
    """Say what is repeated or skipped, as far as the row says it."""
    before = lease.checkpoint
    if target.kind == "LATEST":
        return "unread records are skipped"
    if target.kind == "TRIM_HORIZON":
        return (
            "not begun yet" if before == TRIM_HORIZON else "all records in retention are repeated"
        )
    if target.kind == "AFTER":
        if before.is_sentinel and before != SHARD_END:
            return "records before the position are skipped" if before != LATEST else "may repeat"
        return "repeats" if target.position < before else "skips"
    if before == SHARD_END:
        return "records from this time on are repeated"
    if lease.read_up_to_millis is None or target.millis is None:
        return "records between the two positions are repeated or skipped"
    seconds = (lease.read_up_to_millis - target.millis) / 1000
    if seconds > 0:
        return f"records of about {seconds:,.0f} s are repeated"
    return f"records of up to {-seconds:,.0f} s and what has arrived since may be skipped"


def _descendants(first: set[str], listed: Sequence[Shard]) -> set[str]:
    children: Mapping[str, list[str]] = {shard.shard_id: [] for shard in listed}
    for shard in listed:
        for parent in shard.parents:
            if parent in children:
                children[parent].append(shard.shard_id)
    found: set[str] = set()
    waiting = list(first)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found and child not in first:
                found.add(child)
                waiting.append(child)
    return found

"""Decide which leases of finished shards can be deleted (protocol §8.2).

The leader decides this for all finished leases. In KCL each worker decides it for the shards that
it has finished since its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.shards import Shard, StreamId


@dataclass(frozen=True, slots=True)
class Deletion:
    """A lease to delete, and the reason."""

    lease: Lease
    reason: str


def completed_leases(
    leases: Iterable[Lease], ended_seconds: Mapping[str, float], keep_seconds: float
) -> tuple[Deletion, ...]:
    """Return the finished leases that are not needed any more, sorted by key.

    A lease is deleted if no parent has a row and every child has a row with a checkpoint after
    TRIM_HORIZON and AT_TIMESTAMP. A lease without known children is kept.

    Args:
        leases: All leases.
        ended_seconds: For each lease, the time since it is known to be at SHARD_END.
        keep_seconds: A lease is kept for this time after its end.
    """
    rows = {lease.lease_key: lease for lease in leases}
    found = []
    for key in sorted(rows):
        lease = rows[key]
        if (
            not lease.ended
            or not lease.child_shard_ids
            or ended_seconds.get(key, 0.0) < keep_seconds
        ):
            continue
        if any(lease.key_of_sibling(parent) in rows for parent in lease.parent_shard_ids):
            continue
        children = [rows.get(lease.key_of_sibling(child)) for child in lease.child_shard_ids]
        if all(child is not None and has_started(child) for child in children):
            found.append(
                Deletion(lease, "its shard was read to the end and its children have been started")
            )
    return tuple(found)


def has_started(lease: Lease) -> bool:
    """Return whether the shard has been started: at LATEST, a number, or SHARD_END."""
    return lease.checkpoint not in (TRIM_HORIZON, AT_TIMESTAMP)


def garbage_leases(
    leases: Iterable[Lease],
    shards: Iterable[Shard],
    stream: StreamId,
    ended_seconds: Mapping[str, float],
    keep_seconds: float,
) -> tuple[Deletion, ...]:
    """Return leases at SHARD_END whose shard has left retention, sorted by key.

    The worker of an unfinished lease finds out itself that its shard does not exist any more. An
    empty list of shards proves nothing.

    Args:
        leases: The leases of the stream.
        shards: All shards of the stream.
        stream: The stream.
        ended_seconds: For each lease, the time since it is known to be at SHARD_END.
        keep_seconds: A lease is kept for this time after its end.
    """
    listed = {stream.lease_key(shard.shard_id) for shard in shards}
    if not listed:
        return ()
    return tuple(
        Deletion(lease, "its shard does not exist any more")
        for lease in sorted(leases, key=lambda row: row.lease_key)
        if lease.ended
        and lease.lease_key not in listed
        and ended_seconds.get(lease.lease_key, 0.0) >= keep_seconds
    )


def former_leases(leases: Iterable[Lease], streams: Iterable[StreamId]) -> tuple[Deletion, ...]:
    """Return the leases of former streams of the same account and name.

    They are in the order of the streams, and sorted by key. A stream that was created later proves
    that the former one, with all its records, does not exist any more.

    Args:
        leases: All leases.
        streams: The streams that have their names now.
    """
    groups: dict[tuple[str | None, int | None], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((lease.stream, lease.recreated_millis), []).append(lease)
    named: dict[tuple[str | None, str | None], list[_Group]] = {}
    for (serialized, recreated_millis), rows in groups.items():
        other = StreamId.parse(serialized) if serialized is not None else None
        name = (None, None) if other is None else (other.account, other.name)
        epoch = None if other is None else other.creation_epoch
        named.setdefault(name, []).append(_Group(epoch, recreated_millis, rows))
    found: list[Lease] = []
    for stream in streams:
        is_single = stream.creation_epoch is None
        same_name = named.get((None, None) if is_single else (stream.account, stream.name), [])
        former = [lease for group in same_name if group.is_before(stream) for lease in group.leases]
        found += sorted(former, key=lambda row: row.lease_key)
    return tuple(Deletion(lease, "its stream was deleted and created again") for lease in found)


@dataclass(frozen=True, slots=True)
class _Group:
    """The leases of one stream, or of a former stream of its name."""

    epoch: int | None
    recreated_millis: int | None
    leases: list[Lease]

    def is_before(self, stream: StreamId) -> bool:
        if stream.creation_epoch is None:
            return (
                stream.recreated_millis is not None
                and (self.recreated_millis or 0) < stream.recreated_millis
            )
        return (self.epoch or 0) < stream.creation_epoch


def children_to_fill(
    leases: Iterable[Lease], shards: Iterable[Shard], stream: StreamId
) -> Mapping[str, tuple[str, ...]]:
    """Return child shard ids, by lease key, of finished leases that have none in their row."""
    children: dict[str, list[str]] = {}
    for shard in shards:
        for parent in shard.parents:
            children.setdefault(stream.lease_key(parent), []).append(shard.shard_id)
    return {
        lease.lease_key: tuple(sorted(children[lease.lease_key]))
        for lease in leases
        if lease.ended and not lease.child_shard_ids and lease.lease_key in children
    }

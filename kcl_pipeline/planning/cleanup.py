"""Which finished leases may go (protocol §8.2). Pure.

The leader asks this for all finished rows of the table; KCL asks it on each worker, only for the
ends that this very worker processed, and forgets them at a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.shards import Shard, StreamId


@dataclass(frozen=True, slots=True)
class Deletion:
    """A row to delete and the reason, a clause for people."""

    lease: Lease
    reason: str


def completed_leases(
    leases: Iterable[Lease], ended_seconds: Mapping[str, float], keep_seconds: float
) -> tuple[Deletion, ...]:
    """Finished leases that nobody needs, sorted by key.

    `ended_seconds`: how long each lease has been known to be at SHARD_END. A lease goes when that
    is at least `keep_seconds`, no parent row is left, and every child has a row whose checkpoint is
    past TRIM_HORIZON and AT_TIMESTAMP. A lease whose children are not known stays.
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
    """Whether a checkpoint says that reading has begun: LATEST, any number and SHARD_END do."""
    return lease.checkpoint not in (TRIM_HORIZON, AT_TIMESTAMP)


def garbage_leases(
    leases: Iterable[Lease],
    shards: Iterable[Shard],
    stream: StreamId,
    ended_seconds: Mapping[str, float],
    keep_seconds: float,
) -> tuple[Deletion, ...]:
    """Leases at SHARD_END for at least `keep_seconds` whose shard is not in an unfiltered listing
    any more: it has left retention. Sorted by key.

    Unfinished leases of such shards are left to their workers, which read that the shard is gone
    and finish it. An empty listing proves nothing.
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


def children_to_fill(
    leases: Iterable[Lease], shards: Iterable[Shard], stream: StreamId
) -> Mapping[str, tuple[str, ...]]:
    """Bare child shard ids, by lease key, for finished leases that have none although the listing
    shows children.
    """
    children: dict[str, list[str]] = {}
    for shard in shards:
        for parent in shard.parents:
            children.setdefault(stream.lease_key(parent), []).append(shard.shard_id)
    return {
        lease.lease_key: tuple(sorted(children[lease.lease_key]))
        for lease in leases
        if lease.ended and not lease.child_shard_ids and lease.lease_key in children
    }

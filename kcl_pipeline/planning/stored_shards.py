"""Decide which leases to create from the positions that the table stores.

A lease row can be deleted, also with all others. The table still shows which shards were begun, and
which of them have ended. A shard that was begun and has not ended is continued. The shards after it
wait for it. They start at TRIM_HORIZON if the initial position is LATEST, and at AT_TIMESTAMP if it
is that: a child can have records that are older than the timestamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kcl_pipeline.config import InitialPosition
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.shard_sync import creation_order, is_begun, new_lease
from kcl_pipeline.position import AT_TIMESTAMP, NOTHING_STORED, TRIM_HORIZON, StoredPosition
from kcl_pipeline.shards import Shard, StreamId


def leases_with_stored(
    stream: StreamId,
    initial_leases: Iterable[Lease],
    shards: Sequence[Shard],
    rows: Mapping[str, Lease],
    stored: Mapping[str, StoredPosition],
    initial: InitialPosition,
) -> tuple[Lease, ...]:
    """Return the leases to create if the table stores positions.

    Args:
        stream: The stream.
        initial_leases: The leases that the initial position alone requires.
        shards: All shards of the stream.
        rows: The existing leases by shard id.
        stored: What the table stores, for each shard that it knows.
        initial: The initial position of the settings.

    Returns:
        The leases in creation order. Those of `initial_leases` whose shards are finished
        are left out.
    """
    ordered = creation_order(shards)
    finished = finished_shards(ordered, rows, stored)
    initial_leases = [lease for lease in initial_leases if lease.shard_id not in finished]
    live = {lease.shard_id for lease in initial_leases}
    live |= {shard_id for shard_id, row in rows.items() if not row.ended}
    followed, pending = set[str](), set[str]()
    for shard in ordered:
        if shard.shard_id in rows or shard.shard_id in finished:
            continue
        if shard.shard_id in stored or any(
            parent in stored or parent in finished or parent in followed for parent in shard.parents
        ):
            followed.add(shard.shard_id)
        elif shard.shard_id not in live and not (live | pending).isdisjoint(shard.parents):
            pending.add(shard.shard_id)
    # A pending shard gets its row when its parent ends. A merge of it and of a shard that is
    # followed has its row before that: its worker must find the row of each parent
    for shard in reversed(ordered):
        if shard.shard_id in followed:
            followed |= pending.intersection(shard.parents)
    kept = [lease for lease in initial_leases if lease.shard_id not in followed]
    start = AT_TIMESTAMP if initial == "AT_TIMESTAMP" else TRIM_HORIZON
    added = (shard for shard in ordered if shard.shard_id in followed)
    return (*(new_lease(stream, shard, start) for shard in added), *kept)


def finished_shards(
    ordered: Sequence[Shard], rows: Mapping[str, Lease], stored: Mapping[str, StoredPosition]
) -> set[str]:
    """Return the shards that have ended in the table, and all ancestors of begun shards.

    No shard begins before its parents have ended. A Java worker may have ended a shard that the
    table shows as unfinished; then its row was deleted after its children had begun.

    Args:
        ordered: Listed shards in creation order.
        rows: Their leases by shard id.
        stored: What the table stores, for each shard that it knows.
    """
    finished = {shard_id for shard_id, one in stored.items() if one.ended}
    for shard in reversed(ordered):
        row = rows.get(shard.shard_id)
        known = stored.get(shard.shard_id, NOTHING_STORED)
        has_begun = known.has_begun or (row is not None and is_begun(row))
        if has_begun or shard.shard_id in finished:
            finished.update(shard.parents)
    return finished

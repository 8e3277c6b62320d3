"""Which lease rows are missing, and where they begin (protocol §7.4, §6.7). Pure.

Two ways in: a stream without any lease gets one for every shard that the filtered ListShards
returned; a stream with leases gets those that no ancestor's lease will bring about at its
SHARD_END.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from kcl_pipeline.config import InitialPosition
from kcl_pipeline.errors import ShardSyncError
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId

ShardFilter = Literal["AT_LATEST", "AT_TRIM_HORIZON", "AT_TIMESTAMP"]

_SENTINELS: Mapping[InitialPosition, Position] = {
    "LATEST": LATEST,
    "TRIM_HORIZON": TRIM_HORIZON,
    "AT_TIMESTAMP": AT_TIMESTAMP,
}
_FILTERS: Mapping[InitialPosition, ShardFilter] = {
    "LATEST": "AT_LATEST",
    "TRIM_HORIZON": "AT_TRIM_HORIZON",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
}
_MERGE_PARENTS = 2


def sentinel(position: InitialPosition) -> Position:
    """The checkpoint that a lease at this initial position begins with."""
    return _SENTINELS[position]


def initial_filter(position: InitialPosition) -> ShardFilter:
    """The ListShards filter for a stream without leases: the shards that were open at that place
    (protocol §7.3).
    """
    return _FILTERS[position]


def new_lease(stream: StreamId, shard: Shard, checkpoint: Position) -> Lease:
    """A fresh row: no owner, counter 0, both parents as reported even when they have left
    retention.
    """
    return Lease(
        lease_key=stream.lease_key(shard.shard_id),
        checkpoint=checkpoint,
        parent_shard_ids=frozenset(shard.parents),
        hash_key_range=shard.hash_key_range,
        stream=stream.serialized if stream.creation_epoch is not None else None,
    )


def leases_for_new_stream(
    stream: StreamId, shards: Iterable[Shard], position: InitialPosition
) -> tuple[Lease, ...]:
    """One lease for every shard of a listing made with `initial_filter(position)`, in creation
    order (protocol §7.4 "empty table").

    Emptiness is judged per stream here, not over the whole table: with AT_TIMESTAMP, KCL's other
    path would begin a stream that is added later at shards that ended before the timestamp, and
    their children at TRIM_HORIZON.
    """
    checkpoint = sentinel(position)
    return tuple(new_lease(stream, shard, checkpoint) for shard in _creation_order(shards))


def unexpected_children(shards: Iterable[Shard]) -> tuple[str, ...]:
    """Open shards with a parent that is in the list and open, too: such a list is from the middle
    of a reshard (protocol §7.3).
    """
    listed = {shard.shard_id: shard for shard in shards}
    found = [
        s.shard_id
        for s in listed.values()
        if s.is_open and any(p in listed and listed[p].is_open for p in s.parents)
    ]
    return tuple(sorted(found))


def leases_for_missing_shards(
    stream: StreamId,
    shards: Sequence[Shard],
    existing: Mapping[str, bool],
    position: InitialPosition,
    *,
    ignore_unexpected_child_shards: bool = False,
) -> tuple[Lease, ...]:
    """Leases to create for a stream that has some, from an unfiltered listing, in creation order
    (protocol §7.4 "non-empty table").

    `existing` maps the bare shard id of every row to whether it is at SHARD_END. On top of KCL's
    rules a shard is created at TRIM_HORIZON when all its parents' rows are at SHARD_END: nobody
    would ever create it. Raises `ShardSyncError` for a list with unexpected children, unless they
    are to be ignored; then they are left out.
    """
    unexpected = unexpected_children(shards)
    if unexpected and not ignore_unexpected_child_shards:
        raise ShardSyncError(
            f"the shards {list(unexpected)} of {stream.name} are open while a parent is "
            "open: the list is not consistent yet"
        )
    listed = {shard.shard_id: shard for shard in shards}
    begin = [
        s.shard_id
        for s in listed.values()
        if s.is_open and s.shard_id not in existing and s.shard_id not in unexpected
    ]
    search = _AncestorSearch(listed, existing, position)
    for shard_id in sorted(begin):
        if not search.visit(shard_id):
            search.found[shard_id] = sentinel(position)
    found = {**search.found, **dict.fromkeys(_orphans(listed, existing), TRIM_HORIZON)}
    return tuple(
        new_lease(stream, shard, found[shard.shard_id])
        for shard in _creation_order(listed[key] for key in found)
    )


class _AncestorSearch:
    """KCL's walk from an open shard up to its oldest listed ancestors; `found` maps the shards to
    create to their checkpoints.
    """

    def __init__(
        self, listed: Mapping[str, Shard], existing: Collection[str], position: InitialPosition
    ) -> None:
        self._listed = listed
        self._existing = existing
        self._position = position
        self._is_descendant: dict[str, bool] = {}
        self._wanted: set[str] = set()
        self.found: dict[str, Position] = {}

    def visit(self, shard_id: str) -> bool:
        """Whether the shard's data will be reached from an ancestor's lease.

        A stack instead of recursion: histories can be long.
        """
        stack = [shard_id]
        while stack:
            current = stack[-1]
            if current in self._is_descendant:
                stack.pop()
                continue
            if current in self._existing:
                self._is_descendant[current] = True
                continue
            waiting = [p for p in self._parents(current) if p not in self._is_descendant]
            if waiting:
                stack.extend(waiting)
            else:
                self._is_descendant[current] = self._decide(current)
        return self._is_descendant[shard_id]

    def _parents(self, shard_id: str) -> list[str]:
        return [p for p in self._listed[shard_id].parents if p in self._listed]

    def _decide(self, shard_id: str) -> bool:
        parents = self._parents(shard_id)
        reached = {p for p in parents if self._is_descendant[p] or p in self._wanted}
        if not reached:
            if self._position != "LATEST":
                self._wanted.add(shard_id)
            return False
        for parent in parents:
            if parent in self._existing:
                continue
            if parent in self.found or parent in self._wanted or parent not in reached:
                from_horizon = parent in reached and self._position != "AT_TIMESTAMP"
                self.found[parent] = TRIM_HORIZON if from_horizon else sentinel(self._position)
        return True


def _orphans(listed: Mapping[str, Shard], existing: Mapping[str, bool]) -> set[str]:
    """Listed shards without a row whose parents are all finished, and no child of which has a row.

    A listed parent without a row is not finished: it gets a row first, and creates the child at its
    end.
    """
    has_children_with_row = {
        p for shard in listed.values() if shard.shard_id in existing for p in shard.parents
    }
    orphans = set()
    for shard_id, shard in listed.items():
        parents = [p for p in shard.parents if p in existing or p in listed]
        if shard_id in existing or shard_id in has_children_with_row or not parents:
            continue
        if all(existing.get(parent, False) for parent in parents):
            orphans.add(shard_id)
    return orphans


def has_not_begun(lease: Lease) -> bool:
    """Whether the row shows a child whose parents' rows must exist.

    A child lease is created at TRIM_HORIZON while its parents have rows, and a finished parent's
    row is deleted only after the checkpoint of every child has left TRIM_HORIZON (protocol §8.2:
    this leader and KCL's workers). So a parent that has no row, looked up before this row was read,
    was deleted by hand. A pending checkpoint says that a worker had the parents' ends before it.
    At LATEST and AT_TIMESTAMP parents without rows are normal.
    """
    return lease.checkpoint == TRIM_HORIZON and lease.pending_checkpoint is None


def restored_parents(
    stream: StreamId,
    shards: Iterable[Shard],
    missing: Collection[str],
    position: InitialPosition,
) -> tuple[Lease, ...]:
    """Leases for the parents of a child that has not begun, whose rows were deleted by hand.

    Args:
        stream: The stream of the child.
        shards: An unfiltered listing. A parent that is not in it has left retention: none is made.
        missing: Bare shard ids of the parents without a row.
        position: Where shard sync starts a shard.

    Returns:
        The leases in creation order; none at LATEST.
    """
    found = _creation_order(shard for shard in shards if shard.shard_id in missing)
    leases = (new_lease(stream, shard, sentinel(position)) for shard in found)
    return tuple(lease for lease in leases if restored_lease(lease, position) is not None)


def restored_lease(lease: Lease, position: InitialPosition) -> Lease | None:
    """The row that takes the place of one that was deleted by hand, as shard sync makes it.

    None at LATEST: the shard is closed, and behind its end there is nothing to read.
    """
    if position == "LATEST":
        return None
    return Lease(
        lease_key=lease.lease_key,
        checkpoint=sentinel(position),
        parent_shard_ids=lease.parent_shard_ids,
        hash_key_range=lease.hash_key_range,
        stream=lease.stream,
    )


def _creation_order(shards: Iterable[Shard]) -> list[Shard]:
    """Oldest first, so that a crash between two writes leaves ancestors without descendants, never
    the other way round.
    """
    return sorted(shards, key=lambda s: (int(s.starting_sequence_number), s.shard_id))


def successors(
    shards: Sequence[Shard], shard_id: str, hash_key_range: HashKeyRange | None
) -> tuple[ChildShard, ...]:
    """The oldest listed shards that hold the records after those of a shard that is not listed.

    Ancestors leave retention before their descendants, so every listed shard that overlaps the hash
    range of a shard that has left is one of its descendants; those without a listed parent among
    them are the oldest. Without a hash range only the children can be told.
    """
    found = {
        shard.shard_id: shard
        for shard in shards
        if shard_id in shard.parents
        or (hash_key_range is not None and hash_key_range.overlaps(shard.hash_key_range))
    }
    return tuple(
        ChildShard(shard.shard_id, shard.parents, shard.hash_key_range)
        for shard in _creation_order(found.values())
        if not any(parent in found for parent in shard.parents)
    )


def leases_after_loss(lease: Lease, shards: Sequence[ChildShard]) -> tuple[Lease, ...]:
    """The leases of `successors` of a shard that is gone, at TRIM_HORIZON.

    Unlike `child_leases` this does not ask for the rows of both parents of a merge: the row of one
    of them is about to be deleted, and the other one still holds the merged shard back.
    """
    return tuple(
        Lease(
            lease_key=lease.key_of_sibling(shard.shard_id),
            checkpoint=TRIM_HORIZON,
            parent_shard_ids=frozenset(shard.parents),
            hash_key_range=shard.hash_key_range,
            stream=lease.stream,
        )
        for shard in shards
    )


def child_leases(
    lease: Lease, children: Sequence[ChildShard], existing: Collection[str]
) -> tuple[Lease, ...]:
    """The leases of the shards that follow a finished one, always at TRIM_HORIZON (protocol §6.7).

    `existing`: bare ids of those parents of `children` that have a row, the shard of `lease` among
    them. A merge needs both parents' rows: else the child would begin before the other parent's
    records were read. Raises `ShardSyncError` when it does not have them yet, or when the report of
    a single child does not name two parents; ask again later.
    """
    if len(children) == 1:
        child = children[0]
        if len(set(child.parents)) != _MERGE_PARENTS:
            raise ShardSyncError(
                f"{lease.lease_key} ended with the one child {child.shard_id}, whose parents "
                f"are {list(child.parents)} instead of two"
            )
        missing = [p for p in child.parents if p not in existing]
        if missing and len(missing) < _MERGE_PARENTS:
            raise ShardSyncError(
                f"{lease.lease_key} was merged with {missing[0]}, which has no lease yet; "
                f"{child.shard_id} has to wait for it"
            )
    return leases_after_loss(lease, sorted(children, key=lambda c: c.shard_id))

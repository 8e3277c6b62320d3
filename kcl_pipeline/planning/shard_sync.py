"""Compute missing leases and their initial positions (protocol §7.4, §6.7).

A stream without leases gets one for every shard of a filtered ListShards. A stream with leases gets
those that no lease of an ancestor will create at its SHARD_END.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from kcl_pipeline.config import InitialPosition
from kcl_pipeline.errors import ShardSyncError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId

ShardFilter = Literal["AT_LATEST", "AT_TRIM_HORIZON", "AT_TIMESTAMP"]

_FILTERS: Mapping[InitialPosition, ShardFilter] = {
    "LATEST": "AT_LATEST",
    "TRIM_HORIZON": "AT_TRIM_HORIZON",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
}
_MERGE_PARENTS = 2


def initial_filter(position: InitialPosition) -> ShardFilter:
    """Return the ListShards filter for a stream without leases (protocol §7.3)."""
    return _FILTERS[position]


def new_lease(stream: StreamId, shard: Shard, checkpoint: Position) -> Lease:
    """Return a new lease: no owner, counter 0, all parents, also those that have left retention."""
    return Lease(
        lease_key=stream.lease_key(shard.shard_id),
        checkpoint=checkpoint,
        parent_shard_ids=frozenset(shard.parents),
        hash_key_range=shard.hash_key_range,
        stream=stream.serialized if stream.creation_epoch is not None else None,
        recreated_millis=stream.recreated_millis,
    )


def with_initial_time(leases: Iterable[Lease], millis: int | None) -> tuple[Lease, ...]:
    """Return the leases; those at AT_TIMESTAMP with their time, which KCL's rows do not have.

    A worker that does not name the stream in its settings does not know the time.
    """
    return tuple(
        lease.with_(initial_millis=millis) if lease.checkpoint == AT_TIMESTAMP else lease
        for lease in leases
    )


def with_creation_time(leases: Iterable[Lease], since: datetime | None) -> tuple[Lease, ...]:
    """Return the leases with the time of the service when they were created, not at AT_TIMESTAMP.

    LATEST alone means the end of the shard when a worker starts to read it. A worker that takes the
    lease before the first commit would skip what arrived since the former worker started. At
    TRIM_HORIZON the time shows later that records have left retention before anybody began.
    """
    millis = None if since is None else int(since.timestamp() * 1000)
    return tuple(
        lease.with_(initial_millis=millis) if lease.checkpoint in (LATEST, TRIM_HORIZON) else lease
        for lease in leases
    )


def with_read_up_to(leases: Iterable[Lease], millis: int | None) -> tuple[Lease, ...]:
    """Return the leases of children; those at TRIM_HORIZON with a time of their parent.

    Args:
        leases: The children's leases.
        millis: `Lease.read_up_to_millis` of a parent. A child has no record that arrived before the
            last one of its parents. None: unknown.
    """
    return tuple(
        lease.with_(read_up_to_millis=millis) if lease.checkpoint == TRIM_HORIZON else lease
        for lease in leases
    )


def with_times_of_parents(leases: Iterable[Lease], rows: Iterable[Lease]) -> tuple[Lease, ...]:
    """Return the leases, each child with the time of its parents' rows, see `with_read_up_to`."""
    known = {row.shard_id: row.read_up_to_millis for row in rows}
    found: list[Lease] = []
    for lease in leases:
        times = (known.get(parent) for parent in lease.parent_shard_ids)
        latest = max((millis for millis in times if millis is not None), default=None)
        found += with_read_up_to((lease,), latest)
    return tuple(found)


def leases_for_new_stream(
    stream: StreamId, shards: Iterable[Shard], position: InitialPosition
) -> tuple[Lease, ...]:
    """Return a lease for every shard of a stream without leases (protocol §7.4 "empty table").

    Unlike in KCL, this applies per stream and not only to an empty table. Otherwise a stream that
    is added later with AT_TIMESTAMP would start at shards that ended before the timestamp, and
    their children at TRIM_HORIZON.

    Args:
        stream: The stream.
        shards: The shards of ListShards with `initial_filter(position)`.
        position: The initial position.

    Returns:
        The leases in creation order.
    """
    checkpoint = Position(position)
    return tuple(new_lease(stream, shard, checkpoint) for shard in creation_order(shards))


def unexpected_children(shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return the shards with an open parent in the list, as during a reshard (protocol §7.3).

    A closed shard counts, too, as in KCL: a list in which the parent of a finished shard is still
    open mixes two states of the stream.
    """
    listed = {shard.shard_id: shard for shard in shards}
    found = [
        s.shard_id
        for s in listed.values()
        if any(p in listed and listed[p].is_open for p in s.parents)
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
    """Return missing leases of a stream that has leases (protocol §7.4 "non-empty table").

    In addition to KCL's rules, a shard is created at TRIM_HORIZON if all rows of its parents are at
    SHARD_END, because no worker would create it.

    Args:
        stream: The stream.
        shards: All shards of the stream.
        existing: Shard id of every row, and whether it is at SHARD_END.
        position: The initial position.
        ignore_unexpected_child_shards: Omit unexpected children.

    Returns:
        The leases in creation order.

    Raises:
        ShardSyncError: There are unexpected children, and they are not ignored.
    """
    unexpected = unexpected_children(shards)
    if unexpected and not ignore_unexpected_child_shards:
        raise ShardSyncError(
            f"the list of the shards of {stream.name} is not consistent yet: a parent of "
            f"{list(unexpected)} is open"
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
            search.positions[shard_id] = Position(position)
    found = {**search.positions, **dict.fromkeys(_orphans(listed, existing), TRIM_HORIZON)}
    return tuple(
        new_lease(stream, shard, found[shard.shard_id])
        for shard in creation_order(listed[key] for key in found)
    )


class _AncestorSearch:
    """KCL's search from an open shard to its oldest listed ancestors.

    `positions` has the shards to create and their checkpoints.
    """

    def __init__(
        self, listed: Mapping[str, Shard], existing: Collection[str], position: InitialPosition
    ) -> None:
        self._listed = listed
        self._existing = existing
        self._position = position
        self._is_descendant: dict[str, bool] = {}
        self._to_create: set[str] = set()
        self.positions: dict[str, Position] = {}

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
        reached = {p for p in parents if self._is_descendant[p] or p in self._to_create}
        if not reached:
            if self._position != "LATEST":
                self._to_create.add(shard_id)
            return False
        for parent in parents:
            if parent in self._existing:
                continue
            if parent in self.positions or parent in self._to_create or parent not in reached:
                from_horizon = parent in reached and self._position != "AT_TIMESTAMP"
                self.positions[parent] = TRIM_HORIZON if from_horizon else Position(self._position)
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
    """Return whether the row is that of a child whose parents must have rows.

    A child lease is created at TRIM_HORIZON while its parents have rows. The row of a finished
    parent is deleted only after the checkpoint of every child has left TRIM_HORIZON (protocol §8.2:
    by this leader and KCL's workers). So if a parent had no row before this row was read, it was
    deleted by hand. A pending checkpoint proves that a worker has seen the ends of the parents. At
    LATEST and AT_TIMESTAMP, parents without rows are normal.
    """
    return lease.checkpoint == TRIM_HORIZON and lease.pending_checkpoint is None


def is_begun(lease: Lease) -> bool:
    """Return whether the row shows that somebody has begun the shard, or has read it to its end.

    A pending checkpoint is the first batch of a record processor.
    """
    return lease.pending_checkpoint is not None or not (
        lease.checkpoint.is_sentinel and not lease.ended
    )


def restored_parents(
    stream: StreamId,
    shards: Iterable[Shard],
    missing: Collection[str],
    unfinished: Collection[str],
    position: InitialPosition,
) -> tuple[Lease, ...]:
    """Leases for the parents of a child that has not begun, whose rows were deleted by hand.

    Args:
        stream: The stream of the child.
        shards: An unfiltered listing. A parent that is not in it has left retention: none is made.
        missing: Bare shard ids of the parents without a row.
        unfinished: Shards of which the table has a position and no end. They are continued after
            it, whatever the initial position is.
        position: Where shard sync starts another shard.

    Returns:
        The leases in creation order. At LATEST only those of unfinished shards: a parent is closed,
        and there is no record after its end.
    """
    found = creation_order(shard for shard in shards if shard.shard_id in missing)
    if position == "LATEST":
        found = [shard for shard in found if shard.shard_id in unfinished]
    return tuple(
        new_lease(
            stream, shard, TRIM_HORIZON if shard.shard_id in unfinished else Position(position)
        )
        for shard in found
    )


def creation_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return the shards in the order in which their leases are created."""
    # Oldest first: a crash between two writes must not leave descendants without ancestors.
    return sorted(shards, key=lambda s: (int(s.starting_sequence_number), s.shard_id))


def successors(
    shards: Sequence[Shard], shard_id: str, hash_key_range: HashKeyRange | None
) -> tuple[ChildShard, ...]:
    """Return the oldest listed shards that follow a shard which is not listed any more.

    Ancestors leave retention before their descendants. So every listed shard that overlaps the hash
    range of the shard is a descendant, and those without a listed parent among them are the oldest.
    Without a hash range, only the children are found.
    """
    found = {
        shard.shard_id: shard
        for shard in shards
        if shard_id in shard.parents
        or (hash_key_range is not None and hash_key_range.overlaps(shard.hash_key_range))
    }
    return tuple(
        ChildShard(shard.shard_id, shard.parents, shard.hash_key_range)
        for shard in creation_order(found.values())
        if not any(parent in found for parent in shard.parents)
    )


def leases_after_loss(lease: Lease, shards: Sequence[ChildShard]) -> tuple[Lease, ...]:
    """Return the leases, at TRIM_HORIZON, of the `successors` of a shard that does not exist.

    Unlike `child_leases`, this does not require the rows of both parents of a merge, because one of
    them is about to be deleted. The merged shard still waits for the other one.
    """
    return tuple(
        Lease(
            lease_key=lease.key_of_sibling(shard.shard_id),
            checkpoint=TRIM_HORIZON,
            parent_shard_ids=frozenset(shard.parents),
            hash_key_range=shard.hash_key_range,
            stream=lease.stream,
            recreated_millis=lease.recreated_millis,
        )
        for shard in shards
    )


def child_leases(
    lease: Lease, children: Sequence[ChildShard], existing: Collection[str]
) -> tuple[Lease, ...]:
    """Return the leases, at TRIM_HORIZON, of the children of a finished shard (protocol §6.7).

    A merge needs the rows of both parents. Otherwise the child would start before the records of
    the other parent were read.

    Args:
        lease: The finished lease.
        children: The children in the last GetRecords response.
        existing: Shard ids of the parents of `children` that have a row.

    Raises:
        ShardSyncError: A parent of a merge has no row yet, or a single child does not have two
            parents. Try again later.
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

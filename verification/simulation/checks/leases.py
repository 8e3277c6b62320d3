"""Safety invariants of the lease table, checked on every write of a lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final, Literal

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.coverage import hole_in_leases
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import InMemoryLeaseTable
from verification.simulation.environment.streams import Generation, Streams
from verification.simulation.scenario import HANDOFF_SECONDS, Scenario

Role = Literal["worker", "leader", "hand", "reader", "operator"]
"""Who writes a row. An operator runs a command of this package."""


class BrokenInvariantError(BaseException):
    """A safety invariant is broken; no production code may catch this error."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A change of a lease's owner, at a virtual second; None means no owner."""

    at: float
    lease_key: str
    before: str | None
    after: str | None


@dataclass
class LeaseChecks:
    """Checks every change of the lease table.

    Raises `BrokenInvariantError` at once. A lease is known by its name (`Generation.lease_name`),
    because a stream that was created again can have the lease keys of the former one.

    Attributes:
        edited: Leases whose row was changed by hand.
        replayed: Leases of a lineage of which a row was deleted by hand. Only their records may
            come twice or out of order.
        shared_ids: Worker ids that two processes share.
        moves: All changes of owners, in order.
        hand_deleted: Leases of a lineage of which a row was deleted by hand. A leader may have
            seen the row of a begun child before.
        stored: Leases of which the table stores a position.
        reported: Leases of shards that a worker reported as lost, because they are not listed.
        passed_over: Leases whose row, or that of an ancestor, was deleted by hand before a commit
            of a fleet that stores positions at LATEST, and of which a descendant then began.
            Nothing knows that they were begun (docs/guarantees.md, "`LATEST` and a deleted row").
    """

    table: InMemoryLeaseTable
    streams: Streams
    scenario: Scenario
    now: Callable[[], float]
    edited: set[str] = field(default_factory=set)
    replayed: set[str] = field(default_factory=set)
    shared_ids: set[str] = field(default_factory=set)
    coverage_suspended: bool = False
    moves: list[Moved] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    hand_deleted: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    passed_over: set[str] = field(default_factory=set)
    _covered: set[Generation] = field(default_factory=set)
    _settled: dict[str, Position] = field(default_factory=dict)
    _first: dict[str, Position] = field(default_factory=dict)
    _rows: dict[str, Lease] = field(default_factory=dict)
    _created_at: dict[str, Position] = field(default_factory=dict)
    _begins_at: dict[str, int | None] = field(default_factory=dict)
    _handoff_began: dict[str, float] = field(default_factory=dict)
    _excuses: Counter[str] = field(default_factory=Counter)
    _order: list[str] = field(default_factory=list)
    _deleted: set[str] = field(default_factory=set)
    _by_operator: set[str] = field(default_factory=set)
    """Leases that an operator wrote last."""

    def lease(self, name: str) -> Lease | None:
        """The current row of a lease, or None."""
        row = self.table.row(name.partition("@")[0])
        return row if row is not None and row.unique_key == name else None

    def rows(self) -> list[Lease]:
        """All rows as last written, by key."""
        return [self._rows[key] for key in sorted(self._rows)]

    def not_listed(self, key: str) -> None:
        """Note that a worker reports a shard as lost, because its stream does not list it.

        A seek can create the row of a shard that is trimmed before it is read again.
        """
        if row := self._rows.get(key):
            self.reported.add(_name(row))

    def row_written(self, key: str, role: Role, worker_id: str) -> None:
        """Check all invariants of one write of a lease row.

        `worker_id` is the worker that wrote, in the given role.
        """
        before, now = self._rows.get(key), self.table.row(key)
        if role == "reader":
            raise BrokenInvariantError(f"S14: a dry run wrote {key}")
        if before is not None and now is not None and _name(before) != _name(now):
            raise BrokenInvariantError(f"S15: {_name(now)} was written over {_name(before)}")
        if now is None:
            if before is not None and role != "hand":
                self._may_be_deleted(before)
                self._deleted.add(_name(before))
            self._rows.pop(key, None)
        else:
            if before is None:
                self._created(now, role)
            else:
                self._changed(before, now, role, worker_id)
            self._rows[key] = now
        row = now or before
        if row is not None and (before is None or now is None or before.ended != now.ended):
            self._check_coverage(row)

    def _created(self, now: Lease, role: Role) -> None:
        """S6: a lease whose parent has a lease starts at the beginning of its shard."""
        key = _name(now)
        self.generation_of(now)
        if self._starts_anew(now):
            self._created_at[key] = now.checkpoint
            self._begins_at[key] = now.initial_millis
        self._order.append(key)
        if self.scenario.stores_positions:
            self.passed_over |= self._unknown_ancestors(now)
            self.passed_over.discard(key)
        parents = [sibling(now, parent) for parent in now.parent_shard_ids]
        # AT_TIMESTAMP is no later: a child has no records from before the timestamp that its
        # parents do not have.
        begins = (
            {TRIM_HORIZON, AT_TIMESTAMP}
            if self.scenario.initial_position == "AT_TIMESTAMP"
            else {TRIM_HORIZON}
        )
        if (
            any(self.lease(parent) for parent in parents)
            and now.checkpoint not in begins
            and key not in self.replayed
        ):
            raise BrokenInvariantError(
                f"S6: {key} was created at {now.checkpoint} although a parent has a lease"
            )
        if self.replayed.intersection(parents):
            self.replayed.add(key)
        if key in self._deleted and role == "leader" and not self.scenario.stores_positions:
            # A leader that was paused between its first listing and the creation can create a row
            # that was finished and deleted meanwhile. A creation can only be conditional on the
            # row's absence. This known case needs a pause longer than finished leases are kept
            # (docs/guarantees.md).
            self.replayed |= self._lineage(now)

    def _unknown_ancestors(self, now: Lease) -> set[str]:
        """Ancestors of a new lease of which nothing is known since their rows were deleted.

        No record of such a shard, or of a shard before it, was committed. A lease at LATEST begins
        behind all its ancestors. Another one follows a parent that is known; the shards before its
        other parent may be unknown.
        """
        ancestry = self.ancestry(_name(now))
        if now.checkpoint == LATEST:
            if not self.stored.isdisjoint(ancestry) or self.hand_deleted.isdisjoint(ancestry):
                return set()
            # Also those that began after the rows were deleted, while nobody created leases.
            return {name for name in ancestry - {_name(now)} if self.lease(name) is None}
        if self.scenario.initial_position != "LATEST":
            return set()
        found = set()
        for name in ancestry - {_name(now)}:
            before = self.ancestry(name)
            is_unknown = self.stored.isdisjoint(before) and self.lease(name) is None
            if is_unknown and not self.hand_deleted.isdisjoint(before):
                found.add(name)
        return found

    def _starts_anew(self, now: Lease) -> bool:
        """Return whether a lease that may have existed before starts at its checkpoint.

        It does not if the table knows the shard or an ancestor. With LATEST, a deleted row of a
        lineage without a commit starts at LATEST again.
        """
        if not self.scenario.stores_positions or _name(now) not in self._created_at:
            return True
        return now.checkpoint == LATEST and self.stored.isdisjoint(self.ancestry(_name(now)))

    def ancestry(self, name: str) -> set[str]:
        """Names of a lease and of the leases of all its ancestors."""
        stream = self.streams.of_name(name)
        if stream is None:
            return {name}
        shards = self.streams.settled(stream).shards
        parents = {stream.lease_name(shard.shard_id): shard.parents for shard in shards}
        lineage = [name]
        for one in lineage:
            lineage += [stream.lease_name(parent) for parent in parents.get(one, ())]
        return set(lineage)

    def _changed(self, before: Lease, now: Lease, role: Role, worker_id: str) -> None:
        key = _name(now)
        if role == "operator":  # A pause and a seek, which alone may lower a checkpoint.
            self._by_operator.add(key)
            self._note_owner(before, now, role)
            return
        self._by_operator.discard(key)
        by_hand = key in self.edited
        step = now.counter - before.counter
        if step not in (0, 1) and not by_hand:
            raise BrokenInvariantError(
                f"S1: one write moved the counter of {key} from {before.counter} to {now.counter}"
            )
        takes = _takes(before, now, worker_id)
        if takes and before.actual_owner is not None:
            self.excuse(key)
        if (
            role == "worker"
            and step
            and before.actual_owner != worker_id
            and not (by_hand or takes)
        ):
            raise BrokenInvariantError(
                f"S13: {worker_id} wrote {key}, which {before.actual_owner} owns"
            )
        progress = (now.checkpoint, now.pending_checkpoint) != (
            before.checkpoint,
            before.pending_checkpoint,
        )
        if progress and role != "worker":
            raise BrokenInvariantError(f"S1: a {role} moved a position of {key}")
        if progress and not step:
            raise BrokenInvariantError(
                f"S1: a position of {key} moved without its counter, so that a stale "
                "worker's write would pass"
            )
        if now.checkpoint < before.checkpoint:
            raise BrokenInvariantError(
                f"S3: the checkpoint of {key} went back from {before.checkpoint} to "
                f"{now.checkpoint}"
            )
        if not now.checkpoint.is_sentinel and now.checkpoint > self._settled.get(key, TRIM_HORIZON):
            raise BrokenInvariantError(
                f"S2: the checkpoint of {key} is {now.checkpoint}, past the table at "
                f"{self._settled.get(key)}"
            )
        if not now.checkpoint.is_sentinel:
            self._first.setdefault(key, now.checkpoint)
        self._note_owner(before, now, role)

    def _note_owner(self, before: Lease, now: Lease, role: Role) -> None:
        key = _name(now)
        if now.in_handoff and not before.in_handoff:
            self._handoff_began[key] = self.now()
        if before.actual_owner is not None and before.actual_owner in self.shared_ids:
            self.excuse(key)
        if before.actual_owner == now.actual_owner:
            return
        if not now.ended:
            self.moves.append(Moved(self.now(), key, before.actual_owner, now.actual_owner))
        overdue = self.now() - self._handoff_began.get(key, self.now()) >= HANDOFF_SECONDS
        if before.actual_owner is not None and (
            role != "worker" or (before.in_handoff and overdue)
        ):
            self.excuse(key)

    def _may_be_deleted(self, lease: Lease) -> None:
        """S8: check that a row may be deleted.

        Its shard is finished and the children have started, or its stream does not exist any more,
        or the shard does not, and its rest was reported as lost. A deletion that was decided before
        a seek may land between two of its writes. The seek writes all rows twice, and creates the
        missing ones.
        """
        of = self.generation_of(lease)
        if not self.streams.exists(of):
            return
        is_listed = self.streams.settled(of).shard(lease.shard_id) is not None
        if not lease.ended and (is_listed or _name(lease) not in self.reported):
            raise BrokenInvariantError(f"S8: {lease.lease_key} was deleted at {lease.checkpoint}")
        if not is_listed or _name(lease) in self.replayed | self.hand_deleted:
            return
        for child in lease.child_shard_ids:
            row = self.lease(sibling(lease, child))
            is_sought = row is not None and _name(row) in self._by_operator
            if row is None or (row.checkpoint == TRIM_HORIZON and not is_sought):
                raise BrokenInvariantError(
                    f"S8: {lease.lease_key} was deleted before its child {child} had begun"
                )

    def generation_of(self, lease: Lease) -> Generation:
        """S15: the stream of a lease, which must have existed."""
        found = self.streams.of(lease)
        if found is None:
            raise BrokenInvariantError(f"S15: {_name(lease)} is of a stream that never existed")
        return found

    def is_open(self, lease: Lease) -> bool:
        """Whether the shard of a lease still accepts records, or its stream is deleted."""
        of = self.generation_of(lease)
        if not self.streams.exists(of):
            return True
        shard = self.streams.settled(of).shard(lease.shard_id)
        return shard is not None and shard.is_open

    def _check_coverage(self, row: Lease) -> None:
        """S7: once a stream's leases have covered all hash keys, they always do."""
        of = self.generation_of(row)
        hole = hole_in_leases(self._rows_of(of))
        if hole is None:
            self._covered.add(of)
        elif of in self._covered and self.streams.exists(of) and not self.coverage_suspended:
            raise BrokenInvariantError(f"S7: {hole}")

    def _rows_of(self, generation: Generation) -> list[Lease]:
        """The leases of a stream."""
        wanted = (generation.prefix, generation.recreated_millis)
        return [row for row in self._rows.values() if (row.stream, row.recreated_millis) == wanted]

    def uncovered(self) -> list[str]:
        """The streams whose leases do not cover all hash keys."""
        found = []
        for stream in self.streams.current.values():
            rows = self._rows_of(stream)
            hole = hole_in_leases(rows)
            if hole is not None:
                found.append(str(hole) if rows else f"{stream.label} has no leases")
        return found

    def excuse(self, *keys: str) -> None:
        """Allow an at-least-once sink to repeat records of these leases after a fault.

        `keys` are names, or keys of rows.
        """
        self._excuses.update(keys)
        rows = (self._rows.get(key) for key in keys)
        self._excuses.update(_name(row) for row in rows if row is not None and row.recreated_millis)

    def excuse_worker(self, worker_id: str) -> None:
        """Call `excuse` for all leases that a worker owns."""
        self.excuse(*(key for key, row in self._rows.items() if row.actual_owner == worker_id))

    def deleted_by_hand(self, key: str) -> None:
        """Note that an operator deleted a row: all leases of its lineage may be read again.

        Their records come once if the table stores positions.
        """
        row = self._rows[key]
        lineage = self._lineage(row)
        self.hand_deleted |= lineage
        if self._is_unknown(row, lineage):
            self._begins_at.pop(_name(row), None)
            self._first.pop(_name(row), None)
        if not self.scenario.stores_positions:
            self.replayed |= lineage
        self.coverage_suspended = True
        self.row_written(key, "hand", "")

    def _is_unknown(self, row: Lease, lineage: set[str]) -> bool:
        """Whether nothing but the row knows where its shard begins.

        Without any record in the table the checkpoint may have moved all the same: past dead
        letters, before there is a table.
        """
        if _name(row) not in self._first:
            return self.stored.isdisjoint(self.ancestry(_name(row)))
        return self.scenario.stores_positions and self.stored.isdisjoint(lineage)

    def _lineage(self, lease: Lease) -> set[str]:
        """Names of the leases of a shard's whole lineage: all ancestors and descendants."""
        parents = {
            s.shard_id: set(s.parents)
            for s in self.streams.settled(self.generation_of(lease)).shards
        }
        lineage, before = {lease.shard_id}, 0
        while len(lineage) != before:
            before = len(lineage)
            for shard, its in parents.items():
                if shard in lineage or its & lineage:
                    lineage |= {shard, *its}
        return {sibling(lease, shard) for shard in lineage}


def _takes(before: Lease, now: Lease, worker_id: str) -> bool:
    """Whether a worker takes a lease from another one, or one without an owner."""
    return (
        now.owner == worker_id
        and now.checkpoint_owner is None
        and now.counter == before.counter + 1
        and _kept_when_taken(now) == _kept_when_taken(before)
    )


_CHANGED_WHEN_TAKEN: Final = (
    "owner",
    "checkpoint_owner",
    "counter",
    "owner_switches_since_checkpoint",
)
_kept_when_taken: Final = attrgetter(
    *(one.name for one in fields(Lease) if one.name not in _CHANGED_WHEN_TAKEN)
)


def _name(lease: Lease) -> str:
    return lease.unique_key


def sibling(lease: Lease, shard_id: str) -> str:
    """The name of the lease of another shard of the same stream."""
    key, time = lease.key_of_sibling(shard_id), lease.recreated_millis
    return key if time is None else f"{key}@{time}"

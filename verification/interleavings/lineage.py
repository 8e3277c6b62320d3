"""Interleavings of a consumer's life across the end of a shard and the start of its child.

The code under test is the production `Lifecycle`, `ParentCheck` and `ProgressStore`,
on `HeldLeases`.
Two shards were merged. The first is finished, the second is held and has records, and their child
waits. In addition to the workers there are these actors:

- a leader that assigns leases without an owner and deletes finished ones. It does not create
  deleted rows, as if it were Java's: the worker of the child does,
- an operator who deletes the row of the second parent,
- a Java worker that starts a child whose parent has no row, and deletes the leases that it
  finished (protocol §6.6, §8.2).

Invariants after every step: a committed range continues the previous one. The child commits nothing
before the table has all records of its parents. No checkpoint goes back. A row that was finished
and deleted is not created again. A shard may be read again only if its row was deleted by hand.
After every schedule a new worker reads both shards to their end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.config import InitialPosition
from kcl_pipeline.events import Event, RecordsLost
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import completed_leases, has_started
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.testing.sink import MemoryTable
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from verification.interleavings.explorer import Actor, Turns
from verification.interleavings.lineage_process import (
    ALL,
    CHILD,
    DONE,
    HIGH,
    LOW,
    PARENT,
    RECORDS,
    LineageProcess,
)
from verification.interleavings.ranges import RangeWriter, number_of, range_of
from verification.interleavings.stepping import StepClock, stepped_view

_JAVA: Final = "java"
_FRESH: Final = "fresh"


@dataclass(frozen=True, slots=True)
class LineageScenario:
    """The participants of one scenario.

    Attributes:
        name: Name of the scenario.
        workers: Name and worker id of each process; the first one's id holds the parent's lease.
        preemptions: Bound of the search.
        child_owners: Worker ids to which the child's lease is assigned, one after the other.
        parent_owners: Worker ids to which the parent's lease is assigned when it has no owner.
        ended: The parent is finished at the start.
        born: The child's row is created at its parent's end; otherwise it exists from the start.
        deletes: An operator deletes the parent's row at any time.
        cleans: How often the leader looks for finished leases to delete.
        java: A Java worker takes and finishes the parent, and starts and cleans up as KCL does.
        log_seen: Workers look into the sink's log for shards that were started.
        position: Initial position that shard sync gives to a shard.
        lost_answers: Of the first worker, see `Worker.lost_answers`.
        passes: Number of passes after which each worker stops gracefully.
    """

    name: str
    workers: tuple[tuple[str, str], ...]
    preemptions: int = 2
    child_owners: tuple[str, ...] = ()
    parent_owners: tuple[str, ...] = ()
    ended: bool = False
    born: bool = False
    deletes: bool = False
    cleans: int = 0
    java: bool = False
    log_seen: bool = True
    position: InitialPosition = "TRIM_HORIZON"
    lost_answers: Mapping[int, str] = field(default_factory=dict)
    passes: int = 6


class LineageBench:
    """One run of a scenario, as a `World` of the explorer."""

    def __init__(self, scenario: LineageScenario) -> None:
        self.scenario = scenario
        self.turns = Turns()
        self.clock = StepClock(self.turns)
        self.table = InMemoryLeaseTable("app", clock=StepClock(Turns()))
        self.log = MemoryTable()
        self.writer = RangeWriter()
        self.events: list[Event] = []
        self.deleted = False
        self.finished: set[str] = set()
        self._rows: tuple[tuple[int, ...], list[Lease]] = ((), [])
        self._before: dict[str, Lease] = {}
        self._landed = 0
        self._checked: tuple[int, ...] = ()
        self._reached = {PARENT: RECORDS} if scenario.ended else {}
        owner = _JAVA if scenario.java else scenario.workers[0][1]
        self._plant(owner)
        self.processes = [
            LineageProcess(self, worker_id, number)
            for number, (_, worker_id) in enumerate(scenario.workers)
        ]
        self.actors = [
            Actor(name, process.run)
            for (name, _), process in zip(scenario.workers, self.processes, strict=True)
        ]
        self.actors += [self._assigner(CHILD, scenario.child_owners)] * bool(scenario.child_owners)
        self.actors += [self._assigner(PARENT, scenario.parent_owners)] * bool(
            scenario.parent_owners
        )
        if scenario.java:
            self.actors.append(Actor("java", self._java))
        if scenario.cleans:
            self.actors.append(Actor("leader cleans", self._clean, enabled=self._may_clean))
        if scenario.deletes:
            self.actors.append(Actor("somebody deletes the row", self._delete))

    def _plant(self, owner: str) -> None:
        merged = Lease(
            CHILD,
            TRIM_HORIZON,
            parent_shard_ids=frozenset((DONE, PARENT)),
            hash_key_range=ALL,
        )
        for lease in (
            Lease(DONE, SHARD_END, child_shard_ids=frozenset({CHILD}), hash_key_range=LOW),
            Lease(
                PARENT,
                SHARD_END if self.scenario.ended else TRIM_HORIZON,
                owner=owner,
                counter=1,
                child_shard_ids=frozenset({CHILD} if self.scenario.ended else ()),
                hash_key_range=HIGH,
            ),
            *(() if self.scenario.born else (merged,)),
        ):
            create_lease(self.table, lease)
        self._before = {lease.lease_key: lease for lease in self.rows()}

    # -- actors
    # ----------------------------------------------------------------------------

    def _assigner(self, key: str, owners: Sequence[str]) -> Actor:
        """The leader assigns one lease that has no owner, then moves it from worker to worker.

        Each move waits until the previous worker holds the lease.
        """
        view = stepped_view(self.table, self.turns, {})

        def may_assign(number: int) -> bool:
            row = self.row(key)
            if row is None or row.ended:
                return False
            if not number:
                return row.owner is None
            return any(process.holds(key, owners[number - 1]) for process in self.processes)

        def assign() -> None:
            for number, owner in enumerate(owners):
                self.turns.wait_for(lambda number=number: may_assign(number))  # type: ignore[misc]
                row = self.row(key)
                if row is not None:
                    view.assign(row, owner)

        return Actor(f"leader assigns {key[-1]}", assign, enabled=lambda: may_assign(0))

    def _may_clean(self) -> bool:
        row = self.row(PARENT)
        return row is not None and row.ended

    def _clean(self) -> None:
        """The leader's cleanup, on the rows that a scan returned."""
        view = stepped_view(self.table, self.turns, {})
        for _ in range(self.scenario.cleans):
            rows = self.rows()
            for deletion in completed_leases(rows, {row.lease_key: 1e9 for row in rows}, 0.0):
                view.delete(deletion.lease)
                self._note_finished(deletion.lease.lease_key)
            self.turns.give_way("scan")

    def _note_finished(self, key: str) -> None:
        if self.row(key) is None:
            self.finished.add(key)

    def _delete(self) -> None:
        row = self.row(PARENT)
        self.deleted = self.deleted or row is not None
        self.table.erase(PARENT)

    def _java(self) -> None:
        """A KCL worker.

        It reads the parent to its end, starts a child whose parents are missing or finished, and
        deletes the parent's lease when the child has started.
        """
        view = stepped_view(self.table, self.turns, {})
        parent = view.get(PARENT)
        for checkpoint in (Position("1"), SHARD_END):
            parent = parent and view.update_checkpoint(parent, checkpoint=checkpoint)
        self.turns.wait_for(lambda: self._owner_of(CHILD) == _JAVA)
        child = view.get(CHILD)
        if child is not None and child.owner == _JAVA and not child.ended:
            view.update_checkpoint(child, checkpoint=Position("1"))
        child = view.get(CHILD)
        if child is not None and has_started(child):
            self.turns.give_way("DeleteItem")
            self.table.erase(PARENT)
            self.finished.add(PARENT)

    def _owner_of(self, key: str) -> str | None:
        row = self.row(key)
        return None if row is None else row.owner

    # -- checks
    # ----------------------------------------------------------------------------

    def rows(self) -> list[Lease]:
        """The current lease rows."""
        version = self.version()
        if version != self._rows[0]:
            items, decode = self.table.store._rows.values(), self.table._decode  # noqa: SLF001
            self._rows = (version, [decode(item) for item in items])
        return self._rows[1]

    def row(self, key: str) -> Lease | None:
        """The current row of one lease, or None."""
        return next((lease for lease in self.rows() if lease.lease_key == key), None)

    def version(self) -> tuple[int, ...]:
        """A value that changes with every write."""
        items = self.table.store._rows.values()  # noqa: SLF001 (its own test kit)
        return (len(self.log.log), *map(id, items))

    def check(self) -> None:
        """See `World.check`."""
        if self.version() == self._checked:
            return
        self._checked = self.version()
        self._check_log()
        now = {lease.lease_key: lease for lease in self.rows()}
        for key, lease in now.items():
            before = self._before.get(key)
            if before is None and key in self.finished and not self.deleted:
                raise AssertionError(f"{key} was finished and deleted, and has come back")
            if before is not None and lease.checkpoint < before.checkpoint:
                raise AssertionError(
                    f"the checkpoint of {key} went back from {before.checkpoint} to "
                    f"{lease.checkpoint}"
                )
            if self._is_ours(key) and number_of(lease.checkpoint) > self._reached.get(key, 0):
                raise AssertionError(f"the checkpoint of {key} is past the table")
        self._before = now
        if not self.deleted and any(isinstance(event, RecordsLost) for event in self.events):
            raise AssertionError("a loss was reported, and nothing was deleted by hand")

    def _is_ours(self, key: str) -> bool:
        return not self.scenario.java and key != DONE

    def _check_log(self) -> None:
        files = self.log.files
        for file in files[self._landed :]:
            key, after, through = range_of(file.path)
            reached = self._reached.get(key, 0)
            if after > reached or (after < reached and not (self.deleted and key == PARENT)):
                what = "repeated" if after < reached else "lost"
                raise AssertionError(f"({after},{through}] of {key} after {reached}: {what}")
            if key == CHILD and self._is_ours(key):
                self._check_parent()
            self._reached[key] = max(reached, through)
        self._landed = len(files)

    def _check_parent(self) -> None:
        row = self.row(PARENT)
        if self._reached.get(PARENT, 0) < RECORDS:
            raise AssertionError("the child was committed before its parent's records")
        if row is not None and not row.ended and not self.deleted:
            raise AssertionError("the child was committed before its parent had ended")

    def finish(self) -> None:
        """See `World.finish`: a new worker gets every lease, repeatedly."""
        for actor in self.actors:
            if actor.error is not None:
                raise AssertionError(
                    f"{actor.name} ended with {type(actor.error).__name__}: {actor.error}"
                ) from actor.error
        seen: tuple[int, ...] = ()
        process = LineageProcess(self, _FRESH, len(self.processes))
        while seen != self.version():
            seen = self.version()
            for lease in self.rows():
                if lease.owner != _FRESH and not lease.ended:
                    self.table.view().assign(lease, _FRESH)
            process.run()
            self.check()
        for key in (PARENT, CHILD) if not self.scenario.java else ():
            row = self.row(key)
            if self._reached.get(key) != RECORDS or (row is not None and not row.ended):
                raise AssertionError(f"{key} stands still at {self._reached.get(key)}: {row}")

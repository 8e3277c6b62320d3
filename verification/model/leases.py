"""Leases, handoffs and assignments, with a sink that stores no positions.

A user's function gets each batch at least once. So everything that must not be lost rests on the
lease rows: the checkpoint is written after each batch, and a taker starts at it. Processes can
share one worker id, and a leader's plan can be outdated when it is written. Every step is one I/O
call. A write can be applied without an answer, or be applied at any later time; its worker goes on.
A write that is refused although the row names its worker adopts the counter if it is one higher and
the checkpoint is one that the worker read or sent: a write without an answer was applied. If not,
the worker starts at the row again.

With `lineage` the model has a parent (shard 0) and its child (shard 1), whose rows come and go: a
leader removes finished leases, somebody deletes the parent's row, and a leader creates it again, or
the child's worker while a Java worker leads (`leader.sync`, `worker.parents`). The leader may have
been paused since its scan, so its step depends on the rows alone.

Rules:

- No record is skipped. No checkpoint is ahead of what the function got, and none goes back.
- The worker that processes a shard changes only together with the counter.
- No plan takes a lease from owners that it has not seen.
- The function gets nothing of a child before its parent has ended. If the parent's row was deleted
  by hand, it gets nothing before it has all records of the parent.
- A shard that was finished and removed is not created again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from verification.model.values import NOBODY, at
from verification.model.visit import BrokenRuleError

PARENT, CHILD = 0, 1


class Row(NamedTuple):
    """A lease row; `draining` is the owner that has to hand it over.

    A checkpoint after the last record is SHARD_END. `ABSENT` is a row that does not exist.
    """

    owner: int = NOBODY
    draining: int = NOBODY
    counter: int = 0
    checkpoint: int = 0

    @property
    def actual(self) -> int:
        """The worker that processes the shard."""
        return self.owner if self.draining == NOBODY else self.draining


ABSENT: Final = Row(counter=-1, checkpoint=-1)


class Slot(NamedTuple):
    """What one process knows about one shard: the row that it last read or wrote, its position.

    `sent` are the checkpoints of writes whose answers were lost.
    """

    at: str = "idle"
    known: Row = Row()
    position: int = 0
    sent: frozenset[int] = frozenset()


class Late(NamedTuple):
    """A write that can be applied as long as its conditions hold: the row, what the author knew."""

    shard: int
    known: Row
    what: str
    checkpoint: int


class Plan(NamedTuple):
    """A leader's planned write and the owners that it saw; `handoff` means graceful."""

    shard: int
    seen: Row
    target: int
    handoff: bool


class Past(NamedTuple):
    """History of the rows.

    It has whether somebody has deleted the parent's row, which finished shards a leader has
    removed, and which one it is about to remove.
    """

    deleted: bool = False
    finished: frozenset[int] = frozenset()
    removing: int = NOBODY


class Left(NamedTuple):
    """What is left of the budgets."""

    moves: int
    lost: int
    renewals: int
    deletions: int


class State(NamedTuple):
    """The complete state; `reached` is the last record of each shard that the function got."""

    rows: tuple[Row, ...]
    reached: tuple[int, ...]
    slots: tuple[Slot, ...]
    plan: Plan | None
    past: Past
    left: Left
    late: frozenset[Late] = frozenset()


@dataclass(frozen=True)
class Leases:
    """A configuration: worker id of each process, shards, records per shard, and budgets.

    Attributes:
        name: Name of the configuration.
        ids: Worker id of each process.
        shards: Number of shards; the second one is a child of the first one.
        records: Records per shard.
        moves: Number of plans and crashes.
        lost: Number of answers that are lost.
        renewals: Number of renewals.
        handoffs: Leases are also handed over gracefully.
        lineage: Rows come and go.
        born: The child's row is created at the parent's end; otherwise it exists from the start,
            like that of a merged shard whose other parent has ended.
        deletions: Number of times that somebody deletes the parent's row.
        goes_on: A complete state must be reachable from every state.
        without: A rule that is removed.
    """

    name: str
    ids: tuple[int, ...] = (0, 1)
    shards: int = 1
    records: int = 2
    moves: int = 3
    lost: int = 0
    renewals: int = 0
    handoffs: bool = True
    lineage: bool = False
    born: bool = False
    deletions: int = 0
    goes_on: bool = False
    without: str = ""

    def start(self) -> State:
        """Return the first state: rows without an owner."""
        return State(
            (Row(), ABSENT) if self.born else (Row(),) * self.shards,
            (0,) * self.shards,
            (Slot(),) * (self.shards * len(self.ids)),
            None,
            Past(),
            Left(self.moves, self.lost, self.renewals, self.deletions),
        )

    def complete(self, s: State) -> bool:
        """Whether the function got all records, and the rows show it."""
        return all(reached == self.records for reached in s.reached) and all(
            row.checkpoint >= self.records or row == ABSENT for row in s.rows
        )

    def within(self, s: State) -> bool:  # noqa: ARG002 (the budgets are the bounds)
        """Return True: every state is within the bounds."""
        return True

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        yield from self._leader(s)
        for late in s.late:
            if self._fits(s.rows[late.shard], late):
                row = s.rows[late.shard]
                row = row._replace(counter=row.counter + 1, checkpoint=late.checkpoint)
                landed = self._changed(s, late.shard, row)._replace(late=s.late - {late})
                yield f"a late {late.what} of s{late.shard} is applied", landed
        for index, slot in enumerate(s.slots):
            yield from self._take(s, index, slot)
            yield from self._work(s, index, slot)
        if s.left.moves:
            for process in range(len(self.ids)):
                mine = range(process * self.shards, (process + 1) * self.shards)
                if any(s.slots[index] != Slot() for index in mine):
                    slots = tuple(
                        Slot() if index in mine else slot for index, slot in enumerate(s.slots)
                    )
                    yield f"crash p{process}", _spent(s._replace(slots=slots), "moves")
        if self.lineage:
            yield from self._cleanup(s)
            yield from self._restored_by_leader(s)
            if s.left.deletions and s.rows[PARENT] != ABSENT:
                gone = _with_row(s, PARENT, ABSENT)
                gone = gone._replace(past=s.past._replace(deleted=True))
                yield "somebody deletes s0", _spent(gone, "deletions")

    def _ended(self, row: Row) -> bool:
        return row.checkpoint > self.records

    # -- the leader
    # ----------------------------------------------------------------------------

    def _leader(self, s: State) -> Iterator[tuple[str, State]]:
        if s.plan is not None:
            yield from self._write_plan(s, s.plan)
            return
        for shard, row in enumerate(s.rows):
            if not s.left.moves or row == ABSENT:
                continue
            held = self.handoffs and row.owner != NOBODY and row.draining == NOBODY
            for target in sorted(set(self.ids)):
                for handoff in (False, True) if held and row.owner != target else (False,):
                    plan = Plan(shard, row, target, handoff)
                    how = " gracefully" if handoff else ""
                    yield (
                        f"plan s{shard} for w{target}{how}",
                        _spent(s._replace(plan=plan), "moves"),
                    )

    def _write_plan(self, s: State, plan: Plan) -> Iterator[tuple[str, State]]:
        row, seen = s.rows[plan.shard], plan.seen
        fits = (row.owner, row.draining) == (seen.owner, seen.draining)
        fits = fits and (plan.handoff or seen.owner != plan.target or row.counter == seen.counter)
        if row == ABSENT or (not fits and self.without != "owner condition"):
            yield "plan refused", s._replace(plan=None)
            return
        if not fits:
            raise BrokenRuleError(f"a plan took s{plan.shard} from owners that it had not seen")
        if plan.handoff:
            after = row._replace(owner=plan.target, draining=seen.owner)
        else:
            rises = self.without != "counter of an assignment"
            after = Row(plan.target, NOBODY, row.counter + rises, row.checkpoint)
        changed = self._changed(s, plan.shard, after)
        yield f"assign s{plan.shard} to w{plan.target}", changed._replace(plan=None)
        if s.left.lost:
            yield "assigned without an answer", _spent(changed, "lost")

    def _restored_by_leader(self, s: State) -> Iterator[tuple[str, State]]:
        """Create the parent's row in one transaction, if it is absent and the child not begun."""
        blind = self.without == "child in the restoration"
        if s.rows[PARENT] == ABSENT and (s.rows[CHILD].checkpoint == 0 or blind):
            yield "the leader restores s0", self._created(s, PARENT)

    def _cleanup(self, s: State) -> Iterator[tuple[str, State]]:
        """Read the rows, then remove one on condition of the checkpoint read."""
        shard = s.past.removing
        if shard == NOBODY:
            for one in filter(lambda one: self._may_go(s, one), (PARENT, CHILD)):
                past = s.past._replace(removing=one)
                yield f"the leader sees that s{one} may go", s._replace(past=past)
        elif self._ended(s.rows[shard]):
            past = s.past._replace(removing=NOBODY, finished=s.past.finished | {shard})
            removed = _with_row(s, shard, ABSENT)._replace(past=past)
            yield f"the leader removes s{shard}", removed
        else:
            past = s.past._replace(removing=NOBODY)
            yield f"the leader removes s{shard}: refused", s._replace(past=past)

    def _may_go(self, s: State, shard: int) -> bool:
        """Whether a shard is finished, its parent's row is gone, and its children have begun.

        The model assumes that the child's own children have begun.
        """
        if not self._ended(s.rows[shard]):
            return False
        if shard == CHILD:
            return s.rows[PARENT] == ABSENT
        return s.rows[CHILD].checkpoint > 0 or self.without == "begin of the child"

    # -- a worker takes a lease
    # ----------------------------------------------------------------------------

    def _take(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        process, shard = divmod(index, self.shards)
        row, who = s.rows[shard], f"p{process}"
        own = row.owner == self.ids[process] and row.draining == NOBODY
        match slot.at:
            case "idle" if own and not self._ended(row):
                held = Slot("held" if shard == CHILD else "ready", row, row.checkpoint)
                yield f"{who} takes s{shard}", _with_slot(s, index, held)
            case "held":
                yield from self._look_at_parent(s, index, slot)
            case "missing":
                yield from self._restore(s, index, slot)

    def _look_at_parent(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Start a child whose parent has ended, or is gone after the child had begun."""
        parent, who = s.rows[PARENT], f"p{index // self.shards}"
        if self._ended(parent) or self.without == "parent check":
            yield f"{who} starts s1", _with_slot(s, index, slot._replace(at="ready"))
        elif parent == ABSENT:
            begun = slot.known.checkpoint > 0 or self.without == "restored parent"
            found = slot._replace(at="ready" if begun else "missing")
            yield f"{who} finds no row of s0", _with_slot(s, index, found)

    def _restore(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Create the parent's row in one transaction, if it is absent and the child not begun."""
        who = f"p{index // self.shards}"
        if s.rows[CHILD].checkpoint != 0 and self.without != "child in the restoration":
            yield f"{who} restores s0: refused", _with_slot(s, index, Slot())
        elif s.rows[PARENT] != ABSENT:
            yield f"{who} finds s0 again", _with_slot(s, index, slot._replace(at="held"))
        else:
            restored = self._created(s, PARENT)
            yield f"{who} restores s0", _with_slot(restored, index, slot._replace(at="held"))
            if s.left.lost:
                yield f"{who} restores s0 without an answer", _spent(restored, "lost")

    def _created(self, s: State, shard: int) -> State:
        if not s.past.deleted and shard in s.past.finished:
            raise BrokenRuleError(f"s{shard} was finished and removed, and is created again")
        return _with_row(s, shard, Row())

    # -- a worker calls the function, and writes the row
    # ----------------------------------------------------------------------------

    def _work(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        process, shard = divmod(index, self.shards)
        if slot.at not in ("ready", "ending"):
            return
        known, who = slot.known, f"p{process}"
        if slot.at == "ready":
            for end in range(slot.position + 1, self.records + 1):
                got = _with_slot(self._got(s, shard, slot.position, end), index, slot)
                moved = _with_slot(got, index, slot._replace(position=end))
                yield f"{who} passes ({slot.position},{end}] of s{shard}", moved
            back = self.without == "step forward" and known.checkpoint > slot.position
            if known.checkpoint < slot.position or back:
                yield from self._write(s, index, "checkpoint", slot.position)
            elif slot.position == self.records:
                yield from self._end(s, index, slot)
        else:
            yield from self._write(s, index, "end", self.records + 1)
        if s.left.renewals:
            yield from self._write(_spent(s, "renewals"), index, "renew", known.checkpoint)
        if known.draining != NOBODY:
            yield from self._complete(s, index, slot)

    def _got(self, s: State, shard: int, after: int, end: int) -> State:
        """The function got a batch; it may get records again, and must miss none."""
        if after > s.reached[shard]:
            raise BrokenRuleError(f"s{shard}: lost records before {after}")
        if shard == CHILD:
            parent = s.rows[PARENT]
            if s.past.deleted or parent == ABSENT:
                if s.reached[PARENT] < self.records:
                    raise BrokenRuleError("a child began before its parent's records were read")
            elif not self._ended(parent):
                raise BrokenRuleError("a child began before its parent had ended")
        return s._replace(reached=at(s.reached, shard, max(s.reached[shard], end)))

    def _end(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Create the child's row, on condition of an unfinished parent; then write SHARD_END."""
        if not self.born or index % self.shards == CHILD:
            yield from self._write(s, index, "end", self.records + 1)
            return
        row, who = s.rows[PARENT], f"p{index // self.shards}"
        going = row != ABSENT and not self._ended(row)
        if not going and self.without != "parent in the creation":
            yield f"{who} creates s1: refused", _with_slot(s, index, Slot())
            return
        made = self._created(s, CHILD) if s.rows[CHILD] == ABSENT else s
        yield f"{who} creates s1", _with_slot(made, index, slot._replace(at="ending"))
        if s.left.lost and made is not s:
            yield f"{who} creates s1 without an answer", _spent(made, "lost")

    def _write(
        self, s: State, index: int, what: str, checkpoint: int
    ) -> Iterator[tuple[str, State]]:
        """Write the row on condition of its counter and, if that changes, of its checkpoint."""
        process, shard = divmod(index, self.shards)
        slot, row, who = s.slots[index], s.rows[shard], f"p{process} s{shard} {what}"
        this = Late(shard, slot.known, what, checkpoint)
        if not self._fits(row, this):
            yield f"{who} refused", _with_slot(s, index, self._adopted(s, index, this))
            return
        written = row._replace(counter=row.counter + 1, checkpoint=checkpoint)
        changed = self._changed(s, shard, written)
        done = slot._replace(known=written, sent=frozenset())
        if what == "end" or row.actual != self.ids[process]:
            done = Slot()
        yield who, _with_slot(changed, index, done)
        if s.left.lost:
            waiting = slot._replace(sent=slot.sent | {checkpoint})
            yield (
                f"{who} without an answer",
                _spent(_with_slot(changed, index, waiting), "lost"),
            )
            later = s._replace(late=s.late | {this})
            yield f"{who} not applied yet", _spent(_with_slot(later, index, waiting), "lost")

    def _fits(self, row: Row, write: Late) -> bool:
        """Whether the row is as the author of a write knows it."""
        if row == ABSENT:
            return False
        if write.what == "checkpoint" and self.without == "row condition":
            return True
        fits = row.counter == write.known.counter and row.actual == write.known.actual
        return fits and (write.what == "renew" or row.checkpoint == write.known.checkpoint)

    def _adopted(self, s: State, index: int, write: Late) -> Slot:
        """Adopt the counter if it is one higher, and the checkpoint was read or sent."""
        process, shard = divmod(index, self.shards)
        slot, row = s.slots[index], s.rows[shard]
        if row == ABSENT or row.actual != self.ids[process]:
            return Slot()
        same = row.checkpoint in {slot.known.checkpoint, write.checkpoint, *slot.sent}
        if not same and self.without == "checkpoint in the adoption":
            # The repeated write has the checkpoint that its author has sent.
            self._changed(s, shard, row._replace(checkpoint=write.checkpoint))
        if not same or row.counter != slot.known.counter + 1:
            return Slot()
        if self._ended(row) and self.without != "step forward":
            return Slot()
        return Slot("ready" if self._ended(row) else slot.at, row, slot.position)

    def _complete(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """End a handoff as early as its time-out allows: also between two batches."""
        process, shard = divmod(index, self.shards)
        row = s.rows[shard]
        if (row.owner, row.draining) != (slot.known.owner, slot.known.draining):
            yield f"p{process} handoff overtaken", _with_slot(s, index, Slot())
            return
        rises = self.without != "counter of a handoff"
        after = Row(row.owner, NOBODY, row.counter + rises, row.checkpoint)
        changed = self._changed(s, shard, after)
        yield f"p{process} hands s{shard} to w{row.owner}", _with_slot(changed, index, Slot())

    def _changed(self, s: State, shard: int, row: Row) -> State:
        """Write a row, and check the rules for it."""
        before = s.rows[shard]
        if row.actual != before.actual and row.counter == before.counter:
            raise BrokenRuleError(
                f"s{shard} changed hands from w{before.actual} to w{row.actual} under the "
                "same counter"
            )
        if row.checkpoint < before.checkpoint:
            raise BrokenRuleError(
                f"the checkpoint of s{shard} went back from {before.checkpoint} to {row.checkpoint}"
            )
        if min(row.checkpoint, self.records) > s.reached[shard]:
            raise BrokenRuleError(
                f"the checkpoint of s{shard} is at {row.checkpoint}, and the function got "
                f"{s.reached[shard]}"
            )
        return _with_row(s, shard, row)


def _spent(s: State, budget: str) -> State:
    return s._replace(left=s.left._replace(**{budget: getattr(s.left, budget) - 1}))


def _with_row(s: State, shard: int, row: Row) -> State:
    return s._replace(rows=at(s.rows, shard, row))


def _with_slot(s: State, index: int, slot: Slot) -> State:
    return s._replace(slots=at(s.slots, index, slot))

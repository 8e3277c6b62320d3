"""Steps of the protocol's model that create, delete and restore lease rows.

Children are created at their parent's end. A leader deletes finished leases. A parent's row is
deleted by hand and restored by its child's worker (`worker.shards.parents`).

Two more rules must hold. A shard that was finished and deleted is never created again, unless the
parent's row was deleted by hand. A child commits nothing before all records of its parent are in
the table, in every state of the parent's row.
"""

from __future__ import annotations

from collections.abc import Iterator

from verification.model.state import (
    ABSENT,
    IDLE,
    NEW,
    NOBODY,
    Log,
    Row,
    Slot,
    State,
    dropped,
    less,
    with_slot,
)
from verification.model.steps import Steps
from verification.model.visit import BrokenRuleError

PARENT, CHILD = 0, 1


class LineageSteps(Steps):
    """The steps of a model of a parent (shard 0) and its child (shard 1)."""

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        yield from super().of(s)
        if s.past.deletions and s.rows[PARENT] != ABSENT:
            past = s.past._replace(deletions=s.past.deletions - 1, deleted=True)
            yield "somebody deletes s0", _replaced(s, PARENT, ABSENT)._replace(past=past)
        yield from self._cleanup(s)

    def _ended(self, row: Row) -> bool:
        return row.checkpoint > self.model.records

    # -- the leader deletes finished leases
    # ----------------------------------------------------------------------------

    def _cleanup(self, s: State) -> Iterator[tuple[str, State]]:
        """Read the rows, then delete one on condition of the checkpoint read.

        Other steps can happen between the read and the delete.
        """
        shard = s.past.deleting
        if shard == NOBODY:
            for shard in filter(lambda one: self._may_go(s, one), (PARENT, CHILD)):
                past = s.past._replace(deleting=shard)
                yield f"the leader sees that s{shard} may go", s._replace(past=past)
        elif self._ended(s.rows[shard]):
            past = s.past._replace(deleting=NOBODY, finished=s.past.finished | {shard})
            yield f"the leader deletes s{shard}", _replaced(s, shard, ABSENT)._replace(past=past)
        else:
            past = s.past._replace(deleting=NOBODY)
            yield f"the leader deletes s{shard}: refused", s._replace(past=past)

    def _may_go(self, s: State, shard: int) -> bool:
        """Whether a shard is finished, its parent's row is gone, and all children have started.

        The model assumes that the child's own children have started.
        """
        if not self._ended(s.rows[shard]):
            return False
        if shard == CHILD:
            return s.rows[PARENT] == ABSENT
        return s.rows[CHILD].checkpoint > 0 or self.model.without == "begin of the child"

    # -- a worker
    # ----------------------------------------------------------------------------

    def _load(
        self, s: State, index: int, process: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        if shard == PARENT:
            yield from super()._load(s, index, process, shard, slot)
            return
        row, who = s.rows[CHILD], f"p{process}"
        match slot.at:
            case "idle" if (
                row.owner == self.model.ids[process]
                and row.draining == NOBODY
                and not self._ended(row)
            ):
                yield f"{who} discovers s1", with_slot(s, index, Slot("held", row, row.checkpoint))
            case "held":
                yield from self._look_at_parent(s, index, slot, who)
            case "missing":
                yield from self._restore(s, index, slot, who)

    def _look_at_parent(
        self, s: State, index: int, slot: Slot, who: str
    ) -> Iterator[tuple[str, State]]:
        known, log, parent = slot.known, s.logs[CHILD], s.rows[PARENT]
        if self._ended(parent) or self.model.without == "parent check":
            yield f"{who} loads s1", with_slot(s, index, slot._replace(at="loaded"))
        elif parent == ABSENT:
            begun = known.checkpoint > 0 or known.pending is not None
            begun = begun or (self.model.log_seen and bool(log.data or log.fence))
            at = "loaded" if begun or self.model.without == "restored parent" else "missing"
            yield f"{who} finds no row of s0", with_slot(s, index, slot._replace(at=at))

    def _restore(self, s: State, index: int, slot: Slot, who: str) -> Iterator[tuple[str, State]]:
        """Create the parent's row in one transaction, if it is absent and the child not started."""
        row = s.rows[CHILD]
        begun = row.checkpoint != 0 or row.pending is not None
        if begun and self.model.without != "child in the restoration":
            yield f"{who} restores s0: refused", with_slot(s, index, IDLE)
        elif s.rows[PARENT] != ABSENT:
            yield f"{who} finds s0 again", with_slot(s, index, slot._replace(at="held"))
        else:
            restored = self._created(s, PARENT)
            for name, lost in self._answers(s):
                left = lost.left if lost else s.left
                held = with_slot(restored, index, slot._replace(at="missing" if lost else "held"))
                yield f"{who} restores s0{name}", held._replace(left=left)

    def _created(self, s: State, shard: int) -> State:
        if not s.past.deleted and shard in s.past.finished:
            raise BrokenRuleError(f"s{shard} was finished and deleted, and is created again")
        return _replaced(s, shard, NEW)

    def _end(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Create the children's rows first, in a transaction that needs an unfinished parent."""
        if not self.model.born or index % self.model.shards == CHILD:
            yield from super()._end(s, index, slot)
            return
        who, row = f"p{index // self.model.shards}", s.rows[PARENT]
        going = row != ABSENT and not self._ended(row)
        if not going and self.model.without != "parent in the creation":
            yield f"{who} creates s1: refused", with_slot(s, index, dropped(slot))
            return
        made = self._created(s, CHILD) if s.rows[CHILD] == ABSENT else s
        yield f"{who} creates s1", with_slot(made, index, slot._replace(at="ending"))
        if s.left[1] and made is not s:
            yield f"{who} creates s1 without an answer", made._replace(left=less(s.left, 1))

    def _row_steps(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        yield from super()._row_steps(s, index, slot)
        if slot.at == "ending":
            yield from super()._end(s, index, slot)

    def _append(self, s: State, shard: int, slot: Slot) -> Log:
        """Commit a range; no record may be skipped.

        After its row was deleted by hand the parent is read again.
        """
        log, parent = s.logs[shard], s.rows[PARENT]
        if slot.committed < log.reached and shard == PARENT and s.past.deleted:
            return Log(slot.number, slot.fence, max(log.reached, slot.end))
        if shard == CHILD and s.logs[PARENT].reached < self.model.records:
            raise BrokenRuleError("a child committed before its parent's records were in the table")
        if s.past.deleted or parent == ABSENT or shard == PARENT:
            parent_ended = s._replace(rows=(NEW._replace(checkpoint=self.model.records + 1), NEW))
            return super()._append(parent_ended, shard, slot)
        return super()._append(s, shard, slot)


def _replaced(s: State, shard: int, row: Row) -> State:
    return s._replace(rows=(*s.rows[:shard], row, *s.rows[shard + 1 :]))

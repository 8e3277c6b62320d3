"""The end of a shard and its child, with rows that are deleted and created again.

The table stores per shard whether it has *ended*. A worker sets it before it writes SHARD_END. If
the parent's row has SHARD_END and the table does not have *ended*, Java has ended the shard, and
the taker of the child sets it. The leader asks the table when it creates missing rows: a shard that
the table knows as unfinished gets a row, and its child waits.

Two more rules must hold. The child commits nothing before all records of its parent are in the
table or processed by Java. A child whose parent the table knows does not start at LATEST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from verification.model.positions.commits import (
    Commits,
    Part,
    Process,
    Row,
    Slot,
    State,
    with_row,
    with_slot,
)
from verification.model.positions.values import JAVA, NOBODY, at, bits
from verification.model.visit import BrokenRuleError

PARENT, CHILD = 0, 1
ABSENT: Final = Row(NOBODY, -1, 0)
LATEST: Final = -1


@dataclass(frozen=True)
class Ends(Commits):
    """A configuration with a parent (shard 0) and its child (shard 1).

    With `at_latest`, the initial position is LATEST: a leader that does not ask the table creates
    the child's row alone.
    """

    shards: int = 2
    at_latest: bool = False

    def start(self) -> State:
        """The first state: the parent's row."""
        first = super().start()
        return first._replace(rows=(Row(), ABSENT))

    @property
    def _end(self) -> int:
        return self.records + 1

    def complete(self, s: State) -> bool:
        """All records are in the table or processed by Java, unless their loss is allowed."""
        everything = bits(0, self.records)
        return all(past.landed | past.java == everything or s.latest for past in s.past)

    # -- the leader, Java, and people
    # ----------------------------------------------------------------------------

    def _outside(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        if shard == PARENT:
            yield from self._leader(s)
        if row == ABSENT:
            return
        if row.checkpoint == self._end:
            if self.deletes and s.moves:
                yield from self._delete(s, shard)
            if shard == PARENT and s.rows[CHILD] != ABSENT and s.rows[CHILD].checkpoint > 0:
                yield "the leader removes the parent's row", with_row(s, shard, ABSENT)
        elif row.owner == JAVA and row.checkpoint == LATEST:
            skipped = with_row(s, shard, row._replace(checkpoint=self.records))
            yield "Java starts the child at LATEST", skipped._replace(latest=True)
        else:
            yield from super()._outside(s, shard, row)
        if row.owner == JAVA and row.checkpoint == self.records:
            ended = with_row(s, shard, row._replace(counter=row.counter + 1, checkpoint=self._end))
            yield f"Java ends s{shard}", self._born(ended)

    def _delete(self, s: State, shard: int) -> Iterator[tuple[str, State]]:
        """All rows are deleted by hand, or one of them."""
        for deleted in ((shard,), (PARENT, CHILD)):
            rows = tuple(ABSENT if one in deleted else row for one, row in enumerate(s.rows))
            yield f"somebody deletes {deleted}", s._replace(rows=rows, moves=s.moves - 1)

    def _leader(self, s: State) -> Iterator[tuple[str, State]]:
        """Look for missing rows, then create them; other steps can happen in between."""
        if s.plan:
            shard = s.plan[0]
            first = LATEST if shard == CHILD and self.at_latest else 0
            made = s if s.rows[shard] != ABSENT else with_row(s, shard, Row(checkpoint=first))
            yield f"the leader creates s{shard}", made._replace(plan=s.plan[1:])
            return
        missing = tuple(shard for shard in (PARENT, CHILD) if self._is_missing(s, shard))
        if missing:
            yield f"the leader misses {missing}", s._replace(plan=missing)

    def _is_missing(self, s: State, shard: int) -> bool:
        parent = s.table[PARENT]
        if s.rows[shard] != ABSENT or s.table[shard].ended:
            return False
        if shard == CHILD:
            begun = parent.ended or s.rows[PARENT].checkpoint == self._end
            return self.at_latest or begun
        if parent.v and self.without != "positions in the shard sync":
            return True
        return s.rows[CHILD] == ABSENT and not s.table[CHILD].v and not self.at_latest

    def _born(self, s: State) -> State:
        """The child's row is created at its parent's end."""
        return with_row(s, CHILD, Row()) if s.rows[CHILD] == ABSENT else s

    # -- a worker
    # ----------------------------------------------------------------------------

    def _take(
        self, s: State, index: int, process: Process, shard: int
    ) -> Iterator[tuple[str, State]]:
        slot, row, who = process.slots[shard], s.rows[shard], f"p{index}"
        if slot.at == "idle" and row.checkpoint == self._end:
            return
        if slot.at == "row" and shard == CHILD:
            yield from self._look_at_parent(s, index, slot)
        elif slot.at == "row" and s.table[shard].ended:
            ended = slot._replace(at="ended", position=s.table[shard].p)
            yield f"{who} finds s{shard} ended", with_slot(s, index, shard, ended)
        elif slot.at == "looked":
            yield from self._start_child(s, index, slot)
        elif slot.at == "parent":
            yield from self._end_parent(s, index, slot)
        else:
            yield from super()._take(s, index, process, shard)
        if slot.at == "ready" and slot.position == self.records:
            yield from self._set_ended(s, index, shard, slot)
        if slot.at == "ended":
            yield from self._write_end(s, index, shard, slot)

    def _look_at_parent(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Read the parent's row: only a finished or missing parent lets the child start."""
        parent = s.rows[PARENT]
        if parent == ABSENT or parent.checkpoint == self._end:
            seen = slot._replace(at="looked", entry=slot.entry._replace(ended=parent != ABSENT))
            yield f"p{index} looks at the parent", with_slot(s, index, CHILD, seen)

    def _start_child(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Read the table, which knows parent and child at one version."""
        parent, entry, who = s.table[PARENT], s.table[CHILD], f"p{index}"
        unfinished = parent.v and not parent.ended and not slot.entry.ended
        if unfinished and self.without != "waiting for an unfinished parent":
            yield f"{who} waits for the parent", with_slot(s, index, CHILD, Slot())
            return
        if slot.entry.ended and not parent.ended and self.without != "end set by the child":
            closing = slot._replace(at="parent", entry=parent)
            yield f"{who} must end the parent", with_slot(s, index, CHILD, closing)
            return
        if entry.ended:
            ended = slot._replace(at="ended", position=entry.p)
            yield f"{who} finds s1 ended", with_slot(s, index, CHILD, ended)
            return
        start = max(slot.checkpoint, entry.p)
        latest = slot.checkpoint == LATEST and not entry.v
        if latest and parent.v and self.without == "parent in the table":
            raise BrokenRuleError("the child starts at LATEST after its parent was read")
        latest = latest and not parent.v
        ahead = start > entry.p
        read = slot._replace(at="ahead" if ahead else "ready", entry=entry, position=start)
        after = with_slot(s, index, CHILD, read)._replace(latest=s.latest or latest)
        if slot.entry.ended:
            after = self._taken(after, PARENT, self.records)
        yield f"{who} reads the table of s1", after if ahead else self._taken(after, CHILD, start)

    def _end_parent(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Set *ended* of a parent that Java has ended; this also refuses its paused writers."""
        parent, who = s.table[PARENT], f"p{index}"
        again = with_slot(
            s, index, CHILD, slot._replace(at="looked", entry=slot.entry._replace(ended=True))
        )
        if parent != slot.entry:
            yield f"{who} must look again", again
            return
        table = at(s.table, PARENT, parent._replace(v=parent.v + 1, ended=True))
        yield f"{who} ends the parent", again._replace(table=table)
        if s.lost:
            yield (
                f"{who} ends the parent without an answer",
                again._replace(table=table, lost=s.lost - 1),
            )

    def _set_ended(
        self, s: State, index: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        """Set *ended* of a shard whose records this worker has committed."""
        entry, who = s.table[shard], f"p{index}"
        if entry != slot.entry:
            yield f"{who} must not end s{shard}", with_slot(s, index, shard, Slot())
            return
        table = at(s.table, shard, entry._replace(v=entry.v + 1, ended=True))
        ended = with_slot(s, index, shard, slot._replace(at="ended"))
        yield f"{who} sets ended of s{shard}", ended._replace(table=table)
        if s.lost:
            lost = with_slot(s, index, shard, Slot())._replace(table=table, lost=s.lost - 1)
            yield f"{who} sets ended of s{shard} without an answer", lost

    def _write_end(
        self, s: State, index: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        row, after = s.rows[shard], with_slot(s, index, shard, Slot())
        if row.counter != slot.counter or row.owner != self.ids[index]:
            yield f"p{index} loses s{shard}", after
            return
        ended = with_row(after, shard, row._replace(counter=row.counter + 1, checkpoint=self._end))
        yield f"p{index} writes SHARD_END of s{shard}", self._born(ended)

    def _landed(self, s: State, batch: tuple[Part, ...]) -> State:
        if any(part.shard == CHILD for part in batch) and s.table[PARENT].v and not s.latest:
            past = s.past[PARENT]
            if past.landed | past.java != bits(0, self.records):
                raise BrokenRuleError("the child commits before its parent's records are processed")
        return super()._landed(s, batch)

"""A table that is replaced or restored from a backup, and `seek`.

Each checkpoint that a worker writes has a *mark*: the table's id, v and p at that time. A taker
stops with an event if the table has another id, or a smaller v or p than the mark. A person then
decides whether the checkpoint is kept or the records are read again. A checkpoint after the mark's
position was written by Java (or by `seek`). Only then p is moved to it.

A commit compares id, v and p. `seek` pauses the workers, writes the row, then the table, then the
row again. A worker that has passed its check of the pause before can do steps at any time.

Rules: no record enters a table twice. No position passes a record that is neither in the table nor
processed by Java, unless a person has decided so. No commit lands in another table than the one
that its files were written to. After `seek` has returned, the next record that is committed is the
one after its target, and no worker stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verification.model.positions.values import JAVA, NOBODY, at, bits
from verification.model.visit import BrokenRuleError


class Table(NamedTuple):
    """Its id, and what it stores of the shard."""

    id: int = 0
    v: int = 0
    p: int = 0


class Row(NamedTuple):
    """The lease row."""

    owner: int = NOBODY
    counter: int = 0
    checkpoint: int = 0
    mark: Table | None = None


class Slot(NamedTuple):
    """What a process knows; `table` is the expected state, and `end` that of its batch."""

    at: str = "idle"
    counter: int = 0
    checkpoint: int = 0
    mark: Table | None = None
    table: Table = Table()
    position: int = 0
    end: int = 0


class Past(NamedTuple):
    """Sets of records, as bits.

    They are in the table, processed by Java, or a person has decided not to read them.
    """

    landed: int = 0
    java: int = 0
    excused: int = 0


class Seek(NamedTuple):
    """An operator's command: its step, target, and the table that it has read.

    `done` is the target after the write to the table, until a record is committed.
    """

    at: str = ""
    target: int = 0
    table: Table = Table()
    done: int = NOBODY


class State(NamedTuple):
    """The complete state; `stopped` means that a worker has stopped with an event."""

    row: Row
    table: Table
    past: Past
    slots: tuple[Slot, ...]
    seek: Seek
    backup: tuple[Table, int] | None
    announced: frozenset[tuple[Table, int, int]]
    stopped: bool
    moves: int
    accidents: int
    seeks: int


@dataclass(frozen=True)
class Tables:
    """A configuration: worker ids, records and budgets.

    Moves are assignments and crashes. Accidents replace the table; with `backups` they restore it.

    With `goes_on` a complete state must be reachable from every state.
    """

    name: str
    ids: tuple[int, ...] = (0, 1)
    records: int = 3
    moves: int = 1
    accidents: int = 0
    seeks: int = 0
    backups: bool = False
    announces: bool = False
    java: bool = False
    goes_on: bool = False
    without: str = ""

    def start(self) -> State:
        """The first state: no owner, an empty table."""
        slots = (Slot(),) * len(self.ids)
        left = (self.moves, self.accidents, self.seeks)
        return State(Row(), Table(), Past(), slots, Seek(), None, frozenset(), False, *left)

    def complete(self, s: State) -> bool:
        """All records are in the table, processed by Java, or given up by a person."""
        past = s.past
        return past.landed | past.java | past.excused == bits(0, self.records)

    def within(self, s: State) -> bool:  # noqa: ARG002 (the budgets are the bounds)
        """Every state is within the bounds."""
        return True

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        yield from self._outside(s)
        yield from self._accidents(s)
        yield from self._seek(s)
        for batch in s.announced:
            if self._fits(s, batch[0]):
                yield f"somebody lands ({batch[1]},{batch[2]}]", self._landed(s, *batch)
        for index, slot in enumerate(s.slots):
            yield from self._take(s, index, slot)
            yield from self._work(s, index, slot)
            if s.moves and slot.at != "idle":
                yield f"crash p{index}", with_slot(s, index, Slot())._replace(moves=s.moves - 1)

    # -- the leader, Java, and people
    # ----------------------------------------------------------------------------

    def _outside(self, s: State) -> Iterator[tuple[str, State]]:
        row = s.row
        for owner in sorted({*self.ids, *([JAVA] if self.java else [])}):
            if row.owner != owner and (s.moves or row.owner == NOBODY):
                moved = row._replace(owner=owner, counter=row.counter + 1)
                after = s._replace(row=moved, moves=s.moves - (row.owner != NOBODY))
                yield f"assign to {'Java' if owner == JAVA else f'w{owner}'}", after
        if row.owner == JAVA and row.checkpoint < self.records:
            done = row.checkpoint + 1
            past = s.past._replace(java=s.past.java | bits(done - 1, done))
            moved = row._replace(counter=row.counter + 1, checkpoint=done)
            after = s._replace(row=moved, past=past, seek=s.seek._replace(done=NOBODY))
            yield f"Java processes {done}", after
        if s.stopped:
            decided = s._replace(stopped=False, seek=s.seek._replace(done=NOBODY))
            kept = row._replace(counter=row.counter + 1, mark=None)
            past = s.past._replace(excused=s.past.excused | bits(0, row.checkpoint))
            yield "a person keeps the checkpoint", decided._replace(row=kept, past=past)
            again = kept._replace(checkpoint=0)
            yield "a person wants the records again", decided._replace(row=again)

    def _accidents(self, s: State) -> Iterator[tuple[str, State]]:
        if not s.accidents:
            return
        if not self.backups:
            new = s._replace(table=Table(s.table.id + 1), accidents=s.accidents - 1)
            yield "the table is replaced", new._replace(past=s.past._replace(landed=0))
        elif s.backup is None:
            yield "the table is backed up", s._replace(backup=(s.table, s.past.landed))
        elif s.backup[0] != s.table:
            table, landed = s.backup
            past = s.past._replace(landed=landed)
            old = s._replace(table=table, past=past, accidents=s.accidents - 1)
            yield "the table is restored", old

    def _seek(self, s: State) -> Iterator[tuple[str, State]]:
        seek, first = s.seek, "table" if self.without == "row before the table" else "row"
        match seek.at:
            case "" if s.seeks:
                for target in (0, self.records - 1):
                    begun = s._replace(seek=Seek("pause", target), seeks=s.seeks - 1)
                    yield f"seek {target}: pause", begun
            case "pause":
                read = seek._replace(at=first, table=s.table)
                yield "seek reads the table", s._replace(seek=read)
            case "row":
                mark = seek.table._replace(p=min(seek.target, seek.table.p))
                after = seek._replace(at="table") if first == "row" else Seek(done=seek.done)
                yield self._seek_row(s, mark, after)
            case "again":
                yield self._seek_row(s, seek.table, Seek(done=seek.done))
            case "table":
                yield self._seek_table(s, first)
        if seek.at and s.moves:
            yield "seek crashes", s._replace(seek=Seek(), moves=s.moves - 1)

    def _seek_table(self, s: State, first: str) -> tuple[str, State]:
        seek = s.seek
        if s.table != seek.table:
            return "seek reads the table again", s._replace(seek=seek._replace(table=s.table))
        table = Table(s.table.id, s.table.v + 1, seek.target)
        after = seek._replace(at="again", table=table, done=seek.target)
        if first == "table":
            after = after._replace(at="row")
        elif self.without == "second write of a seek":
            after = Seek(done=seek.target)
        kept = s._replace(past=s.past._replace(landed=s.past.landed & bits(0, seek.target)))
        written = s._replace(table=table, seek=after, past=self._excused(kept))
        return "seek writes the table", written

    def _seek_row(self, s: State, mark: Table, after: Seek) -> tuple[str, State]:
        row = Row(s.row.owner, s.row.counter + 1, s.seek.target, mark)
        return "seek writes the row", s._replace(row=row, seek=after, past=self._excused(s))

    def _excused(self, s: State) -> Past:
        """The operator has decided not to read what a seek forward skips."""
        skipped = bits(0, s.seek.target) if s.seek.target > s.table.p else 0
        return s.past._replace(excused=s.past.excused | skipped)

    # -- a worker
    # ----------------------------------------------------------------------------

    def _take(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        row, table, who = s.row, s.table, f"p{index}"
        match slot.at:
            case "idle" if not s.seek.at and row.owner == self.ids[index]:
                yield f"{who} sees no pause", with_slot(s, index, Slot("checked"))
            case "checked" if row.owner == self.ids[index]:
                read = Slot("row", row.counter, row.checkpoint, row.mark)
                yield f"{who} reads the row", with_slot(s, index, read)
            case "checked":
                yield f"{who} is not the owner", with_slot(s, index, Slot())
            case "row" | "sure" if self._stops(slot.mark, table):
                again = slot._replace(at="again", table=table)
                if slot.at == "row" and self.without != "row after the table":
                    yield f"{who} doubts the table", with_slot(s, index, again)
                else:
                    yield f"{who} stops with an event", self._stopped(s, index)
            case "row":
                start = max(slot.checkpoint, table.p)
                to = "again" if start > table.p else "ready"
                if to == "again" and self.without == "row after the table":
                    to = "sure"
                read = slot._replace(at=to, table=table, position=start)
                yield f"{who} reads the table", with_slot(s, index, read)
            case "again" | "sure":
                yield from self._move(s, index, slot)

    def _move(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Move p to the checkpoint, after the row was read again."""
        row, table, past, who = s.row, s.table, s.past, f"p{index}"
        if slot.at == "again":
            same = (row.counter, row.checkpoint) == (slot.counter, slot.checkpoint)
            read = slot._replace(at="sure") if same else Slot()
            yield f"{who} reads the row again", with_slot(s, index, read)
        elif not self._fits(s, slot.table):
            yield f"{who} must not move p", with_slot(s, index, Slot())
        else:
            if bits(0, slot.position) & ~(past.landed | past.java | past.excused):
                raise BrokenRuleError(f"p moves to {slot.position}: lost records")
            if s.seek.done not in (NOBODY, slot.position):
                raise BrokenRuleError(f"p moves to {slot.position}: the seek is undone")
            moved = Table(table.id, table.v + 1, slot.position)
            ready = slot._replace(at="ready", table=moved)
            after = with_slot(s, index, ready)._replace(table=moved)
            yield f"{who} moves p to {slot.position}", after

    def _stopped(self, s: State, index: int) -> State:
        if s.seek.done != NOBODY and not s.seek.at and s.accidents == self.accidents:
            raise BrokenRuleError("a worker stops after a seek")
        return with_slot(s, index, Slot())._replace(stopped=True)

    def _stops(self, mark: Table | None, table: Table) -> bool:
        if mark is None or self.without == "mark":
            return False
        return (
            (mark.id != table.id and self.without != "id in the mark")
            or (mark.v > table.v and self.without != "number in the mark")
            or (mark.p > table.p and self.without != "position in the mark")
        )

    def _work(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        row, who = s.row, f"p{index}"
        if slot.at == "cut":
            batch = (slot.table, slot.position, slot.end)
            if self._fits(s, slot.table):
                after = self._landed(s, *batch)
                ready = slot._replace(at="ready", table=after.table, position=slot.end, end=0)
                yield f"{who} commits ({slot.position},{slot.end}]", with_slot(after, index, ready)
                if self.announces and batch not in s.announced:
                    yield f"{who} announces", s._replace(announced=s.announced | {batch})
            else:
                yield f"{who} is refused", with_slot(s, index, Slot())
        if slot.at == "ready":
            if slot.position == self.records and not self._fits(s, slot.table):
                yield f"{who} finds a changed table", with_slot(s, index, Slot())
            for end in range(slot.position + 1, self.records + 1):
                cut = slot._replace(at="cut", end=end)
                yield f"{who} cuts ({slot.position},{end}]", with_slot(s, index, cut)
            if slot.position != slot.checkpoint:
                own = (row.owner, row.counter) == (self.ids[index], slot.counter)
                if own:
                    written = Row(row.owner, row.counter + 1, slot.position, slot.table)
                    kept = slot._replace(counter=written.counter, checkpoint=slot.position)
                    after = with_slot(s, index, kept)._replace(row=written)
                    yield f"{who} checkpoints {slot.position}", after
                else:
                    yield f"{who} loses the lease", with_slot(s, index, Slot())

    def _fits(self, s: State, expected: Table) -> bool:
        match self.without:
            case "id in the comparison":
                return s.table[1:] == expected[1:]
            case "position in the comparison":
                return s.table[:2] == expected[:2]
            case "number in the comparison":
                return (s.table.id, s.table.p) == (expected.id, expected.p)
        return s.table == expected

    def _landed(self, s: State, expected: Table, after: int, end: int) -> State:
        added, past, what = bits(after, end), s.past, f"({after},{end}]"
        if expected.id != s.table.id:
            raise BrokenRuleError(f"{what}: the files are those of another table")
        if past.landed & added:
            raise BrokenRuleError(f"{what}: repeated records")
        if bits(0, after) & ~(past.landed | past.java | past.excused):
            raise BrokenRuleError(f"{what}: lost records")
        if s.seek.done not in (NOBODY, after):
            raise BrokenRuleError(f"{what}: the seek is undone")
        table = Table(s.table.id, s.table.v + 1, end)
        s = s._replace(table=table, past=past._replace(landed=past.landed | added))
        possible = frozenset(one for one in s.announced if self.backups or self._fits(s, one[0]))
        return s._replace(announced=possible, seek=s.seek._replace(done=NOBODY))


def with_slot(s: State, index: int, slot: Slot) -> State:
    """The state with what one process knows replaced."""
    return s._replace(slots=at(s.slots, index, slot))

"""The commit protocol: what a table stores, and what workers, Java and people do around it.

The table stores an id and, per shard, an *entry*: a number v, the end position p of the last landed
batch, and whether the shard has ended. A commit replaces the entries of its shards, exactly as
they were read, or is refused. The row of a shard has a checkpoint C and, beside it, a *mark*: the
last checkpoint that a worker wrote and the table had. Java moves C and leaves the mark alone.

- A taker reads the row, then the table, and starts at max(C, p). If C or the mark is ahead of p, it
  renews the row on condition of its counter first. A mark that is ahead of p stops the lease.
- The first commit of a child, or its end, ends all ancestors that the table does not show as ended.
- A child that has not begun waits for its parent. All ancestors of a begun shard count as ended.
- A write that is refused although the row names this worker adopts the counter, if it is one higher
  and if checkpoint and mark are those that the worker read or sent: a write of its own, whose
  answer was lost, was applied. If not, row and table are read again.
- A seek writes the rows, then the table, then the rows again: for the shard and its descendants.
  It raises the counter of a row by more than any worker has renewed it.

Every step is one I/O call. Any other steps can happen between two steps, which models a pause. An
announced batch, or a commit whose answer was lost, can land at any later time.

Rules:

- No record enters a table twice. No position passes a record that is neither in the table nor
  processed by Java, unless a person has decided so.
- A record that Java has processed does not enter the table after the first commit of the worker
  that took over. A worker that has read a checkpoint commits nothing before it.
- No record of a shard enters the table after one of a descendant, and none of a child before those
  of its ancestors are in the table or processed by Java.
- No checkpoint goes back, except in a seek. No commit lands in another table than the one that its
  files were written for. No worker stops while nobody has touched the table.
- After a seek has written the table, the next record that lands is the one after its target.
- A child whose parent the table knows does not start at LATEST.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from verification.model.values import JAVA, NOBODY, at, bits
from verification.model.visit import BrokenRuleError

LATEST: Final = -1
_JUMP: Final = 100


class Row(NamedTuple):
    """A lease row. The checkpoint after the last record is SHARD_END; a mark of 0 is none."""

    owner: int = NOBODY
    counter: int = 0
    checkpoint: int = 0
    mark: int = 0


ABSENT: Final = Row(NOBODY, -1)


class Entry(NamedTuple):
    """What the table stores of one shard: v is 0 if it is nothing, p is 0 without a position."""

    v: int = 0
    p: int = 0
    ended: bool = False


class Table(NamedTuple):
    """Its id and the entries of all shards."""

    id: int
    entries: tuple[Entry, ...]


class Past(NamedTuple):
    """Sets of records of one shard, as bits.

    They are in the table, processed by Java, must not enter the table any more, or a person has
    decided not to read them. `gone` means that the leader has removed the row of a finished shard.
    """

    landed: int = 0
    java: int = 0
    closed: int = 0
    excused: int = 0
    gone: bool = False

    @property
    def done(self) -> int:
        """The records that nobody has to read any more."""
        return self.landed | self.java | self.excused


class Part(NamedTuple):
    """One entry of a commit; its records are those after `after`, up to the new position.

    `floor` is the checkpoint of the row that its writer has read.
    """

    shard: int
    expected: Entry
    becomes: Entry
    after: int
    floor: int


class Batch(NamedTuple):
    """A commit: the id of the table, read before the files were written, and the entries."""

    table: int
    parts: tuple[Part, ...]


class Slot(NamedTuple):
    """What one process knows about one shard.

    `checkpoint` and `mark` are those of the row as read or written, `sent` are those of a write
    whose answer was lost. `expected` are the entries of the shard and of its ancestors that
    the table does not show as ended. `parent` is the parent's row as seen: "", "ended", "absent" or
    "open".
    """

    at: str = "idle"
    counter: int = 0
    checkpoint: int = 0
    mark: int = 0
    sent: tuple[int, int] | None = None
    table: int = 0
    expected: tuple[tuple[int, Entry], ...] = ()
    position: int = 0
    parent: str = ""


class Process(NamedTuple):
    """The shards of a process and its batch; `step` is "", "cut", "unknown" or "half"."""

    slots: tuple[Slot, ...]
    batch: Batch = Batch(0, ())
    step: str = ""


class Seek(NamedTuple):
    """A command of an operator: its step, shard and target, and what it has read.

    `rows` are the shards whose rows it still has to write.
    """

    at: str = ""
    shard: int = 0
    target: int = 0
    listed: int = 0
    entries: tuple[Entry, ...] = ()
    rows: tuple[int, ...] = ()


class Left(NamedTuple):
    """What is left of the budgets."""

    moves: int
    lost: int
    accidents: int
    seeks: int


class State(NamedTuple):
    """The complete state.

    Attributes:
        rows: The lease rows.
        table: The table.
        past: What has happened to the records of each shard.
        processes: What the processes know.
        announced: Commits that can land at any time.
        plan: The rows that the leader will create.
        listed: Number of shards in the listing of the stream.
        seek: A command of an operator.
        due: The position after which a shard must continue after a seek, or `NOBODY`.
        stopped: Whether a worker has stopped a lease because of the mark.
        touched: Whether somebody has touched the table, and no person has decided about a lease.
        backup: A copy of the table, and what had happened when it was made.
        left: Budgets.
    """

    rows: tuple[Row, ...]
    table: Table
    past: tuple[Past, ...]
    processes: tuple[Process, ...]
    announced: frozenset[Batch]
    plan: tuple[int, ...]
    listed: int
    seek: Seek
    due: tuple[int, ...]
    stopped: tuple[bool, ...]
    touched: tuple[bool, ...]
    backup: tuple[Table, tuple[Past, ...]] | None
    left: Left


@dataclass(frozen=True)
class Commits:
    """A configuration: processes, shards, records per shard, and budgets.

    Attributes:
        name: Name of the configuration.
        ids: Worker id of each process.
        parents: The parent of each shard, or `NOBODY`. A parent comes before its children.
        records: Records per shard.
        moves: Number of assignments, crashes and deleted rows.
        lost: Number of answers that are lost.
        accidents: Number of times that the table is replaced. With `backups` a copy is put back, or
            an older version restored.
        seeks: Number of seeks of the first shard.
        announces: Prepared batches are announced, and anybody can land them.
        java: A Java worker takes leases, too.
        java_leads: A leader of Java assigns leases also during a pause.
        deletes: People delete rows, but not after a seek.
        at_latest: The initial position is LATEST, and the leader does not ask the table for it.
        early: The rows of children exist from the start, like those of merged shards.
        reshards: The shards after the first one are listed later, one after the other.
        goes_on: A complete state must be reachable from every state.
        without: A rule that is removed.
    """

    name: str
    ids: tuple[int, ...] = (0, 1)
    parents: tuple[int, ...] = (NOBODY,)
    records: int = 2
    moves: int = 2
    lost: int = 0
    accidents: int = 0
    seeks: int = 0
    backups: bool = False
    announces: bool = False
    java: bool = False
    java_leads: bool = False
    deletes: bool = False
    at_latest: bool = False
    early: bool = False
    reshards: bool = False
    goes_on: bool = False
    without: str = ""

    # -- what is known of the shards
    # ----------------------------------------------------------------------------

    @property
    def _shards(self) -> range:
        return range(len(self.parents))

    @property
    def _end(self) -> int:
        return self.records + 1

    @property
    def _everything(self) -> int:
        return bits(0, self.records)

    def _children(self, shard: int) -> list[int]:
        return [one for one in self._shards if self.parents[one] == shard]

    def _ancestors(self, shard: int) -> tuple[int, ...]:
        found, parent = [], self.parents[shard]
        while parent != NOBODY:
            found.append(parent)
            parent = self.parents[parent]
        return tuple(found)

    def _descendants(self, shard: int) -> tuple[int, ...]:
        return tuple(one for one in self._shards if shard in self._ancestors(one))

    # -- the search
    # ----------------------------------------------------------------------------

    def start(self) -> State:
        """Return the first state: rows without an owner, nothing in the table."""
        shards = len(self.parents)
        idle = Process((Slot(),) * shards)
        early = self.early
        rows = tuple(Row() if early or parent == NOBODY else ABSENT for parent in self.parents)
        return State(
            rows,
            Table(0, (Entry(),) * shards),
            (Past(),) * shards,
            (idle,) * len(self.ids),
            frozenset(),
            (),
            self.parents.count(NOBODY) if self.reshards else shards,
            Seek(),
            (NOBODY,) * shards,
            (False,) * shards,
            (False,) * shards,
            None,
            Left(self.moves, self.lost, self.accidents, self.seeks),
        )

    def complete(self, s: State) -> bool:
        """Whether all records are in the table, processed by Java, or given up by a person."""
        return all(past.done == self._everything for past in s.past)

    def within(self, s: State) -> bool:  # noqa: ARG002 (the budgets are the bounds)
        """Return True: every state is within the bounds."""
        return True

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        for shard, row in enumerate(s.rows):
            yield from self._rows(s, shard, row)
        yield from self._sync(s)
        yield from self._accidents(s)
        yield from self._seek(s)
        for batch in s.announced:
            if self._fits(s, batch):
                yield f"somebody lands {_named(batch)}", self._landed(s, batch)
        for index, process in enumerate(s.processes):
            if s.left.moves and process != Process((Slot(),) * len(self.parents)):
                crashed = with_process(s, index, Process((Slot(),) * len(self.parents)))
                yield f"crash p{index}", spent(crashed, "moves")
            if process.step:
                yield from self._commit(s, index, process)
                continue
            for shard in self._shards:
                yield from self._take(s, index, shard, process.slots[shard])
                yield from self._checkpoint(s, index, shard, process.slots[shard])
            yield from self._cut(s, index, process)

    # -- the leader, Java, and people, with the rows
    # ----------------------------------------------------------------------------

    def _rows(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        if row == ABSENT:
            return
        if s.seek.at and row.owner != NOBODY:
            released = row._replace(owner=NOBODY, counter=row.counter + 1)
            yield f"s{shard} is released", with_row(s, shard, released)
        if row.checkpoint == self._end:
            yield from self._cleanup(s, shard)
        else:
            yield from self._assign(s, shard, row)
        if row.owner == JAVA and not s.seek.at:
            yield from self._java(s, shard, row)
        if self.deletes and s.left.moves and (row.checkpoint or s.table.entries[shard].v):
            yield from self._delete(s, shard)
        if s.stopped[shard]:
            yield from self._decide(s, shard, row)

    def _assign(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        """Our leaders assign nothing during a pause. A leader of Java does; no Java worker runs."""
        paused = bool(s.seek.at)
        if paused and not self.java_leads:
            return
        for owner in sorted({*self.ids, *([JAVA] if self.java and not paused else [])}):
            free = row.owner == NOBODY and not paused
            if row.owner != owner and (s.left.moves or free):
                moved = row._replace(owner=owner, counter=row.counter + 1)
                after = with_row(s, shard, moved)
                who = "Java" if owner == JAVA else f"w{owner}"
                yield f"assign s{shard} to {who}", after if free else spent(after, "moves")

    def _java(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        """A KCL worker reads from the checkpoint, after the parent's row is finished or gone."""
        parent = self.parents[shard]
        if parent != NOBODY and s.rows[parent].checkpoint != self._end and s.rows[parent] != ABSENT:
            return
        if row.checkpoint == LATEST:
            skipped = with_row(s, shard, row._replace(checkpoint=self.records))
            yield f"Java starts s{shard} at LATEST", self._excused_by_latest(skipped, shard)
        elif row.checkpoint < self.records:
            done, past = row.checkpoint + 1, s.past[shard]
            after = with_past(s, shard, past._replace(java=past.java | bits(done - 1, done)))
            after = after._replace(due=at(after.due, shard, NOBODY))
            moved = row._replace(counter=row.counter + 1, checkpoint=done)
            yield f"Java processes s{shard} {done}", with_row(after, shard, moved)
        elif row.checkpoint == self.records:
            ended = row._replace(counter=row.counter + 1, checkpoint=self._end)
            yield f"Java ends s{shard}", self._born(with_row(s, shard, ended), shard)

    def _born(self, s: State, shard: int) -> State:
        """The rows of the children are created at the end of their parent."""
        for child in self._children(shard):
            if s.rows[child] == ABSENT and child < s.listed:
                s = with_row(s, child, Row())
        return s

    def _cleanup(self, s: State, shard: int) -> Iterator[tuple[str, State]]:
        children = [s.rows[one] for one in self._children(shard)]
        if children and all(row != ABSENT and row.checkpoint > 0 for row in children):
            # A leader that was slower creates nothing any more: another one has led.
            after = with_past(s, shard, s.past[shard]._replace(gone=True))._replace(plan=())
            yield f"the leader removes the row of s{shard}", with_row(after, shard, ABSENT)

    def _delete(self, s: State, shard: int) -> Iterator[tuple[str, State]]:
        """A row is deleted by hand, or all of them. A leader finds that a row is missing.

        Not after a seek: the row that a leader creates then can have the counter of a worker that
        has slept since before the seek. Its checkpoint has a mark, so the lease stops.
        """
        if self.seeks and not (s.left.seeks or s.seek.at):
            return
        if len(self.parents) == 1:
            yield f"s{shard} is deleted", spent(with_row(s, shard, Row()), "moves")
            return
        for gone in ((shard,), tuple(self._shards)):
            after = s
            for one in gone:
                known = s.table.entries[one].v or gone != (shard,) or self.at_latest
                if s.rows[one] != ABSENT and not known:
                    past = s.past[one]
                    after = with_past(after, one, past._replace(excused=self._everything))
                after = with_row(after, one, ABSENT)
            yield f"somebody deletes {gone}", spent(after, "moves")

    def _decide(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        """A person decides about a table that is not the one that the row was written for."""
        past = s.past[shard]
        decided = s._replace(
            stopped=at(s.stopped, shard, False),
            touched=at(s.touched, shard, False),
            due=at(s.due, shard, NOBODY),
        )
        mark = row.mark if self.without == "mark in an acceptance" else 0
        kept = row._replace(counter=row.counter + 1, mark=mark)
        excused = past._replace(excused=past.excused | bits(0, min(row.checkpoint, self.records)))
        after = with_past(with_row(decided, shard, kept), shard, excused)
        yield "a person keeps the checkpoint", after
        again = with_row(decided, shard, kept._replace(checkpoint=0))
        yield (
            "a person wants the records again",
            with_past(again, shard, past._replace(closed=0)),
        )

    # -- shard sync
    # ----------------------------------------------------------------------------

    def _sync(self, s: State) -> Iterator[tuple[str, State]]:
        """Look for missing rows, then create them; other steps can happen in between."""
        if s.listed < len(self.parents):
            yield "the stream is resharded", s._replace(listed=s.listed + 1)
        if len(self.parents) == 1:
            return
        if s.plan:
            shard = s.plan[0]
            first = LATEST if self.at_latest and self.parents[shard] != NOBODY else 0
            made = s
            if s.rows[shard] == ABSENT:
                if s.past[shard].gone and not self.deletes:
                    raise BrokenRuleError(
                        f"s{shard} was finished and removed, and is created again"
                    )
                made = with_row(s, shard, Row(checkpoint=first))
            yield f"the leader creates s{shard}", made._replace(plan=s.plan[1:])
            return
        missing = tuple(shard for shard in range(s.listed) if self._is_missing(s, shard))
        if missing:
            yield f"the leader misses {missing}", s._replace(plan=missing)

    def _is_missing(self, s: State, shard: int) -> bool:
        """Whether a shard that is listed needs a row: nobody has finished it or begun a child."""
        entry, family = s.table.entries[shard], self._descendants(shard)
        if s.rows[shard] != ABSENT or entry.ended:
            return False
        if self.without != "begun shards in the sync" and any(
            self._is_begun(s.table.entries[one], s.rows[one].checkpoint) for one in family
        ):
            return False
        if entry.v and self.without != "positions in the sync":
            return True
        parent = self.parents[shard]
        if parent == NOBODY:
            rows = any(s.rows[one] != ABSENT or s.table.entries[one].v for one in family)
            return not rows and not self.at_latest
        ended = s.table.entries[parent].ended or s.rows[parent].checkpoint == self._end
        return self.at_latest or ended

    def _is_begun(self, entry: Entry, checkpoint: int) -> bool:
        if self.without == "row of a begun shard":
            checkpoint = 0
        return bool(entry.p or entry.ended or checkpoint > 0)

    def _excused_by_latest(self, s: State, shard: int) -> State:
        """Nobody reads what was there before a start at LATEST."""
        for one in (shard, *self._ancestors(shard)):
            s = with_past(s, one, s.past[one]._replace(excused=self._everything))
        return s

    # -- people, with the table
    # ----------------------------------------------------------------------------

    def _accidents(self, s: State) -> Iterator[tuple[str, State]]:
        if not s.left.accidents:
            return
        all_shards = (True,) * len(self.parents)
        if not self.backups:
            table = Table(s.table.id + 1, (Entry(),) * len(self.parents))
            past = tuple(one._replace(landed=0, closed=0) for one in self._unread(s))
            new = s._replace(table=table, past=past, touched=all_shards)
            yield "the table is replaced", spent(new, "accidents")
        elif s.backup is None:
            copy = (s.table, s.past)
            yield "the table is copied", s._replace(backup=copy)
        elif s.backup[0] != s.table:
            table, copies = s.backup
            past = tuple(
                one._replace(landed=copy.landed, closed=copy.closed)
                for one, copy in zip(self._unread(s), copies, strict=True)
            )
            old = s._replace(table=table, past=past, touched=all_shards)
            yield "the copy is put back", spent(old, "accidents")
            past = tuple(
                new._replace(excused=one.excused | (one.landed & ~new.landed))
                for one, new in zip(s.past, past, strict=True)
            )
            yield "an older version is restored", spent(s._replace(past=past), "accidents")

    def _unread(self, s: State) -> tuple[Past, ...]:
        """Nobody notices that another table lacks the records of a shard that has ended."""
        return tuple(
            past._replace(excused=self._everything) if entry.ended else past
            for past, entry in zip(s.past, s.table.entries, strict=True)
        )

    def _seek(self, s: State) -> Iterator[tuple[str, State]]:
        seek = s.seek
        first, second = ("listing", "table")
        if self.without != "listing after the table":
            first, second = second, first
        match seek.at:
            case "" if s.left.seeks:
                for target in (0, self.records - 1) if self.records > 1 else (0,):
                    begun = s._replace(seek=Seek(first, 0, target))
                    yield f"seek to {target}: pause", spent(begun, "seeks")
            case "table" | "listing":
                if seek.at == "table":
                    read = seek._replace(entries=s.table.entries)
                else:
                    read = seek._replace(listed=s.listed)
                if seek.at == first:
                    yield f"seek reads the {seek.at}", s._replace(seek=read._replace(at=second))
                else:
                    at_ = "commit" if self.without == "rows before the table" else "rows"
                    read = read._replace(at=at_, rows=self._sought(read))
                    yield f"seek reads the {seek.at}", s._replace(seek=read)
            case "rows" | "rows again" if s.rows[seek.rows[0]].owner == NOBODY:
                yield self._seek_row(s)
            case "commit":
                yield self._seek_table(s, first)
        if seek.at and s.left.moves:
            # The pause stays until somebody runs the command again.
            again = s._replace(seek=Seek(first, seek.shard, seek.target))
            yield "seek crashes and is run again", spent(again, "moves")

    def _sought(self, seek: Seek) -> tuple[int, ...]:
        """The shard and its descendants: all of them are read again."""
        family: list[int] = [one for one in self._descendants(seek.shard) if one < seek.listed]
        if self.without == "descendants in a seek":
            family = []
        if self.without == "unknown descendants in a seek":
            family = [one for one in family if seek.entries[one].v]
        return (seek.shard, *family)

    def _seek_row(self, s: State) -> tuple[str, State]:
        seek = s.seek
        shard, rest = seek.rows[0], seek.rows[1:]
        target = seek.target if shard == seek.shard else 0
        row = s.rows[shard]
        mark = row.mark if self.without == "mark in a seek" else 0
        # A row that was deleted counts from 0 again; no former holder has the counter of a seek.
        jump = 1 if self.without == "counter of a seek" else _JUMP
        written = Row(NOBODY, row.counter + jump, target, mark)
        if self.without == "rows of descendants in a seek" and shard != seek.shard:
            written = row
        after = seek._replace(rows=rest)
        if not rest:
            after = Seek() if seek.at == "rows again" else seek._replace(at="commit", rows=())
            if self.without == "rows before the table":
                after = Seek()
        excused = self._excused_by_seek(s, shard, target)
        return f"seek writes the row of s{shard}", with_row(excused, shard, written)._replace(
            seek=after
        )

    def _seek_table(self, s: State, first: str) -> tuple[str, State]:
        seek, sought = s.seek, self._sought(s.seek)
        if any(s.table.entries[one] != seek.entries[one] for one in sought):
            return "seek is refused", s._replace(seek=seek._replace(at=first, rows=()))
        entries = s.table.entries
        for one in sought:
            target, past = (seek.target if one == seek.shard else 0), s.past[one]
            v = entries[one].v + (self.without != "number of a seek")
            if self.without == "entry after a seek" and not target:
                v = 0
            entries = at(entries, one, Entry(v, target))
            keep = bits(0, target)
            kept = Past(
                past.landed & keep, past.java & keep, past.closed & keep, past.excused & keep
            )
            s = self._excused_by_seek(with_past(s, one, kept), one, target)
            s = s._replace(due=at(s.due, one, target))
        after = seek._replace(at="rows again", rows=sought)
        if self.without == "second write of a seek":
            after = Seek()
        written = s._replace(table=s.table._replace(entries=entries), seek=after)
        possible = frozenset(one for one in s.announced if self._fits(written, one))
        return "seek writes the table", written._replace(announced=possible)

    def _excused_by_seek(self, s: State, shard: int, target: int) -> State:
        """The operator has decided not to read what a seek forward skips."""
        past = s.past[shard]
        skipped = bits(0, target) if target > s.table.entries[shard].p else 0
        return with_past(s, shard, past._replace(excused=past.excused | (skipped & ~past.landed)))

    # -- a worker takes a lease
    # ----------------------------------------------------------------------------

    def _take(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        who = f"p{index}"
        match slot.at:
            case "idle" | "checked" | "early":
                yield from self._begin(s, index, shard, slot)
            case "row" if self.parents[shard] != NOBODY:
                parent = s.rows[self.parents[shard]]
                seen = "absent" if parent == ABSENT else "open"
                seen = "ended" if parent.checkpoint == self._end else seen
                looked = slot._replace(at="looked", parent=seen)
                yield f"{who} reads the parent of s{shard}", with_slot(s, index, shard, looked)
            case "row" | "looked":
                if not slot.expected:
                    slot = slot._replace(expected=self._expected(s, shard), table=s.table.id)
                yield from self._start(s, index, shard, slot)
            case "sure":
                yield from self._renew(s, index, shard, slot)

    def _begin(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Check that the application is not paused, then read the row."""
        row, who = s.rows[shard], f"p{index}"
        own = row != ABSENT and row.owner == self.ids[index]
        if slot.at == "idle":
            ended = row.checkpoint == self._end and self.without != "end of the row"
            if s.seek.at or s.stopped[shard] or (own and ended):
                return
            if own and self.without == "row before the table in a taking":
                early = Slot("early", expected=self._expected(s, shard), table=s.table.id)
                yield f"{who} reads the table of s{shard}", with_slot(s, index, shard, early)
            elif self.seeks and (own or self.reshards):
                yield f"{who} sees no pause", with_slot(s, index, shard, Slot("checked"))
            elif own:
                yield self._read_row(s, index, shard, slot)
        elif own:
            yield self._read_row(s, index, shard, slot)
        else:
            yield f"{who} does not own s{shard}", with_slot(s, index, shard, Slot())

    def _read_row(self, s: State, index: int, shard: int, slot: Slot) -> tuple[str, State]:
        row = s.rows[shard]
        read = slot._replace(
            at="row",
            counter=row.counter,
            checkpoint=row.checkpoint,
            mark=row.mark,
        )
        return f"p{index} reads the row of s{shard}", with_slot(s, index, shard, read)

    def _expected(self, s: State, shard: int) -> tuple[tuple[int, Entry], ...]:
        """The entries of a shard and of the ancestors that the table does not show as ended."""
        entries, ancestors = s.table.entries, self._ancestors(shard)
        if self.without == "ancestors in a commit":
            ancestors = ()
        if self.without == "ancestors of the parent":
            ancestors = ancestors[:1]
        missing = [one for one in ancestors if not entries[one].ended]
        if self.without == "unknown ancestors":
            missing = [one for one in missing if entries[one].v]
        return ((shard, entries[shard]), *((one, entries[one]) for one in missing))

    def _start(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Choose the position from the row and the table, which was read after it."""
        who, entry, checkpoint = f"p{index}", slot.expected[0][1], slot.checkpoint
        if self._waits(s, shard, slot):
            yield f"{who} waits for the parent of s{shard}", with_slot(s, index, shard, Slot())
            return
        if entry.ended:
            ended = slot._replace(at="ended", position=entry.p)
            yield f"{who} finds s{shard} ended", with_slot(s, index, shard, ended)
            return
        knows = any(s.table.entries[one].v for one in self._ancestors(shard))
        after = s
        if checkpoint == LATEST and not entry.v:
            if not knows:
                after = self._excused_by_latest(s, shard)
            elif self.without == "parent in the table":
                raise BrokenRuleError("the child starts at LATEST after its parent was read")
        start = max(checkpoint, entry.p, 0)
        if self.without == "position of the table":
            start = max(checkpoint, 0)
        if self.without in ("checkpoint of Java", "end of the row"):
            start = entry.p
        older = self._is_older(slot)
        if older and self.without == "renewal before a stop":
            yield f"{who} stops s{shard}", self._stopped(s, index, shard)
            return
        sure = start > entry.p and self.without != "renewal before a start"
        ends = len(slot.expected) > 1 and self.without != "renewal before an end"
        sure = sure or older or ends
        read = slot._replace(at="sure" if sure else "ready", position=start)
        yield f"{who} reads the table of s{shard}", with_slot(after, index, shard, read)

    def _waits(self, s: State, shard: int, slot: Slot) -> bool:
        """Whether a child that has not begun must wait for its parent."""
        begun = self._is_begun(slot.expected[0][1], slot.checkpoint)
        if begun and self.without != "begun shards in the wait":
            return False
        parent = self.parents[shard]
        stored = Entry() if parent == NOBODY else s.table.entries[parent]
        if slot.parent == "open":
            return self.without != "rows of parents"
        unfinished = bool(stored.p) and not stored.ended
        return slot.parent == "absent" and unfinished and self.without != "unfinished parents"

    def _is_older(self, slot: Slot) -> bool:
        """Whether the table has less than the mark: it is an older copy, or another one."""
        if self.without == "mark":
            return False
        if self.without == "mark behind the checkpoint" and slot.checkpoint != slot.mark:
            return False
        return slot.mark > slot.expected[0][1].p

    def _renew(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Renew the row on condition of its counter; if it is refused, read row and table again."""
        row, who = s.rows[shard], f"p{index}"
        if (row.owner, row.counter) != (self.ids[index], slot.counter):
            again = with_slot(s, index, shard, Slot())
            if self.without == "second resolution" and row.owner == self.ids[index]:
                again = with_slot(s, index, shard, slot._replace(counter=row.counter))
            yield f"{who} must read s{shard} again", again
            return
        written = row._replace(counter=row.counter + 1)
        renewed = with_row(s, shard, written)
        if s.left.lost:
            yield f"{who} renews s{shard} without an answer", spent(renewed, "lost")
        if self._is_older(slot):
            yield f"{who} stops s{shard}", self._stopped(renewed, index, shard)
        else:
            ready = slot._replace(at="ready", counter=written.counter)
            yield f"{who} renews s{shard}", with_slot(renewed, index, shard, ready)

    def _stopped(self, s: State, index: int, shard: int) -> State:
        if not s.touched[shard]:
            raise BrokenRuleError(f"s{shard} stops, and nobody has touched the table")
        return with_slot(s, index, shard, Slot())._replace(stopped=at(s.stopped, shard, True))

    # -- a worker writes the row
    # ----------------------------------------------------------------------------

    def _checkpoint(
        self, s: State, index: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        """Write the position, or SHARD_END, on condition of counter, owner and checkpoint."""
        has = slot.expected[0][1].p == slot.position if slot.expected else False
        if slot.at == "ended":
            checkpoint, mark = self._end, slot.mark
        elif slot.at == "ready" and slot.position > max(slot.checkpoint, 0):
            checkpoint, mark = slot.position, slot.position if has else slot.mark
        elif slot.at == "ready" and self.without == "mark of the table" and not has:
            checkpoint, mark = slot.position, slot.position
            if mark == slot.mark:
                return
        else:
            return
        row, who = s.rows[shard], f"p{index}"
        fits = row.owner == self.ids[index] and row.counter == slot.counter
        if self.without != "checkpoint of a write":
            fits = fits and row.checkpoint == slot.checkpoint
        if not fits and self.without != "condition of a write":
            yield f"{who} is refused s{shard}", self._adopted(s, index, shard, slot)
            return
        if checkpoint < row.checkpoint:
            raise BrokenRuleError(
                f"the checkpoint of s{shard} goes back from {row.checkpoint} to {checkpoint}"
            )
        written = row._replace(counter=row.counter + 1, checkpoint=checkpoint, mark=mark)
        kept = slot._replace(counter=written.counter, checkpoint=checkpoint, mark=mark, sent=None)
        after, what = with_row(s, shard, written), f"checkpoints s{shard} at {checkpoint}"
        if slot.at == "ended":
            kept, after, what = Slot(), self._born(after, shard), f"writes the end of s{shard}"
        yield f"{who} {what}", with_slot(after, index, shard, kept)
        if s.left.lost:
            sent = slot._replace(sent=(checkpoint, mark))
            yield (
                f"{who} {what} without an answer",
                spent(with_slot(after, index, shard, sent), "lost"),
            )

    def _adopted(self, s: State, index: int, shard: int, slot: Slot) -> State:
        """Adopt the counter if nothing else has changed; if not, read row and table again."""
        row = s.rows[shard]
        if row == ABSENT or row.owner != self.ids[index]:
            return with_slot(s, index, shard, Slot())
        same = (row.checkpoint, row.mark) in ((slot.checkpoint, slot.mark), slot.sent)
        if not same and self.without != "second resolution":
            return with_slot(s, index, shard, Slot())
        # Another worker in between raises the counter by two, a seek by more.
        if row.counter != slot.counter + 1 and self.without != "counter in the adoption":
            return with_slot(s, index, shard, Slot())
        kept = slot._replace(
            counter=row.counter, checkpoint=row.checkpoint, mark=row.mark, sent=None
        )
        if kept.at == "ready" and kept.position < row.checkpoint:
            raise BrokenRuleError(f"p{index} would write a checkpoint of s{shard} that goes back")
        return with_slot(s, index, shard, kept)

    # -- a worker commits
    # ----------------------------------------------------------------------------

    def _cut(self, s: State, index: int, process: Process) -> Iterator[tuple[str, State]]:
        """Choose the shards of a batch and the ends of their ranges, or end one shard."""
        choices: list[list[tuple[int, int]]] = []
        for shard, slot in enumerate(process.slots):
            if slot.at != "ready":
                continue
            ends = range(slot.position + 1, self.records + 1)
            choices.append([(shard, NOBODY), *((shard, end) for end in ends)])
            if slot.position == self.records:
                batch = self._batch(process, [(shard, self._end)])
                cut = process._replace(batch=batch, step="cut")
                yield f"p{index} cuts {_named(batch)}", with_process(s, index, cut)
        for chosen in itertools.product(*choices):
            ranges = [one for one in chosen if one[1] != NOBODY]
            if not ranges or len({process.slots[shard].table for shard, _ in ranges}) > 1:
                continue
            shards = {shard for shard, _ in ranges}
            ended = {one for shard in shards for one, _ in process.slots[shard].expected[1:]}
            if shards & ended and self.without != "ancestors apart from their children":
                # What this process knows of one of the two is old.
                continue
            batch = self._batch(process, ranges)
            cut = process._replace(batch=batch, step="cut")
            yield f"p{index} cuts {_named(batch)}", with_process(s, index, cut)

    def _batch(self, process: Process, ranges: list[tuple[int, int]]) -> Batch:
        parts: dict[int, Part] = {}
        for shard, end in ranges:
            slot = process.slots[shard]
            floor = min(slot.checkpoint, self.records + 1)
            ancestors = slot.expected[1:]
            if self.without == "ancestors in an end" and end == self._end:
                ancestors = ()
            for one, entry in ancestors:
                ended = entry._replace(v=entry.v + 1, ended=True)
                parts.setdefault(one, Part(one, entry, ended, ended.p, 0))
            entry = slot.expected[0][1]
            becomes = Entry(entry.v + 1, min(end, self.records), end == self._end)
            parts[shard] = Part(shard, entry, becomes, slot.position, floor)
        table = process.slots[ranges[0][0]].table
        return Batch(table, tuple(parts[one] for one in sorted(parts)))

    def _commit(self, s: State, index: int, process: Process) -> Iterator[tuple[str, State]]:
        batch, who = process.batch, f"p{index}"
        if process.step == "half":
            entries = s.table.entries
            for part in batch.parts:
                entry = entries[part.shard]
                moved = entry._replace(p=max(entry.p, part.becomes.p))
                entries = at(entries, part.shard, moved)
            after = s._replace(table=s.table._replace(entries=entries))
            done = process._replace(batch=Batch(0, ()), step="")
            yield f"{who} stores the positions", with_process(after, index, done)
        elif process.step == "unknown":
            yield from self._after_unknown(s, index, process)
        elif self._fits(s, self._identified(s, batch)) or self.without in (
            "comparison",
            "all shards of a batch",
        ):
            after = self._landed(s, batch)
            yield f"{who} commits {_named(batch)}", self._committed(after, index, process)
            if self.announces and batch not in s.announced and self._fits(s, batch):
                told = s._replace(announced=s.announced | {batch})
                yield f"{who} announces {_named(batch)}", told
            if s.left.lost and self._fits(s, batch):
                sent = process._replace(step="unknown")
                lost = spent(s, "lost")
                applied = self._landed(lost, batch)
                yield f"{who} commits without an answer", with_process(applied, index, sent)
                late = lost._replace(announced=lost.announced | {batch})
                yield f"{who} sends a commit that lands late", with_process(late, index, sent)
        else:
            yield f"{who} is refused", with_process(s, index, self._refused(s, process))

    def _identified(self, s: State, batch: Batch) -> Batch:
        """The id that a commit expects was read before its files were written."""
        return batch._replace(table=s.table.id) if self.without == "id before the files" else batch

    def _after_unknown(self, s: State, index: int, process: Process) -> Iterator[tuple[str, State]]:
        """Read the table: the commit has landed, can be repeated, or is refused."""
        batch, entries, who = process.batch, s.table.entries, f"p{index}"
        if self.without == "reading after a lost answer":
            again = process._replace(batch=self._newer(s, batch), step="cut")
            yield f"{who} repeats the commit", with_process(s, index, again)
            return
        if s.table.id == batch.table:
            if all(entries[part.shard] == part.becomes for part in batch.parts):
                yield f"{who} finds its commit", self._committed(s, index, process)
                return
            if self._fits(s, batch):
                again = process._replace(step="cut")
                yield f"{who} repeats the commit", with_process(s, index, again)
                return
        yield f"{who} finds another commit", with_process(s, index, self._refused(s, process))

    def _newer(self, s: State, batch: Batch) -> Batch:
        """The same batch with entries that are read now."""
        parts = []
        for part in batch.parts:
            entry = s.table.entries[part.shard]
            parts.append(
                part._replace(expected=entry, becomes=part.becomes._replace(v=entry.v + 1))
            )
        return batch._replace(parts=tuple(parts))

    def _refused(self, s: State, process: Process) -> Process:
        """Forget the refused shards and the children of refused ones; cut the others again."""
        if self.without == "reading after a refusal":
            return process._replace(batch=self._newer(s, process.batch), step="cut")
        batch, slots = process.batch, list(process.slots)
        wrong = {p.shard for p in batch.parts if s.table.entries[p.shard] != p.expected}
        if s.table.id != batch.table:
            wrong = {part.shard for part in batch.parts}
        for part in batch.parts:
            slot = slots[part.shard]
            concerned = {shard for shard, _ in slot.expected}
            if self.without == "ancestors after a refusal":
                concerned = {part.shard}
            if concerned & wrong:
                slots[part.shard] = Slot()
        return Process(tuple(slots))

    def _committed(self, s: State, index: int, process: Process) -> State:
        slots = list(process.slots)
        for part in process.batch.parts:
            slot = slots[part.shard]
            own = slot.at == "ready" and slot.expected[0][1] == part.expected
            if own and (part.after == slot.position):
                now = s.table.entries[part.shard]
                at_ = "ended" if part.becomes.ended else "ready"
                slots[part.shard] = slot._replace(
                    at=at_, expected=((part.shard, now),), position=part.becomes.p
                )
        half = self.without == "position in the commit"
        batch = process.batch if half else Batch(0, ())
        return with_process(s, index, Process(tuple(slots), batch, "half" if half else ""))

    def _fits(self, s: State, batch: Batch) -> bool:
        table, entries = s.table, s.table.entries
        if table.id != batch.table and self.without != "id of the table":
            return False
        if self.without == "equal announcements" and batch in s.announced:
            return all(part.becomes.p > entries[part.shard].p for part in batch.parts)
        if self.without == "position in the comparison":
            return all(entries[one.shard].v == one.expected.v for one in batch.parts)
        if self.without == "number in the comparison":
            return all(entries[one.shard][1:] == one.expected[1:] for one in batch.parts)
        return all(entries[one.shard] == one.expected for one in batch.parts)

    def _landed(self, s: State, batch: Batch) -> State:
        """All files of the batch are in the table, and the entries of its shards are set."""
        if batch.table != s.table.id:
            raise BrokenRuleError(f"{_named(batch)}: the files are those of another table")
        for part in batch.parts:
            self._check(s, part)
            past = s.past[part.shard]
            entry = s.table.entries[part.shard]
            landed = past.landed | bits(part.after, part.becomes.p)
            becomes = part.becomes
            if self.without == "all shards of a batch" and entry != part.expected:
                becomes = entry
            if self.without == "position in the commit":
                becomes = becomes._replace(p=entry.p)
            if self.without == "comparison":
                becomes = becomes._replace(v=entry.v + 1)
            followed = past.java & bits(0, part.after)
            closed = past.closed | (followed & ~landed)
            s = with_past(s, part.shard, past._replace(landed=landed, closed=closed))
            entries = at(s.table.entries, part.shard, becomes)
            s = s._replace(table=s.table._replace(entries=entries))
            if part.becomes.p > part.after or part.becomes.p > part.expected.p:
                s = s._replace(due=at(s.due, part.shard, NOBODY))
                for one in self._ancestors(part.shard):
                    over = s.past[one]
                    shut = over.closed | (self._everything & ~over.landed)
                    s = with_past(s, one, over._replace(closed=shut))
        possible = frozenset(
            one for one in s.announced if self.backups or (one != batch and self._fits(s, one))
        )
        return s._replace(announced=possible)

    def _check(self, s: State, part: Part) -> None:
        """Check the rules for one entry of a commit that lands now."""
        past, shard, end = s.past[part.shard], part.shard, part.becomes.p
        added, what = bits(part.after, end), f"({part.after},{end}] of s{part.shard}"
        if past.landed & added:
            raise BrokenRuleError(f"{what}: repeated records")
        if past.closed & added:
            raise BrokenRuleError(f"{what}: a taker or a child has committed before")
        if added & past.java & bits(0, part.floor):
            raise BrokenRuleError(f"{what}: the checkpoint {part.floor} of Java was read before")
        if bits(0, part.after) & ~past.done and part.after > part.expected.p:
            raise BrokenRuleError(f"{what}: lost records")
        if added and bits(0, part.after) & ~past.done:
            raise BrokenRuleError(f"{what}: lost records")
        if s.due[shard] not in (NOBODY, part.after, self.records):
            raise BrokenRuleError(f"{what}: the seek is undone")
        if added:
            for one in self._ancestors(shard):
                if s.past[one].done != self._everything:
                    raise BrokenRuleError(f"{what}: records of its ancestor s{one} are missing")


def _named(batch: Batch) -> str:
    return " and ".join(
        f"the end of s{part.shard}"
        if part.becomes.ended
        else f"({part.after},{part.becomes.p}] of s{part.shard}"
        for part in batch.parts
    )


def spent(s: State, budget: str) -> State:
    """Return the state after one use of a budget."""
    return s._replace(left=s.left._replace(**{budget: getattr(s.left, budget) - 1}))


def with_process(s: State, index: int, process: Process) -> State:
    """Return the state with one process replaced."""
    return s._replace(processes=at(s.processes, index, process))


def with_slot(s: State, index: int, shard: int, slot: Slot) -> State:
    """Return the state with what one process knows about a shard replaced."""
    process = s.processes[index]
    return with_process(s, index, process._replace(slots=at(process.slots, shard, slot)))


def with_row(s: State, shard: int, row: Row) -> State:
    """Return the state with one row replaced."""
    return s._replace(rows=at(s.rows, shard, row))


def with_past(s: State, shard: int, past: Past) -> State:
    """Return the state with what has happened to one shard replaced."""
    return s._replace(past=at(s.past, shard, past))

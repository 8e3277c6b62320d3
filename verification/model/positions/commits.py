"""The commit, the takeover and the checkpoint of the positions protocol.

The table stores per shard a number v and the end position p of the last landed batch. A commit sets
both for all shards of its batch, and is accepted if and only if all of them have the values that
its writer read. A taker reads the row, then the table, and starts at max(C, p), where C is the
checkpoint of the row. Where a Java worker has moved C past p, the taker first commits p = C.

Every step is one I/O call. Any other steps can happen between two steps, which models a pause.

Rules: no record enters the table twice. No position passes a record that is neither in the table
nor processed by Java. A record that Java has processed does not enter the table after a worker has
taken over from Java. No checkpoint goes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verification.model.positions.values import JAVA, NOBODY, at, bits
from verification.model.visit import BrokenRuleError


class Row(NamedTuple):
    """A lease row."""

    owner: int = NOBODY
    counter: int = 0
    checkpoint: int = 0


class Entry(NamedTuple):
    """What the table stores of one shard; v is 0 if it stores nothing."""

    v: int = 0
    p: int = 0
    ended: bool = False


class Past(NamedTuple):
    """Sets of records of one shard, as bits.

    They are in the table, processed by Java, or processed by Java before a worker took over.
    """

    landed: int = 0
    java: int = 0
    closed: int = 0


class Part(NamedTuple):
    """One shard of a batch: the expected entry and the range (after, end]."""

    shard: int
    expected: Entry
    after: int
    end: int


class Slot(NamedTuple):
    """What one process knows about one shard."""

    at: str = "idle"
    counter: int = 0
    checkpoint: int = 0
    entry: Entry = Entry()
    position: int = 0


class Process(NamedTuple):
    """The shards of a process and its batch; `step` is "", "cut", "unknown" or "half"."""

    slots: tuple[Slot, ...]
    batch: tuple[Part, ...] = ()
    step: str = ""


class State(NamedTuple):
    """The complete state; `moves` and `lost` are what is left of the budgets.

    `plan` and `latest` are of `ends`: the rows that the leader will create, and whether the child
    has started at LATEST.
    """

    rows: tuple[Row, ...]
    table: tuple[Entry, ...]
    past: tuple[Past, ...]
    processes: tuple[Process, ...]
    announced: frozenset[tuple[Part, ...]]
    moves: int
    lost: int
    plan: tuple[int, ...] = ()
    latest: bool = False


@dataclass(frozen=True)
class Commits:
    """A configuration: worker ids of the processes, shards, records per shard, and budgets.

    Moves are assignments, crashes and deletions. `without` names a rule that is removed.

    With `goes_on` a complete state must be reachable from every state.
    """

    name: str
    ids: tuple[int, ...] = (0, 1)
    shards: int = 1
    records: int = 3
    moves: int = 3
    lost: int = 0
    announces: bool = False
    java: bool = False
    deletes: bool = True
    goes_on: bool = False
    without: str = ""

    def start(self) -> State:
        """The first state: no owner, nothing in the table."""
        idle = Process((Slot(),) * self.shards)
        return State(
            (Row(),) * self.shards,
            (Entry(),) * self.shards,
            (Past(),) * self.shards,
            (idle,) * len(self.ids),
            frozenset(),
            self.moves,
            self.lost,
        )

    def complete(self, s: State) -> bool:
        """All records are in the table or processed by Java."""
        everything = bits(0, self.records)
        return all(past.landed | past.java == everything for past in s.past)

    def within(self, s: State) -> bool:  # noqa: ARG002 (the budgets are the bounds)
        """Every state is within the bounds."""
        return True

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        for shard, row in enumerate(s.rows):
            yield from self._outside(s, shard, row)
        for batch in s.announced:
            if self._fits(s, batch):
                yield f"somebody lands {_named(batch)}", self._landed(s, batch)
        for index, process in enumerate(s.processes):
            if s.moves and process != Process((Slot(),) * self.shards):
                crashed = with_process(s, index, Process((Slot(),) * self.shards))
                yield f"crash p{index}", crashed._replace(moves=s.moves - 1)
            if process.step:
                yield from self._commit(s, index, process)
                continue
            for shard in range(self.shards):
                yield from self._take(s, index, process, shard)
                yield from self._checkpoint(s, index, process, shard)
            yield from self._cut(s, index, process)

    # -- the leader, Java, and people
    # ----------------------------------------------------------------------------

    def _outside(self, s: State, shard: int, row: Row) -> Iterator[tuple[str, State]]:
        for owner in sorted({*self.ids, *([JAVA] if self.java else [])}):
            if row.owner != owner and (s.moves or row.owner == NOBODY):
                moved = row._replace(owner=owner, counter=row.counter + 1)
                who = "Java" if owner == JAVA else f"w{owner}"
                left = s.moves - (row.owner != NOBODY)
                yield f"assign s{shard} to {who}", with_row(s, shard, moved)._replace(moves=left)
        if self.deletes and s.moves and row.checkpoint:
            yield from self._delete(s, shard)
        if row.owner == JAVA and row.checkpoint < self.records:
            done, past = row.checkpoint + 1, s.past[shard]
            after = with_past(s, shard, past._replace(java=past.java | bits(done - 1, done)))
            moved = row._replace(counter=row.counter + 1, checkpoint=done)
            yield f"Java processes s{shard} {done}", with_row(after, shard, moved)

    def _delete(self, s: State, shard: int) -> Iterator[tuple[str, State]]:
        """A row is deleted by hand, and created again by the leader."""
        yield f"s{shard} is deleted", with_row(s, shard, Row())._replace(moves=s.moves - 1)

    # -- a worker takes a lease
    # ----------------------------------------------------------------------------

    def _take(
        self, s: State, index: int, process: Process, shard: int
    ) -> Iterator[tuple[str, State]]:
        slot, row, entry, who = process.slots[shard], s.rows[shard], s.table[shard], f"p{index}"
        match slot.at:
            case "idle" if row.owner == self.ids[index]:
                read = Slot("row", row.counter, row.checkpoint)
                yield f"{who} reads the row of s{shard}", with_slot(s, index, shard, read)
            case "row":
                start = max(slot.checkpoint, entry.p)
                if self.without == "position of the table":
                    start = slot.checkpoint
                ahead = slot.checkpoint > entry.p and self.without != "checkpoint of Java"
                read = slot._replace(at="ahead" if ahead else "ready", entry=entry, position=start)
                after = with_slot(s, index, shard, read)
                yield (
                    f"{who} reads the table of s{shard}",
                    after if ahead else self._taken(after, shard, start),
                )
            case "ahead" if entry == slot.entry:
                moved = entry._replace(v=entry.v + 1, p=slot.position)
                after = s._replace(table=at(s.table, shard, moved))
                ready = slot._replace(at="ready", entry=moved)
                yield (
                    f"{who} moves s{shard} to {slot.position}",
                    self._taken(with_slot(after, index, shard, ready), shard, slot.position),
                )
                if s.lost:
                    again = with_slot(after, index, shard, slot._replace(at="row"))
                    yield f"{who} moves s{shard} without an answer", again._replace(lost=s.lost - 1)
            case "ahead":
                yield (
                    f"{who} must not move s{shard}",
                    with_slot(s, index, shard, slot._replace(at="row")),
                )

    def _taken(self, s: State, shard: int, position: int) -> State:
        """A worker starts here: what Java has processed before must not enter the table."""
        past = s.past[shard]
        over = past.java & bits(0, position) & ~past.landed
        return with_past(s, shard, past._replace(closed=past.closed | over))

    def _checkpoint(
        self, s: State, index: int, process: Process, shard: int
    ) -> Iterator[tuple[str, State]]:
        """Write the position to the row, on condition of its counter, owner and checkpoint."""
        slot, row = process.slots[shard], s.rows[shard]
        if slot.at != "ready" or slot.position == slot.checkpoint:
            return
        own = row.counter == slot.counter and row.owner == self.ids[index]
        own = own and (row.checkpoint == slot.checkpoint or self.without == "checkpoint of a write")
        if not own and self.without != "condition of the row":
            yield f"p{index} loses s{shard}", with_slot(s, index, shard, Slot())
            return
        if slot.position < row.checkpoint:
            raise BrokenRuleError(
                f"the checkpoint of s{shard} goes back from {row.checkpoint} to {slot.position}"
            )
        written = row._replace(counter=row.counter + 1, checkpoint=slot.position)
        kept = slot._replace(counter=written.counter, checkpoint=slot.position)
        yield (
            f"p{index} checkpoints s{shard} at {slot.position}",
            with_slot(with_row(s, shard, written), index, shard, kept),
        )
        if s.lost:
            again = with_slot(with_row(s, shard, written), index, shard, Slot())
            yield (
                f"p{index} checkpoints s{shard} without an answer",
                again._replace(lost=s.lost - 1),
            )

    # -- a worker commits
    # ----------------------------------------------------------------------------

    def _cut(self, s: State, index: int, process: Process) -> Iterator[tuple[str, State]]:
        ranges: list[list[Part | None]] = []
        for shard, slot in enumerate(process.slots):
            ends = range(slot.position + 1, self.records + 1) if slot.at == "ready" else range(0)
            ranges.append([None, *(Part(shard, slot.entry, slot.position, end) for end in ends)])
        for parts in itertools.product(*ranges):
            batch = tuple(part for part in parts if part is not None)
            if batch:
                cut = process._replace(batch=batch, step="cut")
                yield f"p{index} cuts {_named(batch)}", with_process(s, index, cut)

    def _commit(self, s: State, index: int, process: Process) -> Iterator[tuple[str, State]]:
        batch, who = process.batch, f"p{index}"
        if process.step == "half":
            after, past = s, process._replace(batch=(), step="")
            for part in batch:
                entry = s.table[part.shard]
                moved = entry._replace(p=max(entry.p, part.end))
                after = after._replace(table=at(after.table, part.shard, moved))
            yield f"{who} stores the positions", with_process(after, index, past)
        elif process.step == "unknown":
            yield (
                f"{who} reads the table again",
                with_process(s, index, self._after_unknown(s, process)),
            )
        elif self._fits(s, batch) or self.without in ("comparison", "all shards of a batch"):
            sent = process._replace(step="unknown")
            after = self._landed(s, batch)
            yield f"{who} commits {_named(batch)}", self._committed(after, index, process)
            if self.announces and batch not in s.announced and self._fits(s, batch):
                told = s._replace(announced=s.announced | {batch})
                yield f"{who} announces {_named(batch)}", told
            if s.lost and self._fits(s, batch):
                lost = s._replace(lost=s.lost - 1)
                applied = self._landed(lost, batch)
                yield f"{who} commits without an answer", with_process(applied, index, sent)
                late = lost._replace(announced=lost.announced | {batch})
                yield f"{who} sends a commit that lands late", with_process(late, index, sent)
        else:
            yield f"{who} is refused", with_process(s, index, self._refused(s, process))

    def _after_unknown(self, s: State, process: Process) -> Process:
        """Forget the batch: the rows and the table are read again."""
        if self.without == "reading after a lost answer":
            fresh = tuple(part._replace(expected=s.table[part.shard]) for part in process.batch)
            return process._replace(batch=fresh, step="cut")
        slots = list(process.slots)
        for part in process.batch:
            slots[part.shard] = Slot()
        return Process(tuple(slots))

    def _refused(self, s: State, process: Process) -> Process:
        """Drop the refused shards; the batch is repeated with the others."""
        slots, kept = list(process.slots), []
        for part in process.batch:
            if s.table[part.shard] == part.expected:
                kept.append(part)
            elif self.without == "reading after a refusal":
                kept.append(part._replace(expected=s.table[part.shard]))
            else:
                slots[part.shard] = Slot()
        return Process(tuple(slots), tuple(kept), "cut" if kept else "")

    def _committed(self, s: State, index: int, process: Process) -> State:
        slots = list(process.slots)
        for part in process.batch:
            entry = s.table[part.shard]
            slots[part.shard] = slots[part.shard]._replace(entry=entry, position=part.end)
        half = self.without == "position in the commit"
        batch = process.batch if half else ()
        return with_process(s, index, Process(tuple(slots), batch, "half" if half else ""))

    def _fits(self, s: State, batch: tuple[Part, ...]) -> bool:
        if self.without == "equal announcements" and batch in s.announced:
            return all(part.end > s.table[part.shard].p for part in batch)
        return all(s.table[part.shard] == part.expected for part in batch)

    def _landed(self, s: State, batch: tuple[Part, ...]) -> State:
        """All files of the batch are in the table, and the entries of its shards are set."""
        for part in batch:
            past, entry = s.past[part.shard], s.table[part.shard]
            landed = past.landed | checked(past, part)
            stale = self.without == "all shards of a batch" and entry != part.expected
            end = entry.p if self.without == "position in the commit" else part.end
            if not stale:
                moved = entry._replace(v=entry.v + 1, p=end)
                s = s._replace(table=at(s.table, part.shard, moved))
            s = with_past(s, part.shard, past._replace(landed=landed))
        possible = frozenset(one for one in s.announced if one != batch and (self._fits(s, one)))
        return s._replace(announced=possible)


def checked(past: Past, part: Part) -> int:
    """Return the records of a range as bits, if they may enter the table now."""
    added, skipped = bits(part.after, part.end), bits(0, part.after)
    what = f"({part.after},{part.end}] of s{part.shard}"
    if past.landed & added:
        raise BrokenRuleError(f"{what}: repeated records")
    if past.closed & added:
        raise BrokenRuleError(f"{what}: Java has processed these records, and was followed")
    if skipped & ~(past.landed | past.java):
        raise BrokenRuleError(f"{what}: lost records")
    return added


def _named(batch: tuple[Part, ...]) -> str:
    return " and ".join(f"({part.after},{part.end}] of s{part.shard}" for part in batch)


def with_process(s: State, index: int, process: Process) -> State:
    return s._replace(processes=at(s.processes, index, process))


def with_slot(s: State, index: int, shard: int, slot: Slot) -> State:
    process = s.processes[index]
    return with_process(s, index, process._replace(slots=at(process.slots, shard, slot)))


def with_row(s: State, shard: int, row: Row) -> State:
    return s._replace(rows=at(s.rows, shard, row))


def with_past(s: State, shard: int, past: Past) -> State:
    return s._replace(past=at(s.past, shard, past))

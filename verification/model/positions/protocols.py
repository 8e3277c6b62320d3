"""Two-phase commits and positions side by side: upgrade and downgrade.

Old workers know only the two-phase protocol. New workers know both. The table decides per shard: if
it has a position, new workers use the positions protocol. If not, they use the two-phase protocol,
or move the shard to the positions protocol when the table has the *marker*. This move is one commit
without files. It sets p and raises v and the fence, so that it refuses prepared two-phase batches.

The upgrade sets the marker in the table's log when no old worker is seen to live. Old code refuses
a table with the marker at each read and commit. The downgrade runs when no worker is seen to live:
it writes p to the row, removes p from the table with v + 1, and then removes the marker.

A worker that is not seen to live may be paused, and continue later. A new process can have the
worker id of a paused old one.

Rules: no record enters the table twice, none is lost. No checkpoint is ahead of the table or goes
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from verification.model.positions.values import NOBODY, at, bits
from verification.model.visit import BrokenRuleError

NONE: Final = -1
_PROCESS: Final = 1_000


class Table(NamedTuple):
    """Both protocols' numbers of the shard, its position (or `NONE`), and the marker."""

    data: int = 0
    fence: int = 0
    v: int = 0
    p: int = NONE
    marked: bool = False

    @property
    def entry(self) -> tuple[int, int, int, int]:
        """What a commit of a new worker compares."""
        return self[:4]


class Row(NamedTuple):
    """The lease row; `pending` is the end and the number of a prepared batch."""

    owner: int = NOBODY
    counter: int = 0
    checkpoint: int = 0
    pending: tuple[int, int] | None = None


class Slot(NamedTuple):
    """What a process knows; `row` and `table` are as read, `end` is that of its batch."""

    at: str = "idle"
    row: Row = Row()
    table: Table = Table()
    position: int = 0
    end: int = 0
    number: int = 0


class State(NamedTuple):
    """The complete state.

    `old` means that an old worker is seen to live. `operator` is the step of the downgrade, and the
    table that it has read. The rest are the budgets.
    """

    row: Row
    table: Table
    landed: int
    slots: tuple[Slot, ...]
    operator: tuple[str, Table]
    old: bool
    moves: int
    upgrades: int
    downgrades: int
    lost: int


@dataclass(frozen=True)
class Protocols:
    """A configuration: worker id of each process and whether its code is old; budgets.

    `most_fences` bounds the search where two processes fence each other for ever. So
    `goes_on` is not checked here.
    """

    name: str
    processes: tuple[tuple[int, bool], ...] = ((0, True), (1, False))
    records: int = 3
    moves: int = 2
    upgrades: int = 1
    downgrades: int = 0
    lost: int = 0
    most_fences: int = 3
    goes_on: ClassVar[bool] = False
    without: str = ""

    def start(self) -> State:
        """The first state: no owner, an empty table, old workers are alive."""
        slots = (Slot(),) * len(self.processes)
        old = any(old for _, old in self.processes)
        left = (self.moves, self.upgrades, self.downgrades, self.lost)
        return State(Row(), Table(), 0, slots, ("", Table()), old, *left)

    def complete(self, s: State) -> bool:
        """All records are in the table."""
        return s.landed == bits(0, self.records)

    def within(self, s: State) -> bool:
        """Whether the fence is within its bound."""
        return s.table.fence <= self.most_fences

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
        known = self.processes
        for worker in sorted({worker for worker, _ in known}):
            free = s.row.owner == NOBODY or (s.table.marked and (s.row.owner, False) not in known)
            if s.row.owner != worker and (s.moves or free):
                row = s.row._replace(owner=worker, counter=s.row.counter + 1)
                yield f"assign to w{worker}", s._replace(row=row, moves=s.moves - (not free))
        yield from self._operator(s)
        for index, slot in enumerate(s.slots):
            if s.moves and slot != Slot():
                yield f"crash p{index}", with_slot(s, index, Slot())._replace(moves=s.moves - 1)
            if slot.at in ("idle", "checked", "row", "again"):
                yield from self._take(s, index, slot)
            elif slot.at in ("fencing", "moving"):
                yield from self._without_files(s, index, slot)
            else:
                yield from self._work(s, index, slot)

    # -- people
    # ----------------------------------------------------------------------------

    def _operator(self, s: State) -> Iterator[tuple[str, State]]:
        step, _ = s.operator
        if s.old:
            yield "no old worker is seen", s._replace(old=False)
        elif s.upgrades and not s.table.marked and not step:
            marked = s.table._replace(marked=True)
            yield "the marker is set", s._replace(table=marked, upgrades=s.upgrades - 1)
        yield from self._downgrade(s)
        if step and s.moves:
            left = s._replace(moves=s.moves - 1, downgrades=s.downgrades + 1)
            yield "downgrade crashes", left._replace(operator=("", Table()))

    def _downgrade(self, s: State) -> Iterator[tuple[str, State]]:
        step, table = s.operator
        read = s._replace(operator=(self._first, s.table))
        match step:
            case "" if s.downgrades and s.table.marked:
                yield "downgrade reads the table", read._replace(downgrades=s.downgrades - 1)
            case "row":
                done = "table" if self._first == "row" else "marker"
                row = s.row
                if table.p != NONE and self.without != "checkpoint of the downgrade":
                    row = Row(NOBODY, row.counter + 1, max(row.checkpoint, table.p))
                yield (
                    "downgrade writes the row",
                    self._written(s, row)._replace(operator=(done, table)),
                )
            case "table" if s.table == table:
                done = "marker" if self._first == "row" else "row"
                removed = table._replace(v=table.v + 1, p=NONE)
                yield "downgrade removes p", s._replace(table=removed, operator=(done, table))
            case "table":
                yield "downgrade reads the table again", read
            case "marker" if s.table.p != NONE and self.without != "last look of the downgrade":
                yield "downgrade finds a position", read
            case "marker":
                unmarked = s.table._replace(marked=False)
                old = any(old for _, old in self.processes)
                yield (
                    "the marker is removed",
                    s._replace(table=unmarked, operator=("", Table()), old=old),
                )

    @property
    def _first(self) -> str:
        return "table" if self.without == "row before the table in a downgrade" else "row"

    # -- a worker takes the lease
    # ----------------------------------------------------------------------------

    def _take(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        worker, old = self.processes[index]
        who, table = f"p{index}", s.table
        if slot.at == "idle":
            if s.row.owner == worker and not (old and table.marked):
                yield f"{who} checks the table", with_slot(s, index, Slot("checked"))
        elif slot.at == "checked":
            if s.row.owner == worker:
                yield f"{who} reads the row", with_slot(s, index, Slot("row", s.row))
        elif slot.at == "again":
            sure = with_slot(s, index, slot._replace(at="moving") if s.row == slot.row else Slot())
            yield f"{who} reads the row again", sure
        elif self._refuses(old, table):
            yield f"{who} refuses the table", with_slot(s, index, Slot())
        else:
            yield (
                f"{who} reads the table",
                with_slot(s, index, self._resolved(slot, table, old=old)),
            )

    def _resolved(self, slot: Slot, table: Table, *, old: bool) -> Slot:
        """What a worker does with the row and the table that it has read."""
        row = slot.row
        landed = row.pending is not None and row.pending[1] == table.data
        position = row.pending[0] if landed and row.pending is not None else row.checkpoint
        known = slot._replace(table=table, position=max(position, row.checkpoint))
        positions = (
            table.p != NONE if self.without != "position before the marker" else table.marked
        )
        if not old and positions:
            return known._replace(at="positions", position=max(row.checkpoint, table.p))
        if not old and table.marked:
            if self.without == "pending batch in the move":
                known = known._replace(position=row.checkpoint)
            return known._replace(
                at="moving" if self.without == "row after the table in a move" else "again"
            )
        if row.pending is not None and not landed:
            return known._replace(at="fencing")
        return known._replace(at="two-phase")

    def _without_files(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        old, who, table = self.processes[index][1], f"p{index}", s.table
        unmarked = slot.at == "moving" and not table.marked
        unmarked = unmarked and self.without != "marker in the move"
        if unmarked or self._refuses(old, table) or not self._fits(slot, table, old=old):
            yield f"{who} is refused without files", with_slot(s, index, Slot())
            return
        raised = table._replace(fence=table.fence + 1)
        ready = "two-phase"
        if slot.at == "moving":
            ready = "positions"
            kept = table if self.without == "fence of the move" else raised
            raised = kept._replace(v=table.v + 1, p=slot.position)
        after = with_slot(s, index, slot._replace(at=ready, table=raised))
        what = "fences" if ready == "two-phase" else f"moves the shard to {slot.position}"
        yield f"{who} {what}", after._replace(table=raised)
        if s.lost:
            again = with_slot(s, index, Slot())._replace(table=raised, lost=s.lost - 1)
            yield f"{who} {what} without an answer", again

    # -- a worker commits
    # ----------------------------------------------------------------------------

    def _work(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        old, who = self.processes[index][1], f"p{index}"
        if slot.at in ("two-phase", "positions"):
            if slot.position > slot.row.checkpoint or slot.row.pending is not None:
                yield from self._write(s, index, slot, None)
            for end in range(slot.position + 1, self.records + 1):
                if slot.at == "two-phase":
                    number = index * _PROCESS + slot.row.counter + 1
                    yield from self._write(s, index, slot, (end, number))
                else:
                    cut = slot._replace(at="cut", end=end)
                    yield f"{who} cuts ({slot.position},{end}]", with_slot(s, index, cut)
            return
        if self._refuses(old, s.table) or not self._fits(slot, s.table, old=old):
            yield f"{who} is refused", with_slot(s, index, Slot())
            return
        if slot.at == "prepared":
            table = s.table._replace(data=slot.number)
            ready = slot._replace(at="two-phase", position=slot.end, table=table, end=0)
        else:
            table = s.table._replace(v=s.table.v + 1, p=slot.end)
            ready = slot._replace(at="positions", position=slot.end, table=table, end=0)
        added, what = bits(slot.position, slot.end), f"({slot.position},{slot.end}]"
        if s.landed & added:
            raise BrokenRuleError(f"{what} of p{index}: repeated records")
        if bits(0, slot.position) & ~s.landed:
            raise BrokenRuleError(f"{what} of p{index}: lost records")
        after = with_slot(s, index, ready)._replace(table=table, landed=s.landed | added)
        yield f"{who} commits {what}", after
        if s.lost:
            lost = with_slot(after, index, Slot())._replace(lost=s.lost - 1)
            yield f"{who} commits {what} without an answer", lost

    def _write(
        self, s: State, index: int, slot: Slot, pending: tuple[int, int] | None
    ) -> Iterator[tuple[str, State]]:
        """Write the position, and prepare a batch if there is one, on condition of the counter."""
        worker, who, row = self.processes[index][0], f"p{index}", s.row
        own = (row.owner, row.counter, row.checkpoint) == (
            worker,
            slot.row.counter,
            slot.row.checkpoint,
        )
        if not own:
            yield f"{who} loses the lease", with_slot(s, index, Slot())
            return
        written = Row(worker, row.counter + 1, slot.position, pending)
        known = slot._replace(row=written)
        if pending is not None:
            known = known._replace(at="prepared", end=pending[0], number=pending[1])
        what = "checkpoints" if pending is None else f"prepares {pending[0]}"
        yield f"{who} {what}", self._written(with_slot(s, index, known), written)

    def _written(self, s: State, row: Row) -> State:
        if bits(0, row.checkpoint) & ~s.landed:
            raise BrokenRuleError(f"the checkpoint {row.checkpoint} is ahead of the table")
        if row.checkpoint < s.row.checkpoint:
            raise BrokenRuleError(f"the checkpoint goes back to {row.checkpoint}")
        return s._replace(row=row)

    def _refuses(self, old: bool, table: Table) -> bool:
        return old and table.marked and self.without != "marker in the log"

    def _fits(self, slot: Slot, table: Table, *, old: bool) -> bool:
        if old:
            return (slot.table.data, slot.table.fence) == (table.data, table.fence)
        return slot.table.entry == table.entry


def with_slot(s: State, index: int, slot: Slot) -> State:
    """The state with what one process knows replaced."""
    return s._replace(slots=at(s.slots, index, slot))

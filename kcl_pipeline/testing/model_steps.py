"""The rows, processes and steps of the protocol's model; `testing.model` says what it is and searches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

Pending = tuple[int, int, int, int] | None
"""End of the prepared range, its number, and the table's two numbers under which it is to land."""

NOBODY: Final = -1


class Row(NamedTuple):
    """A lease row; workers are small numbers, `NOBODY` stands for an absent attribute. A checkpoint past the last record is SHARD_END."""

    owner: int
    draining: int
    counter: int
    checkpoint: int
    pending: Pending

    @property
    def actual(self) -> int:
        """Who processes the shard."""
        return self.owner if self.draining == NOBODY else self.draining


class Log(NamedTuple):
    """What the table has of one shard: its numbers, and the last record committed."""

    data: int = 0
    fence: int = 0
    reached: int = 0


class Slot(NamedTuple):
    """What one process knows of one shard. `known` is the row as it last wrote or read it, `retry` a write whose answer was lost."""

    at: str = "idle"
    known: Row = Row(NOBODY, NOBODY, 0, 0, None)
    committed: int = 0
    end: int = 0
    number: int = 0
    data: int = 0
    fence: int = 0
    retry: tuple[str, Row] | None = None


class Plan(NamedTuple):
    """What a leader is about to write, and the owners that it saw. `handoff`: graceful."""

    shard: int
    owner: int
    draining: int
    counter: int
    target: int
    handoff: bool


class State(NamedTuple):
    """Everything; `left` are the budgets: moves, lost answers, renewals."""

    rows: tuple[Row, ...]
    logs: tuple[Log, ...]
    slots: tuple[Slot, ...]
    plan: Plan | None
    left: tuple[int, int, int]


IDLE: Final = Slot()


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration: the worker id of each process, shards (the second is the first one's child), records per shard, budgets. `without`: a guard removed.

    `most_counter`, `most_fences`: where twins refuse each other for ever the search ends.
    """

    name: str
    ids: tuple[int, ...]
    shards: int = 1
    records: int = 2
    moves: int = 3
    lost: int = 0
    renewals: int = 0
    handoffs: bool = True
    most_counter: int = 20
    most_fences: int = 20
    without: str = ""

    def start(self) -> State:
        """Rows without owner, nothing committed."""
        row = Row(NOBODY, NOBODY, 0, 0, None)
        return State((row,) * self.shards, (Log(),) * self.shards, (IDLE,) * (self.shards * len(self.ids)), None, (self.moves, self.lost, self.renewals))


class BrokenRule(Exception):  # noqa: N818 (reads as what it is)
    """A step broke a safety rule."""


class Steps:
    """The steps of a model from one state on."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """All steps: a name and the state after it. Raises `BrokenRule`."""
        yield from self._leader(s)
        for index, slot in enumerate(s.slots):
            process, shard = divmod(index, self.model.shards)
            if slot.retry is not None:
                yield from self._write(s, index, *slot.retry)
                continue
            yield from self._load(s, index, process, shard, slot)
            yield from self._settle_steps(s, index, shard, slot)
            yield from self._commit_steps(s, index, shard, slot)
            yield from self._row_steps(s, index, slot)
        if s.left[0]:
            for process in range(len(self.model.ids)):
                mine = range(process * self.model.shards, (process + 1) * self.model.shards)
                if any(s.slots[index] != IDLE for index in mine):
                    slots = tuple(IDLE if index in mine else slot for index, slot in enumerate(s.slots))
                    yield f"crash p{process}", s._replace(slots=slots, left=_less(s.left, 0))

    # -- the leader ----------------------------------------------------------------------------------------------------

    def _leader(self, s: State) -> Iterator[tuple[str, State]]:
        if s.plan is not None:
            yield from self._write_plan(s, s.plan)
        elif s.left[0]:
            for shard, row in enumerate(s.rows):
                for target in sorted(set(self.model.ids)):
                    for handoff in (False, True) if self.model.handoffs and row.owner not in (NOBODY, target) and row.draining == NOBODY else (False,):
                        plan = Plan(shard, row.owner, row.draining, row.counter, target, handoff)
                        yield f"plan s{shard} for w{target}{' gracefully' if handoff else ''}", s._replace(plan=plan, left=_less(s.left, 0))

    def _write_plan(self, s: State, plan: Plan) -> Iterator[tuple[str, State]]:
        row = s.rows[plan.shard]
        seen = (row.owner, row.draining) == (plan.owner, plan.draining) and (plan.handoff or plan.owner != plan.target or row.counter == plan.counter)
        if not seen and self.model.without != "owner condition":
            yield "plan refused", s._replace(plan=None)
            return
        if not seen:
            raise BrokenRule(f"a plan took s{plan.shard} from owners that it had not seen")
        if plan.handoff:
            after = row._replace(owner=plan.target, draining=plan.owner)
        else:
            rises = 0 if self.model.without == "counter of an assignment" else 1
            after = Row(plan.target, NOBODY, row.counter + rises, row.checkpoint, row.pending)
        changed = self._with_row(s, plan.shard, after)
        yield f"assign s{plan.shard} to w{plan.target}", changed._replace(plan=None)
        if s.left[1]:
            yield "assigned without an answer", changed._replace(left=_less(s.left, 1))

    # -- a worker: what it does with the table ---------------------------------------------------------------------------

    def _load(self, s: State, index: int, process: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        row = s.rows[shard]
        ended = row.checkpoint > self.model.records
        parent_ended = shard == 0 or s.rows[0].checkpoint > self.model.records or self.model.without == "parent check"
        if slot.at == "idle" and row.owner == self.model.ids[process] and row.draining == NOBODY and not ended and parent_ended:
            yield f"p{process} loads s{shard}", _with_slot(s, index, Slot("loaded", row, row.checkpoint))

    def _settle_steps(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        if slot.at != "loaded":
            return
        log, who, pending = s.logs[shard], f"p{index // self.model.shards} s{shard}", slot.known.pending
        numbers = slot._replace(data=log.data, fence=log.fence)
        if pending is None or self.model.without == "pending check":
            yield f"{who} finds nothing in flight", _with_slot(s, index, numbers._replace(at="ready"))
        elif log.data == pending[1] or (self.model.without == "exact number" and log.data > 0):
            yield f"{who} finds it landed", _with_slot(s, index, numbers._replace(at="landed", committed=pending[0]))
        else:
            yield f"{who} must fence", _with_slot(s, index, numbers._replace(at="ready" if self.model.without == "fence" else "fencing"))

    def _commit_steps(self, s: State, index: int, shard: int, slot: Slot) -> Iterator[tuple[str, State]]:
        log, who = s.logs[shard], f"p{index // self.model.shards} s{shard}"
        match slot.at:
            case "fencing" if (log.data, log.fence) == (slot.data, slot.fence):
                number = max(log.data, slot.known.pending[1] if slot.known.pending else 0) + 1
                raised = Log(number, log.fence, log.reached) if self.model.without == "two numbers" else log._replace(fence=log.fence + 1)
                for name, lost in self._answers(s):
                    done = slot._replace(at="loaded") if lost else slot._replace(at="ready", data=raised.data, fence=raised.fence)
                    yield f"{who} fences{name}", _with_slot(_with_log(lost or s, shard, raised), index, done)
            case "fencing":
                yield f"{who} fence refused", _with_slot(s, index, slot._replace(at="loaded"))
            case "prepared" if log.data == slot.number:
                yield f"{who} finds its batch", _with_slot(s, index, _landed(slot))
            case "prepared" if (log.data, log.fence) == (slot.data, slot.fence) or self.model.without == "expected numbers":
                after = self._append(s, shard, slot)
                for name, lost in self._answers(s):
                    changed = _with_log(lost or s, shard, after)
                    yield f"{who} commits ({slot.committed},{slot.end}]{name}", changed if lost else _with_slot(changed, index, _landed(slot))
            case "prepared":
                yield f"{who} commit refused", _with_slot(s, index, IDLE)

    def _append(self, s: State, shard: int, slot: Slot) -> Log:
        log = s.logs[shard]
        if slot.committed != log.reached:
            what = "repeated" if slot.committed < log.reached else "lost"
            raise BrokenRule(f"s{shard}: ({slot.committed},{slot.end}] after {log.reached}: {what} records")
        if shard and s.rows[0].checkpoint <= self.model.records:
            raise BrokenRule("a child committed before its parent had ended")
        return Log(slot.number, slot.fence, slot.end)

    def _answers(self, s: State) -> list[tuple[str, State | None]]:
        return [("", None), *([(" without an answer", s._replace(left=_less(s.left, 1)))] if s.left[1] else [])]

    # -- a worker: what it does with the row -----------------------------------------------------------------------------

    def _row_steps(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        known = slot.known
        if slot.at == "idle" or known.counter < 0:
            return
        if slot.at == "ready":
            for end in range(slot.committed + 1, self.model.records + 1):
                number = slot.data + 1 if self.model.without == "two numbers" else known.counter + 1
                yield from self._write(s, index, "prepare", _next(known, slot.committed, (end, number, slot.data, slot.fence)))
            if known.checkpoint < slot.committed:
                yield from self._write(s, index, "flush", _next(known, slot.committed, None))
            elif slot.committed == self.model.records:
                yield from self._write(s, index, "end", _next(known, self.model.records + 1, None))
        if slot.at == "landed":
            yield from self._write(s, index, "settle", _next(known, slot.committed, None))
        if s.left[2]:
            yield from self._write(s._replace(left=_less(s.left, 2)), index, "renew", _next(known, known.checkpoint, known.pending))
        if known.draining != NOBODY:
            yield from self._complete(s, index, slot)

    def _write(self, s: State, index: int, what: str, wanted: Row) -> Iterator[tuple[str, State]]:
        """A conditional write by counter; refused, it reads the row back and knows its own work by counter, owner and positions."""
        process, shard = divmod(index, self.model.shards)
        slot, row, me = s.slots[index], s.rows[shard], self.model.ids[process]
        who = f"p{process} s{shard} {what}"
        after = wanted._replace(owner=row.owner, draining=row.draining)
        if self.model.without == "row condition" and what in ("flush", "settle"):
            after = after._replace(counter=row.counter + 1)
        elif row.counter != slot.known.counter:
            part = 2 if self.model.without == "numbers in the read-back" else 4
            same = row.checkpoint == wanted.checkpoint and (row.pending or ())[:part] == (wanted.pending or ())[:part]
            same = same or (what == "renew" and self.model.without == "positions in the read-back")
            if row.counter == wanted.counter and row.actual == me and same:
                yield f"{who} was applied", _with_slot(s, index, self._written(slot, what, wanted._replace(owner=row.owner, draining=row.draining)))
            else:
                yield f"{who} refused", _with_slot(s, index, _dropped(slot))
            return
        changed = self._with_row(s, shard, after)
        holds = row.actual == me
        yield who, _with_slot(changed, index, self._written(slot, what, after) if holds else _dropped(slot))
        if s.left[1]:
            waiting = slot._replace(retry=(what, wanted))
            yield f"{who} without an answer", _with_slot(changed._replace(left=_less(s.left, 1)), index, waiting)
            yield f"{who} not applied", _with_slot(s._replace(left=_less(s.left, 1)), index, waiting)

    def _written(self, slot: Slot, what: str, row: Row) -> Slot:
        done = slot._replace(known=row, retry=None)
        match what:
            case "prepare" if row.pending is not None:
                return done._replace(at="prepared", end=row.pending[0], number=row.pending[1])
            case "settle":
                return done._replace(at="ready")
            case "end":
                return IDLE
        return done

    def _complete(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """The end of a handoff, as early as its time-out allows: also in the middle of a commit, which may still land."""
        process, shard = divmod(index, self.model.shards)
        row = s.rows[shard]
        if (row.owner, row.draining) != (slot.known.owner, slot.known.draining):
            yield f"p{process} handoff overtaken", _with_slot(s, index, _dropped(slot))
            return
        after = Row(row.owner, NOBODY, row.counter + (self.model.without != "counter of a handoff"), row.checkpoint, row.pending)
        changed = self._with_row(s, shard, after)
        yield f"p{process} hands s{shard} to w{row.owner}", _with_slot(changed, index, _dropped(slot))

    def _with_row(self, s: State, shard: int, row: Row) -> State:
        before = s.rows[shard]
        if row.actual != before.actual and row.counter == before.counter:
            raise BrokenRule(f"s{shard} changed hands from w{before.actual} to w{row.actual} under the same counter")
        if min(row.checkpoint, self.model.records) > s.logs[shard].reached:
            raise BrokenRule(f"the checkpoint of s{shard} is at {row.checkpoint} and the table at {s.logs[shard].reached}")
        return s._replace(rows=(*s.rows[:shard], row, *s.rows[shard + 1 :]))


def _next(known: Row, checkpoint: int, pending: Pending) -> Row:
    return known._replace(counter=known.counter + 1, checkpoint=checkpoint, pending=pending)


def _landed(slot: Slot) -> Slot:
    return slot._replace(at="ready", committed=slot.end, data=slot.number, end=0, number=0) if slot.known.counter >= 0 else IDLE


def _dropped(slot: Slot) -> Slot:
    """The lease is lost; a commit that was already sent may still land."""
    return slot._replace(known=Row(NOBODY, NOBODY, -1, 0, None), retry=None) if slot.at == "prepared" else IDLE


def _less(left: tuple[int, int, int], which: int) -> tuple[int, int, int]:
    moves, lost, renewals = left
    return (moves - (which == 0), lost - (which == 1), renewals - (which == 2))  # noqa: PLR2004 (positions in the tuple)


def _with_slot(s: State, index: int, slot: Slot) -> State:
    return s._replace(slots=(*s.slots[:index], slot, *s.slots[index + 1 :]))


def _with_log(s: State, shard: int, log: Log) -> State:
    return s._replace(logs=(*s.logs[:shard], log, *s.logs[shard + 1 :]))

"""Steps of the protocol's model; `verification.model.search` describes the model."""

from __future__ import annotations

from collections.abc import Iterator

from verification.model.state import (
    ABSENT,
    IDLE,
    NOBODY,
    PROCESS,
    Log,
    Model,
    Plan,
    Row,
    Slot,
    State,
    dropped,
    landed,
    less,
    next_row,
    with_log,
    with_slot,
)
from verification.model.visit import BrokenRuleError


class Steps:
    """The steps of a model from one state."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def of(self, s: State) -> Iterator[tuple[str, State]]:
        """Return all steps: a name and the state after it; raises `BrokenRuleError`."""
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
                    slots = tuple(
                        IDLE if index in mine else slot for index, slot in enumerate(s.slots)
                    )
                    yield f"crash p{process}", s._replace(slots=slots, left=less(s.left, 0))

    # -- the leader
    # ----------------------------------------------------------------------------

    def _leader(self, s: State) -> Iterator[tuple[str, State]]:
        if s.plan is not None:
            yield from self._write_plan(s, s.plan)
        elif s.left[0]:
            for shard, row in ((n, row) for n, row in enumerate(s.rows) if row != ABSENT):
                for target in sorted(set(self.model.ids)):
                    for handoff in (
                        (False, True)
                        if self.model.handoffs
                        and row.owner not in (NOBODY, target)
                        and row.draining == NOBODY
                        else (False,)
                    ):
                        plan = Plan(shard, row.owner, row.draining, row.counter, target, handoff)
                        yield (
                            f"plan s{shard} for w{target}{' gracefully' if handoff else ''}",
                            s._replace(plan=plan, left=less(s.left, 0)),
                        )

    def _write_plan(self, s: State, plan: Plan) -> Iterator[tuple[str, State]]:
        row = s.rows[plan.shard]
        seen = (row.owner, row.draining) == (plan.owner, plan.draining) and (
            plan.handoff or plan.owner != plan.target or row.counter == plan.counter
        )
        if row == ABSENT or (not seen and self.model.without != "owner condition"):
            yield "plan refused", s._replace(plan=None)
            return
        if not seen:
            raise BrokenRuleError(f"a plan took s{plan.shard} from owners that it had not seen")
        if plan.handoff:
            after = row._replace(owner=plan.target, draining=plan.owner)
        else:
            rises = 0 if self.model.without == "counter of an assignment" else 1
            after = Row(plan.target, NOBODY, row.counter + rises, row.checkpoint, row.pending)
        changed = self._with_row(s, plan.shard, after)
        yield f"assign s{plan.shard} to w{plan.target}", changed._replace(plan=None)
        if s.left[1]:
            yield "assigned without an answer", changed._replace(left=less(s.left, 1))

    # -- a worker: what it does with the table
    # ----------------------------------------------------------------------------

    def _load(
        self, s: State, index: int, process: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        row = s.rows[shard]
        ended = row.checkpoint > self.model.records
        parent_ended = (
            shard == 0
            or s.rows[0].checkpoint > self.model.records
            or self.model.without == "parent check"
        )
        if (
            slot.at == "idle"
            and row.owner == self.model.ids[process]
            and row.draining == NOBODY
            and not ended
            and parent_ended
        ):
            yield (
                f"p{process} loads s{shard}",
                with_slot(s, index, Slot("loaded", row, row.checkpoint)),
            )

    def _settle_steps(
        self, s: State, index: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        if slot.at != "loaded":
            return
        log, who, pending = (
            s.logs[shard],
            f"p{index // self.model.shards} s{shard}",
            slot.known.pending,
        )
        numbers = slot._replace(data=log.data, fence=log.fence)
        if pending is None or self.model.without == "pending check":
            yield (
                f"{who} finds nothing in flight",
                with_slot(s, index, numbers._replace(at="ready")),
            )
        elif log.data == pending[1] or (self.model.without == "exact number" and log.data > 0):
            yield (
                f"{who} finds it landed",
                with_slot(s, index, numbers._replace(at="landed", committed=pending[0])),
            )
        else:
            yield (
                f"{who} must fence",
                with_slot(
                    s,
                    index,
                    numbers._replace(at="ready" if self.model.without == "fence" else "fencing"),
                ),
            )

    def _commit_steps(
        self, s: State, index: int, shard: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        log, who = s.logs[shard], f"p{index // self.model.shards} s{shard}"
        match slot.at:
            case "fencing" if (log.data, log.fence) == (slot.data, slot.fence):
                number = max(log.data, slot.known.pending[1] if slot.known.pending else 0) + 1
                raised = (
                    Log(number, log.fence, log.reached)
                    if self.model.without == "two numbers"
                    else log._replace(fence=log.fence + 1)
                )
                for name, lost in self._answers(s):
                    done = (
                        slot._replace(at="loaded")
                        if lost
                        else slot._replace(at="ready", data=raised.data, fence=raised.fence)
                    )
                    yield (
                        f"{who} fences{name}",
                        with_slot(with_log(lost or s, shard, raised), index, done),
                    )
            case "fencing":
                yield f"{who} fence refused", with_slot(s, index, slot._replace(at="loaded"))
            case "prepared" | "sent" if log.data == slot.number:
                yield f"{who} finds its batch", with_slot(s, index, landed(slot))
            case "prepared" | "sent" if (log.data, log.fence) == (
                slot.data,
                slot.fence,
            ) or self.model.without == "expected numbers":
                after = self._append(s, shard, slot)
                for name, lost in self._answers(s):
                    changed = with_log(lost or s, shard, after)
                    yield (
                        f"{who} commits ({slot.committed},{slot.end}]{name}",
                        with_slot(
                            changed, index, slot._replace(at="sent") if lost else landed(slot)
                        ),
                    )
            case "prepared" | "sent":
                yield f"{who} commit refused", with_slot(s, index, IDLE)

    def _append(self, s: State, shard: int, slot: Slot) -> Log:
        log = s.logs[shard]
        if slot.committed != log.reached:
            what = "repeated" if slot.committed < log.reached else "lost"
            raise BrokenRuleError(
                f"s{shard}: ({slot.committed},{slot.end}] after {log.reached}: {what} records"
            )
        if shard and s.rows[0].checkpoint <= self.model.records:
            raise BrokenRuleError("a child committed before its parent had ended")
        return Log(slot.number, slot.fence, slot.end)

    def _answers(self, s: State) -> list[tuple[str, State | None]]:
        return [
            ("", None),
            *([(" without an answer", s._replace(left=less(s.left, 1)))] if s.left[1] else []),
        ]

    # -- a worker: what it does with the row
    # ----------------------------------------------------------------------------

    def _row_steps(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        known = slot.known
        if slot.at == "idle" or known.counter < 0:
            return
        if slot.at == "ready":
            yield from self._prepare(s, index, slot)
            back = self.model.without == "step forward" and known.checkpoint > slot.committed
            if known.checkpoint < slot.committed or back:
                yield from self._write(s, index, "flush", next_row(known, slot.committed, None))
            elif slot.committed == self.model.records:
                yield from self._end(s, index, slot)
        if slot.at == "prepared":
            yield from self._prepare_again(s, index, slot)
        if slot.at == "landed":
            yield from self._write(s, index, "settle", next_row(known, slot.committed, None))
        if s.left[2]:
            yield from self._write(
                s._replace(left=less(s.left, 2)),
                index,
                "renew",
                next_row(known, known.checkpoint, known.pending),
            )
        if known.draining != NOBODY:
            yield from self._complete(s, index, slot)

    def _prepare(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Prepare each possible next range, with a number that the table does not have."""
        known, number = slot.known, self._number(index, slot)
        if slot.committed == self.model.records:
            return
        if number == slot.data and self.model.without != "number of the table":
            renewed = next_row(known, known.checkpoint, known.pending)
            yield from self._write(s, index, "renew", renewed)
            return
        for end in range(slot.committed + 1, self.model.records + 1):
            pending = (end, number, slot.data, slot.fence)
            yield from self._write(s, index, "prepare", next_row(known, slot.committed, pending))

    def _prepare_again(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Prepare this lease again after the batch has lost another lease."""
        if self.model.several:
            known = slot.known
            again = (slot.end, self._number(index, slot), slot.data, slot.fence)
            yield from self._write(s, index, "prepare", next_row(known, known.checkpoint, again))

    def _number(self, index: int, slot: Slot) -> int:
        """A number that no other write uses: it is made of the process and the counter."""
        if self.model.without == "two numbers":
            return slot.data + 1
        process = 0 if self.model.without == "process in the number" else index // self.model.shards
        return process * PROCESS + slot.known.counter + 1

    def _end(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """Write SHARD_END after everything is committed."""
        ended = next_row(slot.known, self.model.records + 1, None)
        yield from self._write(s, index, "end", ended)

    def _write(self, s: State, index: int, what: str, wanted: Row) -> Iterator[tuple[str, State]]:
        """A write on condition of the counter and, if positions change, of the checkpoint.

        When it is rejected, the process reads the row. It recognizes its own write by counter,
        owner and positions.
        """
        process, shard = divmod(index, self.model.shards)
        slot, row, me = s.slots[index], s.rows[shard], self.model.ids[process]
        who = f"p{process} s{shard} {what}"
        after = wanted._replace(owner=row.owner, draining=row.draining)
        if self.model.without == "row condition" and what in ("flush", "settle"):
            after = after._replace(counter=row.counter + 1)
        elif row.counter != slot.known.counter or (
            what != "renew"
            and row.checkpoint != slot.known.checkpoint
            and self.model.without != "checkpoint of a write"
        ):
            same = row.checkpoint == wanted.checkpoint and row.pending == wanted.pending
            same = same or (what == "renew" and self.model.without == "positions in the read-back")
            if row.counter == wanted.counter and row.actual == me and same:
                yield (
                    f"{who} was applied",
                    with_slot(
                        s,
                        index,
                        self._written(
                            slot, what, wanted._replace(owner=row.owner, draining=row.draining)
                        ),
                    ),
                )
            else:
                yield f"{who} refused", with_slot(s, index, dropped(slot))
            return
        changed = self._with_row(s, shard, after)
        holds = row.actual == me
        yield (
            who,
            with_slot(changed, index, self._written(slot, what, after) if holds else dropped(slot)),
        )
        if s.left[1]:
            waiting = slot._replace(retry=(what, wanted))
            yield (
                f"{who} without an answer",
                with_slot(changed._replace(left=less(s.left, 1)), index, waiting),
            )
            yield (
                f"{who} not applied",
                with_slot(s._replace(left=less(s.left, 1)), index, waiting),
            )

    def _written(self, slot: Slot, what: str, row: Row) -> Slot:
        done = slot._replace(known=row, retry=None)
        match what:
            case "prepare" if row.pending is not None:
                return done._replace(at="prepared", end=row.pending[0], number=row.pending[1])
            case "settle":
                return done._replace(at="ready")
            case "end" if slot.retry is not None and self.model.without == "step forward":
                return done._replace(at="ready")
            case "end":
                return IDLE
        return done

    def _complete(self, s: State, index: int, slot: Slot) -> Iterator[tuple[str, State]]:
        """End a handoff as early as its time-out allows.

        This can happen during a commit, which can still be applied.
        """
        process, shard = divmod(index, self.model.shards)
        row = s.rows[shard]
        if (row.owner, row.draining) != (slot.known.owner, slot.known.draining):
            yield f"p{process} handoff overtaken", with_slot(s, index, dropped(slot))
            return
        after = Row(
            row.owner,
            NOBODY,
            row.counter + (self.model.without != "counter of a handoff"),
            row.checkpoint,
            row.pending,
        )
        changed = self._with_row(s, shard, after)
        yield (
            f"p{process} hands s{shard} to w{row.owner}",
            with_slot(changed, index, dropped(slot)),
        )

    def _with_row(self, s: State, shard: int, row: Row) -> State:
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
        if min(row.checkpoint, self.model.records) > s.logs[shard].reached:
            raise BrokenRuleError(
                f"the checkpoint of s{shard} is at {row.checkpoint} and the table at "
                f"{s.logs[shard].reached}"
            )
        return s._replace(rows=(*s.rows[:shard], row, *s.rows[shard + 1 :]))

"""The values of the protocol's model: rows, logs, what processes know, and configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

Pending = tuple[int, int, int, int] | None
"""End of the prepared range, its number, and the table's two numbers under which it is to land."""

NOBODY: Final = -1


class Row(NamedTuple):
    """A lease row; workers are small numbers, `NOBODY` stands for an absent attribute.

    A checkpoint past the last record is SHARD_END. `ABSENT` stands for a row that is not there.
    """

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
    """What one process knows of one shard.

    `known` is the row as it last wrote or read it, `retry` a write whose answer was lost.
    """

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


class Past(NamedTuple):
    """What has become of rows: how often the parent's row may still be deleted by hand, whether it
    was, which finished shards a leader has deleted, and which one it is about to delete.
    """

    deletions: int = 0
    deleted: bool = False
    finished: frozenset[int] = frozenset()
    deleting: int = NOBODY


class State(NamedTuple):
    """Everything; `left` are the budgets: moves, lost answers, renewals."""

    rows: tuple[Row, ...]
    logs: tuple[Log, ...]
    slots: tuple[Slot, ...]
    plan: Plan | None
    left: tuple[int, int, int]
    past: Past = Past()


IDLE: Final = Slot()
ABSENT: Final = Row(NOBODY, NOBODY, -1, -1, None)
PROCESS: Final = 1_000
"""Numbers of two processes differ by this much at least."""
NEW: Final = Row(NOBODY, NOBODY, 0, 0, None)


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration: the worker id of each process, shards (the second is the first one's child),
    records per shard, budgets. `without`: a guard removed.

    `most_counter`, `most_fences`: where twins refuse each other for ever the search ends.

    With `several` a batch has other leases too. When one of them is lost, the batch is prepared
    again without it, unless its commit was already sent.

    With `lineage` rows come and go, and the model has two shards: a leader deletes finished leases,
    the parent's row is deleted by hand up to `deletions` times and restored by the child's worker,
    and, with `born`, the child's row is made at the parent's end. Otherwise it is there from the
    beginning, as that of a merged shard whose other parent has ended. Without `log_seen` a child's
    worker does not look into the sink's log, as at an at-least-once sink.
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
    several: bool = False
    lineage: bool = False
    born: bool = False
    deletions: int = 0
    log_seen: bool = True

    def start(self) -> State:
        """Rows without owner, nothing committed."""
        return State(
            (NEW, ABSENT) if self.born else (NEW,) * self.shards,
            (Log(),) * self.shards,
            (IDLE,) * (self.shards * len(self.ids)),
            None,
            (self.moves, self.lost, self.renewals),
            Past(self.deletions),
        )


class BrokenRuleError(Exception):
    """A step broke a safety rule."""


def next_row(known: Row, checkpoint: int, pending: Pending) -> Row:
    """The row that a write with these positions makes of the known one."""
    return known._replace(counter=known.counter + 1, checkpoint=checkpoint, pending=pending)


def landed(slot: Slot) -> Slot:
    """A batch is in the table."""
    return (
        slot._replace(at="ready", committed=slot.end, data=slot.number, end=0, number=0)
        if slot.known.counter >= 0
        else IDLE
    )


def dropped(slot: Slot) -> Slot:
    """The lease is lost; a commit that was already sent may still land."""
    return (
        slot._replace(known=Row(NOBODY, NOBODY, -1, 0, None), retry=None)
        if slot.at in ("prepared", "sent")
        else IDLE
    )


def less(left: tuple[int, int, int], which: int) -> tuple[int, int, int]:
    """The budgets after one use of the given one."""
    moves, lost, renewals = left
    # positions in the tuple
    return (moves - (which == 0), lost - (which == 1), renewals - (which == 2))  # noqa: PLR2004


def with_slot(s: State, index: int, slot: Slot) -> State:
    """The state with another slot."""
    return s._replace(slots=(*s.slots[:index], slot, *s.slots[index + 1 :]))


def with_log(s: State, shard: int, log: Log) -> State:
    """The state with another log of one shard."""
    return s._replace(logs=(*s.logs[:shard], log, *s.logs[shard + 1 :]))

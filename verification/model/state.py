"""Values of the protocol's model: rows, logs, knowledge of processes, and configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

Pending = tuple[int, int, int, int] | None
"""End of the prepared range, its number, and the table's two versions that the commit expects."""

NOBODY: Final = -1


class Row(NamedTuple):
    """A lease row; workers are small numbers, and `NOBODY` is an absent attribute.

    A checkpoint after the last record is SHARD_END. `ABSENT` is a row that does not exist.
    """

    owner: int
    draining: int
    counter: int
    checkpoint: int
    pending: Pending

    @property
    def actual(self) -> int:
        """The worker that processes the shard."""
        return self.owner if self.draining == NOBODY else self.draining


class Log(NamedTuple):
    """The table's state of one shard: its transaction versions and the last committed record."""

    data: int = 0
    fence: int = 0
    reached: int = 0


class Slot(NamedTuple):
    """What one process knows about one shard.

    `known` is the row that it last wrote or read. `retry` is a write whose response was lost.
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
    """A leader's planned write and the owners that it saw; `handoff` means graceful."""

    shard: int
    owner: int
    draining: int
    counter: int
    target: int
    handoff: bool


class Past(NamedTuple):
    """History of the rows.

    It has the number of manual deletions of the parent's row that are left, whether one happened,
    which finished shards a leader has deleted, and which one it is about to delete.
    """

    deletions: int = 0
    deleted: bool = False
    finished: frozenset[int] = frozenset()
    deleting: int = NOBODY


class State(NamedTuple):
    """The complete state; `left` are the budgets: moves, lost responses, renewals."""

    rows: tuple[Row, ...]
    logs: tuple[Log, ...]
    slots: tuple[Slot, ...]
    plan: Plan | None
    left: tuple[int, int, int]
    past: Past = Past()


IDLE: Final = Slot()
ABSENT: Final = Row(NOBODY, NOBODY, -1, -1, None)
PROCESS: Final = 1_000
"""Minimum distance between the batch numbers of two processes."""
NEW: Final = Row(NOBODY, NOBODY, 0, 0, None)


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration of the model.

    It has the worker id of each process, shards (the second is a child of the first), records per
    shard and budgets. `without` names a guard that is removed.

    `most_counter` and `most_fences` bound the search where two processes with one worker id reject
    each other forever.

    With `several` a batch has other leases too. When one of them is lost, the batch is prepared
    again without it, unless its commit was already sent.

    With `lineage` rows are created and deleted, and the model has two shards. A leader deletes
    finished leases. The parent's row is deleted by hand up to `deletions` times and restored by the
    child's worker. With `born`, the child's row is created at the parent's end. Otherwise it exists
    from the start, like that of a merged shard whose other parent has ended. Without `log_seen` a
    child's worker does not look into the sink's log, as with an at-least-once sink.
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
        """The first state: rows without owner, no commits."""
        return State(
            (NEW, ABSENT) if self.born else (NEW,) * self.shards,
            (Log(),) * self.shards,
            (IDLE,) * (self.shards * len(self.ids)),
            None,
            (self.moves, self.lost, self.renewals),
            Past(self.deletions),
        )


def next_row(known: Row, checkpoint: int, pending: Pending) -> Row:
    """The row after a write of these positions to the known row."""
    return known._replace(counter=known.counter + 1, checkpoint=checkpoint, pending=pending)


def landed(slot: Slot) -> Slot:
    """The slot after its batch was committed."""
    return (
        slot._replace(at="ready", committed=slot.end, data=slot.number, end=0, number=0)
        if slot.known.counter >= 0
        else IDLE
    )


def dropped(slot: Slot) -> Slot:
    """The slot after its lease was lost; a commit that was already sent can still be applied."""
    return (
        slot._replace(known=Row(NOBODY, NOBODY, -1, 0, None), retry=None)
        if slot.at in ("prepared", "sent")
        else IDLE
    )


def less(left: tuple[int, int, int], which: int) -> tuple[int, int, int]:
    """The budgets after one use of budget `which`."""
    moves, lost, renewals = left
    # positions in the tuple
    return (moves - (which == 0), lost - (which == 1), renewals - (which == 2))  # noqa: PLR2004


def with_slot(s: State, index: int, slot: Slot) -> State:
    """The state with one slot replaced."""
    return s._replace(slots=(*s.slots[:index], slot, *s.slots[index + 1 :]))


def with_log(s: State, shard: int, log: Log) -> State:
    """The state with the log of one shard replaced."""
    return s._replace(logs=(*s.logs[:shard], log, *s.logs[shard + 1 :]))

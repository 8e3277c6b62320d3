"""What a worker knows of one shard whose lease it holds, and the transitions between its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kcl_pipeline.batch import TxnVersions
from kcl_pipeline.leases.held import Held
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import ChildShard, StreamId


class ConsumerState(StrEnum):
    """Where a shard consumer is (protocol §6.6, with the table's side of a takeover added).

    BLOCKED: a parent is not at its end. RESOLVING: what the previous owner left in flight is to be
    settled with the table. READING: its records flow. ENDING: everything is committed, the end is
    to be recorded. LEAVING: it is not read any more; its checkpoint is written, then the lease is
    handed over. ENDED: nothing is left to do.
    """

    BLOCKED = "blocked"
    RESOLVING = "resolving"
    READING = "reading"
    ENDING = "ending"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(slots=True)
class ShardConsumer:
    """Mutable state of one held lease. Its methods are the transitions.

    The processing thread alone changes it, except for the prepare of a batch: that is noted by the
    thread that prepares, for which the processing thread waits. `stalls.StallWatch` reads single
    attributes on another thread.

    Attributes:
        held: The lease.
        stream: Its stream.
        state: See `ConsumerState`.
        committed: The last position that the table has; None before it is settled.
        checkpointed: The last position in the lease row. It may be behind `committed`, because the
            checkpoint is combined with the next prepare.
        versions: The table's transaction versions as this worker last saw or made them.
        prepared: End and number of a prepare that no commit has followed.
        last_commit: When the last batch was committed (monotonic seconds).
        due: When the next step may be taken, after a wait or a failure (monotonic seconds).
        failures: Steps that failed in a row.
        children: The children of a shard that ends, or, when `shard_gone`, the oldest shards that
            follow it.
        shard_gone: The stream does not list the shard any more.
        loss_reported: Whether that was reported.
        set_aside: Sequence and sub-sequence numbers after `committed` whose dead letters this
            worker has written.
        moved_at: When the shard was committed, or its parents moved, last (monotonic seconds).
        parents_reached: Where the parents were then.
        in_batch: Whether a batch that is being processed has ranges of it.
        restarted: Whether it is read again after a failure.
        error: The error of its last step.
    """

    held: Held
    stream: StreamId
    state: ConsumerState = ConsumerState.BLOCKED
    committed: Position | None = None
    checkpointed: Position | None = None
    versions: TxnVersions = field(default_factory=TxnVersions)
    prepared: tuple[Position, int] | None = None
    last_commit: float = 0.0
    due: float = 0.0
    failures: int = 0
    children: tuple[ChildShard, ...] = ()
    shard_gone: bool = False
    loss_reported: bool = False
    set_aside: set[tuple[str, int]] = field(default_factory=set)
    moved_at: float = float("-inf")
    parents_reached: object = None
    in_batch: bool = False
    restarted: bool = False
    error: str | None = None

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.held.lease.lease_key

    @property
    def is_behind(self) -> bool:
        """Whether there may be records that are not committed."""
        return self.state not in (
            ConsumerState.ENDING,
            ConsumerState.LEAVING,
            ConsumerState.ENDED,
        )

    @property
    def flush_needed(self) -> bool:
        """Whether the table is ahead of the lease row."""
        return self.committed is not None and self.committed != self.checkpointed

    def settled_position(self) -> Position:
        """Where reading begins (exclusive). Raises `ValueError` before that is known."""
        if self.committed is None:
            raise ValueError(f"the lease {self.lease_key} has no position yet")
        return self.committed

    # -- from gaining the lease to reading

    def note_parents(self, reached: object, now: float) -> None:
        """Take in where the parents are; a change is movement, their first look is not."""
        if reached != self.parents_reached:
            if self.parents_reached is not None:
                self.moved_at = now
            self.parents_reached = reached

    def unblock(self) -> None:
        """BLOCKED → RESOLVING: the parents have ended."""
        self.state = ConsumerState.RESOLVING

    def settle(self, position: Position, versions: TxnVersions) -> None:
        """Take in what the table and the row have; nothing is in flight."""
        self.prepared = None
        self.versions = versions
        self.committed = self.checkpointed = position

    def read(self, begin: Callable[[ShardConsumer], None]) -> None:
        """RESOLVING → READING, after `begin` has succeeded."""
        begin(self)
        self.state = ConsumerState.READING

    # -- a batch

    def is_prepared_to(self, end: Position) -> bool:
        """Whether a batch that ends here is prepared."""
        return self.prepared is not None and self.prepared[0] == end

    def note_prepared(self, end: Position, number: int) -> None:
        """The row has the pending checkpoint, and the checkpoint of the batch before."""
        self.prepared = (end, number)
        self.checkpointed = self.committed

    def note_committed(self, through: Position, now: float) -> None:
        """The table has the batch; its number is the data version now if it was prepared."""
        if self.prepared is not None:
            self.versions = replace(self.versions, data=self.prepared[1])
            self.prepared = None
        self.committed = through
        self.last_commit = self.moved_at = now
        self.restarted, self.error = False, None
        self.set_aside.clear()

    def note_checkpointed(self) -> None:
        """The row has what the table has."""
        self.checkpointed = self.committed

    # -- failures

    def step_succeeded(self) -> None:
        """Begin the waits anew. The error stays until a batch is committed after a restart."""
        self.failures = 0
        if not self.restarted:
            self.error = None

    def step_failed(self, error: Exception, now: float, base_seconds: float) -> None:
        """Try the step again after a wait."""
        self.error = f"{type(error).__name__}: {error}"
        self.back_off(now, base_seconds)

    def back_off(self, now: float, base_seconds: float) -> None:
        """Try again later: twice as long after each failure, at most 30 times `base_seconds`."""
        self.failures += 1
        self.due = now + base_seconds * min(2 ** (self.failures - 1), 30)

    def restart(self, now: float, base_seconds: float) -> None:
        """→ RESOLVING: read again from what the table has, after a batch of unknown outcome."""
        self.state = ConsumerState.RESOLVING
        self.restarted = True
        self.back_off(now, base_seconds)

    # -- from the last record to the loss of the lease

    def reach_end(self, children: tuple[ChildShard, ...], *, shard_gone: bool) -> None:
        """READING → ENDING: all records are committed."""
        self.children, self.shard_gone = children, shard_gone
        self.state = ConsumerState.ENDING

    def end(self) -> None:
        """→ ENDED: the row is at SHARD_END."""
        self.committed = self.checkpointed = SHARD_END
        self.state = ConsumerState.ENDED

    def leave(self, now: float) -> None:
        """→ LEAVING. Failures of what it did before do not delay the handoff."""
        self.state = ConsumerState.LEAVING
        self.failures, self.due = 0, now

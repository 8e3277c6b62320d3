"""State of one held shard in a worker, and the transitions between its states.

```
gained ──▶ BLOCKED ─unblock─▶ STARTING ─read─▶ READING ─reach_end─▶ ENDING ─end─▶ ENDED
                                │   ▲             │                   │  │          ▲
                                │   └──restart────┴───────────────────┘  └─ (lost)  │
                                ├─reach_end─▶ ENDING                                │
                                └─end───────────────────────────────────────────────┘
any state ─leave─▶ LEAVING ──▶ the lease is another worker's
```

(lost): the stream does not list the shard any more. Its row is deleted, and the consumer is gone.
A lease that is gained at SHARD_END begins as ENDED. A consumer whose lease is lost is forgotten in
any state. After a handoff that the leader has withdrawn, a new consumer begins at BLOCKED.
`Lifecycle` makes the calls that a transition needs, and then calls the transition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kcl_pipeline.errors import OtherTableError
from kcl_pipeline.leases.held import Held
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import ChildShard, StreamId
from kcl_pipeline.sinks.sink import Entry
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition


class ConsumerState(StrEnum):
    """State of a shard consumer (protocol §6.6, extended by the check of the sink's table).

    Attributes:
        BLOCKED: A parent is not at SHARD_END.
        STARTING: The position to read from must be found out.
        READING: The shard is read and its batches are committed.
        ENDING: All records are committed. SHARD_END is not written yet.
        LEAVING: The lease is in a handoff. Its checkpoint is written before the transfer.
        ENDED: Nothing is left to do.
    """

    BLOCKED = "blocked"
    STARTING = "starting"
    READING = "reading"
    ENDING = "ending"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(slots=True)
class ShardConsumer:
    """Mutable state of one held lease. Its methods are the transitions.

    Only the processing thread changes it. `stalls.StallWatch` reads single attributes on another
    thread.

    Attributes:
        held: The lease.
        stream: Its stream.
        state: See `ConsumerState`.
        committed: Last position that the table has (inclusive). None: not started yet.
        checkpointed: Last position in the lease row. It may be behind `committed`, because renewals
            write the checkpoint.
        table_id: Id of the table that this worker read. None: there was no table.
        stored: What the table has of the shard, as this worker last read or committed it.
        ancestors: What the table has of the ancestors, until the first commit of this shard.
        is_refused: Whether the table refused the last batch. The row is then read again.
        last_commit: When the last batch was committed (monotonic seconds).
        due: Earliest time of the next step, after a wait or a failure (monotonic seconds).
        failures: Number of failed steps in a row.
        children: The children of a shard that ends. If `shard_gone`: the oldest shards that follow.
        shard_gone: Whether the stream does not list the shard any more.
        loss_reported: Whether the loss of the shard was reported.
        set_aside: Sequence and sub-sequence numbers after `committed` whose dead letters this
            worker has written.
        moved_at: When the last batch was committed or a parent last moved (monotonic seconds).
        parents_reached: Positions of the parents at the last look.
        in_batch: Whether the batch that is being processed has ranges of this shard, or its record
            processor has not returned from a call for the last one.
        restarted: Whether the shard is read again after a failure.
        error: The error of the last failed step.
        refused: Why the table was refused at the last step (`OtherTableError`). None: it was not.
    """

    held: Held
    stream: StreamId
    state: ConsumerState = ConsumerState.BLOCKED
    committed: Position | None = None
    checkpointed: Position | None = None
    table_id: str | None = None
    stored: StoredPosition = NOTHING_STORED
    ancestors: dict[str, StoredPosition] = field(default_factory=dict)
    is_refused: bool = False
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
    refused: str | None = None

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
        """Whether the checkpoint in the lease row is behind the table.

        A renewal may have written it since.
        """
        written = (self.checkpointed, self.held.lease.checkpoint)
        return self.committed is not None and self.committed not in written

    def settled_position(self) -> Position:
        """Return the position after which reading begins (exclusive).

        Raises:
            ValueError: The shard is not started yet.
        """
        if self.committed is None:
            raise ValueError(f"the lease {self.lease_key} has no position yet")
        return self.committed

    @property
    def reached(self) -> Position | None:
        """The committed position. None: not known yet, or no record."""
        committed = self.committed
        return None if committed is None or committed.is_sentinel else committed

    # -- from gaining the lease to reading

    def note_parents(self, reached: object, now: float) -> None:
        """Note the parents' positions. A change counts as movement; the first call does not."""
        if reached != self.parents_reached:
            if self.parents_reached is not None:
                self.moved_at = now
            self.parents_reached = reached

    def unblock(self) -> None:
        """BLOCKED → STARTING: the parents have ended."""
        # A restart returns to STARTING: parents that have ended stay so.
        self.state = ConsumerState.STARTING

    @property
    def knows_ancestor(self) -> bool:
        """Whether the table knows an ancestor of this shard."""
        return any(one != NOTHING_STORED for one in self.ancestors.values())

    def ends_of_ancestors(self) -> list[Entry]:
        """Return the entries that end the ancestors of a shard without a commit."""
        return [
            Entry(key, one, one.position, ended=True)
            for key, one in self.ancestors.items()
            if not one.ended
        ]

    def note_table(
        self, table_id: str | None, stored: StoredPosition, ancestors: dict[str, StoredPosition]
    ) -> None:
        """Note what the table has. Nothing of it depends on the lease row."""
        self.table_id, self.stored, self.ancestors = table_id, stored, ancestors

    def settle(self, position: Position, checkpointed: Position) -> None:
        """Set the position after which the shard is read, and the checkpoint of the row."""
        self.committed, self.checkpointed = position, checkpointed
        self.is_refused = False

    def read(self, begin: Callable[[ShardConsumer], None]) -> None:
        """STARTING → READING, after `begin` has succeeded."""
        # Row and table were read before (`settle`). If `begin` raises, both are read again.
        begin(self)
        self.state = ConsumerState.READING

    # -- a batch

    def note_committed(self, through: Position, stored: StoredPosition, now: float) -> None:
        """Note a commit."""
        self.stored = stored
        self.ancestors = {}
        self.committed = through
        self.last_commit = self.moved_at = now
        self.restarted, self.error = False, None
        self.set_aside.clear()

    def note_checkpointed(self) -> None:
        """Note that the lease row has the committed position."""
        self.checkpointed = self.committed

    # -- failures

    def step_succeeded(self) -> None:
        """Reset the wait. After a restart, the error stays until a batch is committed."""
        self.failures = 0
        self.refused = None
        if not self.restarted:
            self.error = None

    def step_failed(self, error: Exception, now: float, base_seconds: float) -> None:
        """Note the error, and retry the step after a wait."""
        self.error = f"{type(error).__name__}: {error}"
        self.refused = str(error) if isinstance(error, OtherTableError) else None
        self.back_off(now, base_seconds)

    def back_off(self, now: float, base_seconds: float) -> None:
        """Delay the next step. The wait doubles per failure, up to 30 times `base_seconds`."""
        self.failures += 1
        self.due = now + base_seconds * min(2 ** (self.failures - 1), 30)

    def restart(self, now: float, base_seconds: float) -> None:
        """→ STARTING: read again from the committed position after a batch of unknown outcome."""
        # Not to READING: the table may have the batch, and then its position is a later one.
        self.state = ConsumerState.STARTING
        self.restarted = True
        self.back_off(now, base_seconds)

    # -- from the last record to the loss of the lease

    def reach_end(self, children: tuple[ChildShard, ...], *, shard_gone: bool) -> None:
        """STARTING or READING → ENDING: all records are committed."""
        # From STARTING if the table has the end and the row has not: its writer stopped in between.
        self.children, self.shard_gone = children, shard_gone
        self.state = ConsumerState.ENDING

    def end(self) -> None:
        """ENDING or STARTING → ENDED: the row is at SHARD_END."""
        # From STARTING if a write of the end was applied and its answer was lost.
        self.committed = self.checkpointed = SHARD_END
        self.state = ConsumerState.ENDED

    def leave(self, now: float) -> None:
        """→ LEAVING. Earlier failures do not delay the handoff."""
        # The source has dropped what it read. The checkpoint is written before the transfer.
        self.state = ConsumerState.LEAVING
        self.failures, self.due = 0, now

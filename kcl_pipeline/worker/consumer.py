"""State of one held shard in a worker, and the transitions between its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kcl_pipeline.batch import TxnVersions
from kcl_pipeline.errors import OtherTableError
from kcl_pipeline.leases.held import Held
from kcl_pipeline.leases.stored_shards import position_key
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import ChildShard, StreamId


class ConsumerState(StrEnum):
    """State of a shard consumer (protocol §6.6, extended by the check of the sink's table).

    Attributes:
        BLOCKED: A parent is not at SHARD_END.
        RESOLVING: The outcome of a pending batch must be found out before reading.
        READING: The shard is read and its batches are committed.
        ENDING: All records are committed. SHARD_END is not written yet.
        LEAVING: The lease is in a handoff. Its checkpoint is written before the transfer.
        ENDED: Nothing is left to do.
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

    Only the processing thread changes it, with one exception: the thread that prepares a batch
    notes the prepare, and the processing thread waits for it. `stalls.StallWatch` reads single
    attributes on another thread.

    Attributes:
        held: The lease.
        stream: Its stream.
        state: See `ConsumerState`.
        committed: Last position that the table has (inclusive). None: not resolved yet.
        checkpointed: Last position in the lease row. It may be behind `committed`, because the
            checkpoint is combined with the next prepare.
        versions: Transaction versions of the table that this worker last read or committed.
        prepared: End and number of a prepared batch that is not committed yet.
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
        in_batch: Whether the batch that is being processed has ranges of this shard.
        restarted: Whether the shard is read again after a failure.
        error: The error of the last failed step.
        refused: Why the table was refused at the last step (`OtherTableError`). None: it was not.
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
    refused: str | None = None

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.held.lease.lease_key

    @property
    def transaction_key(self) -> str:
        """The key of the lease in the log of the sink."""
        return self.held.lease.transaction_key

    @property
    def shard_key(self) -> str | None:
        """The key of the shard in a sink that stores positions (`batch.shard_key`).

        None: ARN or creation time of the stream are unknown.
        """
        return self.sibling_key(self.held.lease.shard_id)

    def sibling_key(self, shard_id: str) -> str | None:
        """Return the `shard_key` of another shard of the same stream."""
        lease = self.held.lease
        return position_key(self.stream, lease.with_(lease_key=lease.key_of_sibling(shard_id)))

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
            ValueError: The position is not resolved yet.
        """
        if self.committed is None:
            raise ValueError(f"the lease {self.lease_key} has no position yet")
        return self.committed

    # -- from gaining the lease to reading

    def note_parents(self, reached: object, now: float) -> None:
        """Note the parents' positions. A change counts as movement; the first call does not."""
        if reached != self.parents_reached:
            if self.parents_reached is not None:
                self.moved_at = now
            self.parents_reached = reached

    def unblock(self) -> None:
        """BLOCKED → RESOLVING: the parents have ended."""
        self.state = ConsumerState.RESOLVING

    def settle(
        self, position: Position, versions: TxnVersions, checkpointed: Position | None = None
    ) -> None:
        """Set the resolved position and versions. No batch is pending after this call.

        Args:
            position: The position.
            versions: What the table stores.
            checkpointed: The checkpoint of the row. None: it equals `position`.
        """
        self.prepared = None
        self.versions = versions
        self.committed = position
        self.checkpointed = position if checkpointed is None else checkpointed

    def read(self, begin: Callable[[ShardConsumer], None]) -> None:
        """RESOLVING → READING, after `begin` has succeeded."""
        begin(self)
        self.state = ConsumerState.READING

    # -- a batch

    def is_prepared_to(self, end: Position) -> bool:
        """Return whether a batch that ends at `end` (inclusive) is prepared."""
        return self.prepared is not None and self.prepared[0] == end

    def note_prepared(self, end: Position, number: int) -> None:
        """Note a prepare. The same write moved the checkpoint to `committed`."""
        self.prepared = (end, number)
        self.checkpointed = self.committed

    def note_committed(self, through: Position, now: float) -> None:
        """Note a commit. The number of a prepared batch becomes the data version."""
        if self.prepared is not None:
            self.versions = replace(self.versions, data=self.prepared[1])
            self.prepared = None
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
        """→ RESOLVING: read again from the committed position after a batch of unknown outcome."""
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
        """→ LEAVING. Earlier failures do not delay the handoff."""
        self.state = ConsumerState.LEAVING
        self.failures, self.due = 0, now

"""What a worker knows of one shard whose lease it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kcl_pipeline.batch import TxnVersions
from kcl_pipeline.leases.held import Held
from kcl_pipeline.position import Position
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
    """Mutable state of one held lease; touched by the processing thread only.

    `committed` is the last position that the table has; `checkpointed` the last one in the lease
    row (it may be behind: the checkpoint rides on the next prepare). `numbers` are the table's
    numbers as this worker last saw or made them. `prepared` is (end, number) of a prepare that has
    not been followed by a commit. `due` is the monotonic time of the next attempt after a wait or
    failure. `shard_gone`: the stream does not list the shard any more, and `children` are the
    oldest shards that follow it. `set_aside` are the positions after `committed` whose dead letters
    this worker has written (sequence number, sub-sequence number).

    The rest is for `stalls.StallWatch`: when the shard was committed, or its parents moved, last
    (monotonic); where the parents were; whether it is in a batch; whether it is read again after a
    failure; and the error of its last step.
    """

    held: Held
    stream: StreamId
    state: ConsumerState = ConsumerState.BLOCKED
    committed: Position | None = None
    checkpointed: Position | None = None
    numbers: TxnVersions = field(default_factory=TxnVersions)
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

    def settled_position(self) -> Position:
        """Where reading begins (exclusive). Raises `ValueError` before that is known."""
        if self.committed is None:
            raise ValueError(f"the lease {self.lease_key} has no position yet")
        return self.committed

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

    def back_off(self, now: float, base_seconds: float) -> None:
        """Try again later: twice as long after each failure, at most 30 times `base_seconds`."""
        self.failures += 1
        self.due = now + base_seconds * min(2 ** (self.failures - 1), 30)

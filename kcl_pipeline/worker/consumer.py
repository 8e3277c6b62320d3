"""What a worker knows of one shard whose lease it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kcl_pipeline.batch import SinkNumbers
from kcl_pipeline.leases.held import Held
from kcl_pipeline.sequence import Position
from kcl_pipeline.shards import ChildShard, StreamId


class ConsumerState(StrEnum):
    """Where a shard consumer is (protocol §6.6, with the table's side of a takeover added).

    BLOCKED: a parent is not at its end. RESOLVING: what the previous owner left in flight is to be settled with the table.
    READING: its records flow. ENDING: everything is committed, the end is to be recorded. ENDED: nothing is left to do.
    """

    BLOCKED = "blocked"
    RESOLVING = "resolving"
    READING = "reading"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(slots=True)
class ShardConsumer:
    """Mutable state of one held lease; touched by the processing thread only.

    `committed` is the last position that the table has; `checkpointed` the last one in the lease row (it may be behind: the checkpoint
    rides on the next prepare). `numbers` are the table's numbers as this worker last saw or made them. `prepared` is (end, number) of a prepare
    that has not been followed by a commit. `due` is the monotonic time of the next attempt after a wait or failure.
    """

    held: Held
    stream: StreamId
    state: ConsumerState = ConsumerState.BLOCKED
    committed: Position | None = None
    checkpointed: Position | None = None
    numbers: SinkNumbers = field(default_factory=SinkNumbers)
    prepared: tuple[Position, int] | None = None
    last_commit: float = 0.0
    due: float = 0.0
    failures: int = 0
    children: tuple[ChildShard, ...] = ()

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.held.lease.lease_key

    @property
    def flush_needed(self) -> bool:
        """Whether the table is ahead of the lease row."""
        return self.committed is not None and self.committed != self.checkpointed

    def back_off(self, now: float, base_seconds: float) -> None:
        """Try again later: twice as long after each failure, at most 30 times `base_seconds`."""
        self.failures += 1
        self.due = now + base_seconds * min(2 ** (self.failures - 1), 30)

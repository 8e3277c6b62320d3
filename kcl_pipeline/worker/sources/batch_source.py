"""What the batch runner needs of a source of batches: `BatchSource` gives `SourcedBatch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.batch import Batch, BatchWriter, Written
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.kinesis.prefetch import ReadState
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.worker.consumer import ShardConsumer


class ShardPart(Protocol):
    """A part of one shard that was read, in a batch or not: `kinesis.client.Chunk` and
    `kinesis.ranges.FetchedShard` are.
    """

    @property
    def lease_key(self) -> str:
        """The lease it was read under."""
        ...

    @property
    def after(self) -> Position:
        """Where it begins (exclusive)."""
        ...

    @property
    def through(self) -> Position:
        """Where it ends (inclusive)."""
        ...

    @property
    def bytes(self) -> int:
        """Its payload."""
        ...

    @property
    def record_count(self) -> int:
        """How many records it has."""
        ...

    @property
    def shard_end(self) -> tuple[ChildShard, ...] | None:
        """The children of a shard that ends here."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the shard ends here because the stream does not list it any more."""
        ...


@dataclass(frozen=True, slots=True)
class SourcedBatch:
    """A batch to commit, and everything that was read for it.

    A batch without ranges is possible: then only `parts` say something. `written`: its files are
    there already. `failure`: the transform failed where the batch was read; it is to be loaded, and
    the failures are isolated. `arrival_micros` samples the records' arrival times, `milliseconds`
    says how long the job took that read them. `oldest_at`: when the oldest record of each lease
    arrived (see `worker.monitoring.lag`).
    """

    batch: Batch
    parts: Sequence[ShardPart]
    records: int
    arrival_micros: Sequence[int]
    written: Written | None = None
    failure: str | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    oldest_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_of_leases(self) -> Mapping[str, int]:
        """Payload bytes of the batch by lease key."""
        found = {part.lease_key: 0 for part in self.batch.ranges}
        for part in self.parts:
            if part.lease_key in found:
                found[part.lease_key] += part.bytes
        return found

    @property
    def records_of_leases(self) -> Mapping[str, int]:
        """Number of records of the batch by lease key."""
        found = {part.lease_key: 0 for part in self.batch.ranges}
        for part in self.parts:
            if part.lease_key in found:
                found[part.lease_key] += part.record_count
        return found


class BatchSource(Protocol):
    """Reads the shards that it is told to.

    Called by the processing thread, `fetch` and `end` by any.
    """

    rewriter: BatchWriter
    """Writes a batch (again) whether its records are loaded or not."""

    fetch_threads: int
    """How many threads are to call `fetch`."""

    def begin(self, consumer: ShardConsumer) -> None:
        """Read a shard after what is committed of it; whatever was known of it before is
        forgotten.
        """
        ...

    def end(self, lease_key: str) -> None:
        """Stop reading a shard and drop what is there of it. Unknown keys are ignored."""
        ...

    def fetch(self) -> float:
        """One step of a fetch thread; returns seconds until the next may be worth it."""
        ...

    def next(
        self, batch_id: str, committed: Mapping[str, Position | None], *, waited: bool
    ) -> SourcedBatch | None:
        """The next batch, if there is enough for one, or anything and `waited` (long enough for a
        small one). Raises `SinkError` when a job failed.
        """
        ...

    def load(self, batch: Batch) -> Batch:
        """The batch with its records. Raises `SinkError` when they cannot be read again now."""
        ...

    def lag(self) -> dict[str, int]:
        """Milliseconds that each lease's next record is behind the tip of its shard, as far as
        known.
        """
        ...

    def state_of(self, lease_key: str) -> ReadState | None:
        """How the reading of a shard goes; None for a shard that is not read. Any thread."""
        ...

    def caught_up(self, lease_key: str) -> bool:
        """Whether the shard was read to its tip or end since it was begun, and nothing of it waits
        here.
        """
        ...

    def wait(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until a batch may be there, `stop` is set, or `seconds` have passed; True in the
        first case.
        """
        ...

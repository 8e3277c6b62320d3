"""The interface between the batch runner and its source: `BatchSource` and `SourcedBatch`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.batch import Batch, Written
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.prefetch.readers import ReadState
from kcl_pipeline.kinesis.ranges import FetchedShard
from kcl_pipeline.position import Position
from kcl_pipeline.worker.consumer import ShardConsumer

ShardPart = Chunk | FetchedShard
"""A part of one shard that was read, whether it is in a batch or not."""


@dataclass(frozen=True, slots=True)
class SourcedBatch:
    """A batch to commit, and all parts that were read for it.

    Attributes:
        batch: The batch. It may have no ranges; then only `shard_parts` are used.
        shard_parts: The parts that were read.
        records: Number of records in the ranges.
        arrival_micros: Sample of the records' arrival times (epoch microseconds).
        written: Files that executors have already written. None: nothing is written yet.
        failure: Error of the transform in an executor. The batch must be loaded, and its failures
            isolated.
        milliseconds: Duration of the job that read the records, by step.
        oldest_at: Arrival of the oldest record by lease key (see `worker.monitoring.lag`).
    """

    batch: Batch
    shard_parts: Sequence[ShardPart]
    records: int
    arrival_micros: Sequence[int]
    written: Written | None = None
    failure: str | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    oldest_at: Mapping[str, float] = field(default_factory=dict)

    def by_lease(self, amount: Callable[[ShardPart], int]) -> Mapping[str, int]:
        """Return the sum of an amount, such as bytes, over the parts of the batch by lease key."""
        found = {part.lease_key: 0 for part in self.batch.ranges}
        for part in self.shard_parts:
            if part.lease_key in found:
                found[part.lease_key] += amount(part)
        return found


class BatchSource(Protocol):
    """Read the shards of the consumers that were begun.

    The processing thread calls it. Any thread may call `fetch`, `end` and `state_of`.
    """

    fetch_threads: int
    """Number of threads that must call `fetch`."""

    def begin(self, consumer: ShardConsumer) -> None:
        """Read a shard after its committed position. Its earlier state is dropped."""

    def end(self, lease_key: str) -> None:
        """Stop reading a shard and drop its buffered records. Unknown keys are ignored."""

    def fetch(self) -> float:
        """Run one step of a fetch thread; return the seconds until the next one is useful."""

    def hold(self, lease_keys: Collection[str]) -> None:
        """Keep the records of these shards, and read no more of them, until the next call.

        If the other shards need the memory, these shards are removed with their records. `state_of`
        then returns None for them.
        """

    def next(self, batch_id: str, committed: Mapping[str, Position | None]) -> SourcedBatch | None:
        """Return the next batch, if it is large enough or has waited for the batch interval.

        Args:
            batch_id: Id of the batch.
            committed: Committed position by lease key. None: not resolved yet.

        Returns:
            The batch. None: there is none yet.

        Raises:
            SinkError: A job failed.
        """

    def load(self, batch: Batch) -> Batch:
        """Return the batch with its records: the same one if they are loaded.

        Raises:
            SinkError: The records cannot be read again now.
        """

    def lag(self) -> dict[str, int]:
        """Return how far each lease's next record is behind the tip, in milliseconds if known."""

    def state_of(self, lease_key: str) -> ReadState | None:
        """Return the read state of a shard; None if it is not read. Any thread may call it."""

    def wait(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until a batch may be available, `stop` is set, or `seconds` have passed.

        Returns:
            Whether a batch may be available.
        """

"""The interface of a commit protocol: resolve, prepare, commit, checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.batch import Batch, TxnVersions, Written
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.position import Position
from kcl_pipeline.worker.consumer import ShardConsumer


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a commit.

    Attributes:
        landed: Whether all ranges of the batch are in the table.
        version: Table version of the commit. None: it did not land, its version is unknown because
            its response was lost, or no commit was needed.
        lost: Why leases are lost and prevented the commit, by lease key. Empty if it landed.
    """

    landed: bool
    version: int | None = None
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that landed.

    Attributes:
        lease_keys: The leases of its ranges.
        rows: Number of rows in its files.
        version: Table version of the commit. None: see `CommitResult`.
        milliseconds: Duration by step.
    """

    lease_keys: tuple[str, ...]
    rows: int
    version: int | None
    milliseconds: dict[str, float]


class CommitProtocol(Protocol):
    """Commit batches exactly once.

    Not thread-safe: one thread uses it. Every method that takes consumers updates their state.
    Methods without a Raises section raise the errors of `prepare`.
    """

    @property
    def stored(self) -> StoredShards | None:
        """Asks the table for positions of shards. None: it stores none."""

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """Return the table's transaction versions of these leases, for `resolve`.

        Call it after the rows of the leases were read.

        Returns:
            The versions by lease key. Empty: the table cannot be read now.
        """

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """Find out whether the pending batch of the previous owner landed.

        Args:
            consumer: Holds the lease. Its row is as this worker last read or wrote it.
            seen: From `look_up`. None: the table is read now.

        Returns:
            The position after which the shard is read (exclusive).

        Raises:
            LeaseLostError: Another worker has the lease.
            SinkError: The table cannot be used now. Nothing is decided. Call again.
            AwsError: The lease row cannot be written now. Nothing is decided. Call again.
        """

    def preparing(
        self, batch: Batch, consumers: dict[str, ShardConsumer]
    ) -> AbstractContextManager[None]:
        """Prepare the batch while the caller writes its files in the block, if that is possible.

        Errors are ignored here; `prepare` meets them again. If writing the files fails, the batch
        stays prepared, as after a crash. Then `resolve` settles it.
        """

    def prepare(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> Mapping[str, str]:
        """Store the end and number of the batch in its lease rows, unless `preparing` did it.

        Returns:
            Why leases are lost, by lease key.

        Raises:
            CommitStoppedError: The worker stops.
            SinkError: The sink cannot take the batch.
        """

    def commit(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        """Commit a prepared batch to the table, with all of its ranges or none."""

    def checkpoint(self, consumer: ShardConsumer) -> None:
        """Write the committed position to the lease row, unless it is there already.

        Nothing is written while the outcome of a prepared batch is unknown.

        Raises:
            LeaseLostError: Another worker has the lease.
            AwsError: The lease row cannot be written now. Call again.
        """

    def flush_due(self, consumer: ShardConsumer, now: float, *, idle: bool) -> bool:
        """Return whether a checkpoint that is not written yet must be written now.

        Args:
            consumer: Its checkpoint is behind the table.
            now: Monotonic seconds.
            idle: Whether there is no next batch.
        """

    def begin(
        self, consumer: ShardConsumer, ended_parents: Iterable[str], seen: TxnVersions | None
    ) -> None:
        """Note in the table that the parents of a shard have ended, before the shard is read.

        Args:
            consumer: The shard.
            ended_parents: Shard ids of its parents whose rows are at SHARD_END.
            seen: From `look_up`. None: the table could not be read.

        Raises:
            SinkError: The table cannot be used now. Call again.
        """

    def end(self, consumer: ShardConsumer) -> None:
        """Note in the table that it has all records of the shard. SHARD_END is written after this.

        Raises:
            LeaseLostError: Another worker has the lease.
            SinkError: The table cannot be used now. Call again.
        """

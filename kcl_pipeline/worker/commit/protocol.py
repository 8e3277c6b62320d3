"""What the worker needs of a commit protocol: settle, prepare, commit, checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.batch import Batch, TxnVersions, Written
from kcl_pipeline.position import Position
from kcl_pipeline.worker.consumer import ShardConsumer


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a commit.

    Attributes:
        landed: Whether all ranges of the batch are in the table.
        version: The table version; None when it did not land, or was found landed later.
        lost: Why a lease stands in the way, by lease key; empty when it landed.
    """

    landed: bool
    version: int | None = None
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that landed.

    Attributes:
        lease_keys: The leases that it covers.
        rows: How many rows are in its files.
        version: The table version; None when it was found landed by its numbers.
        milliseconds: Time by step.
    """

    lease_keys: tuple[str, ...]
    rows: int
    version: int | None
    milliseconds: dict[str, float]


class CommitProtocol(Protocol):
    """Commits batches exactly once. One thread uses it.

    Every method that takes consumers brings them up to date. Errors that are not listed are those
    of `prepare`.
    """

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """What the table has of these leases, for `resolve`; empty when it cannot be read now.

        The rows of the leases were read before.
        """
        ...

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """Settle what the previous owner left; the shard is read after the returned position.

        Args:
            consumer: Holds the lease; its row is as this worker last read or wrote it.
            seen: From `look_up`; None reads the table now.

        Raises:
            LeaseLostError: Another worker has the lease.
            SinkError: The table cannot be used now. Nothing is decided: call again.
            AwsError: The lease row cannot be written now. Nothing is decided: call again.
        """
        ...

    def preparing(
        self, batch: Batch, consumers: dict[str, ShardConsumer]
    ) -> AbstractContextManager[None]:
        """Prepare the batch while its files are written in the block, where that is possible.

        What goes wrong is met again by `prepare`. A batch whose files fail stays prepared, as after
        a crash; `resolve` settles it.
        """
        ...

    def prepare(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> Mapping[str, str]:
        """Announce the batch, unless that was done. Returns why leases are lost, by lease key.

        Raises:
            CommitStoppedError: The worker stops.
            SinkError: The sink cannot take the batch.
        """
        ...

    def commit(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        """Put a prepared batch into the table, with all of its ranges or none."""
        ...

    def checkpoint(self, consumer: ShardConsumer) -> None:
        """Bring the lease row up to what the table has, where that is needed.

        Writes nothing while a prepared batch has no known outcome.

        Raises:
            LeaseLostError: Another worker has the lease.
            AwsError: The lease row cannot be written now: call again.
        """
        ...

"""Values of a micro-batch, and the interfaces `BatchWriter` and `TransactionalSink`.

`docs/decisions/0002-exactly-once.md` and `docs/guarantees.md` explain the commit protocol
(prepare, commit, checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.position import Position


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one shard that a batch covers.

    Attributes:
        lease_key: The lease of the shard.
        after: First position (exclusive).
        through: Last position (inclusive).
        rows: Number of rows in `Batch.records`, where the ranges follow each other in their order.
            None: unknown.
    """

    lease_key: str
    after: Position
    through: Position
    rows: int | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """Records and the ranges that they come from, one range per lease.

    Attributes:
        batch_id: Identifies the batch in logs and events.
        ranges: One range per lease.
        records: The records (`RECORD_SCHEMA`), possibly no rows.
        loaded: Whether this process has read the records. False: executors have read and written
            the ranges, and `records` is empty until this process reads them again.
    """

    batch_id: str
    ranges: tuple[ShardRange, ...]
    records: pa.Table
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is written but not committed.

    Attributes:
        path: Path relative to the root of the table, separated by `/`.
        size: Size in bytes.
        rows: Number of rows.
        partition_values: Values of the partition columns as strings; None is null.
        modified_millis: Modification time in epoch milliseconds.
    """

    path: str
    size: int
    rows: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    modified_millis: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The result of writing a batch. Readers of the table do not see it until it is committed.

    Attributes:
        files: The files with the rows of the output.
        schema: Schema of the output, also when there is no file. None: the batch has no records, so
            the transform was not called.
        rows: Number of rows in the files.
        rejected: The records that the transform returned as dead letters (`REJECTED_SCHEMA`).
            None of their rejected rows is in the files. None: there are no such records.
    """

    files: tuple[DataFile, ...]
    schema: pa.Schema | None
    rows: int
    rejected: pa.Table | None = None


NOTHING_WRITTEN: Final = Written((), None, 0)

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("shard_id", pa.string()),
        pa.field("sequence_number", pa.string()),
        pa.field("sub_sequence_number", pa.int64()),
        pa.field("error", pa.string(), nullable=False),
    ]
)
"""The position of a record that a transform returned as a dead letter, and the error.

`stream` may be null.
"""


def dead_letter_address(sink: object) -> str | None:
    """Return the address of the dead-letter table of a sink; None for a sink without one."""
    uri = getattr(sink, "dead_letters", None) or getattr(sink, "dead_letter_uri", None)
    return str(uri) if uri else None


class BatchWriter(Protocol):
    """Turns a batch into files by means of the user's transform."""

    def write(self, batch: Batch) -> Written:
        """Transform and write a batch. The transform is not called for a batch without records.

        Raises:
            TransformFailedError: The transform raised.
            SinkError: The files could not be written.
        """

    def probe(self, parts: Sequence[pa.Table]) -> Sequence[str | None]:
        """Run the transform on each part of a batch alone, and write nothing.

        Args:
            parts: Slices of a batch's records, none of them empty.

        Returns:
            The error of each part in one line; None where the transform succeeds.

        Raises:
            SinkError: The transform could not be run.
        """


@dataclass(frozen=True, slots=True)
class TxnVersions:
    """What the table's log stores for a lease. Compared for equality, never for order.

    Attributes:
        data: Number of the last batch of the two-phase protocol. None: never written.
        fence: Number of the last fence. None: never written.
        number: How many times the position was set. None: the table stores no position.
        position: Last position in the table (inclusive). None: the table stores none.
        ended: Whether the table has all records of the shard.
        table: Id of the table. None: it does not exist, or is not known.
    """

    data: int | None = None
    fence: int | None = None
    number: int | None = None
    position: Position | None = None
    ended: bool = False
    table: str | None = field(default=None, compare=False)

    def fits(self, now: TxnVersions) -> bool:
        """Return whether a table that has `now` is the expected table with these versions."""
        return self == now and self.table in (None, now.table)

    def moved_to(self, position: Position | None, *, ended: bool) -> TxnVersions:
        """Return the versions after a commit that sets the position.

        The first such commit is a fence, too: a writer of an older version of this package
        compares only data and fence.
        """
        fence = (self.fence or 0) + 1 if self.number is None else self.fence
        return TxnVersions(self.data, fence, (self.number or 0) + 1, position, ended, self.table)


def shard_key(lease_key: str, shard_name: str) -> str:
    """Return the key of a shard in a sink that stores positions.

    Args:
        lease_key: `Lease.transaction_key`. Batches of the two-phase protocol have this name.
        shard_name: Names the stream, its creation and the shard. Positions have this name.
    """
    return f"{lease_key} {shard_name}"


def names_of(key: str) -> tuple[str, str | None]:
    """Return the lease key and the shard name of a key. None: the key has no shard name."""
    lease_key, _, shard_name = key.partition(" ")
    return lease_key, shard_name or None


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """One lease of a commit.

    Attributes:
        lease_key: The lease.
        number: Batch number. The commit sets the data version to it.
        expected: The commit is refused unless the versions in the table equal these.
        sets: What the table has after the commit, if it stores positions. None: the commit sets
            the data version alone.
    """

    lease_key: str
    number: int
    expected: TxnVersions
    sets: TxnVersions | None = None

    @classmethod
    def to(cls, key: str, expected: TxnVersions, end: Position) -> CommitEntry:
        """Return the entry of a batch that ends at `end` (inclusive), with its position."""
        sets = expected.moved_to(end, ended=False)
        return cls(key, sets.number or 0, expected, sets)

    def is_at(self, now: TxnVersions) -> bool:
        """Return whether the table has what this entry sets."""
        if self.sets is None:
            return now.data == self.number
        return (now.number, now.position) == (self.number, self.sets.position)


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """Whether a commit landed.

    Attributes:
        version: Version of the table that the commit created. None: the commit was refused.
        refused: The leases because of which the commit was refused, at least one.
        reason: Why, if the reason is not that their versions were not as expected.
    """

    version: int | None
    refused: tuple[str, ...] = ()
    reason: str = ""


class TransactionalSink(Protocol):
    """A table whose log accepts files and application transactions in one commit."""

    def ensure_table(self, schema: pa.Schema) -> None:
        """Create the table with this schema unless it exists.

        Called before the first prepare, because a fence needs a log.

        Raises:
            SinkError: The table exists, and its columns do not fit this schema. The message names
                the columns.
        """

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """Return the newest versions of these leases. Always reads the end of the log.

        If the table does not exist, no lease has versions.
        """

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Add the files and set all data versions in one commit, if all versions are as expected.

        Retries if the commit was refused only because the log had moved.

        Raises:
            SinkError: The outcome is unknown. The caller reads `txn_versions`.
        """

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """Commit a fence: increment the fence version, without files.

        Afterwards no commit that expects `expected` can land.

        Returns:
            The new versions. None: the fence was refused, and the caller reads `txn_versions`
            again. `expected` if the table does not exist, because then nothing can have landed in
            it.
        """

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table, unless the table has them already.

        A record is identified by `lease_key`, `sequence_number` and `sub_sequence_number`, so a
        batch may be repeated, also with another end.

        Args:
            records: `RECORD_SCHEMA` and at least the columns `lease_key` and `error`.

        Raises:
            SinkError: The caller may repeat the call.
        """


@runtime_checkable
class CheckedSink(Protocol):
    """A sink that can check its output before the first batch."""

    def check(self) -> object:
        """Check that the output can be written.

        Raises:
            TableMismatchError: It cannot, also later.
            SinkError: It cannot be reached now.
        """


@runtime_checkable
class PositionStore(Protocol):
    """The part of a sink that stores the position of each shard together with its rows.

    Its keys are those of `shard_key`.
    """

    def move(
        self, key: str, expected: TxnVersions, position: Position | None, *, ended: bool
    ) -> TxnVersions | None:
        """Set the position of a shard without files, if the versions are as expected.

        Afterwards no commit that expects `expected` can land.

        Returns:
            The new versions. None: refused, and the caller reads `txn_versions` again. `expected`
            if the table does not exist, because then nothing can have landed in it.

        Raises:
            SinkError: The outcome is unknown. The caller reads `txn_versions`.
        """


@runtime_checkable
class ShortNames(Protocol):
    """The part of a sink that can store positions under short names.

    Workers of versions that know only long names do not read positions with short ones. So the
    record of the application says which names a worker may choose. A position keeps its names.
    """

    def prefers_short_names(self) -> bool:
        """Return whether an application without a record may choose short names.

        That is not so if its positions in the table have long names, or cannot be listed.

        Raises:
            SinkError: The table cannot be read.
        """

    def name_positions(self, *, short: bool) -> None:
        """Set the names of a shard that has no position yet. They are long unless this is called.

        All positions are found in any case.
        """

    def use_long_names(self) -> None:
        """Give all positions of the application long names, without another change.

        Raises:
            SinkError: The outcome is unknown. The caller may repeat the call.
        """

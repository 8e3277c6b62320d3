"""A micro-batch, what became of it, and the two protocols that process one: `BatchWriter` and
`TransactionalSink`.

The commit protocol itself (prepare, commit, checkpoint) is in `worker.commit`;
docs/decisions/0002-exactly-once.md and `docs/guarantees.md` explain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from kcl_pipeline.position import Position


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one shard that a batch covers: after `after` (exclusive) through `through`
    (inclusive).
    """

    lease_key: str
    after: Position
    through: Position


@dataclass(frozen=True, slots=True)
class Batch:
    """Records with the ranges they come from, one range per lease. `records` has `RECORD_SCHEMA`
    and may have no rows.

    `loaded` False: executors have read and written the ranges, and `records` stays empty unless
    somebody has to read them again.
    """

    batch_id: str
    ranges: tuple[ShardRange, ...]
    records: pa.Table
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is written but in no commit: `path` is relative to the table's root,
    `/`-separated.
    """

    path: str
    size: int
    rows: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    modified_millis: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer made of a batch. Not visible to any reader of the table.

    Attributes:
        files: The rows of the output.
        schema: The output's, also when there is no file. None: the batch has no records, so the
            transform was not called.
        rows: How many rows are in the files.
        rejected: The records that the transform handed back as dead letters (`REJECTED_SCHEMA`);
            none of their rejected rows is in the files. None: there are none.
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
"""The position of a record that a transform handed back, and why. `stream` may be null."""


class BatchWriter(Protocol):
    """Turns a batch into files: the user's transform and the Parquet writer."""

    def write(self, batch: Batch) -> Written:
        """Transform and write. The transform is not called for a batch without records.

        Raises `errors.TransformFailedError` when the transform did, `errors.SinkError` when writing
        did.
        """
        ...

    def probe(self, parts: Sequence[pa.Table]) -> Sequence[str | None]:
        """Run the transform on each part of a batch alone, and write nothing.

        Args:
            parts: Slices of a batch's records, none of them empty.

        Returns:
            The error of each part in one line; None where the transform takes it.

        Raises:
            SinkError: Whether the transform takes a part cannot be found out now.
        """
        ...


@dataclass(frozen=True, slots=True)
class TxnVersions:
    """The two application transactions of a lease in the table's log; None: never written.

    Compared for equality, never for order.
    """

    data: int | None = None
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """One lease of a commit: the commit sets its data number to `number`, and is refused unless the
    table's numbers are `expected`.
    """

    lease_key: str
    number: int
    expected: TxnVersions


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`version` is the table version when it landed.

    Otherwise `refused` names the leases that stand in the way (never empty), and `reason` says why
    where it is not that their numbers were not as expected.
    """

    version: int | None
    refused: tuple[str, ...] = ()
    reason: str = ""


class TransactionalSink(Protocol):
    """A table with a log that takes files and application transactions in one commit (design
    §3).
    """

    def ensure_table(self, schema: pa.Schema) -> None:
        """Create the table with this schema unless it exists. Called before the first prepare: a
        fence needs a log to stand in.

        Raises `errors.SinkError` when the table exists with columns that this schema does not fit;
        the message names them.
        """
        ...

    def numbers(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """The newest numbers of these leases; a table that does not exist yet has none.

        Always reads the log's end.
        """
        ...

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Add the files and set all data numbers in one commit, if all numbers are as expected;
        contention alone is retried inside.

        Raises `errors.SinkError` when the outcome is not known: then read `numbers`.
        """
        ...

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """Raise the fence number alone (a commit without files), so that no commit made on
        `expected` can land. None: refused, read again.

        A table that does not exist (somebody removed it) gives `expected` back: nothing can have
        landed in it.
        """
        ...

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records (`RECORD_SCHEMA` plus at least `lease_key` and `error`) to the
        dead-letter table, unless they are there.

        A record is told by `lease_key`, `sequence_number` and `sub_sequence_number`, so a batch may
        be repeated, also with another end. Raises `errors.SinkError`: call again.
        """
        ...

"""A micro-batch, what became of it, and the two protocols that process one: `BatchWriter` and `TransactionalSink`.

The commit protocol itself (prepare, commit, checkpoint) is in `worker.commit`; design §3 and `docs/guarantees.md` explain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from kcl_pipeline.sequence import Position


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one shard that a batch covers: after `after` (exclusive) through `through` (inclusive)."""

    lease_key: str
    after: Position
    through: Position


@dataclass(frozen=True, slots=True)
class Batch:
    """Records with the ranges they come from, one range per lease. `records` has `RECORD_SCHEMA` and may have no rows.

    `loaded` False: executors have read and written the ranges, and `records` stays empty unless somebody has to read them again.
    """

    batch_id: str
    ranges: tuple[ShardRange, ...]
    records: pa.Table
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that is written but in no commit: `path` is relative to the table's root, `/`-separated."""

    path: str
    size: int
    rows: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    modified_millis: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer made of a batch. `schema` is the output's, also when there is no file. Not visible to any reader of the table."""

    files: tuple[DataFile, ...]
    schema: pa.Schema
    rows: int


class BatchWriter(Protocol):
    """Turns a batch into files: the user's transform and the Parquet writer."""

    def write(self, batch: Batch) -> Written:
        """Transform and write. Raises `errors.TransformFailed` when the transform did, `errors.SinkError` when writing did."""
        ...


@dataclass(frozen=True, slots=True)
class SinkNumbers:
    """The two application transactions of a lease in the table's log; None: never written. Compared for equality, never for order."""

    data: int | None = None
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """One lease of a commit: the commit sets its data number to `number`, and is refused unless the table's numbers are `expected`."""

    lease_key: str
    number: int
    expected: SinkNumbers


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`version` is the table version when it landed. Otherwise `refused` names the leases whose numbers were not as expected (never empty)."""

    version: int | None
    refused: tuple[str, ...] = ()


class TransactionalSink(Protocol):
    """A table with a log that takes files and application transactions in one commit (design §3)."""

    def ensure_table(self, schema: pa.Schema) -> None:
        """Create the table with this schema unless it exists. Called before the first prepare: a fence needs a log to stand in.

        Raises `errors.SinkError` when the table exists with columns that this schema does not fit; the message names them.
        """
        ...

    def numbers(self, lease_keys: Sequence[str]) -> dict[str, SinkNumbers]:
        """The newest numbers of these leases; a table that does not exist yet has none. Always reads the log's end."""
        ...

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Add the files and set all data numbers in one commit, if all numbers are as expected; contention alone is retried inside.

        Raises `errors.SinkError` when the outcome is not known: then read `numbers`.
        """
        ...

    def fence(self, lease_key: str, expected: SinkNumbers) -> SinkNumbers | None:
        """Raise the fence number alone (a commit without files), so that no commit made on `expected` can land. None: refused, read again.

        A table that does not exist (somebody removed it) gives `expected` back: nothing can have landed in it.
        """
        ...

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records (at least once; `RECORD_SCHEMA` plus `error` and `lease_key`) to the dead-letter table."""
        ...

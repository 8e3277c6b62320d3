"""The interface `Sink`: where a worker commits the rows of a batch and the positions of its shards.

A table stores an id and, per shard, a number v, the position p of the last row, and whether the
shard has ended. A commit adds files and sets these values for several shards, all or none. It is
refused unless the table has exactly what the committer read, so a paused writer cannot commit a
range again. See docs/architecture.md, "Exactly once".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import Written
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.shards import StreamId


@dataclass(frozen=True, slots=True)
class Positions:
    """What a table stores for several shards, read at one version.

    Attributes:
        table_id: Id of the table, which no other table has. None: the table does not exist.
        shards: One value for each requested key.
    """

    table_id: str | None
    shards: Mapping[str, StoredPosition] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """Whether a commit landed.

    Attributes:
        version: A version of the table that has the commit. None: it was refused.
        refused: Keys of the shards of which anything differs from what was expected; all keys if
            the table has another id.
    """

    version: int | None
    refused: tuple[str, ...] = ()


class Sink(Protocol):
    """Where a worker commits batches.

    Files are written by a `batch.BatchWriter` before the commit.

    Attributes:
        stores_positions: False: the positions are those that this process has committed, as with a
            user's function. Then records are processed at least once.
    """

    @property
    def stores_positions(self) -> bool: ...  # noqa: D102 (see Attributes)

    def ensure(self, schema: pa.Schema) -> None:
        """Create the table, or add missing columns.

        Raises:
            TableMismatchError: The columns do not fit the table. The message names them.
            SinkError: The table cannot be used now.
        """

    def positions(self, keys: Sequence[str]) -> Positions:
        """Return the id of the table and what it stores, at the end of its log.

        Raises:
            TableMismatchError: The table may not be written, or a position cannot be read.
            SinkError: The table cannot be read now.
        """

    def commit(
        self,
        table_id: str | None,
        written: Written,
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
    ) -> CommitOutcome:
        """Add the files and set what is stored of some shards, or change nothing.

        Also if an earlier attempt or another writer has committed the same, it has landed.

        Args:
            table_id: From `positions`, before the files were written.
            written: The files; without files only the shards are set.
            expected: What the committer read of each shard, by `shard_key`. At least one shard.
            becomes: What the table stores of the same shards afterwards (`StoredPosition.moved`).

        Raises:
            ValueError: There is no shard, or `becomes` does not follow what is expected.
            SinkError: The outcome is unknown. Call again, or read `positions`.
        """

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table.

        A batch that is repeated, also with another end, appends them again. Readers take one row of
        each record.

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
class FileKeepingSink(Protocol):
    """A sink that knows whether files that were written before its table are in the table's place.

    Without this, such files are written again after the table was created.
    """

    def has_files(self, written: Written) -> bool:
        """Return whether each file exists with its size.

        Raises:
            SinkError: It cannot be found out now.
        """


def shard_key(stream: StreamId, shard_id: str) -> str:
    """Return the key of a shard in a sink: ARN and creation time of its stream, and the shard.

    A stream that is created again has other keys. A stream whose description has no creation time
    uses 0, and one whose description has no ARN its name.

    Args:
        stream: The stream, as the service or its lease keys describe it.
        shard_id: The shard.

    Raises:
        SinkError: The ARN is not known, because the service does not describe the stream now.
    """
    created = stream.creation_epoch
    if created is None:
        created = (stream.created_millis or 0) // 1000
    if stream.arn is None and stream.account is not None:
        raise SinkError(
            f"the shard {shard_id} of {stream.name} has no key in the sink: the ARN of its stream "
            "is unknown"
        )
    return f"{stream.arn or stream.name}/{created}/{shard_id}"


def check_entries(
    expected: Mapping[str, StoredPosition], becomes: Mapping[str, StoredPosition]
) -> None:
    """Raise `ValueError` unless there are shards, each with the next number of what is expected."""
    numbers = {key: stored.number + 1 for key, stored in expected.items()}
    if not numbers or numbers != {key: stored.number for key, stored in becomes.items()}:
        raise ValueError(f"a commit needs shards, each with the next number: {dict(becomes)}")

"""Values of a micro-batch, and the interface `BatchWriter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

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

    Example:
        >>> from kcl_pipeline import BatchIdentity
        >>> def rows_of(identity: BatchIdentity) -> dict[str, int | None]:
        ...     return {one.lease_key: one.rows for one in identity.ranges}
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
        statistics: Minima, maxima and numbers of nulls of its columns, in the form of the table's
            format. Empty: unknown.
    """

    path: str
    size: int
    rows: int
    partition_values: Mapping[str, str | None] = field(default_factory=dict)
    modified_millis: int = 0
    statistics: str = ""


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

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[str | None]:
        """Run the transform on each part of a batch alone, and write nothing.

        Args:
            slices: Slices of a batch's records, none of them empty.

        Returns:
            The error of each part in one line; None where the transform succeeds.

        Raises:
            SinkError: The transform could not be run.
        """

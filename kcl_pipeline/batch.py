"""A micro-batch, and the user's function that transforms it.

1. `Batch`: its records, and what they become.
2. `BatchWriter`: the interface of what transforms and writes a batch.
3. What every writer does: call the user's function, split the rows that it rejects from its output,
   and tell an error that it raises in one line with the user's file and line number. An Arrow
   transform is a function from a `pyarrow.Table` to a `pyarrow.Table`. Rows that it rejects have a
   string in the column `_error`.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.errors import BrokenTransformError, TransformFailedError
from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.text import printable

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("shard_id", pa.string(), nullable=False),
        pa.field("sequence_number", pa.string(), nullable=False),
        pa.field("sub_sequence_number", pa.int64(), nullable=False),
        pa.field("partition_key", pa.string()),
        pa.field("explicit_hash_key", pa.string()),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("approximate_arrival_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("encryption_type", pa.string()),
    ]
)
"""The columns that a transform receives.

`stream` is the name of the stream, or its ARN if the application reads streams of this name in
several accounts. `sub_sequence_number` is 0 for records that are not in a KPL
aggregate. `partition_key` is null for a record that a producer put without a key, which a stream
with the record distribution strategy AUTO accepts.

Example:
    >>> from kcl_pipeline import RECORD_SCHEMA
    >>> str(RECORD_SCHEMA.field("data").type)
    'binary'
"""

NO_RECORDS: Final = pa.Table.from_batches([], schema=RECORD_SCHEMA)
"""The table without rows and chunks. (`empty_table()` would import pandas.)"""

ARRIVAL_SAMPLES: Final = 64


def sampled_arrivals(records: pa.Table) -> tuple[int, ...]:
    """Return the arrival times, in epoch microseconds, of about `ARRIVAL_SAMPLES` records.

    The records are spread evenly over the table.
    """
    if records.num_rows == 0:
        return ()
    arrivals = records["approximate_arrival_timestamp"]
    step = max(records.num_rows // ARRIVAL_SAMPLES, 1)
    if step > 1:
        arrivals = arrivals.take(pa.array(np.arange(0, records.num_rows, step)))
    return tuple(
        micros for chunk in arrivals.chunks for micros in chunk.view(pa.int64()).to_pylist()
    )


def payload_bytes(records: pa.Table) -> int:
    """Return the bytes of data and partition keys, as Kinesis counts them."""
    return data_bytes(records) + _column_bytes(records, "partition_key")


def data_bytes(records: pa.Table) -> int:
    """Return the bytes of data, as KCL counts them for the throughput of a lease."""
    return _column_bytes(records, "data")


def _column_bytes(records: pa.Table, name: str) -> int:
    return sum(_value_bytes(chunk) for chunk in records.column(name).chunks)


def _value_bytes(array: pa.Array) -> int:
    if len(array) == 0:
        return 0
    offsets = np.frombuffer(array.buffers()[1], np.int32)
    return int(offsets[array.offset + len(array)]) - int(offsets[array.offset])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one lease: what a read has brought, or a range of a batch.

    Attributes:
        lease_key: The lease.
        records: De-aggregated records (`RECORD_SCHEMA`) in shard order.
        after: First position (exclusive).
        through: Last position (inclusive). It may be after the last row, if the rows at the end
            were filtered out.
        bytes: Payload bytes of the records.
        millis_behind_latest: Lag behind the latest record. None: unknown.
        shard_end: The shard ends here and has these children. `through` is still a number, or
            `after` if there are no rows. The worker checkpoints SHARD_END after the batch.
        lost: The stream does not list the shard any more, so records after `through` cannot be
            read. `shard_end` has the oldest shards that follow it.
        rejected: KPL aggregates of this chunk that were not de-aggregated. The code that buffers
            the chunk emits the event.
        oldest_at: When the first record arrived, in seconds of this process's monotonic clock (see
            `worker.status.Lag`). None: no record, or not computed.
    """

    lease_key: str
    records: pa.Table
    after: Position
    through: Position
    bytes: int
    millis_behind_latest: int | None = None
    shard_end: tuple[ChildShard, ...] | None = None
    lost: bool = False
    rejected: AggregatesRejected | None = None
    oldest_at: float | None = None

    @property
    def record_count(self) -> int:
        """Number of records."""
        return int(self.records.num_rows)

    @property
    def data_bytes(self) -> int:
        """Bytes of the records' data, without partition keys."""
        return data_bytes(self.records)

    @property
    def arrival_micros(self) -> tuple[int, ...]:
        """Sample of the records' arrival times (epoch microseconds)."""
        return sampled_arrivals(self.records)


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


class ShardRead(Protocol):
    """What one read of a shard has brought: a `Chunk`, or a range of an executor.

    Attributes:
        lease_key: The lease of the shard.
        after: First position (exclusive).
        through: Last position (inclusive).
        record_count: Number of records.
        bytes: Payload bytes of the records.
        data_bytes: Bytes of the records' data, without partition keys.
        arrival_micros: Sample of the records' arrival times (epoch microseconds).
        oldest_at: When the first record arrived, in monotonic seconds. None: no record, or unknown.
        shard_end: The shard ends here and has these children. None: it does not end here.
        lost: The stream does not list the shard any more.
    """

    @property
    def lease_key(self) -> str: ...  # noqa: D102 (see Attributes)

    @property
    def after(self) -> Position: ...  # noqa: D102

    @property
    def through(self) -> Position: ...  # noqa: D102

    @property
    def record_count(self) -> int: ...  # noqa: D102

    @property
    def bytes(self) -> int: ...  # noqa: D102

    @property
    def data_bytes(self) -> int: ...  # noqa: D102

    @property
    def arrival_micros(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def oldest_at(self) -> float | None: ...  # noqa: D102

    @property
    def shard_end(self) -> tuple[ChildShard, ...] | None: ...  # noqa: D102

    @property
    def lost(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of several shards that are committed together, from their read to their commit.

    A source makes it with what was read. Each step returns another one that has its result, too. A
    batch with failing records may be split: then each part is a batch of its own.

    Attributes:
        batch_id: Identifies the batch in logs and events.
        ranges: What is committed, one chunk per lease. There may be none: then only ends of shards
            were read. Failing records that a search has found are not among theirs.
        records: The records of all ranges (`RECORD_SCHEMA`), in their order.
        loaded: Whether this process has read the records. False: executors have read and written
            the ranges, and `records` is empty until this process reads them again.
        read: The reads that the batch was made of, also those outside of its ranges. A part of a
            batch has the reads of the whole batch.
        milliseconds: How long the steps up to now have taken, by their names.
        files: The files with the rows of the output. Readers of the table do not see them until
            they are committed. None: the batch is not written yet. Empty: its output has no rows.
        output_schema: Columns of the output. None: it has no rows, and its columns are not known.
        rejected: The records that the transform returned as dead letters (`REJECTED_SCHEMA`).
            None of their rejected rows is in the files. None: there are no such records.
        failed: Records that failed, by lease key (`worker.failures.FAILED_SCHEMA`). They are in
            none of the files.
        version: A version of the table that has the batch. None: it is not committed, or there is
            no table because no batch has had a row yet.
    """

    batch_id: str
    ranges: tuple[Chunk, ...]
    records: pa.Table
    loaded: bool = True
    read: tuple[ShardRead, ...] = ()
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    files: tuple[DataFile, ...] | None = None
    output_schema: pa.Schema | None = None
    rejected: pa.Table | None = None
    failed: Mapping[str, pa.Table] = field(default_factory=dict)
    version: int | None = None

    @property
    def lease_keys(self) -> tuple[str, ...]:
        """The leases of the ranges, in their order."""
        return tuple(chunk.lease_key for chunk in self.ranges)

    @property
    def written_files(self) -> tuple[DataFile, ...]:
        """The files to commit.

        Raises:
            ValueError: The batch is not written. Its commit would skip its records.
        """
        if self.files is None:
            raise ValueError(f"the batch {self.batch_id} is not written yet")
        return self.files

    @property
    def output_rows(self) -> int:
        """Number of rows in the files."""
        return sum(file.rows for file in self.files or ())

    def unwritten(self) -> Batch:
        """Return the batch as before its `write`. It must be written again."""
        return replace(self, files=None, output_schema=None, rejected=None)

    def by_lease(self, amount: Callable[[ShardRead], int]) -> dict[str, int]:
        """Return the sum of an amount, such as bytes, over the reads of each range by lease key.

        Failing records are included.
        """
        totals = dict.fromkeys(self.lease_keys, 0)
        reached = {chunk.lease_key: chunk.after for chunk in self.ranges}
        for read in self.read:
            if reached.get(read.lease_key) == read.after:
                totals[read.lease_key] += amount(read)
                reached[read.lease_key] = read.through
        return totals

    def oldest_by_lease(self) -> dict[str, float]:
        """Return when the oldest record of each range arrived, in monotonic seconds, if known."""
        keys, oldest = set(self.lease_keys), dict[str, float]()
        for read in self.read:
            if read.oldest_at is not None and read.lease_key in keys:
                oldest.setdefault(read.lease_key, read.oldest_at)
        return oldest


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


@dataclass(frozen=True, slots=True)
class PartFailure:
    """Why the transform fails on a part of a batch.

    Attributes:
        error: The error in one line.
        suspects: The rows of the part where the failing record probably is. Empty: unknown. It is a
            guess from the number of rows that the transform had returned. Use it to choose which
            rows to evaluate next, never to conclude that a record fails or does not.
    """

    error: str
    suspects: range = range(0)


class BatchWriter(Protocol):
    """Turns a batch into files by means of the user's transform.

    The Arrow path has `delta.files.ArrowBatchWriter`, the Spark path
    `spark.writer.SparkBatchWriter`.
    """

    def write(self, batch: Batch) -> Batch:
        """Transform and write a batch. The transform is not called for a batch without records.

        Returns:
            The batch with its files, their columns, and the records that the transform rejected.

        Raises:
            TransformFailedError: The transform raised.
            SinkError: The files could not be written.
        """

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[PartFailure | None]:
        """Run the transform on each part of a batch alone, and write nothing.

        It may find only failures of the kind that the last `write` had: records on which the
        transform raises, or values that the table cannot hold. `write` finds the others.

        Args:
            slices: Slices of a batch's records, none of them empty.

        Returns:
            The failure of each part; None where the transform succeeds.

        Raises:
            SinkError: The transform could not be run.
        """


MAX_ERROR_CHARACTERS: Final = 500
"""Longest text of an error.

The text is stored in logs, Dagster's database and the dead-letter table. An exception's message may
contain the payload of a record.
"""

_PACKAGE: Final = str(Path(__file__).parent)
_STANDARD_LIBRARY: Final = tuple(
    {path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))}
)
_INSTALLED: Final = re.compile(
    r"(^|[/\\])(site-packages|dist-packages|pyspark\.zip|py4j-[^/\\]*\.zip)([/\\]|$)"
    r"|[/\\]lib[/\\]python\d+(\.\d+)?[/\\]|^<frozen |\.p(yx|xi|xd)$"
)
_SPARK_CLIENT: Final = re.compile(r"(^|[/\\])(pyspark|py4j)([/\\.-]|$)")
_FRAME: Final = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


_FAILURES: Final = {"CancelledError", "PanicException"}
"""Names of errors of asyncio and of libraries in Rust, which are no subclass of `Exception`."""


def is_failure(error: BaseException) -> bool:
    """Return whether an error that a user's function raises is a failure of its records.

    `sys.exit()` is one, too: it would end the worker, with the exit code of a complete drain.
    """
    return isinstance(error, Exception | SystemExit) or type(error).__name__ in _FAILURES


def message_of(error: BaseException) -> str:
    """The message of an error; empty if the error cannot make it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the class may be the user's)
        return ""


def error_line(error: BaseException) -> str:
    """The error's type, the first line of its message, and its frame in the user's code.

    At most `MAX_ERROR_CHARACTERS` printable characters.
    """
    lines = [line for line in message_of(error).strip().splitlines() if line.strip()]
    text = type(error).__name__ + (f": {lines[0].strip()}" if lines else "")
    return with_frame(text, frame_of(error.__traceback__))


def with_frame(text: str, frame: str | None) -> str:
    """The first line of `text` and the frame. Only the text is shortened."""
    end = "" if frame is None else f" ({frame})"
    line = text.strip().partition("\n")[0].strip()
    most = MAX_ERROR_CHARACTERS - len(end)
    shown = printable(line, most)
    return (shown if len(shown) <= most else f"{shown[: most - 3]}...") + end


def frame_of(raised_at: TracebackType | None) -> str | None:
    """The innermost frame of the user's code, outside this package and installed packages.

    Without such a frame, the innermost frame outside this package and Spark's client; else None.
    """
    return _innermost(
        [(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(raised_at)]
    )


def frame_in(text: str) -> str | None:
    """Like `frame_of`, for the printed traceback of a Python process of Spark."""
    return _innermost([(file, int(line), name) for file, line, name in _FRAME.findall(text)])


def _innermost(frames: list[tuple[str, int, str]]) -> str | None:
    foreign = [
        frame
        for frame in frames
        if not frame[0].startswith(_PACKAGE + os.sep) and not _SPARK_CLIENT.search(frame[0])
    ]
    own = [
        frame
        for frame in foreign
        if not _INSTALLED.search(frame[0]) and not frame[0].startswith(_STANDARD_LIBRARY)
    ]
    if not foreign:
        return None
    file, line, name = (own or foreign)[-1]
    # relative to the working directory if the file is below it
    path = file.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109 (a string is compared)
    return printable(f"{path}:{line} in {name}")


ERROR_COLUMN: Final = "_error"
_POSITION: Final = ("shard_id", "sequence_number", "sub_sequence_number")
_STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class RejectedColumns:
    """The output columns with the error and the position of a rejected row.

    Attributes:
        positions: By column of `REJECTED_SCHEMA`, the output column, if it exists.
        dropped: Output columns that are not written to the table.
    """

    positions: dict[str, str]
    dropped: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All output columns that describe rejected rows."""
        return (ERROR_COLUMN, *self.positions.values())


def rejected_columns(schema: pa.Schema) -> RejectedColumns | None:
    """Find the columns that describe rejected rows; None without `_error`.

    The check applies to the first batch, also without rejected rows.

    Raises:
        BrokenTransformError: The columns do not identify the records of rejected rows.
    """
    names = schema.names
    if ERROR_COLUMN not in names:
        return None
    positions = {
        name: f"_{name}" if f"_{name}" in names else name
        for name in (_STREAM, *_POSITION)
        if name in names or f"_{name}" in names
    }
    missing = [name for name in _POSITION if name not in positions]
    if missing:
        raise BrokenTransformError(
            f"the transform returns {ERROR_COLUMN} without {', '.join(missing)}; return these "
            "columns of the records too, with a leading underscore "
            f"(_{missing[0]}) to keep them out of the table"
        )
    for name, column in {**positions, "error": ERROR_COLUMN}.items():
        kind, required = schema.field(column).type, REJECTED_SCHEMA.field(name).type
        if not _fits(kind, required):
            raise BrokenTransformError(
                f"the transform returns {column} as {kind}; return it as {required}"
            )
    hidden = [f"_{name}" for name in (_STREAM, *_POSITION) if f"_{name}" in names]
    return RejectedColumns(positions, (ERROR_COLUMN, *hidden))


def split_rejected(output: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Split an output into the rows for the table and the rejected rows.

    Returns:
        The rows for the table, and the rejected rows with `REJECTED_SCHEMA` (None without any).

    Raises:
        BrokenTransformError: As in `rejected_columns`.
    """
    columns = rejected_columns(output.schema)
    if columns is None:
        return output, None
    kept = output.drop_columns(list(columns.dropped))
    errors = output.column(ERROR_COLUMN)
    if errors.null_count == len(errors):
        return kept, None
    is_rejected = pc.is_valid(errors)
    try:
        found = [
            _plain(output.column(columns.positions[field.name]))
            .filter(is_rejected)
            .cast(field.type)
            if field.name in columns.positions
            else pa.nulls(len(errors) - errors.null_count, field.type)
            for field in REJECTED_SCHEMA
            if field.name != "error"
        ]
        texts = pa.array(_texts(_plain(errors).filter(is_rejected)), pa.string())
        table = pa.Table.from_arrays([*found, texts], schema=REJECTED_SCHEMA)
        table.validate(full=True)
    except pa.ArrowException as error:
        raise BrokenTransformError(
            f"the transform returns {ERROR_COLUMN} with position columns that are not those of "
            f"records: {with_frame(str(error), None)}"
        ) from error
    return _filtered(kept, pc.invert(is_rejected)), table


def _filtered(table: pa.Table, chosen: pa.ChunkedArray) -> pa.Table:
    """The chosen rows, of all types: pyarrow does not filter views."""
    try:
        return table.filter(chosen)
    except pa.ArrowNotImplementedError:
        edges = np.flatnonzero(np.diff(chosen.to_numpy().astype(np.int8), prepend=0, append=0))
        pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        slices = [table.slice(begin, end - begin) for begin, end in pairs]
        return pa.concat_tables(slices) if slices else table.slice(0, 0)


def _texts(errors: pa.ChunkedArray) -> list[str]:
    """The errors as printable lines. They may quote bytes of a record that are not UTF-8."""
    return [
        with_frame(text.decode(errors="backslashreplace"), None)
        for text in errors.cast(pa.binary()).to_pylist()
    ]


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values without a dictionary, and without the layout of views."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.chunked_array(
            [_plain_chunk(chunk.dictionary).take(chunk.indices) for chunk in column.chunks],
            _plain_chunk(pa.array([], kind.value_type)).type,
        )
    chunks = [_plain_chunk(chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, chunks[0].type if chunks else kind)


def _plain_chunk(chunk: pa.Array) -> pa.Array:
    if pa.types.is_string_view(chunk.type):
        return chunk.cast(pa.binary_view()).cast(pa.binary())
    return chunk


def _fits(kind: pa.DataType, required: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _fits(kind.value_type, required)
    if pa.types.is_integer(required):
        return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


ArrowTransform = Callable[[pa.Table], pa.Table]


def apply_arrow_transform(transform: ArrowTransform | None, records: pa.Table) -> pa.Table:
    """Call the user's function; None returns the records unchanged.

    Raises:
        TransformFailedError: The function raised an error.
        BrokenTransformError: The function did not return a table.
    """
    if transform is None:
        return records
    try:
        result = transform(records)
    except TransformFailedError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        line = error_line(error)
        raise TransformFailedError(
            f"the transform failed on {records.num_rows} records: {line}", detail=line
        ) from error
    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if not isinstance(result, pa.Table):
        raise BrokenTransformError(
            f"the transform returned {type(result).__name__}; write a function that returns "
            "a pyarrow.Table"
        )
    return result


def probe_arrow_transform(
    transform: ArrowTransform | None,
    slices: Sequence[pa.Table],
    check: Callable[[pa.Table], object] = lambda _: None,
) -> list[PartFailure | None]:
    """Call the function on each part. Returns its failure or None (see `BatchWriter.probe`).

    Args:
        transform: The function.
        slices: Parts of a batch.
        check: Gets the result of a part, and raises `TransformFailedError` if it cannot be written.
    """
    return [_failure_on(transform, part, check) for part in slices]


def _failure_on(
    transform: ArrowTransform | None, records: pa.Table, check: Callable[[pa.Table], object]
) -> PartFailure | None:
    try:
        check(apply_arrow_transform(transform, records))
    except TransformFailedError as error:
        return PartFailure(error.detail)
    return None

"""Write Parquet files that a later commit adds to a table.

`ArrowBatchWriter` is the writer of the Arrow path. It calls the transform and writes the same table
with about a fifth of the CPU time that Spark's writer takes. Spark's tasks call `write_table`.

Every batch gets a new folder. Its name never starts with `_` or `.`: vacuum ignores such folders,
and it must find the files of abandoned batches.

Statistics, by which readers skip files, are at the end of this module.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kcl_pipeline.batch import (
    NOTHING_WRITTEN,
    ArrowTransform,
    Batch,
    DataFile,
    PartFailure,
    Written,
    apply_arrow_transform,
    probe_arrow_transform,
    split_rejected,
)
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.results import TableColumns, partition_folder, untyped
from kcl_pipeline.delta.storage import Storage, first_line, table_root
from kcl_pipeline.errors import SinkError
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.threads import DaemonPool

_BYTES_OF_A_FILE: Final = 32 * 1024 * 1024


class ArrowBatchWriter:
    """A `BatchWriter` without Spark.

    Rows with a string in the column `_error` are not written: see `transform.rejected`. A batch
    becomes one file per 32 MiB, at most one per thread (and combination of partition values).

    Args:
        transform_arrow: Gets the batch's records (`RECORD_SCHEMA`, at least one row) and returns a
            table; None writes the records unchanged. Its result must depend on its input alone,
            because a range that is read again must yield the same rows.
        table_uri: Address of the table.
        partition_by: Partition columns of the table.
        storage_options: Options of delta-rs for the table's store.
        storage: The table's storage. None: it is opened with `storage_options`.
        threads: Threads that write files. None: one per core.
        memory: Counts the result. None: it is not counted.
        columns: Returns the columns that a result must fit. None: it fits any table.
    """

    def __init__(
        self,
        transform_arrow: ArrowTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        *,
        storage: Storage | None = None,
        threads: int | None = None,
        memory: MemoryBudget | None = None,
        columns: Callable[[], TableColumns] | None = None,
    ) -> None:
        self._transform = transform_arrow
        self._partition_by = tuple(partition_by)
        self._columns = columns or (lambda: TableColumns(partition_by=tuple(partition_by)))
        self._storage = storage or open_storage(table_root(table_uri), storage_options)
        self._threads = threads or os.cpu_count() or 1
        self._clock = SystemClock()
        self._pool: DaemonPool | None = None
        self._memory = memory
        self.before_files: Callable[[], None] = lambda: None
        """Called after the transform, before the first file of a batch."""

    def write(self, batch: Batch) -> Written:
        """Transform and write a batch (see `BatchWriter.write`)."""
        return self.write_into(batch, batch_folder(batch.batch_id))

    def write_into(self, batch: Batch, folder: str) -> Written:
        """Like `write`, into a folder that no other call uses."""
        if self._transform is not None and not batch.records.num_rows:
            return NOTHING_WRITTEN
        output, rejected = split_rejected(apply_arrow_transform(self._transform, batch.records))
        if not output.num_rows:
            return Written((), None, 0, rejected)
        table = self._columns().convert(output)
        counting: AbstractContextManager[None] = nullcontext()
        # The records themselves are counted already. A result may share their buffers.
        if self._memory is not None and self._transform is not None:
            counting = self._memory.counting("result", table.nbytes)
        self.before_files()
        with counting:
            files = self._files(table, folder, int(self._clock.wall() * 1000))
        typed = [
            field.with_nullable(table.column(field.name).null_count > 0) for field in table.schema
        ]
        schema = pa.schema([*typed, *untyped(output.schema, table.schema)])
        return Written(files, schema, table.num_rows, rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Call the transform on each part in turn (see `BatchWriter.probe`)."""
        columns = self._columns()
        return probe_arrow_transform(
            self._transform,
            slices,
            lambda output: columns.convert(split_rejected(output)[0], alone=True),
        )

    def _files(self, table: pa.Table, folder: str, millis: int) -> tuple[DataFile, ...]:
        """Write a large table in parts of equal length, in parallel.

        One part is encoded while another waits for the disk or the object store.
        """
        parts = min(1 + table.nbytes // _BYTES_OF_A_FILE, self._threads, max(table.num_rows, 1))
        edges = [table.num_rows * number // parts for number in range(parts + 1)]

        def write(number: int) -> tuple[DataFile, ...]:
            rows = table.slice(edges[number], edges[number + 1] - edges[number])
            return write_table(
                self._storage,
                folder,
                rows,
                self._partition_by,
                modified_millis=millis,
                part=f"part-{number}",
            )

        if parts == 1:
            return write(0)
        # Kept for later batches: new threads would allocate their encoding memory again, which
        # takes a tenth of the time.
        self._pool = self._pool or DaemonPool(self._threads, "write")
        written = [self._pool.submit(write, number) for number in range(parts)]
        wait(written)  # also after a failure, so that no thread writes after this call
        return tuple(file for files in written for file in files.result())


_PARTITION_DATE: Final = r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NUMBER: Final = r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?"
_FORMS: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pa.types.is_string, r"[^\0]*"),
    (pa.types.is_signed_integer, r"-?[0-9]{1,19}"),
    (pa.types.is_date32, _PARTITION_DATE),
    (pa.types.is_timestamp, _PARTITION_DATE + r"[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z?"),
    (pa.types.is_boolean, "true|false"),
    (pa.types.is_decimal, _NUMBER),
    (pa.types.is_floating, _NUMBER + "|-?(Infinity|inf)|NaN|nan"),
)
"""The form of a value by the type of its column. pyarrow alone accepts more than readers do."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The part of a table's metadata that decides which files fit.

    Attributes:
        digest: Hash of the table id, the partition columns and the schema. A batch that was checked
            against one digest fits every table with an equal digest.
        partitions: The partition columns in the table's order, with their types.
    """

    digest: str
    partitions: Mapping[str, pa.DataType]

    def problem(self, values: Mapping[str, str | None]) -> str | None:
        """Why a file with these partition values does not fit; None if it fits."""
        if set(values) != set(self.partitions):
            return f"its partition columns are not {list(self.partitions)}"
        for name, kind in self.partitions.items():
            value = values[name]
            if value is not None and not _is_of_type(value, kind):
                return f"a value of the partition column {name} is not of type {kind}"
        return None


def _is_of_type(value: str, kind: pa.DataType) -> bool:
    form = next((form for applies, form in _FORMS if applies(kind)), None)
    if form is None or re.fullmatch(form, value, re.DOTALL) is None:
        return False
    try:
        if pa.types.is_decimal(kind):  # the cast of a string does not notice an overflow
            pa.scalar(Decimal(value), kind)
        elif pa.types.is_timestamp(kind):  # the cast wants a zone for one of the two kinds alone
            pa.scalar(value.removesuffix("Z")).cast(pa.timestamp("us"))
        else:
            pa.scalar(value).cast(kind)
    except (InvalidOperation, pa.ArrowInvalid):
        return False
    return True


BATCH_FOLDER: Final = "batches"
_PAGE_BYTES: Final = 1024 * 1024
"""Size of a data page.

With smaller ones, pyarrow's buffers begin at the same offset of a memory page. Then glibc (2.36)
copies at a third of the speed on AMD processors, which doubles the time to write a file.
"""
_ENCODED_BYTES: Final = 1024 * 1024
_MAX_ENCODED_ROWS: Final = 2048
"""Rows that are encoded at a time, at most these and with about so many bytes."""
_MAX_FOLDERS_BYTES: Final = 512
"""Longest path of the folders of a file. S3 has keys of at most 1,024 bytes."""
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9.-]+")


def unique_name() -> str:
    """A globally unique name.

    It does not use a seeded generator: two processes with one seed would overwrite each other's
    committed files.
    """
    return uuid.uuid4().hex


def batch_folder(batch_id: str) -> str:
    """A new folder for one attempt at a batch, relative to the table's root.

    Two attempts never share a file name, even in two processes. All files of the attempt are below
    this folder. Its unique part is the name of the attempt's announcement (`announcements`).
    """
    name = _NOT_IN_A_NAME.sub("-", batch_id).strip("-.")[:80] or "batch"
    return f"{BATCH_FOLDER}/{name}-{unique_name()}"


def partition_value(value: Any) -> str | None:
    """Format a partition value as in the Delta log. None and the empty string are null there."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime):
        # Spark reads a value without `Z` in the time zone of its session.
        return (
            value.isoformat(" ")
            if value.tzinfo is None
            else f"{value.astimezone(dt.UTC).replace(tzinfo=None).isoformat()}Z"
        )
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def partition_folders(values: Mapping[str, str | None]) -> str:
    """Return the folders of a file, with a slash at the end.

    The log has the values, too, and Delta's readers use these. polars uses the folders. Without
    partition columns, and for values that are too long together, there is no folder.
    """
    folders = [partition_folder(name, value) for name, value in values.items()]
    path = "".join(f"{one}/" for one in folders if one is not None)
    return path if None not in folders and len(path) <= _MAX_FOLDERS_BYTES else ""


def split_by(
    table: pa.Table, partition_by: Sequence[str]
) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Split a table by the values of its partition columns.

    Yields:
        The partition values, and their rows in order without the partition columns.
    """
    if not partition_by:
        yield {}, table
        return
    combined = np.zeros(table.num_rows, dtype=np.int64)
    for name in partition_by:
        codes = pc.dictionary_encode(table.column(name).combine_chunks(), null_encoding="encode")
        if isinstance(codes, pa.ChunkedArray):
            codes = codes.combine_chunks()
        _, combined = np.unique(
            combined * (len(codes.dictionary) + 1) + codes.indices.to_numpy(zero_copy_only=False),
            return_inverse=True,
        )
    order = np.argsort(combined, kind="stable")
    starts = np.flatnonzero(np.diff(combined[order], prepend=-1))
    rest = table.drop_columns(list(partition_by))
    for begin, end in zip(starts, [*starts[1:], len(order)], strict=True):
        values = {
            name: partition_value(table.column(name)[int(order[begin])].as_py())
            for name in partition_by
        }
        yield values, rest.take(pa.array(order[begin:end]))


def write_parquet(table: pa.Table, into: pa.NativeFile) -> tuple[int, str]:
    """Write the table as a Parquet file; return its size in bytes and its statistics.

    Binary columns and sequence numbers get no dictionary, because their values rarely repeat.
    """
    repeating = [
        path
        for field in table.schema
        if field.name != "sequence_number"
        for path in _paths_with_dictionary(field.name, field.type)
    ]
    footers: list[pq.FileMetaData] = []
    row_bytes = max(int(table.nbytes) // max(int(table.num_rows), 1), 1)
    pq.write_table(
        table,
        into,
        compression="snappy",
        use_dictionary=repeating,
        coerce_timestamps="us",
        store_schema=False,
        data_page_size=_PAGE_BYTES,
        write_batch_size=max(min(_ENCODED_BYTES // row_bytes, _MAX_ENCODED_ROWS), 1),
        metadata_collector=footers,
    )
    return int(into.tell()), file_statistics(table, footers[0])


def _paths_with_dictionary(path: str, kind: pa.DataType) -> list[str]:
    """The names in Parquet of the values in a column that may repeat. pyarrow knows no others."""
    if pa.types.is_struct(kind):
        inner = {f"{path}.{one.name}": one.type for one in kind}
    elif pa.types.is_list(kind):
        inner = {f"{path}.list.element": kind.value_type}
    elif pa.types.is_map(kind):
        inner = {f"{path}.key_value.key": kind.key_type, f"{path}.key_value.value": kind.item_type}
    else:
        return [] if pa.types.is_binary(kind) else [path]
    return [one for name, type_ in inner.items() for one in _paths_with_dictionary(name, type_)]


def write_table(
    storage: Storage,
    folder: str,
    table: pa.Table,
    partition_by: Sequence[str],
    *,
    modified_millis: int,
    part: str = "part",
) -> tuple[DataFile, ...]:
    """Write a table (in Delta's types) below `folder`.

    Each combination of partition values gives one file. A table without rows gives no file.

    Raises:
        SinkError: A file cannot be written.
    """
    files = []
    if not table.num_rows:
        return ()
    for number, (values, rows) in enumerate(split_by(table, partition_by)):
        path = f"{folder}/{partition_folders(values)}{part}-{number:05d}.parquet"
        try:
            with storage.create(path) as stream:
                size, statistics = write_parquet(rows, stream)
        except OSError as error:
            raise SinkError(f"could not write {path}: {first_line(error)}") from error
        files.append(DataFile(path, size, rows.num_rows, values, modified_millis, statistics))
    return tuple(files)


# Statistics of data files in the Delta log, by which readers skip files.
#
# The minimum, the maximum and the number of nulls of each column come from the footer of the
# Parquet file, so no value is read again. A bound may be wider than the values, and is never
# narrower:
#
# - A string is cut to `MAX_CHARACTERS`. Then the last character of a maximum is the next larger
#   one.
# - A timestamp has milliseconds. A minimum is rounded down, a maximum up.
# - A column with a NaN has no bounds: Spark and DuckDB sort NaN after all numbers, and Parquet
#   leaves it out of the maximum.
# - A decimal with more digits than a double has no bounds, because readers parse JSON numbers as
#   doubles.
#
# Binary values, booleans, lists and maps have no bounds, and a list or map no number of nulls.
#
# The writer collects all columns. The commit keeps those that the table's properties name, and only
# values of the type of their column (`log_statistics`): the files may be those of another writer.

MAX_CHARACTERS: Final = 32
DEFAULT_INDEXED: Final = 32
"""Columns with statistics, if the table has no property for them."""
_EXACT_DIGITS: Final = 15
_LAST_CHARACTER: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z?")
_BOUNDED: Final[tuple[Callable[[pa.DataType], bool], ...]] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_string,
    pa.types.is_large_string,
)
_PROPERTY: Final = "delta.dataSkipping"

Indexed = Mapping[str, "pa.DataType | Indexed"]
"""The columns with statistics; a struct has its fields."""

_Path = tuple[str, ...]


def file_statistics(table: pa.Table, footer: pq.FileMetaData) -> str:
    """Return the statistics of a file as JSON, without the number of rows.

    Args:
        table: The rows of the file.
        footer: Its metadata.
    """
    lower: dict[str, Any] = {}
    upper: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    for index, (path, kind) in enumerate(_leaves(table.schema)):
        if path is None:
            continue
        found = [group.column(index).statistics for group in groups]
        if any(one is None or not one.has_null_count for one in found):
            continue
        _put(nulls, path, sum(one.null_count for one in found))
        filled = [
            one for one, group in zip(found, groups, strict=True) if one.null_count < group.num_rows
        ]
        is_complete = bool(filled) and all(one.has_min_max for one in filled)
        if not is_complete or not _has_bounds(kind) or _has_nan(table, path, kind):
            continue
        try:
            least = _lower(min(one.min for one in filled))
            most = _upper(max(one.max for one in filled))
        except (ValueError, OverflowError):  # Python has no such date
            continue
        if least is not None:
            _put(lower, path, least)
        if most is not None:
            _put(upper, path, most)
    return json.dumps(
        {"minValues": lower, "maxValues": upper, "nullCount": nulls},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _leaves(schema: pa.Schema) -> Iterator[tuple[_Path | None, pa.DataType]]:
    """The columns of a Parquet file in their order. None: the path is inside of a list or map."""
    for field in schema:
        yield from _leaves_of((field.name,), field.type)


def _leaves_of(path: _Path | None, kind: pa.DataType) -> Iterator[tuple[_Path | None, pa.DataType]]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves_of(None if path is None else (*path, field.name), field.type)
    elif pa.types.is_map(kind):
        yield from _leaves_of(None, kind.key_type)
        yield from _leaves_of(None, kind.item_type)
    elif pa.types.is_nested(kind):
        yield from _leaves_of(None, kind.value_type)
    else:
        yield path, kind


def _put(values: dict[str, Any], path: _Path, value: object) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _has_bounds(kind: pa.DataType) -> bool:
    return any(is_of(kind) for is_of in _BOUNDED)


def _has_nan(table: pa.Table, path: _Path, kind: pa.DataType) -> bool:
    if not pa.types.is_floating(kind):
        return False
    values = table.column(path[0])
    for name in path[1:]:
        values = pc.struct_field(values, name)
    return bool(pc.any(pc.is_nan(values)).as_py())


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_CHARACTERS]
    if isinstance(value, dt.datetime):
        return _time_text(value - dt.timedelta(microseconds=value.microsecond % 1000))
    return _either(value)


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_CHARACTERS else _after(value[:MAX_CHARACTERS])
    if isinstance(value, dt.datetime):
        return _time_text(value + dt.timedelta(microseconds=-value.microsecond % 1000))
    return _either(value)


def _either(value: Any) -> Any:
    """A value that is its own bound. None: it has none."""
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        number = float(value)
        is_exact = len(value.as_tuple().digits) <= _EXACT_DIGITS and "e" not in repr(number)
        return number if is_exact else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else None


def _after(prefix: str) -> str | None:
    """A string after all strings that begin with the prefix. None: there is none."""
    for length in range(len(prefix), 0, -1):
        code = ord(prefix[length - 1]) + 1
        if code <= _LAST_CHARACTER:
            last = _SURROGATES.stop if code in _SURROGATES else code
            return prefix[: length - 1] + chr(last)
    return None


def _time_text(value: dt.datetime) -> str:
    zone = "" if value.tzinfo is None else "Z"
    instant = value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
    return instant.isoformat(timespec="milliseconds") + zone


# -- at the commit


def indexed_columns(
    schema: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
) -> Indexed:
    """Return the columns whose statistics go into the log, as the table's properties say.

    `delta.dataSkippingStatsColumns` names them; otherwise they are the first
    `delta.dataSkippingNumIndexedCols` ones, all with -1. A field of a struct counts as a column.
    """
    leaves = [
        (path, kind)
        for field in schema
        if field.name not in partition_by
        for path, kind in _leaves_of((field.name,), field.type)
    ]
    named = properties.get(f"{_PROPERTY}StatsColumns")
    if named is not None:
        names = [one.strip().replace("`", "") for one in named.split(",")]
        leaves = [
            (path, kind)
            for path, kind in leaves
            if path is not None
            and any(".".join(path[: end + 1]) in names for end in range(len(path)))
        ]
    else:
        given = properties.get(f"{_PROPERTY}NumIndexedCols", "")
        number = int(given) if re.fullmatch(r"-?[0-9]{1,9}", given) else DEFAULT_INDEXED
        leaves = leaves if number < 0 else leaves[:number]
    indexed: dict[str, Any] = {}
    for path, kind in leaves:
        if path is not None:
            _put(indexed, path, kind)
    return indexed


class _Statistics(msgspec.Struct):
    minValues: dict[str, Any] = msgspec.field(default_factory=dict)  # noqa: N815 (as in the log)
    maxValues: dict[str, Any] = msgspec.field(default_factory=dict)  # noqa: N815
    nullCount: dict[str, Any] = msgspec.field(default_factory=dict)  # noqa: N815


_DECODER: Final = msgspec.json.Decoder(_Statistics)


def log_statistics(rows: int, statistics: str, indexed: Indexed) -> str:
    """Return the `stats` of a file for the log.

    Args:
        rows: Number of rows in the file.
        statistics: From `file_statistics`, possibly of another writer; or empty.
        indexed: The columns of the table that have statistics.
    """
    content: dict[str, Any] = {"numRecords": rows}
    try:
        given = _DECODER.decode(statistics) if statistics else _Statistics()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        given = _Statistics()
    content["minValues"] = _kept(given.minValues, indexed, _fits)
    content["maxValues"] = _kept(given.maxValues, indexed, _fits)
    content["nullCount"] = _kept(
        given.nullCount, indexed, lambda value, _: _is_int(value) and 0 <= value <= rows
    )
    kept = {name: value for name, value in content.items() if value != {}}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def _kept(
    values: Mapping[str, Any], indexed: Indexed, fits: Callable[[Any, pa.DataType], bool]
) -> dict[str, Any]:
    """The values of the indexed columns that fit the type of their column."""
    kept: dict[str, Any] = {}
    for name, kind in indexed.items():
        value = values.get(name)
        if isinstance(kind, Mapping):
            inner = _kept(value, kind, fits) if isinstance(value, dict) else {}
            if inner:
                kept[name] = inner
        elif value is not None and fits(value, kind):
            kept[name] = value
    return kept


def _fits(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_integer(kind):
        limit = 2 ** (kind.bit_width - 1)
        return _is_int(value) and -limit <= value < limit
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
    if not isinstance(value, str):
        return False
    if pa.types.is_date(kind):
        return _DATE.fullmatch(value) is not None and _is_time(value)
    if pa.types.is_timestamp(kind):
        is_form = _TIME.fullmatch(value) and value.endswith("Z") == (kind.tz is not None)
        return bool(is_form) and _is_time(value)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_text and len(value) <= MAX_CHARACTERS


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(text: str) -> bool:
    try:
        dt.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True

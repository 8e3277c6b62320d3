"""Write Parquet files that a later commit adds to a table.

Every batch gets a new folder. Its name never starts with `_` or `.`: vacuum ignores such folders,
and it must find the files of abandoned batches.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.errors import first_line
from kcl_pipeline.delta.statistics import file_statistics
from kcl_pipeline.delta.storage import Storage
from kcl_pipeline.errors import SinkError

_DATE: Final = r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NUMBER: Final = r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?"
_FORMS: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pa.types.is_string, r"[^\0]*"),
    (pa.types.is_signed_integer, r"-?[0-9]{1,19}"),
    (pa.types.is_date32, _DATE),
    (pa.types.is_timestamp, _DATE + r"[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z?"),
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
            if value is not None and not _fits(value, kind):
                return f"a value of the partition column {name} is not of type {kind}"
        return None


def _fits(value: str, kind: pa.DataType) -> bool:
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
_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_MAX_FOLDER_BYTES: Final = 255
"""Longest name of a folder on a local disk."""
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


def partition_folder(name: str, value: str | None) -> str | None:
    """Return the folder `column=value` of a partition value, encoded as in a URL.

    delta-rs uses such a name when it compacts a table.

    Returns:
        The name. None: the value is too long for the name of a folder.
    """
    encoded = _NULL_FOLDER if value is None else _encoded(value)
    folder = f"{_encoded(name)}={encoded}"
    return folder if len(folder) <= _MAX_FOLDER_BYTES else None


def _encoded(text: str) -> str:
    # delta-rs does not find a file again whose name has a `~`.
    return quote(text, safe="").replace("~", "%7E")


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

"""Parquet files that belong to no commit yet: where they go, how they are written, how a table is
cut by its partition columns.

The folder of a batch is new with every call and never begins with `_` or `.`: such folders are
hidden from vacuum, and a batch that was given up must be found by it.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.errors import first_line
from kcl_pipeline.delta.storage.storage import Storage
from kcl_pipeline.errors import SinkError

BATCH_FOLDER: Final = "batches"
_PAGE_BYTES: Final = 512 * 1024
"""Of a column's values in a file: half of pyarrow's own, so that a page with its compressed copy
stays in a processor's cache (a fifth less time).
"""
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9.-]+")


def unique_name() -> str:
    """A name that nobody else has. Not from a seeded generator: two processes with one seed would
    write over each other's committed files.
    """
    return uuid.uuid4().hex


def batch_folder(batch_id: str) -> str:
    """A new folder for one attempt at a batch, relative to the table's root: two attempts never
    share a file name, also not in two processes. All files of the attempt are below it; its unique
    part names the attempt's announcement (`announcements`).
    """
    name = _NOT_IN_A_NAME.sub("-", batch_id).strip("-.")[:80] or "batch"
    return f"{BATCH_FOLDER}/{name}-{unique_name()}"


def partition_value(value: Any) -> str | None:
    """A partition column's value as the Delta log spells it; None and the empty string are both
    null there.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f" if value.microsecond else "%Y-%m-%d %H:%M:%S")
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def split_by(
    table: pa.Table, partition_by: Sequence[str]
) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Cut a table by the values of its partition columns: the values and the rows, without those
    columns, in their order.
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
        rows = pa.array(order[begin:end])
        values = {
            name: partition_value(table.column(name)[int(order[begin])].as_py())
            for name in partition_by
        }
        yield values, rest.take(rows)


def write_parquet(table: pa.Table, into: pa.NativeFile) -> int:
    """The table as a Parquet file; returns its size.

    No dictionary for binary columns, which repeat rarely, nor for sequence numbers, which never do.
    """
    repeating = [
        field.name
        for field in table.schema
        if not pa.types.is_binary(field.type) and field.name != "sequence_number"
    ]
    pq.write_table(
        table,
        into,
        compression="snappy",
        use_dictionary=repeating,
        coerce_timestamps="us",
        store_schema=False,
        data_page_size=_PAGE_BYTES,
    )
    return int(into.tell())


def write_table(
    storage: Storage,
    folder: str,
    table: pa.Table,
    partition_by: Sequence[str],
    *,
    modified_millis: int,
    part: str = "part",
) -> tuple[DataFile, ...]:
    """Write a table (in Delta's types) below `folder`, one file per combination of partition
    values; no rows, no file. Raises `SinkError`.
    """
    files = []
    if not table.num_rows:
        return ()
    for number, (values, rows) in enumerate(split_by(table, partition_by)):
        path = f"{folder}/{part}-{number:05d}.parquet"
        try:
            with storage.create(path) as stream:
                size = write_parquet(rows, stream)
        except OSError as error:
            raise SinkError(f"could not write {path}: {first_line(error)}") from error
        files.append(DataFile(path, size, rows.num_rows, values, modified_millis))
    return tuple(files)


def values_of_path(path: str, partition_by: Sequence[str]) -> Mapping[str, str | None]:
    """The partition values in a path that Spark wrote (`.../day=2026-01-01/part-0.parquet`),
    un-escaped; its null folder is None.
    """
    values: dict[str, str | None] = {}
    for step in path.split("/")[:-1]:
        name, equals, value = step.partition("=")
        if equals and (column := _unescape(name)) in partition_by:
            values[column] = None if value == "__HIVE_DEFAULT_PARTITION__" else _unescape(value)
    return values


def _unescape(text: str) -> str:
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), text)

"""From the records of a batch to Parquet files that a later commit adds to a table.

1. `ArrowBatchWriter`, the writer of the Arrow path. It calls the transform and writes the same
   table with about a fifth of the CPU time that Spark's writer takes.
2. The types. A batch is written with Delta's types (no unsigned integers, no dictionaries,
   microseconds only), so that the file, the log and every reader agree. Tables that are created
   here allow nulls in every column, as those of Spark's writer do.
3. `TableColumns` converts a result to the columns of its table, and refuses what the table cannot
   hold. This is the only place that does so. Every way to write a batch calls it before a file is
   written: the Arrow path, results of Spark in memory, and the tasks of executors. The search for
   failing records calls it, too, so a record with a value that the table cannot hold is isolated
   like a record on which the transform raises. Whole columns are converted and checked. A single
   value is only looked at after a column failed, to name it. Afterwards every reader can read the
   rows: deltalake, pandas, SQL engines and Spark.
4. `write_table` writes the files. Spark's tasks call it, too. Every batch gets a new folder. Its
   name never starts with `_` or `.`: vacuum ignores such folders, and it must find the files of
   abandoned batches.
5. Statistics, by which readers skip files.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kcl_pipeline.batch import (
    ArrowTransform,
    Batch,
    DataFile,
    PartFailure,
    apply_arrow_transform,
    error_line,
    probe_arrow_transform,
    split_rejected,
)
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import Storage, bounded, first_line, table_root
from kcl_pipeline.errors import (
    ResultMismatchError,
    SinkError,
    TableMismatchError,
    TransformFailedError,
)
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.text import printable
from kcl_pipeline.threads import DaemonPool

_BYTES_OF_A_FILE: Final = 32 * 1024 * 1024


class ArrowBatchWriter:
    """A `BatchWriter` without Spark.

    Rows with a string in the column `_error` are not written: see `batch.split_rejected`. A batch
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

    def write(self, batch: Batch) -> Batch:
        """Transform and write a batch (see `BatchWriter.write`)."""
        return self.write_into(batch, batch_folder(batch.batch_id))

    def write_into(self, batch: Batch, folder: str) -> Batch:
        """Like `write`, into a folder that no other call uses."""
        if self._transform is not None and not batch.records.num_rows:
            return replace(batch, files=())
        output, rejected = split_rejected(apply_arrow_transform(self._transform, batch.records))
        if not output.num_rows:
            return replace(batch, files=(), rejected=rejected)
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
        return replace(batch, files=files, output_schema=schema, rejected=rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Call the transform on each part in turn (see `BatchWriter.probe`)."""
        columns = self._columns()
        return probe_arrow_transform(
            self._transform,
            slices,
            lambda output: columns.convert(split_rejected(output)[0], alone=True),
        )

    def _files(self, table: pa.Table, folder: str, millis: int) -> tuple[DataFile, ...]:
        """Write a large table as files of equal length, in parallel.

        One file is encoded while another waits for the disk or the object store.
        """
        count = min(1 + table.nbytes // _BYTES_OF_A_FILE, self._threads, max(table.num_rows, 1))
        edges = [table.num_rows * number // count for number in range(count + 1)]

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

        if count == 1:
            return write(0)
        # Kept for later batches: new threads would allocate their encoding memory again, which
        # takes a tenth of the time.
        self._pool = self._pool or DaemonPool(self._threads, "write")
        written = [self._pool.submit(write, number) for number in range(count)]
        wait(written)  # also after a failure, so that no thread writes after this call
        return tuple(file for files in written for file in files.result())


_MAX_DECIMAL_PRECISION: Final = 38
"""Of the largest decimal of Delta."""
_UNSIGNED: Final = {
    "uint8": pa.int16(),
    "uint16": pa.int32(),
    "uint32": pa.int64(),
    "uint64": pa.int64(),
}
_SPARK_NAMES: Final = {
    "string": "string",
    "int64": "bigint",
    "int32": "int",
    "int16": "smallint",
    "int8": "tinyint",
    "bool": "boolean",
    "float": "float",
    "date32[day]": "date",
    "timestamp[us, tz=UTC]": "timestamp",
    "timestamp[us]": "timestamp_ntz",
}


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, without dictionary, runs and extension."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    return kind


def is_any_list(kind: pa.DataType) -> bool:
    """Whether the values are lists, in any of Arrow's layouts."""
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


# One branch per Arrow type; a table of predicates would be longer.
def delta_type(kind: pa.DataType) -> pa.DataType | None:  # noqa: C901
    """The Arrow type that a Delta table uses for `kind`.

    None if Delta has no such type, and for the null type, also inside of lists and structs.
    """
    kind = plain_type(kind)
    if pa.types.is_unsigned_integer(kind):
        return _UNSIGNED[str(kind)]
    if (
        pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
    ):
        return kind
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz is not None else None)
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_decimal(kind):
        return _decimal(kind)
    if pa.types.is_map(kind):
        key, item = delta_type(kind.key_type), delta_type(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if is_any_list(kind):
        element = delta_type(kind.value_type)
        return None if element is None else pa.list_(pa.field("element", element))
    if pa.types.is_struct(kind):
        fields = [(field.name, delta_type(field.type)) for field in kind]
        return (
            None
            if not fields or any(inner is None for _, inner in fields)
            else pa.struct([pa.field(name, inner) for name, inner in fields])
        )
    return None


def _decimal(kind: pa.DataType) -> pa.DataType | None:
    """The decimal with the same values whose scale is between 0 and its precision."""
    scale = max(kind.scale, 0)
    precision = max(kind.precision - min(kind.scale, 0), scale)
    return pa.decimal128(precision, scale) if precision <= _MAX_DECIMAL_PRECISION else None


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The schema in Delta's types, with all columns nullable.

    Columns of the null type are left out; see `untyped`.

    Raises:
        TableMismatchError: Delta has no such type, or two column names differ only in case.
    """
    fields, unknown = [], []
    for field in schema:
        kind = delta_type(field.type)
        if kind is not None:
            fields.append(pa.field(field.name, kind))
        elif not pa.types.is_null(field.type):
            unknown.append(f"{field.name}: {field.type}")
    if unknown:
        raise TableMismatchError(
            "the transform's output has columns that a Delta table cannot hold "
            f"({bounded(', '.join(unknown))}); cast them, to string for example"
        )
    lowered = [field.name.lower() for field in fields]
    twice = sorted({field.name for field in fields if lowered.count(field.name.lower()) > 1})
    if twice:
        raise TableMismatchError(
            f"the transform's output has a column twice ({bounded(', '.join(twice))}; "
            "names are compared without case); rename one"
        )
    return pa.schema(fields)


def untyped(schema: pa.Schema, written: pa.Schema | None = None) -> list[pa.Field]:
    """The columns of the null type, in which every value is null.

    They are written to no file, unless the table has the column, and so its type. Otherwise the
    column cannot be added (see `misfit`).

    Args:
        schema: The columns of a result.
        written: The columns of its files. None: none.
    """
    known = () if written is None else written.names
    return [
        pa.field(field.name, pa.null())
        for field in schema
        if field.name not in known and pa.types.is_null(plain_type(field.type))
    ]


def untyped_reason(names: Sequence[str]) -> str | None:
    """Why such columns cannot be in a new table; None without names."""
    if not names:
        return None
    return (
        f"every value of {bounded(', '.join(names))} is null and without a type; cast it to its "
        "type, to string for example, or leave it out"
    )


def missing_columns(table: pa.Schema, batch: pa.Schema) -> list[pa.Field]:
    """The batch's columns that the table does not have, in Delta's types.

    Names are compared without case, as in Delta.
    """
    known = {field.name.lower() for field in table}
    return [field for field in delta_schema(batch) if field.name.lower() not in known]


def misfit(table: pa.Schema, batch: pa.Schema) -> str | None:
    """Why a batch's columns do not fit the table, with the column names; None if they fit.

    A batch may lack a column that is nullable in the table. Both are compared in Delta's types.
    """
    theirs = {field.name.lower(): field for field in table}
    ours = {field.name.lower(): field for field in delta_schema(batch)}
    reasons = []
    for name, field in ours.items():
        known = theirs.get(name)
        if known is None:
            reasons.append(f"{field.name} ({named(field.type)}) is not in the table")
        elif known.name != field.name:
            reasons.append(f"{field.name} is named {known.name} in the table")
        elif delta_type(known.type) != field.type:
            reasons.append(
                f"{field.name} is {named(field.type)} in the output and "
                f"{named(known.type)} in the table"
            )
    reason = untyped_reason([f.name for f in untyped(batch) if f.name.lower() not in theirs])
    reasons += [reason] if reason else []
    reasons += [
        f"{field.name} is not nullable in the table, but nullable or missing in the output"
        for field in table
        if not field.nullable
        and (field.name not in batch.names or batch.field(field.name).nullable)
    ]
    return bounded("; ".join(reasons)) or None


def partition_misfit(schema: pa.Schema, partition_by: Sequence[str]) -> str | None:
    """Why these partition columns do not fit an output of this schema; None if they fit."""
    names = {field.name: field for field in schema}
    if not names:
        return "the transform's output has no columns"
    missing = [name for name in partition_by if name not in names]
    if missing:
        return (
            f"partition_by names {', '.join(missing)}, which the transform's output does not "
            f"have (it has {bounded(', '.join(names))})"
        )
    unsuitable = [
        f"{name} ({names[name].type})"
        for name in partition_by
        if pa.types.is_nested(names[name].type) or pa.types.is_binary(names[name].type)
    ]
    if unsuitable:
        return (
            f"a table cannot be partitioned by {', '.join(unsuitable)}; use a date, a number "
            "or a short string"
        )
    return (
        "every column of the output is in partition_by; remove at least one"
        if partition_by and len(partition_by) == len(names)
        else None
    )


def named(kind: pa.DataType) -> str:
    """The name of a type in messages: that of SQL, where it has one."""
    return _SPARK_NAMES.get(str(kind), str(kind))


_FIRST_DAY: Final = -719_162
_LAST_DAY: Final = 2_932_896
"""The days of the years 1 and 9999. Python, and so Spark and pandas, read no others."""
_DAY_MICROS: Final = 86_400_000_000
_FIRST_MICROS: Final = _FIRST_DAY * _DAY_MICROS
_LAST_MICROS: Final = (_LAST_DAY + 1) * _DAY_MICROS - 1
_CHUNK_BYTES: Final = 2**31 - 1
"""Most bytes of a string column in one array of Delta's types."""
_SHORT_BYTES: Final = 40
"""A string of at most these bytes is short enough for the folder of a partition."""
_SHOWN: Final = 80
"""Most characters of a value in an error."""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """What a result must fit. Sent to the tasks of executors.

    Attributes:
        schema: The columns of the table. None: it does not exist yet, and any columns fit.
        partition_by: Its partition columns.
        may_add: Whether columns that it does not have are added.
        table: Names the table in errors.
    """

    schema: pa.Schema | None = None
    partition_by: tuple[str, ...] = ()
    may_add: bool = False
    table: str = "the table"

    def fitted(self, result: pa.Schema) -> pa.Schema:
        """Return the columns that are written for a result with these columns.

        Columns without a type (`pa.null()`) are not written: readers see null in them.

        Raises:
            ResultMismatchError: The columns do not fit the table, whatever their values are.
        """
        fields, reasons = self._fields(result)
        schema = pa.schema(fields)
        reason = "; ".join(reasons) or partition_misfit(schema, self.partition_by)
        if reason:
            raise ResultMismatchError(
                f"the transform's output does not fit {self.table}: {bounded(reason)}"
            )
        return schema

    def convert(self, result: pa.Table, *, alone: bool = False) -> pa.Table:
        """Return the result in the columns of the table.

        Args:
            result: The result, without the columns of rejected rows.
            alone: Whether the result is one of a part of a batch that is only examined. The type of
                an empty list may then come from other records, so its absence is no error.

        Raises:
            ResultMismatchError: As in `fitted`.
            TransformFailedError: The table cannot hold a value. The error names column and value.
        """
        fields, reasons = self._fields(result.schema, alone=alone)
        schema = pa.schema(fields)
        if not result.num_rows:
            return schema.empty_table()
        reason = "; ".join(reasons)
        if not reason and not alone:
            reason = partition_misfit(schema, self.partition_by) or ""
        if reason:
            raise ResultMismatchError(
                f"the transform's output does not fit {self.table}: {bounded(reason)}"
            )
        try:
            columns = [
                pa.chunked_array(
                    [
                        _converted(piece, field, field.name)
                        for chunk in result.column(field.name).chunks
                        for piece in _pieces(chunk)
                    ],
                    field.type,
                )
                for field in schema
            ]
            for name in self.partition_by:
                _check_partition(columns[schema.get_field_index(name)], schema.field(name))
        except _UnfitError as error:
            raise failed_result(f"column {error}") from None
        except Exception as error:
            raise failed_result(error_line(error)) from error
        return pa.Table.from_arrays(columns, schema=schema)

    def _fields(
        self, result: pa.Schema, *, alone: bool = False
    ) -> tuple[list[pa.Field], list[str]]:
        """Return the columns to write, and why columns do not fit."""
        known = {} if self.schema is None else {one.name.lower(): one for one in self.schema}
        fields, fit, seen = [], _Fit(alone=alone), set()
        for field in result:
            name, at = field.name.lower(), known.get(field.name.lower())
            if not name:
                fit.reasons.append("a column has no name; rename it")
            elif name in seen:
                fit.reasons.append(
                    f"{field.name} is there twice (names are compared without case); rename one"
                )
            elif at is not None and at.name != field.name:
                fit.reasons.append(f"{field.name} is named {at.name} in the table")
            elif at is None and self.schema is not None and not self.may_add:
                fit.reasons.append(
                    f"{field.name} ({named(field.type)}) is not in the table; set "
                    "schema_evolution=True to add columns"
                )
            elif at is not None or not pa.types.is_null(plain_type(field.type)):
                kind = fit.column(field.name, field.type, at)
                if kind is not None:
                    fields.append(pa.field(field.name, kind, at is None or at.nullable))
            seen.add(name)
        fit.reasons += [
            f"{one.name} is not nullable in the table, and missing in the output"
            for name, one in known.items()
            if name not in seen and not one.nullable
        ]
        return fields, fit.reasons


def failed_result(detail: str) -> TransformFailedError:
    """Return the error for a result with a value that the table cannot hold."""
    return TransformFailedError(
        f"the table cannot hold the transform's output: {detail}", detail=detail
    )


class _Fit:
    """Find the types in which a result is written.

    Args:
        alone: See `TableColumns.convert`.

    Attributes:
        reasons: Why columns do not fit.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self.reasons: list[str] = []

    def column(self, path: str, kind: pa.DataType, at: pa.Field | None) -> pa.DataType | None:
        """Return the type of a column or of a part of it. None: it does not fit or has no type.

        Args:
            path: Name of the column, with the names of its parts.
            kind: Its type in the result.
            at: The same column of the table. None: the table does not have it.
        """
        kind, table = plain_type(kind), None if at is None else at.type
        if pa.types.is_null(kind):
            if table is None:
                self._without_type(path)
            return table and written_type(table)
        if pa.types.is_struct(kind) and (table is None or pa.types.is_struct(table)):
            return self._struct(path, kind, table)
        if is_any_list(kind) and (table is None or is_any_list(table)):
            element = None if table is None else table.value_field
            inner = self.column(f"{path}.element", kind.value_type, element)
            nullable = element is None or element.nullable
            return inner and pa.list_(pa.field("element", inner, nullable))
        if pa.types.is_map(kind) and (table is None or pa.types.is_map(table)):
            item = None if table is None else table.item_field
            key = self.column(f"{path}.key", kind.key_type, table and table.key_field)
            value = self.column(f"{path}.value", kind.item_type, item)
            if key is None or value is None:
                return None
            return pa.map_(key, pa.field("value", value, item is None or item.nullable))
        return self._values(path, kind, table)

    def _values(
        self, path: str, kind: pa.DataType, table: pa.DataType | None
    ) -> pa.DataType | None:
        found = delta_type(kind)
        if table is None:
            if found is None:
                self.reasons.append(
                    f"a Delta table cannot hold {path} ({kind}); cast it, to string for example"
                )
            return found
        wanted = delta_type(table)
        # Without a reason, the column would be left out, and null in the table.
        if found is None or wanted is None or not (found == wanted or _widens(found, wanted)):
            self.reasons.append(
                f"{path} is {named(found or kind)} in the output and {named(table)} in the table"
            )
            return None
        return wanted

    def _without_type(self, path: str) -> None:
        if not self._alone:
            self.reasons.append(untyped_reason([path]) or "")

    def _struct(
        self, path: str, kind: pa.StructType, table: pa.StructType | None
    ) -> pa.DataType | None:
        lowered = [field.name.lower() for field in kind]
        twice = next((field.name for field in kind if lowered.count(field.name.lower()) > 1), None)
        if twice is not None:
            self.reasons.append(f"{path} has the field {twice} twice, compared without case")
            return None
        if table is not None:
            return self._struct_of_table(path, kind, table)
        if not lowered:
            self._without_type(path)
            return None
        fields = [(one.name, self.column(f"{path}.{one.name}", one.type, None)) for one in kind]
        if any(inner is None for _, inner in fields):
            return None
        return pa.struct([pa.field(name, inner) for name, inner in fields])

    def _struct_of_table(
        self, path: str, kind: pa.StructType, table: pa.StructType
    ) -> pa.DataType | None:
        """Fields that are missing in the result are null, as missing columns are."""
        known = {field.name.lower(): field.name for field in table}
        for one in kind:
            name = known.get(one.name.lower())
            if name is None:
                self.reasons.append(f"{path}.{one.name} is not in the table")
            elif name != one.name:
                self.reasons.append(f"{path}.{one.name} is named {name} in the table")
        given = {one.name: one.type for one in kind}
        fields = []
        for field in table:
            at = f"{path}.{field.name}"
            if field.name not in given and not field.nullable:
                self.reasons.append(f"{at} is not nullable in the table, and missing in the output")
            inner = self.column(at, given.get(field.name, pa.null()), field)
            if inner is None:
                return None
            fields.append(pa.field(field.name, inner, field.nullable))
        return pa.struct(fields)


def written_type(table: pa.DataType) -> pa.DataType | None:
    """The type in which a column of a table is written, with the nullability of its parts."""
    return _Fit(alone=True).column("", table, pa.field("", table))


def _widens(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether each value of a type is checked, or exact, in another one.

    A type that is inferred from the values of a batch depends on them: whole numbers become
    `bigint`, although the column of the table is `double`.
    """
    is_int = pa.types.is_integer
    return bool(
        (is_int(source) and is_int(target) and source.bit_width < target.bit_width)
        or (is_int(source) and pa.types.is_floating(target))
        or (pa.types.is_float32(source) and pa.types.is_float64(target))
        or (pa.types.is_decimal(source) and pa.types.is_decimal(target))
    )


class _UnfitError(Exception):
    """A value of a result that its column cannot hold."""


def _converted(array: pa.Array, field: pa.Field, path: str) -> pa.Array:
    """Return the values in the type of the field.

    Raises:
        _UnfitError: A value does not fit.
    """
    array, kind = _plain(array), field.type
    if not field.nullable and array.null_count:
        raise _UnfitError(f"{path} is null, and the table does not allow null")
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_struct(kind):
        return _converted_struct(array, kind, path)
    if pa.types.is_list(kind):
        return _converted_list(array, kind, path)
    if pa.types.is_map(kind):
        return _converted_map(array, kind, path)
    return _converted_values(array, kind, path)


def _plain(array: pa.Array) -> pa.Array:
    """Return the same values without dictionary, runs, views and extension."""
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        rows = np.arange(array.offset, array.offset + len(array))
        return _plain(array.values).take(pa.array(np.searchsorted(ends, rows, side="right")))
    if pa.types.is_string_view(kind):
        # The cast to a string would raise an error that names no value.
        return _as_string(array.cast(pa.binary_view()).cast(pa.binary()))
    if pa.types.is_binary_view(kind):
        return array.cast(pa.binary())
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _without_view(array)
    return array


def _as_string(array: pa.Array) -> pa.Array:
    """Bytes as a string array that is not checked yet."""
    return pa.Array.from_buffers(
        pa.string(), len(array), array.buffers(), array.null_count, array.offset
    )


def _without_view(array: pa.Array) -> pa.Array:
    """Return a list view as a list. Its cast does not know all types of elements."""
    sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    starts = array.offsets.to_numpy().astype(np.int64)
    ends = np.cumsum(sizes)
    rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    values = _plain(array.values).take(pa.array(rows))
    return _list_of(array, sizes, values, pa.list_(values.type))


def _list_of(
    array: pa.Array, sizes: np.ndarray[Any, Any], values: pa.Array, kind: pa.DataType
) -> pa.Array:
    """Return lists of these sizes, null where `array` is."""
    offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))), pa.int32())
    return pa.ListArray.from_arrays(
        offsets, values, type=kind, mask=array.is_null() if array.null_count else None
    )


def _converted_struct(array: pa.Array, kind: pa.StructType, path: str) -> pa.Array:
    names = array.type.names
    # The values below a null struct may be anything. `flatten` makes them null.
    found = array.flatten() if array.null_count else [array.field(i) for i in range(len(names))]
    given = dict(zip(names, found, strict=True))
    children = []
    for field in kind:
        child, name = given.get(field.name), f"{path}.{field.name}"
        if child is None:
            children.append(pa.nulls(len(array), field.type))
            continue
        if not field.nullable and child.null_count > array.null_count:
            raise _UnfitError(f"{name} is null, and the table does not allow null")
        child = _converted(child, field.with_nullable(True), name)
        if not field.nullable and child.null_count:
            child = _without_nulls(child)
        children.append(child)
    is_same = array.type == kind and all(
        new is old for new, old in zip(children, found, strict=True)
    )
    if is_same:
        return array
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _without_nulls(array: pa.Array) -> pa.Array:
    """Replace nulls that are below null structs, where pyarrow refuses to write them."""
    rows = pc.if_else(array.is_null(), len(array), pa.array(np.arange(len(array))))
    return pa.concat_arrays([array, _filler(array.type)]).take(rows)


def _filler(kind: pa.DataType) -> pa.Array:
    """One value that is not null."""
    if pa.types.is_struct(kind):
        fields = list(kind)
        values = [pa.nulls(1, one.type) if one.nullable else _filler(one.type) for one in fields]
        return pa.StructArray.from_arrays(values, fields=fields)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return pa.array([[]], kind)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.array([b""], pa.binary()).cast(kind)
    return pa.array([False if pa.types.is_boolean(kind) else 0], kind)


def _converted_list(array: pa.Array, kind: pa.ListType, path: str) -> pa.Array:
    values = array.flatten()
    converted = _converted(values, kind.value_field, f"{path}.element")
    if converted is values and array.type == kind:
        return array
    sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return _list_of(array, sizes, converted, kind)


def _converted_map(array: pa.Array, kind: pa.MapType, path: str) -> pa.Array:
    entries = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    pairs = pa.ListArray.from_buffers(
        pa.list_(entries.type),
        len(array),
        array.buffers()[:2],
        array.null_count,
        array.offset,
        [entries],
    )
    used = pairs.flatten()
    keys = _converted(used.field(0), kind.key_field, f"{path}.key")
    items = _converted(used.field(1), kind.item_field, f"{path}.value")
    sizes = pc.fill_null(pc.list_value_length(pairs), 0).to_numpy()
    offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))), pa.int32())
    mask = array.is_null() if array.null_count else None
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)


def _converted_values(array: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    """Convert and check values that are not nested."""
    cast = functools.partial(_cast, kind=kind)
    found = array
    if array.type != kind or pa.types.is_decimal(kind):
        try:
            found = cast(array)
        except pa.ArrowInvalid:
            raise _unfit(array, path, cast, f"does not fit {named(kind)}") from None
    if pa.types.is_string(kind):
        if not _is_ascii(found):
            _check(array, path, _utf8, "is not UTF-8")
    elif pa.types.is_date(kind):
        if not _is_within(found, pa.int32(), _FIRST_DAY, _LAST_DAY):
            raise _unfit(array, path, _date, "is outside of the years 1 to 9999")
    elif pa.types.is_timestamp(kind) and not _is_within(
        found, pa.int64(), _FIRST_MICROS, _LAST_MICROS
    ):
        raise _unfit(array, path, _timestamp, "is outside of the years 1 to 9999")
    return found


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast the values; nanoseconds and the time of a date may be cut off.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _short_offsets(array, kind)
    if pa.types.is_decimal(array.type):
        array.validate(full=True)
    lossy = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return pc.cast(array, options=pc.CastOptions(target_type=kind, allow_time_truncate=lossy))


def _short_offsets(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a large string or binary array in a type with offsets of 32 bits, not checked."""
    if pa.types.is_large_string(array.type):
        array = pa.Array.from_buffers(
            pa.large_binary(), len(array), array.buffers(), array.null_count, array.offset
        )
    array = array.cast(pa.binary())
    return _as_string(array) if pa.types.is_string(kind) else array


def _is_ascii(array: pa.Array) -> bool:
    """Whether all bytes of strings are ASCII. A check of the text takes three times longer."""
    buffer = array.buffers()[2]
    if buffer is None or not len(array):
        return True
    ends = np.frombuffer(array.buffers()[1], np.int32)
    begin, end = ends[array.offset], ends[array.offset + len(array)]
    return begin == end or bool(np.frombuffer(buffer, np.int8)[begin:end].min() >= 0)


def _is_within(array: pa.Array, kind: pa.DataType, first: int, last: int) -> bool:
    bounds = pc.min_max(array.view(kind)).as_py()
    return bounds["min"] is None or (first <= bounds["min"] and bounds["max"] <= last)


def _utf8(array: pa.Array) -> None:
    array.validate(full=True)


def _date(array: pa.Array) -> None:
    if not _is_within(_cast(array, pa.date32()), pa.int32(), _FIRST_DAY, _LAST_DAY):
        raise pa.ArrowInvalid


def _timestamp(array: pa.Array) -> None:
    kind = pa.timestamp("us", array.type.tz)
    if not _is_within(_cast(array, kind), pa.int64(), _FIRST_MICROS, _LAST_MICROS):
        raise pa.ArrowInvalid


def _check(array: pa.Array, path: str, check: Callable[[pa.Array], object], why: str) -> None:
    try:
        check(array)
    except pa.ArrowInvalid:
        raise _unfit(array, path, check, why) from None


def _unfit(
    array: pa.Array, path: str, check: Callable[[pa.Array], object], why: str
) -> _UnfitError:
    """Return the error that names the first value that a check refuses."""
    while len(array) > 1:
        half = array.slice(0, len(array) // 2)
        try:
            check(half)
        except pa.ArrowInvalid:
            array = half
        else:
            array = array.slice(len(half))
    return _UnfitError(f"{path}: {_shown(array)} {why}")


def _shown(array: pa.Array) -> str:
    """The only value of an array as short printable text. Its bytes may be anything."""
    kind, unit = array.type, ""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        data = array.buffers()[2]
        width = np.int64 if pa.types.is_large_string(kind) else np.int32
        begin, end = np.frombuffer(array.buffers()[1], width)[array.offset : array.offset + 2]
        value: object = data[int(begin) : int(end)].to_pybytes()[:_SHOWN]
    elif pa.types.is_timestamp(kind):
        value, unit = array.view(pa.int64())[0].as_py(), f" {kind.unit} since 1970"
    elif pa.types.is_date(kind):
        width = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        value = array.view(width)[0].as_py()
        unit = " days since 1970" if pa.types.is_date32(kind) else " ms since 1970"
    else:
        value = array[0].as_py()
    text = repr(value) if isinstance(value, bytes | str) else str(value)
    return (text if len(text) <= _SHOWN else f"{printable(text[:_SHOWN])}...") + unit


_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_MAX_FOLDER_BYTES: Final = 255
"""Longest name of a folder on a local disk."""


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


def _check_partition(column: pa.ChunkedArray, field: pa.Field) -> None:
    """Refuse values that the log cannot hold, or that a reader does not read from there."""
    if pa.types.is_string(field.type):
        if not field.nullable and pc.any(pc.equal(column, "")).as_py():
            raise _UnfitError(
                f"{field.name}: '' is null in a partition column, and the table does not allow null"
            )
        # A compaction of the table would fail for ever.
        suspects = column.filter(pc.greater(pc.binary_length(column), _SHORT_BYTES))
        for value in suspects.unique():
            if partition_folder(field.name, value.as_py()) is None:
                raise _UnfitError(
                    f"{field.name}: {_shown(pa.array([value.as_py()]))} is too long for a "
                    "partition column"
                )
    elif pa.types.is_decimal(field.type) and field.type.scale > 0:
        negative = column.filter(pc.less(column, pa.scalar(0, field.type)))
        broken = negative.filter(pc.not_equal(pc.trunc(negative), negative))
        if len(broken):  # deltalake writes the sign a second time when it reads the value
            raise _UnfitError(
                f"{field.name}: {broken[0].as_py()} is negative and not whole, which deltalake "
                "does not read in a partition column"
            )


def _pieces(chunk: pa.Array) -> Iterator[pa.Array]:
    """Cut an array that may not fit into offsets of 32 bits."""
    count = 1
    while chunk.nbytes // count >= _CHUNK_BYTES and count < len(chunk):
        count *= 2
    edges = [len(chunk) * number // count for number in range(count + 1)]
    for begin, end in itertools.pairwise(edges):
        yield chunk if count == 1 else chunk.slice(begin, end - begin)


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

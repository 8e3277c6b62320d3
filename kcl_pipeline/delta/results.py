"""Convert a transform's result to the columns of its table, and refuse what the table cannot hold.

This is the only place that does so. Every way to write a batch calls it before a file is written:
the Arrow path, results of Spark in memory, and the tasks of executors. The search for failing
records calls it, too, so a record with a value that the table cannot hold is isolated like a record
on which the transform raises.

The types come first: a batch is written with Delta's types (no unsigned integers, no dictionaries,
microseconds only), so that the file, the log and every reader agree. Tables that are created here
allow nulls in every column, as those of Spark's writer do. `TableColumns` converts the values.

Whole columns are converted and checked. A single value is only looked at after a column failed, to
name it. Afterwards every reader can read the rows: deltalake, pandas, SQL engines and Spark.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import error_line
from kcl_pipeline.delta.storage import bounded
from kcl_pipeline.errors import ResultMismatchError, TableMismatchError, TransformFailedError
from kcl_pipeline.text import printable

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
    """The type of the values, without dictionary, runs and extension (see `results`)."""
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
        if found is None and table is None:
            self.reasons.append(
                f"a Delta table cannot hold {path} ({kind}); cast it, to string for example"
            )
        if found is None or table is None:
            return found
        wanted = delta_type(table)
        if wanted is None or not (found == wanted or _widens(found, wanted)):
            self.reasons.append(
                f"{path} is {named(found)} in the output and {named(table)} in the table"
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
    parts = 1
    while chunk.nbytes // parts >= _CHUNK_BYTES and parts < len(chunk):
        parts *= 2
    edges = [len(chunk) * number // parts for number in range(parts + 1)]
    for begin, end in itertools.pairwise(edges):
        yield chunk if parts == 1 else chunk.slice(begin, end - begin)

"""Convert Arrow types to Delta types, and check a batch's columns against a table.

A batch is written with Delta's types (no unsigned integers, no dictionaries, microseconds only), so
that the file, the log and every reader agree. Tables that are created here allow nulls in every
column, as those of Spark's writer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.delta.errors import bounded, first_line
from kcl_pipeline.errors import SinkError

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
}


# One branch per Arrow type; a table of predicates would be longer.
def delta_type(kind: pa.DataType) -> pa.DataType | None:  # noqa: C901
    """The Arrow type that a Delta table uses for `kind`.

    None if Delta has no such type, and for the null type.
    """
    if pa.types.is_dictionary(kind):
        return delta_type(kind.value_type)
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
    if pa.types.is_decimal128(kind) or (
        pa.types.is_decimal(kind) and kind.precision <= _MAX_DECIMAL_PRECISION
    ):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_map(kind):
        key, item = delta_type(kind.key_type), delta_type(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        element = delta_type(kind.value_type)
        return None if element is None else pa.list_(pa.field("element", element))
    if pa.types.is_struct(kind):
        fields = [(field.name, delta_type(field.type)) for field in kind]
        return (
            None
            if any(inner is None for _, inner in fields)
            else pa.struct([pa.field(name, inner) for name, inner in fields])
        )
    return None


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The schema in Delta's types, with all columns nullable.

    Columns of the null type are left out; see `untyped`.

    Raises:
        SinkError: Delta has no such type, or two column names differ only in case.
    """
    fields, unknown = [], []
    for field in schema:
        kind = delta_type(field.type)
        if kind is not None:
            fields.append(pa.field(field.name, kind))
        elif not pa.types.is_null(field.type):
            unknown.append(f"{field.name}: {field.type}")
    if unknown:
        raise SinkError(
            "the transform's output has columns that a Delta table cannot hold "
            f"({bounded(', '.join(unknown))}); cast them, to string for example"
        )
    lowered = [field.name.lower() for field in fields]
    twice = sorted({field.name for field in fields if lowered.count(field.name.lower()) > 1})
    if twice:
        raise SinkError(
            f"the transform's output has a column twice ({bounded(', '.join(twice))}; "
            "names are compared without case); rename one"
        )
    return pa.schema(fields)


def to_delta(table: pa.Table) -> pa.Table:
    """Convert the table to `delta_schema`.

    Raises:
        SinkError: A value does not fit, for example an unsigned number above the signed range.
    """
    schema = delta_schema(table.schema)
    columns = [_converted(table.column(field.name), field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _converted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    # below a microsecond Delta has nothing
    lossy = pa.types.is_timestamp(field.type) or pa.types.is_date(field.type)
    options = pc.CastOptions(target_type=field.type, allow_time_truncate=lossy)
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        return pc.cast(column, options=options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SinkError(
            f"column {field.name} ({column.type}) of the transform's output does not fit "
            f"{field.type}: {first_line(error)}"
        ) from error


def untyped(schema: pa.Schema) -> list[pa.Field]:
    """The columns of the null type, in which every value is null.

    They are written to no file. If the table has the column, readers see null. Otherwise the column
    cannot be added (see `misfit`).
    """
    return [field for field in schema if pa.types.is_null(field.type)]


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
            reasons.append(f"{field.name} ({_named(field.type)}) is not in the table")
        elif known.name != field.name:
            reasons.append(f"{field.name} is named {known.name} in the table")
        elif delta_type(known.type) != field.type:
            reasons.append(
                f"{field.name} is {_named(field.type)} in the output and "
                f"{_named(known.type)} in the table"
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


def _named(kind: Any) -> str:
    return _SPARK_NAMES.get(str(kind), str(kind))

"""Convert Arrow types to Delta types, and check a batch's columns against a table.

A batch is written with Delta's types (no unsigned integers, no dictionaries, microseconds only), so
that the file, the log and every reader agree. Tables that are created here allow nulls in every
column, as those of Spark's writer do. `results` converts the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from kcl_pipeline.delta.errors import bounded
from kcl_pipeline.errors import TableMismatchError

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

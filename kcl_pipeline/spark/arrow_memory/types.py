"""Decide which types of Spark have the same values in Arrow, and so can be written."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_EQUAL: Final = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    TimestampNTZType,
    TimestampType,
)


def reason_against(schema: StructType) -> str | None:
    """Which columns of a result cannot be written, with their types; None if all can.

    Types that are not known here (variants, intervals, user-defined types, collations, …) have no
    equal type in Arrow or in a table.
    """
    found = [(field.name, _unknown_in(field.dataType)) for field in schema.fields]
    return ", ".join(f"{name}: {kind}" for name, kind in found if kind is not None) or None


def _unknown_in(kind: DataType) -> str | None:
    """The type in this type that has no equal one in Arrow; None: there is none."""
    if type(kind) is ArrayType:
        return _unknown_in(kind.elementType)
    if type(kind) is MapType:
        return _unknown_in(kind.keyType) or _unknown_in(kind.valueType)
    if type(kind) is StructType:
        inner = (_unknown_in(field.dataType) for field in kind.fields)
        return next((one for one in inner if one is not None), None)
    if type(kind) in _EQUAL or (type(kind) is StringType and kind == StringType()):
        return None
    return kind.simpleString()

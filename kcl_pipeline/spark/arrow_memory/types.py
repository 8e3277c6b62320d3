"""Decide which results pyarrow writes with the same values as Spark's Parquet writer."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession
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
    ShortType,
    TimestampNTZType,
    TimestampType,
)

_SETTINGS: Final = {
    "spark.sql.parquet.compression.codec": "snappy",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
"""Settings of Spark's Parquet writer. A session with other values uses that writer."""


def reason_against_session(session: SparkSession) -> str | None:
    """Which setting of the session needs Spark's writer; None if there is none."""
    for name, value in _SETTINGS.items():
        found = session.conf.get(name, value)
        if (found or "").upper() != value.upper():
            return f"{name}={found} needs Spark's Parquet writer"
    return None


def reason_against(kind: DataType) -> str | None:
    """Why a result of this type needs Spark's writer; None if Arrow has the same values.

    Types that are not known here (variants, intervals, user-defined types, collations, …) need
    Spark's writer.
    """
    if type(kind) is ArrayType:
        return reason_against(kind.elementType)
    if type(kind) is MapType:
        return reason_against(kind.keyType) or reason_against(kind.valueType)
    if type(kind) is StructType:
        return _against_fields(kind)
    if type(kind) in _EQUAL or (type(kind) is StringType and kind == StringType()):
        return None
    return f"the type {kind.simpleString()}"


def _against_fields(kind: StructType) -> str | None:
    if not kind.fields:
        return "a struct without fields"
    if len({name.lower() for name in kind.names}) < len(kind.names):
        return "a struct with a field twice"
    return next(
        (reason for field in kind.fields if (reason := reason_against(field.dataType))), None
    )

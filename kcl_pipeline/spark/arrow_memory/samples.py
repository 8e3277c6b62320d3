"""A result with every type, to test whether a session writes the same rows as Arrow."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

_COLUMNS: Final = (
    "id",
    "id > 1 AS flag",
    "cast(id AS byte) AS b",
    "cast(-id AS short) AS s",
    "cast(id AS int) AS i",
    "cast(id AS float) AS f",
    "if(id = 1, null, id / 4) AS d",
    "cast(id AS decimal(10, 2)) AS amount",
    "cast(id AS decimal(38, 3)) AS wide",
    "repeat('ü', cast(id AS int)) AS text",
    "if(id = 2, null, cast(repeat('x', cast(id AS int)) AS binary)) AS data",
    "date_add(date'1582-10-04', cast(id AS int)) AS day",
    "timestamp_micros(id - 62135596800000000) AS at",
    "timestamp_ntz'1970-01-01 00:00:00' + id * interval '0.000001' second AS local",
    "array(id, null) AS list",
    "map(cast(id AS string), id) AS pairs",
    "named_struct('a', id, 'b', array(named_struct('c', if(id = 0, null, id)))) AS inner",
)
_ROWS: Final = 4
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (a column without a zone)


def sample_result(session: SparkSession) -> DataFrame:
    """Rows in two partitions, with and without nulls."""
    return session.range(0, _ROWS, 1, 2).selectExpr(*_COLUMNS)


def equals_sample(tables: Sequence[pa.Table]) -> bool:
    """Whether these are the rows of the sample."""
    rows = [row for table in tables for row in table.to_pylist()]
    return rows == [_row(number) for number in range(_ROWS)]


def _row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "flag": number > 1,
        "b": number,
        "s": -number,
        "i": number,
        "f": float(number),
        "d": None if number == 1 else number / 4,
        "amount": Decimal(number),
        "wide": Decimal(number),
        "text": "ü" * number,
        "data": None if number == 2 else b"x" * number,  # noqa: PLR2004 (as in `_COLUMNS`)
        "day": dt.date(1582, 10, 4) + dt.timedelta(days=number),
        "at": dt.datetime(1, 1, 1, 0, 0, 0, number, tzinfo=dt.UTC),
        "local": _EPOCH + dt.timedelta(microseconds=number),
        "list": [number, None],
        "pairs": [(str(number), number)],
        "inner": {"a": number, "b": [{"c": number or None}]},
    }

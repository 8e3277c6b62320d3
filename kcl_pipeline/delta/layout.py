"""Check partition values against the partition columns of a table.

A partition value is stored only in the log, not in the file. A value that does not fit its
column's type makes the table unreadable. Values from outside are therefore checked before a commit.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")
_WORDS_OF_FLOATS: Final = frozenset({"NaN", "Infinity", "-Infinity", "inf", "-inf", "nan"})
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIMESTAMP: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z?"
)


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
    for applies, check in _CHECKS:
        if applies(kind):
            return check(value, kind)
    return False


def _is_integer(value: str, kind: pa.DataType) -> bool:
    limit = 1 << (kind.bit_width - 1)
    return _INTEGER.fullmatch(value) is not None and -limit <= int(value) < limit


def _is_float(value: str, _kind: pa.DataType) -> bool:
    return _NUMBER.fullmatch(value) is not None or value in _WORDS_OF_FLOATS


def _is_decimal(value: str, kind: pa.DataType) -> bool:
    if _NUMBER.fullmatch(value) is None:
        return False
    try:
        pa.scalar(Decimal(value), kind)
    except (InvalidOperation, pa.ArrowInvalid):
        return False
    return True


def _is_date(value: str, _kind: pa.DataType) -> bool:
    return _DATE.fullmatch(value) is not None and _parses(dt.date.fromisoformat, value)


def _is_timestamp(value: str, _kind: pa.DataType) -> bool:
    return _TIMESTAMP.fullmatch(value) is not None and _parses(
        dt.datetime.fromisoformat, value.removesuffix("Z")
    )


def _parses(parse: Callable[[str], object], value: str) -> bool:
    try:
        parse(value)
    except ValueError:
        return False
    return True


_CHECKS: Final[tuple[tuple[Callable[[Any], bool], Callable[[str, Any], bool]], ...]] = (
    (pa.types.is_string, lambda value, _: "\0" not in value),
    (pa.types.is_signed_integer, _is_integer),
    (pa.types.is_date32, _is_date),
    (pa.types.is_timestamp, _is_timestamp),
    (pa.types.is_boolean, lambda value, _: value in ("true", "false")),
    (pa.types.is_decimal, _is_decimal),
    (pa.types.is_floating, _is_float),
)

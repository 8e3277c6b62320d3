"""Statistics of data files in the Delta log, by which readers skip files.

The minimum, the maximum and the number of nulls of each column come from the footer of the Parquet
file, so no value is read again. A bound may be wider than the values, and is never narrower:

- A string is cut to `MAX_CHARACTERS`. Then the last character of a maximum is the next larger one.
- A timestamp has milliseconds. A minimum is rounded down, a maximum up.
- A column with a NaN has no bounds: Spark and DuckDB sort NaN after all numbers, and Parquet leaves
  it out of the maximum.
- A decimal with more digits than a double has no bounds, because readers parse JSON numbers as
  doubles.

Binary values, booleans, lists and maps have no bounds, and a list or map no number of nulls.

The writer collects all columns. The commit keeps those that the table's properties name, and only
values of the type of their column (`log_statistics`): the files may be those of another writer.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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

"""Attributes of rows, read strictly and within limits.

Anyone with access to the tables may have written a row. Every attribute that decides something is
read here, once: its type, length, range, count and character set. A violation is a `ValueError`
whose message names the attribute; `readable` makes it the `UnreadableRowError` of its row.
Attributes that this package does not know are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Decimal, InvalidOperation
from types import TracebackType
from typing import Any, Final

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.store import Item
from kcl_pipeline.text import printable

MAX_LONG: Final = 2**63 - 1
"""Java's `long`, in which KCL keeps all numbers, and Delta's version of a transaction."""

MAX_COUNTER: Final = 2**62
"""Lease counter and owner switches (our own limit).

Half of `MAX_LONG`: a counter that is read can always be incremented, and the number of a batch
always fits into the Delta log. A counter that starts at 0 reaches it after more than 100 million
years of a thousand writes per second.
"""

MAX_NUMBER_CHARACTERS: Final = 200
"""An N attribute as text. DynamoDB: 38 digits and an exponent of -130 to 125, so 168 characters
when it is written without an exponent.
"""

MAX_NUMBER_EXPONENT: Final = 126
"""Decimal digits before the point of an N attribute (DynamoDB: below 1E+126)."""

MAX_ROW_BYTES: Final = 380_000
"""A lease row, with what others added to it. DynamoDB takes 400 KB (409,600 bytes); the rest is
room for what is written here, or one full row could no longer be assigned, renewed or committed.
"""
MAX_KEY_BYTES: Final = 2048
"""A partition key, and so a lease key, an owner (the hash key of an index) and a worker id
(DynamoDB).
"""

MAX_NAME_CHARACTERS: Final = 256
"""Other names, such as run ids and lock versions (our own limit)."""

SHARD_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Kinesis: the pattern of ShardId."""

MAX_RELATED_SHARDS: Final = 16
"""Parents or children of one shard (our own limit). Kinesis has two of each; KCL only ever adds to
the children of a row, so that more than two are not an error.
"""

_WHOLE: Final = re.compile(r"[0-9]{1,38}")
_PLAIN: Final = frozenset({"S", "N", "B"})
_NO_SIZE: Final = frozenset({"BOOL", "NULL"})
_UNREADABLE: Final = (
    ValueError,
    ArithmeticError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)


def check_size(item: Item) -> None:
    """Raises `ValueError` for a row of more than `MAX_ROW_BYTES`, counted as DynamoDB does: names
    and values, and a byte for each element of a list or map.
    """
    characters = 0
    for attribute in item.values():
        for kind, value in attribute.items():
            if kind in _PLAIN:
                characters += len(value)
            elif kind not in _NO_SIZE:
                characters += len(str(value))
    # a character has four bytes at most: this is the quick answer for nearly all rows
    if characters > MAX_ROW_BYTES // 4:
        _check_bytes(item)


def _check_bytes(item: Item) -> None:
    size = 0
    parts: list[Any] = [item]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            size += sum(map(len, part))
            parts.extend(part.values())
        elif isinstance(part, list):
            size += len(part)
            parts.extend(part)
        elif isinstance(part, str):
            size += len(part) if part.isascii() else len(part.encode(errors="surrogatepass"))
        elif isinstance(part, bytes):
            size += len(part)
    if size > MAX_ROW_BYTES:
        raise ValueError(f"it has {size} bytes, more than {MAX_ROW_BYTES}")


class _Readable:
    """See `readable`. A class: rows are read so often that a generator per row is noticeable."""

    __slots__ = ("_otherwise",)

    def __init__(self, otherwise: str | Callable[[], str]) -> None:
        self._otherwise = otherwise

    def __enter__(self) -> None:
        """Begin to read."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, _UNREADABLE):
            return
        otherwise = self._otherwise if isinstance(self._otherwise, str) else self._otherwise()
        raise UnreadableRowError(f"{otherwise}: {error}") from error


def readable(otherwise: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Raise what a row's values make Python raise as one `UnreadableRowError` that begins with
    `otherwise`.
    """
    return _Readable(otherwise)


def required(value: Any, name: str) -> Any:
    """The value. Raises `ValueError` when it is None."""
    if value is None:
        raise ValueError(f"{name} is missing, or not of its type")
    return value


def text_of(item: Item, name: str) -> str | None:
    """An S attribute of any content; None when absent, empty or of another type."""
    value = _value(item, name, "S")
    return value if isinstance(value, str) and value else None


def name_of(item: Item, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str | None:
    """An S attribute that names something; None when absent, empty or of another type.

    Raises `ValueError` when it has more than `most_bytes` bytes or characters that do not print.
    """
    value = text_of(item, name)
    return None if value is None else checked_name(value, name, most_bytes)


def checked_name(value: str, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str:
    """The value. Raises `ValueError` as `name_of` does; `name` stands in the message."""
    if not value.isprintable():
        raise ValueError(f"{name} is '{printable(value)}', with characters that do not print")
    if len(value.encode()) > most_bytes:
        raise ValueError(f"{name} is '{printable(value)}', longer than {most_bytes} bytes")
    return value


def int_of(item: Item, name: str, *, most: int = MAX_LONG) -> int | None:
    """An N attribute as an integer; None when absent or of another type.

    Raises `ValueError` when it is no whole number from 0 to `most` (inclusive).
    """
    value = _value(item, name, "N")
    if not isinstance(value, str):
        return None
    if _WHOLE.fullmatch(value):
        number = int(value)
    else:
        exact = _decimal(value, name)
        if exact != exact.to_integral_value():
            raise ValueError(f"{name} is {printable(value, 50)}, not a whole number")
        number = int(exact)
    if not 0 <= number <= most:
        raise ValueError(f"{name} is {printable(value, 50)}, not from 0 to {most}")
    return number


def float_of(item: Item, name: str, *, least: float, most: float) -> float | None:
    """An N attribute as a float; None when absent or of another type.

    Raises `ValueError` when it is no number from `least` to `most` (inclusive).
    """
    value = _value(item, name, "N")
    if not isinstance(value, str):
        return None
    number = float(_decimal(value, name))
    if not least <= number <= most:
        raise ValueError(f"{name} is {printable(value, 50)}, not from {least:g} to {most:g}")
    return number


def _decimal(value: str, name: str) -> Decimal:
    """The number, within DynamoDB's exponents: `int` of more digits could take all memory."""
    if len(value) <= MAX_NUMBER_CHARACTERS and value.isascii() and "_" not in value:
        try:
            exact = Decimal(value)
        except InvalidOperation:
            exact = Decimal("NaN")
        if exact.is_finite() and (not exact or exact.adjusted() < MAX_NUMBER_EXPONENT):
            return exact
    raise ValueError(f"{name} is '{printable(value, 50)}', not a number of DynamoDB")


def shard_ids_of(item: Item, name: str) -> frozenset[str]:
    """An SS attribute of shard ids; empty when absent or of another type.

    Raises `ValueError` for more than `MAX_RELATED_SHARDS`, or one that is no shard id.
    """
    value = _value(item, name, "SS")
    if not isinstance(value, list):
        return frozenset()
    if len(value) > MAX_RELATED_SHARDS:
        raise ValueError(f"{name} has {len(value)} shards, more than {MAX_RELATED_SHARDS}")
    return frozenset(checked_shard_id(one, name) for one in value)


def checked_shard_id(value: object, name: str) -> str:
    """The value. Raises `ValueError` when it is no shard id; `name` stands in the message."""
    if isinstance(value, str) and SHARD_ID.fullmatch(value):
        return value
    raise ValueError(f"{name} has '{printable(str(value), 50)}', which is not a shard id")


def bytes_of(item: Item, name: str) -> bytes | None:
    """A B attribute; None when absent, empty or of another type."""
    value = _value(item, name, "B")
    return bytes(value) if isinstance(value, bytes | bytearray) and value else None


def map_of(item: Item, name: str, most: int) -> dict[str, Any]:
    """An M attribute; empty when absent or of another type. Raises `ValueError` for more than
    `most` names.
    """
    value = _value(item, name, "M")
    if not isinstance(value, dict):
        return {}
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} names, more than {most}")
    return value


def list_of(item: Item, name: str, most: int) -> list[Any]:
    """An L attribute; empty when absent or of another type. Raises `ValueError` for more than
    `most` values.
    """
    value = _value(item, name, "L")
    if not isinstance(value, list):
        return []
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} values, more than {most}")
    return value


def _value(item: Item, name: str, kind: str) -> Any:
    attribute: Any = item.get(name)
    return attribute.get(kind) if isinstance(attribute, dict) else None

"""The codec of all rows: read attributes strictly and within limits, and write them.

A class of rows declares in the annotations of its fields how they are stored (`Attribute`), and
`RowCodec` converts both ways.

Any client with access to the tables may have written a row. So type, length, range, count and
characters of every attribute that is used are checked here. A violation is a `ValueError` whose
message names the attribute; `readable` turns it into the `UnreadableRowError` of the row.
Attributes that this package does not know are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, get_type_hints

import msgspec

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.position import Position
from kcl_pipeline.text import printable

MAX_LONG: Final = 2**63 - 1
"""Java's `long`, in which KCL stores all numbers, and Delta the versions of transactions."""

MAX_COUNTER: Final = 2**62
"""Largest lease counter and number of owner switches (our own limit).

Half of `MAX_LONG`: a counter that is read can always be incremented, and the number of a batch
always fits into the Delta log. A counter that starts at 0 reaches it after more than 100 million
years of a thousand writes per second.
"""

MAX_NUMBER_CHARACTERS: Final = 200
"""Longest N attribute. DynamoDB has 38 digits and exponents of -130 to 125, which are 168
characters without an exponent.
"""

MAX_NUMBER_EXPONENT: Final = 126
"""Largest number of decimal digits before the point of an N attribute (DynamoDB: below 1E+126)."""

MAX_ROW_BYTES: Final = 380_000
"""Largest lease row, with attributes of other writers (our own limit).

DynamoDB allows 400 KB (409,600 bytes). The difference is for the attributes that this package
writes. Without it, a full row could not be assigned, renewed or committed.
"""

MAX_KEY_BYTES: Final = 2048
"""Longest partition key (DynamoDB): lease key, worker id, and owner (the hash key of an index)."""

MAX_MILLIS: Final = 253_402_300_799_999
"""The end of the year 9999 in epoch milliseconds, the last one that Python can show."""

MAX_NAME_CHARACTERS: Final = 256
"""Longest other name, such as a run id or a lock version (our own limit)."""

SHARD_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Kinesis: the pattern of ShardId."""

MAX_RELATED_SHARDS: Final = 16
"""Largest number of parents or children of a shard (our own limit).

Kinesis has two of each. KCL only adds children to a row, so more than two are not an error.
"""

_WHOLE: Final = re.compile(r"[0-9]{1,38}")
_PLAIN: Final = frozenset({"S", "N", "B"})
_NO_SIZE: Final = frozenset({"BOOL", "NULL"})
_T = TypeVar("_T")
_C = TypeVar("_C", list[Any], dict[str, Any])
_UNREADABLE: Final = (
    ValueError,
    ArithmeticError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)


def check_size(item: Item) -> None:
    """Raise `ValueError` for a row of more than `MAX_ROW_BYTES`.

    The size is counted as in DynamoDB: names, values, and a byte per element of a list or map.
    """
    characters = 0
    for attribute in item.values():
        for kind, value in attribute.items():
            if kind in _PLAIN:
                characters += len(value)
            elif kind not in _NO_SIZE:
                characters += len(str(value))
    # a character has at most four bytes, so nearly all rows need no exact count
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
    """See `readable`. A class, because a generator per row is measurably slower."""

    __slots__ = ("_problem",)

    def __init__(self, problem: str | Callable[[], str]) -> None:
        self._problem = problem

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, _UNREADABLE):
            return
        problem = self._problem if isinstance(self._problem, str) else self._problem()
        raise UnreadableRowError(f"{problem}: {error}") from error


def readable(problem: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Turn errors that the values of a row cause into an `UnreadableRowError`.

    Args:
        problem: Start of the message, or a function that returns it.
    """
    return _Readable(problem)


def required(value: Any, name: str) -> Any:
    """Return the value. Raise `ValueError` if it is None."""
    if value is None:
        raise ValueError(f"{name} is missing, or has another type")
    return value


def text_of(item: Item, name: str) -> str | None:
    """Return an S attribute; None if it is absent, empty or of another type."""
    value = _value(item, name, "S")
    return value if isinstance(value, str) and value else None


def name_of(item: Item, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str | None:
    """Return an S attribute that is a name; None if it is absent, empty or of another type.

    Raises:
        ValueError: It has more than `most_bytes` bytes, or unprintable characters.
    """
    value = text_of(item, name)
    return None if value is None else checked_name(value, name, most_bytes)


def checked_name(value: str, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str:
    """Return the value if it is a name. Raises as `name_of`, with `name` in the message."""
    if not value.isprintable():
        raise ValueError(f"{name} is '{printable(value)}', with characters that do not print")
    if len(value.encode()) > most_bytes:
        raise ValueError(f"{name} is '{printable(value)}', longer than {most_bytes} bytes")
    return value


def int_of(item: Item, name: str, *, most: int = MAX_LONG) -> int | None:
    """Return an N attribute as an integer; None if it is absent or of another type.

    Raises:
        ValueError: It is not a whole number from 0 to `most` (inclusive).
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
    """Return an N attribute as a float; None if it is absent or of another type.

    Raises:
        ValueError: It is not a number from `least` to `most` (inclusive).
    """
    value = _value(item, name, "N")
    if not isinstance(value, str):
        return None
    number = float(_decimal(value, name))
    if not least <= number <= most:
        raise ValueError(f"{name} is {printable(value, 50)}, not from {least:g} to {most:g}")
    return number


def _decimal(value: str, name: str) -> Decimal:
    # Only exponents of DynamoDB: `int` of a larger number could need all memory.
    if len(value) <= MAX_NUMBER_CHARACTERS and value.isascii() and "_" not in value:
        try:
            exact = Decimal(value)
        except InvalidOperation:
            exact = Decimal("NaN")
        if exact.is_finite() and (not exact or exact.adjusted() < MAX_NUMBER_EXPONENT):
            return exact
    raise ValueError(f"{name} is '{printable(value, 50)}', not a number of DynamoDB")


def checked_shard_id(value: object, name: str) -> str:
    """Return the value if it is a shard id. Otherwise raise `ValueError` with `name`."""
    if isinstance(value, str) and SHARD_ID.fullmatch(value):
        return value
    raise ValueError(f"{name} has '{printable(str(value), 50)}', which is not a shard id")


def map_of(item: Item, name: str, most: int) -> dict[str, Any]:
    """Return an M attribute; empty if it is absent or of another type.

    Raises:
        ValueError: It has more than `most` names.
    """
    return _bounded(item, name, "M", dict, most, "names")


def list_of(item: Item, name: str, most: int) -> list[Any]:
    """Return an L attribute; empty if it is absent or of another type.

    Raises:
        ValueError: It has more than `most` values.
    """
    return _bounded(item, name, "L", list, most, "values")


def _bounded(item: Item, name: str, tag: str, kind: type[_C], most: int, what: str) -> _C:
    value = _value(item, name, tag)
    if not isinstance(value, kind):
        return kind()
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} {what}, more than {most}")
    return value


def _value(item: Item, name: str, kind: str) -> Any:
    attribute: Any = item.get(name)
    return attribute.get(kind) if isinstance(attribute, dict) else None


LEADER_KEY: Final = "Leader"
MIGRATION_KEY: Final = "Migration3.0"
TABLE_MIGRATION_KEY: Final = "TableMigration3.5"
COORDINATOR_KEYS: Final = (LEADER_KEY, TABLE_MIGRATION_KEY, MIGRATION_KEY)
"""All of them. The last one has the pause, so it is deleted last."""

_MICRO: Final = Decimal("0.000001")


def string(value: str) -> AttributeValue:
    """Return an S attribute. Raise `ValueError` for an empty string, which KCL does not use."""
    if not value:
        raise ValueError("an empty string cannot be an attribute of a row")
    return {"S": value}


def number(value: float) -> AttributeValue:
    """Return an N attribute with at most six decimals, rounded half up, without trailing zeros.

    Raises:
        ValueError: The number is not finite.
    """
    if type(value) is int:
        return {"N": str(value)}
    exact = Decimal(repr(value))
    if not exact.is_finite():
        raise ValueError(f"{value} cannot be stored as a number")
    rounded = exact.quantize(_MICRO, ROUND_HALF_UP).normalize()
    return {"N": format(rounded, "f") if rounded else "0"}


def string_set(values: Iterable[str]) -> AttributeValue:
    """Return an SS attribute with sorted values, so that equal sets are equal.

    Raises:
        ValueError: There is no value, or an empty one. DynamoDB has no empty sets.
    """
    texts = sorted(set(values))
    if not texts or not all(texts):
        raise ValueError("a string set needs at least one string, and no empty one")
    return {"SS": texts}


@dataclass(frozen=True, slots=True)
class Attribute:
    """How one value is stored: in an attribute, or in the two of a position or a range.

    Attributes:
        name: The attribute; the first one of two.
        read: Returns the value. None: it is absent, or of another type. Raises `ValueError` outside
            of its limits.
        write: Returns the attributes of a value that is not None. An empty set has none.
    """

    name: str
    read: Callable[[Item], Any]
    write: Callable[[Any], Item]


def a_name(name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> Attribute:
    """Return an S attribute with a name; see `name_of`."""
    return Attribute(
        name, lambda item: name_of(item, name, most_bytes), lambda value: {name: string(value)}
    )


def a_whole(name: str, most: int = MAX_LONG) -> Attribute:
    """Return an N attribute with a whole number; see `int_of`."""
    return Attribute(
        name, lambda item: int_of(item, name, most=most), lambda value: {name: number(value)}
    )


def a_position(name: str, sub_name: str) -> Attribute:
    """Return the S and N attributes of a position. A missing sub-sequence number is 0."""

    def read(item: Item) -> Position | None:
        text = text_of(item, name)
        return None if text is None else Position(text, int_of(item, sub_name) or 0)

    def write(position: Position) -> Item:
        return {
            name: string(position.sequence_number),
            sub_name: number(position.sub_sequence_number),
        }

    return Attribute(name, read, write)


def some_shard_ids(name: str) -> Attribute:
    """Return an SS attribute of at most `MAX_RELATED_SHARDS` shard ids; without one it is empty."""

    def read(item: Item) -> frozenset[str]:
        values: list[Any] = _bounded(item, name, "SS", list, MAX_RELATED_SHARDS, "shards")
        return frozenset(checked_shard_id(value, name) for value in values)

    return Attribute(name, read, lambda ids: {name: string_set(ids)} if ids else {})


def some_bytes(name: str) -> Attribute:
    """Return a B attribute. Empty bytes are absent."""

    def read(item: Item) -> bytes | None:
        value = _value(item, name, "B")
        return bytes(value) if isinstance(value, bytes | bytearray) and value else None

    return Attribute(name, read, lambda value: {name: {"B": value}} if value else {})


REQUIRED: Final = "required"
"""In the annotation of a field: a row without its attribute cannot be read."""


class RowCodec(Generic[_T]):
    """Converts rows from and to the values of a dataclass.

    A field that is stored has its `Attribute` in its annotation.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type[_T]) -> None:
        self._kind = kind
        self._attributes: dict[str, Attribute] = {}
        self._readers: list[tuple[str, Callable[[Item], Any], str | None]] = []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            metadata = getattr(hint, "__metadata__", ())
            for one in metadata:
                if isinstance(one, Attribute):
                    self._attributes[name] = one
                    self._readers.append(
                        (name, one.read, one.name if REQUIRED in metadata else None)
                    )

    def read(self, item: Item, **values: Any) -> _T:
        """Return the values of a row.

        Args:
            item: The row.
            values: Values of fields that are not stored.

        Raises:
            ValueError: An attribute is missing, or outside of its limits. Use in `readable`.
        """
        for name, read, required_name in self._readers:
            value = read(item)
            if value is not None:
                values[name] = value
            elif required_name is not None:
                required(value, required_name)
        return self._kind(**values)

    def write(self, row: _T, *names: str) -> Item:
        """Return the attributes of a row: those of these fields, or of all."""
        return self.attributes(**{name: getattr(row, name) for name in names or self._attributes})

    def attributes(self, **values: Any) -> Item:
        """Return the attributes of single values. None has none."""
        item: Item = {}
        for name, value in values.items():
            if value is not None:
                item |= self._attributes[name].write(value)
        return item


@dataclass(frozen=True, slots=True)
class Document(Generic[_T]):
    """A JSON document in one attribute of the client-version row.

    Attributes:
        name: The attribute.
        kind: Type of the document.
        most: Largest number of characters.
        advice: What an operator does about one that cannot be read.
    """

    name: str
    kind: type[_T]
    most: int
    advice: str

    def text(self, document: _T) -> str:
        """Return the value of the attribute: the same text for the same document."""
        return msgspec.json.encode(document, order="deterministic").decode()

    def parsed(self, text: str) -> _T:
        """Return the document.

        Raises:
            UnreadableRowError: The value is not such a document.
        """
        if len(text) > self.most:
            raise UnreadableRowError(
                f"the attribute {self.name} of the row Migration3.0 has {len(text)} characters, "
                f"more than {self.most}"
            )
        try:
            return msgspec.json.decode(text, type=self.kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> UnreadableRowError:
        """Return the error of a document that cannot be used."""
        about = f"the attribute {self.name} of the row Migration3.0 cannot be read"
        return UnreadableRowError(f"{about} ({error}); {self.advice}")

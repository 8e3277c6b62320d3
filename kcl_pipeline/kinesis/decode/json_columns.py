"""Parse the records of a JSON body by byte offsets, without creating an object per record.

Every record must have the same keys in the same order as the first one, without white space and
escapes. Kinesis writes them like this. The offsets are those of the colons, or, if values contain
colons, those of the quotes. Every byte between two values is compared. Other bodies are left to a
JSON parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pybase64

MIN_BYTES: Final = 512 * 1024
"""Smallest body that is parsed by offsets. Below, a parser is faster, because parsing by offsets
has a fixed cost of a third of a millisecond.
"""

PIECE_BYTES: Final = 1024 * 1024
"""Bytes that are processed at a time, few enough for the CPU cache."""

_START: Final = b'"Records":['
_END: Final = b"}]"
MAX_BYTES: Final = 2**31 - 1
_COLON: Final = ord(":")
_QUOTE: Final = ord('"')
_PAD: Final = ord("=")
_ZERO_BITS: Final = ord("A")
_BLANK: Final = ord(" ")
_ASCII_END: Final = 128
_INLINE_BYTES: Final = 12
"""Longest value that an Arrow view contains."""

MICROS_PER_SECOND: Final = 1_000_000
MIN_ARRIVAL_SECONDS: Final = -62_135_596_800
MAX_ARRIVAL_SECONDS: Final = 253_402_300_799
"""The years 1 to 9999, which Python's `datetime` and Spark support."""

ARRIVAL: Final = "ApproximateArrivalTimestamp"
REQUIRED: Final = frozenset({"SequenceNumber", "Data"})
KNOWN: Final = REQUIRED | {"PartitionKey", ARRIVAL, "EncryptionType"}

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of equal length, and the body without its records.

    Attributes:
        frame: The body with an empty list of records.
        sequence_numbers: Decimal strings.
        partition_keys: Partition keys. None: the records have none.
        data: Payloads, not de-aggregated.
        arrival_micros: Arrival times in epoch microseconds. None: the records have none.
        encryption_types: Encryption types. None: the records have none.
    """

    frame: bytes
    sequence_numbers: pa.StringArray
    partition_keys: pa.StringArray | None
    data: pa.BinaryArray
    arrival_micros: npt.NDArray[np.int64] | None
    encryption_types: pa.StringArray | None


@dataclass(frozen=True, slots=True)
class _Field:
    """One value of each record: its starts and ends, and the bytes before it."""

    name: str
    fixed: bytes
    starts: Positions
    ends: Positions


def columns_of(body: bytes) -> Columns | None:
    """Parse a GetRecords body in JSON.

    Returns:
        None: the body needs a JSON parser, or is invalid.
    """
    if not MIN_BYTES <= len(body) <= MAX_BYTES or b"\\" in body:
        return None
    start, end = body.find(_START) + len(_START), body.rfind(_END) + 1
    if start < len(_START) or end <= start:
        return None
    try:
        keys = _keys(body[start : body.find(b"}", start) + 1])
        fields = _fields(body, start, end, keys) if keys is not None else None
        if fields is None:
            return None
        values = {f.name: gather(body, f.starts, f.ends) for f in fields if f.name != "Data"}
        data = next(_decoded(body, f.starts, f.ends) for f in fields if f.name == "Data")
        micros = (
            micros_of(values[ARRIVAL].cast(pa.string()).cast(pa.float64()).to_numpy())
            if ARRIVAL in values
            else None
        )
        texts = {name: _text(value) for name, value in values.items() if name != ARRIVAL}
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, IndexError):
        return None
    frame = body[:start] + body[end:]
    return Columns(
        frame,
        texts["SequenceNumber"],
        texts.get("PartitionKey"),
        data,
        micros,
        texts.get("EncryptionType"),
    )


def micros_of(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Convert seconds to microseconds.

    Raises:
        ValueError: A time is outside of the years 1 to 9999, or NaN.
    """
    if not ((seconds >= MIN_ARRIVAL_SECONDS) & (seconds <= MAX_ARRIVAL_SECONDS)).all():
        raise ValueError("an arrival time is out of range")
    return np.rint(seconds * MICROS_PER_SECOND).astype(np.int64)


def _keys(record: bytes) -> tuple[str, ...] | None:
    """Return the keys of the first record in their order; None if they are not supported."""
    fields: dict[str, Any] = msgspec.json.decode(record)
    has_types = all(
        type(value) in ((int, float) if key == ARRIVAL else (str,)) for key, value in fields.items()
    )
    return (
        tuple(fields)
        if has_types and fields.keys() >= REQUIRED and fields.keys() <= KNOWN
        else None
    )


@lru_cache(maxsize=16)
def _fixed(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the bytes before each value. Those before the first start at the former record."""
    quotes = [b"" if key == ARRIVAL else b'"' for key in keys]
    between = [quotes[-1] + b"},{", *(quote + b"," for quote in quotes[:-1])]
    return tuple(
        b'%s"%s":%s' % (before, key.encode(), quote)
        for before, key, quote in zip(between, keys, quotes, strict=True)
    )


def _fields(body: bytes, start: int, end: int, keys: tuple[str, ...]) -> list[_Field] | None:
    """Return the offsets of the values; None unless all other bytes equal the first record's."""
    for starts_by in (_starts_by_colons, _starts_by_quotes):
        starts = starts_by(body, start, end, keys)
        if starts is None:
            continue
        fixed = _fixed(keys)
        closing = fixed[0].partition(b",")[0]
        ends = [after - len(text) for after, text in zip(starts[1:], fixed[1:], strict=True)]
        ends.append(np.append(starts[0][1:] - len(fixed[0]), end - len(closing)))
        fields = [_Field(*field) for field in zip(keys, fixed, starts, ends, strict=True)]
        if _is_regular(body, start, end, fields):
            return fields
    return None


def _starts_by_colons(
    body: bytes, start: int, end: int, keys: tuple[str, ...]
) -> list[Positions] | None:
    """Return the starts of the values by the colons before them.

    None if there are more colons, so that values contain some.
    """
    at = find_byte(body, start, end, _COLON)
    rows, rest = divmod(len(at), len(keys))
    if rest or rows == 0:
        return None
    table = np.ascontiguousarray(at.reshape(rows, len(keys)).T)
    return [table[column] + (1 if key == ARRIVAL else 2) for column, key in enumerate(keys)]


def _starts_by_quotes(
    body: bytes, start: int, end: int, keys: tuple[str, ...]
) -> list[Positions] | None:
    """Return the starts of the values by quotes: two around each key and each string value."""
    at = find_byte(body, start, end, _QUOTE)
    columns = [2 if key == ARRIVAL else 4 for key in keys]
    rows, rest = divmod(len(at), sum(columns))
    if rest or rows == 0:
        return None
    table = np.ascontiguousarray(at.reshape(rows, sum(columns)).T)
    firsts = [sum(columns[:column]) for column in range(len(keys))]
    return [
        table[first + 1] + 2 if key == ARRIVAL else table[first + 2] + 1
        for first, key in zip(firsts, keys, strict=True)
    ]


def _is_regular(body: bytes, start: int, end: int, fields: list[_Field]) -> bool:
    """Return whether every byte outside of the values is as expected."""
    first, last = fields[0], fields[-1]
    opening, closing = first.fixed.partition(b",")[2], first.fixed.partition(b",")[0]
    if body[start : first.starts[0]] != opening or body[last.ends[-1] : end] != closing:
        return False
    if any((f.ends < f.starts).any() for f in fields):
        return False
    befores = [last.ends[:-1], *(f.ends for f in fields[:-1])]
    for field, before in zip(fields, befores, strict=True):
        texts = np.ndarray(
            (len(body) - len(field.fixed) + 1,), f"V{len(field.fixed)}", body, strides=(1,)
        )
        if texts[before].tobytes() != field.fixed * len(before):
            return False
    return True


def find_byte(body: bytes, start: int, end: int, byte: int) -> Positions:
    """Return the offsets of a byte from `start` (inclusive) to `end` (exclusive).

    Searches in pieces, because allocating new memory costs more than the search.
    """
    text = np.frombuffer(body, np.uint8, end)
    is_equal = np.empty(PIECE_BYTES, np.bool_)
    found = [
        np.flatnonzero(
            np.equal(text[at : at + PIECE_BYTES], byte, out=is_equal[: min(PIECE_BYTES, end - at)])
        )
        + at
        for at in range(start, end, PIECE_BYTES)
    ]
    return np.concatenate(found)


def gather(source: bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """Return `source[start:end]` of every row.

    Raises:
        ValueError: An offset is outside of `source`, or values overlap. Arrow does not check this;
            the process would crash.
    """
    rows = len(starts)
    if rows and not (
        starts[0] >= 0
        and ends[-1] <= len(source) <= MAX_BYTES
        and (starts <= ends).all()
        and (starts[1:] >= ends[:-1]).all()
    ):
        raise ValueError("a value outside of the body")
    if rows and (ends - starts).min() > _INLINE_BYTES:
        return _gather_long(source, starts, ends)
    offsets = np.empty(2 * rows, np.int32)
    offsets[0::2], offsets[1::2] = starts, ends
    alternating = pa.Array.from_buffers(
        pa.binary(), 2 * rows - 1, [None, pa.py_buffer(offsets), pa.py_buffer(source)]
    )
    return alternating.take(pa.array(np.arange(0, 2 * rows - 1, 2, dtype=np.int32)))


def _gather_long(source: bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """Return `source[start:end]` of every row; no value may be short enough to be in its view.

    A view has the length of a value, its first four bytes, the number of its buffer, and its
    offset. Converting views allocates the memory of the result once.
    """
    views = np.zeros((len(starts), 4), np.int32)
    views[:, 0], views[:, 3] = ends - starts, starts
    views[:, 1] = np.ndarray((len(source) - 3,), "<i4", source, strides=(1,))[starts]
    return pa.Array.from_buffers(
        pa.binary_view(), len(starts), [None, pa.py_buffer(views), pa.py_buffer(source)]
    ).cast(pa.binary())


def _characters(values: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """Return the concatenated bytes of all values of an array without offset."""
    _, offsets, characters = values.buffers()
    size = int(np.frombuffer(offsets, np.int32, len(values) + 1)[-1])
    return np.frombuffer(characters, np.uint8, size) if size else np.empty(0, np.uint8)


def _text(values: pa.BinaryArray) -> pa.StringArray:
    """Return values as strings.

    Raises `ArrowException` if a value is not UTF-8, and `ValueError` if it has control characters
    or quotes, which JSON does not allow.
    """
    characters = _characters(values)
    if len(characters) and (characters.min() < _BLANK or (characters == _QUOTE).any()):
        raise ValueError("a control character or a quote")
    return utf8(values)


def utf8(values: pa.BinaryArray) -> pa.StringArray:
    """Return the values of an array without offset as strings.

    Raises:
        ArrowException: A value is not UTF-8.
    """
    characters = _characters(values)
    if len(characters) and characters.max() < _ASCII_END:
        return pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    return values.cast(pa.string())


def _decoded(body: bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """Decode many base64 values with one call per piece.

    The padding is replaced by zero bits, and the bytes that these produce are dropped. Raises
    `ValueError` if a value is not base64.
    """
    sizes = ends - starts
    if (sizes % 4).any():
        raise ValueError("the length of a value is not a multiple of 4")
    characters = np.frombuffer(body, np.uint8)
    padded = (characters[ends - 1] == _PAD) & (sizes > 0)
    twice = padded & (characters[ends - 2] == _PAD)
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes // 4 * 3 - padded - twice, out=offsets[1:])
    values = pa.allocate_buffer(int(offsets[-1]))
    into = np.frombuffer(values, np.uint8) if offsets[-1] else np.empty(0, np.uint8)
    piece = np.cumsum(sizes) // PIECE_BYTES
    edges = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(sizes)]
    for first, end in pairwise(edges):
        rows = slice(first, end)
        into[offsets[first] : offsets[end]] = _decoded_piece(
            body, starts[rows], ends[rows], padded[rows], twice[rows]
        )
    return pa.Array.from_buffers(
        pa.binary(), len(sizes), [None, pa.py_buffer(offsets.astype(np.int32)), values]
    )


def _decoded_piece(
    body: bytes, starts: Positions, ends: Positions, padded: Flags, twice: Flags
) -> npt.NDArray[np.uint8]:
    # `gather` copies, so the characters may be changed
    text = _characters(gather(body, starts, ends))
    text_ends = np.cumsum(ends - starts)
    text[text_ends[padded] - 1] = _ZERO_BITS
    text[text_ends[twice] - 2] = _ZERO_BITS
    # the stubs of numpy do not declare an array as a buffer
    raw = pybase64.b64decode(memoryview(text), validate=True)  # type: ignore[arg-type]
    if not padded.any():
        return np.frombuffer(raw, np.uint8)
    raw_ends = text_ends // 4 * 3
    return _characters(gather(raw, raw_ends - (ends - starts) // 4 * 3, raw_ends - padded - twice))

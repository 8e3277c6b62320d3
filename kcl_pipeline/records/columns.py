"""The records of a JSON body as columns, by arithmetic on the places of its quotes: no Python object per record.

It works where every record of the body is written as the first one is (the same keys in the same order, no white space, no escapes), which is how a
service writes them; every byte between two values is compared. Anything else is left to a JSON parser.
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
"""Of a body; a shorter one is done sooner by the parser, which does without the third of a millisecond that begins this way."""

PIECE_BYTES: Final = 1024 * 1024
"""What is worked on at a time, small enough for a processor's cache."""

_START: Final = b'"Records":['
_END: Final = b"}]"
_MAX_BYTES: Final = 2**31 - 1
_QUOTE: Final = ord('"')
_PAD: Final = ord("=")
_ZERO_BITS: Final = ord("A")
_BLANK: Final = ord(" ")
_ASCII_END: Final = 128
_WORD: Final = 8
_NUMBER: Final = "ApproximateArrivalTimestamp"
_REQUIRED: Final = frozenset({"SequenceNumber", "Data", "PartitionKey"})
_KNOWN: Final = _REQUIRED | {_NUMBER, "EncryptionType"}

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of equal length, and the body without its records. `arrival_seconds` and `encryption_types` are None where the records have none."""

    frame: bytes
    sequence_numbers: pa.StringArray
    partition_keys: pa.StringArray
    data: pa.BinaryArray
    arrival_seconds: npt.NDArray[np.float64] | None
    encryption_types: pa.StringArray | None


@dataclass(frozen=True, slots=True)
class _Field:
    """One value of each record: where it begins and ends, and what is written before it."""

    name: str
    fixed: bytes
    starts: Positions
    ends: Positions


def columns_of(body: bytes) -> Columns | None:
    """The columns; None where a JSON parser has to be asked, also about what is wrong with the body."""
    if not MIN_BYTES <= len(body) <= _MAX_BYTES or b"\\" in body:
        return None
    start, end = body.find(_START) + len(_START), body.rfind(_END) + 1
    if start < len(_START) or end <= start:
        return None
    try:
        keys = _keys(body[start : body.find(b"}", start) + 1])
        fields = _fields(body, start, end, keys) if keys is not None else None
        if fields is None:
            return None
        values = {f.name: _gather(body, f.starts, f.ends) for f in fields if f.name != "Data"}
        data = next(_decoded(body, f.starts, f.ends) for f in fields if f.name == "Data")
        seconds = values[_NUMBER].cast(pa.string()).cast(pa.float64()).to_numpy() if _NUMBER in values else None
        texts = {name: _text(value) for name, value in values.items() if name != _NUMBER}
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, IndexError):
        return None
    frame = body[:start] + body[end:]
    return Columns(frame, texts["SequenceNumber"], texts["PartitionKey"], data, seconds, texts.get("EncryptionType"))


def _keys(record: bytes) -> tuple[str, ...] | None:
    """The keys of the first record in their order, if they are such as can be read by position."""
    fields: dict[str, Any] = msgspec.json.decode(record)
    right = all(type(value) in ((int, float) if key == _NUMBER else (str,)) for key, value in fields.items())
    return tuple(fields) if right and fields.keys() >= _REQUIRED and fields.keys() <= _KNOWN else None


@lru_cache(maxsize=16)
def _fixed(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    """What is written before each value; before the first: from the end of the record before."""
    quotes = [b"" if key == _NUMBER else b'"' for key in keys]
    between = [quotes[-1] + b"},{", *(quote + b"," for quote in quotes[:-1])]
    return tuple(b'%s"%s":%s' % (before, key.encode(), quote) for before, key, quote in zip(between, keys, quotes, strict=True))


def _fields(body: bytes, start: int, end: int, keys: tuple[str, ...]) -> list[_Field] | None:
    """Where the values are; None unless everything around them is as in the first record."""
    at = _quotes(body, start, end)
    columns = sum(2 if key == _NUMBER else 4 for key in keys)
    rows, rest = divmod(len(at), columns)
    if rest or rows == 0:
        return None
    table = np.ascontiguousarray(at.reshape(rows, columns).T)
    record_ends = np.append(table[0, 1:] - len(b"},{"), end - len(b"}"))
    fields: list[_Field] = []
    column = 0
    for key, fixed in zip(keys, _fixed(keys), strict=True):
        if key == _NUMBER:
            starts = table[column + 1] + len(b'":')
            column += 2
            ends = table[column] - len(b",") if column < columns else record_ends
        else:
            starts, ends = table[column + 2] + 1, table[column + 3]
            column += 4
        fields.append(_Field(key, fixed, starts, ends))
    return fields if _is_regular(body, start, end, fields) else None


def _is_regular(body: bytes, start: int, end: int, fields: list[_Field]) -> bool:
    """Whether every byte that is no value is as expected."""
    words = np.ndarray((len(body) - _WORD + 1,), "<u8", body, strides=(1,))
    first, last = fields[0], fields[-1]
    opening, closing = first.fixed.partition(b",")[2], first.fixed.partition(b",")[0]
    if body[start : first.starts[0]] != opening or body[last.ends[-1] : end] != closing:
        return False
    befores = [last.ends[:-1], *(f.ends for f in fields[:-1])]
    for number, (field, before) in enumerate(zip(fields, befores, strict=True)):
        starts = field.starts[1:] if number == 0 else field.starts
        size = len(field.fixed)
        if not (starts - before == size).all() or not (field.ends >= field.starts).all():
            return False
        for offset in (*range(0, size - _WORD, _WORD), size - _WORD):
            if not (words[before + offset] == np.uint64(int.from_bytes(field.fixed[offset : offset + _WORD], "little"))).all():
                return False
    return True


def _quotes(body: bytes, start: int, end: int) -> Positions:
    """Where the quotes between `start` and `end` are. In pieces, because memory that is new to the process costs more than the search."""
    text = np.frombuffer(body, np.uint8, end)
    is_quote = np.empty(PIECE_BYTES, np.bool_)
    found = [
        np.flatnonzero(np.equal(text[at : at + PIECE_BYTES], _QUOTE, out=is_quote[: min(PIECE_BYTES, end - at)])) + at for at in range(start, end, PIECE_BYTES)
    ]
    return np.concatenate(found)


def _gather(source: bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """`source[start:end]` of every row."""
    rows = len(starts)
    offsets = np.empty(2 * rows, np.int32)
    offsets[0::2], offsets[1::2] = starts, ends
    alternating = pa.Array.from_buffers(pa.binary(), 2 * rows - 1, [None, pa.py_buffer(offsets), pa.py_buffer(source)])
    return alternating.take(pa.array(np.arange(0, 2 * rows - 1, 2, dtype=np.int32)))


def _characters(values: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The bytes of all values of a new array, one after the other."""
    _, offsets, characters = values.buffers()
    size = int(np.frombuffer(offsets, np.int32, len(values) + 1)[-1])
    return np.frombuffer(characters, np.uint8, size) if size else np.empty(0, np.uint8)


def _text(values: pa.BinaryArray) -> pa.StringArray:
    """As text. Raises `ArrowException` where it is not UTF-8, `ValueError` for control characters, which JSON does not allow."""
    characters = _characters(values)
    if len(characters) and characters.min() < _BLANK:
        raise ValueError("a control character")
    if len(characters) and characters.max() < _ASCII_END:
        return pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    return values.cast(pa.string())


def _decoded(body: bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """Base64 undone, many values at once: padding is written as zero bits, whose bytes are then left out. Raises `ValueError` for other text."""
    sizes = ends - starts
    if (sizes % 4).any():
        raise ValueError("a length that base64 does not have")
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
        into[offsets[first] : offsets[end]] = _decoded_piece(body, starts[rows], ends[rows], padded[rows], twice[rows])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets.astype(np.int32)), values])


def _decoded_piece(body: bytes, starts: Positions, ends: Positions, padded: Flags, twice: Flags) -> npt.NDArray[np.uint8]:
    text = _characters(_gather(body, starts, ends)).copy()
    text_ends = np.cumsum(ends - starts)
    text[text_ends[padded] - 1] = _ZERO_BITS
    text[text_ends[twice] - 2] = _ZERO_BITS
    raw = pybase64.b64decode(memoryview(text), validate=True)  # type: ignore[arg-type] # (numpy's stubs do not say that an array is a buffer)
    if not padded.any():
        return np.frombuffer(raw, np.uint8)
    raw_ends = text_ends // 4 * 3
    return _characters(_gather(raw, raw_ends - (ends - starts) // 4 * 3, raw_ends - padded - twice))

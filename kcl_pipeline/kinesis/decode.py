"""Decode the bodies of responses into pages of Arrow columns.

The records of a JSON or CBOR body are parsed by byte offsets, without an object per record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Final, TypeVar

import cbor2
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pybase64

from kcl_pipeline.batch import RECORD_SCHEMA, payload_bytes
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.position import MAX_SEQUENCE_NUMBER_DIGITS
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard


def shard_of(item: Mapping[str, Any]) -> Shard:
    """Return a shard of a ListShards response."""
    keys, numbers = item["HashKeyRange"], item["SequenceNumberRange"]
    return Shard(
        shard_id=item["ShardId"],
        hash_key_range=HashKeyRange(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        starting_sequence_number=numbers["StartingSequenceNumber"],
        ending_sequence_number=numbers.get("EndingSequenceNumber"),
        parent_shard_id=item.get("ParentShardId"),
        adjacent_parent_shard_id=item.get("AdjacentParentShardId"),
    )


def date_of(response: Mapping[str, Any]) -> datetime | None:
    """Return the time of the Date header; None if it is missing or cannot be parsed."""
    header = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    try:
        return None if header is None else parsedate_to_datetime(header).astimezone(UTC)
    except ValueError:
        return None


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

    @classmethod
    def of(
        cls,
        frame: bytes,
        texts: Mapping[str, pa.StringArray],
        data: pa.BinaryArray,
        arrival_micros: npt.NDArray[np.int64] | None,
    ) -> Columns:
        """Return the columns of a body, whose text columns have the names of their members."""
        return cls(
            frame,
            texts["SequenceNumber"],
            texts.get("PartitionKey"),
            data,
            arrival_micros,
            texts.get("EncryptionType"),
        )


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
    return Columns.of(frame, texts, data, micros)


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
    for one, before in zip(fields, befores, strict=True):
        texts = np.ndarray(
            (len(body) - len(one.fixed) + 1,), f"V{len(one.fixed)}", body, strides=(1,)
        )
        if texts[before].tobytes() != one.fixed * len(before):
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


_RECORDS: Final = b"\x67Records"
_TEXT, _BYTES, _ARRAY, _MAP = 3, 2, 4, 5
_INDEFINITE: Final = 31
_EMPTY_ARRAY: Final = b"\x80"
_BREAK: Final = b"\xff"
_TIME_HEADS: Final = (b"\xc1\x1b", b"\x1b")
"""Head of a time: a number of eight bytes (epoch milliseconds need them), with or without a tag."""

_MAX_MILLIS: Final = np.uint64(MAX_ARRIVAL_SECONDS * 1000)

_WORD: Final = 2
_GROUP: Final = 8

_LENGTHS: Final = ((24, "u1"), (25, ">u2"), (26, ">u4"))
"""Values in a head which announce that the length follows, and its type."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The format of a record.

    Attributes:
        head: Bytes before the first key.
        keys: Names of the keys in their order, each with the bytes between the value before it and
            its own value.
        end: Bytes after the last value.
    """

    head: bytes
    keys: tuple[tuple[str, bytes], ...]
    end: bytes


def cbor_columns_of(body: bytes) -> Columns | None:
    """Parse a GetRecords body in CBOR.

    Returns:
        The columns; `frame` is CBOR with an empty list of records. None: the body needs a CBOR
        parser, or is invalid.
    """
    if not MIN_BYTES <= len(body) <= MAX_BYTES:
        return None
    at = body.find(_RECORDS) + len(_RECORDS)
    if at < len(_RECORDS):
        return None
    try:
        count, start = _head(body, at, _ARRAY)
        layout = _layout(body, start)
        starts = _record_starts(body, start, layout)
        fields, ends = _map_fields(body, starts, layout)
        if (
            starts[0] != start
            or (ends[:-1] != starts[1:]).any()
            or count not in (None, len(starts))
        ):
            return None
        end = int(ends[-1]) if count is not None else _skip(body, int(ends[-1]), _BREAK)
        texts = {
            name: utf8(gather(body, *fields[name]))
            for name, _ in layout.keys
            if name not in (ARRIVAL, "Data")
        }
        micros = _micros(body, fields[ARRIVAL][0]) if ARRIVAL in fields else None
        data = gather(body, *fields["Data"])
    except (pa.ArrowException, ValueError, IndexError, StopIteration):
        return None
    frame = body[:at] + _EMPTY_ARRAY + body[end:]
    return Columns.of(frame, texts, data, micros)


def _head(body: bytes, at: int, major: int) -> tuple[int | None, int]:
    """Return the number in the head of an item, and the end of the head.

    The number is None if the item has an indefinite length. Raises `ValueError` for an item of
    another major type.
    """
    info = body[at] & 31
    # a response of ten megabytes has no lengths of eight bytes
    if body[at] >> 5 != major or 26 < info < _INDEFINITE:  # noqa: PLR2004
        raise ValueError(f"no item of major type {major}")
    size = {24: 1, 25: 2, 26: 4}.get(info, 0)
    if info == _INDEFINITE:
        return None, at + 1
    return int.from_bytes(body[at + 1 : at + 1 + size], "big") if size else info, at + 1 + size


def _skip(body: bytes, at: int, expected: bytes) -> int:
    """Return the end of `expected`, which must be at `at`. Raises `ValueError` otherwise."""
    if body[at : at + len(expected)] != expected:
        raise ValueError(f"no {expected!r}")
    return at + len(expected)


def _layout(body: bytes, start: int) -> _Layout:
    """Return the format of the first record. Raises `ValueError` if it is not supported."""
    count, at = _head(body, start, _MAP)
    head = body[start:at]
    keys: list[tuple[str, bytes]] = []
    while len(keys) != count and (count is not None or body[at] != _BREAK[0]):
        size, text = _head(body, at, _TEXT)
        value = text + (size or 0)
        name = body[text:value].decode()
        if name == ARRIVAL:
            value += len(next(head for head in _TIME_HEADS if body.startswith(head, value)))
        keys.append((name, body[at:value]))
        if name == ARRIVAL:
            at = value + 8
        else:
            size, at = _head(body, value, _BYTES if name == "Data" else _TEXT)
            at += len(body) if size is None else size
    names = {name for name, _ in keys}
    if len(names) != len(keys) or not REQUIRED <= names <= KNOWN:
        raise ValueError("unknown, duplicate or missing keys")
    return _Layout(head, tuple(keys), b"" if count is not None else _BREAK)


def _record_starts(body: bytes, start: int, layout: _Layout) -> Positions:
    """Return all offsets with the first bytes of the first record, where a record may start."""
    first = (layout.head + layout.keys[0][1])[:8]
    if len(first) < 8:  # noqa: PLR2004 (bytes)
        kind, found = "<u4", find_byte(body, start, len(body) - len(first), first[0])
    else:
        kind, found = "<u8", _find_words(body, start, first)
    starts: Positions = found[
        _numbers(body, kind)[found] == int.from_bytes(first[: np.dtype(kind).itemsize], "little")
    ]
    return starts


def _find_words(body: bytes, start: int, first: bytes) -> Positions:
    """Return offsets, in order, among which are all of the bytes `first` after `start`.

    The first three of these bytes contain one of two words of two bytes at an even offset. To
    compare only those, and then to look at eight results at a time, needs less than half of the
    time of a search for one byte, and finds hardly any other offsets. The words differ: a map and a
    text have different heads. `PIECE_BYTES` is a multiple of 16.
    """
    words = np.frombuffer(body, "<u2", len(body) // _WORD)
    even, odd = (np.frombuffer(first, "<u2", 1, offset=at)[0] for at in range(_WORD))
    of_piece = PIECE_BYTES // _WORD
    is_any, is_odd = np.empty(of_piece, np.bool_), np.empty(of_piece, np.bool_)
    found = []
    for at in range(start // _WORD, len(words), of_piece):
        piece = words[at : at + of_piece]
        size = len(piece)
        np.equal(piece, even, out=is_any[:size])
        np.equal(piece, odd, out=is_odd[:size])
        is_any[:size] |= is_odd[:size]
        is_any[size:] = False
        groups = np.flatnonzero(is_any.view(np.uint64) != 0)
        rows, columns = np.nonzero(is_any.reshape(-1, _GROUP)[groups])
        found.append(groups[rows] * _GROUP + columns + at)
    hits = np.concatenate(found)
    offsets: Positions = hits * _WORD - (words[hits] == odd)
    return offsets[(offsets >= start) & (offsets <= len(body) - len(first))]


def _map_fields(
    body: bytes, record_starts: Positions, layout: _Layout
) -> tuple[dict[str, tuple[Positions, Positions]], Positions]:
    """Return the starts and ends of the values of every record, and the ends of the records.

    Raises `ValueError` unless all records have the format of the first one.
    """
    fields: dict[str, tuple[Positions, Positions]] = {}
    at = record_starts + len(layout.head)
    for name, key in layout.keys:
        at = _skip_in_all(body, at, key)
        fields[name] = (
            (at, at + 8)
            if name == ARRIVAL
            else _values(body, at, _BYTES if name == "Data" else _TEXT)
        )
        at = fields[name][1]
    return fields, _skip_in_all(body, at, layout.end) if layout.end else at


def _skip_in_all(body: bytes, at: Positions, expected: bytes) -> Positions:
    texts = np.ndarray((len(body) - len(expected) + 1,), f"V{len(expected)}", body, strides=(1,))
    if texts[at].tobytes() != expected * len(at):
        raise ValueError(f"no {expected!r}")
    return at + len(expected)


def _values(body: bytes, at: Positions, major: int) -> tuple[Positions, Positions]:
    """Return the starts and ends of values whose heads are at `at`. Lengths may differ in type."""
    heads = np.frombuffer(body, np.uint8)[at]
    if (heads >> 5 != major).any():
        raise ValueError(f"a value of another major type than {major}")
    starts, sizes = at + 1, (heads & 31).astype(np.int64)
    if sizes.max() > _LENGTHS[-1][0]:
        raise ValueError("a value in pieces")
    if sizes.max() >= _LENGTHS[0][0]:
        infos = sizes.copy()
        for info, kind in _LENGTHS:
            rows = infos == info
            if rows.any():
                sizes[rows] = _numbers(body, kind)[at[rows] + 1]
                starts[rows] += np.dtype(kind).itemsize
    return starts, starts + sizes


def _numbers(body: bytes, kind: str) -> npt.NDArray[Any]:
    """Return a view of the body as numbers, one at each byte offset."""
    return np.ndarray((len(body) - np.dtype(kind).itemsize + 1,), kind, body, strides=(1,))


def _micros(body: bytes, at: Positions) -> Positions:
    """Return the milliseconds at these offsets in microseconds.

    Raises `ValueError` after the year 9999.
    """
    millis = _numbers(body, ">u8")[at]
    if (millis > _MAX_MILLIS).any():
        raise ValueError("an arrival time out of range")
    return np.asarray(millis * 1000, np.int64)


JSON_CONTENT_TYPE: Final = "application/x-amz-json-1.1"
CBOR_CONTENT_TYPE: Final = "application/x-amz-cbor-1.1"

_EPOCH_TIME_TAG: Final = 1


_Millis = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Record(msgspec.Struct, rename="pascal", gc=False):
    sequence_number: str
    data: bytes
    partition_key: str | None = None
    approximate_arrival_timestamp: float = 0.0
    encryption_type: str | None = None


class _Range(msgspec.Struct, rename="pascal", gc=False):
    starting_hash_key: str
    ending_hash_key: str


class _Child(msgspec.Struct, rename="pascal", gc=False):
    shard_id: str
    hash_key_range: _Range
    parent_shards: list[str] = []


class _Response(msgspec.Struct, rename="pascal", gc=False):
    records: list[_Record]
    next_shard_iterator: str | None = None
    millis_behind_latest: _Millis | None = None
    child_shards: list[_Child] | None = None


class _Event(_Response, rename="pascal", gc=False):
    continuation_sequence_number: str | None = None


_A = TypeVar("_A", bound=_Response)
_JSON: Final = msgspec.json.Decoder(_Response)
_EVENT_JSON: Final = msgspec.json.Decoder(_Event)


def decode_page(body: bytes, content_type: str, stream: str, shard_id: str) -> RecordsPage:
    """Decode a GetRecords body.

    Args:
        body: The body.
        content_type: Its Content-Type header. It decides between CBOR and JSON.
        stream: Name of the stream.
        shard_id: The shard.

    Raises:
        UnavailableError: The body is truncated, or is not a GetRecords response.
    """
    with _unreadable_is_unavailable("GetRecords", body, content_type, f"{shard_id} of {stream}"):
        if "cbor" in content_type.lower():
            return _from_cbor(body, stream, shard_id)
        return _from_json(_JSON, body, stream, shard_id)


def decode_event(payload: bytes, content_type: str, stream: str, shard_id: str) -> RecordsPage:
    """Decode a SubscribeToShardEvent in JSON. Arguments and errors are those of `decode_page`.

    Returns:
        A page whose `next_iterator` is the ContinuationSequenceNumber.
    """
    about = f"{shard_id} of {stream}"
    with _unreadable_is_unavailable("SubscribeToShard", payload, content_type, about):
        return _from_json(_EVENT_JSON, payload, stream, shard_id)


@contextmanager
def _unreadable_is_unavailable(
    operation: str, body: bytes, content_type: str, about: str
) -> Iterator[None]:
    try:
        yield
    except (
        msgspec.MsgspecError,
        cbor2.CBORDecodeError,
        pa.ArrowException,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UnavailableError(
            f"the {operation} response for {about} ({len(body)} bytes, "
            f"{content_type or 'no content type'}) cannot be read: {error}",
            code="BrokenBody",
            operation=operation,
        ) from error


def _from_json(
    decoder: msgspec.json.Decoder[_A], body: bytes, stream: str, shard_id: str
) -> RecordsPage:
    columns = columns_of(body)
    if columns is not None:
        return _page(decoder.decode(columns.frame), _table_of_columns(columns, stream, shard_id))
    response = decoder.decode(body)
    records = response.records
    table = records_table(
        stream,
        shard_id,
        sequence_numbers=[r.sequence_number for r in records],
        partition_keys=[r.partition_key for r in records],
        data=[r.data for r in records],
        arrival_micros=micros_of(
            np.fromiter(
                (r.approximate_arrival_timestamp for r in records), np.float64, len(records)
            )
        ),
        encryption_types=[r.encryption_type for r in records],
    )
    return _page(response, table)


def _table_of_columns(columns: Columns, stream: str, shard_id: str) -> pa.Table:
    micros = columns.arrival_micros
    rows = len(columns.data)
    return _table(
        stream,
        shard_id,
        columns.sequence_numbers,
        _or_nulls(columns.partition_keys, rows),
        columns.data,
        np.zeros(rows, np.int64) if micros is None else micros,
        _or_nulls(columns.encryption_types, rows),
    )


def _or_nulls(values: pa.StringArray | None, rows: int) -> pa.StringArray:
    return pa.nulls(rows, pa.string()) if values is None else values


def _page(response: _Response, table: pa.Table) -> RecordsPage:
    children = tuple(
        ChildShard(
            c.shard_id,
            tuple(c.parent_shards),
            HashKeyRange(
                int(c.hash_key_range.starting_hash_key), int(c.hash_key_range.ending_hash_key)
            ),
        )
        for c in response.child_shards or ()
    )
    following = (
        response.continuation_sequence_number
        if isinstance(response, _Event)
        else response.next_shard_iterator
    )
    return RecordsPage(
        table, following or None, response.millis_behind_latest, children, payload_bytes(table)
    )


def load_conversions() -> None:
    """Load what the first page would load, before a worker has a shard that waits for it.

    pyarrow imports pandas at the first conversion of Python values: 0.5 s, and several on a busy
    machine.
    """
    pa.array([""], pa.string())


def records_table(
    stream: str,
    shard_id: str,
    *,
    sequence_numbers: Sequence[str],
    partition_keys: Sequence[str | None],
    data: Sequence[bytes],
    arrival_micros: npt.NDArray[np.int64],
    encryption_types: Sequence[str | None],
) -> pa.Table:
    """Return columns of equal length as a table (`RECORD_SCHEMA`) of plain records.

    Sub-sequence numbers are 0, and explicit hash keys are null. A partition key is null if the
    producer gave none.

    Raises:
        ValueError: A sequence number is not decimal.
    """
    numbers, keys, encryption = (
        pa.array(texts, pa.string())
        for texts in (sequence_numbers, partition_keys, encryption_types)
    )
    return _table(
        stream, shard_id, numbers, keys, pa.array(data, pa.binary()), arrival_micros, encryption
    )


def _table(
    stream: str,
    shard_id: str,
    numbers: pa.Array,
    partition_keys: pa.Array,
    data: pa.Array,
    arrival_micros: npt.NDArray[np.int64],
    encryption_types: pa.Array,
) -> pa.Table:
    rows = len(numbers)
    if not _all_decimal(numbers):
        raise ValueError("a sequence number is not a decimal number")
    return pa.Table.from_arrays(
        [
            repeated(stream, rows),
            repeated(shard_id, rows),
            numbers,
            pa.array(np.zeros(rows, np.int64)),
            partition_keys,
            pa.nulls(rows, pa.string()),
            data,
            pa.array(arrival_micros, pa.timestamp("us", tz="UTC")),
            encryption_types,
        ],
        schema=RECORD_SCHEMA,
    )


def repeated(text: str, rows: int) -> pa.Array:
    """Return a string column with the same value in every row."""
    value = text.encode()
    offsets = np.arange(rows + 1, dtype=np.int64) * len(value)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(value * rows)
    )


def _all_decimal(texts: pa.Array) -> bool:
    """Return whether every string of an array without offset is a valid sequence number."""
    if len(texts) == 0:
        return True
    _, offsets, characters = texts.buffers()
    lengths = np.diff(np.frombuffer(offsets, np.int32, len(texts) + 1))
    digits = np.frombuffer(characters, np.uint8, int(lengths.sum())) - np.uint8(ord("0"))
    return bool(
        lengths.min() > 0
        and lengths.max() <= MAX_SEQUENCE_NUMBER_DIGITS
        # unsigned: characters below "0" are above 9
        and digits.max() <= 9  # noqa: PLR2004
    )


def _from_cbor(body: bytes, stream: str, shard_id: str) -> RecordsPage:
    columns = cbor_columns_of(body)
    # Kinesis tags integer milliseconds as a time. cbor2 would read them as seconds and refuse them.
    response = cbor2.loads(
        body if columns is None else columns.frame,
        semantic_decoders={_EPOCH_TIME_TAG: lambda value, *_: value},
    )
    if not isinstance(response, dict):
        raise TypeError("the body is not a map")
    records = response["Records"]
    if columns is not None and records == []:
        return _page(_rest(response), _table_of_columns(columns, stream, shard_id))
    data = [r["Data"] for r in records]
    if set(map(type, data)) - {bytes}:
        raise TypeError("a record's data is not a byte string")
    micros = np.fromiter(
        (_cbor_micros(r.get("ApproximateArrivalTimestamp", 0)) for r in records),
        np.int64,
        len(records),
    )
    table = records_table(
        stream,
        shard_id,
        sequence_numbers=[r["SequenceNumber"] for r in records],
        partition_keys=[r.get("PartitionKey") for r in records],
        data=data,
        arrival_micros=micros,
        encryption_types=[r.get("EncryptionType") for r in records],
    )
    return _page(_rest(response), table)


def _rest(response: dict[str, Any]) -> _Response:
    return msgspec.convert({**response, "Records": []}, _Response)


def _cbor_micros(value: Any) -> int:
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, float):
        return int(micros_of(np.array([value]))[0])
    if not isinstance(value, int):
        raise TypeError(f"an arrival time is {type(value).__name__}")
    if not MIN_ARRIVAL_SECONDS * 1000 <= value <= MAX_ARRIVAL_SECONDS * 1000:
        raise ValueError("an arrival time is out of range")
    return value * 1000

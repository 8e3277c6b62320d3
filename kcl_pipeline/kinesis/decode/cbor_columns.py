"""Parse the records of a CBOR body by byte offsets, without creating an object per record.

Every record must have the same keys in the same order as the first one. Records are found by their
first bytes. The lengths in a record give its end, which must be the start of the next record, from
the first record to the last. So bytes inside of a value that only look like the start of a record
are detected. Other bodies are left to a CBOR parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcl_pipeline.kinesis.decode.json_columns import (
    ARRIVAL,
    KNOWN,
    MAX_ARRIVAL_SECONDS,
    MAX_BYTES,
    MIN_BYTES,
    PIECE_BYTES,
    REQUIRED,
    Columns,
    Positions,
    find_byte,
    gather,
    utf8,
)

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
        fields, ends = _fields(body, starts, layout)
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
    return Columns(
        frame,
        texts["SequenceNumber"],
        texts.get("PartitionKey"),
        data,
        micros,
        texts.get("EncryptionType"),
    )


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


def _fields(
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

"""The records of a CBOR body as columns, by arithmetic on the places where records begin: no Python
object per record.

It works where every record of the body is written as the first one is (the same keys in the same
order). Where records may begin is found by their first bytes; then each one's lengths say where it
ends, and that has to be where the next one begins, from the first to the last: so what only looks
like a beginning, inside of somebody's data, is found out. Anything else is left to a CBOR parser.
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
    REQUIRED,
    Columns,
    Positions,
    gather,
    places,
    utf8,
)

_RECORDS: Final = b"\x67Records"
_TEXT, _BYTES, _ARRAY, _MAP = 3, 2, 4, 5
_ENDLESS: Final = 31
_EMPTY_ARRAY: Final = b"\x80"
_BREAK: Final = b"\xff"
_TIME_HEADS: Final = (b"\xc1\x1b", b"\x1b")
"""A number of eight bytes, with or without the tag of a time: milliseconds since 1970 are that
large.
"""

_MAX_MILLIS: Final = np.uint64(MAX_ARRIVAL_SECONDS * 1000)

_LENGTHS: Final = ((24, "u1"), (25, ">u2"), (26, ">u4"))
"""How a head says that its length follows, and in which form."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a record is written: its head, the keys in their order (each with the bytes between the
    value before and its own), and what ends it.
    """

    head: bytes
    keys: tuple[tuple[str, bytes], ...]
    end: bytes


def cbor_columns_of(body: bytes) -> Columns | None:
    """The columns; `frame` is CBOR, with an empty list of records.

    None where a parser has to be asked, also about what is wrong with the body.
    """
    if not MIN_BYTES <= len(body) <= MAX_BYTES:
        return None
    at = body.find(_RECORDS) + len(_RECORDS)
    if at < len(_RECORDS):
        return None
    try:
        count, start = _head(body, at, _ARRAY)
        layout = _layout(body, start)
        begins = _begins(body, start, layout)
        fields, ends = _fields(body, begins, layout)
        if (
            begins[0] != start
            or (ends[:-1] != begins[1:]).any()
            or count not in (None, len(begins))
        ):
            return None
        end = int(ends[-1]) if count is not None else _past(body, int(ends[-1]), _BREAK)
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
        texts["PartitionKey"],
        data,
        micros,
        texts.get("EncryptionType"),
    )


def _head(body: bytes, at: int, major: int) -> tuple[int | None, int]:
    """The number in the head of an item (None: it goes on until a break), and where the head ends.

    Raises `ValueError` for an item of another kind.
    """
    info = body[at] & 31
    # longer lengths are not met in an answer of ten megabytes
    if body[at] >> 5 != major or 26 < info < _ENDLESS:  # noqa: PLR2004
        raise ValueError(f"no item of kind {major}")
    size = {24: 1, 25: 2, 26: 4}.get(info, 0)
    if info == _ENDLESS:
        return None, at + 1
    return int.from_bytes(body[at + 1 : at + 1 + size], "big") if size else info, at + 1 + size


def _past(body: bytes, at: int, expected: bytes) -> int:
    """Where `expected` ends, which is at `at`. Raises `ValueError` for anything else."""
    if body[at : at + len(expected)] != expected:
        raise ValueError(f"no {expected!r}")
    return at + len(expected)


def _layout(body: bytes, start: int) -> _Layout:
    """That of the first record. Raises `ValueError` for one that cannot be read by position."""
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
        raise ValueError("keys that are not known")
    return _Layout(head, tuple(keys), b"" if count is not None else _BREAK)


def _begins(body: bytes, start: int, layout: _Layout) -> Positions:
    """Where a record may begin: wherever the first bytes of the first one stand."""
    first = (layout.head + layout.keys[0][1])[:8]
    kind = "<u8" if len(first) == 8 else "<u4"  # noqa: PLR2004 (bytes)
    found = places(body, start, len(body) - len(first), first[0])
    begins: Positions = found[
        _numbers(body, kind)[found] == int.from_bytes(first[: np.dtype(kind).itemsize], "little")
    ]
    return begins


def _fields(
    body: bytes, begins: Positions, layout: _Layout
) -> tuple[dict[str, tuple[Positions, Positions]], Positions]:
    """Where the values of every record begin and end, and where each record ends.

    Raises `ValueError` unless all are written as the first one.
    """
    fields: dict[str, tuple[Positions, Positions]] = {}
    at = begins + len(layout.head)
    for name, key in layout.keys:
        at = _all_past(body, at, key)
        fields[name] = (
            (at, at + 8)
            if name == ARRIVAL
            else _values(body, at, _BYTES if name == "Data" else _TEXT)
        )
        at = fields[name][1]
    return fields, _all_past(body, at, layout.end) if layout.end else at


def _all_past(body: bytes, at: Positions, expected: bytes) -> Positions:
    texts = np.ndarray((len(body) - len(expected) + 1,), f"V{len(expected)}", body, strides=(1,))
    if texts[at].tobytes() != expected * len(at):
        raise ValueError(f"no {expected!r}")
    return at + len(expected)


def _values(body: bytes, at: Positions, major: int) -> tuple[Positions, Positions]:
    """Where values with these heads begin and end; the lengths may be written in different
    forms.
    """
    heads = np.frombuffer(body, np.uint8)[at]
    if (heads >> 5 != major).any():
        raise ValueError(f"a value of another kind than {major}")
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
    """The number that is written at each place of the body."""
    return np.ndarray((len(body) - np.dtype(kind).itemsize + 1,), kind, body, strides=(1,))


def _micros(body: bytes, at: Positions) -> Positions:
    """The milliseconds at each place in microseconds.

    Raises `ValueError` for such as no clock shows.
    """
    millis = _numbers(body, ">u8")[at]
    if (millis > _MAX_MILLIS).any():
        raise ValueError("an arrival time out of range")
    return np.asarray(millis * 1000, np.int64)

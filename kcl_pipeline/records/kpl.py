"""KPL aggregates: many user records in one Kinesis record, taken apart over Arrow columns (protocol §10.5).

An aggregate is the magic `F3 89 9A C2`, a protobuf message, and the MD5 of that message. What only looks like one is delivered as the plain
record it is. An aggregate with a user record outside the shard's hash range is dropped whole: after a reshard it belongs to the other child.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.records.kinesis import RECORD_SCHEMA
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange

MAGIC: Final = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES: Final = 16

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_UINT64: Final = 2**64 - 1
_MAX_DECIMAL_DIGITS: Final = len(str(MAX_HASH_KEY))


@dataclass(frozen=True, slots=True)
class UserRecord:
    """One record of an aggregate. `partition_key` None: its index points outside the table, so nobody knows it."""

    partition_key: str | None
    explicit_hash_key: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Deaggregated:
    """`records` has `RECORD_SCHEMA`. `last_sub_sequence_number` is the highest index inside the last Kinesis record that was given, delivered or dropped."""

    records: pa.Table
    last_sub_sequence_number: int = 0
    dropped_aggregates: int = 0
    unknown_keys: int = 0
    """User records that were delivered under the partition key of their aggregate, because their own could not be found."""


def deaggregate(records: pa.Table, hash_key_range: HashKeyRange | None) -> Deaggregated:
    """Take apart every aggregate of a page; order is kept, `hash_key_range` None delivers all. Never raises on what producers wrote."""
    starts = pc.starts_with(records.column("data"), pattern=MAGIC)
    if not pc.any(starts).as_py():
        return Deaggregated(records)
    everywhere = hash_key_range is None or (hash_key_range.start == 0 and hash_key_range.end == MAX_HASH_KEY)
    columns = _Columns()
    last = dropped = 0
    data = records.column("data").to_pylist()
    keys = records.column("partition_key").to_pylist()
    hash_keys = records.column("explicit_hash_key").to_pylist()
    for row, (starts_like_one, value) in enumerate(zip(starts.to_pylist(), data, strict=True)):
        members = decode_aggregate(value) if starts_like_one else None
        last = 0
        if members is None:
            columns.add_plain(row, keys[row], hash_keys[row], value)
            continue
        last = max(len(members) - 1, 0)
        if hash_key_range is not None and not everywhere and not _all_inside(members, hash_key_range):
            dropped += 1
            continue
        columns.add_members(row, keys[row], members)
    return Deaggregated(columns.table(records), last, dropped, columns.unknown_keys)


def decode_aggregate(data: bytes) -> tuple[UserRecord, ...] | None:
    """The user records of an aggregate in their order (their index is the sub-sequence number); None when `data` is no valid aggregate."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + DIGEST_BYTES:
        return None
    message = data[len(MAGIC) : -DIGEST_BYTES]
    if hashlib.md5(message, usedforsecurity=False).digest() != data[-DIGEST_BYTES:]:
        return None
    try:
        return _decode_message(message)
    except _NotProtobufError:
        return None


@dataclass(slots=True)
class _Columns:
    """The output, column by column; `rows` are the rows of the page that the inherited columns are copied from."""

    rows: list[int] = field(default_factory=list)
    subs: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    hash_keys: list[str | None] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    unknown_keys: int = 0

    def add_plain(self, row: int, key: str, hash_key: str | None, data: bytes) -> None:
        self.rows.append(row)
        self.subs.append(0)
        self.keys.append(key)
        self.hash_keys.append(hash_key)
        self.data.append(data)

    def add_members(self, row: int, outer_key: str, members: tuple[UserRecord, ...]) -> None:
        self.rows.extend([row] * len(members))
        self.subs.extend(range(len(members)))
        self.keys.extend([outer_key if m.partition_key is None else m.partition_key for m in members])
        self.hash_keys.extend([m.explicit_hash_key for m in members])
        self.data.extend([m.data for m in members])
        self.unknown_keys += sum(m.partition_key is None for m in members)

    def table(self, page: pa.Table) -> pa.Table:
        own = {
            "sub_sequence_number": pa.array(self.subs, pa.int64()),
            "partition_key": pa.array(self.keys, pa.string()),
            "explicit_hash_key": pa.array(self.hash_keys, pa.string()),
            "data": pa.array(self.data, pa.binary()),
        }
        inherited = page.drop_columns(list(own)).take(pa.array(self.rows, pa.int64()))
        return pa.Table.from_arrays([own[name] if name in own else inherited.column(name) for name in RECORD_SCHEMA.names], schema=RECORD_SCHEMA)


def _all_inside(members: tuple[UserRecord, ...], hash_key_range: HashKeyRange) -> bool:
    """A record whose key is not known says nothing about where the aggregate belongs."""
    known = {(m.partition_key, m.explicit_hash_key) for m in members}
    return all(hash_key is None or hash_key_range.contains(hash_key) for hash_key in (_effective_hash_key(*pair) for pair in known))


def _effective_hash_key(partition_key: str | None, explicit_hash_key: str | None) -> int | None:
    if explicit_hash_key is not None and explicit_hash_key.isascii() and explicit_hash_key.isdigit() and len(explicit_hash_key) <= _MAX_DECIMAL_DIGITS:
        return int(explicit_hash_key)
    if partition_key is None:
        return None
    return int.from_bytes(hashlib.md5(partition_key.encode(), usedforsecurity=False).digest(), "big")


class _NotProtobufError(Exception):
    """The bytes are not the message that they should be."""


def _decode_message(message: bytes) -> tuple[UserRecord, ...]:
    partition_keys: list[str] = []
    hash_keys: list[str] = []
    spans: list[tuple[int, int]] = []
    position, end = 0, len(message)
    while position < end:
        number, wire_type, position = _tag(message, position, end)
        if wire_type != _BYTES:
            position = _skip(message, position, end, wire_type)
            continue
        start, position = _span(message, position, end)
        if number == 1:
            partition_keys.append(message[start:position].decode(errors="replace"))
        elif number == 2:  # noqa: PLR2004 (field numbers of the message, protocol §10.5)
            hash_keys.append(message[start:position].decode(errors="replace"))
        elif number == 3:  # noqa: PLR2004 (likewise)
            spans.append((start, position))
    return tuple(_decode_record(message, start, stop, partition_keys, hash_keys) for start, stop in spans)


def _decode_record(message: bytes, position: int, end: int, partition_keys: list[str], hash_keys: list[str]) -> UserRecord:
    key_index = hash_key_index = data = None
    while position < end:
        number, wire_type, position = _tag(message, position, end)
        if wire_type == _VARINT and number in (1, 2):
            value, position = _varint(message, position, end)
            if number == 1:
                key_index = value
            else:
                hash_key_index = value
        elif wire_type == _BYTES and number == 3:  # noqa: PLR2004 (field numbers of the message, protocol §10.5)
            start, position = _span(message, position, end)
            data = message[start:position]
        else:
            position = _skip(message, position, end, wire_type)
    if key_index is None or data is None:
        raise _NotProtobufError
    key = partition_keys[key_index] if key_index < len(partition_keys) else None
    hash_key = hash_keys[hash_key_index] if hash_key_index is not None and hash_key_index < len(hash_keys) else None
    return UserRecord(key, hash_key, data)


def _varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 (the continuation bit)
            return value & _UINT64, place + 1
        shift += 7
    raise _NotProtobufError


def _tag(message: bytes, position: int, end: int) -> tuple[int, int, int]:
    value, position = _varint(message, position, end)
    if value >> 3 == 0:
        raise _NotProtobufError
    return value >> 3, value & 7, position


def _span(message: bytes, position: int, end: int) -> tuple[int, int]:
    length, start = _varint(message, position, end)
    if length > end - start:
        raise _NotProtobufError
    return start, start + length


def _skip(message: bytes, position: int, end: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return _varint(message, position, end)[1]
    if wire_type == _BYTES:
        return _span(message, position, end)[1]
    width = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
    if width is None or position + width > end:
        raise _NotProtobufError
    return position + width

"""De-aggregate KPL records: many user records in one Kinesis record (protocol §10.5).

An aggregate is the magic `F3 89 9A C2`, a protobuf message, and the MD5 of that message. A record
that only looks like one is delivered as a plain record.

Anyone who may write to the stream chooses the bytes, so an aggregate has limits: the length of its
keys and how much larger its user records are than itself. An aggregate over a limit is delivered
as a plain record and counted. The limits concern one record at a time, so a range that is read
again gives the same rows.

A user record may hash outside the shard. The KPL, which names its aggregates `a`, sends such a
record again after a reshard; like the Java KCL this module drops its aggregate and counts it. Other
aggregators do not send it again, so their aggregates are delivered whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.kinesis.client import RECORD_SCHEMA
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange

MAGIC: Final = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES: Final = 16
_FEW_ROWS: Final = 32
KPL_PARTITION_KEY: Final = "a"
"""What the KPL writes as the partition key of every aggregate of more than one user record."""

MAX_PARTITION_KEY_CHARACTERS: Final = 256
"""Of a partition key; the limit of PutRecord."""

MAX_EXPANSION: Final = 64
"""How many times larger than an aggregate its user records may be, all keys included.

Our own limit. A key of 256 characters that all user records of one byte share gives 46.
"""

USER_RECORD_BYTES: Final = 64
"""What one user record counts for, besides its keys and data."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_UINT64: Final = 2**64 - 1
_MAX_DECIMAL_DIGITS: Final = len(str(MAX_HASH_KEY))


@dataclass(frozen=True, slots=True)
class UserRecord:
    """One record of an aggregate. `partition_key` None: its index points outside the table, so
    nobody knows it.
    """

    partition_key: str | None
    explicit_hash_key: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Deaggregated:
    """`records` has `RECORD_SCHEMA`.

    `last_sub_sequence_number` is the highest index inside the last Kinesis record that was given,
    delivered or dropped.
    """

    records: pa.Table
    last_sub_sequence_number: int = 0
    dropped_aggregates: int = 0
    unknown_keys: int = 0
    """User records that were delivered under the partition key of their aggregate, because their
    own could not be found.
    """

    over_limit: int = 0
    """Aggregates that were delivered as plain records, because they exceed a limit."""

    first_rejected: str | None = None
    """Sequence number of the first aggregate that one of these counters counts."""


def deaggregate(records: pa.Table, hash_key_range: HashKeyRange | None) -> Deaggregated:
    """De-aggregate a page. The order is kept; `hash_key_range` None drops nothing.

    Never raises on what producers wrote.
    """
    starts = _starts_like_aggregates(records.column("data"))
    if not any(starts):
        return Deaggregated(records)
    everywhere = hash_key_range is None or (
        hash_key_range.start == 0 and hash_key_range.end == MAX_HASH_KEY
    )
    columns = _Columns()
    last = dropped = over_limit = 0
    first_rejected: str | None = None
    numbers = records.column("sequence_number")
    data = records.column("data").to_pylist()
    keys = records.column("partition_key").to_pylist()
    hash_keys = records.column("explicit_hash_key").to_pylist()
    for row, (starts_like_one, value) in enumerate(zip(starts, data, strict=True)):
        last = 0
        try:
            members = decode_aggregate(value) if starts_like_one else None
        except AggregateTooLargeError:
            members = None
            over_limit += 1
            first_rejected = first_rejected or numbers[row].as_py()
        if members is None:
            columns.add_plain(row, keys[row], hash_keys[row], value)
            continue
        last = max(len(members) - 1, 0)
        if (
            hash_key_range is not None
            and not everywhere
            and keys[row] == KPL_PARTITION_KEY
            and not _all_inside(members, hash_key_range)
        ):
            dropped += 1
            first_rejected = first_rejected or numbers[row].as_py()
            continue
        if columns.add_members(row, keys[row], members):
            first_rejected = first_rejected or numbers[row].as_py()
    table = columns.table(records)
    return Deaggregated(table, last, dropped, columns.unknown_keys, over_limit, first_rejected)


def _starts_like_aggregates(data: pa.ChunkedArray) -> list[bool]:
    """By row; empty when no row does. A few rows take less time than a call of a kernel."""
    if len(data) <= _FEW_ROWS:
        return [value.startswith(MAGIC) for value in data.to_pylist()]
    starts = pc.starts_with(data, pattern=MAGIC)
    return starts.to_pylist() if any(chunk.true_count for chunk in starts.chunks) else []


def decode_aggregate(data: bytes) -> tuple[UserRecord, ...] | None:
    """Return the user records of an aggregate in order; None when `data` is no valid aggregate.

    The index of a user record is its sub-sequence number.

    Raises:
        AggregateTooLargeError: The aggregate is valid but exceeds a limit.
    """
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
    """The output, column by column; `rows` are the rows of the page that the inherited columns are
    copied from.
    """

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

    def add_members(self, row: int, outer_key: str, members: tuple[UserRecord, ...]) -> int:
        """Add the user records of an aggregate; return how many have no key of their own."""
        self.rows.extend([row] * len(members))
        self.subs.extend(range(len(members)))
        self.keys.extend(
            [outer_key if m.partition_key is None else m.partition_key for m in members]
        )
        self.hash_keys.extend([m.explicit_hash_key for m in members])
        self.data.extend([m.data for m in members])
        unknown = sum(m.partition_key is None for m in members)
        self.unknown_keys += unknown
        return unknown

    def table(self, page: pa.Table) -> pa.Table:
        own = {
            "sub_sequence_number": pa.array(self.subs, pa.int64()),
            "partition_key": pa.array(self.keys, pa.string()),
            "explicit_hash_key": pa.array(self.hash_keys, pa.string()),
            "data": pa.array(self.data, pa.binary()),
        }
        inherited = page.drop_columns(list(own)).take(pa.array(self.rows, pa.int64()))
        return pa.Table.from_arrays(
            [own[name] if name in own else inherited.column(name) for name in RECORD_SCHEMA.names],
            schema=RECORD_SCHEMA,
        )


def _all_inside(members: tuple[UserRecord, ...], hash_key_range: HashKeyRange) -> bool:
    """A record whose key is not known says nothing about where the aggregate belongs."""
    known = {(m.partition_key, m.explicit_hash_key) for m in members}
    return all(
        hash_key is None or hash_key_range.contains(hash_key)
        for hash_key in (_effective_hash_key(*pair) for pair in known)
    )


def _effective_hash_key(partition_key: str | None, explicit_hash_key: str | None) -> int | None:
    if (
        explicit_hash_key is not None
        and explicit_hash_key.isascii()
        and explicit_hash_key.isdigit()
        and len(explicit_hash_key) <= _MAX_DECIMAL_DIGITS
    ):
        return int(explicit_hash_key)
    if partition_key is None:
        return None
    return int.from_bytes(
        hashlib.md5(partition_key.encode(), usedforsecurity=False).digest(), "big"
    )


class AggregateTooLargeError(Exception):
    """A valid aggregate exceeds a limit of this module."""


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
            partition_keys.append(_key(message[start:position], MAX_PARTITION_KEY_CHARACTERS))
        elif number == 2:  # noqa: PLR2004 (field numbers of the message, protocol §10.5)
            hash_keys.append(_key(message[start:position], _MAX_DECIMAL_DIGITS))
        elif number == 3:  # noqa: PLR2004 (likewise)
            spans.append((start, position))
    most = MAX_EXPANSION * (len(MAGIC) + end + DIGEST_BYTES)
    if len(spans) * USER_RECORD_BYTES > most:
        raise AggregateTooLargeError
    sizes = [len(key.encode()) for key in partition_keys]
    members: list[UserRecord] = []
    expanded = 0
    for start, stop in spans:
        member, key = _decode_record(message, start, stop, partition_keys, hash_keys)
        expanded += USER_RECORD_BYTES + len(member.data) + len(member.explicit_hash_key or "")
        expanded += sizes[key] if key < len(sizes) else 0
        if expanded > most:
            raise AggregateTooLargeError
        members.append(member)
    return tuple(members)


def _key(value: bytes, most: int) -> str:
    """Return a key as text. Raises `AggregateTooLargeError` for more than `most` characters."""
    text = value.decode(errors="replace")
    if len(text) > most:
        raise AggregateTooLargeError
    return text


def _decode_record(
    message: bytes, position: int, end: int, partition_keys: list[str], hash_keys: list[str]
) -> tuple[UserRecord, int]:
    """Return a user record and the index of its partition key."""
    key_index = hash_key_index = data = None
    while position < end:
        number, wire_type, position = _tag(message, position, end)
        if wire_type == _VARINT and number in (1, 2):
            value, position = _varint(message, position, end)
            if number == 1:
                key_index = value
            else:
                hash_key_index = value
        elif wire_type == _BYTES and number == 3:  # noqa: PLR2004
            # field numbers of the message, protocol §10.5
            start, position = _span(message, position, end)
            data = message[start:position]
        else:
            position = _skip(message, position, end, wire_type)
    if key_index is None or data is None:
        raise _NotProtobufError
    key = partition_keys[key_index] if key_index < len(partition_keys) else None
    hash_key = (
        hash_keys[hash_key_index]
        if hash_key_index is not None and hash_key_index < len(hash_keys)
        else None
    )
    return UserRecord(key, hash_key, data), key_index


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

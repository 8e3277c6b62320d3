"""De-aggregate KPL records: many user records in one Kinesis record (protocol §10.5).

An aggregate consists of the magic bytes `F3 89 9A C2`, a protobuf message, and the MD5 digest of
that message. A record that only starts like an aggregate is delivered as a plain record.

Producers choose the bytes, so there are limits for the length of keys and for the size of the user
records relative to the aggregate. An aggregate that exceeds a limit is delivered as a plain record
and counted. The limits apply to single records, so a range that is read again gives the same rows.

The hash key of a user record may be outside the shard. The KPL, whose aggregates have the partition
key `a`, sends such a record again after a reshard. Like the Java KCL this module drops the
aggregate, and counts it. Other aggregators do not send it again, so all their user records are
delivered.
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
"""Partition key of every KPL aggregate with more than one user record."""

MAX_PARTITION_KEY_CHARACTERS: Final = 256
"""Longest partition key: the limit of PutRecord."""

MAX_EXPANSION: Final = 64
"""Largest ratio of the size of the user records, with keys, to the size of the aggregate.

Our own limit. User records of one byte that share a key of 256 characters give 46.
"""

USER_RECORD_BYTES: Final = 64
"""Size that a user record counts for in addition to its keys and data."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_UINT64: Final = 2**64 - 1
_MAX_DECIMAL_DIGITS: Final = len(str(MAX_HASH_KEY))


@dataclass(frozen=True, slots=True)
class UserRecord:
    """One record of an aggregate.

    Attributes:
        partition_key: None: its index is not in the key table of the aggregate.
        explicit_hash_key: None: the record has none.
        data: The payload.
    """

    partition_key: str | None
    explicit_hash_key: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Deaggregated:
    """The result of de-aggregating a page.

    Attributes:
        records: The user records (`RECORD_SCHEMA`).
        last_sub_sequence_number: Highest index inside the last Kinesis record of the page,
            delivered or dropped.
        dropped_aggregates: KPL aggregates that were dropped.
        unknown_keys: User records that were delivered with the partition key of their aggregate,
            or with none if it has none, because their own is unknown.
        over_limit: Aggregates that were delivered as plain records, because they exceed a limit.
        first_rejected: Sequence number of the first aggregate that is counted above.
    """

    records: pa.Table
    last_sub_sequence_number: int = 0
    dropped_aggregates: int = 0
    unknown_keys: int = 0
    over_limit: int = 0
    first_rejected: str | None = None


def deaggregate(records: pa.Table, hash_key_range: HashKeyRange | None) -> Deaggregated:
    """De-aggregate a page. Keeps the order, and does not raise for any input of producers.

    Args:
        records: The page (`RECORD_SCHEMA`).
        hash_key_range: The range of the shard. None: no aggregate is dropped.
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
    """Return for each row whether it starts with the magic bytes; empty if no row does.

    For a few rows, Python is faster than a call of an Arrow kernel.
    """
    if len(data) <= _FEW_ROWS:
        return [value.startswith(MAGIC) for value in data.to_pylist()]
    starts = pc.starts_with(data, pattern=MAGIC)
    return starts.to_pylist() if any(chunk.true_count for chunk in starts.chunks) else []


def decode_aggregate(data: bytes) -> tuple[UserRecord, ...] | None:
    """Return the user records of an aggregate in order.

    The index of a user record is its sub-sequence number.

    Returns:
        None: `data` is not a valid aggregate.

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
    """The columns of the output. `rows` are the rows of the page for all other columns."""

    rows: list[int] = field(default_factory=list)
    subs: list[int] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hash_keys: list[str | None] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    unknown_keys: int = 0

    def add_plain(self, row: int, key: str | None, hash_key: str | None, data: bytes) -> None:
        self.rows.append(row)
        self.subs.append(0)
        self.keys.append(key)
        self.hash_keys.append(hash_key)
        self.data.append(data)

    def add_members(self, row: int, outer_key: str | None, members: tuple[UserRecord, ...]) -> int:
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
    # A record without a known key is ignored.
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
    """The bytes are not the protobuf message of an aggregate."""


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
        elif number == 3:  # noqa: PLR2004 (as above)
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
    """Return a key as a string. Raises `AggregateTooLargeError` above `most` characters."""
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
    for at in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 (the continuation bit)
            return value & _UINT64, at + 1
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

"""The data plane of the Kinesis model: puts, iterators and reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import md5
from typing import Any, Final

from kcl_pipeline.shards import AUTO, MAX_HASH_KEY, ChildShard
from kcl_pipeline.testing.kinesis import sequence
from kcl_pipeline.testing.kinesis.errors import (
    KinesisError,
    constraint,
    invalid_argument,
    not_found,
    throttled,
    validation,
)
from kcl_pipeline.testing.kinesis.shards import RecordColumns, ShardLog
from kcl_pipeline.testing.kinesis.state import Answer, Params, World, decode_token, encode_token
from kcl_pipeline.testing.kinesis.stream import Stream

MAX_RECORDS_PER_PUT: Final = 500
MAX_BYTES_PER_PUT: Final = 5 * 1_048_576
MAX_BYTES_PER_LARGE_PUT: Final = 10 * 1_048_576
MAX_RECORDS_PER_READ: Final = 10_000
_DEFAULT_RECORD_BYTES: Final = 1_048_576
_MAX_KEY_LENGTH: Final = 256
_HASH_KEY: Final = re.compile(r"0|[1-9]\d{0,38}")

Entry = tuple[str | None, bytes, str | None]
"""A record to put: partition key, data, explicit hash key.

Only a stream with the record distribution strategy AUTO accepts a record without a key.
"""


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of one put: a position, or an error.

    If `error` (a code) is set, `shard_id` and `sequence_number` are empty.
    """

    shard_id: str = ""
    sequence_number: str = ""
    error: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """One GetRecords response.

    `next_iterator` is None at the end of a closed shard; `child_shards` are then its children.
    """

    page: RecordColumns
    next_iterator: str | None
    millis_behind_latest: int
    child_shards: tuple[ChildShard, ...]


# -- putting
# ----------------------------------------------------------------------------


def _check_entry(stream: Stream, entry: Entry, field: str) -> int:
    """Return the record's size in bytes.

    Raises ValidationException or InvalidArgumentException for an invalid record.
    """
    key, data, explicit = entry
    if key is None:
        if stream.record_distribution != AUTO:
            raise validation(
                f"1 validation error detected: Value null at '{field}partitionKey' failed to "
                "satisfy constraint: Member must not be null"
            )
    elif not key:
        raise constraint(f"{field}partitionKey", key, "have length greater than or equal to 1")
    elif len(key) > _MAX_KEY_LENGTH:
        raise constraint(
            f"{field}partitionKey", key, f"have length less than or equal to {_MAX_KEY_LENGTH}"
        )
    if explicit is not None:
        if _HASH_KEY.fullmatch(explicit) is None:
            raise constraint(
                f"{field}explicitHashKey",
                explicit,
                "satisfy regular expression pattern: 0|([1-9]\\d{0,38})",
            )
        if int(explicit) > MAX_HASH_KEY:
            raise invalid_argument(
                "Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, "
                f"2^128-1]. Specified value was {explicit}"
            )
    size = len(data) + len((key or "").encode())
    if size > stream.max_record_bytes:
        buffer = f"java.nio.HeapByteBuffer[pos=0 lim={len(data)} cap={len(data)}]"
        raise constraint(
            f"{field}data", buffer, f"have length less than or equal to {stream.max_record_bytes}"
        )
    return size


def put_records(world: World, params: Params, entries: Sequence[Entry]) -> list[PutResult]:
    """Store 1 to 500 records and return one result per record.

    The results are independent: a shard's throughput limit can reject one record while others are
    stored.
    """
    if not entries:
        raise constraint("records", "[]", "have length greater than or equal to 1")
    if len(entries) > MAX_RECORDS_PER_PUT:
        raise constraint(
            "records",
            f"[{len(entries)} records]",
            f"have length less than or equal to {MAX_RECORDS_PER_PUT}",
        )
    with world.lock:
        stream = world.usable(params)
        sizes = [
            _check_entry(stream, entry, f"records.{i}.member.")
            for i, entry in enumerate(entries, 1)
        ]
        most = (
            MAX_BYTES_PER_PUT
            if stream.max_record_bytes <= _DEFAULT_RECORD_BYTES
            else MAX_BYTES_PER_LARGE_PUT
        )
        if sum(sizes) > most:
            raise invalid_argument(f"Records size exceeds {most // 1_048_576} MB limit")
        now_millis = world.now_millis()
        now = world.clock.monotonic() if world.settings.enforce_limits else None
        return [
            _put(stream, entry, size, now_millis, now)
            for entry, size in zip(entries, sizes, strict=True)
        ]


def _put(stream: Stream, entry: Entry, size: int, now_millis: int, now: float | None) -> PutResult:
    key, data, explicit = entry
    shard = (
        stream.next_shard()
        if stream.record_distribution == AUTO
        else stream.route(
            int(explicit)
            if explicit is not None
            else int.from_bytes(md5((key or "").encode(), usedforsecurity=False).digest(), "big")
        )
    )
    if now is not None and not shard.limits.admit_put(size, now):
        refused = throttled(shard.shard_id, stream.name, stream.account)
        return PutResult(error=refused.code, message=refused.message)
    return PutResult(shard.shard_id, shard.append(key, data, size, now_millis))


def put_record(world: World, params: Params, entry: Entry) -> PutResult:
    """Store one record; raises ProvisionedThroughputExceededException."""
    with world.lock:
        stream = world.usable(params)
        size = _check_entry(stream, entry, "")
        ordering = params.get("SequenceNumberForOrdering")
        if ordering is not None and sequence.parse(str(ordering)) is None:
            raise invalid_argument(
                f"ExclusiveMinimumSequenceNumber {ordering} used in PutRecord on stream "
                f"{stream.name} under account {stream.account} is invalid."
            )
        put = _put(
            stream,
            entry,
            size,
            world.now_millis(),
            world.clock.monotonic() if world.settings.enforce_limits else None,
        )
    if put.error is not None:
        raise KinesisError(put.error, put.message or "")
    return put


# -- iterators
# ----------------------------------------------------------------------------


def iterator(stream: Stream, shard: ShardLog, index: int, now_millis: int) -> str:
    """A token for `index` in the shard."""
    return encode_token("iterator", now_millis, stream.name, stream.serial, shard.shard_id, index)


def start_index(
    world: World,
    stream: Stream,
    shard: ShardLog,
    kind: str,
    number: str | None,
    at_millis: int | None,
) -> int:
    """The index that an iterator type and its arguments select; raises InvalidArgumentException."""
    now_millis = world.now_millis()
    stream.trim(shard, now_millis)
    if kind in {"TRIM_HORIZON", "LATEST"}:
        if number is not None:
            raise _wrong_combination(kind, "also a")
        return shard.head if kind == "TRIM_HORIZON" else shard.end
    if kind == "AT_TIMESTAMP":
        if at_millis is None:
            raise invalid_argument(
                "Must specify timestampInMillis parameter for iterator of type AT_TIMESTAMP. "
                "Current request has no timestamp parameter."
            )
        if at_millis > now_millis:
            raise invalid_argument(
                "The timestampInMillis parameter cannot be greater than the "
                "currentTimestampInMillis. "
                f"timestampInMillis: {at_millis}, currentTimestampInMillis: {now_millis}"
            )
        return shard.index_at_time(at_millis)
    if kind not in {"AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"}:
        raise constraint(
            "shardIteratorType",
            kind,
            "satisfy enum value set: [AFTER_SEQUENCE_NUMBER, LATEST, AT_TIMESTAMP, "
            "AT_SEQUENCE_NUMBER, TRIM_HORIZON]",
        )
    if number is None:
        raise _wrong_combination(kind, "no")
    _check_sequence_number(stream, shard, number)
    return shard.index_at(number) if kind == "AT_SEQUENCE_NUMBER" else shard.index_after(number)


def _wrong_combination(kind: str, what: str) -> KinesisError:
    return invalid_argument(
        "Must either specify (1) AT_SEQUENCE_NUMBER or AFTER_SEQUENCE_NUMBER and "
        "StartingSequenceNumber or "
        f"(2) TRIM_HORIZON or LATEST and no StartingSequenceNumber. Request specified {kind} "
        f"and {what} StartingSequenceNumber."
    )


def _check_sequence_number(stream: Stream, shard: ShardLog, number: str) -> None:
    parts = sequence.parse(number)
    used = (
        f"StartingSequenceNumber {number} used in GetShardIterator on shard "
        f"{shard.shard_id} in stream {stream.name} under account {stream.account}"
    )
    if parts is None:
        raise invalid_argument(f"{used} is invalid.")
    if parts.shard_index != shard.index:
        raise invalid_argument(
            f"Invalid StartingSequenceNumber. It encodes shardId-{parts.shard_index:012d}, "
            f"while it was used in a call to a shard with {shard.shard_id}"
        )
    if not shard.owns(parts):
        raise invalid_argument(f"{used} is invalid because it did not come from this stream.")


def get_shard_iterator(world: World, params: Params) -> Answer:
    """GetShardIterator of all five types."""
    with world.lock:
        stream = world.usable(params)
        shard_id = str(params["ShardId"])
        shard = stream.shard(shard_id)
        if shard is None:
            raise not_found(
                f"Shard {shard_id} in stream {stream.name} under account {stream.account} "
                "does not exist"
            )
        index = start_index(
            world,
            stream,
            shard,
            str(params["ShardIteratorType"]),
            params.get("StartingSequenceNumber"),
            params.get("Timestamp"),
        )
        return {"ShardIterator": iterator(stream, shard, index, world.now_millis())}


# -- reading
# ----------------------------------------------------------------------------


def _service_time(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).strftime("%a %b %d %H:%M:%S UTC %Y")


def _open_iterator(world: World, params: Params) -> tuple[Stream, ShardLog, int, int]:
    parts = decode_token("iterator", str(params["ShardIterator"]), 5)
    if parts is None:
        raise invalid_argument("Invalid ShardIterator.")
    made_millis, name, serial, shard_id, index = parts
    now_millis = world.now_millis()
    if now_millis - made_millis > world.settings.iterator_lifetime_millis:
        raise KinesisError(
            "ExpiredIteratorException",
            "Iterator expired. The iterator was created at time "
            f"{_service_time(made_millis)} while right now it is {_service_time(now_millis)} "
            "which is further in the future than the tolerated delay of "
            f"{world.settings.iterator_lifetime_millis} milliseconds.",
        )
    if (
        params.get("StreamARN") is not None
        and world.name_of({"StreamARN": params["StreamARN"]}) != name
    ):
        raise invalid_argument("StreamARN does not match the stream of the ShardIterator.")
    stream = world.streams.get(name)
    if stream is not None:
        stream.settle(now_millis)
    shard = stream.shard(shard_id) if stream is not None and stream.serial == serial else None
    if stream is None or shard is None:
        raise not_found(
            f"Shard {shard_id} in stream {name} under account {world.settings.account} does "
            "not exist"
        )
    return stream, shard, int(index), now_millis


def get_records(world: World, params: Params) -> Read:
    """Read up to `Limit` (≤ 10,000) records and 10 MiB from an iterator."""
    asked = params.get("Limit")
    limit = MAX_RECORDS_PER_READ if asked is None else int(asked)
    if not 1 <= limit <= MAX_RECORDS_PER_READ:
        rule = (
            "greater than or equal to 1"
            if limit < 1
            else f"less than or equal to {MAX_RECORDS_PER_READ}"
        )
        raise constraint("limit", limit, f"have value {rule}")
    with world.lock:
        stream, shard, index, now_millis = _open_iterator(world, params)
        if world.settings.enforce_limits and not shard.limits.admit_read(world.clock.monotonic()):
            raise throttled(shard.shard_id, stream.name, stream.account)
        read = read_from(stream, shard, index, limit, now_millis)
        if world.settings.enforce_limits:
            shard.limits.charge_read(read.page.size)
        return read


def read_from(
    stream: Stream,
    shard: ShardLog,
    index: int,
    limit: int,
    now_millis: int,
    max_bytes: int | None = None,
) -> Read:
    """Read a page from `index`.

    `millis_behind_latest` is the age of the last returned record, or 0 at the end of the shard.
    """
    stream.trim(shard, now_millis)
    page = shard.page(index, limit) if max_bytes is None else shard.page(index, limit, max_bytes)
    behind = 0
    if page.next_index < shard.end:
        newest = (
            page.arrival_millis[-1] if page.arrival_millis else shard.arrival_of(page.next_index)
        )
        behind = max(0, now_millis - newest)
    at_end = not shard.is_open and page.next_index >= shard.end
    token = None if at_end else iterator(stream, shard, page.next_index, now_millis)
    return Read(page, token, behind, shard.children if at_end else ())


def entry_of(record: Any) -> Entry:
    """Convert a record of a request, in the service's format, to an entry.

    Raises ValidationException if a member is missing or has a wrong type.
    """
    key, data, explicit = (
        record.get("PartitionKey"),
        record.get("Data"),
        record.get("ExplicitHashKey"),
    )
    if not isinstance(key, str | None):
        raise validation(
            "1 validation error detected: Value at 'partitionKey' failed to satisfy "
            "constraint: Member must be a string"
        )
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise validation(
            "1 validation error detected: Value null at 'data' failed to satisfy constraint: "
            "Member must not be null"
        )
    return key, bytes(data), None if explicit is None else str(explicit)

"""Convert leases to rows and back, with KCL's attribute names and types.

See protocol §1.2 and appendix A. An attribute without a value is absent, never NULL and never
empty. Reading follows KCL: a row without a required attribute, or with one of another type, is
unreadable (`ValueError`). An optional attribute of another type counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from kcl_pipeline.leases.attributes import (
    MAX_COUNTER,
    MAX_KEY_BYTES,
    MAX_MILLIS,
    bytes_of,
    check_size,
    checked_name,
    checked_shard_id,
    float_of,
    int_of,
    name_of,
    readable,
    required,
    shard_ids_of,
    text_of,
)
from kcl_pipeline.leases.coordinator_keys import COORDINATOR_KEYS
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.text import printable

LEASE_KEY: Final = "leaseKey"
ENTITY_TYPE: Final = "entityType"
LEASE_ENTITY: Final = "LEASE"
OWNER: Final = "leaseOwner"
COUNTER: Final = "leaseCounter"
OWNER_SWITCHES: Final = "ownerSwitchesSinceCheckpoint"
CHECKPOINT: Final = "checkpoint"
CHECKPOINT_SUB: Final = "checkpointSubSequenceNumber"
PENDING: Final = "pendingCheckpoint"
PENDING_SUB: Final = "pendingCheckpointSubSequenceNumber"
PENDING_STATE: Final = "pendingCheckpointState"
PARENTS: Final = "parentShardId"
CHILDREN: Final = "childShardIds"
STARTING_HASH_KEY: Final = "startingHashKey"
ENDING_HASH_KEY: Final = "endingHashKey"
THROUGHPUT: Final = "throughputKBps"
CHECKPOINT_OWNER: Final = "checkpointOwner"
STREAM: Final = "streamName"
SHARD_ID: Final = "shardId"
STREAM_CREATED: Final = "kclpStreamCreated"
READ_UP_TO: Final = "kclpReadUpTo"
INITIAL_TIMESTAMP: Final = "kclpInitialTimestamp"
TABLE: Final = "kclpTable"
SEEK: Final = "kclpSeek"
"""Identifies the last seek of an operator, so that a repeated write is recognised."""

_MICRO: Final = Decimal("0.000001")
_HASH_KEY: Final = re.compile(r"[0-9]{1,39}")
"""A hash key has 128 bits, so at most 39 digits (Kinesis)."""

_STREAM_OF_KEY: Final = re.compile(r"[0-9]{1,20}:[A-Za-z0-9_.-]{1,128}:[0-9]{1,20}")
"""The stream in a multi-stream lease key: account, name, creation epoch (protocol §1.3).

The name has Kinesis' pattern of StreamName. 20 digits are our own limit for the numbers.
"""

MAX_THROUGHPUT_KBPS: Final = 1e9
"""Largest throughput of a lease (our own limit, a terabyte per second). The planner adds them."""


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


def position_attributes(name: str, sub_name: str, position: Position) -> Item:
    """Return the two attributes of a position."""
    return {name: string(position.sequence_number), sub_name: number(position.sub_sequence_number)}


def pending_attributes(pending: Position | None, state: bytes | None) -> Item:
    """Return the attributes of a pending checkpoint; none without one."""
    if pending is None:
        return {}
    return position_attributes(PENDING, PENDING_SUB, pending) | (
        {PENDING_STATE: {"B": state}} if state else {}
    )


def shard_attributes(lease: Lease) -> Item:
    """Return the children and the hash range, as far as they are known."""
    children = {CHILDREN: string_set(lease.child_shard_ids)} if lease.child_shard_ids else {}
    if lease.hash_key_range is None:
        return children
    return children | hash_range_attributes(lease.hash_key_range)


def observed_attributes(throughput_kbps: float | None, read_up_to_millis: int | None) -> Item:
    """Return the attributes that report what the owner has read."""
    kbps = None if throughput_kbps is None else float(throughput_kbps)
    observed = {THROUGHPUT: kbps, READ_UP_TO: read_up_to_millis}
    return {name: number(value) for name, value in observed.items() if value is not None}


def table_attributes(mark: Position | None) -> Item:
    """Return the attribute of the mark of the table; none without one."""
    if mark is None:
        return {}
    return {TABLE: string(f"{mark.sequence_number} {mark.sub_sequence_number}")}


def hash_range_attributes(hash_key_range: HashKeyRange) -> Item:
    """Return the two attributes of a hash range, as decimal strings."""
    return {
        STARTING_HASH_KEY: string(str(hash_key_range.start)),
        ENDING_HASH_KEY: string(str(hash_key_range.end)),
    }


def stream_attributes(lease: Lease) -> Item:
    """Return the two attributes that only multi-stream rows have: stream and shard id."""
    return (
        {}
        if lease.stream is None
        else {STREAM: string(lease.stream), SHARD_ID: string(lease.shard_id)}
    )


def lease_to_item(lease: Lease) -> Item:
    """Return the complete row of a lease, as it is put when the lease is created."""
    numbers = {STREAM_CREATED: lease.recreated_millis, INITIAL_TIMESTAMP: lease.initial_millis}
    owners = {OWNER: lease.owner, CHECKPOINT_OWNER: lease.checkpoint_owner}
    parents = lease.parent_shard_ids
    return {
        LEASE_KEY: string(lease.lease_key),
        ENTITY_TYPE: string(LEASE_ENTITY),
        COUNTER: number(lease.counter),
        OWNER_SWITCHES: number(lease.owner_switches_since_checkpoint),
        **position_attributes(CHECKPOINT, CHECKPOINT_SUB, lease.checkpoint),
        **stream_attributes(lease),
        **{name: number(value) for name, value in numbers.items() if value is not None},
        **table_attributes(lease.table_mark),
        **{name: string(value) for name, value in owners.items() if value is not None},
        **pending_attributes(lease.pending_checkpoint, lease.pending_checkpoint_state),
        **({PARENTS: string_set(parents)} if parents else {}),
        **shard_attributes(lease),
        **observed_attributes(lease.throughput_kbps, lease.read_up_to_millis),
    }


def is_lease(item: Item) -> bool:
    """Return whether the row is a lease: `entityType` is LEASE, or missing (KCL before 3.5).

    A row of the coordinator state without `entityType` is recognised by its key (protocol §3.1).
    """
    entity = text_of(item, ENTITY_TYPE)
    if entity is None:
        return text_of(item, LEASE_KEY) not in COORDINATOR_KEYS
    return entity == LEASE_ENTITY


def lease_from_item(item: Item) -> Lease:
    """Return the lease of a row that `is_lease`.

    Raises:
        UnreadableRowError: The row cannot be read. The message says why.
    """
    with readable(lambda: f"the row {_shown_key(item)} is not a lease that can be read"):
        check_size(item)
        key = required(text_of(item, LEASE_KEY), LEASE_KEY)
        stream = _stream_of_key(key, item)
        checkpoint = required(text_of(item, CHECKPOINT), CHECKPOINT)
        return Lease(
            lease_key=key,
            checkpoint=Position(checkpoint, int_of(item, CHECKPOINT_SUB) or 0),
            counter=required(int_of(item, COUNTER, most=MAX_COUNTER), COUNTER),
            owner=name_of(item, OWNER, MAX_KEY_BYTES),
            checkpoint_owner=name_of(item, CHECKPOINT_OWNER, MAX_KEY_BYTES),
            owner_switches_since_checkpoint=required(
                int_of(item, OWNER_SWITCHES, most=MAX_COUNTER), OWNER_SWITCHES
            ),
            pending_checkpoint=_pending(item),
            pending_checkpoint_state=bytes_of(item, PENDING_STATE),
            parent_shard_ids=shard_ids_of(item, PARENTS),
            child_shard_ids=shard_ids_of(item, CHILDREN),
            hash_key_range=_hash_range(item),
            throughput_kbps=float_of(item, THROUGHPUT, least=0.0, most=MAX_THROUGHPUT_KBPS),
            stream=stream,
            recreated_millis=int_of(item, STREAM_CREATED),
            read_up_to_millis=int_of(item, READ_UP_TO),
            initial_millis=int_of(item, INITIAL_TIMESTAMP, most=MAX_MILLIS),
            table_mark=_table_mark(item),
        )


def _shown_key(item: Item) -> str:
    return printable(text_of(item, LEASE_KEY) or "without a key")


def _stream_of_key(key: str, item: Item) -> str | None:
    """Return the stream of a multi-stream lease; None for a single-stream one.

    Raises `ValueError` if the key has neither form, or `streamName` is another stream.
    """
    checked_name(key, LEASE_KEY, MAX_KEY_BYTES)
    stream, colon, shard_id = key.rpartition(":")
    checked_shard_id(shard_id, LEASE_KEY)
    if colon and not _STREAM_OF_KEY.fullmatch(stream):
        raise ValueError(f"{LEASE_KEY} begins with '{printable(stream)}', which is not a stream")
    attribute = text_of(item, STREAM)
    if attribute is not None and attribute != stream:
        raise ValueError(f"{STREAM} is '{printable(attribute)}', but the key has another stream")
    return stream if colon else None


def _pending(item: Item) -> Position | None:
    text = text_of(item, PENDING)
    return None if text is None else Position(text, int_of(item, PENDING_SUB) or 0)


def _table_mark(item: Item) -> Position | None:
    text = name_of(item, TABLE)
    if text is None:
        return None
    number, _, sub = text.partition(" ")
    if not (number.isdigit() and sub.isdigit()):
        raise ValueError("the mark of the table has another form")
    return Position(number, int(sub))


def _hash_range(item: Item) -> HashKeyRange | None:
    start, end = text_of(item, STARTING_HASH_KEY), text_of(item, ENDING_HASH_KEY)
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ValueError("the hash range has only one end")
    if not (_HASH_KEY.fullmatch(start) and _HASH_KEY.fullmatch(end)):
        shown = f"{printable(start, 50)}..{printable(end, 50)}"
        raise ValueError(f"the hash range {shown} is not made of hash keys")
    return HashKeyRange(int(start), int(end))

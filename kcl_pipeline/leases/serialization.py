"""Rows of the lease table as values and back, with KCL's attribute names and types (protocol §1.2, appendix A).

An attribute without a value is absent, never NULL and never empty. Reading follows KCL: a required attribute that is missing or of
another type makes the row unreadable (`ValueError`), an optional one of another type counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any, Final

from kcl_pipeline.errors import UnreadableRow
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.sequence import Position
from kcl_pipeline.shards import HashKeyRange

LEASE_KEY: Final = "leaseKey"
ENTITY_TYPE: Final = "entityType"
LEASE_ENTITY: Final = "LEASE"
NON_LEASE_ENTITIES: Final = frozenset({"STREAM", "LEADER", "CLIENT_VERSION_MIGRATION", "TABLE_MIGRATION", "WORKER_METRIC_STATS"})
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

_MICRO: Final = Decimal("0.000001")
_DIGITS: Final = re.compile(r"[0-9]+")


def string(value: str) -> AttributeValue:
    """An S attribute. Raises `ValueError` for an empty text: KCL has none."""
    if not value:
        raise ValueError("an empty text cannot be an attribute of a row")
    return {"S": value}


def number(value: float) -> AttributeValue:
    """An N attribute with at most six decimals, rounded half up, without trailing zeros. Raises `ValueError` unless finite."""
    exact = Decimal(repr(value))
    if not exact.is_finite():
        raise ValueError(f"{value} cannot be stored as a number")
    if isinstance(value, int):
        return {"N": str(value)}
    rounded = exact.quantize(_MICRO, ROUND_HALF_UP).normalize()
    return {"N": format(rounded, "f") if rounded else "0"}


def string_set(values: Iterable[str]) -> AttributeValue:
    """An SS attribute, sorted so that equal sets look equal. Raises `ValueError` when empty: DynamoDB has no empty sets."""
    texts = sorted(set(values))
    if not texts or not all(texts):
        raise ValueError("a string set needs at least one text, and no empty one")
    return {"SS": texts}


def position_attributes(name: str, sub_name: str, position: Position) -> Item:
    """The two attributes of a position."""
    return {name: string(position.sequence_number), sub_name: number(position.sub_sequence_number)}


def hash_range_attributes(hash_key_range: HashKeyRange) -> Item:
    """The two attributes of a hash range, as decimal texts."""
    return {STARTING_HASH_KEY: string(str(hash_key_range.start)), ENDING_HASH_KEY: string(str(hash_key_range.end))}


def stream_attributes(lease: Lease) -> Item:
    """The two attributes that only multi-stream rows have: the whole stream identifier, and the bare shard id."""
    return {} if lease.stream is None else {STREAM: string(lease.stream), SHARD_ID: string(lease.shard_id)}


def lease_to_item(lease: Lease) -> Item:
    """The whole row of a lease, as it is put when the lease is created."""
    item: Item = {
        LEASE_KEY: string(lease.lease_key),
        ENTITY_TYPE: string(LEASE_ENTITY),
        COUNTER: number(lease.counter),
        OWNER_SWITCHES: number(lease.owner_switches_since_checkpoint),
        **position_attributes(CHECKPOINT, CHECKPOINT_SUB, lease.checkpoint),
        **stream_attributes(lease),
    }
    if lease.owner is not None:
        item[OWNER] = string(lease.owner)
    if lease.checkpoint_owner is not None:
        item[CHECKPOINT_OWNER] = string(lease.checkpoint_owner)
    if lease.pending_checkpoint is not None:
        item.update(position_attributes(PENDING, PENDING_SUB, lease.pending_checkpoint))
        if lease.pending_checkpoint_state:
            item[PENDING_STATE] = {"B": lease.pending_checkpoint_state}
    if lease.parent_shard_ids:
        item[PARENTS] = string_set(lease.parent_shard_ids)
    if lease.child_shard_ids:
        item[CHILDREN] = string_set(lease.child_shard_ids)
    if lease.hash_key_range is not None:
        item.update(hash_range_attributes(lease.hash_key_range))
    if lease.throughput_kbps is not None:
        item[THROUGHPUT] = number(float(lease.throughput_kbps))
    return item


def is_lease(item: Item) -> bool:
    """Whether the row is a lease: `entityType` is LEASE, or missing (KCL before 3.5)."""
    return text_of(item, ENTITY_TYPE) in (None, LEASE_ENTITY)


def lease_from_item(item: Item) -> Lease:
    """The lease of a row that `is_lease`. Raises `UnreadableRow` (a `ValueError`) that says what is wrong with it."""
    with readable(f"the row {text_of(item, LEASE_KEY) or 'without a key'} is not a lease that can be read"):
        key = required(text_of(item, LEASE_KEY), LEASE_KEY)
        stream = text_of(item, STREAM)
        if stream is None and ":" in key:
            stream = key.rsplit(":", 1)[0]
        return Lease(
            lease_key=key,
            checkpoint=Position(required(text_of(item, CHECKPOINT), CHECKPOINT), int_of(item, CHECKPOINT_SUB) or 0),
            counter=required(int_of(item, COUNTER), COUNTER),
            owner=text_of(item, OWNER),
            checkpoint_owner=text_of(item, CHECKPOINT_OWNER),
            owner_switches_since_checkpoint=required(int_of(item, OWNER_SWITCHES), OWNER_SWITCHES),
            pending_checkpoint=_pending(item),
            pending_checkpoint_state=_bytes_of(item, PENDING_STATE),
            parent_shard_ids=_set_of(item, PARENTS),
            child_shard_ids=_set_of(item, CHILDREN),
            hash_key_range=_hash_range(item),
            throughput_kbps=float_of(item, THROUGHPUT),
            stream=stream,
        )


@contextmanager
def readable(otherwise: str) -> Iterator[None]:
    """Raise what a row's values make Python raise as one `UnreadableRow` that begins with `otherwise`."""
    try:
        yield
    except (ValueError, ArithmeticError, TypeError, AttributeError, LookupError) as error:
        raise UnreadableRow(f"{otherwise}: {error}") from error


def required(value: Any, name: str) -> Any:
    """The value. Raises `ValueError` when it is None."""
    if value is None:
        raise ValueError(f"{name} is missing, or not of its type")
    return value


def text_of(item: Item, name: str) -> str | None:
    """An S attribute; None when absent, empty or of another type."""
    value = item.get(name, {}).get("S")
    return value if isinstance(value, str) and value else None


def int_of(item: Item, name: str) -> int | None:
    """An N attribute as an integer; None when absent or of another type. Raises `ValueError` when it is no whole number."""
    value = item.get(name, {}).get("N")
    if not isinstance(value, str):
        return None
    if value.isascii() and value.isdigit():
        return int(value)
    try:
        exact = Decimal(value)
    except InvalidOperation:
        raise ValueError(f"{name} is {value!r}, not a number") from None
    if not exact.is_finite() or exact != exact.to_integral_value():
        raise ValueError(f"{name} is {value}, not a whole number")
    return int(exact)


def float_of(item: Item, name: str) -> float | None:
    """An N attribute as a float; None when absent or of another type."""
    value = item.get(name, {}).get("N")
    return float(value) if isinstance(value, str) else None


def _bytes_of(item: Item, name: str) -> bytes | None:
    value = item.get(name, {}).get("B")
    return bytes(value) if isinstance(value, bytes | bytearray) and value else None


def _set_of(item: Item, name: str) -> frozenset[str]:
    value = item.get(name, {}).get("SS")
    return frozenset(value) if isinstance(value, list) else frozenset()


def _pending(item: Item) -> Position | None:
    text = text_of(item, PENDING)
    return None if text is None else Position(text, int_of(item, PENDING_SUB) or 0)


def _hash_range(item: Item) -> HashKeyRange | None:
    start, end = text_of(item, STARTING_HASH_KEY), text_of(item, ENDING_HASH_KEY)
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ValueError("the hash range has one end only")
    if not (_DIGITS.fullmatch(start) and _DIGITS.fullmatch(end)):
        raise ValueError(f"the hash range {start}..{end} is not made of whole numbers")
    return HashKeyRange(int(start), int(end))

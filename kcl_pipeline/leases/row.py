"""The lease row: its values, and how they are stored (protocol §1.2, appendix A)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Self

from kcl_pipeline.events import EventSink, RowRejected
from kcl_pipeline.leases.codec import (
    COORDINATOR_KEYS,
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
    number,
    readable,
    required,
    shard_ids_of,
    string,
    string_set,
    text_of,
)
from kcl_pipeline.leases.store import Item
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.text import printable


@dataclass(frozen=True, slots=True)
class Lease:
    """One row of the lease table. None means that the attribute is absent.

    Attributes:
        lease_key: Key of the row.
        checkpoint: Last position (inclusive) that is processed.
        counter: Lease counter. Every renewal and most other writes increment it.
        owner: The worker that should own the lease.
        checkpoint_owner: The previous owner, which still processes the shard during a handoff.
        owner_switches_since_checkpoint: KCL's count of changes of the owner.
        pending_checkpoint: Position that a record processor has prepared. The next checkpoint of a
            worker removes it.
        pending_checkpoint_state: State of the record processor at this position.
        parent_shard_ids: Shard ids of the parents.
        child_shard_ids: Shard ids of the children.
        hash_key_range: The hash keys of the shard.
        throughput_kbps: Moving average in KiB/s.
        stream: Stream of a multi-stream lease (`account:name:epoch`).
        recreated_millis: Creation time in epoch milliseconds of a single stream that was deleted
            and created again under this application (our own attribute `kclpStreamCreated` N, which
            Java readers ignore). None: the stream that the application began with.
        read_up_to_millis: All records of the shard that arrived by this time are in the table (our
            own attribute `kclpReadUpTo` N, epoch milliseconds, which Java readers ignore). None:
            unknown.
        initial_millis: Where the shard is read from while the checkpoint is AT_TIMESTAMP or LATEST
            (our own attribute `kclpInitialTimestamp` N, epoch milliseconds, which Java readers
            ignore). None: for AT_TIMESTAMP the time of the settings, for LATEST the end of the
            shard. At TRIM_HORIZON the time when a leader created the row, on the clock of Kinesis.
        table_mark: The last checkpoint that this package wrote and that the table of the sink had
            (our own attribute `kclpTable` S, which Java readers ignore). None: there is none, a
            seek or another sink followed it, or the sink stores no positions.
    """

    lease_key: str
    checkpoint: Position
    counter: int = 0
    owner: str | None = None
    checkpoint_owner: str | None = None
    owner_switches_since_checkpoint: int = 0
    pending_checkpoint: Position | None = None
    pending_checkpoint_state: bytes | None = None
    parent_shard_ids: frozenset[str] = frozenset()
    child_shard_ids: frozenset[str] = frozenset()
    hash_key_range: HashKeyRange | None = None
    throughput_kbps: float | None = None
    stream: str | None = None
    recreated_millis: int | None = None
    read_up_to_millis: int | None = None
    initial_millis: int | None = None
    table_mark: Position | None = None

    @property
    def unique_key(self) -> str:
        """The lease key, with the recreation time of a stream that was created again.

        The shards of such a stream have the same ids as those of the former stream.
        """
        return (
            self.lease_key
            if self.recreated_millis is None
            else f"{self.lease_key}@{self.recreated_millis}"
        )

    @property
    def shard_id(self) -> str:
        """The shard id, which is the last part of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]

    @property
    def actual_owner(self) -> str | None:
        """The worker that processes the shard: `checkpoint_owner` if present, else `owner`."""
        return self.checkpoint_owner or self.owner

    @property
    def in_handoff(self) -> bool:
        """Whether a handoff has started and is not finished."""
        return self.checkpoint_owner is not None

    @property
    def initial_timestamp(self) -> datetime | None:
        """`initial_millis` as a time; None if the row has none."""
        if self.initial_millis is None:
            return None
        return datetime.fromtimestamp(self.initial_millis / 1000, UTC)

    @property
    def ended(self) -> bool:
        """Whether the shard has been processed to its end."""
        return self.checkpoint.is_shard_end

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)

    def key_of_sibling(self, shard_id: str) -> str:
        """Return the lease key of another shard of the same stream."""
        return shard_id if self.stream is None else f"{self.stream}:{shard_id}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        table: Name of the table.
        key: Primary key of the row, with any characters.
        reason: What is wrong; printable.
        heartbeat: Digest of the attributes that a worker's report changes. Empty for rows of
            other tables.
    """

    table: str
    key: str
    reason: str
    heartbeat: str = ""


@dataclass(frozen=True, slots=True)
class LeaseListing:
    """The result of a scan.

    Attributes:
        leases: The leases, in no particular order.
        bad_rows: Rows that have the type of a lease, but cannot be used.
    """

    leases: tuple[Lease, ...]
    bad_rows: tuple[BadRow, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Keys of the rows that cannot be used."""
        return tuple(row.key for row in self.bad_rows)

    def of_form(self, table: str, *, multi_stream: bool) -> LeaseListing:
        """Return the listing with leases of the other form as bad rows (protocol §1.3).

        The form is single-stream or multi-stream.
        """
        leases: list[Lease] = []
        bad_rows = list(self.bad_rows)
        for lease in self.leases:
            reason = other_form(lease, multi_stream=multi_stream)
            if reason is None:
                leases.append(lease)
            else:
                bad_rows.append(BadRow(table, lease.lease_key, reason))
        return LeaseListing(tuple(leases), tuple(bad_rows))


def other_form(lease: Lease, *, multi_stream: bool) -> str | None:
    """Return why the lease has the other form (single-stream or multi-stream); None if not."""
    if (lease.stream is not None) == multi_stream:
        return None
    if lease.stream is None:
        return (
            f"the lease {lease.lease_key} has no stream in its key: it is of a single-stream "
            "application, but the setting streams names several streams"
        )
    return (
        f"the lease {lease.lease_key} has the stream {lease.stream} in its key: it is of a "
        "multi-stream application, but the setting streams names one stream"
    )


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
_HASH_KEY: Final = re.compile(r"[0-9]{1,39}")
"""A hash key has 128 bits, so at most 39 digits (Kinesis)."""

_STREAM_OF_KEY: Final = re.compile(r"[0-9]{1,20}:[A-Za-z0-9_.-]{1,128}:[0-9]{1,20}")
"""The stream in a multi-stream lease key: account, name, creation epoch (protocol §1.3).

The name has Kinesis' pattern of StreamName. 20 digits are our own limit for the numbers.
"""

MAX_THROUGHPUT_KBPS: Final = 1e9
"""Largest throughput of a lease (our own limit, a terabyte per second). The planner adds them."""


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


MAX_REMEMBERED: Final = 1000
"""Largest number of rows that are reported at the same time (our own limit)."""


class RejectedRows:
    """Emits `RowRejected` for rows that are not reported yet. Thread-safe."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._reported: dict[tuple[str, str], str] = {}

    def note(self, row: BadRow) -> None:
        """Report one row that cannot be used."""
        key = (row.table, row.key)
        with self._lock:
            is_known = self._reported.get(key) == row.reason
            is_full = key not in self._reported and len(self._reported) >= MAX_REMEMBERED
            if is_known or is_full:
                return
            self._reported[key] = row.reason
        self._events(RowRejected(row.table, row.key, row.reason))

    def note_all(self, rows: Iterable[BadRow]) -> None:
        """Report all bad rows of a scan.

        Rows that are not among them are forgotten. If they occur again, they are reported again.
        """
        found = {(row.table, row.key): row for row in rows}
        with self._lock:
            for key in [key for key in self._reported if key not in found]:
                del self._reported[key]
        for row in found.values():
            self.note(row)

    def forget(self, table: str, key: str) -> None:
        """Forget a row that can be used again, or does not exist any more."""
        with self._lock:
            self._reported.pop((table, key), None)

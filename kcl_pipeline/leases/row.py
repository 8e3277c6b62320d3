"""The lease row: its values, and how they are stored (protocol §1.2, appendix A)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self, TypeVar

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.events import EventSink, RowRejected
from kcl_pipeline.leases.codec import (
    COORDINATOR_KEYS,
    MAX_COUNTER,
    MAX_KEY_BYTES,
    MAX_MILLIS,
    REQUIRED,
    Attribute,
    RowCodec,
    a_name,
    a_position,
    a_whole,
    check_size,
    checked_name,
    checked_shard_id,
    float_of,
    name_of,
    number,
    readable,
    some_bytes,
    some_shard_ids,
    string,
    text_of,
)
from kcl_pipeline.leases.store import Item
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.text import printable

_T = TypeVar("_T")

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


def _read_key(item: Item) -> str | None:
    key = text_of(item, LEASE_KEY)
    if key is None:
        return None
    checked_name(key, LEASE_KEY, MAX_KEY_BYTES)
    stream, colon, shard_id = key.rpartition(":")
    checked_shard_id(shard_id, LEASE_KEY)
    if colon and not _STREAM_OF_KEY.fullmatch(stream):
        raise ValueError(f"{LEASE_KEY} begins with '{printable(stream)}', which is not a stream")
    return key


def _read_stream(item: Item) -> str | None:
    stream, _, _ = (text_of(item, LEASE_KEY) or "").rpartition(":")
    attribute = text_of(item, STREAM)
    if attribute is not None and attribute != stream:
        raise ValueError(f"{STREAM} is '{printable(attribute)}', but the key has another stream")
    return stream or None


def _read_hash_range(item: Item) -> HashKeyRange | None:
    start, end = text_of(item, STARTING_HASH_KEY), text_of(item, ENDING_HASH_KEY)
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ValueError("the hash range has only one end")
    if not (_HASH_KEY.fullmatch(start) and _HASH_KEY.fullmatch(end)):
        shown = f"{printable(start, 50)}..{printable(end, 50)}"
        raise ValueError(f"the hash range {shown} is not made of hash keys")
    return HashKeyRange(int(start), int(end))


def _write_hash_range(keys: HashKeyRange) -> Item:
    return {STARTING_HASH_KEY: string(str(keys.start)), ENDING_HASH_KEY: string(str(keys.end))}


def _read_mark(item: Item) -> Position | None:
    text = name_of(item, TABLE)
    if text is None:
        return None
    sequence_number, _, sub = text.partition(" ")
    if not (sequence_number.isdigit() and sub.isdigit()):
        raise ValueError("the mark of the table has another form")
    return Position(sequence_number, int(sub))


def _write_mark(mark: Position) -> Item:
    return {TABLE: string(f"{mark.sequence_number} {mark.sub_sequence_number}")}


_KEY: Final = Attribute(LEASE_KEY, _read_key, lambda key: {LEASE_KEY: string(key)})
_STREAM: Final = Attribute(STREAM, _read_stream, lambda stream: {STREAM: string(stream)})
_HASH_RANGE: Final = Attribute(STARTING_HASH_KEY, _read_hash_range, _write_hash_range)
_MARK: Final = Attribute(TABLE, _read_mark, _write_mark)
_KBPS: Final = Attribute(
    THROUGHPUT,
    lambda item: float_of(item, THROUGHPUT, least=0.0, most=MAX_THROUGHPUT_KBPS),
    lambda kbps: {THROUGHPUT: number(float(kbps))},
)


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

    lease_key: Annotated[str, _KEY, REQUIRED]
    checkpoint: Annotated[Position, a_position(CHECKPOINT, CHECKPOINT_SUB), REQUIRED]
    counter: Annotated[int, a_whole(COUNTER, MAX_COUNTER), REQUIRED] = 0
    owner: Annotated[str | None, a_name(OWNER, MAX_KEY_BYTES)] = None
    checkpoint_owner: Annotated[str | None, a_name(CHECKPOINT_OWNER, MAX_KEY_BYTES)] = None
    owner_switches_since_checkpoint: Annotated[
        int, a_whole(OWNER_SWITCHES, MAX_COUNTER), REQUIRED
    ] = 0
    pending_checkpoint: Annotated[Position | None, a_position(PENDING, PENDING_SUB)] = None
    pending_checkpoint_state: Annotated[bytes | None, some_bytes(PENDING_STATE)] = None
    parent_shard_ids: Annotated[frozenset[str], some_shard_ids(PARENTS)] = frozenset()
    child_shard_ids: Annotated[frozenset[str], some_shard_ids(CHILDREN)] = frozenset()
    hash_key_range: Annotated[HashKeyRange | None, _HASH_RANGE] = None
    throughput_kbps: Annotated[float | None, _KBPS] = None
    stream: Annotated[str | None, _STREAM] = None
    recreated_millis: Annotated[int | None, a_whole(STREAM_CREATED)] = None
    read_up_to_millis: Annotated[int | None, a_whole(READ_UP_TO)] = None
    initial_millis: Annotated[int | None, a_whole(INITIAL_TIMESTAMP, MAX_MILLIS)] = None
    table_mark: Annotated[Position | None, _MARK] = None

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


LEASE_ROW: Final = RowCodec(Lease)


def stream_attributes(lease: Lease) -> Item:
    """Return the two attributes that only multi-stream rows have: stream and shard id."""
    if lease.stream is None:
        return {}
    return LEASE_ROW.attributes(stream=lease.stream) | {SHARD_ID: string(lease.shard_id)}


def lease_to_item(lease: Lease) -> Item:
    """Return the complete row of a lease, as it is put when the lease is created."""
    item = LEASE_ROW.write(lease) | stream_attributes(lease)
    if lease.pending_checkpoint is None:  # the state is that of a pending checkpoint
        item.pop(PENDING_STATE, None)
    return item | {ENTITY_TYPE: string(LEASE_ENTITY)}


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
        return LEASE_ROW.read(item)


def _shown_key(item: Item) -> str:
    return printable(text_of(item, LEASE_KEY) or "without a key")


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


def read_rows(
    items: Iterable[Item], read: Callable[[Item], _T], bad: Callable[[Item, str], BadRow]
) -> tuple[tuple[_T, ...], tuple[BadRow, ...]]:
    """Read the rows of a scan. A row that cannot be read does not hide the others.

    Args:
        items: The rows.
        read: Reads one, or raises `UnreadableRowError`.
        bad: Returns what is reported of one that cannot be read; the text is the reason.
    """
    rows: list[_T] = []
    bad_rows: list[BadRow] = []
    for item in items:
        try:
            rows.append(read(item))
        except UnreadableRowError as error:
            bad_rows.append(bad(item, str(error)))
    return tuple(rows), tuple(bad_rows)


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

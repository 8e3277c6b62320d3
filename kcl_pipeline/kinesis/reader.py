"""Read one shard from a position, one GetRecords call at a time (protocol §9.4, §10.1, §10.3).

`ShardReader` makes the calls. A response is a `RecordsPage`; what the reader returns is the `Chunk`
of records that follows its position. `GapWatch` notices records that left retention before they
were read. `deaggregate` makes the chunk of a page: many user records may be in one Kinesis record
(protocol §10.5).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import NO_RECORDS, RECORD_SCHEMA, Chunk, payload_bytes
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import (
    ExpiredIteratorError,
    InvalidRequestError,
    NotFoundError,
    SettingsError,
    UnavailableError,
)
from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.kinesis.client import MIN_RETENTION_MILLIS, IteratorType, RecordsPage, ShardClient
from kcl_pipeline.kinesis.distribution import RecordDistribution
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, ChildShard, HashKeyRange, StreamId

ARRIVAL_TOLERANCE_SECONDS: Final = 60.0
"""Our own limit for the difference between the arrival times and the Date header of Kinesis."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The state of a reader at its position, with which another reader can continue.

    The other reader may run in another process. It needs no call for an iterator.

    Attributes:
        iterator: Iterator at the position, valid for five minutes.
        last_sequence_number: Last record that was read.
        latest_since: Time of the service when a shard was started at LATEST.
        read_up_to_millis: See `GapWatch`.
        created_millis: When the lease at TRIM_HORIZON or LATEST was created, on the clock of the
            service (epoch milliseconds). None: unknown.
        anchor: See `GapWatch`.
    """

    iterator: str | None = None
    last_sequence_number: str | None = None
    latest_since: datetime | None = None
    read_up_to_millis: int | None = None
    anchor: str | None = None
    created_millis: int | None = None


class ShardReader:
    """Reads a shard. Not thread-safe.

    Args:
        kinesis: The client.
        stream: The stream.
        lease_key: The lease, for messages.
        shard_id: The shard.
        position: First position (exclusive).
        hash_key_range: Drops KPL aggregates outside. None: no aggregate is dropped.
        settings: Settings for reading shards.
        clock: The clock.
        initial_timestamp: Required for the position AT_TIMESTAMP, because a lease row stores that
            position without its time.
        resume: State of another reader at `position`.
        identity: Confirms the end of the shard. None: a response is trusted.
        on_gap: Receives gaps of records that may have left retention. None: they are not looked
            for.
        distribution: Knows whether the stream distributes its records itself. Then no aggregate is
            dropped. None: the hash key range decides alone.

    Attributes:
        millis_behind_latest: Lag of the last response. None: unknown.
        ended: Whether the shard was read to its end.
        last_bytes: Payload bytes of the last response.
        position: Last position (inclusive) that was returned.

    Raises:
        SettingsError: `initial_timestamp` is missing.
        ValueError: The position is SHARD_END.
    """

    def __init__(
        self,
        kinesis: ShardClient,
        stream: StreamId,
        lease_key: str,
        shard_id: str,
        position: Position,
        hash_key_range: HashKeyRange | None,
        settings: RetrievalSettings,
        clock: Clock,
        *,
        initial_timestamp: datetime | None = None,
        resume: Resume | None = None,
        identity: StreamIdentityCheck | None = None,
        on_gap: Callable[[Gap], None] | None = None,
        distribution: RecordDistribution | None = None,
    ) -> None:
        if position.is_shard_end:
            raise ValueError(f"{lease_key} is at SHARD_END: no record is left")
        if position.sequence_number == AT_TIMESTAMP.sequence_number and initial_timestamp is None:
            raise SettingsError(
                f"shard_sync.initial_timestamp is not set, but {lease_key} starts AT_TIMESTAMP; "
                "write the time with a time zone"
            )
        self.lease_key = lease_key
        self.shard_id = shard_id
        self.millis_behind_latest: int | None = None
        self.ended = False
        self.last_bytes = 0
        self._kinesis = kinesis
        self._stream = stream
        self._start = position
        self.position = position
        self._hash_key_range = hash_key_range
        self._settings = settings
        self._clock = clock
        self._timestamp = initial_timestamp
        self._identity = identity
        self._distribution = distribution
        resume = resume or Resume()
        self._iterator = resume.iterator
        self._last_sequence_number = resume.last_sequence_number
        self._latest_since = resume.latest_since
        self._gaps = GapWatch(
            clock,
            on_gap,
            resume.read_up_to_millis,
            resume.anchor,
            unbegun_since=(
                (resume.read_up_to_millis or resume.created_millis)
                if position.is_sentinel and resume.last_sequence_number is None
                else None
            ),
        )

    @property
    def resume(self) -> Resume:
        """The state with which another reader can continue after `position`."""
        return Resume(
            self._iterator,
            self._last_sequence_number,
            self._latest_since,
            self._gaps.read_up_to_millis,
            self._gaps.anchor,
            self._gaps.unbegun_since,
        )

    @property
    def read_up_to_millis(self) -> int | None:
        """See `GapWatch.read_up_to_millis`."""
        return self._gaps.read_up_to_millis

    def open(self) -> str:
        """Return the iterator of the next read. It is requested now if there is none.

        Raises:
            AwsError: GetShardIterator failed.
        """
        iterator = self._iterator = self._iterator or self._make_iterator()
        return iterator

    def read(self) -> Chunk | None:
        """Call GetRecords once.

        With an identity check, a shard that the stream does not list any more ends with a `lost`
        chunk.

        Returns:
            The next records. The `after` of a chunk is the `through` of the former one. None if
            there is no new record, and after the end of the shard.

        Raises:
            ThrottledError: The limits of the shard are exceeded. Call again later.
            UnavailableError: The call failed, or the response is invalid. Call again later.
            NotFoundError: The stream or the shard does not exist.
            StreamReplacedError: The response may be about another stream that has the name now.
            AwsError: It is not known whether KPL aggregates of the page are dropped.
        """
        if self.ended:
            return None
        needs_iterator = self._gaps.begin()
        if needs_iterator and not self._is_at_forgotten_latest:
            self._iterator = None
        try:
            page = self._page()
        except NotFoundError as error:
            return self.on_missing(error)
        except InvalidRequestError:
            # The service does not know the position; it may belong to a former stream
            self._confirm_stream()
            raise
        if page.next_iterator is None or self._is_first(page):
            self._confirm_stream(self._doubted_since(page))
        chunk = self._chunk(page)
        # After de-aggregation: if that fails, the same page is read again.
        self._gaps.look(page, self.position)
        self._iterator = page.next_iterator
        self.ended = page.next_iterator is None
        self.millis_behind_latest = page.millis_behind_latest
        self.last_bytes = page.bytes
        if page.records.num_rows:
            self._last_sequence_number = page.records.column("sequence_number")[
                page.records.num_rows - 1
            ].as_py()
        if chunk is not None:
            self.position = chunk.through
        return chunk

    def _is_first(self, page: RecordsPage) -> bool:
        """Return whether the page has the first records after a position without a number.

        Such a position, unlike a number, also fits a former or later stream of the same name.
        """
        is_unread = self._last_sequence_number is None and self._start.is_sentinel
        return is_unread and page.records.num_rows > 0

    def _page(self) -> RecordsPage:
        try:
            return self._get_records()
        except ExpiredIteratorError as error:
            self._iterator = None
            # Without its time, a position at LATEST cannot be found again. The caller reports this
            # error once; the next read starts at the current LATEST.
            if self._is_at_forgotten_latest:
                raise UnavailableError(
                    f"the iterator of {self.lease_key} at LATEST expired before its first record, "
                    "and its time is unknown (the response had no Date header): reading continues "
                    "at the current LATEST, and records that arrived in between are skipped",
                    code="LatestForgotten",
                    operation="GetRecords",
                ) from error
        return self._get_records()

    @property
    def _is_at_forgotten_latest(self) -> bool:
        """Whether the position is a LATEST whose time is unknown."""
        is_unread = self._last_sequence_number is None and self._start == LATEST
        return is_unread and self._latest_since is None

    def _get_records(self) -> RecordsPage:
        page = self._kinesis.get_records(
            self._stream, self.shard_id, self.open(), self._settings.max_records
        )
        _check(page, self.shard_id)
        return page

    def _make_iterator(self) -> str:
        """Request an iterator after the last record that was read, or at the start.

        LATEST is requested only once. A second request would skip the records in between.
        """
        if self._last_sequence_number is not None:
            if self._gaps.needs_anchor:
                return self._anchored(self._last_sequence_number)
            return self._iterator_of(
                "AFTER_SEQUENCE_NUMBER", sequence_number=self._last_sequence_number
            )
        if not self._start.is_sentinel:
            return self._anchored(self._start.sequence_number)
        if self._start.sequence_number == AT_TIMESTAMP.sequence_number:
            return self._iterator_of("AT_TIMESTAMP", timestamp=self._timestamp)
        if self._start.sequence_number == TRIM_HORIZON.sequence_number:
            return self._iterator_of("TRIM_HORIZON")
        if self._latest_since is not None:
            return self._iterator_of("AT_TIMESTAMP", timestamp=self._latest_since)
        latest = self._kinesis.latest_iterator(self._stream, self.shard_id)
        self._latest_since = latest.since
        return latest.iterator

    def _anchored(self, number: str) -> str:
        iterator = self._iterator_of("AT_SEQUENCE_NUMBER", sequence_number=number)
        self._gaps.anchor = number
        return iterator

    def _iterator_of(
        self,
        kind: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        return self._kinesis.get_shard_iterator(
            self._stream, self.shard_id, kind, sequence_number=sequence_number, timestamp=timestamp
        )

    def _chunk(self, page: RecordsPage) -> Chunk | None:
        """Return the records of a page that follow the position. None: there is no news."""
        chunk = self._deaggregated(page)
        if chunk.through == self.position and chunk.shard_end is None:
            return None
        # The first page after a start, or after a doubt about a gap, begins with records that were
        # read before.
        is_first = self._last_sequence_number is None and not self._start.is_sentinel
        if page.records.num_rows and (is_first or self._gaps.anchor is not None):
            records = after_position(chunk.records, self.position)
            chunk = replace(chunk, records=records, bytes=payload_bytes(records))
        return chunk

    def _deaggregated(self, page: RecordsPage) -> Chunk:
        if self._settings.skip_kpl_deaggregation:
            return plain_chunk(page, self.lease_key, self.position)
        chunk = deaggregate(page, self.lease_key, self.position, self._hash_key_range)
        if self._distribution is not None:
            if page.records.column("partition_key").null_count:
                self._distribution.note_keyless(self._stream)
            is_dropped = chunk.rejected is not None and chunk.rejected.misplaced
            if is_dropped and self._distribution.is_automatic(self._stream):
                return deaggregate(page, self.lease_key, self.position, None)
        return chunk

    def _confirm_stream(self, since: float | None = None) -> None:
        if self._identity is not None:
            now = self._clock.monotonic()
            self._identity.confirm(self._stream, now if since is None else since)

    def _doubted_since(self, page: RecordsPage) -> float:
        """Return from when on the page may be of another stream (monotonic seconds).

        All records of a later stream arrive after its creation. So a stream that was confirmed
        after the first record arrived needs no call. Otherwise each shard would cost one at the
        start of a worker.
        """
        now = self._clock.monotonic()
        if page.next_iterator is None or page.served_millis is None:
            return now
        age = (page.served_millis - arrival_millis(page, 0)) / 1000
        return now - max(age - ARRIVAL_TOLERANCE_SECONDS, 0)

    def on_missing(self, error: NotFoundError) -> Chunk:
        """Return the end of a shard that the stream does not list any more, or raise `error`."""
        following = None
        if self._identity is not None:
            following = self._identity.successors_of_gone(
                self._stream, self.shard_id, self._hash_key_range
            )
        if following is None:
            raise error
        self.ended = True
        return self.empty_end(following, lost=True)

    def empty_end(self, children: tuple[ChildShard, ...], *, lost: bool = False) -> Chunk:
        """Return a chunk without records that ends the shard at the current position."""
        at = self.position
        return Chunk(self.lease_key, NO_RECORDS, at, at, 0, shard_end=children, lost=lost)


def after_position(records: pa.Table, position: Position) -> pa.Table:
    """Return the rows after `position` (exclusive) of a table in shard order.

    The search is linear, because `position` is in the first rows.
    """
    numbers, subs = records.column("sequence_number"), records.column("sub_sequence_number")
    row = 0
    while row < records.num_rows and Position(numbers[row].as_py(), subs[row].as_py()) <= position:
        row += 1
    return records.slice(row)


def _check(page: RecordsPage, shard_id: str) -> None:
    # An end without children, or children without an end, is invalid (protocol §10.3).
    if (page.next_iterator is None) != bool(page.child_shards) or not all(
        child.parents for child in page.child_shards
    ):
        raise UnavailableError(
            f"the response for {shard_id} is invalid: next iterator "
            f"{page.next_iterator!r} with {len(page.child_shards)} child shards",
            code="InvalidAnswer",
            operation="GetRecords",
        )


# Detect records of a shard that left retention before they were read.
#
# A read at a position that has left retention silently continues at the oldest record. Two facts
# show what happened:
#
# - An iterator AT_SEQUENCE_NUMBER begins at the record of the position, as long as it exists. A
#   later first record shows that the record has left retention.
# - `GapWatch.read_up_to_millis`: all records that arrived by this time are at or before the
#   position. A quiet shard whose last record has left retention has lost nothing if this time is
#   in retention.
#
# Times are those of the service (`RecordsPage.served_millis`). The clocks of the hosts may differ
# by hours, and the next reader of the shard may run on another host.
#
# A shard that nobody has begun has a time, too, if it is the child of a shard that was read to
# its end: no record of a child arrived before the last one of its parent. The leases of other
# shards have the time of their creation.
#
# The steady state costs no call: an iterator is requested again only if this time is older than
# the shortest retention period, at most once a minute.


RECHECK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Records may have left retention between two positions of a shard.

    Attributes:
        after: Last position that was read (inclusive). Its record does not exist any more.
        before: The next position that was read. None: nothing is left in the shard.
        read_up_to_millis: All records that arrived by this time are not after `after`. None:
            unknown.
        before_millis: Arrival time of the record at `before`, in epoch milliseconds.
        served_millis: When the gap was found, on the clock of the service (epoch milliseconds).
            None: unknown.
    """

    after: Position
    before: Position | None
    read_up_to_millis: int | None
    before_millis: int | None = None
    served_millis: int | None = None


class GapWatch:
    """Finds gaps in the reads of one shard. Not thread-safe.

    Args:
        clock: Measures the time since the last response.
        on_gap: Receives gaps. None: no gap is looked for.
        read_up_to_millis: Of an earlier reader of the position. None: unknown.
        anchor: Of an earlier reader.
        unbegun_since: Nothing of the shard is in the table, and no record that arrived by this time
            was to be read, or its lease was created then (epoch milliseconds on the clock of the
            service). None: the position is a number, or the time is unknown.

    Attributes:
        anchor: Sequence number at which the iterator was requested, until a response shows whether
            its record exists. None: there is nothing to find out.
        unbegun_since: As given, until a response shows whether records have left retention.
        read_up_to_millis: All records that arrived by this time are not after the position of the
            reader (epoch milliseconds on the clock of the service). None: unknown.
    """

    def __init__(
        self,
        clock: Clock,
        on_gap: Callable[[Gap], None] | None,
        read_up_to_millis: int | None,
        anchor: str | None,
        *,
        unbegun_since: int | None = None,
    ) -> None:
        self.anchor = anchor
        self.read_up_to_millis = read_up_to_millis
        self._clock = clock
        self._on_gap = on_gap
        self._checked = float("-inf")
        self.unbegun_since = unbegun_since
        self._overdue = unbegun_since is not None
        self._served: tuple[int, float] | None = None

    @property
    def needs_anchor(self) -> bool:
        """Whether the next iterator must begin at the last record that was read."""
        return self._overdue or self.anchor is not None

    def begin(self) -> bool:
        """Begin a read; return whether a new iterator must be requested for it."""
        now = self._clock.monotonic()
        if (
            self._on_gap is None
            or self.read_up_to_millis is None
            or now - self._checked < RECHECK_SECONDS
            or self._now_millis() - self.read_up_to_millis < MIN_RETENTION_MILLIS
        ):
            return False
        self._checked = now
        self._overdue = True
        return True

    def _now_millis(self) -> int:
        if self._served is None:
            return round(self._clock.wall() * 1000)
        millis, at = self._served
        return millis + round((self._clock.monotonic() - at) * 1000)

    def look(self, page: RecordsPage, after: Position) -> None:
        """Look at a response.

        Args:
            page: The response.
            after: Position before it.
        """
        behind = page.millis_behind_latest
        if page.served_millis is not None:
            self._served = page.served_millis, self._clock.monotonic()
        if self.needs_anchor:
            if not page.records.num_rows and behind != 0 and page.next_iterator is not None:
                return
            self._decide(page, after)
        read_up_to = None if behind is None else _read_up_to(page, behind)
        if read_up_to is not None:
            self.read_up_to_millis = max(self.read_up_to_millis or 0, read_up_to)

    def _decide(self, page: RecordsPage, after: Position) -> None:
        first = page.records.column("sequence_number")[0].as_py() if page.records.num_rows else None
        is_intact = first is not None and self.anchor is not None and int(first) <= int(self.anchor)
        since, self.unbegun_since = self.read_up_to_millis or self.unbegun_since, None
        self.anchor, self._overdue = None, False
        if is_intact or self._on_gap is None:
            return
        self._on_gap(
            Gap(
                after,
                None if first is None else Position(first),
                since,
                None if first is None else arrival_millis(page, 0),
                page.served_millis,
            )
        )


def _read_up_to(page: RecordsPage, behind_millis: int) -> int | None:
    if page.next_iterator is not None:
        return None if page.served_millis is None else page.served_millis - behind_millis
    # The end of a closed shard is not its tip: its children had records long before, perhaps.
    rows = page.records.num_rows
    return arrival_millis(page, rows - 1) if rows else None


def arrival_millis(page: RecordsPage, row: int) -> int:
    """Return when a record of a page arrived (epoch milliseconds)."""
    arrival: datetime = page.records.column("approximate_arrival_timestamp")[row].as_py()
    return round(arrival.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class FoundGap:
    """A gap in the reads of a lease's shard, and when it was found (monotonic seconds)."""

    lease_key: str
    stream: StreamId
    gap: Gap
    found_at: float


class FoundGaps:
    """Gaps that readers have found and that nobody has judged yet. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gaps: list[FoundGap] = []

    def note(self, lease_key: str, stream: StreamId, gap: Gap) -> None:
        """Add a gap."""
        with self._lock:
            self._gaps.append(FoundGap(lease_key, stream, gap, self._clock.monotonic()))

    def take(self) -> list[FoundGap]:
        """Remove and return all gaps."""
        with self._lock:
            found, self._gaps = self._gaps, []
        return found


# De-aggregate KPL records: many user records in one Kinesis record (protocol §10.5).
#
# An aggregate consists of the magic bytes `F3 89 9A C2`, a protobuf message, and the MD5 digest
# of that message. A record that only starts like an aggregate is delivered as a plain record.
#
# Producers choose the bytes, so there are limits for the length of keys and for the size of the
# user records relative to the aggregate. An aggregate that exceeds a limit is delivered as a
# plain record and counted. The limits apply to single records, so a range that is read again
# gives the same rows.
#
# The hash key of a user record may be outside the shard. The KPL, whose aggregates have the
# partition key `a`, sends such a record again after a reshard. Like the Java KCL this package
# drops the aggregate, and counts it. Other aggregators do not send it again, so all their user
# records are delivered.

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


def plain_chunk(page: RecordsPage, lease_key: str, after: Position) -> Chunk:
    """Return the records of a page as Kinesis stores them, without de-aggregation.

    Args:
        page: The page, possibly without records.
        lease_key: The lease of the shard.
        after: Position before the page (exclusive).
    """
    rows, through = page.records.num_rows, after
    if rows:
        last = page.records.column("sequence_number")[rows - 1].as_py()
        through = max(after, Position(last))
    children = page.child_shards if page.next_iterator is None else None
    return Chunk(
        lease_key, page.records, after, through, page.bytes, page.millis_behind_latest, children
    )


def deaggregate(
    page: RecordsPage, lease_key: str, after: Position, hash_key_range: HashKeyRange | None
) -> Chunk:
    """De-aggregate a page. Keeps the order, and does not raise for any input of producers.

    Args:
        page: The page, possibly without records.
        lease_key: The lease of the shard.
        after: Position before the page (exclusive).
        hash_key_range: The range of the shard. None: no aggregate is dropped.

    Returns:
        The user records. `through` is the last user record of the page, delivered or dropped.
    """
    chunk = plain_chunk(page, lease_key, after)
    starts = _starts_like_aggregates(page.records.column("data"))
    if not any(starts):
        return chunk
    everywhere = hash_key_range is None or (
        hash_key_range.start == 0 and hash_key_range.end == MAX_HASH_KEY
    )
    columns = _Columns()
    last = dropped = over_limit = 0
    first_rejected: str | None = None
    numbers = page.records.column("sequence_number")
    data = page.records.column("data").to_pylist()
    keys = page.records.column("partition_key").to_pylist()
    hash_keys = page.records.column("explicit_hash_key").to_pylist()
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
    records = columns.table(page.records)
    return replace(
        chunk,
        records=records,
        through=max(after, Position(numbers[len(numbers) - 1].as_py(), last)),
        bytes=payload_bytes(records),
        rejected=None
        if first_rejected is None
        else AggregatesRejected(
            lease_key, first_rejected, over_limit, dropped, columns.unknown_keys
        ),
    )


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
    """A valid aggregate exceeds a limit of this package."""


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
            position = _skip_field(message, position, end, wire_type)
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
            position = _skip_field(message, position, end, wire_type)
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


def _skip_field(message: bytes, position: int, end: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return _varint(message, position, end)[1]
    if wire_type == _BYTES:
        return _span(message, position, end)[1]
    width = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
    if width is None or position + width > end:
        raise _NotProtobufError
    return position + width

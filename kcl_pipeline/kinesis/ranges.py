"""Read ranges of many shards in a process without state, such as a Spark task.

The driver sends a `ShardFetch`, and receives a `FetchedShard` with the end position. The records
are those of the range between its two positions, and `RangeReader.read_exactly` reads the same rows
again in any process. See docs/cluster.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Protocol

import pyarrow as pa

from kcl_pipeline.batch import NO_RECORDS, DataFile, data_bytes, sampled_arrivals
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import (
    AwsError,
    CommitStoppedError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.prefetch import MIN_CALL_SECONDS
from kcl_pipeline.kinesis.reader import Gap, Resume, ShardReader
from kcl_pipeline.position import Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, StreamId

MAX_CALLS: Final = 20
"""Largest number of calls for one shard in one fetch, so that empty pages do not delay others."""

EXACTLY_SECONDS: Final = 120.0

TIP_SECONDS: Final = 2.0
"""How long the service must say that no newer record exists before a range counts as incomplete."""


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """A request to read a shard up to its latest record, or until a limit is reached.

    Attributes:
        lease_key: The lease.
        stream: The stream.
        shard_id: The shard.
        after: First position (exclusive).
        hash_key_range: Drops KPL aggregates outside. None: no aggregate is dropped.
        max_records: Largest number of records.
        max_bytes: Largest number of payload bytes. The last response may exceed it.
        resume: State of the reader at `after`.
        initial_timestamp: See `ShardReader`. None: that of the `RangeReader`.
        keeps_aggregates: No KPL aggregate is dropped: the stream distributes its records itself.
    """

    lease_key: str
    stream: StreamId
    shard_id: str
    after: Position
    hash_key_range: HashKeyRange | None
    max_records: int
    max_bytes: int
    resume: Resume = field(default_factory=Resume)
    initial_timestamp: datetime | None = None
    keeps_aggregates: bool = False


@dataclass(frozen=True, slots=True)
class FetchedShard:
    """The result of a `ShardFetch`.

    Attributes:
        lease_key: The lease.
        after: First position (exclusive).
        through: Last position (inclusive).
        records: Number of records in the range.
        bytes: Payload bytes of the range.
        data_bytes: Bytes of the records' data, without partition keys.
        read_bytes: Payload bytes of the responses.
        at_tip: Whether the latest record was read.
        millis_behind_latest: Lag behind the latest record. None: unknown.
        shard_end: The shard ends here and has these children. None: it does not end.
        resume: State of the reader at `through`, for the next fetch.
        arrival_micros: A sample of arrival times in epoch microseconds.
        error: The error that stopped reading. The other attributes describe the range before it.
        throttled: Whether the error is throttling.
        not_found: The service does not know the stream, the shard or the position.
        lost: The stream does not list the shard any more (see `batch.Chunk`). Set by the driver.
        rejected: KPL aggregates that were not de-aggregated.
        gap: The first gap of records that may have left retention.
        keyless: Whether a record has no partition key.
        oldest_at: See `batch.Chunk`. Set by the driver.
    """

    lease_key: str
    after: Position
    through: Position
    records: int = 0
    bytes: int = 0
    read_bytes: int = 0
    at_tip: bool = False
    millis_behind_latest: int | None = None
    shard_end: tuple[ChildShard, ...] | None = None
    resume: Resume = field(default_factory=Resume)
    arrival_micros: tuple[int, ...] = ()
    error: str | None = None
    throttled: bool = False
    not_found: bool = False
    lost: bool = False
    rejected: AggregatesRejected | None = None
    gap: Gap | None = None
    data_bytes: int = 0
    keyless: bool = False
    oldest_at: float | None = None

    @property
    def record_count(self) -> int:
        """Number of records."""
        return self.records


@dataclass(frozen=True, slots=True)
class RangesWritten:
    """The result of the fetches of one batch.

    Attributes:
        shards: The ranges. A shard that could not be read is missing, or has an error and an empty
            range.
        files: The files of all ranges. None: the transform failed, and there are no files.
        output_schema: Columns of the output (see `batch.Batch`).
        rejected: The records that the transform returned as dead letters (see `batch.Batch`).
        failure: Error of the transform.
    """

    shards: tuple[FetchedShard, ...]
    files: tuple[DataFile, ...] | None = None
    output_schema: pa.Schema | None = None
    rejected: pa.Table | None = None
    failure: str | None = None


class RangeJobs(Protocol):
    """Fetches, transforms and writes in other processes.

    Only positions, counts and file names are returned.
    """

    def run(self, batch_id: str, fetches: Sequence[ShardFetch]) -> RangesWritten:
        """Process one batch.

        Raises:
            SinkError: The job failed. Every fetch can be repeated.
        """

    def close(self) -> None:
        """Release resources. No job runs afterwards."""


class RangeReader:
    """Reads ranges with one client. Not thread-safe."""

    def __init__(
        self,
        kinesis: KinesisClient,
        settings: RetrievalSettings,
        initial_timestamp: datetime | None,
        clock: Clock,
    ) -> None:
        self._kinesis = kinesis
        self._settings = settings
        self._initial_timestamp = initial_timestamp
        self._clock = clock

    def fetch(
        self, fetches: Sequence[ShardFetch], seconds: float
    ) -> list[tuple[FetchedShard, pa.Table]]:
        """Read all shards in turn, for about `seconds` at most.

        Every shard is read at least once. Errors are part of the result and are not raised.
        """
        readings = [self._reading(fetch) for fetch in fetches]
        deadline = self._clock.monotonic() + seconds
        while open_ones := [reading for reading in readings if not reading.done]:
            nearest = min(open_ones, key=lambda reading: reading.due)
            now = self._clock.monotonic()
            if now >= deadline and nearest.calls:
                break
            if nearest.due > now:
                self._clock.sleep(nearest.due - now)
            nearest.step()
        return [reading.result() for reading in readings]

    def opened(self, fetch: ShardFetch) -> ShardFetch:
        """Return the fetch with an iterator, so that every repetition starts at the same record.

        Raises:
            AwsError: GetShardIterator failed.
        """
        reader = self._reader(fetch, self._settings.max_records)
        reader.open()
        return replace(fetch, resume=reader.resume)

    def check(self, fetch: ShardFetch) -> None:
        """Check that the position of a fetch can be read with these settings. Makes no call.

        Raises:
            SettingsError: The position is AT_TIMESTAMP, and no time is set.
            ValueError: The position is SHARD_END.
        """
        self._reader(fetch, self._settings.max_records)

    def read_exactly(
        self,
        fetch: ShardFetch,
        through: Position,
        records: int,
        stop: StopSignal | None = None,
    ) -> pa.Table:
        """Read the rows of a range again. Transient errors are retried for `EXACTLY_SECONDS`.

        If the end of the range has left the retention period, nothing more comes: reading ends
        `TIP_SECONDS` after the service says that no newer record exists.

        Args:
            fetch: The fetch that read the range before. The range starts after `fetch.after`.
            through: Last position (inclusive).
            records: Number of records that were read before.
            stop: Ends the waits. None: nothing ends them early.

        Raises:
            CommitStoppedError: `stop` was set during a wait.
            UnavailableError: A transient error lasts, or the range has another number of records.
            AwsError: The service refused a call.
        """
        reader = self._reader(fetch, self._settings.max_records)
        tables: list[pa.Table] = [NO_RECORDS]
        stop = stop or self._clock.signal()
        deadline = self._clock.monotonic() + EXACTLY_SECONDS
        tip_deadline = deadline
        while reader.position < through:
            if stop.is_set():
                raise CommitStoppedError(f"{fetch.lease_key} was not read again: the worker stops")
            try:
                chunk = reader.read()
            except (ThrottledError, UnavailableError):
                if self._clock.monotonic() >= deadline:
                    raise
                stop.wait(1.0)
                continue
            now = self._clock.monotonic()
            if chunk is not None:
                tables.append(rows_through(chunk.records, through))
            elif reader.ended or now >= tip_deadline:
                break
            else:
                at_tip = reader.millis_behind_latest == 0
                tip_deadline = min(tip_deadline, now + TIP_SECONDS) if at_tip else deadline
                stop.wait(MIN_CALL_SECONDS)
        rows = pa.concat_tables(tables)
        if rows.num_rows != records:
            raise UnavailableError(
                f"{fetch.lease_key} after {fetch.after} through {through} has "
                f"{rows.num_rows} records, not the {records} that were read before",
                code="RangeChanged",
                operation="GetRecords",
            )
        return rows

    def _reading(self, fetch: ShardFetch) -> _Reading:
        gaps: list[Gap] = []
        most = min(self._settings.max_records, fetch.max_records)
        return _Reading(fetch, self._reader(fetch, most, gaps.append), gaps, self._clock)

    def _reader(
        self,
        fetch: ShardFetch,
        max_records: int,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> ShardReader:
        return ShardReader(
            self._kinesis,
            fetch.stream,
            fetch.lease_key,
            fetch.shard_id,
            fetch.after,
            None if fetch.keeps_aggregates else fetch.hash_key_range,
            self._settings.model_copy(update={"max_records": max_records}),
            self._clock,
            initial_timestamp=fetch.initial_timestamp or self._initial_timestamp,
            resume=fetch.resume,
            on_gap=on_gap,
        )


class _Reading:
    """The progress of reading one shard of a fetch, page by page."""

    def __init__(
        self, fetch: ShardFetch, reader: ShardReader, gaps: list[Gap], clock: Clock
    ) -> None:
        self._fetch = fetch
        self._reader = reader
        self._gaps = gaps
        self._clock = clock
        self._tables: list[pa.Table] = []
        self._records = self._bytes = self._read_bytes = 0
        self._at_tip = False
        self._end: tuple[ChildShard, ...] | None = None
        self._error: AwsError | None = None
        self._rejected: AggregatesRejected | None = None
        self.calls = 0
        self.due = clock.monotonic()
        self.done = False

    def step(self) -> None:
        self.due = self._clock.monotonic() + MIN_CALL_SECONDS
        self.calls += 1
        try:
            chunk = self._reader.read()
        except AwsError as error:
            self._error, self.done = error, True
            return
        self._read_bytes += self._reader.last_bytes
        if chunk is not None:
            self._tables.append(chunk.records)
            self._records += chunk.records.num_rows
            self._bytes += chunk.bytes
            self._end = chunk.shard_end
            self._rejected = both(self._rejected, chunk.rejected)
        behind = self._reader.millis_behind_latest
        self._at_tip = behind == 0 or (behind is None and chunk is None)
        full = self._records >= self._fetch.max_records or self._bytes >= self._fetch.max_bytes
        self.done = full or self._at_tip or self._reader.ended or self.calls >= MAX_CALLS

    def result(self) -> tuple[FetchedShard, pa.Table]:
        rows = pa.concat_tables(self._tables) if self._tables else NO_RECORDS
        return FetchedShard(
            lease_key=self._fetch.lease_key,
            after=self._fetch.after,
            through=self._reader.position,
            records=self._records,
            bytes=self._bytes,
            read_bytes=self._read_bytes,
            at_tip=self._at_tip,
            millis_behind_latest=self._reader.millis_behind_latest,
            shard_end=self._end,
            resume=self._reader.resume,
            arrival_micros=sampled_arrivals(rows),
            error=None if self._error is None else f"{type(self._error).__name__}: {self._error}",
            throttled=isinstance(self._error, ThrottledError),
            not_found=isinstance(self._error, (NotFoundError, InvalidRequestError)),
            rejected=self._rejected,
            gap=next(iter(self._gaps), None),
            data_bytes=data_bytes(rows),
            keyless=rows.column("partition_key").null_count > 0,
        ), rows


def both(
    first: AggregatesRejected | None, second: AggregatesRejected | None
) -> AggregatesRejected | None:
    """Combine the rejected aggregates of two reads of a shard into one event."""
    if first is None or second is None:
        return first or second
    return replace(
        first,
        over_limit=first.over_limit + second.over_limit,
        misplaced=first.misplaced + second.misplaced,
        unknown_keys=first.unknown_keys + second.unknown_keys,
    )


def rows_through(records: pa.Table, position: Position) -> pa.Table:
    """Return the rows up to `position` (inclusive) of a table in shard order."""
    numbers, subs = records.column("sequence_number"), records.column("sub_sequence_number")
    rows = bisect_right(
        range(records.num_rows),
        position,
        key=lambda row: Position(numbers[row].as_py(), subs[row].as_py()),
    )
    return records.slice(0, rows)

"""Read an explicit range of one shard: each read returns the same rows or raises an error.

The tasks of batch reads use it, and the tasks of a stream's batch whose records the planner does
not hold. The planner uses its rules about lost records.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import (
    InvalidRequestError,
    NotFoundError,
    RecordsLostError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import Event
from kcl_pipeline.kinesis.client import (
    ARRIVAL_TOLERANCE,
    MIN_RETENTION_MILLIS,
    IteratorType,
    KinesisClient,
    LatestIterator,
    RecordsPage,
    ShardClient,
)
from kcl_pipeline.kinesis.distribution import RecordDistribution
from kcl_pipeline.kinesis.prefetch import Pace
from kcl_pipeline.kinesis.ranges import rows_through
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange, StreamId
from kcl_pipeline.spark.data_source.offsets import ShardOffset

LOG: Final = logging.getLogger("kcl_pipeline.spark.data_source.source")

FULL_BYTES: Final = 4 * 1024 * 1024
"""A response of this size may be incomplete. The limit of Kinesis is 10 MB."""


@dataclass(frozen=True, slots=True)
class ReadRules:
    """How a range is read.

    Attributes:
        retrieval: Settings of the reader.
        retry_seconds: After how long without success a shard's transient error is raised.
        fail_on_data_loss: Raise an error for lost records, instead of a warning.
    """

    retrieval: RetrievalSettings
    retry_seconds: float
    fail_on_data_loss: bool

    def lost(self, message: str) -> None:
        """Raise `RecordsLostError`, or log a warning if `fail_on_data_loss` is false."""
        if self.fail_on_data_loss:
            raise RecordsLostError(
                f"{message}; write option failOnDataLoss=false to continue with the other records"
            )
        LOG.warning("%s; continuing with the other records", message)


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A range of one shard.

    Attributes:
        stream: The stream.
        shard_id: The shard.
        hash_key_range: Hash keys of the shard.
        start: Start of the range (exclusive).
        through: End of the range (inclusive); None for the end of the shard when the read starts.
        first_sequence_number: First record of the range when it was planned (inclusive), if the
            start is not a sequence number.
        from_millis: Only records that arrived at this time or later (epoch milliseconds).
        before_millis: Only records that arrived earlier (epoch milliseconds).
    """

    stream: StreamId
    shard_id: str
    hash_key_range: HashKeyRange | None
    start: ShardOffset
    through: Position | None = None
    first_sequence_number: str | None = None
    from_millis: int | None = None
    before_millis: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.shard_id} of {self.stream.name} after {self.start.position} through "
            f"{self.through or 'the tip'}"
        )


class StartWatch:
    """A `ShardClient` for one reader of one range that notes the first record.

    With `first_sequence_number`, an iterator for TRIM_HORIZON starts there. If Kinesis does not
    know a requested sequence number, the iterator starts at the trim horizon.

    `check` finds out whether records of the range have left the retention period. A range that
    starts at a sequence number is read from that number on, so its record comes first unless it has
    left the retention period. Then no record is lost if the offset proves that no other record
    arrived up to a time within the retention period.

    Attributes:
        first: Sequence number of the first record, and its arrival in epoch milliseconds.
        full: Whether a limit may have shortened the last response.
    """

    def __init__(self, kinesis: ShardClient, requested: ReadRange, rules: ReadRules) -> None:
        self.first: tuple[str, int] | None = None
        self.full = False
        self._kinesis = kinesis
        self._requested = requested
        self._rules = rules
        self._done = False

    def get_shard_iterator(
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """See the class. Raises as `ShardClient`."""
        if iterator_type == "TRIM_HORIZON" and self._requested.first_sequence_number is not None:
            iterator_type = "AT_SEQUENCE_NUMBER"
            sequence_number = self._requested.first_sequence_number
        try:
            return self._kinesis.get_shard_iterator(
                stream,
                shard_id,
                iterator_type,
                sequence_number=sequence_number,
                timestamp=timestamp,
            )
        except InvalidRequestError:
            if iterator_type != "AT_SEQUENCE_NUMBER":
                raise
        self._rules.lost(
            f"{shard_id} of {stream.name} does not know sequence number {sequence_number}: "
            "the stream was created again, or the record has left the retention period"
        )
        return self._kinesis.get_shard_iterator(stream, shard_id, "TRIM_HORIZON")

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """As the client underneath."""
        return self._kinesis.latest_iterator(stream, shard_id)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """As the client underneath."""
        page = self._kinesis.get_records(stream, shard_id, iterator, limit)
        self.full = page.records.num_rows >= limit or page.bytes >= FULL_BYTES
        if self.first is None and page.records.num_rows:
            arrival = page.records.column("approximate_arrival_timestamp")[0].as_py()
            self.first = (
                page.records.column("sequence_number")[0].as_py(),
                round(arrival.timestamp() * 1000),
            )
        return page

    def check(self, now_millis: int, *, at_tip: bool) -> None:
        """Check after a read until the result is known; raise `RecordsLostError` or warn once."""
        first = self.first
        if self._done or (first is None and not at_tip):
            return
        start, expected = self._requested.start, self._requested.first_sequence_number
        if not start.position.is_sentinel:
            expected = start.position.sequence_number
        elif expected is None and start.read_up_to_millis is None:
            self._done = True
            return
        if first is not None and expected is not None and int(first[0]) <= int(expected):
            self._done = True
            return
        exact = expected is not None and self._requested.first_sequence_number == expected
        lost = exact or _is_past(start, now_millis if first is None else max(now_millis, first[1]))
        self._done = lost or first is not None
        if lost:
            where = (
                "nothing is left in the shard"
                if first is None
                else f"its oldest record is {first[0]}"
            )
            self._rules.lost(
                f"records of {self._requested} have left retention, or may have: {where}"
            )


def _is_past(start: ShardOffset, now_millis: int) -> bool:
    return (
        start.read_up_to_millis is None
        or now_millis > start.read_up_to_millis + MIN_RETENTION_MILLIS
    )


class SourceReader(ShardReader):
    """A reader whose shard ends without children when it is not found.

    The data source writes no lease rows; `ReadRules.lost` decides what a missing shard means.
    """

    def on_missing(self, _error: NotFoundError) -> Chunk:
        """See the class."""
        self.ended = True
        return self.empty_end(())


def open_reader(
    kinesis: ShardClient,
    requested: ReadRange,
    settings: RetrievalSettings,
    clock: Clock,
    lease_key: str,
    distribution: RecordDistribution,
) -> ShardReader:
    """Open a reader at the start of the range."""
    start = requested.start
    position = start.position
    if position.is_sentinel and requested.first_sequence_number is not None:
        position = TRIM_HORIZON
    timestamp = (
        datetime.fromtimestamp((start.timestamp_millis or 0) / 1000, UTC)
        if position == AT_TIMESTAMP
        else None
    )
    return SourceReader(
        kinesis,
        requested.stream,
        lease_key,
        requested.shard_id,
        position,
        requested.hash_key_range,
        settings,
        clock,
        initial_timestamp=timestamp,
        distribution=distribution,
    )


def read_range(
    kinesis: KinesisClient, requested: ReadRange, rules: ReadRules, clock: Clock, rng: random.Random
) -> Iterator[pa.Table]:
    """Yield the rows of the range per response, as tables of `RECORD_SCHEMA` with rows.

    Raises:
        RecordsLostError: Records are lost and `fail_on_data_loss` is true.
        ThrottledError: The shard was throttled for `retry_seconds`.
        UnavailableError: The shard did not respond for `retry_seconds`.
    """
    watch = StartWatch(kinesis, requested, rules)
    distribution = RecordDistribution(kinesis, clock, log_event)
    reader = open_reader(
        watch, requested, rules.retrieval, clock, requested.shard_id, distribution=distribution
    )
    pace = Pace(rules.retrieval.idle_time_between_reads_in_millis / 1000, due=clock.monotonic())
    began = clock.monotonic()
    while True:
        asked = clock.monotonic()
        chunk = _read_with_retries(reader, pace, rules, clock, rng)
        at_tip = reader.ended or reached(
            reader.millis_behind_latest, asked - began, full=watch.full
        )
        watch.check(round(clock.wall() * 1000), at_tip=at_tip)
        rows = None if chunk is None else _requested_rows(chunk.records, requested)
        if rows is not None and rows.num_rows:
            yield rows
        if requested.through is not None and reader.position >= requested.through:
            return
        if at_tip or (chunk is not None and _arrived_after(chunk.records, requested)):
            break
    if requested.through is not None:
        rules.lost(
            f"{requested} cannot be read again: the shard's last record is {reader.position}"
        )
    elif reader.ended and chunk is not None and chunk.shard_end == ():
        rules.lost(f"{requested} cannot be read: the shard does not exist any more")


def reached(behind_millis: int | None, elapsed_seconds: float, *, full: bool) -> bool:
    """Whether a response contains all records that existed `elapsed_seconds` before its call.

    No clocks of two hosts are compared. A full response may miss records of its last millisecond,
    so that millisecond must be later.
    """
    return behind_millis is not None and (
        (behind_millis == 0 and not full) or behind_millis + 1 <= elapsed_seconds * 1000
    )


def _read_with_retries(
    reader: ShardReader, pace: Pace, rules: ReadRules, clock: Clock, rng: random.Random
) -> Chunk | None:
    deadline = clock.monotonic() + rules.retry_seconds
    while True:
        clock.sleep(max(pace.due - clock.monotonic(), 0.0))
        began = clock.monotonic()
        try:
            chunk = reader.read()
        except (ThrottledError, UnavailableError) as error:
            now = clock.monotonic()
            pace.failed(now, rng, throttled=isinstance(error, ThrottledError))
            if max(pace.due, now) >= deadline:
                raise
            continue
        pace.succeeded(began, size=reader.last_bytes, at_tip=False)
        return chunk


def _requested_rows(records: pa.Table, requested: ReadRange) -> pa.Table:
    if requested.through is not None:
        records = rows_through(records, requested.through)
    # A record belongs to the range by its own arrival time. Kinesis does not promise that these
    # times increase.
    if requested.from_millis is not None:
        records = records.filter(pc.greater_equal(_arrivals(records), requested.from_millis * 1000))
    if requested.before_millis is not None:
        records = records.filter(pc.less(_arrivals(records), requested.before_millis * 1000))
    return records


def _arrived_after(records: pa.Table, requested: ReadRange) -> bool:
    """Return whether all records, and so the later ones, arrived after the range."""
    if requested.before_millis is None or not records.num_rows:
        return False
    end = (requested.before_millis + ARRIVAL_TOLERANCE // timedelta(milliseconds=1)) * 1000
    return bool(pc.min(_arrivals(records)).as_py() >= end)


def _arrivals(records: pa.Table) -> pa.ChunkedArray:
    return records.column("approximate_arrival_timestamp").cast(pa.int64())


def log_event(event: Event) -> None:
    """Log an event of a reader as a warning."""
    LOG.warning("%s", event)

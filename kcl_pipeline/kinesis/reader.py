"""Reading one shard from a position, one GetRecords at a time (protocol §9.4, §10.1, §10.3)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

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
from kcl_pipeline.kinesis.client import (
    NO_RECORDS,
    Chunk,
    IteratorType,
    RecordsPage,
    ShardClient,
)
from kcl_pipeline.kinesis.decode.bodies import payload_bytes
from kcl_pipeline.kinesis.decode.kpl import Deaggregated, deaggregate
from kcl_pipeline.kinesis.witness import StreamWitness
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, StreamId


@dataclass(frozen=True, slots=True)
class Resume:
    """What a reader knows besides its position, so that another one, perhaps in another process,
    goes on without a call for an iterator.

    It belongs to that position. `iterator` is good for five minutes; `last_sequence_number` is the
    last record read, and `latest_since` the service's time when the iterator of a shard begun at
    LATEST was made.
    """

    iterator: str | None = None
    last_sequence_number: str | None = None
    latest_since: datetime | None = None


class ShardReader:
    """Reads a shard after `position` (exclusive). Used by one thread at a time.

    `hash_key_range` None delivers every KPL aggregate. `resume` is that of a reader which had got
    to `position`. `initial_timestamp` is needed for the position AT_TIMESTAMP, which a lease row
    stores without its time. Raises `SettingsError` when it is missing, `ValueError` for the
    position SHARD_END: there is nothing after it.
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
        witness: StreamWitness | None = None,
    ) -> None:
        if position.is_shard_end:
            raise ValueError(f"{lease_key} is at SHARD_END: nothing is left to read")
        if position.sequence_number == AT_TIMESTAMP.sequence_number and initial_timestamp is None:
            raise SettingsError(
                f"{lease_key} is to be read AT_TIMESTAMP, but initial_timestamp is not set; "
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
        self._position = position
        self._hash_key_range = hash_key_range
        self._settings = settings
        self._clock = clock
        self._timestamp = initial_timestamp
        self._witness = witness
        resume = resume or Resume()
        self._iterator = resume.iterator
        self._last_sequence_number = resume.last_sequence_number
        self._latest_since = resume.latest_since

    @property
    def position(self) -> Position:
        """Everything up to here (inclusive) has been given out."""
        return self._position

    @property
    def resume(self) -> Resume:
        """What a reader that goes on after `position` needs to know."""
        return Resume(self._iterator, self._last_sequence_number, self._latest_since)

    def open(self) -> None:
        """Make the iterator now instead of with the first read.

        Raises what GetShardIterator does.
        """
        self._opened()

    def read(self) -> Chunk | None:
        """One GetRecords; None when it brought nothing new, and after the shard's end.

        The first chunk begins `after` the position given, each further one after the `through` of
        the one before. `last_bytes` is what the answer weighed, also when nothing of it was new.
        Raises `Throttled` and `UnavailableError` (also for an answer that makes no sense): call
        again later, nothing is lost. Raises `NotFoundError` for a stream or shard that is not
        found, and `StreamReplacedError` when the end comes from another stream of the same name.

        With a witness, a shard that the right stream does not list any more ends with a chunk that
        says `lost`.
        """
        if self.ended:
            return None
        try:
            page = self._page()
        except NotFoundError as error:
            return self.on_missing(error)
        except InvalidRequestError:
            # The service does not know the position: it may be one of a former stream
            self._confirm_stream()
            raise
        if page.next_iterator is None:
            self._confirm_stream()
        chunk = self._chunk(page)
        # Only now: a page that could not be de-aggregated is asked for again.
        self._iterator = page.next_iterator
        self.ended = page.next_iterator is None
        self.millis_behind_latest = page.millis_behind_latest
        self.last_bytes = page.bytes
        if page.records.num_rows:
            self._last_sequence_number = page.records.column("sequence_number")[
                page.records.num_rows - 1
            ].as_py()
        if chunk is not None:
            self._position = chunk.through
        return chunk

    def _page(self) -> RecordsPage:
        try:
            return self._get_records()
        except ExpiredIteratorError as error:
            self._iterator = None
            self._refuse_to_skip(error)
        return self._get_records()

    def _refuse_to_skip(self, error: ExpiredIteratorError) -> None:
        """Nothing leads back to LATEST without its time: the skip that follows is reported once."""
        is_unread = self._last_sequence_number is None and self._start == LATEST
        if is_unread and self._latest_since is None:
            raise UnavailableError(
                f"the iterator of {self.lease_key} at LATEST expired before its first record, and "
                "Kinesis did not tell its time (no Date in its answer): reading goes on at the "
                "LATEST of now, records that arrived in between are skipped",
                code="LatestForgotten",
                operation="GetRecords",
            ) from error

    def _get_records(self) -> RecordsPage:
        page = self._kinesis.get_records(
            self._stream, self.shard_id, self._opened(), self._settings.max_records
        )
        _check(page, self.shard_id)
        return page

    def _opened(self) -> str:
        iterator = self._iterator = self._iterator or self._make_iterator()
        return iterator

    def _make_iterator(self) -> str:
        """After the last record read, if there is one; else at the start.

        An iterator of LATEST is made only once: again, it would skip what came between.
        """
        if self._last_sequence_number is not None:
            return self._iterator_of(
                "AFTER_SEQUENCE_NUMBER", sequence_number=self._last_sequence_number
            )
        if not self._start.is_sentinel:
            return self._iterator_of(
                "AT_SEQUENCE_NUMBER", sequence_number=self._start.sequence_number
            )
        if self._start.sequence_number == AT_TIMESTAMP.sequence_number:
            return self._iterator_of("AT_TIMESTAMP", timestamp=self._timestamp)
        if self._start.sequence_number == TRIM_HORIZON.sequence_number:
            return self._iterator_of("TRIM_HORIZON")
        if self._latest_since is not None:
            return self._iterator_of("AT_TIMESTAMP", timestamp=self._latest_since)
        latest = self._kinesis.latest_iterator(self._stream, self.shard_id)
        self._latest_since = latest.since
        return latest.iterator

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
        ended = page.next_iterator is None
        if page.records.num_rows == 0:
            return self.empty_end(page.millis_behind_latest, page.child_shards) if ended else None
        whole = (
            Deaggregated(page.records)
            if self._settings.skip_kpl_deaggregation
            else deaggregate(page.records, self._hash_key_range)
        )
        records = whole.records
        if self._last_sequence_number is None and not self._start.is_sentinel:
            records = after_position(records, self._start)
        last = page.records.column("sequence_number")[page.records.num_rows - 1].as_py()
        through = max(self._position, Position(last, whole.last_sub_sequence_number))
        if through == self._position and not ended:
            return None
        size = page.bytes if records is page.records else payload_bytes(records)
        return Chunk(
            self.lease_key,
            records,
            self._position,
            through,
            size,
            page.millis_behind_latest,
            page.child_shards if ended else None,
            rejected=self._rejected(whole),
        )

    def _rejected(self, whole: Deaggregated) -> AggregatesRejected | None:
        if not (whole.over_limit or whole.dropped_aggregates or whole.unknown_keys):
            return None
        return AggregatesRejected(
            self.lease_key,
            whole.first_rejected or "",
            whole.over_limit,
            whole.dropped_aggregates,
            whole.unknown_keys,
        )

    def _confirm_stream(self) -> None:
        if self._witness is not None:
            self._witness.confirm(self._stream, self._clock.monotonic())

    def on_missing(self, error: NotFoundError) -> Chunk:
        """The end of a shard that is proven to be gone; raises `error` for any other."""
        following = None
        if self._witness is not None:
            following = self._witness.successors_of_gone(
                self._stream, self.shard_id, self._hash_key_range
            )
        if following is None:
            raise error
        self.ended = True
        return self.empty_end(None, following, lost=True)

    def empty_end(
        self, behind: int | None, children: tuple[ChildShard, ...], *, lost: bool = False
    ) -> Chunk:
        """A chunk without records that ends the shard where this reader is."""
        return Chunk(
            self.lease_key,
            NO_RECORDS,
            self._position,
            self._position,
            0,
            behind,
            children,
            lost,
        )


def after_position(records: pa.Table, position: Position) -> pa.Table:
    """The rows behind `position` (exclusive) of a table in shard order; only its first rows are
    looked at one by one.
    """
    numbers, subs = records.column("sequence_number"), records.column("sub_sequence_number")
    row = 0
    while row < records.num_rows and Position(numbers[row].as_py(), subs[row].as_py()) <= position:
        row += 1
    return records.slice(row)


def _check(page: RecordsPage, shard_id: str) -> None:
    """An end without children, or children without an end, is not believed (protocol §10.3)."""
    if (page.next_iterator is None) != bool(page.child_shards) or not all(
        child.parents for child in page.child_shards
    ):
        why = (
            f"the answer for {shard_id} makes no sense: next iterator "
            f"{page.next_iterator!r} with {len(page.child_shards)} child shards"
        )
        raise UnavailableError(why, code="InvalidAnswer", operation="GetRecords")

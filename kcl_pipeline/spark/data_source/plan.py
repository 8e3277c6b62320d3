"""Plan the batches of a query from prefetched records.

Spark requests the end of a batch before any task reads it. This process therefore reads the
records, and sends them to the tasks with the batch. Tasks read other records themselves (after a
restart, or beyond the memory limit): a batch is one range per shard, wherever it is read.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import Clock
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.spark.data_source.feed import Feeds, ShardKey
from kcl_pipeline.spark.data_source.lineage import (
    ShardOffsets,
)
from kcl_pipeline.spark.data_source.offsets import Offset, ShardOffset
from kcl_pipeline.spark.data_source.options import SourceOptions
from kcl_pipeline.spark.data_source.read import ReadRange, ReadRules
from kcl_pipeline.spark.data_source.streams import ListedStreams

NO_LIMIT: Final = 2**62
REFRESH_MILLIS: Final = 3600 * 1000
"""Interval in which an idle query logs an offset.

After a restart the offset proves that a shard had no records before that time.
"""

SLACK_SECONDS: Final = 10.0
"""A plan without records waits until every shard was read once.

It waits at most this long plus the time between two reads, because a shard may hang or back off.
"""

TURN_RECORDS: Final = 1_000
"""Records that a batch takes from each shard in turn, so that they are about equally old."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Size limits of a batch. `everything`: all existing records, without limits."""

    max_records: int = NO_LIMIT
    max_bytes: int = NO_LIMIT
    everything: bool = False


@dataclass(slots=True)
class HeldRecords:
    """The first records of one shard's part of a batch, held in memory.

    Attributes:
        after: Start position (exclusive).
        through: End position (inclusive).
        tables: The records.
        bytes: Their size.
        whole: Whether no record was left out so far.
    """

    after: Position
    through: Position
    tables: list[pa.Table] = field(default_factory=list)
    bytes: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """One shard's part of a batch: the held records, then the range that a task reads.

    `bytes` is the size of `records`.
    """

    records: tuple[pa.Table, ...]
    bytes: int
    rest: ReadRange | None


class StreamPlanner:
    """Plan the batches of one query.

    Not thread-safe. Close it after use. With `threads` 0 all reads happen while a plan waits.
    """

    def __init__(
        self,
        kinesis: KinesisClient,
        options: SourceOptions,
        clock: Clock,
        rng: random.Random,
        *,
        threads: int,
    ) -> None:
        self._options = options
        self._clock = clock
        self.rules = read_rules(options)
        self._feeds = Feeds(kinesis, self.rules, clock, rng, threads=threads)
        self._streams = ListedStreams(kinesis, options, self.rules)
        self._initial: Offset | None = None
        self._planned: Offset | None = None
        self._held: dict[ShardKey, HeldRecords] = {}
        self._held_bytes = 0

    # -- offsets
    # ----------------------------------------------------------------------------

    def initial(self) -> Offset:
        """The first offset of a new query. Every call returns the same.

        LATEST becomes the present time. It is returned when the end of every shard was requested.
        """
        if self._initial is None:
            self._initial = self._streams.initial(self._now_millis())
            if self._options.starting_position.kind == "LATEST":
                self._adopt(self._initial, latest=True)
                asked, seconds = self._clock.monotonic(), self.rules.retry_seconds
                deadline = asked + seconds
                while not self._feeds.asked_since(asked) and self._clock.monotonic() < deadline:
                    self._feeds.wait(seconds)
        return self._initial

    def plan(self, start: Offset, limit: Limit) -> Offset | None:
        """The end of the batch that starts at `start`; None without records.

        It waits for records until the next read of a shard is complete.

        Raises:
            RecordsLostError: Records have left the retention period.
            KclError: A permanent error of a shard, for example `AccessDeniedError`. If the query
                ends at the end of the shards, also a transient error that lasts too long.
        """
        begin = self._adopt(start)
        if limit.everything and self._feeds.tip_moment is None:
            self._feeds.read_to_the_tip()
        end = self._advance(begin, self._collect(begin, limit))
        if end == start:
            return None
        for name, shards in end.items():
            self._begin(name, shards, latest=False)
        self._feeds.end(key for key in self._feeds.keys if key[1] not in end.get(key[0], {}))
        self._planned = end
        return end

    def read_to_the_tip(self) -> None:
        """Let the following plans end at the present end of every shard."""
        self._feeds.read_to_the_tip()

    def pieces(self, start: Offset, end: Offset) -> list[Piece]:
        """The parts of the batch between two offsets, sorted by shard id.

        Shards without records are left out. The call may list shards.
        """
        found = []
        for name, shards in sorted(end.items()):
            for shard_id, to in sorted(shards.items()):
                since = start.get(name, {}).get(shard_id, ShardOffset(TRIM_HORIZON))
                if not to.position.is_sentinel and to.position != since.position:
                    found.append(self._piece((name, shard_id), since, to))
        return [piece for piece in found if piece is not None]

    def close(self) -> None:
        """Stop reading."""
        self._feeds.close()

    # -- the batch
    # ----------------------------------------------------------------------------

    def _collect(self, start: Offset, limit: Limit) -> list[Chunk]:
        began = self._clock.monotonic()
        idle = self.rules.retrieval.idle_time_between_reads_in_millis / 1000 + SLACK_SECONDS
        to_the_tip = self._feeds.tip_moment is not None
        chunks: list[Chunk] = []
        while not self._feeds.asked_since(-math.inf) and self._clock.monotonic() - began < idle:
            # Otherwise the first batch has records of one shard only, and its watermark makes the
            # records of the others late.
            self._feeds.wait(idle)
        while True:
            asked = self._feeds.asked_since(began)
            new = [
                self._hold(chunk, start, limited=not limit.everything)
                for chunk in self._take(limit)
            ]
            chunks += new
            if chunks and not limit.everything:
                return chunks
            if to_the_tip:
                if self._feeds.drained() and not new:
                    return chunks
                self._feeds.raise_stuck()
            elif asked or self._clock.monotonic() - began >= idle:
                return chunks
            if not new:
                self._feeds.wait(idle)

    def _take(self, limit: Limit) -> list[Chunk]:
        if limit.everything:
            return self._feeds.take(NO_LIMIT, NO_LIMIT, {}, NO_LIMIT)
        shards = self._feeds.keys
        per_shard = self._options.max_records_per_shard_per_trigger
        left = {} if per_shard is None else dict.fromkeys(shards, per_shard)
        turn = max(min(limit.max_records // max(len(shards), 1), TURN_RECORDS), 1)
        return self._feeds.take(
            limit.max_records, min(limit.max_bytes, self._options.max_bytes_per_trigger), left, turn
        )

    def _hold(self, chunk: Chunk, start: Offset, *, limited: bool) -> Chunk:
        """Keep the records for the tasks.

        In a batch without limits, records of a shard are dropped from the memory limit on.
        """
        key = _key(chunk)
        after = start[key[0]][key[1]].position
        held = self._held.setdefault(key, HeldRecords(after, after))
        held.whole = held.whole and (
            limited or self._held_bytes + chunk.bytes <= self._options.prefetch_max_bytes
        )
        if not held.whole:
            return replace(
                chunk, records=chunk.records.take(list(range(min(1, chunk.records.num_rows))))
            )
        held.tables.append(chunk.records)
        held.through = chunk.through
        held.bytes += chunk.bytes
        self._held_bytes += chunk.bytes
        return chunk

    def _advance(self, begin: Offset, chunks: Sequence[Chunk]) -> Offset:
        end = {name: dict(shards) for name, shards in begin.items()}
        for chunk in chunks:
            name, shard_id = _key(chunk)
            end[name][shard_id] = _moved(begin[name][shard_id], end[name][shard_id], chunk)
            if chunk.shard_end is not None:
                self._streams.note_children((name, shard_id), chunk.shard_end)
                if not chunk.shard_end:
                    del end[name][shard_id]
        for name, shards in begin.items():
            if any(offset.ended for offset in end[name].values()):
                end[name] = self._streams.succeed(name, shards, end[name], self._now_millis())
        known = self._known_times(end)
        idle_long = self._feeds.tip_moment is None and any(
            until - (offset.read_up_to_millis or until) >= REFRESH_MILLIS
            for offset, until in known.values()
        )
        if end != begin or idle_long:
            for (name, shard_id), (offset, until) in known.items():
                end[name][shard_id] = replace(
                    offset, read_up_to_millis=max(until, offset.read_up_to_millis or 0)
                )
        return end

    def _known_times(self, end: Offset) -> dict[ShardKey, tuple[ShardOffset, int]]:
        return {
            (name, shard_id): (offset, until)
            for name, shards in end.items()
            for shard_id, offset in shards.items()
            if offset.read_up_to_millis is not None
            and (until := self._feeds.read_up_to((name, shard_id), offset)) is not None
        }

    def _piece(self, key: ShardKey, since: ShardOffset, to: ShardOffset) -> Piece | None:
        held = self._held.get(key)
        after = since
        records: tuple[pa.Table, ...] = ()
        size = 0
        if (
            held is not None
            and held.after == since.position
            and held.tables
            and held.through <= to.position
        ):
            records, size, after = tuple(held.tables), held.bytes, ShardOffset(held.through)
            if held.through == to.position:
                return Piece(records, size, None)
        first = to.first_sequence_number if after.position.is_sentinel else None
        stream = self._streams.by_name().get(key[0])
        hash_range = self._streams.hash_range(key) if stream is not None else None
        if stream is None or hash_range is None:
            self.rules.lost(
                f"{key[1]} of {key[0]} after {after.position} through {to.position} cannot "
                "be read: the shard does not exist any more"
            )
            return Piece(records, size, None) if records else None
        return Piece(
            records, size, ReadRange(stream, key[1], hash_range, after, to.position, first)
        )

    # -- shards
    # ----------------------------------------------------------------------------

    def _adopt(self, start: Offset, *, latest: bool = False) -> Offset:
        """Continue from `start`.

        If `start` is not the end of the last plan, all feeds start again. Returns the completed
        offset (see `ListedStreams.complete`).
        """
        self._held.clear()
        self._held_bytes = 0
        if self._planned == start:
            return start
        self._feeds.end(self._feeds.keys)
        begin = self._streams.complete(start, self._now_millis())
        for name, shards in begin.items():
            self._begin(name, shards, latest=latest)
        self._planned = start
        return begin

    def _begin(self, name: str, shards: ShardOffsets, *, latest: bool) -> None:
        begun = self._feeds.keys
        for shard_id, offset in shards.items():
            if offset.ended or (name, shard_id) in begun:
                continue
            begin = (
                replace(offset, position=LATEST, timestamp_millis=None)
                if latest and offset.position == AT_TIMESTAMP
                else offset
            )
            self._feeds.begin(
                (name, shard_id),
                ReadRange(
                    self._streams.by_name()[name],
                    shard_id,
                    self._streams.hash_range((name, shard_id)),
                    begin,
                ),
            )

    def _now_millis(self) -> int:
        return round(self._clock.wall() * 1000)


def read_rules(options: SourceOptions) -> ReadRules:
    """The read rules of the options."""
    return ReadRules(
        options.retrieval, options.retry_timeout_in_millis / 1000, options.fail_on_data_loss
    )


def _key(chunk: Chunk) -> ShardKey:
    name, _, shard_id = chunk.lease_key.rpartition("/")
    return name, shard_id


def _moved(start: ShardOffset, before: ShardOffset, chunk: Chunk) -> ShardOffset:
    """The offset after one more chunk of the batch.

    If the batch's start is not a sequence number, the first record's sequence number is kept.
    """
    if chunk.through.is_sentinel:
        return replace(before, ended=chunk.shard_end is not None)
    first = before.first_sequence_number if before is not start else None
    if first is None and start.position.is_sentinel:
        first = (
            chunk.records.column("sequence_number")[0].as_py()
            if chunk.records.num_rows
            else chunk.through.sequence_number
        )
    rows = chunk.records.num_rows
    arrival = (
        chunk.records.column("approximate_arrival_timestamp")[rows - 1].as_py() if rows else None
    )
    until = before.read_up_to_millis if arrival is None else round(arrival.timestamp() * 1000)
    return ShardOffset(chunk.through, None, first, until, chunk.shard_end is not None)

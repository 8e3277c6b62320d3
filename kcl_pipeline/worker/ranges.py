"""Build batches with executor fetches: this process chooses shards, positions and limits.

A batch is divided among shards: those that are behind get what those at their tip do not need.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError, SinkError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.kinesis.prefetch import TOLERATED_THROTTLES, Pace, ReadState
from kcl_pipeline.kinesis.ranges import (
    FetchedShard,
    RangeJobs,
    RangeReader,
    RangesWritten,
    ShardFetch,
)
from kcl_pipeline.kinesis.reader import Resume
from kcl_pipeline.kinesis.retrieval import Retrieval, created_millis
from kcl_pipeline.position import LATEST, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.commit import ShardProgress
from kcl_pipeline.worker.dependencies import WorkerDependencies


@dataclass(frozen=True, slots=True)
class FetchLimit:
    """What a shard at its tip may bring: twice its last fetch.

    Attributes:
        records: Number of records.
        bytes: Number of bytes.
    """

    records: int
    bytes: int


def shares(total: int, limits: Sequence[int | None]) -> list[int]:
    """Return the share of each shard, at least 1.

    If a shard wants as much as possible, the others get what they want: at least a quarter of an
    even share, so that a shard can bring more than before, and at most an even share. The shards
    that want as much as possible divide the rest evenly, so each gets an even share or more.
    Otherwise all shares are even.

    Args:
        total: Records or bytes of the batch.
        limits: What each shard wants. None: as much as possible.
    """
    if not limits:
        return []
    even = total // len(limits)
    modest = [min(max(one, even // 4), even) for one in limits if one is not None]
    others = len(limits) - len(modest)
    rest = (total - sum(modest)) // others if others else even
    limited = iter(modest if others else [even] * len(limits))
    return [max(rest if one is None else next(limited), 1) for one in limits]


_UNKNOWN_BYTES: Final = 1024 * 1024
_MIN_WAIT_SECONDS: Final = 0.001


@dataclass(slots=True, eq=False)
class _Cursor:
    """Next position and state of one shard's reading. `RangeSource` owns it."""

    fetch: ShardFetch
    pace: Pace
    succeeded: float
    expected_bytes: int = _UNKNOWN_BYTES
    limit: FetchLimit | None = None
    at_tip: bool = False
    reached_tip: bool = False
    ended: bool = False
    behind: int | None = None
    read_at: float | None = None
    error: str | None = None
    brought: bool = False


class RangeSource:
    """`BatchSource` of a worker whose executors fetch (docs/cluster.md).

    One job reads the shards that are due, those with the longest wait first. `max_batch_bytes`
    limits the number of shards; the expected size of a shard is that of its last fetch. A shard
    returns at least one response, so a batch can exceed its limits. Nothing is prefetched.
    """

    def __init__(
        self,
        jobs: RangeJobs,
        dependencies: WorkerDependencies,
        retrieval: Retrieval,
        stop: StopSignal,
    ) -> None:
        settings = dependencies.settings
        self.fetch_threads = 0
        self._jobs = jobs
        self._dependencies = dependencies
        self._retrieval = retrieval
        self._stop = stop
        self._batch = settings.batch
        self._reader = RangeReader(
            dependencies.kinesis,
            settings.retrieval,
            settings.shard_sync.initial_timestamp,
            dependencies.clock,
        )
        self._idle_seconds = settings.retrieval.idle_time_between_reads_in_millis / 1000
        self._lock = threading.Lock()
        self._cursors: dict[str, _Cursor] = {}
        self._read: dict[str, tuple[ShardFetch, FetchedShard]] = {}
        self._began = dependencies.clock.monotonic()
        self._batch_at = -math.inf

    def begin(self, consumer: ShardProgress) -> None:
        """See `BatchSource`.

        Raises:
            ValueError: The position of the consumer is not resolved yet.
            SettingsError: The position cannot be read with these settings.
            AwsError: GetShardIterator failed, which is called for LATEST.
        """
        lease = consumer.held.lease
        position = consumer.settled_position()
        fetch = ShardFetch(
            lease.lease_key,
            consumer.stream,
            lease.shard_id,
            position,
            lease.hash_key_range,
            1,
            1,
            Resume(
                latest_since=lease.initial_timestamp if position == LATEST else None,
                read_up_to_millis=consumer.held.read_up_to_millis,
                created_millis=created_millis(position, lease.initial_timestamp),
            ),
            initial_timestamp=lease.initial_timestamp
            or self._dependencies.settings.shard_sync_of(consumer.stream).initial_timestamp,
        )
        self._reader.check(fetch)
        if position == LATEST:
            # A repeated task would request LATEST again, and skip the records between.
            fetch = self._reader.opened(fetch)
        now = self._dependencies.clock.monotonic()
        with self._lock:
            pace = Pace(self._idle_seconds, due=now, common_time=self._began)
            self._cursors[lease.lease_key] = _Cursor(fetch, pace, now)

    # The protocol documents this method and the following ones.
    def end(self, lease_key: str) -> None:  # noqa: D102
        with self._lock:
            self._cursors.pop(lease_key, None)

    def fetch(self) -> float:  # noqa: D102
        return 1.0

    def hold(self, lease_keys: Collection[str]) -> None:
        """Do nothing: executors do not read for record processors."""

    def next(  # noqa: D102
        self, batch_id: str, committed: Mapping[str, Position | None]
    ) -> Batch | None:
        began = self._dependencies.clock.monotonic()
        chosen = self._choose(began)
        if not chosen:
            return None
        fetches = self._shares(list(chosen.values()))
        try:
            done = self._jobs.run(batch_id, fetches)
        except SinkError as error:
            for cursor in chosen.values():
                cursor.error = f"{type(error).__name__}: {error}"
                cursor.pace.failed(
                    self._dependencies.clock.monotonic(), self._dependencies.rng, throttled=False
                )
            raise
        by_key = {fetch.lease_key: fetch for fetch in fetches}
        ended = self._dependencies.clock.monotonic()
        done = replace(
            done,
            shards=tuple(
                self._checked_aggregates(fetch, self._proven(fetch, shard, ended))
                for shard in done.shards
                for fetch in [by_key[shard.lease_key]]
            ),
        )
        self._note(chosen, done, began)
        batch = self._batch_of(batch_id, fetches, done, committed)
        if batch is None:
            return None
        self._batch_at = began
        job_millis = (self._dependencies.clock.monotonic() - began) * 1000
        return replace(batch, milliseconds={"job": job_millis})

    def _proven(self, fetch: ShardFetch, shard: FetchedShard, ended: float) -> FetchedShard:
        """Accept the end or absence of a shard only if the identity of the stream is confirmed.

        The same holds for the first records after a position without a number, which also fits
        another stream of the same name. Executors lack the permission to check. What is not
        confirmed is read again. One call at or after the end of the job (`ended`) is enough for all
        shards of a stream.
        """
        is_first = fetch.after.is_sentinel and shard.through != shard.after
        try:
            if shard.shard_end is not None or is_first:
                self._retrieval.identity.confirm(fetch.stream, ended)
            elif shard.not_found:
                following = self._retrieval.identity.successors_of_gone(
                    fetch.stream, fetch.shard_id, fetch.hash_key_range
                )
                if following is not None:
                    return replace(shard, error=None, shard_end=following, lost=True)
        except AwsError as error:
            shard = replace(shard, shard_end=None, error=f"{type(error).__name__}: {error}")
            return replace(shard, through=fetch.after, resume=fetch.resume) if is_first else shard
        return shard

    def _checked_aggregates(self, fetch: ShardFetch, shard: FetchedShard) -> FetchedShard:
        """Accept that KPL aggregates were dropped only if the stream uses partition keys.

        Otherwise, and if that is not known, the range is read again. Executors lack the permission
        to ask.
        """
        if fetch.keeps_aggregates:
            return shard
        if shard.keyless:
            self._retrieval.distribution.note_keyless(fetch.stream)
        if shard.rejected is None or not shard.rejected.misplaced:
            return shard
        try:
            if not self._retrieval.distribution.is_automatic(fetch.stream):
                return shard
            error = f"{fetch.stream.name} distributes its records itself: no aggregate is dropped"
        except AwsError as found:
            error = f"{type(found).__name__}: {found}"
        return replace(
            shard,
            through=fetch.after,
            resume=fetch.resume,
            shard_end=None,
            lost=False,
            rejected=None,
            gap=None,
            error=error,
        )

    def _keeps_aggregates(self, stream: StreamId) -> bool:
        distribution = self._retrieval.distribution
        if not distribution.was_automatic(stream):
            return False
        try:
            return distribution.is_automatic(stream)
        except AwsError as error:
            about = f"record distribution strategy of {stream.name}"
            self._dependencies.events(AwsTrouble(about, str(error)))
            return True

    def _choose(self, now: float) -> dict[str, _Cursor]:
        with self._lock:
            due = sorted(
                (c for c in self._cursors.values() if not c.ended and c.pace.due <= now),
                key=lambda c: c.pace.due,
            )
        if all(self._due(cursor) > now for cursor in due):
            return {}
        remaining_bytes = self._batch.max_batch_bytes
        chosen: dict[str, _Cursor] = {}
        for cursor in due:
            if remaining_bytes <= 0:
                break
            chosen[cursor.fetch.lease_key] = cursor
            remaining_bytes -= cursor.expected_bytes
        return chosen

    def _due(self, cursor: _Cursor) -> float:
        """Return when a job may be started for a shard. At its tip, once per batch interval."""
        interval = self._batch.min_batch_interval_millis / 1000
        return max(cursor.pace.due, self._batch_at + interval) if cursor.at_tip else cursor.pace.due

    def _shares(self, cursors: list[_Cursor]) -> tuple[ShardFetch, ...]:
        limits = [cursor.limit for cursor in cursors]
        records = shares(
            self._batch.max_batch_records, [None if one is None else one.records for one in limits]
        )
        sizes = shares(
            self._batch.max_batch_bytes, [None if one is None else one.bytes for one in limits]
        )
        return tuple(
            replace(
                cursor.fetch,
                max_records=most,
                max_bytes=most_bytes,
                keeps_aggregates=self._keeps_aggregates(cursor.fetch.stream),
            )
            for cursor, most, most_bytes in zip(cursors, records, sizes, strict=True)
        )

    def _note(self, chosen: Mapping[str, _Cursor], done: RangesWritten, began: float) -> None:
        """Advance the cursors, and report failures."""
        now = self._dependencies.clock.monotonic()
        found = {shard.lease_key: shard for shard in done.shards}
        for key, cursor in chosen.items():
            shard = found.get(key)
            if shard is None or shard.error is not None:
                self._note_failure(cursor, shard, now)
            else:
                cursor.pace.succeeded(began, size=shard.read_bytes, at_tip=shard.at_tip)
                cursor.succeeded = cursor.read_at = now
                cursor.error = None
                cursor.brought = shard.after != shard.through or shard.shard_end is not None
                cursor.at_tip, cursor.behind = shard.at_tip, shard.millis_behind_latest
                cursor.expected_bytes = max(shard.bytes, 1)
                cursor.limit = (
                    FetchLimit(2 * shard.records, 2 * shard.bytes) if shard.at_tip else None
                )
            if shard is not None:
                if shard.rejected is not None:
                    self._dependencies.events(shard.rejected)
                if shard.gap is not None:
                    self._retrieval.gaps.note(key, cursor.fetch.stream, shard.gap)
                cursor.fetch = replace(cursor.fetch, after=shard.through, resume=shard.resume)
                cursor.ended = shard.shard_end is not None
                cursor.reached_tip = cursor.reached_tip or cursor.ended or shard.at_tip

    def _note_failure(self, cursor: _Cursor, shard: FetchedShard | None, now: float) -> None:
        throttled = shard is not None and shard.throttled
        key = cursor.fetch.lease_key
        cursor.pace.failed(now, self._dependencies.rng, throttled=throttled)
        cursor.error = "no answer" if shard is None else shard.error
        if shard is not None and (not throttled or cursor.pace.failures % TOLERATED_THROTTLES == 0):
            self._dependencies.events(AwsTrouble(f"read of {key}", shard.error or ""))

    def _batch_of(
        self,
        batch_id: str,
        fetches: tuple[ShardFetch, ...],
        done: RangesWritten,
        committed: Mapping[str, Position | None],
    ) -> Batch | None:
        of_batch = [
            s for s in done.shards if s.after != s.through and committed.get(s.lease_key) == s.after
        ]
        if done.failure is not None and not of_batch:
            raise SinkError(f"no shard could be read: {done.failure}")
        if not of_batch and all(shard.shard_end is None for shard in done.shards):
            return None
        by_key = {fetch.lease_key: fetch for fetch in fetches}
        self._read = {shard.lease_key: (by_key[shard.lease_key], shard) for shard in of_batch}
        ranges = tuple(
            Chunk(shard.lease_key, NO_RECORDS, shard.after, shard.through, shard.bytes)
            for shard in of_batch
        )
        batch = Batch(
            batch_id,
            ranges,
            NO_RECORDS,
            loaded=False,
            read=tuple(map(self._with_oldest, done.shards)),
            files=done.files,
            output_schema=done.output_schema,
            rejected=done.rejected,
        )
        if sum(shard.records for shard in of_batch) != sum(shard.records for shard in done.shards):
            # The files have rows of a shard that is not in the batch. They would be duplicates.
            return batch.unwritten()
        return batch

    def _with_oldest(self, shard: FetchedShard) -> FetchedShard:
        """Estimate the arrival of a shard's oldest record from its samples."""
        if not shard.arrival_micros:
            return shard
        behind = (shard.millis_behind_latest or 0) / 1000
        span = (max(shard.arrival_micros) - min(shard.arrival_micros)) / 1e6
        return replace(shard, oldest_at=self._dependencies.clock.monotonic() - behind - span)

    def load(self, batch: Batch) -> Batch:  # noqa: D102
        if batch.loaded:
            return batch
        tables = []
        for part in batch.ranges:
            fetch, shard = self._read[part.lease_key]
            try:
                rows = self._reader.read_exactly(fetch, part.through, shard.records, self._stop)
            except AwsError as error:
                raise SinkError(
                    f"the batch {batch.batch_id} could not be read again: {error}"
                ) from error
            tables.append(rows)
        return replace(
            batch,
            ranges=tuple(
                replace(part, records=table)
                for part, table in zip(batch.ranges, tables, strict=True)
            ),
            records=pa.concat_tables(tables) if tables else batch.records,
            loaded=True,
        )

    def lag(self) -> dict[str, int]:  # noqa: D102
        now = self._dependencies.clock.monotonic()
        with self._lock:
            known = [
                (key, cursor) for key, cursor in self._cursors.items() if cursor.behind is not None
            ]
        return {
            key: (cursor.behind or 0)
            + (round((now - cursor.succeeded) * 1000) if cursor.pace.failures else 0)
            for key, cursor in known
        }

    def state_of(self, lease_key: str) -> ReadState | None:  # noqa: D102
        with self._lock:
            cursor = self._cursors.get(lease_key)
        if cursor is None:
            return None
        return ReadState(
            cursor.read_at,
            cursor.brought,
            cursor.reached_tip,
            cursor.error,
            cursor.fetch.resume.read_up_to_millis,
            cursor.behind,
        )

    def wait(self, stop: StopSignal, seconds: float) -> bool:  # noqa: D102
        now = self._dependencies.clock.monotonic()
        with self._lock:
            due = min(
                (self._due(cursor) for cursor in self._cursors.values() if not cursor.ended),
                default=now + seconds,
            )
        stop.wait(min(max(due - now, _MIN_WAIT_SECONDS), seconds))
        return due <= now and not stop.is_set()

"""Batches that executors read: this process only says which shards, from where and how much, and commits what comes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, ShardRange, Written
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, SinkError
from kcl_pipeline.events import AwsTrouble, EventSink, Stalled
from kcl_pipeline.records.kinesis import RECORD_SCHEMA
from kcl_pipeline.records.pacing import Pace
from kcl_pipeline.records.prefetch import STALLED_SECONDS, TOLERATED_THROTTLES
from kcl_pipeline.records.ranges import FetchedShard, RangeJobs, RangeReader, RangesWritten, ShardFetch
from kcl_pipeline.sequence import LATEST, Position
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.supply import Supplied

_UNKNOWN_BYTES: Final = 1024 * 1024
_MIN_WAIT_SECONDS: Final = 0.001


@dataclass(slots=True, eq=False)
class _Cursor:
    """Where one shard is read next. Touched under the supply's lock."""

    fetch: ShardFetch
    pace: Pace
    succeeded: float
    expected_bytes: int = _UNKNOWN_BYTES
    at_tip: bool = False
    reached_tip: bool = False
    ended: bool = False
    behind: int | None = None
    stalled_at: float = 0.0


class RangeSupply:
    """The `Supply` of a worker whose executors fetch (design §3).

    One job reads all shards that are due, the ones that waited longest first, as many as `max_batch_bytes` has room for by what each brought last time; a
    shard gives one answer at least, so a batch can exceed its limits. Nothing is read ahead: reading is a part of the job.
    """

    def __init__(
        self, jobs: RangeJobs, reader: RangeReader, writer: BatchWriter, settings: ConsumerSettings, clock: Clock, rng: random.Random, events: EventSink
    ) -> None:
        self.fetch_threads = 0
        self.rewriter: BatchWriter = _LoadingWriter(self, writer)
        self._jobs = jobs
        self._reader = reader
        self._batch = settings.batch
        self._idle_seconds = settings.retrieval.idle_time_between_reads_in_millis / 1000
        self._clock = clock
        self._rng = rng
        self._events = events
        self._lock = threading.Lock()
        self._cursors: dict[str, _Cursor] = {}
        self._read: dict[str, tuple[ShardFetch, FetchedShard]] = {}

    def begin(self, consumer: ShardConsumer) -> None:
        """See `Supply`. Raises `ValueError` for a consumer whose position is not settled yet, and for LATEST what GetShardIterator does."""
        lease = consumer.held.lease
        if consumer.committed is None:
            raise ValueError(f"the lease {lease.lease_key} has no position yet")
        fetch = ShardFetch(lease.lease_key, consumer.stream, lease.shard_id, consumer.committed, lease.hash_key_range, 1, 1)
        if consumer.committed == LATEST:
            # A task that is repeated would ask for LATEST again, and skip what came between
            fetch = self._reader.opened(fetch)
        now = self._clock.monotonic()
        with self._lock:
            self._cursors[lease.lease_key] = _Cursor(fetch, Pace(self._idle_seconds, due=now), now)

    def end(self, lease_key: str) -> None:  # noqa: D102 (documented by the protocol, as are the others)
        with self._lock:
            self._cursors.pop(lease_key, None)

    def fetch(self) -> float:  # noqa: D102
        return 1.0

    def next(self, batch_id: str, committed: Mapping[str, Position | None], *, waited: bool) -> Supplied | None:  # noqa: D102
        began = self._clock.monotonic()
        chosen = self._choose(began, waited=waited)
        if not chosen:
            return None
        fetches = self._shares(list(chosen.values()))
        try:
            done = self._jobs.run(batch_id, fetches)
        except SinkError:
            for cursor in chosen.values():
                cursor.pace.failed(self._clock.monotonic(), self._rng, throttled=False)
            raise
        self._note(chosen, done, began)
        supplied = self._supplied(batch_id, fetches, done, committed)
        return supplied and replace(supplied, milliseconds={"job": (self._clock.monotonic() - began) * 1000})

    def _choose(self, now: float, *, waited: bool) -> dict[str, _Cursor]:
        with self._lock:
            due = sorted((c for c in self._cursors.values() if not c.ended and c.pace.due <= now), key=lambda c: c.pace.due)
        if not waited and all(cursor.at_tip for cursor in due):
            return {}
        room = self._batch.max_batch_bytes
        chosen: dict[str, _Cursor] = {}
        for cursor in due:
            if room <= 0:
                break
            chosen[cursor.fetch.lease_key] = cursor
            room -= cursor.expected_bytes
        return chosen

    def _shares(self, cursors: list[_Cursor]) -> tuple[ShardFetch, ...]:
        records, size = self._batch.max_batch_records // len(cursors), self._batch.max_batch_bytes // len(cursors)
        return tuple(replace(cursor.fetch, max_records=max(records, 1), max_bytes=max(size, 1)) for cursor in cursors)

    def _note(self, chosen: Mapping[str, _Cursor], done: RangesWritten, began: float) -> None:
        """Move the cursors on, and say what failed."""
        now = self._clock.monotonic()
        found = {shard.lease_key: shard for shard in done.shards}
        for key, cursor in chosen.items():
            shard = found.get(key)
            if shard is None or shard.error is not None:
                self._note_failure(cursor, shard, now)
            else:
                cursor.pace.succeeded(began, size=shard.read_bytes, at_tip=shard.at_tip)
                cursor.succeeded = cursor.stalled_at = now
                cursor.at_tip, cursor.behind = shard.at_tip, shard.millis_behind_latest
                cursor.expected_bytes = max(shard.bytes, 1)
            if shard is not None:
                cursor.fetch = replace(cursor.fetch, after=shard.through, resume=shard.resume)
                cursor.ended = shard.shard_end is not None
                cursor.reached_tip = cursor.reached_tip or cursor.ended or shard.at_tip

    def _note_failure(self, cursor: _Cursor, shard: FetchedShard | None, now: float) -> None:
        throttled = shard is not None and shard.throttled
        key = cursor.fetch.lease_key
        cursor.pace.failed(now, self._rng, throttled=throttled)
        if shard is not None and (not throttled or cursor.pace.failures % TOLERATED_THROTTLES == 0):
            self._events(AwsTrouble(f"read of {key}", shard.error or ""))
        if now - max(cursor.stalled_at, cursor.succeeded) >= STALLED_SECONDS:
            cursor.stalled_at = now
            self._events(Stalled(f"reading {key}", now - cursor.succeeded))

    def _supplied(self, batch_id: str, fetches: tuple[ShardFetch, ...], done: RangesWritten, committed: Mapping[str, Position | None]) -> Supplied | None:
        of_batch = [s for s in done.shards if s.after != s.through and committed.get(s.lease_key) == s.after]
        if done.failure is not None and not of_batch:
            raise SinkError(f"no shard could be read: {done.failure}")
        if not of_batch and all(shard.shard_end is None for shard in done.shards):
            return None
        by_key = {fetch.lease_key: fetch for fetch in fetches}
        self._read = {shard.lease_key: (by_key[shard.lease_key], shard) for shard in of_batch}
        written: Written | None = done.written
        if sum(shard.records for shard in of_batch) != sum(shard.records for shard in done.shards):
            written = None  # the files have rows of a shard that is not in the batch: they would be there twice
        ranges = tuple(ShardRange(shard.lease_key, shard.after, shard.through) for shard in of_batch)
        arrivals = [micros for shard in of_batch for micros in shard.arrival_micros]
        batch = Batch(batch_id, ranges, RECORD_SCHEMA.empty_table(), loaded=False)
        return Supplied(batch, done.shards, sum(shard.records for shard in of_batch), arrivals, written, done.failure)

    def load(self, batch: Batch) -> Batch:  # noqa: D102
        tables = []
        for part in batch.ranges:
            fetch, shard = self._read[part.lease_key]
            try:
                tables.append(self._reader.read_exactly(fetch, part.through, shard.records))
            except AwsError as error:
                raise SinkError(f"the batch {batch.batch_id} could not be read again: {error}") from error
        return replace(batch, records=pa.concat_tables(tables) if tables else batch.records, loaded=True)

    def lag(self) -> dict[str, int]:  # noqa: D102
        now = self._clock.monotonic()
        with self._lock:
            known = [(key, cursor) for key, cursor in self._cursors.items() if cursor.behind is not None]
        return {key: (cursor.behind or 0) + (round((now - cursor.succeeded) * 1000) if cursor.pace.failures else 0) for key, cursor in known}

    def caught_up(self, lease_key: str) -> bool:  # noqa: D102
        with self._lock:
            cursor = self._cursors.get(lease_key)
        return cursor is not None and cursor.reached_tip

    def wait(self, stop: StopSignal, seconds: float) -> bool:  # noqa: D102
        now = self._clock.monotonic()
        with self._lock:
            due = min((cursor.pace.due for cursor in self._cursors.values() if not cursor.ended), default=now + seconds)
        stop.wait(min(max(due - now, _MIN_WAIT_SECONDS), seconds))
        return due <= now and not stop.is_set()


class _LoadingWriter:
    """Writes a batch that executors have read: its records are read again first."""

    def __init__(self, supply: RangeSupply, writer: BatchWriter) -> None:
        self._supply = supply
        self._writer = writer

    def write(self, batch: Batch) -> Written:
        """See `BatchWriter.write`; raises `SinkError` also when the records cannot be read again now."""
        return self._writer.write(batch if batch.loaded else self._supply.load(batch))

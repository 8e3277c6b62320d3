"""One batch: cut, transform and write, commit; and what happens when one of these fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import CommitStoppedError, SinkError, TransformFailedError
from kcl_pipeline.events import AwsTrouble, BatchCommitted, RecordsDeadLettered
from kcl_pipeline.kinesis.ranges import sampled_arrivals
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.worker.commit import Committed, Committer
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.failed_records import FailureLimits, dead_letters, positions_of
from kcl_pipeline.worker.failures.isolation import IsolationStoppedError
from kcl_pipeline.worker.failures.pauses import PausedShards
from kcl_pipeline.worker.failures.splitting import BatchSplitter, SplitBatch
from kcl_pipeline.worker.monitoring.lag import LagTracker
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource, ShardPart, SourcedBatch

MAX_SINK_FAILURES: Final = 20
FLUSH_IDLE_SECONDS: Final = 1.0


class BatchRunner:
    """Takes what the supply has and commits it. Only the processing thread uses it.

    Args:
        is_stopped: Whether the worker is to stop: a search for failing records then ends.
    """

    def __init__(
        self,
        parts: WorkerDependencies,
        worker_id: str,
        *,
        leases: HeldLeases,
        source: BatchSource,
        committer: Committer,
        lifecycle: Lifecycle,
        stats: WorkerStats,
        lag: LagTracker,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._settings = parts.settings.batch
        self._worker_id = worker_id
        self._leases = leases
        self._source = source
        self._committer = committer
        self._lifecycle = lifecycle
        self._stats = stats
        self._lag = lag
        self._clock = parts.clock
        self._limits = FailureLimits(self._settings, parts.takes_dead_letters)
        self._splitter = BatchSplitter(
            parts.writer, self._limits, source.load, parts.rng, is_stopped
        )
        self.pauses = PausedShards(worker_id, parts.clock, parts.events)
        self._last_cut = parts.clock.monotonic() - self._settings.min_batch_interval_millis / 1000
        self._serial = 0
        self._incarnation = int(parts.clock.wall() * 1000)
        self._sink_failures = 0
        self._sink_error: str | None = None

    @property
    def sink_failures(self) -> tuple[int, str | None]:
        """How many batches the sink refused since the last one that it took, and why. May be read
        by any thread.
        """
        return self._sink_failures, self._sink_error if self._sink_failures else None

    def step(self) -> bool:
        """Process one batch if enough is buffered or enough time has passed; True when there was
        one.

        A transform that fails pauses shards; it never raises. Raises `SinkError` when the sink
        stays unusable.
        """
        now = self._clock.monotonic()
        waited = now - self._last_cut >= self._settings.min_batch_interval_millis / 1000
        consumers = self._lifecycle.consumers
        self.pauses.keep(consumers)
        self._limits.keep(consumers)
        batch_id = f"{self._worker_id}-{self._incarnation}-{self._serial + 1}"
        try:
            sourced = self._source.next(
                batch_id, {key: c.committed for key, c in consumers.items()}, waited=waited
            )
        except SinkError as error:
            self._sink_failed(batch_id, (), error)
            return False
        if sourced is None:
            self._lifecycle.flush_idle(FLUSH_IDLE_SECONDS)
            return False
        self._last_cut = now
        self._serial += 1
        if sourced.batch.ranges:
            self._lag.took(sourced.oldest_at)
            with self._in_batch(sourced.batch):
                self._process(sourced)
        self._note_ends(sourced.parts)
        self._restart_gaps(sourced)
        return True

    @contextmanager
    def _in_batch(self, batch: Batch) -> Iterator[None]:
        """Say of the shards of a batch that they wait for it: it may hang."""
        consumers = [
            consumer
            for part in batch.ranges
            if (consumer := self._lifecycle.consumers.get(part.lease_key)) is not None
        ]
        for consumer in consumers:
            consumer.in_batch = True
        try:
            yield
        finally:
            for consumer in consumers:
                consumer.in_batch = False

    def _process(self, sourced: SourcedBatch) -> None:
        """Commit every part that the batch is split into; in good order there is one."""
        batch = sourced.batch
        began = self._clock.monotonic()
        consumers = {r.lease_key: self._lifecycle.consumers[r.lease_key] for r in batch.ranges}
        waiting = set(consumers)
        parts = self._splitter.split(sourced)
        try:
            with self._committer.preparing(self._expected(batch), consumers):
                part = next(parts, None)
            while part is not None:
                self._pause(part.paused, consumers)
                waiting -= part.paused.keys()
                self._commit(part, sourced, consumers, began)
                waiting -= {r.lease_key for r in part.batch.ranges}
                began = self._clock.monotonic()
                part = next(parts, None)
        except SinkError as error:
            self._sink_failed(batch.batch_id, waiting, error)
        except TransformFailedError as error:
            self._pause(dict.fromkeys(waiting, str(error)), consumers)
        except IsolationStoppedError:
            self._restart(waiting)

    def _expected(self, batch: Batch) -> Batch:
        """The ranges that will be committed, as far as is known. A prepare of a paused shard would
        most likely cost a fence.
        """
        paused = self.pauses.current()
        return replace(batch, ranges=tuple(r for r in batch.ranges if r.lease_key not in paused))

    def _commit(
        self,
        part: SplitBatch,
        sourced: SourcedBatch,
        consumers: dict[str, ShardConsumer],
        began: float,
    ) -> None:
        keys = [r.lease_key for r in part.batch.ranges]
        self._set_aside(part, consumers)
        if not keys:
            return
        written_millis = (self._clock.monotonic() - began) * 1000
        done = self._committer.commit(part.batch, consumers, part.written)
        self._sink_failures = 0
        if done is None or len(done.lease_keys) < len(keys):
            self._stats.refused()
        if done is not None:
            self._note_done(part, sourced, done, written_millis)

    def _note_done(
        self, part: SplitBatch, sourced: SourcedBatch, done: Committed, written_millis: float
    ) -> None:
        self.pauses.resume(done.lease_keys)
        self._lag.committed(done.lease_keys)
        bytes_of = {
            key: size for key, size in sourced.bytes_of_leases.items() if key in done.lease_keys
        }
        for key, size in bytes_of.items():
            self._leases.record_bytes(key, size)
        self._note_shares(part, sourced)
        failed = sum(records.num_rows for records in part.failed.values())
        is_whole = len(part.batch.ranges) == len(sourced.batch.ranges)
        self._stats.batch(
            part.records,
            sourced.arrival_micros if is_whole else sampled_arrivals(part.batch.records),
            bytes_read=sum(bytes_of.values()),
            rows_written=done.rows,
            dead_letters=failed,
            version=done.version,
        )
        self._parts.events(
            BatchCommitted(
                self._worker_id,
                part.batch.batch_id,
                part.records - failed,
                sum(bytes_of.values()),
                done.lease_keys,
                {**sourced.milliseconds, "write": written_millis, **done.milliseconds},
                done.version,
            )
        )

    def _note_shares(self, part: SplitBatch, sourced: SourcedBatch) -> None:
        counts = sourced.records_of_leases
        for r in part.batch.ranges:
            failed = part.failed.get(r.lease_key)
            self._limits.note(
                r.lease_key, counts.get(r.lease_key, 0), 0 if failed is None else failed.num_rows
            )

    def _set_aside(self, part: SplitBatch, consumers: dict[str, ShardConsumer]) -> None:
        """Write the dead letters of a part, before its batch is committed. What this worker has
        written at an earlier attempt at the range is not written again.
        """
        skip = self._settings.failed_records == "skip"
        new = {}
        for key, records in part.failed.items():
            fresh = records.filter(
                pa.array([place not in consumers[key].set_aside for place in positions_of(records)])
            )
            if fresh.num_rows:
                new[key] = fresh
        if new and not skip:
            self._parts.sink.write_dead_letters(
                dead_letters(new, part.batch.batch_id, self._clock.wall())
            )
        for key, records in new.items():
            consumers[key].set_aside.update(positions_of(records))
            self._parts.events(
                RecordsDeadLettered(
                    self._worker_id,
                    key,
                    records.num_rows,
                    records["error"][0].as_py(),
                    skipped=skip,
                )
            )

    def _pause(self, paused: Mapping[str, str], consumers: dict[str, ShardConsumer]) -> None:
        """Retry these shards later; they are not read meanwhile."""
        for key, reason in paused.items():
            consumer = consumers.pop(key, None)
            if consumer is None:  # its lease was lost meanwhile
                continue
            seconds = self.pauses.pause(key, reason)
            consumer.error = reason
            self._lifecycle.restart(consumer)
            consumer.due = self._clock.monotonic() + seconds

    def _sink_failed(self, batch_id: str, lease_keys: Iterable[str], error: SinkError) -> None:
        """Nothing is known to have landed: every shard of the batch settles with the table before
        it is read again.
        """
        self._stats.refused()
        self._parts.events(AwsTrouble(f"batch {batch_id}", str(error)))
        if isinstance(error, CommitStoppedError):
            return
        self._sink_error = f"{type(error).__name__}: {error}"
        self._sink_failures += 1
        if self._sink_failures >= MAX_SINK_FAILURES:
            raise error
        self._restart(lease_keys, self._sink_error)

    def _restart(self, lease_keys: Iterable[str], error: str | None = None) -> None:
        for key in lease_keys:
            consumer = self._lifecycle.consumers.get(key)
            if consumer is not None:
                consumer.error = error or consumer.error
                self._lifecycle.restart(consumer)

    def _restart_gaps(self, sourced: SourcedBatch) -> None:
        """A part that did not follow on must never make the shard stand still: its reader begins
        again at what is committed.
        """
        used = {r.lease_key for r in sourced.batch.ranges}
        for part in sourced.parts:
            consumer = self._lifecycle.consumers.get(part.lease_key)
            if (
                consumer is None
                or part.lease_key in used
                or consumer.state is not ConsumerState.READING
                or part.after == consumer.committed
            ):
                continue
            self._parts.events(
                AwsTrouble(
                    f"read of {part.lease_key}",
                    f"records after {part.after} do not follow {consumer.committed}",
                )
            )
            self._lifecycle.restart(consumer)

    def _note_ends(self, parts: Sequence[ShardPart]) -> None:
        for part in parts:
            consumer = self._lifecycle.consumers.get(part.lease_key)
            if (
                part.shard_end is not None
                and consumer is not None
                and consumer.state is ConsumerState.READING
                and consumer.committed == part.through
            ):
                consumer.children, consumer.shard_gone = part.shard_end, part.lost
                consumer.state = ConsumerState.ENDING

"""Process batches: load, write, isolate failures, commit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import (
    CommitStoppedError,
    ResultMismatchError,
    SinkError,
    TableMismatchError,
    TransformFailedError,
)
from kcl_pipeline.events import AwsTrouble, BatchRefused, EventSink, HangStep
from kcl_pipeline.processors.calls import CallRunningError, ProcessorCalls
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures import (
    FailureLimits,
    PausedShards,
    all_failed,
    only,
    positions_of,
    rejected_records,
    without,
    write_dead_letters,
)
from kcl_pipeline.worker.isolation import FailureIsolation, IsolationStoppedError, Pause
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.status import LagTracker, WorkerStats
from kcl_pipeline.worker.watchdog import Activity

MAX_SINK_FAILURES: Final = 20
_NOT_TOGETHER: Final = "the transform takes these records one by one, but not together: "


class _FailedAgainError(Exception):
    """A batch that is written again, without lost leases, fails on records that it had written."""


@dataclass(frozen=True, slots=True)
class _Called:
    """The part of one shard whose record processor has not returned."""

    part: Batch
    consumer: ShardConsumer


class BatchRunner:
    """Process batches one after the other. Only the processing thread uses it.

    A batch is loaded and written, failures are isolated (`WriteSteps`), and it lands in the table
    (`LandStep`). Renewals write its checkpoint. A batch may be split into parts; each of
    them is committed alone.

    Args:
        stop: Whether the worker stops. It ends a search for failing records or shards.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        source: BatchSource,
        lifecycle: Lifecycle,
        activity: Activity,
        stats: WorkerStats,
        lag: LagTracker,
        stop: Callable[[], bool],
    ) -> None:
        self._dependencies = dependencies
        self._source = source
        self._lifecycle = lifecycle
        self._stats = stats
        self._lag = lag
        self._limits = FailureLimits(dependencies.settings.batch, dependencies.takes_dead_letters)
        self._is_stopped = stop
        self._write = WriteSteps(
            dependencies.writer, self._limits, source.load, dependencies.rng, stop
        )
        self._land = LandStep(
            lifecycle.progress,
            self._write_again,
            dependencies.clock,
            dependencies.events,
            dependencies.worker_id,
            activity,
        )
        self.pauses = PausedShards(dependencies)
        sink = dependencies.sink
        self._calls = sink if isinstance(sink, ProcessorCalls) else None
        self._called: dict[str, _Called] = {}
        self._serial = 0
        self._incarnation = int(dependencies.clock.wall() * 1000)
        self._sink_failures = 0
        self._sink_error: str | None = None

    @property
    def sink_failures(self) -> tuple[int, str | None]:
        """Number of batches that failed in the sink since its last success, and the last error.

        Any thread may read it.
        """
        return self._sink_failures, self._sink_error if self._sink_failures else None

    def step(self) -> bool:
        """Process one batch, if the source has one.

        A failing transform or function of the sink, and a table that a result does not fit, pause
        shards. They do not raise.

        Returns:
            Whether there was a batch.

        Raises:
            SinkError: The sink failed `MAX_SINK_FAILURES` times in a row.
        """
        consumers = self._lifecycle.consumers
        self.pauses.follow(consumers)
        self._limits.keep(consumers)
        if self._calls is not None:
            self._commit_returned(self._calls)
            self._source.hold(self._called.keys())
            self._calls.call_empty(
                {
                    key: state.read_at
                    for key, consumer in consumers.items()
                    if consumer.state is ConsumerState.READING
                    and (state := self._source.state_of(key)) is not None
                    and not state.has_waiting
                }
            )
        batch_id = f"{self._dependencies.worker_id}-{self._incarnation}-{self._serial + 1}"
        try:
            batch = self._source.next(batch_id, {key: c.committed for key, c in consumers.items()})
        except SinkError as error:
            self._sink_failed(batch_id, (), error)
            return False
        if batch is None:
            self._lifecycle.flush()
            return False
        self._serial += 1
        if batch.ranges:
            self._process(batch)
        self._note_ends(batch)
        self._restart_gaps(batch)
        self._lifecycle.flush()
        return True

    def _commit_returned(self, calls: ProcessorCalls) -> None:
        """Commit the parts whose record processors have returned since the last batch.

        One that failed pauses its shard. One whose lease was lost is forgotten.
        """
        for key, called in list(self._called.items()):
            consumer = called.consumer
            is_here = self._lifecycle.consumers.get(key) is consumer
            if is_here and consumer.state is ConsumerState.READING:
                if calls.is_busy(key):
                    continue
                try:
                    self._commit_part(called.part.unwritten(), {key: consumer})
                except SinkError as error:
                    self._sink_failed(called.part.batch_id, (key,), error)
                self._note_ends(called.part)
                is_reading = consumer.state is ConsumerState.READING
                if is_reading and self._source.state_of(key) is None:
                    self._lifecycle.restart(consumer)  # Other shards needed its memory.
            del self._called[key]
            consumer.in_batch = False

    def _process(self, batch: Batch) -> None:
        """Run the steps of a batch. A part that fails does not prevent the commit of the others."""
        consumers = {key: self._lifecycle.consumers[key] for key in batch.lease_keys}
        waiting = set(consumers)

        def pause(reasons: Mapping[str, str]) -> None:
            self._pause(reasons, consumers)
            waiting.difference_update(reasons)

        self._lag.took(batch.oldest_by_lease())
        began = self._dependencies.clock.monotonic()
        try:
            with self._in_batch(list(consumers.values())):
                for part in self._write.run(batch, pause):  # Steps 1 to 3
                    # Before step 4, so that a crash between them loses no dead letter
                    write_dead_letters(self._dependencies, part.failed, batch.batch_id, consumers)
                    self._commit_part(self._with_write_time(part, began), consumers)
                    waiting.difference_update(part.lease_keys)
                    began = self._dependencies.clock.monotonic()
        except (TableMismatchError, TransformFailedError) as error:
            self._pause(dict.fromkeys(waiting, str(error)), consumers)
        except SinkError as error:
            self._sink_failed(batch.batch_id, waiting, error)
        except _FailedAgainError:
            # The shards are read again, and their records are judged as those of a new batch.
            self._stats.count(refused_batches=1)
            self._restart(waiting)
        except IsolationStoppedError:
            self._restart(waiting)

    def _with_write_time(self, part: Batch, began: float) -> Batch:
        """Note how long the steps before the commit took. A record processor writes nothing."""
        if self._calls is not None:
            return part
        millis = (self._dependencies.clock.monotonic() - began) * 1000
        return replace(part, milliseconds={**part.milliseconds, "write": millis})

    def _commit_part(self, part: Batch, consumers: dict[str, ShardConsumer]) -> None:
        """Commit a part. If the function of the sink fails on it, commit each shard alone.

        A shard whose record processor has not returned is committed when it has.

        A shard that the function fails on alone pauses, and is tried again later. Its records are
        not tried one by one: a function that skips what it has already needs them in order, and
        its error may be that of its store.
        """
        try:
            done = self._land.run(part, consumers)
        except TransformFailedError as error:
            keys = part.lease_keys
            if len(keys) == 1:
                if isinstance(error, CallRunningError):
                    self._called[keys[0]] = _Called(part, consumers[keys[0]])
                else:
                    self._pause({keys[0]: str(error)}, consumers)
                return
            for key in keys:
                if self._is_stopped():
                    raise IsolationStoppedError from error
                alone = only(part, [key])
                if key in consumers:
                    self._commit_part(alone, consumers)
                else:  # Its lease was lost.
                    self._note_done(alone, None)
        else:
            self._note_done(part, done)

    def _write_again(self, batch: Batch) -> Batch:
        """Write a part again, after leases of it were lost.

        Raises:
            _FailedAgainError: Records fail that did not fail when the part was written first.
                Without this, they would be in no file and in no dead letter.
        """
        loaded = self._source.load(batch)
        try:
            written = self._dependencies.writer.write(loaded)
        except TransformFailedError as error:
            raise _FailedAgainError(str(error)) from error
        if written.rejected is not None:
            for key, records in rejected_records(loaded, written.rejected).items():
                known = positions_of(batch.failed[key]) if key in batch.failed else ()
                if not set(positions_of(records)) <= set(known):
                    raise _FailedAgainError(f"records of {key} fail")
        return written

    @contextmanager
    def _in_batch(self, consumers: Iterable[ShardConsumer]) -> Iterator[None]:
        """Note the shards of a batch, so that `Watchdog` reports them if the batch hangs."""
        for consumer in consumers:
            consumer.in_batch = True
        try:
            yield
        finally:
            for consumer in consumers:
                consumer.in_batch = consumer.lease_key in self._called

    # -- outcomes of a batch

    def _note_done(self, part: Batch, done: Batch | None) -> None:
        self._sink_failures = 0
        landed = () if done is None else done.lease_keys
        lost = [key for key in part.lease_keys if key not in landed]
        if lost:
            self._stats.count(refused_batches=1)
            # Their records left the source. Without this, a drain takes the shards as committed.
            for key in lost:
                if (consumer := self._lifecycle.consumers.get(key)) is not None:
                    consumer.is_refused = True
            self._restart(lost)
        if done is None:
            return
        self.pauses.resume(done.lease_keys)
        self._lag.committed(done.lease_keys)
        for key, records in part.by_lease(lambda read: read.record_count).items():
            failed = part.failed.get(key)
            self._limits.note(key, records, 0 if failed is None else failed.num_rows)
        self._stats.note_commit(done)

    def _pause(self, paused: Mapping[str, str], consumers: dict[str, ShardConsumer]) -> None:
        """Pause these shards. They are not read until their next attempt."""
        for key, reason in paused.items():
            consumer = consumers.pop(key, None)
            if consumer is None:  # Its lease was lost meanwhile.
                continue
            seconds = self.pauses.pause(key, reason)
            self._restart([key], reason)
            consumer.due = self._dependencies.clock.monotonic() + seconds

    def _sink_failed(self, batch_id: str, lease_keys: Iterable[str], error: SinkError) -> None:
        """Restart the shards of a batch of unknown outcome."""
        self._stats.count(refused_batches=1)
        self._dependencies.events(AwsTrouble(f"batch {batch_id}", str(error)))
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

    def _restart_gaps(self, batch: Batch) -> None:
        """Restart shards whose reads do not follow their committed position; else they stall."""
        used = set(batch.lease_keys)
        for read in batch.read:
            consumer = self._lifecycle.consumers.get(read.lease_key)
            if (
                consumer is None
                or read.lease_key in used
                or consumer.state is not ConsumerState.READING
                or read.after == consumer.committed
            ):
                continue
            self._dependencies.events(
                AwsTrouble(
                    f"read of {read.lease_key}",
                    f"records after {read.after} do not follow {consumer.committed}",
                )
            )
            self._lifecycle.restart(consumer)

    def _note_ends(self, batch: Batch) -> None:
        for read in batch.read:
            consumer = self._lifecycle.consumers.get(read.lease_key)
            if (
                read.shard_end is not None
                and consumer is not None
                and consumer.state is ConsumerState.READING
                and consumer.committed == read.through
            ):
                consumer.reach_end(read.shard_end, shard_gone=read.lost)


class WriteSteps:
    """Steps 1 to 3: load the records, write them, isolate failures.

    Args:
        writer: Transforms and writes.
        limits: Limit the failing records of a lease.
        load: Reads the records of a batch that executors have read.
        rng: Chooses samples of a batch that fails.
        stop: Whether the worker stops.
    """

    def __init__(
        self,
        writer: BatchWriter,
        limits: FailureLimits,
        load: Callable[[Batch], Batch],
        rng: random.Random,
        stop: Callable[[], bool],
    ) -> None:
        self._writer = writer
        self._limits = limits
        self._load = load
        self._isolation = FailureIsolation(writer, limits, rng, stop)

    def run(self, batch: Batch, pause: Pause) -> Iterator[Batch]:
        """Write the batch; yield its parts. A lease is in one part. Without failures, one part.

        Args:
            batch: The batch, as the source has made it.
            pause: Pauses the leases that are in no part.

        Raises:
            SinkError: Loading or writing failed, or Spark did.
            IsolationStoppedError: The worker stops.
        """
        # 1. Load, unless executors have written the batch and rejected no record.
        if not batch.loaded and (batch.files is None or batch.rejected is not None):
            batch = self._load(batch)
        yield from self._write_parts(batch, pause)

    def _write_parts(
        self, batch: Batch, pause: Pause, *, fails_together: bool = False
    ) -> Iterator[Batch]:
        """Write a batch, or parts of it.

        Args:
            batch: A loaded batch, or one that executors have written.
            pause: Pauses the leases that are in no part.
            fails_together: Whether it was isolated, and no lease and no record of it fails alone.
        """
        try:
            # 2. Write, unless executors did. If they failed, this process may not.
            if batch.files is None:
                has_records = batch.records.num_rows > 0
                batch = self._writer.write(batch) if has_records else replace(batch, files=())
            failed = all_failed(batch)
        except TransformFailedError as error:
            # A copy: the frames of the error hold what the transform made of the batch.
            failure = type(error)(str(error), detail=error.detail)
        else:
            yield from self._within_limits(batch, failed, pause)
            return
        # 3. Isolate failures.
        if not fails_together:
            for part in self._isolation.isolate_failures(batch, failure, pause):
                yield from self._write_parts(part, pause, fails_together=part is batch)
        elif len(batch.ranges) == 1:
            # Whether columns fit may depend on all records: an empty list has no type.
            why = "" if isinstance(failure, ResultMismatchError) else _NOT_TOGETHER
            pause({batch.ranges[0].lease_key: f"{why}{failure}"})
        else:
            for key in batch.lease_keys:
                yield from self._write_parts(only(batch, [key]), pause)

    def _within_limits(
        self, batch: Batch, failed: Mapping[str, pa.Table], pause: Pause
    ) -> Iterator[Batch]:
        """Yield a written batch, or write the rest of it if leases exceed their limits."""
        over = self._limits.exceeded(batch, failed)
        if not over:
            yield replace(batch, failed=failed)
            return
        pause(over)
        rest = without(batch, over)
        if rest.ranges:
            yield from self._write_parts(rest, pause)


class LandStep:
    """Step 4: commit. It is repeated without the shards that the table refuses.

    Args:
        progress: Commits, and knows what the table has of each shard.
        rewrite: Writes the rest of a batch again. It loads the records if necessary.
        clock: Measures the duration of the steps.
        events: Receives `BatchRefused`.
        worker_id: Names this worker in events.
        activity: Receives the steps.
    """

    def __init__(
        self,
        progress: ProgressStore,
        rewrite: Callable[[Batch], Batch],
        clock: Clock,
        events: EventSink,
        worker_id: str,
        activity: Activity,
    ) -> None:
        self._progress = progress
        self._rewrite = rewrite
        self._clock = clock
        self._events = events
        self._worker_id = worker_id
        self._activity = activity

    def run(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> Batch | None:
        """Commit a batch; return what has landed. None: no shard of it is left.

        It is written again if it has no `files`, like a rest whose other shards were refused.
        `consumers` has each shard of the batch. Refused ones are removed from it.

        Raises:
            SinkError: The sink stays unusable, or the worker stops (`CommitStoppedError`).
        """
        timings: dict[str, float] = {}
        # Each attempt lands, or leaves a shard out. One more if the batch creates the table.
        for _ in range(len(batch.ranges) + 2):
            if batch.files is None:
                with self._timed(timings, "rewrite"):
                    batch = self._rewrite(batch)
            self._activity.enter(HangStep.COMMITTING)
            with self._timed(timings, "commit"):
                result = self._progress.advance(batch, consumers)
            if result.landed:
                took = {**batch.milliseconds, **timings}
                return replace(batch, version=result.version, milliseconds=took)
            if result.refused:
                self._leave_out(batch, consumers, result.refused)
            batch = without(batch, result.refused).unwritten()
            if not batch.ranges:
                return None
        raise SinkError(f"batch {batch.batch_id} was refused more often than it has leases")

    def _leave_out(
        self, batch: Batch, consumers: dict[str, ShardConsumer], refused: Mapping[str, str]
    ) -> None:
        for key in refused:
            del consumers[key]
        reasons = "; ".join(sorted(set(refused.values())))
        self._events(BatchRefused(self._worker_id, batch.batch_id, tuple(sorted(refused)), reasons))

    @contextmanager
    def _timed(self, timings: dict[str, float], step: str) -> Iterator[None]:
        began = self._clock.monotonic()
        yield
        timings[step] = timings.get(step, 0.0) + (self._clock.monotonic() - began) * 1000

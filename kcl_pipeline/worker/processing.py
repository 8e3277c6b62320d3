"""One batch: cut, transform and write, commit; and what happens when one of these fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import SinkError, TransformFailed
from kcl_pipeline.events import AwsTrouble, BatchCommitted, RecordsDeadLettered
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.records.kinesis import RECORD_SCHEMA
from kcl_pipeline.worker.batches import Sifted, dead_letters, lease_key_of, write_or_sift
from kcl_pipeline.worker.commit import Committer
from kcl_pipeline.worker.consumer import ConsumerState
from kcl_pipeline.worker.figures import Figures
from kcl_pipeline.worker.lifecycle import Lifecycle
from kcl_pipeline.worker.supply import ShardPart, Supplied, Supply

if TYPE_CHECKING:
    from kcl_pipeline.worker.worker import WorkerParts

MAX_SINK_FAILURES: Final = 20
FLUSH_IDLE_SECONDS: Final = 1.0


class Processor:
    """Takes what the supply has and commits it. Only the processing thread uses it."""

    def __init__(
        self,
        parts: WorkerParts,
        worker_id: str,
        leases: HeldLeases,
        supply: Supply,
        committer: Committer,
        lifecycle: Lifecycle,
        figures: Figures,
    ) -> None:
        self._parts = parts
        self._settings = parts.settings.batch
        self._worker_id = worker_id
        self._leases = leases
        self._supply = supply
        self._committer = committer
        self._lifecycle = lifecycle
        self._figures = figures
        self._clock = parts.clock
        self._last_cut = parts.clock.monotonic() - self._settings.min_batch_interval_millis / 1000
        self._serial = 0
        self._incarnation = int(parts.clock.wall() * 1000)
        self._sink_failures = 0

    def step(self) -> bool:
        """Process one batch if enough is buffered or enough time has passed; True when there was one.

        Raises `TransformFailed` when the transform is broken (or the policy is `fail`), `SinkError` when the sink stays unusable.
        """
        now = self._clock.monotonic()
        waited = now - self._last_cut >= self._settings.min_batch_interval_millis / 1000
        consumers = self._lifecycle.consumers
        batch_id = f"{self._worker_id}-{self._incarnation}-{self._serial + 1}"
        try:
            supplied = self._supply.next(batch_id, {key: c.committed for key, c in consumers.items()}, waited=waited)
        except SinkError as error:
            self._sink_failed(Batch(batch_id, (), RECORD_SCHEMA.empty_table()), error)
            return False
        if supplied is None:
            self._lifecycle.flush_idle(FLUSH_IDLE_SECONDS)
            return False
        self._last_cut = now
        self._serial += 1
        if supplied.batch.ranges:
            self._process(supplied)
        self._note_ends(supplied.parts)
        self._restart_gaps(supplied)
        return True

    def _process(self, supplied: Supplied) -> None:
        batch = supplied.batch
        began = self._clock.monotonic()
        keys = [r.lease_key for r in batch.ranges]
        try:
            consumers = {key: self._lifecycle.consumers[key] for key in keys}
            with self._committer.preparing(batch, consumers):
                sifted = self._sifted(supplied)
            written_millis = (self._clock.monotonic() - began) * 1000
            done = self._committer.commit(sifted.batch, consumers, sifted.written)
        except SinkError as error:
            self._sink_failed(batch, error)
            return
        self._sink_failures = 0
        if done is None or len(done.lease_keys) < len(keys):
            self._figures.refused()
        if done is None:
            return
        bytes_of = {key: size for key, size in supplied.bytes_of_leases.items() if key in done.lease_keys}
        for key, size in bytes_of.items():
            self._leases.record_bytes(key, size)
        failed = len(sifted.failed)
        self._figures.batch(
            supplied.records,
            supplied.arrival_micros,
            bytes_read=sum(bytes_of.values()),
            rows_written=done.rows,
            dead_letters=failed,
            version=done.version,
        )
        self._parts.events(
            BatchCommitted(
                self._worker_id,
                batch.batch_id,
                supplied.records - failed,
                sum(bytes_of.values()),
                done.lease_keys,
                {**supplied.milliseconds, "write": written_millis, **done.milliseconds},
                done.version,
            )
        )

    def _sifted(self, supplied: Supplied) -> Sifted:
        """The files of the batch, and the records that its transform cannot take, which are set aside."""
        if supplied.written is not None:
            return Sifted(supplied.batch, supplied.written, ())
        batch = supplied.batch if supplied.batch.loaded else self._supply.load(supplied.batch)
        sifted = write_or_sift(self._parts.writer, batch)
        if sifted.failed:
            self._set_aside(batch, sifted.failed)
        return sifted

    def _set_aside(self, batch: Batch, failed: tuple[tuple[int, str], ...]) -> None:
        if self._settings.failed_records == "fail":
            row, error = failed[0]
            where = batch.records.slice(row, 1).select(["shard_id", "sequence_number", "sub_sequence_number"]).to_pylist()[0]
            raise TransformFailed(f"the transform cannot take the record at {where} and failed_records is 'fail': {error}")
        skip = self._settings.failed_records == "skip"
        if not skip:
            self._parts.sink.write_dead_letters(dead_letters(batch, failed))
        by_lease: dict[str, list[str]] = {}
        for row, error in failed:
            by_lease.setdefault(lease_key_of(batch, row), []).append(error)
        for key, errors in by_lease.items():
            self._parts.events(RecordsDeadLettered(self._worker_id, key, len(errors), errors[0], skipped=skip))

    def _sink_failed(self, batch: Batch, error: SinkError) -> None:
        """Nothing is known to have landed: every shard of the batch settles with the table before it is read again."""
        self._sink_failures += 1
        self._figures.refused()
        self._parts.events(AwsTrouble(f"batch {batch.batch_id}", str(error)))
        if self._sink_failures >= MAX_SINK_FAILURES:
            raise error
        for part in batch.ranges:
            consumer = self._lifecycle.consumers.get(part.lease_key)
            if consumer is not None:
                self._lifecycle.restart(consumer)

    def _restart_gaps(self, supplied: Supplied) -> None:
        """A part that did not follow on must never make the shard stand still: its reader begins again at what is committed."""
        used = {r.lease_key for r in supplied.batch.ranges}
        for part in supplied.parts:
            consumer = self._lifecycle.consumers.get(part.lease_key)
            if consumer is None or part.lease_key in used or consumer.state is not ConsumerState.READING or part.after == consumer.committed:
                continue
            self._parts.events(AwsTrouble(f"read of {part.lease_key}", f"records after {part.after} do not follow {consumer.committed}"))
            self._lifecycle.restart(consumer)

    def _note_ends(self, parts: Sequence[ShardPart]) -> None:
        for part in parts:
            consumer = self._lifecycle.consumers.get(part.lease_key)
            if part.shard_end is not None and consumer is not None and consumer.state is ConsumerState.READING and consumer.committed == part.through:
                consumer.children = part.shard_end
                consumer.state = ConsumerState.ENDING

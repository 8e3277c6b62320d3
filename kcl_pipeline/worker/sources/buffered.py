"""Build batches from records that this process has prefetched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from kcl_pipeline.batch import Batch, ShardRange
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.kinesis.client import NO_RECORDS, Chunk
from kcl_pipeline.kinesis.prefetch.prefetcher import Prefetcher
from kcl_pipeline.kinesis.prefetch.readers import ReadState
from kcl_pipeline.kinesis.ranges import sampled_arrivals
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leases.held import Held
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.position import Position
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources.batch_source import SourcedBatch


class BufferedSource:
    """`BatchSource` that builds batches from the buffer of the prefetcher.

    Args:
        dependencies: The dependencies of the worker.
        retrieval: Creates the readers.
        held: Returns the leases that are held now.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        retrieval: Retrieval,
        held: Callable[[], Sequence[Held]],
    ) -> None:
        settings = dependencies.settings
        self.fetch_threads = settings.retrieval.fetch_threads
        self._settings = settings.batch
        self._retrieval = retrieval
        self._held = held
        self._memory = dependencies.memory or MemoryBudget.of(settings)
        self._prefetcher = Prefetcher(
            settings.retrieval,
            dependencies.clock,
            dependencies.rng,
            dependencies.events,
            self._memory,
        )

    # The protocol documents this method and the following ones.
    def begin(self, consumer: ShardConsumer) -> None:  # noqa: D102
        lease = consumer.held.lease
        self._prefetcher.add(
            self._retrieval.reader(
                consumer.stream,
                lease.lease_key,
                lease.shard_id,
                consumer.settled_position(),
                lease.hash_key_range,
                held_leases=len(self._held()),
                read_up_to_millis=consumer.held.read_up_to_millis,
                initial_timestamp=lease.initial_timestamp,
            )
        )

    def end(self, lease_key: str) -> None:  # noqa: D102
        self._prefetcher.remove(lease_key)

    def fetch(self) -> float:  # noqa: D102
        return self._prefetcher.step()

    def hold(self, lease_keys: Collection[str]) -> None:  # noqa: D102
        self._prefetcher.hold(lease_keys)

    def next(  # noqa: D102
        self, batch_id: str, committed: Mapping[str, Position | None]
    ) -> SourcedBatch | None:
        # The runner asks for a batch when the one before has ended.
        self._prefetcher.release_taken()
        if self._prefetcher.ready_in(self._settings) != 0:
            return None
        fitting = self._prefetcher.payload_bytes(self._memory.share_bytes)
        chunks = self._prefetcher.take(
            self._settings.max_batch_records, min(self._settings.max_batch_bytes, fitting)
        )
        if not chunks:
            return None
        batch = cut(batch_id, chunks, committed)
        oldest: dict[str, float] = {}
        for chunk in chunks:
            if chunk.oldest_at is not None:
                oldest.setdefault(chunk.lease_key, chunk.oldest_at)
        return SourcedBatch(
            batch,
            chunks,
            batch.records.num_rows,
            sampled_arrivals(batch.records),
            oldest_at={
                r.lease_key: oldest[r.lease_key] for r in batch.ranges if r.lease_key in oldest
            },
        )

    def load(self, batch: Batch) -> Batch:  # noqa: D102
        return batch

    def lag(self) -> dict[str, int]:  # noqa: D102
        return self._prefetcher.lag()

    def state_of(self, lease_key: str) -> ReadState | None:  # noqa: D102
        return self._prefetcher.state_of(lease_key)

    def wait(self, stop: StopSignal, seconds: float) -> bool:  # noqa: D102
        ready_in = self._prefetcher.ready_in(self._settings)
        return self._prefetcher.wait_for_data(
            stop, seconds if ready_in is None else min(seconds, ready_in)
        )


def cut(batch_id: str, chunks: Iterable[Chunk], committed: Mapping[str, Position | None]) -> Batch:
    """Join chunks into a batch with one range per lease, in the given order.

    A chunk must follow the committed position or the previous chunk of its lease. Otherwise it
    belongs to an earlier incarnation of the lease and is skipped.
    """
    tables: dict[str, list[pa.Table]] = {}
    ranges: dict[str, ShardRange] = {}
    for chunk in chunks:
        known = ranges.get(chunk.lease_key)
        expected = known.through if known else committed.get(chunk.lease_key)
        if expected is None or chunk.after != expected:
            continue
        rows = chunk.records.num_rows + ((known.rows or 0) if known else 0)
        ranges[chunk.lease_key] = ShardRange(
            chunk.lease_key, known.after if known else chunk.after, chunk.through, rows
        )
        tables.setdefault(chunk.lease_key, []).append(chunk.records)
    moved = {key: part for key, part in ranges.items() if part.after != part.through}
    rows = [table for key in moved for table in tables[key]]
    records = pa.concat_tables(rows) if rows else NO_RECORDS
    return Batch(batch_id, tuple(moved.values()), records)

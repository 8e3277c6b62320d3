"""Create the batch source of a worker: driver fetch or executor fetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.kinesis.prefetch.prefetcher import Prefetcher
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leases.held import Held
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources.batch_source import BatchSource
from kcl_pipeline.worker.sources.buffered import BufferedSource
from kcl_pipeline.worker.sources.ranges import RangeSource


def make_source(
    parts: WorkerDependencies,
    retrieval: Retrieval,
    held: Callable[[], Sequence[Held]],
    stop: StopSignal,
) -> BatchSource:
    """Create the batch source that the dependencies require.

    Args:
        parts: If `range_jobs` is set, executors read the shards.
        retrieval: Creates the readers of this process.
        held: Returns the leases that are held now.
        stop: Ends the waits of the processing thread.
    """
    settings = parts.settings
    if parts.range_jobs is not None:
        return RangeSource(parts.range_jobs, parts, retrieval, stop)

    def make_reader(consumer: ShardConsumer) -> ShardReader:
        lease = consumer.held.lease
        return retrieval.reader(
            consumer.stream,
            lease.lease_key,
            lease.shard_id,
            consumer.settled_position(),
            lease.hash_key_range,
            held_leases=len(held()),
            read_up_to_millis=consumer.held.read_up_to_millis,
            initial_timestamp=lease.initial_timestamp,
        )

    memory = parts.memory or MemoryBudget.of(settings)
    return BufferedSource(
        Prefetcher(settings.retrieval, parts.clock, parts.rng, parts.events, memory),
        make_reader,
        settings.batch,
        settings.retrieval.fetch_threads,
        memory,
    )

"""Where batches come from: the interface `BatchSource`, and records that were prefetched here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.kinesis.prefetch import Prefetcher, ReadState
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.leases.held import Held
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.position import Position
from kcl_pipeline.worker.commit import ShardProgress
from kcl_pipeline.worker.dependencies import WorkerDependencies


class BatchSource(Protocol):
    """Read the shards of the consumers that were begun.

    The processing thread calls it. Any thread may call `fetch`, `end` and `state_of`.
    """

    fetch_threads: int
    """Number of threads that must call `fetch`."""

    def begin(self, consumer: ShardProgress) -> None:
        """Read a shard after its committed position. Its earlier state is dropped."""

    def end(self, lease_key: str) -> None:
        """Stop reading a shard and drop its buffered records. Unknown keys are ignored."""

    def fetch(self) -> float:
        """Run one step of a fetch thread; return the seconds until the next one is useful."""

    def hold(self, lease_keys: Collection[str]) -> None:
        """Keep the records of these shards, and read no more of them, until the next call.

        If the other shards need the memory, these shards are removed with their records. `state_of`
        then returns None for them.
        """

    def next(self, batch_id: str, committed: Mapping[str, Position | None]) -> Batch | None:
        """Return the next batch, if it is large enough or has waited for the batch interval.

        Args:
            batch_id: Id of the batch.
            committed: Committed position by lease key. None: not resolved yet.

        Returns:
            The batch; with `files` if executors have written its records and the transform did not
            fail. None: there is none yet.

        Raises:
            SinkError: A job failed.
        """

    def load(self, batch: Batch) -> Batch:
        """Return the batch with its records: the same one if they are loaded.

        Raises:
            SinkError: The records cannot be read again now.
        """

    def lag(self) -> dict[str, int]:
        """Return how far each lease's next record is behind the tip, in milliseconds if known."""

    def state_of(self, lease_key: str) -> ReadState | None:
        """Return the read state of a shard; None if it is not read. Any thread may call it."""

    def wait(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until a batch may be available, `stop` is set, or `seconds` have passed.

        Returns:
            Whether a batch may be available.
        """


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
    def begin(self, consumer: ShardProgress) -> None:  # noqa: D102
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
    ) -> Batch | None:
        # The runner asks for a batch when the one before has ended.
        self._prefetcher.release_taken()
        if self._prefetcher.ready_in(self._settings) != 0:
            return None
        fitting = self._prefetcher.payload_for(self._memory.share_bytes)
        chunks = self._prefetcher.take(
            self._settings.max_batch_records, min(self._settings.max_batch_bytes, fitting)
        )
        if not chunks:
            return None
        return joined(batch_id, chunks, committed)

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


def joined(
    batch_id: str, chunks: Sequence[Chunk], committed: Mapping[str, Position | None]
) -> Batch:
    """Join chunks into a batch with one range per lease, in the given order.

    A chunk must follow the committed position or the previous chunk of its lease. Otherwise it
    belongs to an earlier incarnation of the lease, and its records are not in the batch.
    """
    by_lease: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        known = by_lease.setdefault(chunk.lease_key, [])
        expected = known[-1].through if known else committed.get(chunk.lease_key)
        if expected is not None and chunk.after == expected:
            known.append(chunk)
    wholes = [_whole(following) for following in by_lease.values() if following]
    ranges = tuple(whole for whole in wholes if whole.after != whole.through)
    records = pa.concat_tables([whole.records for whole in ranges]) if ranges else NO_RECORDS
    return Batch(batch_id, ranges, records, read=tuple(chunks))


def _whole(chunks: Sequence[Chunk]) -> Chunk:
    """Return chunks that follow each other as one."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    return replace(
        chunks[-1],
        records=pa.concat_tables([chunk.records for chunk in chunks]),
        after=first.after,
        bytes=sum(chunk.bytes for chunk in chunks),
        oldest_at=first.oldest_at,
    )

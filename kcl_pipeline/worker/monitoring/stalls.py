"""Reports held leases whose shards stand still, with the step that they wait in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.events import EventSink, ShardStalled, StallStep
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource

_STEPS: Final = {
    ConsumerState.BLOCKED: StallStep.WAITING_FOR_PARENT,
    ConsumerState.RESOLVING: StallStep.RESOLVING,
    ConsumerState.ENDING: StallStep.ENDING,
    ConsumerState.LEAVING: StallStep.LEAVING,
}


@dataclass(slots=True)
class _Watched:
    """One incarnation of a held lease. `told_at`: when it was last reported as stalled."""

    held: Held
    moved_at: float
    told_at: float | None = None


class StallWatch:
    """Notices what has not moved for `after_seconds`, and reports it once per such time.

    `look` is for the thread that renews the leases, because the processing thread may be what
    hangs. It reads single attributes of consumers, which that thread changes meanwhile: at worst a
    report comes one look later.

    Args:
        worker_id: Names this worker in events.
        leases: The leases that are held.
        lifecycle: The consumers of the leases.
        source: Knows how the reading of each shard goes.
        after_seconds: `worker.shard_stalled_after_millis`.
        clock: Its monotonic time alone is used.
        events: Receives `ShardStalled`.
    """

    def __init__(
        self,
        worker_id: str,
        leases: HeldLeases,
        lifecycle: Lifecycle,
        source: BatchSource,
        after_seconds: float,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._worker_id = worker_id
        self._leases = leases
        self._lifecycle = lifecycle
        self._source = source
        self._after_seconds = after_seconds
        self._clock = clock
        self._events = events
        self._watched: dict[str, _Watched] = {}
        self.stalled: Mapping[str, StallStep] = {}
        """The leases that stand still, and the step that each waits in, as of the last look."""

    def look(self) -> None:
        """Look at all held leases once."""
        now = self._clock.monotonic()
        consumers = dict(self._lifecycle.consumers)
        watched: dict[str, _Watched] = {}
        stalled: dict[str, StallStep] = {}
        for held in self._leases.held():
            if held.lease.ended:
                continue
            key = held.lease_key
            consumer = consumers.get(key)
            if consumer is not None and consumer.held is not held:
                consumer = None
            one = watched[key] = self._of(held, now)
            one.moved_at = max(one.moved_at, self._moved_at(consumer))
            seconds = now - one.moved_at
            if seconds < self._after_seconds:
                one.told_at = None
                continue
            step, error = self._step_of(held, consumer)
            stalled[key] = step
            if one.told_at is None or now - one.told_at >= self._after_seconds:
                one.told_at = now
                self._events(ShardStalled(self._worker_id, key, step, seconds, error))
        self._watched, self.stalled = watched, stalled

    def _of(self, held: Held, now: float) -> _Watched:
        known = self._watched.get(held.lease_key)
        return known if known is not None and known.held is held else _Watched(held, now)

    def _moved_at(self, consumer: ShardConsumer | None) -> float:
        """The last sign of movement; reading is one only while nothing of the shard waits.

        A shard whose last batch failed is read again and again. It moves when it is committed, or
        when reading it finds nothing that would have to be.
        """
        if consumer is None:
            return float("-inf")
        reading = self._source.state_of(consumer.lease_key)
        is_read = (
            consumer.state is ConsumerState.READING
            and not consumer.in_batch
            and reading is not None
            and reading.read_at is not None
            and not reading.has_waiting
            and (reading.caught_up or not consumer.restarted)
        )
        if not is_read or reading is None or reading.read_at is None:
            return consumer.moved_at
        return max(consumer.moved_at, reading.read_at)

    def _step_of(self, held: Held, consumer: ShardConsumer | None) -> tuple[StallStep, str | None]:
        if consumer is None:
            if held.lease.in_handoff:
                return StallStep.LEAVING, None
            known = self._lifecycle.reads_stream_of(held.lease)
            return (StallStep.QUEUED if known else StallStep.UNKNOWN_STREAM), None
        if consumer.in_batch:
            return StallStep.PROCESSING, consumer.error
        if consumer.state is not ConsumerState.READING:
            return _STEPS.get(consumer.state, StallStep.QUEUED), consumer.error
        reading = self._source.state_of(consumer.lease_key)
        if reading is not None and reading.has_waiting:
            return StallStep.QUEUED, consumer.error
        return StallStep.READING, consumer.error or (None if reading is None else reading.error)

"""Report held leases whose shards make no progress, with the step that they wait in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.events import ShardStalled, StallStep
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.state.worker_status import StalledLease
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource

_STEPS: Final = {
    ConsumerState.BLOCKED: StallStep.WAITING_FOR_PARENT,
    ConsumerState.STARTING: StallStep.STARTING,
    ConsumerState.ENDING: StallStep.ENDING,
    ConsumerState.LEAVING: StallStep.LEAVING,
}


@dataclass(slots=True)
class _Watched:
    """One incarnation of a held lease.

    Attributes:
        held: The lease.
        moved_at: Time of the last movement (monotonic seconds).
        told_at: When it was last reported as stalled (monotonic seconds). None: it is not stalled.
    """

    held: Held
    moved_at: float
    told_at: float | None = None


class StallWatch:
    """Report shards that have not moved, once per `worker.shard_stalled_after_millis`.

    The thread that renews the leases calls `look`, because the processing thread may hang. `look`
    reads single attributes of consumers, which the processing thread changes. At worst a report is
    one call late.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        lifecycle: The consumers of the leases.
        source: Reports the read state of each shard.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        lifecycle: Lifecycle,
        source: BatchSource,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._lifecycle = lifecycle
        self._source = source
        self._after_seconds = dependencies.settings.worker.shard_stalled_after_millis / 1000
        self._watched: dict[str, _Watched] = {}
        self.stalled_leases: tuple[StalledLease, ...] = ()
        """Stalled leases at the last check, those that stand still longest first."""

    @property
    def stalled(self) -> Mapping[str, StallStep]:
        """Stalled leases at the last check, and the step that each waits in."""
        return {one.lease_key: StallStep(one.step) for one in self.stalled_leases}

    def look(self) -> None:
        """Check all held leases once."""
        now = self._dependencies.clock.monotonic()
        consumers = dict(self._lifecycle.consumers)
        watched: dict[str, _Watched] = {}
        found: list[StalledLease] = []
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
            found.append(StalledLease(key, step, seconds, error))
            if one.told_at is None or now - one.told_at >= self._after_seconds:
                one.told_at = now
                self._dependencies.events(
                    ShardStalled(self._dependencies.worker_id, key, step, seconds, error)
                )
        self._watched = watched
        self.stalled_leases = tuple(
            sorted(found, key=lambda lease: (-lease.seconds, lease.lease_key))
        )

    def waiting(self, since: float) -> tuple[str, ...]:
        """Return the held leases that may have records that are not committed.

        A shard that was read to its end after `since` (monotonic seconds) has none. Any thread may
        call it.
        """
        consumers = dict(self._lifecycle.consumers)
        return tuple(
            held.lease_key
            for held in self._leases.held()
            if not held.lease.ended and self._is_behind(held, consumers.get(held.lease_key), since)
        )

    def _is_behind(self, held: Held, consumer: ShardConsumer | None, since: float) -> bool:
        if consumer is None or consumer.held is not held or consumer.in_batch:
            return True
        if consumer.state is not ConsumerState.READING:
            return consumer.state is not ConsumerState.ENDED
        reading = self._source.state_of(consumer.lease_key)
        if reading is None or reading.has_waiting or not reading.caught_up:
            return True
        return (reading.read_at or 0.0) <= since

    def _of(self, held: Held, now: float) -> _Watched:
        known = self._watched.get(held.lease_key)
        return known if known is not None and known.held is held else _Watched(held, now)

    def _moved_at(self, consumer: ShardConsumer | None) -> float:
        """Return the time of the last movement (monotonic seconds).

        A read counts as movement only while no records of the shard wait to be committed. A shard
        whose last batch failed is read repeatedly. It moves when a batch is committed, or when a
        read finds no records.
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

"""The life of a shard consumer between gaining its lease and giving it away (protocol §6.6, §6.7, §6.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kcl_pipeline.batch import SinkNumbers
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, LeaseLost, ShardSyncError, SinkError
from kcl_pipeline.events import AwsTrouble, EventSink, ShardEnded
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.shard_sync import child_leases
from kcl_pipeline.sequence import SHARD_END
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.commit import Committer
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.supply import Supply

ENDING_ATTEMPTS: Final = 10


class Lifecycle:
    """Moves consumers from state to state, one bounded step each. Only the processing thread uses it; `map` makes the writes of several lease rows."""

    def __init__(
        self,
        *,
        worker_id: str,
        settings: ConsumerSettings,
        streams: Mapping[str | None, StreamId],
        table: LeaseTable,
        leases: HeldLeases,
        supply: Supply,
        committer: Committer,
        clock: Clock,
        events: EventSink,
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._streams = streams
        self._table = table
        self._leases = leases
        self._supply = supply
        self._committer = committer
        self._clock = clock
        self._events = events
        self._map = map
        self.consumers: dict[str, ShardConsumer] = {}

    def sync_with_leases(self) -> None:
        """Begin consumers for leases gained, end those of leases lost; a buffer of a lost lease is dropped at once."""
        held = {h.lease.lease_key: h for h in self._leases.held()}
        for key, consumer in list(self.consumers.items()):
            if held.get(key) is not consumer.held:
                self._supply.end(key)
                del self.consumers[key]
        for key, lease in held.items():
            if key not in self.consumers and not lease.lease.in_handoff:
                self._begin(key, lease)

    def _begin(self, key: str, held: Held) -> None:
        stream = self._streams.get(held.lease.stream)
        if stream is None:
            return
        state = ConsumerState.ENDED if held.lease.ended else ConsumerState.BLOCKED
        self.consumers[key] = ShardConsumer(held, stream, state)

    def advance(self, stop: StopSignal) -> None:
        """One step for every consumer that is due and not simply reading, until `stop` is set."""
        now = self._clock.monotonic()
        due = [c for c in self.consumers.values() if c.state not in (ConsumerState.READING, ConsumerState.ENDED) and c.due <= now]
        blocked = [c for c in due if c.state is ConsumerState.BLOCKED]
        parents = dict(zip((c.lease_key for c in blocked), self._map(self._look_at_parents, blocked), strict=True))
        seen = self._committer.look_up(c for c in due if c.state is not ConsumerState.ENDING)
        for consumer in due:
            if stop.is_set():
                return
            try:
                self._step(consumer, parents.get(consumer.lease_key), seen.get(consumer.lease_key))
                consumer.failures = 0
            except LeaseLost as error:
                self._leases.drop(consumer.held, str(error))
            except (AwsError, SinkError, ShardSyncError) as error:
                self._events(AwsTrouble(f"{consumer.state} {consumer.lease_key}", str(error)))
                consumer.back_off(now, self._settings.worker.task_backoff_time_millis / 1000)
                if consumer.state is ConsumerState.ENDING and consumer.failures >= ENDING_ATTEMPTS:
                    # What the service said of the children may have been wrong: ask again
                    self.restart(consumer)

    def _step(self, consumer: ShardConsumer, parents_ended: bool | AwsError | None, seen: SinkNumbers | None) -> None:
        if isinstance(parents_ended, AwsError):
            raise parents_ended
        if consumer.state is ConsumerState.BLOCKED and not parents_ended:
            consumer.due = self._clock.monotonic() + self._settings.worker.parent_shard_poll_interval_millis / 1000
            return
        if consumer.state is ConsumerState.BLOCKED:
            consumer.state = ConsumerState.RESOLVING
        if consumer.state is ConsumerState.RESOLVING:
            self._committer.resolve(consumer, seen)
            self._supply.begin(consumer)
            consumer.state = ConsumerState.READING
        elif consumer.state is ConsumerState.ENDING:
            self._end(consumer)

    def _look_at_parents(self, consumer: ShardConsumer) -> bool | AwsError:
        """Whether all have ended, or why that is not known: one shard's trouble must not hold up the others."""
        try:
            return self._parents_ended(consumer)
        except AwsError as error:
            return error

    def _parents_ended(self, consumer: ShardConsumer) -> bool:
        lease = consumer.held.lease
        for parent in sorted(lease.parent_shard_ids):
            row = self._table.get(lease.key_of_sibling(parent))
            if row is not None and not row.ended:
                return False
        return True

    def restart(self, consumer: ShardConsumer) -> None:
        """Read the shard again from what the table has: after a batch that neither landed nor was refused for good."""
        self._supply.end(consumer.lease_key)
        consumer.state = ConsumerState.RESOLVING
        consumer.back_off(self._clock.monotonic(), self._settings.worker.task_backoff_time_millis / 1000)

    def _end(self, consumer: ShardConsumer) -> None:
        """Children first, then the parent's end: a crash between leaves nothing without a lease (protocol §6.7)."""
        lease = consumer.held.lease
        if consumer.children:
            if any(self._table.get(lease.key_of_sibling(c.shard_id)) is None for c in consumer.children):
                for child in child_leases(lease, consumer.children, existing=self._existing_parents(lease, consumer)):
                    self._table.create_lease(child)
            self._table.set_child_shard_ids(lease.lease_key, [c.shard_id for c in consumer.children])
        self._leases.checkpoint(consumer.held, checkpoint=SHARD_END)
        consumer.committed = consumer.checkpointed = SHARD_END
        consumer.state = ConsumerState.ENDED
        self._supply.end(lease.lease_key)
        self._events(ShardEnded(self._worker_id, lease.lease_key, tuple(lease.key_of_sibling(c.shard_id) for c in consumer.children)))

    def _existing_parents(self, lease: Lease, consumer: ShardConsumer) -> frozenset[str]:
        parents = {parent for child in consumer.children for parent in child.parents}
        return frozenset(p for p in parents if p == lease.shard_id or self._table.get(lease.key_of_sibling(p)) is not None)

    def hand_over(self) -> int:
        """Finish the handoffs that the leader has begun; returns how many leases left. The processing thread is between batches here."""
        leaving = [(held, self.consumers.pop(held.lease.lease_key, None)) for held in self._leases.handoffs()]
        for held, _ in leaving:
            self._supply.end(held.lease.lease_key)
        return sum(self._map(self._hand_over, leaving))

    def _hand_over(self, leaving: tuple[Held, ShardConsumer | None]) -> bool:
        held, consumer = leaving
        try:
            if consumer is not None and consumer.held is held:
                self._committer.flush(consumer)
            return self._leases.complete_handoff(held)
        except LeaseLost as error:
            self._leases.drop(held, str(error))
        except AwsError as error:
            self._events(AwsTrouble(f"handoff of {held.lease.lease_key}", str(error)))
        return False

    def flush_idle(self, idle_seconds: float) -> None:
        """Write the checkpoints that have waited for a next batch for `idle_seconds` or longer."""
        now = self._clock.monotonic()
        list(self._map(self._flush, [c for c in self.consumers.values() if c.flush_needed and now - c.last_commit >= idle_seconds and c.due <= now]))

    def _flush(self, consumer: ShardConsumer) -> None:
        try:
            self._committer.flush(consumer)
        except LeaseLost as error:
            self._leases.drop(consumer.held, str(error))
        except AwsError as error:
            self._events(AwsTrouble(f"checkpoint of {consumer.lease_key}", str(error)))
            consumer.back_off(self._clock.monotonic(), self._settings.worker.task_backoff_time_millis / 1000)

    def release_all(self) -> None:
        """Checkpoint and give back everything, at the end of a worker."""
        for consumer in list(self.consumers.values()):
            self._supply.end(consumer.lease_key)
        list(self._map(self._flush, [consumer for consumer in self.consumers.values() if consumer.flush_needed]))
        self.consumers.clear()
        list(self._map(self._release, self._leases.held()))

    def _release(self, held: Held) -> None:
        try:
            if self._settings.lease.release_leases_on_shutdown:
                self._leases.release(held)
            else:
                self._leases.drop(held, "the worker stopped")
        except (AwsError, LeaseLost) as error:
            self._events(AwsTrouble(f"release of {held.lease.lease_key}", str(error)))

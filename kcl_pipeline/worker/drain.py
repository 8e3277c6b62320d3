"""When a draining worker is done: everything that was in the streams when it began is in the
table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcl_pipeline.background import Due
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import AwsError
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer

if TYPE_CHECKING:
    from kcl_pipeline.worker.worker import Worker, WorkerDependencies

LOOK_SECONDS: Final = 1.0
ATTEMPTS: Final = 3
"""At a paused shard; then a drain does not wait for it any longer."""


class DrainWatch:
    """Looks at the lease table once a second, and once more as soon as all that is held here is
    read and committed.

    Done means: every stream has leases, and each lease is at SHARD_END, or belongs to another
    worker that renews it, or is held here, read to the tip since the drain began, and committed. A
    lease that nobody has is waited for: the leader will assign it. A shard that pauses because its
    transform fails is given up after `ATTEMPTS`.
    """

    def __init__(self, parts: WorkerDependencies, worker: Worker, clock: Clock) -> None:
        self._parts = parts
        self._worker = worker
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._was_through = False
        self._counters: dict[str, int] = {}
        self._renewed: set[str] = set()

    def done(self) -> bool:
        """Whether the drain is complete; answers False in between two looks."""
        was_through, self._was_through = self._was_through, self._is_through()
        if not self._due.ready() and (was_through or not self._was_through):
            return False
        try:
            leases = self._parts.lease_table.list_leases().leases
        except AwsError:
            return False
        self._note_renewals(leases)
        streams = {lease.stream for lease in leases}
        wanted = len(self._parts.settings.streams) if self._parts.settings.is_multi_stream else 1
        return len(streams) >= wanted and all(self._settled(lease) for lease in leases)

    def _note_renewals(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            known = self._counters.get(lease.lease_key)
            if known is not None and lease.counter != known:
                self._renewed.add(lease.lease_key)
            self._counters[lease.lease_key] = lease.counter

    def _settled(self, lease: Lease) -> bool:
        if lease.ended:
            return True
        consumer = self._worker.lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            return (
                lease.actual_owner not in (None, self._worker.worker_id)
                and lease.lease_key in self._renewed
            )
        return self._is_read(consumer) or self._is_given_up(lease)

    def _is_given_up(self, lease: Lease) -> bool:
        """Whether the shard, or one before it, is paused: the drain then ends as failed."""
        pause = self._worker.paused().get(lease.lease_key)
        if pause is not None and pause.attempts >= ATTEMPTS:
            return True
        parents = (
            self._worker.lifecycle.consumers.get(lease.key_of_sibling(parent))
            for parent in lease.parent_shard_ids
        )
        return any(self._is_given_up(parent.held.lease) for parent in parents if parent is not None)

    def _is_through(self) -> bool:
        consumers = [
            c
            for c in self._worker.lifecycle.consumers.values()
            if c.state is not ConsumerState.ENDED
        ]
        return bool(consumers) and all(
            self._is_read(consumer) or self._is_given_up(consumer.held.lease)
            for consumer in consumers
        )

    def _is_read(self, consumer: ShardConsumer) -> bool:
        return (
            consumer.state is ConsumerState.READING
            and consumer.prepared is None
            and self._worker.supply.caught_up(consumer.lease_key)
        )

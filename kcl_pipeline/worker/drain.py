"""Whether a drain is complete: all that was in the streams when it began is in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kcl_pipeline.background import Due
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.rejected import RejectedRows
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.failures.pauses import Pause
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource

LOOK_SECONDS: Final = 1.0
UNREADABLE_LIMIT_SECONDS: Final = 60.0
"""How long the lease table may be unreadable; then the drain fails with the last error."""
ATTEMPTS: Final = 3
"""At a paused shard; then a drain does not wait for it any longer."""


class DrainWatch:
    """Looks at the lease table once a second, and once more as soon as all shards held here are
    read and committed.

    A drain is complete when every stream has leases and each lease is settled. A lease is settled
    when it is at SHARD_END, or belongs to another worker that renews it, or is held here, read to
    the tip since the drain began, and committed. A lease without an owner is waited for: the
    leader will assign it. A shard that pauses because its transform fails is given up after
    `ATTEMPTS`.

    Args:
        worker_id: The worker that drains.
        settings: Its streams.
        table: The lease table.
        lifecycle: The consumers of the worker.
        source: Knows which shards are read to their tip.
        paused: Gives the paused shards by lease key.
        clock: Its monotonic time alone is used.
        events: Receives `AwsTrouble` for each failed look, and `RowRejected` for unreadable rows.
    """

    def __init__(
        self,
        worker_id: str,
        settings: ConsumerSettings,
        table: LeaseTable,
        lifecycle: Lifecycle,
        source: BatchSource,
        paused: Callable[[], Mapping[str, Pause]],
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._worker_id = worker_id
        self._wanted_streams = len(settings.streams) if settings.is_multi_stream else 1
        self._table = table
        self._lifecycle = lifecycle
        self._source = source
        self._paused = paused
        self._clock = clock
        self._events = events
        self._rejected = RejectedRows(events)
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._unreadable_since: float | None = None
        self._was_through = False
        self._counters: dict[str, int] = {}
        self._renewed: set[str] = set()

    def done(self) -> bool:
        """Whether the drain is complete; False between two looks.

        Raises:
            AwsError: The lease table could not be read for `UNREADABLE_LIMIT_SECONDS`.
        """
        was_through, self._was_through = self._was_through, self._is_through()
        if not self._due.ready() and (was_through or not self._was_through):
            return False
        leases = self._read_leases()
        if leases is None:
            return False
        self._note_renewals(leases)
        streams = {lease.stream for lease in leases}
        return len(streams) >= self._wanted_streams and all(
            self._is_settled(lease) for lease in leases
        )

    def _read_leases(self) -> tuple[Lease, ...] | None:
        """All leases; None when the table cannot be read now."""
        now = self._clock.monotonic()
        try:
            listing = self._table.list_leases()
        except AwsError as error:
            self._events(AwsTrouble("Scan of the leases for the drain", str(error)))
            if self._unreadable_since is None:
                self._unreadable_since = now
            if now - self._unreadable_since >= UNREADABLE_LIMIT_SECONDS:
                raise
            return None
        self._unreadable_since = None
        self._rejected.note_all(listing.bad_rows)
        return listing.leases

    def _note_renewals(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            known = self._counters.get(lease.lease_key)
            if known is not None and lease.counter != known:
                self._renewed.add(lease.lease_key)
            self._counters[lease.lease_key] = lease.counter

    def _is_settled(self, lease: Lease) -> bool:
        if lease.ended:
            return True
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            return (
                lease.actual_owner not in (None, self._worker_id)
                and lease.lease_key in self._renewed
            )
        return self._is_read(consumer) or self._is_given_up(lease)

    def _is_given_up(self, lease: Lease) -> bool:
        """Whether the shard, or one before it, is paused: the drain then ends as failed."""
        pause = self._paused().get(lease.lease_key)
        if pause is not None and pause.attempts >= ATTEMPTS:
            return True
        parents = (
            self._lifecycle.consumers.get(lease.key_of_sibling(parent))
            for parent in lease.parent_shard_ids
        )
        return any(self._is_given_up(parent.held.lease) for parent in parents if parent is not None)

    def _is_through(self) -> bool:
        consumers = [
            c for c in self._lifecycle.consumers.values() if c.state is not ConsumerState.ENDED
        ]
        return bool(consumers) and all(
            self._is_read(consumer) or self._is_given_up(consumer.held.lease)
            for consumer in consumers
        )

    def _is_read(self, consumer: ShardConsumer) -> bool:
        return (
            consumer.state is ConsumerState.READING
            and consumer.prepared is None
            and self._source.caught_up(consumer.lease_key)
        )

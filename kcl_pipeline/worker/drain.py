"""When a draining worker is done: everything that was in the streams when it began is in the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import AwsError
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.worker.background import Due
from kcl_pipeline.worker.consumer import ConsumerState

if TYPE_CHECKING:
    from kcl_pipeline.worker.worker import Worker, WorkerParts

LOOK_SECONDS: Final = 1.0


class DrainWatch:
    """Looks at the lease table once a second.

    Done means: every stream has leases, and each lease is at SHARD_END, or belongs to another worker that renews it, or is held here, read to the
    tip since the drain began, and committed. A lease that nobody has is waited for: the leader will assign it.
    """

    def __init__(self, parts: WorkerParts, worker: Worker, clock: Clock) -> None:
        self._parts = parts
        self._worker = worker
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._counters: dict[str, int] = {}
        self._renewed: set[str] = set()

    def done(self) -> bool:
        """Whether the drain is complete; looks at most once a second and answers False in between."""
        if not self._due.ready():
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
            return lease.actual_owner not in (None, self._worker.worker_id) and lease.lease_key in self._renewed
        if consumer.state is not ConsumerState.READING or not self._worker.supply.caught_up(lease.lease_key):
            return False
        return consumer.prepared is None

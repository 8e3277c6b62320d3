"""Delete leases of finished shards and rows of stopped workers (protocol §8.2, §2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink, LeaseDeleted
from kcl_pipeline.leader.election.lock import LeaderElection
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.planning.cleanup import (
    Deletion,
    completed_leases,
    garbage_leases,
)
from kcl_pipeline.shards import Shard, StreamId

DELETION_SECONDS: Final = 2.0
"""Time of a cycle for deletions of one kind.

A stream of 5,000 shards that was removed takes 25 to 50 s, in which no lease would be assigned.
"""


class Cleaning:
    """Deletes rows that are not needed any more. Deletes are conditional on the row's values."""

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        events: EventSink,
        leadership: LeaderElection,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._events = events
        self._leadership = leadership

    def stale(self, ended_seconds: Mapping[str, float]) -> frozenset[str]:
        """Return the leases that have been at SHARD_END so long that retention may have ended.

        The audit lists their streams.
        """
        keep = self._settings.shard_sync.garbage_lease_cleanup_interval_millis / 1000
        return frozenset(key for key, seconds in ended_seconds.items() if seconds >= keep)

    def finished_leases(
        self,
        context: CycleContext,
        ended_seconds: Mapping[str, float],
        listings: Mapping[StreamId, Sequence[Shard]],
    ) -> None:
        """Delete the leases of finished shards, unless a child has not started."""
        found: dict[str, Deletion] = {}
        keep = self._settings.shard_sync.garbage_lease_cleanup_interval_millis / 1000
        for stream, shards in listings.items():
            garbage = garbage_leases(
                context.leases.of_stream(stream), shards, stream, ended_seconds, keep
            )
            found |= {deletion.lease.lease_key: deletion for deletion in garbage}
        if self._settings.shard_sync.cleanup_leases_upon_shard_completion:
            keep = self._settings.shard_sync.completed_lease_cleanup_interval_millis / 1000
            completed = completed_leases(context.leases.values(), ended_seconds, keep)
            found |= {deletion.lease.lease_key: deletion for deletion in completed}
        self.delete_leases(context, [found[key] for key in sorted(found)])

    def delete_leases(self, context: CycleContext, deletions: Iterable[Deletion]) -> None:
        """Delete leases whose checkpoint is as it was read."""
        self._delete_all(
            context,
            (
                (f"deletion of {one.lease.lease_key}", partial(self._delete_lease, context, one))
                for one in deletions
            ),
        )

    def worker_rows(self, context: CycleContext, unchanged: Iterable[WorkerMetrics]) -> None:
        """Delete the rows of workers that have not reported for
        `stale_worker_metrics_entry_cleanup_millis`.
        """
        self._delete_all(
            context,
            (
                (f"deletion of the row of {row.worker_id}", partial(self._worker_table.delete, row))
                for row in unchanged
            ),
        )

    def _delete_lease(self, context: CycleContext, deletion: Deletion) -> None:
        key = deletion.lease.lease_key
        if self._lease_table.delete(deletion.lease):
            del context.leases[key]
            context.deleted.append(key)
            self._events(LeaseDeleted(key, deletion.reason))

    def _delete_all(
        self, context: CycleContext, deletions: Iterable[tuple[str, Callable[[], object]]]
    ) -> None:
        """Delete rows one by one, for `DELETION_SECONDS`. A later cycle continues."""
        end = self._clock.monotonic() + DELETION_SECONDS
        for number, (what, delete) in enumerate(deletions):
            # Before the time is looked at: a deletion that took long may have outlasted the lock.
            self._leadership.keep(number)
            if context.deadline.passed() or self._clock.monotonic() >= end:
                return
            try:
                delete()
            except (AwsError, ValueError) as error:
                self._events(AwsTrouble(what, str(error)))

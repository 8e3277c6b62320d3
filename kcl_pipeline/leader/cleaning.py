"""Delete leases of finished shards and rows of stopped workers (protocol §8.2, §2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink, LeaseDeleted
from kcl_pipeline.leader.lock import Leadership
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.planning.cleanup import (
    Deletion,
    completed_leases,
    garbage_leases,
)
from kcl_pipeline.shards import Shard, StreamId


class Cleaning:
    """Deletes rows that are not needed any more. Deletes are conditional on the row's values."""

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        events: EventSink,
        leadership: Leadership,
    ) -> None:
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
            (
                (f"deletion of {one.lease.lease_key}", partial(self._delete_lease, context, one))
                for one in deletions
            ),
        )

    def worker_rows(self, unchanged: Iterable[WorkerMetrics]) -> None:
        """Delete the rows of workers that have not reported for
        `stale_worker_metrics_entry_cleanup_millis`.
        """
        self._delete_all(
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

    def _delete_all(self, deletions: Iterable[tuple[str, Callable[[], object]]]) -> None:
        """Delete rows one by one, as long as this process leads."""
        for what, delete in deletions:
            self._leadership.check()
            try:
                delete()
            except (AwsError, ValueError) as error:
                self._events(AwsTrouble(what, str(error)))

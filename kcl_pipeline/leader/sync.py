"""Create and delete leases as the streams have shards. Everything here may call Kinesis.

`Sync.run` is called again and again, by one thread at a time, after `assign` has scanned the
tables. It holds no lock and delays neither a heartbeat nor a move: a call that is throttled for a
minute, or hangs, delays only what follows it here. Each time it

1. describes the streams that are due, and records the application;
2. deletes the leases of a stream that was created again, and of streams that are not read any more;
3. restores rows that were deleted by hand;
4. creates the leases of streams that have none;
5. searches the other streams for missing leases;
6. deletes the leases of shards that were read to their end, and the rows of stopped workers.

A lease is created in a transaction with the condition that this process holds the lock. Other
writes are conditional on the rows, and made only while the lock has not expired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    AwsError,
    IncompatibleTableError,
    KclError,
    NotFoundError,
    OtherApplicationError,
)
from kcl_pipeline.events import AwsTrouble, CycleFailed, EventSink, LeaseDeleted
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.assign import LeaseAssignment, Scanned
from kcl_pipeline.leader.deleted_rows import DeletedRows
from kcl_pipeline.leader.lock import Leadership, NotLeadingError
from kcl_pipeline.leader.phase import CycleContext, Deadline, is_local
from kcl_pipeline.leader.report import StreamCoverage, error_sentence
from kcl_pipeline.leader.shards import ShardSync
from kcl_pipeline.leader.streams.former import FormerStreams
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.application.identity import ApplicationIdentity, with_recorded
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.planning.cleanup import (
    Deletion,
    completed_leases,
    former_leases,
    garbage_leases,
)
from kcl_pipeline.shards import StreamId


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of the last run that led.

    Attributes:
        coverage: Hash-range coverage of each stream.
        unavailable: Streams whose last attempt failed.
        streams: Streams that are resolved, with their retention period.
        error: Errors of the run. Other parts of it may have succeeded.
    """

    coverage: tuple[StreamCoverage, ...] = ()
    unavailable: tuple[UnavailableStream, ...] = ()
    streams: tuple[StreamId, ...] = ()
    error: str | None = None


class Sync:
    """Keeps the leases of one application complete while this process leads.

    One thread at a time calls `run`.

    Args:
        settings: All settings.
        assignment: Has the rows, and learns what must end its lead.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        kinesis: The Kinesis client.
        clock: The clock.
        events: Receives events.
        streams: The streams of the application.
        stored: Asks the table for positions of shards. None: it stores none.

    Attributes:
        result: The result of the last run that led.
        created: Keys of created leases that no report has had yet. The reader removes them.
        deleted: The same of deleted leases.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        assignment: LeaseAssignment,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        coordinator_table: CoordinatorStateTable,
        kinesis: KinesisClient,
        *,
        clock: Clock,
        events: EventSink,
        streams: Streams,
        stored: StoredShards | None = None,
    ) -> None:
        self._settings = settings
        self._assignment = assignment
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._coordinator_table = coordinator_table
        self._kinesis = kinesis
        self._clock = clock
        self._events = events
        self._streams = streams
        self._leadership = leadership = Leadership(assignment.election, coordinator_table)
        self._deleted_rows = DeletedRows(lease_table, kinesis, events, streams, leadership, stored)
        self._shards = ShardSync(
            settings, lease_table, kinesis, clock, events, streams, leadership, stored
        )
        self._former = FormerStreams(
            settings, coordinator_table, clock, streams, leadership, self._delete_leases
        )
        self._wrote_at = 0.0
        self._failures = 0
        self.result = Synced()
        self.created: list[str] = []
        self.deleted: list[str] = []

    def run(self) -> None:
        """Sync once, with the rows of the last scan. Errors are reported and not raised."""
        scanned = self._assignment.scanned
        if scanned is None:
            if self._assignment.refusal is not None:
                self._check_again()
            return
        if scanned.scan.scan_started < self._wrote_at:
            # That scan may lack what the last run has written
            return
        self._leadership.begin(scanned.term)
        context = CycleContext.of(scanned.scan, (), Deadline(self._clock, None))
        try:
            self._run(context, scanned)
        except NotLeadingError:
            self._assignment.scanned = None
            return
        except IncompatibleTableError as error:
            # This process must not lead: `assign` releases the lock and raises it
            self._assignment.refusal = error
            self._assignment.scanned = None
            return
        except Exception as error:  # noqa: BLE001 (counted, reported and logged)
            context.errors.append(error)
        finally:
            if context.created or context.deleted:
                self._wrote_at = self._clock.monotonic()
            self.created += context.created
            self.deleted += context.deleted
        self._note_result(context)

    def _run(self, context: CycleContext, scanned: Scanned) -> None:
        # 1. A leader with other streams would create and delete leases of the wrong shards
        self._check_application()
        # 2. The rows of a former stream have the keys of the new one
        self._delete_leases(context, former_leases(context.leases.values(), self._streams.known()))
        self._former.clean(context)
        # 3. Before a child of the missing row is read
        self._deleted_rows.restore(context)
        # 4. and 5. The shards of leases that ended long ago may have left retention: list them
        self._shards.start(context)
        ended, keep = scanned.ended_seconds, self._settings.shard_sync
        garbage_seconds = keep.garbage_lease_cleanup_interval_millis / 1000
        stale = frozenset(key for key, seconds in ended.items() if seconds >= garbage_seconds)
        listings = self._shards.audit(context, stale=stale)
        # 6. Unless a child has not begun
        finished: dict[str, Deletion] = {}
        for stream, shards in listings.items():
            rows = context.leases.of_stream(stream)
            for deletion in garbage_leases(rows, shards, stream, ended, garbage_seconds):
                finished[deletion.lease.lease_key] = deletion
        if keep.cleanup_leases_upon_shard_completion:
            seconds = keep.completed_lease_cleanup_interval_millis / 1000
            for deletion in completed_leases(context.leases.values(), ended, seconds):
                finished[deletion.lease.lease_key] = deletion
        self._delete_leases(context, [finished[key] for key in sorted(finished)])
        for row in scanned.stopped:
            self._delete(
                f"deletion of the row of {row.worker_id}", partial(self._worker_table.delete, row)
            )

    # 1. The application

    def _check_application(self) -> None:
        """Describe the streams that are due, compare all with the record, and add new ones.

        A stream that cannot be described now is ignored; `Streams.for_each` reports its error.

        Raises:
            OtherApplicationError: The streams do not fit the record.
            AwsError: A call to a table failed.
        """
        self._streams.poll()
        self._streams.refresh()
        try:
            self._record_application()
        except OtherApplicationError:
            # The streams were described a while ago. One of them may have been created again, and
            # the record changed by `do accept --streams`.
            self._streams.forget()
            self._record_application()

    def _record_application(self) -> None:
        settings, table = self._settings, self._coordinator_table
        described, unavailable = list[StreamId](), list[str]()
        for name in self._streams.configured():
            try:
                described.append(self._streams.look(name))
            except KclError:
                unavailable.append(name)
        record = table.read_application()
        if not described:
            if record is not None:
                self._streams.note_record(record.identity)
            return
        identity = ApplicationIdentity.of(
            described,
            is_multi_stream=settings.is_multi_stream,
            shard_sync_of=settings.shard_sync_of,
            whole_aggregates=settings.retrieval.skip_kpl_deaggregation,
        )
        if unavailable or settings.selects_streams:
            keep_all = settings.selects_streams
            identity = with_recorded(identity, record, unavailable, keep_all=keep_all)
        recorded = ensure_application(
            settings.application_name,
            table,
            self._lease_table,
            identity,
            lambda: self._kinesis.list_shards(described[0]),
        )
        self._streams.note_record(recorded.identity)

    # 2. and 6. Deletions

    def _delete_leases(self, context: CycleContext, deletions: Iterable[Deletion]) -> None:
        """Delete leases whose checkpoint is as it was read."""
        for deletion in deletions:
            key = deletion.lease.lease_key
            is_deleted = partial(self._lease_table.delete, deletion.lease)
            if self._delete(f"deletion of {key}", is_deleted):
                del context.leases[key]
                context.deleted.append(key)
                self._events(LeaseDeleted(key, deletion.reason))

    def _delete(self, what: str, delete: Callable[[], object]) -> bool:
        """Delete one row; return whether it was. A row that cannot be deleted stops no other."""
        self._leadership.check()
        try:
            return bool(delete())
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble(what, str(error)))
            return False

    # Results

    def _check_again(self) -> None:
        """Check whether the record allows this process to lead now, as after an acceptance."""
        try:
            self._check_application()
        except IncompatibleTableError as error:
            self._assignment.refusal = error
        except Exception as error:  # noqa: BLE001 (a defect must not end the thread)
            self._events(CycleFailed(error_sentence(error), 0))
        else:
            self._assignment.refusal = None

    def _note_result(self, context: CycleContext) -> None:
        sentence = None
        if context.errors:
            sentence = "; ".join(dict.fromkeys(error_sentence(error) for error in context.errors))
            is_counted = not all(map(_is_of_all_leaders, context.errors))
            self._failures = self._failures + 1 if is_counted else 0
            self._events(CycleFailed(sentence, self._failures))
            if self._failures >= self._settings.assignment.max_consecutive_failures:
                self._failures = 0
                self._assignment.has_failed_to_sync = True
        else:
            self._failures = 0
        self.result = Synced(
            self._shards.coverage(context),
            self._streams.unavailable(),
            self._streams.known(),
            sentence,
        )


def _is_of_all_leaders(error: Exception) -> bool:
    """Return whether another leader would have this error, too."""
    return is_local(error) or isinstance(error, NotFoundError)

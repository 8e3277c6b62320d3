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

from dataclasses import dataclass

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import IncompatibleTableError, NotFoundError
from kcl_pipeline.events import CycleFailed, EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.assign import LeaseAssignment, Scanned
from kcl_pipeline.leader.cleaning import Cleaning
from kcl_pipeline.leader.deleted_rows import DeletedRows
from kcl_pipeline.leader.lock import Leadership, NotLeadingError
from kcl_pipeline.leader.phase import CycleContext, Deadline, is_local
from kcl_pipeline.leader.report import StreamCoverage, error_sentence
from kcl_pipeline.leader.shards import ShardSync
from kcl_pipeline.leader.streams.application import ApplicationGuard
from kcl_pipeline.leader.streams.former import FormerStreams
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.planning.cleanup import former_leases
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
        self._clock = clock
        self._events = events
        self._streams = streams
        self._leadership = leadership = Leadership(assignment.election, coordinator_table)
        self._application = ApplicationGuard(
            settings, coordinator_table, lease_table, kinesis, streams
        )
        self._deleted_rows = DeletedRows(lease_table, kinesis, events, streams, leadership, stored)
        self._shards = ShardSync(
            settings, lease_table, kinesis, clock, events, streams, leadership, stored
        )
        self._cleaning = Cleaning(settings, lease_table, worker_table, events, leadership)
        self._former = FormerStreams(
            settings, coordinator_table, clock, streams, leadership, self._cleaning
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
        self._streams.refresh()
        self._application.check()
        # 2. The rows of a former stream have the keys of the new one
        former = former_leases(context.leases.values(), self._streams.known())
        self._cleaning.delete_leases(context, former)
        self._former.clean(context)
        # 3. Before a child of the missing row is read
        self._deleted_rows.restore(context)
        # 4. and 5.
        self._shards.start(context)
        ended = scanned.ended_seconds
        listings = self._shards.audit(context, stale=self._cleaning.stale(ended))
        # 6.
        self._cleaning.finished_leases(context, ended, listings)
        self._cleaning.worker_rows(scanned.stopped)

    def _check_again(self) -> None:
        """Check whether the record allows this process to lead now, as after --accept-streams."""
        try:
            self._streams.refresh()
            self._application.check()
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

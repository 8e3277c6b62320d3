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

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeGuard

from kcl_pipeline.config import ShardSyncSettings
from kcl_pipeline.errors import (
    AwsError,
    IncompatibleTableError,
    InvalidRequestError,
    KclError,
    NotFoundError,
    OtherApplicationError,
    ShardSyncError,
    ThrottledError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    CycleFailed,
    HoleFound,
    LeaseDeleted,
    LeasesCreated,
)
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.identity import require_same_stream
from kcl_pipeline.leader.assign import (
    LeaderDependencies,
    LeaseAssignment,
    Scanned,
    StreamCoverage,
    error_sentence,
    is_local,
)
from kcl_pipeline.leader.lock import WRITES_AT_ONCE, NotLeadingError
from kcl_pipeline.leader.streams import Streams
from kcl_pipeline.leases.application import (
    AccountAndName,
    ApplicationIdentity,
    RecordedStream,
    with_recorded,
)
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.cleanup import (
    Deletion,
    children_to_fill,
    completed_leases,
    former_leases,
    garbage_leases,
)
from kcl_pipeline.planning.coverage import Hole, find_hole, hole_in_leases, ranges_to_fill
from kcl_pipeline.planning.shard_sync import (
    creation_order,
    has_not_begun,
    initial_filter,
    is_begun,
    leases_for_missing_shards,
    leases_for_new_stream,
    restored_parents,
    with_creation_time,
    with_initial_time,
    with_times_of_parents,
)
from kcl_pipeline.planning.stored_shards import finished_shards, leases_with_stored
from kcl_pipeline.position import LATEST, TRIM_HORIZON, StoredPosition
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.worker_status import UnavailableStream

_RETRY_SECONDS: Final = 10.0
"""Time from a look for deleted parents that has failed to the next one."""
MIN_ANSWERS: Final = 3
"""Usable answers of a selection that must lack a stream before it is removed."""
_KEPT: Final = "NO_STREAMS_LEASES_DELETION"
_PROVIDED: Final = "PROVIDED_STREAMS_DEFERRED_DELETION"

PROOFS: Final = 3
"""Attempts of a transaction whose proof was refused. A heartbeat of `assign` may have come between
the proof and the transaction; two in a row are seconds apart.
"""
_OF_ONE_LEASE: Final = (InvalidRequestError, ThrottledError, ValueError)
"""Errors of a transaction that one of its leases can cause."""


class LeaseMap(dict[str, Lease]):
    """Leases by key. Those of a stream are found without a search through all leases.

    Leases change by `leases[key] = lease` and `del leases[key]` only.
    """

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        super().__init__()
        self._groups: dict[tuple[str | None, int | None], dict[str, Lease]] = {}
        for lease in leases:
            self[lease.lease_key] = lease

    def __setitem__(self, key: str, lease: Lease) -> None:
        """Add or replace a lease."""
        if key in self:
            del self[key]
        super().__setitem__(key, lease)
        self._groups.setdefault((lease.stream, lease.recreated_millis), {})[key] = lease

    def __delitem__(self, key: str) -> None:
        """Remove a lease."""
        lease = self[key]
        super().__delitem__(key)
        del self._groups[lease.stream, lease.recreated_millis][key]

    def streams(self) -> list[StreamId]:
        """Return the streams of multi-stream leases, sorted by serialized name."""
        found = {stream for (stream, _), rows in self._groups.items() if stream and rows}
        return [StreamId.parse(stream) for stream in sorted(found)]

    def of_stream(self, stream: StreamId) -> list[Lease]:
        """Return the leases of a stream, in the order in which they were added."""
        wanted = stream.serialized if stream.creation_epoch is not None else None
        return list(self._groups.get((wanted, stream.recreated_millis), {}).values())


@dataclass(slots=True)
class _Run:
    """The rows of one run as its writes change them, and what it has written.

    Attributes:
        leases: The leases.
        unreadable: Keys of lease rows that cannot be used.
        created: Keys of the leases that it has created.
        deleted: Keys of the leases that it has deleted.
        errors: Errors of single rows and streams.
    """

    leases: LeaseMap
    unreadable: frozenset[str]
    created: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


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

    One thread at a time calls `run`. What it remembers of the streams is valid in one term of the
    lock: between two of them others may have created leases, and deleted them after their shards
    were finished.

    Args:
        dependencies: The dependencies that it has in common with `assign`.
        assignment: Has the rows, and learns what must end its lead.
        kinesis: The Kinesis client.
        streams: The streams of the application.
        stored: Asks the table for positions of shards. None: it stores none.

    Attributes:
        result: The result of the last run that led.
        created: Keys of created leases that no report has had yet. The reader removes them.
        deleted: The same of deleted leases.
    """

    def __init__(
        self,
        dependencies: LeaderDependencies,
        assignment: LeaseAssignment,
        kinesis: KinesisClient,
        streams: Streams,
        stored: StoredShards | None = None,
    ) -> None:
        self._deps = dependencies
        self._assignment = assignment
        self._kinesis = kinesis
        self._streams = streams
        self._stored = stored
        self._election = assignment.election
        self._settings = dependencies.settings.shard_sync
        self._term = 0
        self._wrote_at = -math.inf
        self._failures = 0
        self._missing_since: dict[AccountAndName, tuple[float, int]] = {}
        """By former stream, when it was first missing, and the answers of the selection then."""
        self._removing: set[AccountAndName] = set()
        self._missing_parents: dict[StreamId, tuple[frozenset[str], float]] = {}
        """By stream, the parents without a row in the last look, and when to look at them again."""
        self._uncreated: dict[StreamId, tuple[Lease, ...]] = {}
        """Initial leases that could not be created."""
        self._holes: dict[StreamId, tuple[Hole, int]] = {}
        """By stream, the gap of the last audits and their number."""
        self._audit_due: dict[StreamId, float] = {}
        self._audit_seconds = (
            self._settings.leases_recovery_auditor_execution_frequency_millis / 1000
        )
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
        if self._term != scanned.term:
            self._term = scanned.term
            for memory in (
                self._missing_since,
                self._removing,
                self._missing_parents,
                self._uncreated,
            ):
                memory.clear()
        run = _Run(LeaseMap(scanned.scan.leases), scanned.scan.unreadable)
        try:
            self._run(run, scanned)
        except NotLeadingError:
            self._assignment.scanned = None
            return
        except IncompatibleTableError as error:
            # This process must not lead: `assign` releases the lock and raises it
            self._assignment.refusal = error
            self._assignment.scanned = None
            return
        except Exception as error:  # noqa: BLE001 (counted, reported and logged)
            run.errors.append(error)
        finally:
            if run.created or run.deleted:
                self._wrote_at = self._deps.clock.monotonic()
            self.created += run.created
            self.deleted += run.deleted
        self._note_result(run)

    def _run(self, run: _Run, scanned: Scanned) -> None:
        # 1. A leader with other streams would create and delete leases of the wrong shards
        self._check_application()
        # 2. The rows of a former stream have the keys of the new one
        self._delete_leases(run, former_leases(run.leases.values(), self._streams.known()))
        self._remove_former_streams(run)
        # 3. Before a child of the missing row is read
        self._streams.for_each(partial(self._restore_deleted, run), run.errors)
        # 4. Before the search for missing leases, which needs leases to compare with
        self._streams.for_each(partial(self._begin, run), run.errors)
        # 5. The shards of leases that ended long ago may have left retention: list them
        ended = scanned.ended_seconds
        garbage_seconds = self._settings.garbage_lease_cleanup_interval_millis / 1000
        stale = frozenset(key for key, seconds in ended.items() if seconds >= garbage_seconds)
        listings = self._audit(run, stale)
        # 6. Unless a child has not begun
        finished: dict[str, Deletion] = {}
        for stream, shards in listings.items():
            rows = run.leases.of_stream(stream)
            for deletion in garbage_leases(rows, shards, stream, ended, garbage_seconds):
                finished[deletion.lease.lease_key] = deletion
        if self._settings.cleanup_leases_upon_shard_completion:
            seconds = self._settings.completed_lease_cleanup_interval_millis / 1000
            for deletion in completed_leases(run.leases.values(), ended, seconds):
                finished[deletion.lease.lease_key] = deletion
        self._delete_leases(run, [finished[key] for key in sorted(finished)])
        for row in scanned.stopped:
            delete = partial(self._deps.worker_table.delete, row)
            self._delete(f"deletion of the row of {row.worker_id}", delete)

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
        settings, table = self._deps.settings, self._deps.coordinator_table
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
            self._deps.lease_table,
            identity,
            lambda: self._kinesis.list_shards(described[0]),
        )
        self._streams.note_record(recorded.identity)

    # 2. Streams that are not read any more (protocol §8.3)

    def _remove_former_streams(self, run: _Run) -> None:
        """Remove former streams by the chosen strategy, and adopt those that have leases only.

        A former stream is recorded or has leases, but is not configured. It is removed in two
        steps: the record, so that no leader creates its leases again, then its leases. The waiting
        times are in memory: another leader begins them again. It finds the rest of the leases
        without a record.

        Raises:
            NotLeadingError: This process does not lead any more.
            AwsError: The record cannot be read or written.
        """
        if not self._streams.are_known():
            return
        of_leases = run.leases.streams()
        former = {one.account_and_name: one for one in self._streams.former()}
        orphans = self._streams.not_configured(
            {(stream.account, stream.name) for stream in of_leases} - self._streams.identities()
        )
        self._streams.adopt(orphans - self._removing - self._removable(orphans))
        candidates = self._removable({*former, *orphans})
        self._removing &= orphans
        for identity in sorted(self._due(candidates), key=str):
            if identity in orphans or self._forget_stream(former[identity]):
                self._removing.add(identity)
        for stream in of_leases:
            if (stream.account, stream.name) in self._removing:
                reason = "its stream is not read any more"
                rows = run.leases.of_stream(stream)
                self._delete_leases(run, [Deletion(row, reason) for row in rows])

    def _removable(self, identities: set[AccountAndName]) -> set[AccountAndName]:
        strategy = self._settings.former_streams_leases_deletion_strategy
        if strategy == _KEPT:
            return set()
        if strategy != _PROVIDED:
            return identities
        return {
            (account, name)
            for account, name in identities
            for given in self._settings.former_streams
            if given == name or given.endswith(f":{account}:stream/{name}")
        }

    def _due(self, candidates: set[AccountAndName]) -> set[AccountAndName]:
        """Return the streams that have been missing for long enough. Others begin to wait."""
        now, answers = self._deps.clock.monotonic(), self._streams.answers
        missing, self._missing_since = self._missing_since, {}
        for identity in candidates:
            self._missing_since[identity] = missing.get(identity, (now, answers or 0))
        wait = self._settings.wait_period_to_delete_former_streams_millis / 1000
        return {
            identity
            for identity, (since, answers_then) in self._missing_since.items()
            if (now - since >= wait or self._streams.does_not_exist(identity))
            and (answers is None or answers - answers_then >= MIN_ANSWERS)
        }

    def _forget_stream(self, stream: RecordedStream) -> bool:
        """Remove a stream from the record. False: another process changed the record."""
        table = self._deps.coordinator_table
        record = table.read_application()
        if record is None:
            return False
        others = tuple(one for one in record.identity.streams if one.arn != stream.arn)
        if not others:
            return False
        self._election.check_term(self._term)
        after = replace(record.identity, streams=others)
        if not table.put_application(after, replacing=record):
            return False
        self._streams.note_record(after)
        return True

    # 3. Rows that were deleted by hand (protocol §8.2)

    def _restore_deleted(self, run: _Run, stream: StreamId) -> None:
        """Create the missing rows of parents that a child waits for.

        The row of a finished shard is deleted after all its children have begun. So the row of a
        parent was deleted by hand if the child has not begun and

        - the table has a position and no end of the parent, and knows no begun descendant; or
        - the child is at TRIM_HORIZON. At LATEST and AT_TIMESTAMP, parents without rows are normal.

        A worker of this package waits for the row. A Java worker does not: it starts a child whose
        parent has no row. A shard without children leaves a gap, which the audit finds.

        Raises:
            NotLeadingError: This process does not lead any more.
        """
        rows = {row.shard_id: row for row in run.leases.of_stream(stream)}
        known = rows.keys() | {key.rsplit(":", 1)[-1] for key in keys_of(run.unreadable, stream)}
        waiting = [row for row in rows.values() if row.parent_shard_ids - known]
        waiting = [row for row in waiting if not is_begun(row)]
        missing = frozenset[str]().union(*(row.parent_shard_ids for row in waiting)) - known
        now = self._deps.clock.monotonic()
        if not missing:
            self._missing_parents.pop(stream, None)
            return
        before, due = self._missing_parents.get(stream, (missing, now))
        if before == missing and now < due:
            return
        # If one of these reads fails, the next look is not at once: at LATEST and AT_TIMESTAMP
        # parents without rows are normal, and a leader does not depend on the table then.
        self._missing_parents[stream] = missing, now + _RETRY_SECONDS
        shards, stored = self._listed(stream), dict[str, StoredPosition]()
        if self._stored is not None:
            stored |= self._stored(stream, [shard.shard_id for shard in shards])
        del self._missing_parents[stream]
        missing_now = missing - finished_shards(creation_order(shards), rows, stored)
        shard_sync, before_creation = self._streams.shard_sync_of(stream), len(run.created)
        for child in waiting:
            deleted = child.parent_shard_ids & missing_now
            if not has_not_begun(child):
                deleted &= stored.keys()
            parents = with_initial_time(
                restored_parents(
                    stream, shards, deleted, stored, shard_sync.initial_position_in_stream
                ),
                shard_sync.initial_millis,
            )
            if parents:
                self._election.check_term(self._term)
                # The row of the child may be newer than the scan: it is a condition of the write
                keys = self._deps.lease_table.restore_parents(child, parents) or ()
                created = [parent for parent in parents if parent.lease_key in keys]
                reason = f"the row was deleted before its child {child.shard_id} had begun"
                self._note_created(run, stream, created, reason)
        if len(run.created) == before_creation:
            # Parents without rows that nobody reads are normal: do not list the shards every second
            self._missing_parents[stream] = missing, now + self._audit_seconds

    def _listed(self, stream: StreamId) -> tuple[Shard, ...]:
        """Return all shards, after checking that the name still belongs to this stream."""
        shards = self._kinesis.list_shards(stream)
        require_same_stream(self._kinesis, stream)
        return shards

    # 4. Streams without leases (protocol §7)

    def _begin(self, run: _Run, stream: StreamId) -> None:
        """Create the leases of a stream that has none.

        KCL sleeps for a minute afterwards, which is not necessary.
        """
        wanted = self._uncreated.get(stream)
        if (
            wanted is None
            and not run.leases.of_stream(stream)
            and not has_unreadable_shards(self._kinesis, stream, run.unreadable)
        ):
            shard_sync = self._streams.shard_sync_of(stream)
            wanted = initial_leases(self._kinesis, shard_sync, stream, self._stored)
            require_same_stream(self._kinesis, stream)
        if wanted:
            self._create_initial(run, stream, wanted)

    def _create_initial(self, run: _Run, stream: StreamId, leases: Sequence[Lease]) -> None:
        """Create the leases of a stream. None of them is an ancestor of another.

        After the first transaction the stream has leases. So what is left is kept in memory: a
        later run would begin the rest of the shards as missing leases, at other positions.
        """
        rest, failed = tuple(leases), dict[Lease, Exception]()
        position = self._streams.shard_sync_of(stream).initial_position_in_stream
        while rest:
            self._uncreated[stream] = (*failed, *rest)
            part, rest = rest[:WRITES_AT_ONCE], rest[WRITES_AT_ONCE:]
            created, errors = self._create(part)
            failed |= errors
            reason = f"the stream had no leases; they begin at {position}"
            self._note_created(run, stream, created, reason)
        if failed:
            self._uncreated[stream] = tuple(failed)
        else:
            self._uncreated.pop(stream, None)
        for error in failed.values():
            raise error

    def _create(self, leases: Sequence[Lease]) -> tuple[list[Lease], dict[Lease, Exception]]:
        """Create leases in one transaction. If one of them is refused, create each in its own.

        The condition of the transaction is that this process has the lock when it is applied. So a
        leader that was paused does not create a lease which others have finished and deleted.

        Returns:
            The leases that were created, and the errors of others.

        Raises:
            NotLeadingError: Another process has the lock.
        """
        try:
            keys = self._create_with_proof(leases)
        except (AwsError, ValueError) as error:
            if len(leases) == 1 or not isinstance(error, _OF_ONE_LEASE):
                return [], dict.fromkeys(leases, error)
        else:
            existing = [lease for lease in leases if lease.lease_key not in keys]
            created = [lease for lease in leases if lease.lease_key in keys]
            return created, self._of_former_stream(existing)
        done, failed = list[Lease](), dict[Lease, Exception]()
        for lease in leases:
            created, errors = self._create((lease,))
            done += created
            failed |= errors
        return done, failed

    def _create_with_proof(self, leases: Sequence[Lease]) -> tuple[str, ...]:
        """Create leases on the condition that this process leads; return the keys of new ones.

        Raises:
            NotLeadingError: Another process has the lock.
        """
        for _ in range(PROOFS):
            proof = self._election.proof(self._term)
            created = self._deps.lease_table.create_leases(leases, proof)
            if created is not None:
                return created
        raise NotLeadingError

    def _of_former_stream(self, existing: Iterable[Lease]) -> dict[Lease, Exception]:
        """Return errors for leases whose rows are of a former stream of the same name.

        The scan has not found them yet. A later run deletes them, and creates the leases then.
        """
        return {
            lease: ShardSyncError(
                f"the row {lease.lease_key} is of a former stream of the same name, and is deleted "
                "first"
            )
            for lease in existing
            if lease.recreated_millis is not None and not self._is_of_stream(lease)
        }

    def _is_of_stream(self, lease: Lease) -> bool:
        try:
            row = self._deps.lease_table.get(lease.lease_key)
        except (AwsError, ValueError):
            return False
        return row is not None and row.recreated_millis == lease.recreated_millis

    def _note_created(
        self, run: _Run, stream: StreamId, created: Iterable[Lease], reason: str
    ) -> None:
        by_key = {lease.lease_key: lease for lease in created}
        for key, lease in by_key.items():
            run.leases[key] = lease
        run.created += by_key
        if by_key:
            self._deps.events(LeasesCreated(stream.name, tuple(by_key), reason))

    # 5. Missing leases (protocol §7)

    def _audit(self, run: _Run, stale: frozenset[str]) -> dict[StreamId, tuple[Shard, ...]]:
        """Search every stream whose audit is due for gaps, and create missing leases.

        Leases are created after several audits in a row have found the same gap.

        Args:
            run: The run.
            stale: Keys of finished leases for which cleanup needs a list of the shards.

        Returns:
            All shards of the streams that were listed.
        """
        listings: dict[StreamId, tuple[Shard, ...]] = {}
        known = set(self._streams.known())
        for memory in (self._holes, self._uncreated, self._audit_due, self._missing_parents):
            for stream in memory.keys() - known:
                del memory[stream]
        now = self._deps.clock.monotonic()

        def audit_stream(stream: StreamId) -> None:
            if now < self._audit_due.get(stream, now):
                return
            self._audit_due[stream] = now + self._audit_seconds
            rows = run.leases.of_stream(stream)
            if any(needs_listing(row) or row.lease_key in stale for row in rows):
                listings[stream] = self._listed(stream)
                self._fill_in(run, stream, listings[stream])
            if (rows or keys_of(run.unreadable, stream)) and self._count_hole(run, stream):
                if stream not in listings:
                    listings[stream] = self._listed(stream)
                self._create_missing(run, stream, listings[stream])

        self._streams.for_each(audit_stream, run.errors)
        return listings

    def _fill_in(self, run: _Run, stream: StreamId, shards: Sequence[Shard]) -> None:
        """Set missing hash ranges and children of rows, like KCL's meta updates."""
        table, rows = self._deps.lease_table, run.leases.of_stream(stream)
        ranges = ranges_to_fill(rows, shards, stream)
        children = children_to_fill(rows, shards, stream)
        if ranges or children:
            self._election.check_term(self._term)
        for key, hash_key_range in ranges.items():
            if table.set_hash_key_range(key, hash_key_range):
                run.leases[key] = run.leases[key].with_(hash_key_range=hash_key_range)
        for key, child_shard_ids in children.items():
            if table.set_child_shard_ids(key, child_shard_ids):
                ids = frozenset(child_shard_ids)
                run.leases[key] = run.leases[key].with_(child_shard_ids=ids)

    def _count_hole(self, run: _Run, stream: StreamId) -> bool:
        """Return whether enough audits in a row have found the gap that the leases have now."""
        hole = hole_in_leases(run.leases.of_stream(stream))
        if hole is None:
            self._holes.pop(stream, None)
            return False
        before, times = self._holes.get(stream, (hole, 0))
        times = times + 1 if before == hole else 1
        self._holes[stream] = (hole, times)
        self._deps.events(HoleFound(stream.name, str(hole), times))
        threshold = self._settings.leases_recovery_auditor_inconsistency_confidence_threshold
        return times >= threshold

    def _create_missing(self, run: _Run, stream: StreamId, shards: Sequence[Shard]) -> None:
        """Create missing leases, ancestors first; see `leases_for_missing_shards`."""
        rows = run.leases.of_stream(stream)
        wanted = missing_leases(
            self._streams.shard_sync_of(stream),
            rows,
            keys_of(run.unreadable, stream),
            shards,
            stream,
            self._stored,
        )
        wanted = since_now(self._kinesis, stream, with_times_of_parents(wanted, rows))
        for begin in range(0, len(wanted), WRITES_AT_ONCE):
            created, errors = self._create(wanted[begin : begin + WRITES_AT_ONCE])
            reason = f"the leases had a hole: {self._holes[stream][0]}"
            self._note_created(run, stream, created, reason)
            for error in errors.values():
                raise error

    # 2. and 6. Deletions

    def _delete_leases(self, run: _Run, deletions: Iterable[Deletion]) -> None:
        """Delete leases whose checkpoint is as it was read."""
        for deletion in deletions:
            key = deletion.lease.lease_key
            delete = partial(self._deps.lease_table.delete, deletion.lease)
            if self._delete(f"deletion of {key}", delete):
                del run.leases[key]
                run.deleted.append(key)
                self._deps.events(LeaseDeleted(key, deletion.reason))

    def _delete(self, what: str, delete: Callable[[], object]) -> bool:
        """Delete one row; return whether it was. A row that cannot be deleted stops no other."""
        self._election.check_term(self._term)
        try:
            return bool(delete())
        except (AwsError, ValueError) as error:
            self._deps.events(AwsTrouble(what, str(error)))
            return False

    # Results

    def _check_again(self) -> None:
        """Check whether the record allows this process to lead now, as after an acceptance."""
        try:
            self._check_application()
        except IncompatibleTableError as error:
            self._assignment.refusal = error
        except Exception as error:  # noqa: BLE001 (a defect must not end the thread)
            self._deps.events(CycleFailed(error_sentence([error]), 0))
        else:
            self._assignment.refusal = None

    def _note_result(self, run: _Run) -> None:
        sentence = error_sentence(run.errors) or None
        # Another leader would have the errors of single rows, and of a missing table, too
        is_counted = not all(is_local(one) or isinstance(one, NotFoundError) for one in run.errors)
        self._failures = self._failures + 1 if is_counted else 0
        if sentence is not None:
            self._deps.events(CycleFailed(sentence, self._failures))
            if self._failures >= self._deps.settings.assignment.max_consecutive_failures:
                self._failures = 0
                self._assignment.has_failed_to_sync = True
        known = self._streams.known()
        coverage = (
            stream_coverage(
                stream,
                run.leases.of_stream(stream),
                self._holes[stream][1] if stream in self._holes else 0,
            )
            for stream in known
        )
        self.result = Synced(tuple(coverage), self._streams.unavailable(), known, sentence)


# What steps 4 and 5 compute, and the preview of a leader too


def initial_leases(
    kinesis: KinesisClient,
    settings: ShardSyncSettings,
    stream: StreamId,
    stored: StoredShards | None = None,
) -> tuple[Lease, ...]:
    """Return the leases to create for a stream that has none.

    Args:
        kinesis: Lists the shards.
        settings: The initial position.
        stream: The stream.
        stored: Asks the table for positions. None: it stores none.

    Raises:
        SinkError: The table cannot be read.
        ShardSyncError: The shards do not cover all hash keys, because of a reshard.
    """
    position = settings.initial_position_in_stream
    if position == "LATEST" and stream.recreated_millis is not None:
        # The application followed the former stream. All records of this one are new to it.
        position = "TRIM_HORIZON"
    shards = kinesis.list_shards(stream, initial_filter(position), settings.initial_timestamp)
    if find_hole(shard.hash_key_range for shard in shards) is not None:
        raise ShardSyncError(
            f"the {len(shards)} shards of {stream.name} at {position} do not cover all hash "
            "keys; the next cycle lists them again"
        )
    leases = leases_for_new_stream(stream, shards, position)
    if asks_table(stored, settings):
        listed = kinesis.list_shards(stream)
        leases = _with_stored(stream, leases, listed, (), stored, settings)
    return since_now(kinesis, stream, with_initial_time(leases, settings.initial_millis))


def missing_leases(
    settings: ShardSyncSettings,
    rows: Sequence[Lease],
    unreadable: Iterable[str],
    shards: Sequence[Shard],
    stream: StreamId,
    stored: StoredShards | None = None,
) -> tuple[Lease, ...]:
    """Return the leases to add to a stream that has leases.

    An unreadable row counts as an existing, unfinished lease.

    Raises:
        ShardSyncError: The list is not consistent.
        SinkError: The table cannot be read.
    """
    existing = {row.shard_id: row.ended for row in rows} | {
        key.rsplit(":", 1)[-1]: False for key in unreadable
    }
    leases = leases_for_missing_shards(
        stream,
        shards,
        existing,
        settings.initial_position_in_stream,
        ignore_unexpected_child_shards=settings.ignore_unexpected_child_shards,
    )
    if asks_table(stored, settings):
        leases = _with_stored(stream, leases, shards, rows, stored, settings)
        leases = tuple(lease for lease in leases if lease.shard_id not in existing)
    return with_initial_time(leases, settings.initial_millis)


def since_now(
    kinesis: KinesisClient, stream: StreamId, leases: tuple[Lease, ...]
) -> tuple[Lease, ...]:
    """Return the leases that are about to be created, not at AT_TIMESTAMP with the present time.

    Raises:
        AwsError: The service does not respond.
    """
    if all(lease.checkpoint not in (LATEST, TRIM_HORIZON) for lease in leases):
        return leases
    return with_creation_time(leases, kinesis.service_time(stream))


def asks_table(stored: StoredShards | None, settings: ShardSyncSettings) -> TypeGuard[StoredShards]:
    """Return whether the positions in the table matter for the leases that are created.

    At TRIM_HORIZON every shard is reached from its oldest ancestor, and starts after its position.
    """
    return stored is not None and settings.initial_position_in_stream != "TRIM_HORIZON"


def _with_stored(
    stream: StreamId,
    leases: Iterable[Lease],
    shards: Sequence[Shard],
    rows: Iterable[Lease],
    stored: StoredShards,
    settings: ShardSyncSettings,
) -> tuple[Lease, ...]:
    known = stored(stream, [shard.shard_id for shard in shards])
    by_shard = {row.shard_id: row for row in rows}
    initial = settings.initial_position_in_stream
    return leases_with_stored(stream, leases, shards, by_shard, known, initial)


def has_unreadable_shards(
    kinesis: KinesisClient, stream: StreamId, unreadable: Iterable[str]
) -> bool:
    """Return whether an unreadable lease row belongs to a shard that the stream lists.

    Then a stream without other leases is not new, and the audit finds the missing leases.
    """
    keys = keys_of(unreadable, stream)
    return bool(keys) and not {
        stream.lease_key(shard.shard_id) for shard in kinesis.list_shards(stream)
    }.isdisjoint(keys)


def keys_of(keys: Iterable[str], stream: StreamId) -> list[str]:
    """Return the lease keys of a stream, for rows of which only the key can be read."""
    if stream.creation_epoch is None:
        return [key for key in keys if ":" not in key]
    return [key for key in keys if key.startswith(f"{stream.serialized}:")]


def needs_listing(lease: Lease) -> bool:
    """Return whether the row has no hash range, or no children although the shard is finished."""
    return not lease.child_shard_ids if lease.ended else lease.hash_key_range is None


def stream_coverage(stream: StreamId, rows: Iterable[Lease], audits: int) -> StreamCoverage:
    """Return the hash-range coverage of a stream for the report."""
    hole = hole_in_leases(rows)
    return StreamCoverage(
        stream.serialized,
        complete=hole is None,
        hole=None if hole is None else str(hole),
        confidence=0 if hole is None else audits,
    )

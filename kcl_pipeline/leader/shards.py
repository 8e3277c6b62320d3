"""Create missing leases: of new streams at once, of gaps after several audits (protocol §7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, InvalidRequestError, ShardSyncError, ThrottledError
from kcl_pipeline.events import EventSink, HoleFound, LeasesCreated
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.identity import require_same_stream
from kcl_pipeline.leader.listing import (
    has_unreadable_shards,
    initial_leases,
    missing_leases,
    needs_listing,
    since_now,
    stream_coverage,
)
from kcl_pipeline.leader.lock import WRITES_AT_ONCE, Leadership, NotLeadingError
from kcl_pipeline.leader.phase import CycleContext, keys_of
from kcl_pipeline.leader.report import StreamCoverage
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.planning.cleanup import children_to_fill
from kcl_pipeline.planning.coverage import Hole, hole_in_leases, ranges_to_fill
from kcl_pipeline.planning.shard_sync import with_times_of_parents
from kcl_pipeline.shards import Shard, StreamId

_OF_ONE_LEASE: Final = (InvalidRequestError, ThrottledError, ValueError)
"""Errors of a transaction that one of its leases can cause."""


PROOFS: Final = 3
"""Attempts of a transaction whose proof was refused. A heartbeat of `assign` may have come between
the proof and the transaction; two in a row are seconds apart.
"""


@dataclass(frozen=True, slots=True)
class _CountedHole:
    hole: Hole
    times: int


class ShardSync:
    """Creates the missing leases.

    In memory it keeps the gaps of the last audits, and initial leases that it could not create.
    The latter are valid only in this term: another leader may have created
    them since, and deleted them after their shards were finished.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        table: LeaseTable,
        kinesis: KinesisClient,
        clock: Clock,
        events: EventSink,
        streams: Streams,
        leadership: Leadership,
        stored: StoredShards | None = None,
    ) -> None:
        self._stored = stored
        self._settings = settings.shard_sync
        self._of_stream = streams.shard_sync_of
        self._table = table
        self._kinesis = kinesis
        self._clock = clock
        self._events = events
        self._streams = streams
        self._leadership = leadership
        self._term = 0
        self._holes: dict[StreamId, _CountedHole] = {}
        self._unfinished: dict[StreamId, tuple[Lease, ...]] = {}
        self._audit_due: dict[StreamId, float] = {}

    def start(self, context: CycleContext) -> None:
        """Create the leases of every stream that has none.

        KCL sleeps for a minute afterwards, which is not necessary.
        """
        if self._term != self._leadership.term:
            self._term = self._leadership.term
            self._unfinished.clear()

        def begin(stream: StreamId) -> None:
            wanted = self._unfinished.get(stream)
            if (
                wanted is None
                and not context.leases.of_stream(stream)
                and not has_unreadable_shards(self._kinesis, stream, context.unreadable)
            ):
                wanted = initial_leases(
                    self._kinesis, self._of_stream(stream), stream, self._stored
                )
                require_same_stream(self._kinesis, stream)
            if wanted:
                self._create_initial(context, stream, wanted)

        self._streams.for_each(begin, context.errors)

    def _create_initial(
        self, context: CycleContext, stream: StreamId, initial_leases: Sequence[Lease]
    ) -> None:
        """Create initial leases, in any order, because none is an ancestor of another."""
        rest, failed = tuple(initial_leases), dict[Lease, Exception]()
        while rest:
            self._unfinished[stream] = (*failed, *rest)
            part, rest = rest[:WRITES_AT_ONCE], rest[WRITES_AT_ONCE:]
            created, errors = self._create(part)
            failed |= errors
            self._note_created(
                context,
                stream,
                created,
                "the stream had no leases; they begin at "
                f"{self._of_stream(stream).initial_position_in_stream}",
            )
        if failed:
            self._unfinished[stream] = tuple(failed)
        else:
            self._unfinished.pop(stream, None)
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
            created = self._create_with_proof(leases)
        except (AwsError, ValueError) as error:
            if len(leases) == 1 or not isinstance(error, _OF_ONE_LEASE):
                return [], dict.fromkeys(leases, error)
        else:
            existing = [lease for lease in leases if lease.lease_key not in created]
            made = [lease for lease in leases if lease.lease_key in created]
            return made, self._of_former_stream(existing)
        done, failed = list[Lease](), dict[Lease, Exception]()
        for lease in leases:
            created_alone, errors = self._create((lease,))
            done += created_alone
            failed |= errors
        return done, failed

    def _create_with_proof(self, leases: Sequence[Lease]) -> tuple[str, ...]:
        """Create leases on the condition that this process leads.

        Raises:
            NotLeadingError: Another process has the lock.
        """
        for _ in range(PROOFS):
            created = self._table.create_leases(leases, self._leadership.proof())
            if created is not None:
                return created
        raise NotLeadingError

    def _of_former_stream(self, existing: Iterable[Lease]) -> dict[Lease, Exception]:
        """Return errors for leases whose rows are of a former stream of the same name.

        The scan has not found them yet. A later cycle deletes them, and creates the leases then.
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
            row = self._table.get(lease.lease_key)
        except (AwsError, ValueError):
            return False
        return row is not None and row.recreated_millis == lease.recreated_millis

    def _note_created(
        self, context: CycleContext, stream: StreamId, created: Iterable[Lease], reason: str
    ) -> None:
        keys = []
        for lease in created:
            context.leases[lease.lease_key] = lease
            keys.append(lease.lease_key)
        context.created.extend(keys)
        if keys:
            self._events(LeasesCreated(stream.name, tuple(keys), reason))

    def audit(
        self, context: CycleContext, *, stale: frozenset[str] = frozenset()
    ) -> dict[StreamId, tuple[Shard, ...]]:
        """Search every stream whose audit is due for gaps, and create missing leases.

        Leases are created after several audits in a row have found the same gap.

        Args:
            context: The cycle.
            stale: Keys of finished leases for which cleanup needs a list of the shards.

        Returns:
            All shards of the streams that were listed.
        """
        listings: dict[StreamId, tuple[Shard, ...]] = {}
        self._forget_former()
        time = self._clock.monotonic()

        def audit_stream(stream: StreamId) -> None:
            if time < self._audit_due.get(stream, time):
                return
            self._audit_due[stream] = (
                time + self._settings.leases_recovery_auditor_execution_frequency_millis / 1000
            )
            rows = context.leases.of_stream(stream)
            if any(needs_listing(row) or row.lease_key in stale for row in rows):
                listings[stream] = self._listed(stream)
                self._fill_in(context, stream, listings[stream])
            if (rows or keys_of(context.unreadable, stream)) and self._count_hole(context, stream):
                if stream not in listings:
                    listings[stream] = self._listed(stream)
                self._create_missing(context, stream, listings[stream])

        self._streams.for_each(audit_stream, context.errors)
        return listings

    def _forget_former(self) -> None:
        known = set(self._streams.known())
        for seen in (self._holes, self._unfinished, self._audit_due):
            for stream in seen.keys() - known:
                del seen[stream]

    def _listed(self, stream: StreamId) -> tuple[Shard, ...]:
        """Return all shards, after checking that the name still belongs to this stream."""
        shards = self._kinesis.list_shards(stream)
        require_same_stream(self._kinesis, stream)
        return shards

    def _fill_in(self, context: CycleContext, stream: StreamId, shards: Sequence[Shard]) -> None:
        """Set missing hash ranges and children of rows, like KCL's meta updates."""
        ranges = ranges_to_fill(context.leases.of_stream(stream), shards, stream)
        children = children_to_fill(context.leases.of_stream(stream), shards, stream)
        if ranges or children:
            self._leadership.check()
        for key, hash_key_range in ranges.items():
            if self._table.set_hash_key_range(key, hash_key_range):
                context.leases[key] = context.leases[key].with_(hash_key_range=hash_key_range)
        for key, child_shard_ids in children.items():
            if self._table.set_child_shard_ids(key, child_shard_ids):
                context.leases[key] = context.leases[key].with_(
                    child_shard_ids=frozenset(child_shard_ids)
                )

    def _count_hole(self, context: CycleContext, stream: StreamId) -> bool:
        hole = hole_in_leases(context.leases.of_stream(stream))
        if hole is None:
            self._holes.pop(stream, None)
            return False
        before = self._holes.get(stream)
        times = before.times + 1 if before is not None and before.hole == hole else 1
        self._holes[stream] = _CountedHole(hole, times)
        self._events(HoleFound(stream.name, str(hole), times))
        return times >= self._settings.leases_recovery_auditor_inconsistency_confidence_threshold

    def _create_missing(
        self, context: CycleContext, stream: StreamId, shards: Sequence[Shard]
    ) -> None:
        """Create missing leases, ancestors first; see `leases_for_missing_shards`."""
        wanted = missing_leases(
            self._of_stream(stream),
            context.leases.of_stream(stream),
            keys_of(context.unreadable, stream),
            shards,
            stream,
            self._stored,
        )
        wanted = with_times_of_parents(wanted, context.leases.of_stream(stream))
        wanted = since_now(self._kinesis, stream, wanted)
        for begin in range(0, len(wanted), WRITES_AT_ONCE):
            created, errors = self._create(wanted[begin : begin + WRITES_AT_ONCE])
            self._note_created(
                context, stream, created, f"the leases had a hole: {self._holes[stream].hole}"
            )
            for error in errors.values():
                raise error

    def coverage(self, context: CycleContext) -> tuple[StreamCoverage, ...]:
        """Return the current hash-range coverage of each resolved stream."""
        return tuple(
            stream_coverage(
                stream,
                context.leases.of_stream(stream),
                self._holes[stream].times if stream in self._holes else 0,
            )
            for stream in self._streams.known()
        )

"""Detect the end of a drain: all records that the streams had at its start are in the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kcl_pipeline.background import Due
from kcl_pipeline.errors import (
    AwsError,
    CommitStoppedError,
    ExpiredIteratorError,
    LeaseLostError,
    NotFoundError,
    ShardSyncError,
    SinkError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble, ShardsLeftToOthers
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.planning.coverage import find_hole
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.text import counted
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.pauses import ShardPause
from kcl_pipeline.worker.shards.drained import DrainedStream, by_name
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource
from kcl_pipeline.worker.summary import owners_text

LOOK_SECONDS: Final = 1.0
UNREADABLE_LIMIT_SECONDS: Final = 60.0
"""How long the lease table may be unreadable. After that the drain fails with the last error."""
MISSING_LIMIT_SECONDS: Final = 15.0
"""The same for a lease table that does not exist. A worker that creates it again needs less."""
ATTEMPTS: Final = 3
"""A drain does not wait for a paused shard after this number of attempts."""
LASTING_SECONDS: Final = 60.0
"""After this time a drain does not wait for a shard whose error does not pass by itself."""
_PASSES: Final = frozenset(
    error.__name__
    for error in (
        ThrottledError,
        UnavailableError,
        NotFoundError,  # `DrainedStream` finds out whether the stream is deleted
        StreamReplacedError,
        ExpiredIteratorError,
        ShardSyncError,
        LeaseLostError,
        SinkError,  # the worker ends after some in a row
        CommitStoppedError,
    )
)
"""Names of errors that pass without a person. All others last, also those that nobody expected."""


class DrainWatch:
    """Check whether a drain is complete.

    The lease table is read once a second, and once more when all shards held here are read and
    committed. A drain is complete when the leases of every stream cover all hash keys and each
    lease is settled, or the stream is deleted (`DrainedStream`). If a row is missing, the leader
    creates it. A lease is settled in these cases:

    - It is at SHARD_END.
    - Or another worker owns and renews it.
    - Or this worker holds it, has read it to the tip since the drain began, and has committed it.

    Leases of streams that the settings do not name are ignored. One of several streams that does
    not exist is not waited for either, nor is a stream that was created after the start.

    A lease without an owner is not settled, because the leader will assign it. A shard that is
    paused because its transform fails counts as settled after `ATTEMPTS`, and one whose steps or
    reads fail with an error that does not pass after `LASTING_SECONDS`. An unreadable row of the
    lease table is not waited for after `MISSING_LIMIT_SECONDS`. In all these cases the drain fails,
    and says why.

    Args:
        dependencies: The dependencies of the worker that drains. The sink of events receives
            `AwsTrouble` for each failed read of the lease table, `RowRejected` for unreadable rows,
            `ShardsLeftToOthers`, and the events of `DrainedStream`.
        streams: The streams of the settings that exist.
        lifecycle: The consumers of the worker.
        source: Reports which shards are read to their tip.
        paused: Returns the paused shards by lease key.
        identity: Confirms that a stream exists.

    Attributes:
        elsewhere: How many unfinished leases each other live worker owned at the last look.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        streams: Iterable[StreamId],
        lifecycle: Lifecycle,
        source: BatchSource,
        paused: Callable[[], Mapping[str, ShardPause]],
        identity: StreamIdentityCheck,
    ) -> None:
        self._dependencies = dependencies
        self._streams = [DrainedStream(stream, dependencies, identity) for stream in streams]
        self._lifecycle = lifecycle
        self._source = source
        self._paused = paused
        self._rejected = RejectedRows(dependencies.events)
        self._due = Due(dependencies.clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._unreadable_since: float | None = None
        self._was_through = False
        self._counters: dict[str, int] = {}
        self._renewed: set[str] = set()
        self.elsewhere: dict[str, int] = {}
        self._emitted: dict[str, int] | None = None
        self._failing_since: dict[str, float] = {}
        self._given_up: dict[str, str] = {}
        self._unreadable: dict[str, tuple[float, str]] = {}
        self._read: set[str] = set()
        """Transaction keys of leases that were read to their tip since the drain began."""

    def done(self) -> bool:
        """Return whether the drain is complete; False between two reads of the table.

        Raises:
            AwsError: The lease table could not be read for `UNREADABLE_LIMIT_SECONDS`, or was
                missing for `MISSING_LIMIT_SECONDS`.
        """
        self._note_read()
        self._note_errors()
        was_through, self._was_through = self._was_through, self._is_through()
        if not self._due.ready() and (was_through or not self._was_through):
            return False
        leases = self._read_leases()
        if leases is None:
            return False
        self._note_renewals(leases)
        # A stream is compared with the leases of its name only: there may be thousands of both
        groups = by_name(leases)
        of_name = [(stream, groups.get(stream.name_of_leases, ())) for stream in self._streams]
        # Each stream notes its leases, also if an earlier one is waited for.
        finished = [self._is_finished(stream, found) for stream, found in of_name]
        is_done = all(finished)
        owned = [one for stream, found in of_name for one in found if stream.owns(one)]
        self._note_elsewhere(owned, is_done=is_done)
        return is_done

    def _note_elsewhere(self, owned: Iterable[Lease], *, is_done: bool) -> None:
        """Note what other workers own, and emit it at the start and at the end."""
        unfinished = [lease for lease in owned if not lease.ended]
        found = Counter(
            lease.actual_owner
            for lease in unfinished
            if lease.lease_key not in self._lifecycle.consumers
            and lease.actual_owner not in (None, self._dependencies.worker_id)
            and lease.lease_key in self._renewed
        )
        self.elsewhere = {owner: number for owner, number in found.items() if owner is not None}
        if self.elsewhere and (
            self._emitted is None or (is_done and self._emitted != self.elsewhere)
        ):
            self._emitted = self.elsewhere
            number, owners = sum(self.elsewhere.values()), owners_text(self.elsewhere)
            self._dependencies.events(
                ShardsLeftToOthers(self._dependencies.worker_id, len(unfinished), number, owners)
            )

    def unread(self) -> str | None:
        """Return a sentence about what was not read, and why; None: everything was read."""
        found = [stream.sentence for stream in self._streams if stream.sentence is not None]
        found += [
            f"a shard was not read, because the row of lease {key} cannot be read: {reason}"
            for key, (_, reason) in sorted(self._unreadable.items())
        ]
        given_up = sorted(self._given_up.items())
        if given_up:
            key, error = given_up[0]
            count = counted(len(given_up), "shard was", "shards were")
            found.append(f"{count} not read to the end: {key}: {error}")
        return "; ".join(found) or None

    def _note_errors(self) -> None:
        """Give shards up whose error does not pass. One that is read again is waited for."""
        now = self._dependencies.clock.monotonic()
        errors = {
            key: error
            for key, consumer in self._lifecycle.consumers.items()
            if (error := self._lasting_error(consumer)) is not None
        }
        self._failing_since = {key: self._failing_since.get(key, now) for key in errors}
        self._given_up = {
            key: error
            for key, error in errors.items()
            if now - self._failing_since[key] >= LASTING_SECONDS
        }

    def _lasting_error(self, consumer: ShardConsumer) -> str | None:
        """Return the error of the last step or read, if it does not pass; None: there is none."""
        if self._is_read(consumer) or consumer.lease_key in self._paused():
            return None
        reading = self._source.state_of(consumer.lease_key)
        step = consumer.error if consumer.failures else None
        for error in (step, None if reading is None else reading.error):
            name = (error or "").partition(":")[0]
            if error is not None and name.isidentifier() and name not in _PASSES:
                return error
        return None

    def _is_finished(self, stream: DrainedStream, leases: Sequence[Lease]) -> bool:
        own = [lease for lease in leases if stream.owns(lease)]
        unsettled = [lease for lease in own if not self._is_settled(lease)]
        # Another worker that is known to be the owner reads its lease, or the leader assigns it.
        here = [
            one for one in unsettled if one.actual_owner in (None, self._dependencies.worker_id)
        ]
        unread = [one for one in here if one.unique_key not in self._read]
        stream.note(own, [(lease, self._reached(lease)) for lease in unread])
        has_hole = self._has_hole(stream, own)
        stream.look(leases, is_in_doubt=has_hole or any(map(self._fails, unsettled)))
        if stream.is_deleted:
            return len(here) == len(unsettled)
        return not unsettled and not has_hole

    def _has_hole(self, stream: DrainedStream, leases: Iterable[Lease]) -> bool:
        """Return whether a row is missing: not created yet, deleted, or not seen by a scan.

        A row that stays unreadable is not missing. Rows that Java 2.x wrote may have no hash range
        until the leader adds it. Then nothing is known.
        """
        unfinished = [lease for lease in leases if not lease.ended]
        ranges = [lease.hash_key_range for lease in unfinished if lease.hash_key_range is not None]
        if len(ranges) < len(unfinished) or find_hole(ranges) is None:
            return False
        now = self._dependencies.clock.monotonic()
        lasting = {
            key
            for key, (since, _) in self._unreadable.items()
            if stream.has_row(key) and now - since >= MISSING_LIMIT_SECONDS
        }
        return not lasting or find_hole([*ranges, *stream.ranges_of(lasting)]) is not None

    def _fails(self, lease: Lease) -> bool:
        """Return whether the last step of a shard that is held here has failed."""
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            return False
        reading = self._source.state_of(lease.lease_key)
        return consumer.error is not None or (reading is not None and reading.error is not None)

    def _reached(self, lease: Lease) -> Position | None:
        """Return the last position that is known to be in the table (inclusive)."""
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        committed = None if consumer is None else consumer.committed
        position = committed or lease.checkpoint
        return None if position.is_sentinel else position

    def _read_leases(self) -> tuple[Lease, ...] | None:
        """Return all leases; None when the table cannot be read now."""
        now = self._dependencies.clock.monotonic()
        try:
            listing = self._dependencies.lease_table.list_leases()
        except AwsError as error:
            self._dependencies.events(AwsTrouble("Scan of the leases for the drain", str(error)))
            if self._unreadable_since is None:
                self._unreadable_since = now
            is_missing = isinstance(error, NotFoundError)
            limit = MISSING_LIMIT_SECONDS if is_missing else UNREADABLE_LIMIT_SECONDS
            if now - self._unreadable_since >= limit:
                raise
            return None
        self._unreadable_since = None
        self._rejected.note_all(listing.bad_rows)
        self._unreadable = {
            row.key: (self._unreadable.get(row.key, (now, ""))[0], row.reason)
            for row in listing.bad_rows
            if any(stream.has_row(row.key) for stream in self._streams)
        }
        return listing.leases

    def _note_renewals(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            known = self._counters.get(lease.lease_key)
            if known is not None and lease.counter != known:
                self._renewed.add(lease.lease_key)
            self._counters[lease.lease_key] = lease.counter

    def _note_read(self) -> None:
        self._read.update(
            consumer.held.lease.unique_key
            for consumer in self._lifecycle.consumers.values()
            if self._is_read(consumer)
            or (consumer.state is ConsumerState.ENDING and not consumer.shard_gone)
        )

    def _is_settled(self, lease: Lease) -> bool:
        if lease.ended:
            return True
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            return (
                lease.actual_owner not in (None, self._dependencies.worker_id)
                and lease.lease_key in self._renewed
            )
        return self._is_read(consumer) or self._is_given_up(lease)

    def _is_given_up(self, lease: Lease) -> bool:
        """Return whether the shard or an ancestor stays paused or fails for good.

        Then the drain ends as failed. Each ancestor is looked at once: after many splits and merges
        there are few of them, and very many ways to them.
        """
        given_up = {key for key, one in self._paused().items() if one.attempts >= ATTEMPTS}
        given_up |= self._given_up.keys()
        if not given_up:
            return False
        waiting, seen = [lease], {lease.lease_key}
        while waiting:
            current = waiting.pop()
            if current.lease_key in given_up:
                return True
            for parent in current.parent_shard_ids:
                consumer = self._lifecycle.consumers.get(current.key_of_sibling(parent))
                if consumer is not None and consumer.lease_key not in seen:
                    seen.add(consumer.lease_key)
                    waiting.append(consumer.held.lease)
        return False

    def _is_through(self) -> bool:
        consumers = [
            c for c in self._lifecycle.consumers.values() if c.state is not ConsumerState.ENDED
        ]
        return bool(consumers) and all(
            self._is_read(consumer) or self._is_given_up(consumer.held.lease)
            for consumer in consumers
        )

    def _is_read(self, consumer: ShardConsumer) -> bool:
        if consumer.state is not ConsumerState.READING:
            return False
        reading = self._source.state_of(consumer.lease_key)
        return reading is not None and reading.caught_up

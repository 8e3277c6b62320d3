"""Detect the end of a drain: all records that the streams had at its start are in the table.

The lease table is read every `LOOK_SECONDS`, and once more when all that is held here is read. A
drain is complete when each lease is settled, and the leases of every stream cover all hash keys. If
a row is missing, the leader creates it. A lease is settled in these cases:

- It is at SHARD_END.
- This worker holds it, and has read it to the tip and committed that since the drain began. What
  comes later is not waited for. If the shard ends meanwhile, SHARD_END must be written.
- Another worker owns it and has renewed it since the drain began. A row that only names an owner
  proves nothing: that worker may have been killed before.

A lease without an owner is not settled, because the leader will assign it. Leases of streams that
the settings do not name are ignored. If the settings name several streams, one that does not exist
is not waited for. Nor is a stream that was created after the start.

Some shards are not waited for, and then the drain fails and says why: a shard that is paused, after
`ATTEMPTS`; one whose steps or reads fail with an error that does not pass, after `LASTING_SECONDS`;
and those of a stream that is proven to be deleted. Beside a row that stays unreadable for
`BAD_ROW_SECONDS`, the rows that are missing in its stream are not waited for either, nor is a shard
whose end needs such a row: the range of hash keys of a row that cannot be read is not known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

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
    UnreadableRowError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    LossReason,
    RecordsLost,
    ShardsLeftToOthers,
    StreamUnavailable,
)
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leases.row import Lease, RejectedRows
from kcl_pipeline.planning.coverage import find_hole
from kcl_pipeline.shards import StreamId
from kcl_pipeline.text import counted
from kcl_pipeline.threads import Due
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures import ShardPause
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.summary import owners_text

LOOK_SECONDS: Final = 1.0
DESCRIBE_SECONDS: Final = 5.0
"""Time between two descriptions of a stream that may be deleted."""
UNREADABLE_LIMIT_SECONDS: Final = 60.0
"""How long the lease table may be unreadable. After that the drain fails with the last error."""
BAD_ROW_SECONDS: Final = 15.0
"""How long a drain waits for a row that cannot be read."""
ATTEMPTS: Final = 3
"""A drain does not wait for a paused shard after this number of attempts."""
LASTING_SECONDS: Final = 60.0
"""After this time a drain does not wait for a shard whose error does not pass by itself."""
_PASSES: Final = frozenset(
    error.__name__
    for error in (
        ThrottledError,
        UnavailableError,
        NotFoundError,  # `_describe` finds out whether the stream is deleted
        StreamReplacedError,
        ExpiredIteratorError,
        ShardSyncError,
        LeaseLostError,
        SinkError,  # the worker ends after some in a row
        CommitStoppedError,
    )
)
"""Names of errors that pass without a person. All others last, also those that nobody expected."""
_OF_ROWS: Final = frozenset({ShardSyncError.__name__, UnreadableRowError.__name__})


@dataclass(slots=True)
class _Stream:
    """A stream as it was at the start of the drain. A later one of the same name is another one.

    Attributes:
        stream: The stream as it was resolved at the start of the worker.
        describe_at: When it may be described again (monotonic seconds).
        is_deleted: Whether the stream is proven to be deleted.
        had_leases: Whether the table had leases of it at a look.
        unread: Leases that this worker has not read and of which no other worker is known to be
            alive, at the last look that saw each of them: the leader deletes those of a stream that
            was created again, also while their rows name a worker that was killed.
        reported: Keys of the leases whose loss was reported.
    """

    stream: StreamId
    describe_at: float
    is_deleted: bool = False
    had_leases: bool = False
    unread: dict[str, Lease] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def leases_of(self, groups: Mapping[str | None, Sequence[Lease]]) -> Sequence[Lease]:
        """Return the leases of this stream. The groups have the leases by their stream."""
        stream = self.stream
        if stream.creation_epoch is not None:
            return groups.get(stream.serialized, ())
        # The keys of a single stream are shard ids. The leader marks the leases of a later one.
        times = (stream.recreated_millis, stream.created_millis)
        return [
            lease
            for lease in groups.get(None, ())
            if stream.created_millis is None or lease.recreated_millis in times
        ]

    def has_row(self, lease_key: str) -> bool:
        """Return whether a row of this key, whose other attributes are unreadable, may be its."""
        return lease_key.startswith(self.stream.lease_key(""))

    @property
    def sentence(self) -> str | None:
        """A sentence that says what was not read. None: nothing is known to be lost."""
        if not self.is_deleted or (self.had_leases and not self.reported):
            return None
        what = f"{len(self.reported)} of its shards were" if self.had_leases else "it was"
        return f"the stream {self.stream.name} was deleted during the drain; {what} not read"


def _waits_for_row(consumer: ShardConsumer) -> bool:
    """Return whether the last step of a shard failed because of the row of another one."""
    return (consumer.error or "").partition(":")[0] in _OF_ROWS


class DrainWatch:
    """Check whether a drain is complete; see the module. A look costs as much as there are leases.

    Args:
        dependencies: The dependencies of the worker that drains. The sink of events receives
            `AwsTrouble` for each failed read of the lease table, `RowRejected` for unreadable rows,
            `ShardsLeftToOthers`, and for a deleted stream `StreamUnavailable` and `RecordsLost`.
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
        self._lifecycle = lifecycle
        self._source = source
        self._paused = paused
        self._identity = identity
        self._began = dependencies.clock.monotonic()
        self._streams = [_Stream(stream, self._began + DESCRIBE_SECONDS) for stream in streams]
        self._rejected = RejectedRows(dependencies.events)
        self._due = Due(dependencies.clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._unreadable_since: float | None = None
        # Unreadable rows: since when, and why
        self._bad_rows: dict[str, tuple[float, str]] = {}
        self._rows: dict[str, tuple[str | None, str | None, int]] = {}
        self._renewed: dict[str, str | None] = {}
        self._read: set[str] = set()
        self._was_through = False
        # Errors that do not pass: since when, and which
        self._failing: dict[str, tuple[float, str]] = {}
        self._not_waited_for: set[str] = set()
        self._unfinished = 0
        self.elsewhere: dict[str, int] = {}

    def done(self) -> bool:
        """Return whether the drain is complete; False between two reads of the table.

        The processing thread calls it when no batch is in work.

        Raises:
            AwsError: The lease table could not be read for `UNREADABLE_LIMIT_SECONDS`.
        """
        self._note_read()
        was_through, self._was_through = self._was_through, self._is_through()
        # When all that is held here is read, look at once: the drain may be complete.
        is_first = self._was_through and not was_through
        if not (self._due.ready() or is_first) or (leases := self._read_leases()) is None:
            return False
        self._note_renewals(leases)
        self._note_errors()
        groups: defaultdict[str | None, list[Lease]] = defaultdict(list)
        for lease in leases:
            groups[lease.stream].append(lease)
        of_stream = [(stream, stream.leases_of(groups)) for stream in self._streams]
        self._note_elsewhere([lease for _, leases in of_stream for lease in leases])
        # Each stream notes its leases, also if an earlier one is waited for.
        finished = [self._is_finished(stream, leases) for stream, leases in of_stream]
        if all(finished) and self.elsewhere:
            me, number = self._dependencies.worker_id, sum(self.elsewhere.values())
            text = owners_text(self.elsewhere)
            self._dependencies.events(ShardsLeftToOthers(me, self._unfinished, number, text))
        return all(finished)

    def unread(self) -> str | None:
        """Return a sentence about what was not read, and why; None: everything was read."""
        sentences = [stream.sentence for stream in self._streams if stream.sentence is not None]
        sentences += [
            f"a shard was not read, because the row of lease {key} cannot be read: {reason}"
            for key, (_, reason) in sorted(self._bad_rows.items())
        ]
        if given_up := self._given_up():
            key, error = min(given_up.items())
            count = counted(len(given_up), "shard was", "shards were")
            sentences.append(f"{count} not read to the end: {key}: {error}")
        return "; ".join(sentences) or None

    # -- what is settled

    def _is_finished(self, stream: _Stream, leases: Sequence[Lease]) -> bool:
        """Return whether nothing of a stream is waited for, and note its leases."""
        me = self._dependencies.worker_id
        stream.had_leases = stream.had_leases or bool(leases)
        unsettled = [lease for lease in leases if not self._is_settled(lease)]
        # Another worker that is known to be the owner reads its lease, or the leader assigns it.
        here = [lease for lease in unsettled if lease.actual_owner in (None, me)]
        for lease in leases:
            stream.unread.pop(lease.unique_key, None)
        unread = [lease for lease in unsettled if lease.unique_key not in self._read]
        stream.unread |= {lease.unique_key: lease for lease in unread}
        has_hole = self._has_hole(stream, leases)
        if not stream.is_deleted and (has_hole or any(map(self._fails, unsettled))):
            self._describe(stream)
        if stream.is_deleted:
            is_over = len(here) == len(unsettled)
            if is_over:
                self._report_lost(stream)
            return is_over
        return not unsettled and not has_hole

    def _is_settled(self, lease: Lease) -> bool:
        if lease.ended:
            return True
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            owner = lease.actual_owner
            is_elsewhere = owner not in (None, self._dependencies.worker_id)
            return is_elsewhere and self._renewed.get(lease.lease_key) == owner
        # The children of a shard that ends have no rows before it is at SHARD_END. After that, a
        # row that is not at SHARD_END is an old one, and the scan has no rows of the children.
        is_ending = consumer.state in (ConsumerState.ENDING, ConsumerState.ENDED)
        # Beside a bad row an end may fail for ever: another parent has no row, nobody creates it.
        if is_ending and _waits_for_row(consumer) and self._has_bad_row(lease.key_of_sibling("")):
            is_ending = False
        is_read = lease.unique_key in self._read and not is_ending
        return is_read or lease.lease_key in self._not_waited_for

    def _has_hole(self, stream: _Stream, leases: Iterable[Lease]) -> bool:
        """Return whether a row is missing: not created yet, deleted, or not seen by a scan.

        Rows that Java 2.x wrote may have no hash range until the leader adds it. Then nothing is
        known, as beside a row that stays unreadable.
        """
        unfinished = [lease for lease in leases if not lease.ended]
        ranges = [lease.hash_key_range for lease in unfinished if lease.hash_key_range is not None]
        has_bad_row = self._has_bad_row(stream.stream.lease_key(""))
        return not has_bad_row and len(ranges) == len(unfinished) and find_hole(ranges) is not None

    def _has_bad_row(self, prefix: str) -> bool:
        """Return whether a row stays unreadable whose key begins with that of its stream."""
        until = self._dependencies.clock.monotonic() - BAD_ROW_SECONDS
        return any(
            since <= until and key.startswith(prefix) for key, (since, _) in self._bad_rows.items()
        )

    # -- what is noted between two looks, and at a look

    def _note_read(self) -> None:
        """Note the shards that are read to the tip and committed. One that is read stays so."""
        for consumer in self._lifecycle.consumers.values():
            if (key := consumer.held.lease.unique_key) in self._read:
                continue
            # An end that was read to is no loss if the stream is deleted now.
            ends = consumer.state is ConsumerState.ENDING and not consumer.shard_gone
            if ends or self._is_at_tip(consumer):
                self._read.add(key)

    def _is_through(self) -> bool:
        """Return whether all shards that are held here are settled, apart from their rows."""
        consumers = [
            consumer
            for consumer in self._lifecycle.consumers.values()
            if consumer.state is not ConsumerState.ENDED
        ]
        return bool(consumers) and all(self._is_settled(c.held.lease) for c in consumers)

    def _is_at_tip(self, consumer: ShardConsumer) -> bool:
        reading = self._source.state_of(consumer.lease_key)
        return (
            consumer.state is ConsumerState.READING
            and not consumer.in_batch
            and reading is not None
            and reading.caught_up
            and reading.read_at is not None
            and reading.read_at >= self._began
        )

    def _read_leases(self) -> Sequence[Lease] | None:
        """Return all leases; None when the table cannot be read now."""
        now = self._dependencies.clock.monotonic()
        try:
            listing = self._dependencies.lease_table.list_leases()
        except AwsError as error:
            self._dependencies.events(AwsTrouble("Scan of the leases for the drain", str(error)))
            if self._unreadable_since is None:
                self._unreadable_since = now
            if now - self._unreadable_since >= UNREADABLE_LIMIT_SECONDS:
                raise
            return None
        self._unreadable_since = None
        self._rejected.note_all(listing.bad_rows)
        self._bad_rows = {
            row.key: (self._bad_rows.get(row.key, (now, ""))[0], row.reason)
            for row in listing.bad_rows
            if any(stream.has_row(row.key) for stream in self._streams)
        }
        return listing.leases

    def _note_renewals(self, leases: Iterable[Lease]) -> None:
        """Note who has renewed each lease since the first look.

        An assignment raises the counter, too, and changes the owner. The leader writes it, so that
        it proves nothing about the owner.
        """
        for lease in leases:
            row = (lease.owner, lease.checkpoint_owner, lease.counter)
            before = self._rows.get(lease.lease_key)
            if before is not None and before[:2] == row[:2] and before[2] != row[2]:
                self._renewed[lease.lease_key] = lease.actual_owner
            self._rows[lease.lease_key] = row

    def _note_errors(self) -> None:
        """Give shards up that stay paused, or whose error does not pass, with their descendants."""
        now, paused = self._dependencies.clock.monotonic(), self._paused()
        consumers = self._lifecycle.consumers
        self._failing = {
            key: (self._failing.get(key, (now, ""))[0], error)
            for key, consumer in consumers.items()
            if key not in paused and (error := self._lasting_error(consumer)) is not None
        }
        too_often = {key for key, pause in paused.items() if pause.attempts >= ATTEMPTS}
        self._not_waited_for = too_often | self._given_up().keys()
        waiting = list(self._not_waited_for)
        children: defaultdict[str, list[str]] = defaultdict(list)
        for consumer in consumers.values() if waiting else ():
            lease = consumer.held.lease
            for parent in lease.parent_shard_ids:
                children[lease.key_of_sibling(parent)].append(lease.lease_key)
        # Each descendant is looked at once: after many reshards there are very many ways to it.
        while waiting:
            for child in children[waiting.pop()]:
                if child not in self._not_waited_for:
                    self._not_waited_for.add(child)
                    waiting.append(child)

    def _lasting_error(self, consumer: ShardConsumer) -> str | None:
        """Return the error of the last step or read, if it does not pass; None: there is none."""
        if consumer.held.lease.unique_key in self._read:
            return None
        reading = self._source.state_of(consumer.lease_key)
        step = consumer.error if consumer.failures else None
        for error in (step, None if reading is None else reading.error):
            name = (error or "").partition(":")[0]
            if error is not None and name.isidentifier() and name not in _PASSES:
                return error
        return None

    def _given_up(self) -> dict[str, str]:
        """Return the shards whose error lasts too long, with it."""
        until = self._dependencies.clock.monotonic() - LASTING_SECONDS
        return {key: error for key, (since, error) in self._failing.items() if since <= until}

    def _note_elsewhere(self, leases: Iterable[Lease]) -> None:
        """Note what other workers hold."""
        unfinished = [lease for lease in leases if not lease.ended]
        self._unfinished = len(unfinished)
        owners = Counter(
            owner
            for lease in unfinished
            if lease.lease_key not in self._lifecycle.consumers
            and (owner := lease.actual_owner) not in (None, self._dependencies.worker_id)
            and self._renewed.get(lease.lease_key) == owner
        )
        self.elsewhere = {owner: number for owner, number in owners.items() if owner is not None}

    # -- a stream that is deleted meanwhile

    def _fails(self, lease: Lease) -> bool:
        """Return whether the last step or read of a shard that is held here has failed."""
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            return False
        reading = self._source.state_of(lease.lease_key)
        return consumer.error is not None or (reading is not None and reading.error is not None)

    def _describe(self, stream: _Stream) -> None:
        """Find out whether a stream is deleted. A description that fails otherwise is no proof."""
        now = self._dependencies.clock.monotonic()
        if now < stream.describe_at:
            return
        stream.describe_at = now + DESCRIBE_SECONDS
        try:
            self._identity.confirm(stream.stream, now)
        except (NotFoundError, StreamReplacedError) as error:
            stream.is_deleted = True
            name = stream.stream.arn or stream.stream.name
            self._dependencies.events(
                StreamUnavailable(self._dependencies.worker_id, name, str(error))
            )
        except AwsError as error:
            self._dependencies.events(
                AwsTrouble(f"look for {stream.stream.name} in the drain", str(error))
            )

    def _report_lost(self, stream: _Stream) -> None:
        """Report the shards of a deleted stream that were not read, each once.

        Not at the end of the drain: a drain that is stopped before would lose them in silence.
        """
        for key in sorted(stream.unread.keys() - stream.reported):
            stream.reported.add(key)
            lease = stream.unread[key]
            consumer = self._lifecycle.consumers.get(lease.lease_key)
            position = (None if consumer is None else consumer.committed) or lease.checkpoint
            self._dependencies.events(
                RecordsLost(
                    self._dependencies.worker_id,
                    lease.lease_key,
                    LossReason.STREAM_DELETED,
                    None if position.is_sentinel else position,  # inclusive
                    stream=stream.stream.name,
                )
            )

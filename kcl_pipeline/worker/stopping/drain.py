"""Detect the end of a drain: all records that the streams had at its start are in the table.

The lease table is read every `LOOK_SECONDS`, and once more when all that is held here is read. A
drain is complete when it waits for nothing. It waits for hash keys that no lease covers, because
the leader creates a missing row; for rows that cannot be read; and for each unfinished lease,
except these:

- This worker holds it, and has read it to the tip and committed that since the drain began. What
  comes later is not waited for. If the shard has ended, SHARD_END must be written. The page with
  its last record need not say so, so the stream is listed when nothing else is waited for.
- Another worker owns it and has renewed it since the drain began. A row that only names an owner
  proves nothing: that worker may have been killed before.
- Its shard is paused, and was tried `ATTEMPTS` times. The drain fails then.
- Its stream is proven to be deleted, and the row names no other worker. What this worker has not
  read is reported as lost, and the drain fails.

Leases of streams that the settings do not name are ignored. If the settings name several streams,
one that does not exist is not waited for. Nor is a stream that was created after the start.

A drain also fails when nothing that it waits for has moved for a long time (`standstill_seconds`).
Then it says what that is, and why. So it needs to know neither which errors pass, nor which rows a
person has to repair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.changes import Lasting
from kcl_pipeline.config import ConsumerSettings, ShardSyncSettings
from kcl_pipeline.errors import AwsError, NotFoundError, StreamReplacedError
from kcl_pipeline.events import (
    AwsTrouble,
    LossReason,
    RecordsLost,
    ShardsLeftToOthers,
    StreamUnavailable,
)
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leader.lock import lock_settings
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.planning.coverage import hole_in_leases
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
ATTEMPTS: Final = 3
"""A drain does not wait for a paused shard after this number of attempts."""
FAILOVERS: Final = 3
"""Failover times in which something moves if all is as it should be: the leases of a worker that
was killed expire, also if it has led, and the next cycle of a leader assigns them."""
SHOWN_REASONS: Final = 5


@dataclass(slots=True)
class _Wait:
    """Something that a drain waits for.

    Attributes:
        reason: Why it is waited for.
        progress: A value that changes when it moves.
        is_failing: Whether the last step or read of a shard that is held here has failed.
        more_seconds: How much longer than other things it may stand still.
    """

    reason: str
    progress: object = None
    is_failing: bool = False
    more_seconds: float = 0.0


@dataclass(slots=True)
class _Stream:
    """A stream as it was at the start of the drain. A later one of the same name is another one.

    Attributes:
        stream: The stream as it was resolved at the start of the worker.
        describe: When it may be described again.
        is_deleted: Whether the stream is proven to be deleted.
        had_leases: Whether the table had leases of it at a look.
        unread: Leases that were waited for and that this worker has not read, at the last look that
            saw each of them: the leader deletes those of a stream that was created again, also
            while their rows name a worker that was killed.
        lost: Keys of the leases whose loss was reported.
    """

    stream: StreamId
    describe: Due
    is_deleted: bool = False
    had_leases: bool = False
    unread: dict[str, Lease] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

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

    @property
    def sentence(self) -> str | None:
        """A sentence that says what was not read. None: nothing is known to be lost."""
        if not self.is_deleted or (self.had_leases and not self.lost):
            return None
        what = f"{len(self.lost)} of its shards were" if self.had_leases else "it was"
        return f"the stream {self.stream.name} was deleted during the drain; {what} not read"


def standstill_seconds(settings: ConsumerSettings) -> float:
    """Return the time without a movement after which a drain fails."""
    failover_millis = settings.lease.failover_time_millis
    # The lock of a leader that was killed expires first, and it may be the longer time.
    lock_millis = lock_settings(settings, is_sensor=False).leader_lease_duration_millis
    takes_millis = max(FAILOVERS * failover_millis, lock_millis + failover_millis)
    return (settings.worker.shard_stalled_after_millis + takes_millis) / 1000


def audit_seconds(settings: ShardSyncSettings) -> float:
    """Return the time in which a leader creates a missing row."""
    audits = settings.leases_recovery_auditor_inconsistency_confidence_threshold + 1
    return audits * settings.leases_recovery_auditor_execution_frequency_millis / 1000


class DrainWatch:
    """Check whether a drain is complete; see the module. A look costs as much as there are leases.

    Args:
        dependencies: The dependencies of the worker that drains. The sink of events receives
            `AwsTrouble` for each failed read of the lease table, `ShardsLeftToOthers`, and for a
            deleted stream `StreamUnavailable` and `RecordsLost`.
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
        clock = dependencies.clock
        self._began = clock.monotonic()
        self._streams = [
            _Stream(stream, Due(clock, DESCRIBE_SECONDS, first_seconds=DESCRIBE_SECONDS))
            for stream in streams
        ]
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._read: set[str] = set()
        self._rows: dict[str, tuple[str | None, str | None, int]] = {}
        self._renewed: dict[str, str | None] = {}
        self._pauses: Mapping[str, ShardPause] = {}
        self._unfinished = 0
        self.elsewhere = Counter[str]()
        # What was waited for at any look. Nothing is forgotten: the ends of two shards may fail in
        # turns, so that each of them is waited for again and again, and that is no movement.
        self._progress: dict[str, object] = {}
        self._limit_seconds = standstill_seconds(dependencies.settings)
        self._standstill = Lasting(self._limit_seconds)
        self._standstill.begin(self._began)
        self._failure: str | None = None

    def done(self) -> bool:
        """Return whether the drain is complete or has failed (`unread`); False between two looks.

        The processing thread calls it when no batch is in work.
        """
        # When all that is held here is read, look at once: the drain may be complete.
        if not (self._note_read() or self._due.ready()):
            return False
        if waits := self._look():
            return self._stands_still(waits)
        if self.elsewhere:
            me, number = self._dependencies.worker_id, sum(self.elsewhere.values())
            text = owners_text(self.elsewhere)
            self._dependencies.events(ShardsLeftToOthers(me, self._unfinished, number, text))
        return True

    def unread(self) -> str | None:
        """Return a sentence about what was not read, and why; None: everything was read."""
        sentences = [*(stream.sentence for stream in self._streams), self._failure]
        return "; ".join(filter(None, sentences)) or None

    # -- what is waited for

    def _look(self) -> dict[str, _Wait]:
        """Read the lease table, and return what is waited for."""
        try:
            listing = self._dependencies.lease_table.list_leases()
        except AwsError as error:
            self._dependencies.events(AwsTrouble("Scan of the leases for the drain", str(error)))
            return {"the lease table": _Wait(f"{type(error).__name__}: {error}")}
        self._note_renewals(listing.leases)
        self._pauses = self._paused()
        groups: defaultdict[str | None, list[Lease]] = defaultdict(list)
        for lease in listing.leases:
            groups[lease.stream].append(lease)
        waits: dict[str, _Wait] = {}
        self._unfinished, self.elsewhere = 0, Counter()
        for stream in self._streams:
            leases, prefix = stream.leases_of(groups), stream.stream.lease_key("")
            rows = [row for row in listing.bad_rows if row.key.startswith(prefix)]
            waits |= self._waits_of(stream, leases, rows)
        return waits or self._ends(groups)

    def _waits_of(
        self, stream: _Stream, leases: Sequence[Lease], bad_rows: Sequence[BadRow]
    ) -> dict[str, _Wait]:
        """Return what is waited for of a stream, and note its leases that are not read."""
        waits: dict[str, _Wait] = {}
        stream.had_leases = stream.had_leases or bool(leases)
        for lease in leases:
            key = lease.unique_key
            stream.unread.pop(key, None)
            if lease.ended:
                continue
            self._unfinished += 1
            if (reader := self._reader_of(lease)) is not None:
                self.elsewhere[reader] += 1
            elif (wait := self._wait(lease)) is not None:
                waits[key] = wait
                if key not in self._read:
                    stream.unread[key] = lease
        # The range of hash keys of a row that cannot be read is not known.
        hole = None if bad_rows else hole_in_leases(leases)
        is_failing = hole is not None or any(wait.is_failing for wait in waits.values())
        if is_failing and not stream.is_deleted and stream.describe.ready():
            self._describe(stream)
        if stream.is_deleted:
            hole, waits = None, self._without_lost(stream, leases, waits)
        if hole is not None:
            more_seconds = audit_seconds(self._dependencies.settings.shard_sync)
            waits[f"the stream {stream.stream.name}"] = _Wait(
                str(hole), hole, more_seconds=more_seconds
            )
        return waits | {row.key: _Wait(f"its row cannot be read: {row.reason}") for row in bad_rows}

    def _wait(self, lease: Lease) -> _Wait | None:
        """Return why an unfinished lease is waited for that no other worker is known to read."""
        consumer = self._lifecycle.consumers.get(lease.lease_key)
        if consumer is None:
            owner = lease.actual_owner
            if owner is None:
                return _Wait("it has no owner")
            return _Wait(f"its owner {owner} has not renewed it since the drain began", owner)
        pause = self._pauses.get(lease.lease_key)
        if pause is not None and pause.attempts >= ATTEMPTS:
            return None
        # The children of a shard that ends have no rows before it is at SHARD_END. After that, a
        # row that is not at SHARD_END is an old one, and the scan has no rows of the children.
        is_ending = consumer.state in (ConsumerState.ENDING, ConsumerState.ENDED)
        if lease.unique_key in self._read and not is_ending:
            return None
        reading = self._source.state_of(lease.lease_key)
        error = consumer.error or (None if reading is None else reading.error)
        # A call of a record processor may last, and the shard does not move meanwhile.
        moved_at = (
            self._dependencies.clock.monotonic()
            if self._lifecycle.is_called(consumer.held)
            else consumer.last_moved(reading)
        )
        return _Wait(
            error or f"its state is {consumer.state}", moved_at, is_failing=error is not None
        )

    def _ends(self, groups: Mapping[str | None, Sequence[Lease]]) -> dict[str, _Wait]:
        """Return the shards that are held here and have children, but whose end was not read.

        The children may have records, and they have no rows yet.
        """
        waits: dict[str, _Wait] = {}
        for stream in self._streams:
            held = {
                lease.shard_id: lease.unique_key
                for lease in stream.leases_of(groups)
                if lease.unique_key in self._read and not lease.ended
                if lease.lease_key in self._lifecycle.consumers
            }
            if stream.is_deleted or not held:
                continue
            try:
                shards = self._dependencies.kinesis.list_shards(stream.stream)
            except NotFoundError:
                continue  # All that this worker knew of it is read.
            except AwsError as error:
                text = f"{type(error).__name__}: {error}"
                self._dependencies.events(AwsTrouble("ListShards for the drain", str(error)))
                waits[f"the shards of {stream.stream.name}"] = _Wait(text)
            else:
                parents = {parent for shard in shards for parent in shard.parents}
                waits |= {held[key]: _Wait("its end is not read") for key in held.keys() & parents}
        return waits

    def _reader_of(self, lease: Lease) -> str | None:
        """Return the other worker that owns a lease, if it is alive; None: there is none."""
        key, owner = lease.lease_key, lease.actual_owner
        is_alive = owner != self._dependencies.worker_id and self._renewed.get(key) == owner
        return owner if is_alive and key not in self._lifecycle.consumers else None

    def _stands_still(self, waits: Mapping[str, _Wait]) -> bool:
        """Return whether nothing of this has moved for too long, and note why it is waited for."""
        now, before = self._dependencies.clock.monotonic(), self._progress
        if any(key not in before or before[key] != waits[key].progress for key in waits):
            self._standstill.begin(now)
        self._progress = before | {key: wait.progress for key, wait in waits.items()}
        seconds = self._standstill.count(now)
        if seconds < self._limit_seconds + max(wait.more_seconds for wait in waits.values()):
            return False
        keys_by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for key in sorted(waits):
            keys_by_reason[waits[key].reason].append(key)
        texts = [
            f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {reason}"
            for reason, keys in keys_by_reason.items()
        ]
        if len(texts) > SHOWN_REASONS:
            texts[SHOWN_REASONS:] = [counted(len(texts) - SHOWN_REASONS, "other reason")]
        text = "; ".join(texts)
        self._failure = f"nothing that the drain waits for has moved for {seconds:.0f} s: {text}"
        return True

    # -- what is noted between two looks, and at a look

    def _note_read(self) -> bool:
        """Note the shards that are read to the tip and committed. One that is read stays so.

        Returns:
            Whether the last shard that is held here is read now.
        """
        waiting = [
            consumer
            for consumer in self._lifecycle.consumers.values()
            if consumer.held.lease.unique_key not in self._read
            and consumer.state is not ConsumerState.ENDED
        ]
        read = [consumer for consumer in waiting if self._is_read(consumer)]
        self._read.update(consumer.held.lease.unique_key for consumer in read)
        if read:
            # It was waited for, and no look will see that its last batch was committed.
            self._standstill.begin(self._dependencies.clock.monotonic())
        return bool(read) and len(read) == len(waiting)

    def _is_read(self, consumer: ShardConsumer) -> bool:
        if consumer.state is ConsumerState.ENDING:
            return not consumer.shard_gone  # It is no loss if the stream is deleted now.
        reading = self._source.state_of(consumer.lease_key)
        return (
            consumer.state is ConsumerState.READING
            and not consumer.in_batch
            and reading is not None
            and reading.caught_up
            and reading.read_at is not None
            and reading.read_at >= self._began
        )

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

    # -- a stream that is deleted meanwhile

    def _describe(self, stream: _Stream) -> None:
        """Find out whether a stream is deleted. A description that fails otherwise is no proof."""
        try:
            self._identity.confirm(stream.stream, self._dependencies.clock.monotonic())
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

    def _without_lost(
        self, stream: _Stream, leases: Sequence[Lease], waits: Mapping[str, _Wait]
    ) -> dict[str, _Wait]:
        """Report the leases of a deleted stream that nobody reads; return the other waits.

        Each is reported once, and not at the end of the drain: one that is stopped before would
        lose them in silence.
        """
        # Another worker that is known to be the owner reads its lease, or the leader assigns it.
        elsewhere = {
            lease.unique_key
            for lease in leases
            if lease.actual_owner not in (None, self._dependencies.worker_id)
        }
        for key in sorted(stream.unread.keys() - stream.lost - elsewhere):
            stream.lost.add(key)
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
        return {key: wait for key, wait in waits.items() if key in elsewhere}

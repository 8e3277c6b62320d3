"""Detect the end of a drain: all records that the streams had at its start are in the table.

The lease table is read every `LOOK_SECONDS`, and once more when all that is held here is read. A
drain is complete when it waits for nothing. It waits for hash keys that no lease covers, because
the leader creates a missing row; for rows that cannot be read; and for each unfinished lease,
except these:

- This worker holds it, and has read it to the tip and committed that since the drain began. What
  comes later is not waited for. If the shard had children then, or its end was read, SHARD_END must
  be written, because the children have no rows before. The page with its last record need not say
  that it has ended, so each stream is listed once.
- Another worker owns it and has renewed it since the drain began. A row that only names an owner
  proves nothing: that worker may have been killed before. A shard that is held here is left to the
  same worker while it waits for that one.
- Its shard is paused, and was tried `ATTEMPTS` times. The drain fails then.
- Its stream is proven to be deleted, and the row names no other worker. What this worker has not
  read is reported as lost, and the drain fails.

Leases of streams that the settings do not name are ignored. If the settings name several streams,
one that does not exist is not waited for. Nor is a stream that was created after the start.

A drain also fails when nothing that it waits for has moved for a long time (`_stands_still`). Then
it says what that is, and why. So it needs to know neither which errors pass, nor which rows a
person has to repair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import LastChanges, Lasting
from kcl_pipeline.errors import AwsError, NotFoundError
from kcl_pipeline.events import AwsTrouble, ShardsLeftToOthers, StreamUnavailable
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.coverage import hole_in_leases
from kcl_pipeline.shards import StreamId
from kcl_pipeline.text import counted
from kcl_pipeline.threads import Due
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures import ShardPause
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.summary import owners_text

LOOK_SECONDS: Final = 1.0
DESCRIBE_SECONDS: Final = 5.0
"""Time between two descriptions of a stream whose leases do not cover all hash keys."""
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
        progress: A hashable value that changes when it moves.
        more_seconds: How much longer than other things it may stand still.
    """

    reason: str
    progress: object = None
    more_seconds: float = 0.0


class DrainWatch:
    """Check whether a drain is complete; see the module. A look costs as much as there are leases.

    Args:
        dependencies: The dependencies of the worker that drains. The sink of events receives
            `AwsTrouble` for each failed read of the lease table, `ShardsLeftToOthers`, and for a
            deleted stream `StreamUnavailable`.
        streams: The streams of the settings that exist. A later one of the same name is another
            one.
        lifecycle: The consumers of the worker, and the streams that are deleted.
        source: Reports which shards are read to their tip.
        paused: Returns the paused shards by lease key.

    Attributes:
        elsewhere: How many unfinished leases were left to each other live worker at the last look.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        streams: Iterable[StreamId],
        lifecycle: Lifecycle,
        source: BatchSource,
        paused: Callable[[], Mapping[str, ShardPause]],
    ) -> None:
        self._dependencies = dependencies
        self._consumers = lifecycle.consumers
        self._lifecycle = lifecycle
        self._deleted = lifecycle.deleted
        self._source = source
        self._paused = paused
        clock = dependencies.clock
        self._began = clock.monotonic()
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._describe = Due(clock, DESCRIBE_SECONDS, first_seconds=DESCRIBE_SECONDS)
        # By stream, the leases that this worker has not read, at the last look that saw each of
        # them: the leader deletes those of a stream that was created again, also while their rows
        # name a worker that was killed. None: no look has seen a lease of the stream.
        self._unread: dict[StreamId, dict[str, Lease] | None] = dict.fromkeys(streams)
        self._gone: set[StreamId] = set()
        self._parents: dict[StreamId, set[str]] = {}
        self._read: set[str] = set()
        self._renewals = LastChanges[tuple[str, str | None, str | None]]()
        self._unfinished = 0
        self.elsewhere = Counter[str]()
        # What was waited for at any look. Nothing is forgotten: the ends of two shards may fail in
        # turns, so that each of them is waited for again and again, and that is no movement.
        self._progress: dict[str, object] = {}
        sync = dependencies.settings.shard_sync
        audits = sync.leases_recovery_auditor_inconsistency_confidence_threshold + 1
        audit_millis = sync.leases_recovery_auditor_execution_frequency_millis
        self._audit_seconds = audits * audit_millis / 1000
        self._standstill = Lasting(self._limit_seconds())
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
        sentences: list[str] = []
        for stream, leases in self._unread.items():
            if stream in self._deleted and leases != {}:
                what = "it was" if leases is None else f"{len(leases)} of its shards were"
                sentences.append(
                    f"the stream {stream.name} was deleted during the drain; {what} not read"
                )
        return "; ".join(filter(None, [*sentences, self._failure])) or None

    # -- what is waited for

    def _look(self) -> dict[str, _Wait]:
        """Read the lease table, and return what is waited for."""
        try:
            listing = self._dependencies.lease_table.list_leases()
        except AwsError as error:
            return {"the lease table": self._refusal("Scan of the leases", error)}
        counters = {_claim(lease): lease.counter for lease in listing.leases}
        self._renewals.observe(counters, self._dependencies.clock.monotonic())
        groups: defaultdict[str | None, list[Lease]] = defaultdict(list)
        for lease in listing.leases:
            groups[lease.stream].append(lease)
        pauses, describes, waits = self._paused(), self._describe.ready(), dict[str, _Wait]()
        self._unfinished, self.elsewhere = 0, Counter()
        for stream in self._unread:
            leases, prefix = _leases_of(stream, groups), stream.lease_key("")
            waits |= self._list_shards(stream)
            waits |= self._waits_for_leases(stream, leases, pauses)
            bad_rows = [row for row in listing.bad_rows if row.key.startswith(prefix)]
            waits |= {row.key: _Wait(f"its row cannot be read: {row.reason}") for row in bad_rows}
            # The hash keys of a row that cannot be read are not known.
            hole = None if bad_rows or stream in self._deleted else hole_in_leases(leases)
            if hole is not None:
                waits[f"the stream {stream.name}"] = _Wait(str(hole), hole, self._audit_seconds)
                if describes:
                    self._deleted.find_out(stream)
        return waits

    def _list_shards(self, stream: StreamId) -> dict[str, _Wait]:
        """Note which shards of a stream have children, once; return a listing that has failed."""
        if stream in self._parents or stream in self._deleted:
            return {}
        try:
            shards = self._dependencies.kinesis.list_shards(stream)
        except NotFoundError:
            return {}  # Only a description proves that the stream is deleted.
        except AwsError as error:
            return {f"the shards of {stream.name}": self._refusal("ListShards", error)}
        self._parents[stream] = {parent for shard in shards for parent in shard.parents}
        return {}

    def _waits_for_leases(
        self, stream: StreamId, leases: Sequence[Lease], pauses: Mapping[str, ShardPause]
    ) -> dict[str, _Wait]:
        """Return the leases of a stream that are waited for, and note those that are not read."""
        waits: dict[str, _Wait] = {}
        rows, parents = {lease.lease_key: lease for lease in leases}, self._parents.get(stream, ())
        unread = self._unread[stream] or {}
        for lease in leases:
            key = lease.unique_key
            unread.pop(key, None)
            if lease.ended:
                continue
            self._unfinished += 1
            if (reader := self._reader_of(lease, rows)) is not None:
                self.elsewhere[reader] += 1
                continue
            if key not in self._read:
                unread[key] = lease
            if (wait := self._wait(lease, pauses, parents)) is not None:
                waits[key] = wait
        if leases:
            self._unread[stream] = unread
        if stream not in self._deleted:
            return waits
        me = self._dependencies.worker_id
        if stream not in self._gone:
            self._gone.add(stream)
            name, reason = stream.arn or stream.name, "the stream was deleted during the drain"
            self._dependencies.events(StreamUnavailable(me, name, reason))
        # Another worker that is known to be the owner reads its lease, or the leader assigns it.
        elsewhere = {row.unique_key for row in leases if row.actual_owner not in (None, me)}
        # Now, and not at the end: a drain that is stopped before would lose them in silence.
        for key in sorted(unread.keys() - elsewhere):
            self._deleted.report(unread[key], stream)
        return {key: wait for key, wait in waits.items() if key in elsewhere}

    def _reader_of(self, lease: Lease, rows: Mapping[str, Lease]) -> str | None:
        """Return the other worker that a lease is left to; None: there is none."""
        rows_to_read = [lease]
        if (consumer := self._consumers.get(lease.lease_key)) is not None:
            if consumer.state is not ConsumerState.BLOCKED:
                return None
            # It waits for its parents. A worker that reads one of them may checkpoint rarely.
            parents = (rows.get(lease.key_of_sibling(parent)) for parent in lease.parent_shard_ids)
            rows_to_read = [row for row in parents if row is not None and not row.ended]
        for row in rows_to_read:
            is_held = (
                row.actual_owner == self._dependencies.worker_id or row.lease_key in self._consumers
            )
            if not is_held and self._renewals.has_changed(_claim(row)):
                return row.actual_owner
        return None

    def _wait(
        self, lease: Lease, pauses: Mapping[str, ShardPause], parents: Collection[str]
    ) -> _Wait | None:
        """Return why an unfinished lease is waited for that no other worker is known to read."""
        consumer = self._consumers.get(lease.lease_key)
        if consumer is None:
            owner = lease.actual_owner
            if owner is None:
                return _Wait("it has no owner")
            return _Wait(f"its owner {owner} has not renewed it since the drain began", owner)
        pause = pauses.get(lease.lease_key)
        if pause is not None and pause.attempts >= ATTEMPTS:
            return None
        # ENDED: the row is at SHARD_END. The scan is older, and has no rows of the children.
        is_ending = consumer.state in (ConsumerState.ENDING, ConsumerState.ENDED)
        if lease.unique_key in self._read and not is_ending and lease.shard_id not in parents:
            return None
        reading = self._source.state_of(lease.lease_key)
        error = consumer.error or (None if reading is None else reading.error)
        # A call of a record processor may last, and the shard does not move meanwhile.
        moved_at = (
            self._dependencies.clock.monotonic()
            if self._lifecycle.is_called(consumer.held)
            else consumer.last_moved(reading)
        )
        return _Wait(error or f"its state is {consumer.state}", moved_at)

    def _refusal(self, what: str, error: AwsError) -> _Wait:
        self._dependencies.events(AwsTrouble(f"{what} for the drain", str(error)))
        return _Wait(f"{type(error).__name__}: {error}")

    # -- a drain that stands still

    def _stands_still(self, waits: Mapping[str, _Wait]) -> bool:
        """Return whether nothing of this has moved for too long, and note why it is waited for."""
        now, before = self._dependencies.clock.monotonic(), self._progress
        # The last batch of a shard is a movement, too. No look will see that it was committed.
        progress: dict[str, object] = {"the number of shards that are read": len(self._read)}
        progress |= {key: wait.progress for key, wait in waits.items()}
        self._progress = before | progress
        if not progress.items() <= before.items():
            self._standstill.begin(now)
        seconds = self._standstill.count(now)
        counted_seconds = seconds - max(wait.more_seconds for wait in waits.values())
        if counted_seconds < self._limit_seconds():
            return False
        if counted_seconds < self._limit_seconds(self._lock_millis()):
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

    def _limit_seconds(self, lock_millis: int = 0) -> float:
        """Return the time without a movement after which a drain fails.

        Args:
            lock_millis: Duration of the lock of the present leader.
        """
        settings = self._dependencies.settings
        failover_millis = settings.lease.failover_time_millis
        # If that leader was killed, its lock expires first, and then its leases.
        takes_millis = max(FAILOVERS * failover_millis, lock_millis + failover_millis)
        return (settings.worker.shard_stalled_after_millis + takes_millis) / 1000

    def _lock_millis(self) -> int:
        try:
            lock = self._dependencies.coordinator_table.read_lock()
        except AwsError:
            return 0
        return 0 if lock is None else lock.lease_duration_millis

    # -- what is noted between two looks

    def _note_read(self) -> bool:
        """Note the shards that are read to the tip and committed. One that is read stays so.

        Returns:
            Whether the last shard that is held here is read now.
        """
        waiting = {
            consumer.held.lease.unique_key: consumer
            for consumer in self._consumers.values()
            if consumer.state is not ConsumerState.ENDED
        }
        keys = waiting.keys() - self._read
        read = {
            key
            for key in keys
            if waiting[key].is_read(self._source.state_of(waiting[key].lease_key), self._began)
        }
        self._read |= read
        return bool(read) and read == keys


def _claim(lease: Lease) -> tuple[str, str | None, str | None]:
    """Return a lease with its two owners, as the key of its counter.

    An assignment raises the counter, too. It is a write of the leader, and proves nothing about the
    owner, so it makes another key.
    """
    return lease.lease_key, lease.owner, lease.checkpoint_owner


def _leases_of(stream: StreamId, groups: Mapping[str | None, Sequence[Lease]]) -> Sequence[Lease]:
    """Return the leases of a stream. The groups have the leases by their stream."""
    if stream.creation_epoch is not None:
        return groups.get(stream.serialized, ())
    # The keys of a single stream are shard ids. The leader marks the leases of a later one.
    times = (stream.recreated_millis, stream.created_millis)
    return [
        lease
        for lease in groups.get(None, ())
        if stream.created_millis is None or lease.recreated_millis in times
    ]

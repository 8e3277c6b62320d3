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
- Its stream is proven to be deleted. If it was not read, the drain fails.

Leases of streams that the settings do not name are ignored. If the settings name several streams,
one that does not exist is not waited for. Nor is a stream that was created after the start.

A drain also fails when nothing that it waits for has moved for a long time (`_stands_still`). Then
it says what that is, and why. So it needs to know neither which errors pass, nor which rows a
person has to repair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kcl_pipeline.clock import LastChanges, Lasting
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, DrainWaits, ShardsLeftToOthers
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
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
"""Time between two descriptions of a stream that cannot be listed, or has hash keys without a
lease."""
TELL_SECONDS: Final = 30.0
"""Time without a movement after which a drain says what it waits for, and says it again."""
ATTEMPTS: Final = 3
"""A drain does not wait for a paused shard after this number of attempts."""
FAILOVERS: Final = 3
"""Failover times in which something moves if all is as it should be: the leases of a worker that
was killed expire, also if it has led, and the next cycle of a leader assigns them."""
SHOWN_REASONS: Final = 5

_T = TypeVar("_T")


class _Wait(NamedTuple):
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
            `AwsTrouble` for each failed read of the lease table, `DrainWaits`, and
            `ShardsLeftToOthers`.
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
        self._streams = tuple(streams)
        self._lifecycle = lifecycle
        self._source = source
        self._paused = paused
        clock, settings = dependencies.clock, dependencies.settings
        self._began = clock.monotonic()
        self._due = Due(clock, LOOK_SECONDS, first_seconds=LOOK_SECONDS)
        self._describe = Due(clock, DESCRIBE_SECONDS, first_seconds=DESCRIBE_SECONDS)
        self._read: set[str] = set()
        self._waits: dict[str, _Wait] = {}
        self._unfinished = 0
        self.elsewhere = Counter[str]()
        self._renewals = LastChanges[tuple[str, str | None, str | None]]()
        self._parents: dict[StreamId, set[str]] = {}
        # Why the drain fails, by deleted stream. "": the stream was read before.
        self._deleted: dict[StreamId, str] = {}
        self._standstill_sentence = ""
        # What was waited for at any look. Nothing is forgotten: the ends of two shards may fail in
        # turns, so that each of them is waited for again and again, and that is no movement.
        self._progress: dict[str, object] = {}
        self._standstill = Lasting(settings.worker.shard_stalled_after_millis / 1000)
        self._standstill.begin(self._began)
        self._told_seconds = 0.0
        sync = settings.shard_sync
        audits = sync.leases_recovery_auditor_inconsistency_confidence_threshold + 1
        audit_millis = sync.leases_recovery_auditor_execution_frequency_millis
        self._audit_seconds = audits * audit_millis / 1000

    def done(self) -> bool:
        """Return whether the drain is complete or has failed (`unread`); False between two looks.

        The processing thread calls it when no batch is in work.
        """
        # When all that is held here is read, look at once: the drain may be complete.
        if not (self._note_read() or self._due.ready()):
            return False
        self._look()
        if self._waits:
            return self._stands_still()
        if self.elsewhere:
            me, number = self._dependencies.worker_id, sum(self.elsewhere.values())
            text = owners_text(self.elsewhere)
            self._dependencies.events(ShardsLeftToOthers(me, self._unfinished, number, text))
        return True

    def unread(self) -> str | None:
        """Return a sentence about what was not read, and why; None: everything was read."""
        reasons = (*self._deleted.values(), self._standstill_sentence)
        return "; ".join(filter(None, reasons)) or None

    def _note_read(self) -> bool:
        """Note the shards that are read to the tip and committed. One that is read stays so.

        Returns:
            Whether the last shard that is held here is read now.
        """
        waiting = [
            consumer
            for consumer in self._lifecycle.consumers.values()
            if consumer.state is not ConsumerState.ENDED
            and consumer.held.lease.unique_key not in self._read
        ]
        read = {
            consumer.held.lease.unique_key
            for consumer in waiting
            if consumer.is_read(self._source.state_of(consumer.lease_key), self._began)
        }
        self._read |= read
        return bool(read) and len(read) == len(waiting)

    # -- what is waited for

    def _look(self) -> None:
        """Read the lease table, and find out what is waited for."""
        self._waits, self.elsewhere, self._unfinished = {}, Counter(), 0
        table = self._dependencies.lease_table
        listing = self._ask("the lease table", "Scan of the leases", table.list_leases)
        if listing is None:
            return
        counters = {
            _claim(lease): lease.counter
            for lease in listing.leases
            if lease.lease_key not in self._lifecycle.consumers
        }
        self._renewals.observe(counters, self._dependencies.clock.monotonic())
        groups: defaultdict[str | None, list[Lease]] = defaultdict(list)
        for lease in listing.leases:
            groups[lease.stream].append(lease)
        pauses, describes = self._paused(), self._describe.ready()
        for stream in self._streams:
            leases, prefix = _leases_of(stream, groups), stream.lease_key("")
            bad_rows = [row for row in listing.bad_rows if row.key.startswith(prefix)]
            if stream not in self._parents and stream not in self._lifecycle.deleted:
                self._list_shards(stream)
            waits = self._look_at(stream, leases, pauses)
            for row in bad_rows:
                waits[row.key] = _Wait(row.reason)
            if stream in self._lifecycle.deleted:
                # Nobody can read the rest. What was held of it is reported by `DeletedStreams`.
                is_unread = bool(waits) or not leases
                text = f"the stream {stream.name} was deleted before the drain had read all of it"
                self._deleted.setdefault(stream, text if is_unread else "")
                continue
            # The hash keys of a row that cannot be read are not known.
            hole = None if bad_rows else hole_in_leases(leases)
            if hole is not None:
                waits[f"the stream {stream.name}"] = _Wait(str(hole), hole, self._audit_seconds)
            # Only a description proves that a stream is deleted.
            if describes and (hole is not None or stream not in self._parents):
                self._lifecycle.deleted.find_out(stream)
            self._waits |= waits

    def _ask(self, key: str, what: str, call: Callable[[], _T]) -> _T | None:
        """Return the answer of a call. None: it has failed, which is waited for under a key."""
        try:
            return call()
        except AwsError as error:
            self._dependencies.events(AwsTrouble(f"{what} for the drain", str(error)))
            self._waits[key] = _Wait(f"{type(error).__name__}: {error}")
            return None

    def _list_shards(self, stream: StreamId) -> None:
        """Note which shards of a stream have children now."""
        call = partial(self._dependencies.kinesis.list_shards, stream)
        shards = self._ask(f"the shards of {stream.name}", "ListShards", call)
        if shards is not None:
            self._parents[stream] = {parent for shard in shards for parent in shard.parents}

    def _look_at(
        self, stream: StreamId, leases: Sequence[Lease], pauses: Mapping[str, ShardPause]
    ) -> dict[str, _Wait]:
        """Return which leases of a stream are waited for. Count those that are left to others."""
        waits, parents = dict[str, _Wait](), self._parents.get(stream, set())
        me, consumers = self._dependencies.worker_id, self._lifecycle.consumers
        # By lease key, the other workers that have renewed their lease since the drain began
        readers = {
            row.lease_key: row.actual_owner
            for row in leases
            if row.actual_owner != me
            and row.lease_key not in consumers
            and self._renewals.has_changed(_claim(row))
            and not row.ended
        }
        for lease in leases:
            if lease.ended:
                continue
            self._unfinished += 1
            consumer, reader = consumers.get(lease.lease_key), readers.get(lease.lease_key)
            if consumer is not None and consumer.state is ConsumerState.BLOCKED:
                # It waits for its parents. A worker that reads one of them may checkpoint rarely.
                keys = map(lease.key_of_sibling, lease.parent_shard_ids)
                reader = next(filter(None, map(readers.get, keys)), None)
            if reader is not None:
                self.elsewhere[reader] += 1
            elif wait := self._wait(lease, consumer, pauses.get(lease.lease_key), parents):
                waits[lease.unique_key] = wait
        return waits

    def _wait(
        self,
        lease: Lease,
        consumer: ShardConsumer | None,
        pause: ShardPause | None,
        parents: Collection[str],
    ) -> _Wait | None:
        """Return why an unfinished lease is waited for that no other worker is known to read."""
        if consumer is None:
            owner = lease.actual_owner
            if owner is None:
                return _Wait("it has no owner")
            return _Wait(f"its owner {owner} has not renewed it since the drain began", owner)
        if pause is not None and pause.attempts >= ATTEMPTS:
            return None
        # A shard with children is waited for until the scan has their rows, also if its own row is
        # at SHARD_END: the scan is older then.
        if lease.unique_key in self._read and not (consumer.is_at_end or lease.shard_id in parents):
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

    # -- a drain that stands still

    def _stands_still(self) -> bool:
        """Return whether nothing that is waited for has moved for too long, and note why."""
        now, before = self._dependencies.clock.monotonic(), self._progress
        # The last batch of a shard is a movement, too. No look will see that it was committed.
        progress: dict[str, object] = {"the number of shards that are read": len(self._read)}
        progress |= {key: wait.progress for key, wait in self._waits.items()}
        self._progress = before | progress
        if not progress.items() <= before.items():  # something has a value that it never had
            self._standstill.begin(now)
            self._told_seconds = 0.0
        seconds = self._standstill.count(now)
        if seconds - self._told_seconds >= TELL_SECONDS:
            self._told_seconds, me = seconds, self._dependencies.worker_id
            self._dependencies.events(DrainWaits(me, seconds, _reasons_text(self._waits)))
        counted = seconds - max(wait.more_seconds for wait in self._waits.values())
        if counted < self._limit_seconds(None):
            return False
        read_lock = self._dependencies.coordinator_table.read_lock
        lock = self._ask("the lock of the leader", "GetItem of the lock", read_lock)
        if counted < self._limit_seconds(lock):
            return False
        reasons = _reasons_text(self._waits)
        self._standstill_sentence = (
            f"nothing that the drain waits for has moved for {seconds:.0f} s: {reasons}"
        )
        return True

    def _limit_seconds(self, lock: LeaderLock | None) -> float:
        """Return the time without a movement after which a drain fails, given a leader's lock."""
        settings = self._dependencies.settings
        failover_millis = settings.lease.failover_time_millis
        # If the present leader was killed, its lock expires first, and then its leases.
        lock_millis = 0 if lock is None else lock.lease_duration_millis + failover_millis
        takes_millis = max(FAILOVERS * failover_millis, lock_millis)
        return (settings.worker.shard_stalled_after_millis + takes_millis) / 1000


def _reasons_text(waits: Mapping[str, _Wait]) -> str:
    """Return the reasons, each with the first of its keys: at most `SHOWN_REASONS`."""
    keys_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for key in sorted(waits):
        keys_by_reason[waits[key].reason].append(key)
    texts = [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {reason}"
        for reason, keys in keys_by_reason.items()
    ]
    if len(texts) > SHOWN_REASONS:
        texts[SHOWN_REASONS:] = [counted(len(texts) - SHOWN_REASONS, "other reason")]
    return "; ".join(texts)


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

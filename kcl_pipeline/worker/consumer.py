"""The state machine of a held shard, and the calls of a worker that each transition needs.

```
gained ──▶ BLOCKED ─unblock─▶ STARTING ─read─▶ READING ─reach_end─▶ ENDING ─end─▶ ENDED
                                │   ▲             │                   │  │          ▲
                                │   └──restart────┴───────────────────┘  └─ (lost)  │
                                ├─reach_end─▶ ENDING                                │
                                └─end───────────────────────────────────────────────┘
any state ─leave─▶ LEAVING ──▶ the lease is another worker's
```

(lost): the stream does not list the shard any more. Its row is deleted, and the consumer is gone.
A lease that is gained at SHARD_END begins as ENDED. A consumer whose lease is lost is forgotten in
any state. After a handoff that the leader has withdrawn, a new consumer begins at BLOCKED.

`ShardConsumer` has the state of one shard. Its methods are the transitions; they make no call. A
comment at each says when it happens, and what it may not do. `Lifecycle` makes the calls that a
transition needs (DynamoDB, the listing of the stream, the table of the sink), and then calls the
transition. If a call fails, the state stays, and the step is repeated after a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import (
    AwsError,
    KclError,
    LeaseLostError,
    NotFoundError,
    OtherTableError,
    ShardSyncError,
    UnreadableRowError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    DefectFound,
    LossReason,
    RecordsLost,
    ShardEnded,
)
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.kinesis.prefetch import ReadState
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.shard_sync import child_leases, leases_after_loss, with_read_up_to
from kcl_pipeline.position import SHARD_END, Position, StoredPosition
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.sinks.sink import Positions
from kcl_pipeline.threads import Due, MapCallable, serial_map
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.commit import ProgressStore, ShardProgress
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.finished import CLEANING_SECONDS, FinishedLeases
from kcl_pipeline.worker.losses import DeletedStreams, LossCheck, LostLease
from kcl_pipeline.worker.parents import Lineage, ParentCheck, ParentRows
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.streams import LeaseStreams


class ConsumerState(StrEnum):
    """State of a shard consumer (protocol §6.6, extended by the check of the sink's table).

    Attributes:
        BLOCKED: A parent is not at SHARD_END.
        STARTING: The position to read from must be found out.
        READING: The shard is read and its batches are committed.
        ENDING: All records are committed. SHARD_END is not written yet.
        LEAVING: The lease is in a handoff. Its checkpoint is written before the transfer.
        ENDED: Nothing is left to do.
    """

    BLOCKED = "blocked"
    STARTING = "starting"
    READING = "reading"
    ENDING = "ending"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(slots=True)
class ShardConsumer(ShardProgress):
    """Mutable state of one held lease. Its methods are the transitions.

    Only the processing thread changes it. `watchdog.Watchdog` reads single attributes on another
    thread.

    Attributes:
        state: See `ConsumerState`.
        due: Earliest time of the next step, after a wait or a failure (monotonic seconds).
        failures: Number of failed steps in a row.
        children: The children of a shard that ends. If `shard_gone`: the oldest shards that follow.
        shard_gone: Whether the stream does not list the shard any more.
        loss_reported: Whether the loss of the shard was reported.
        set_aside: Sequence and sub-sequence numbers after `committed` whose dead letters this
            worker has written.
        parents_reached: Positions of the parents at the last look.
        in_batch: Whether the batch that is being processed has ranges of this shard, or its record
            processor has not returned from a call for the last one.
        restarted: Whether the shard is read again after a failure.
        error: The error of the last failed step.
        refused: Why the table was refused at the last step (`OtherTableError`). None: it was not.
    """

    state: ConsumerState = ConsumerState.BLOCKED
    due: float = 0.0
    failures: int = 0
    children: tuple[ChildShard, ...] = ()
    shard_gone: bool = False
    loss_reported: bool = False
    set_aside: set[tuple[str, int]] = field(default_factory=set)
    parents_reached: object = None
    in_batch: bool = False
    restarted: bool = False
    error: str | None = None
    refused: str | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there may be records that are not committed."""
        return not self.is_at_end and self.state is not ConsumerState.LEAVING

    @property
    def is_at_end(self) -> bool:
        """Whether all records of the shard are committed. SHARD_END is written, or must be."""
        return self.state in _ALL_COMMITTED

    def last_moved(self, reading: ReadState | None) -> float:
        """Return the time of the last movement (monotonic seconds).

        A read counts as movement only while no records of the shard wait to be committed. A shard
        whose last batch failed is read repeatedly. It moves when a batch is committed, or when a
        read finds no records. Any thread may call it.

        Args:
            reading: The read state of the shard. None: it is not read.
        """
        if reading is None or reading.read_at is None:
            return self.moved_at
        is_read = (
            self.state is ConsumerState.READING
            and not self.in_batch
            and not reading.has_waiting
            and (reading.caught_up or not self.restarted)
        )
        return max(self.moved_at, reading.read_at) if is_read else self.moved_at

    def is_read(self, reading: ReadState | None, since: float) -> bool:
        """Return whether the table has all that the shard had at a read at or after `since`.

        Args:
            reading: The read state of the shard. None: it is not read.
            since: Time in monotonic seconds.
        """
        if self.is_at_end:
            return not self.shard_gone
        return (
            self.state is ConsumerState.READING
            and not self.in_batch
            and reading is not None
            and reading.caught_up
            and reading.read_at is not None
            and reading.read_at >= since
        )

    # -- from gaining the lease to reading

    def note_parents(self, reached: object, now: float) -> None:
        """Note the parents' positions. A change counts as movement; the first call does not."""
        if reached != self.parents_reached:
            if self.parents_reached is not None:
                self.moved_at = now
            self.parents_reached = reached

    def unblock(self) -> None:
        """BLOCKED → STARTING: the parents have ended."""
        # When each parent is at SHARD_END, or has no row and nothing left to read. Never before: a
        # row of a child must not land before a row of its parent. A restart returns to STARTING,
        # not to BLOCKED: parents that have ended stay so.
        self.state = ConsumerState.STARTING

    def read(self, begin: Callable[[ShardConsumer], None]) -> None:
        """STARTING → READING, after `begin` has succeeded."""
        # When row and table were read, in this order, and `settle` has noted the later of their
        # positions. No commit is made before, and none after a failed `begin`: both are read again.
        begin(self)
        self.state = ConsumerState.READING

    # -- a batch

    def note_committed(self, through: Position, stored: StoredPosition, now: float) -> None:
        """READING → READING: the table has the records up to a position."""
        # When the commit has landed, never before: the next renewal writes this position to the
        # row, and what precedes it is not read again.
        ShardProgress.note_committed(self, through, stored, now)  # super() fails with slots
        self.restarted, self.error = False, None
        self.set_aside.clear()

    # -- failures

    def step_succeeded(self) -> None:
        """Reset the wait. After a restart, the error stays until a batch is committed."""
        self.failures = 0
        self.refused = None
        if not self.restarted:
            self.error = None

    def step_failed(self, error: Exception, now: float, base_seconds: float) -> None:
        """Note the error, and retry the step after a wait."""
        self.error = f"{type(error).__name__}: {error}"
        self.refused = str(error) if isinstance(error, OtherTableError) else None
        self.back_off(now, base_seconds)

    def back_off(self, now: float, base_seconds: float) -> None:
        """Delay the next step. The wait doubles per failure, up to 30 times `base_seconds`."""
        self.failures += 1
        self.due = now + base_seconds * min(2 ** (self.failures - 1), 30)

    def restart(self, now: float, base_seconds: float) -> None:
        """→ STARTING: read again from the committed position after a batch of unknown outcome."""
        # When a batch failed, was refused, or has no known outcome, or its records do not follow
        # the committed position. Not to READING: the table may have the batch, and then its
        # position is a later one than the committed position here.
        self.state = ConsumerState.STARTING
        self.restarted = True
        self.back_off(now, base_seconds)

    # -- from the last record to the loss of the lease

    def reach_end(self, children: tuple[ChildShard, ...], *, shard_gone: bool) -> None:
        """STARTING or READING → ENDING: all records are committed."""
        # When the last record that was read before the end is in the table, not when the end was
        # read. From STARTING if the table has the end and the row has not: its writer stopped in
        # between.
        self.children, self.shard_gone = children, shard_gone
        self.state = ConsumerState.ENDING

    def end(self) -> None:
        """ENDING or STARTING → ENDED: the row is at SHARD_END."""
        # When the children have rows, then the table has the end, then the row: in this order a
        # crash leaves no shard without a lease. From STARTING if a write of the end was applied and
        # its answer was lost.
        self.committed = self.checkpointed = SHARD_END
        self.state = ConsumerState.ENDED

    def leave(self, now: float) -> None:
        """→ LEAVING. Earlier failures do not delay the handoff."""
        # When the leader has begun a handoff, between two batches. The source has dropped what it
        # read, so nothing more is committed. The checkpoint is written before the transfer.
        self.state = ConsumerState.LEAVING
        self.failures, self.due = 0, now


_ALL_COMMITTED: Final = frozenset({ConsumerState.ENDING, ConsumerState.ENDED})
_WITHOUT_STEPS: Final = frozenset(
    {ConsumerState.READING, ConsumerState.LEAVING, ConsumerState.ENDED}
)
ENDING_ATTEMPTS: Final = 10
ADMISSION_RETRY_SECONDS: Final = 0.5
DELETION_SECONDS: Final = 30.0
"""In this time, and a batch interval, a worker finds out that the stream of a shard is deleted."""
_NOT_CHECKPOINTED: Final = "the lease is released without it, so its last batch may be read again"
_IDENTITY: Final = "look at the identity of the application"


class Lifecycle:
    """Move consumers from state to state, one bounded step per call.

    Only the processing thread calls it, and the main thread after its end. It lets a pool read and
    write the rows of several consumers at once; one thread at a time has a consumer.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        source: Reads the shards.
        make_progress: Creates `progress`; the argument returns the ancestors of a
            shard.
        stored: Asks the table for positions. None: the sink stores none.
        streams: The streams of the leases.
        check_application: Raises if the application has other streams or another sink now.
        map: Runs reads and writes of several lease rows.
        identity: Knows which streams are deleted.

    Attributes:
        progress: Starts shards, commits batches, writes checkpoints.
        consumers: The consumers by lease key.
        parents: Decides when a blocked consumer may start.
        deleted: The streams that are known to be deleted.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        source: BatchSource,
        make_progress: Callable[[Lineage], ProgressStore],
        stored: StoredShards | None,
        streams: LeaseStreams,
        check_application: Callable[[], None],
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
        *,
        identity: StreamIdentityCheck,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._source = source
        self._streams = streams
        self._check_application = check_application
        self._admission_due = 0.0
        self._map = map
        initial = streams.shard_sync_of
        self.parents = ParentCheck(dependencies, leases, initial, stored)
        self.progress = make_progress(self.parents.ancestors_of)
        self._identity = identity
        self.deleted = DeletedStreams(dependencies, identity)
        self._losses = LossCheck(dependencies, initial, stored, self.deleted, map)
        self._finished = FinishedLeases(dependencies, leases)
        self._cleaning = Due(dependencies.clock, CLEANING_SECONDS)
        self._backoff_seconds = dependencies.settings.worker.task_backoff_time_millis / 1000
        self._stop_seconds = dependencies.settings.worker.stop_timeout_millis / 1000
        interval_millis = dependencies.settings.batch.min_batch_interval_millis
        self._deletion_seconds = DELETION_SECONDS + interval_millis / 1000
        self.consumers: dict[str, ShardConsumer] = {}
        sink = dependencies.sink
        self._processors = sink if isinstance(sink, ProcessorCalls) else None

    def positions(self) -> dict[str, str]:
        """Return the committed positions by lease key, without those that are not started yet.

        Any thread may call it.
        """
        return {
            key: str(consumer.committed)
            for key, consumer in dict(self.consumers).items()
            if consumer.committed is not None
        }

    def sync_with_leases(self) -> None:
        """Create consumers for gained leases, and remove those of lost leases.

        Buffered records of a lost lease are dropped at once. If the leader has withdrawn a handoff,
        the consumer is created again. Losses of records are reported.

        Raises:
            OtherApplicationError: The application has other streams or another sink now.
        """
        held = {h.lease.lease_key: h for h in self._leases.held()}
        self.deleted.look(self.consumers, self._may_lose)
        lost: list[LostLease] = []
        without_processor: list[Held] = []
        for key, consumer in list(self.consumers.items()):
            is_lost = held.get(key) is not consumer.held
            is_withdrawn = (
                consumer.state is ConsumerState.LEAVING and not consumer.held.lease.in_handoff
            )
            if is_lost and not consumer.is_at_end:
                is_judged = consumer.stream in self.deleted
                lost.append(LostLease(consumer, not is_judged and self._may_lose(consumer)))
            if is_lost or is_withdrawn:
                self._source.end(key)
                del self.consumers[key]
                without_processor.append(consumer.held)
        if self._processors is not None:
            # After a handoff that was withdrawn, a new processor begins: to this one a shutdown
            # was announced.
            self._processors.lose(without_processor)
        gained = {
            key: one
            for key, one in held.items()
            if key not in self.consumers
            and not one.lease.in_handoff
            and self.reads_stream_of(one.lease)
        }
        if gained and self._admits():
            for key, one in gained.items():
                stream = self._streams.of(one.lease)
                if stream is not None:
                    state = ConsumerState.ENDED if one.lease.ended else ConsumerState.BLOCKED
                    self.consumers[key] = ShardConsumer(one, stream, state=state)
        self._losses.look(lost)

    def _may_lose(self, consumer: ShardConsumer) -> bool:
        """Return whether a shard loses records if its stream is deleted now.

        It does not if the table has all that it had at a read that was at the tip a moment ago. Nor
        if the stream is not known to have existed since this worker started: then it was lost
        before. A stream that was created later is known by the first records of any of its shards.
        """
        if not consumer.is_behind or consumer.loss_reported:
            return False
        reading = self._source.state_of(consumer.lease_key)
        if reading is None or reading.read_at is None:
            stream = consumer.stream
            if not (self._streams.was_opened(stream) or self._identity.was_confirmed(stream)):
                return False
        since = self._dependencies.clock.monotonic() - self._deletion_seconds
        is_at_tip = reading is not None and not reading.behind_millis
        return not (is_at_tip and consumer.is_read(reading, since))

    def _admits(self) -> bool:
        """Return whether leases that were gained before this call may be read.

        An operator may change the streams of an application while no worker holds a lease. A worker
        that was paused meanwhile, or had no lease, would read its old stream for a lease of the new
        one. So the identity record is read after each gain. A record in an unknown format was not
        written by a change of streams. It admits leases.

        Returns:
            False: the record could not be read now. Call again.

        Raises:
            OtherApplicationError: The application has other streams or another sink now.
        """
        now = self._dependencies.clock.monotonic()
        if now < self._admission_due:
            return False
        try:
            self._check_application()
        except UnreadableRowError as error:
            self._dependencies.events(AwsTrouble(_IDENTITY, str(error)))
        except AwsError as error:
            self._dependencies.events(AwsTrouble(_IDENTITY, str(error)))
            self._admission_due = now + ADMISSION_RETRY_SECONDS
            return False
        return True

    def reads_stream_of(self, lease: Lease) -> bool:
        """Return whether the stream of a lease is known, so that the lease can be read."""
        return self._streams.of(lease) is not None

    def waits_for_parents(self, held: Held) -> bool:
        """Return whether the parents of a shard are not finished. Any thread may call it."""
        consumer = self.consumers.get(held.lease_key)
        return (
            consumer is not None
            and consumer.held is held
            and consumer.state is ConsumerState.BLOCKED
            and consumer.parents_reached is not None
        )

    def advance(self, stop: StopSignal) -> None:
        """Run one step of every consumer that is due and needs steps, until `stop` is set.

        A step that fails for any reason is repeated after a wait, and reported. `Watchdog` shows
        its error. Finished leases that no leader deletes are deleted.
        """
        self._delete_finished(stop)
        now = self._dependencies.clock.monotonic()
        due = [
            c
            for c in self.consumers.values()
            if c.state not in _WITHOUT_STEPS and c.due <= now and not self.is_called(c.held)
        ]
        if not due:
            return
        blocked = [c for c in due if c.state is ConsumerState.BLOCKED]
        self.parents.begin_pass()
        parents = dict(
            zip(
                (c.lease_key for c in blocked),
                self._map(self._look_at_parents, blocked),
                strict=True,
            )
        )
        seen = self.progress.look_up(c for c in due if c.state is not ConsumerState.ENDING)
        for consumer in blocked:
            if stop.is_set():
                return
            rows = parents[consumer.lease_key]
            self._attempt(consumer, partial(self._unblock, rows=rows, stored=seen))
        if stop.is_set():
            return
        starting = [c for c in due if c.state is ConsumerState.STARTING and c.due <= now]
        started = self.progress.start(starting, seen) if starting else {}
        if self._processors is not None:
            started = self._with_processors(self._processors, starting, started)
        for consumer in due:
            if stop.is_set():
                return
            if consumer.lease_key in started:
                outcome = started[consumer.lease_key]
                self._attempt(consumer, partial(self._begin, outcome=outcome))
            elif consumer.state is ConsumerState.ENDING:
                self._attempt(consumer, self._lose if consumer.shard_gone else self._end)

    def _delete_finished(self, stop: StopSignal) -> None:
        if self._cleaning.ready():
            ended = [c.held for c in self.consumers.values() if c.state is ConsumerState.ENDED]
            for key in self._finished.delete(ended, stop):
                del self.consumers[key]

    def _with_processors(
        self,
        processors: ProcessorCalls,
        starting: Sequence[ShardConsumer],
        started: Mapping[str, Position | Exception],
    ) -> dict[str, Position | Exception]:
        """Initialize the processors of shards that will be read; leave out those that still run."""
        reading = [
            (c.held, c.stream.name)
            for c in starting
            if isinstance(position := started[c.lease_key], Position) and not position.is_shard_end
        ]
        begun = processors.begin(reading)
        running = {held.lease_key for held, _ in reading} - begun.keys()
        errors = {key: error for key, error in begun.items() if error is not None}
        return {key: one for key, one in {**started, **errors}.items() if key not in running}

    def is_called(self, held: Held) -> bool:
        """Return whether a call of the record processor of a shard has not returned."""
        return self._processors is not None and self._processors.is_busy(held.lease_key)

    def _attempt(self, consumer: ShardConsumer, step: Callable[[ShardConsumer], None]) -> None:
        now = self._dependencies.clock.monotonic()
        try:
            step(consumer)
            consumer.step_succeeded()
        except LeaseLostError as error:
            self._leases.drop(consumer.held, str(error))
        except Exception as error:  # noqa: BLE001 (it must not stop the other shards)
            what = f"{consumer.state} {consumer.lease_key}"
            kind = AwsTrouble if isinstance(error, KclError) else DefectFound
            self._dependencies.events(kind(what, described(error, what)))
            if isinstance(error, NotFoundError):
                self.deleted.find_out(consumer.stream)
            consumer.step_failed(error, now, self._backoff_seconds)
            if consumer.state is ConsumerState.ENDING and consumer.failures >= ENDING_ATTEMPTS:
                # The reported children may have been wrong. Reading again reports them anew.
                self.restart(consumer)

    def _unblock(
        self,
        consumer: ShardConsumer,
        *,
        rows: ParentRows | AwsError,
        stored: Mapping[str, Positions],
    ) -> None:
        if isinstance(rows, AwsError):
            raise rows
        now = self._dependencies.clock.monotonic()
        consumer.note_parents(rows.reached, now)
        if self.parents.may_start(consumer, rows, stored.get(consumer.lease_key)):
            consumer.unblock()
        else:
            poll_millis = self._dependencies.settings.worker.parent_shard_poll_interval_millis
            consumer.due = now + poll_millis / 1000

    def _begin(self, consumer: ShardConsumer, *, outcome: Position | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if outcome.is_shard_end and consumer.held.lease.ended:
            # A write of the end whose answer was lost turned out to have been applied.
            consumer.end()
        elif outcome.is_shard_end:
            # The table has all of it. The rows of its children may have been deleted since.
            consumer.reach_end(self.parents.children_of(consumer), shard_gone=False)
        else:
            consumer.read(self._source.begin)

    def _look_at_parents(self, consumer: ShardConsumer) -> ParentRows | AwsError:
        """Return the parents' rows or the error, so that one error does not delay other shards."""
        try:
            return self.parents.look(consumer)
        except AwsError as error:
            return error

    def restart(self, consumer: ShardConsumer) -> None:
        """Start the shard again, after a batch that failed or has no known outcome."""
        self._source.end(consumer.lease_key)
        consumer.restart(self._dependencies.clock.monotonic(), self._backoff_seconds)

    def _end(self, consumer: ShardConsumer) -> None:
        """Create the children's leases, then write SHARD_END (protocol §6.7).

        In this order a crash between the two leaves no shard without a lease.
        """
        lease = consumer.held.lease
        if consumer.children:
            self._await_keys(lease, consumer.children)
            if any(
                self._dependencies.lease_table.get(lease.key_of_sibling(c.shard_id)) is None
                for c in consumer.children
            ):
                self._create_children(consumer)
            else:
                self._dependencies.lease_table.set_child_shard_ids(
                    lease.lease_key, [c.shard_id for c in consumer.children]
                )
        if not self.progress.end(consumer):
            consumer.is_refused = True
            self.restart(consumer)
            return
        if not self._is_processor_done(consumer.held):
            return
        self._leases.checkpoint(consumer.held, checkpoint=SHARD_END)
        consumer.end()
        self._source.end(lease.lease_key)
        self._dependencies.events(
            ShardEnded(
                self._dependencies.worker_id,
                lease.lease_key,
                tuple(lease.key_of_sibling(c.shard_id) for c in consumer.children),
            )
        )

    def _is_processor_done(self, held: Held) -> bool:
        """Call `shard_ended` of the processor, if there is one; return whether it has returned."""
        return self._processors is None or self._processors.end(held)

    def _await_keys(self, lease: Lease, children: Sequence[ChildShard]) -> None:
        """Wait until no row of a former stream has the key of a child.

        Otherwise the child would get no lease. Only a single stream that was created again has
        lease keys of a former stream. The leader deletes its rows.

        Raises:
            ShardSyncError: There is such a row. Try again later.
        """
        if lease.recreated_millis is None:
            return
        for child in children:
            row = self._dependencies.lease_table.get(lease.key_of_sibling(child.shard_id))
            if row is not None and row.recreated_millis != lease.recreated_millis:
                raise ShardSyncError(
                    f"{row.lease_key} is still the key of a lease of the former stream; the leader "
                    f"deletes that, then the child of {lease.lease_key} gets it"
                )

    def _create_children(self, consumer: ShardConsumer) -> None:
        """Create the children's leases, unless their stream was begun behind the only child.

        Then the other parent of this merge and the child never get a lease.
        """
        lease = consumer.held.lease
        parents = {parent for child in consumer.children for parent in child.parents}
        existing = frozenset(
            p
            for p in parents
            if p == lease.shard_id
            or self._dependencies.lease_table.get(lease.key_of_sibling(p)) is not None
        )
        try:
            successors = child_leases(lease, consumer.children, existing=existing)
        except ShardSyncError:
            if not self.parents.is_passed_over(consumer, consumer.children[0].shard_id):
                raise
            return
        self._leases.create_successors(
            consumer.held, with_read_up_to(successors, self._read_up_to(consumer))
        )

    def _read_up_to(self, consumer: ShardConsumer) -> int | None:
        """Return a time that all records of a shard that has ended arrived by, if it is known."""
        reading = self._source.state_of(consumer.lease_key)
        known = (
            consumer.held.read_up_to_millis,
            None if reading is None else reading.read_up_to_millis,
        )
        return max((millis for millis in known if millis is not None), default=None)

    def _lose(self, consumer: ShardConsumer) -> None:
        """Report a shard that its stream does not list any more, and delete its row.

        Leases of the shards that follow are created. SHARD_END is not written, because it would
        claim that all records of the shard are in the table.
        """
        lease = consumer.held.lease
        if not consumer.loss_reported:
            self._dependencies.events(
                RecordsLost(
                    self._dependencies.worker_id,
                    lease.lease_key,
                    LossReason.SHARD_NOT_LISTED,
                    after=consumer.committed,
                    stream=consumer.stream.name,
                )
            )
            consumer.loss_reported = True
        self._await_keys(lease, consumer.children)
        if following := leases_after_loss(lease, consumer.children):
            self._leases.create_successors(consumer.held, following)
        self._leases.delete(consumer.held)
        self._source.end(lease.lease_key)
        del self.consumers[lease.lease_key]
        if self._processors is not None:
            self._processors.lose([consumer.held])

    def hand_over(self) -> int:
        """Complete the handoffs that the leader has begun; return how many leases left.

        The processing thread is between batches here. A consumer is kept until its lease has left.
        If its checkpoint cannot be written, a later call writes it before the transfer.
        """
        now = self._dependencies.clock.monotonic()
        leaving: list[tuple[Held, ShardConsumer | None]] = []
        for held in self._leases.handoffs():
            consumer = self.consumers.get(held.lease_key)
            if consumer is not None and consumer.state is not ConsumerState.LEAVING:
                self._source.end(held.lease_key)
                consumer.leave(now)
            if consumer is None or consumer.due <= now:
                leaving.append((held, consumer))
        if self._processors is not None:
            self._processors.leave([held for held, _ in leaving])
            leaving = [(held, consumer) for held, consumer in leaving if not self.is_called(held)]
        return sum(self._map(self._hand_over, leaving))

    def _hand_over(self, leaving: tuple[Held, ShardConsumer | None]) -> bool:
        held, consumer = leaving
        try:
            return self._leases.complete_handoff(held)  # with the checkpoint
        except LeaseLostError as error:
            self._leases.drop(held, str(error))
        except AwsError as error:
            self._dependencies.events(AwsTrouble(f"handoff of {held.lease.lease_key}", str(error)))
            if consumer is not None:
                consumer.step_failed(
                    error, self._dependencies.clock.monotonic(), self._backoff_seconds
                )
        return False

    def flush(self) -> None:
        """Write the checkpoints that are due (`ProgressStore.flush_due`)."""
        now = self._dependencies.clock.monotonic()
        waiting = [
            c
            for c in self.consumers.values()
            if c.flush_needed
            and c.state is not ConsumerState.LEAVING
            and self.progress.flush_due(c, now)
            and c.due <= now
        ]
        list(self._map(self._flush, waiting))

    def _flush(self, consumer: ShardConsumer) -> None:
        try:
            self.progress.checkpoint(consumer)
        except LeaseLostError as error:
            self._leases.drop(consumer.held, str(error))
        except AwsError as error:
            self._dependencies.events(AwsTrouble(f"checkpoint of {consumer.lease_key}", str(error)))
            consumer.back_off(self._dependencies.clock.monotonic(), self._backoff_seconds)

    def release_all(
        self,
        *,
        last: bool = True,
        map: MapCallable = serial_map,  # noqa: A002
    ) -> None:
        """Write checkpoints and release all leases through `map`, at the end of a worker.

        A lease whose checkpoint could not be written is kept for the next call. The `last` call
        releases it without the checkpoint. Then a Java worker, or a function as the sink, gets the
        last batch again.
        """
        for key in self.consumers:
            self._source.end(key)
        released = [consumer.held for consumer in self.consumers.values()]
        if self._processors is not None:
            self._processors.leave(released, self._stop_seconds)
        list(map(self._flush, [c for c in self.consumers.values() if c.flush_needed]))
        kept = {
            key: consumer
            for key, consumer in self.consumers.items()
            if consumer.flush_needed and self._leases.get(key) is consumer.held
        }
        self.consumers.clear()
        if last:
            for key in kept:
                self._dependencies.events(
                    AwsTrouble(f"last checkpoint of {key}", _NOT_CHECKPOINTED)
                )
        else:
            self.consumers.update(kept)
        list(
            map(
                self._release, [h for h in self._leases.held() if h.lease_key not in self.consumers]
            )
        )
        if self._processors is not None:
            self._processors.lose(released, self._stop_seconds)

    def _release(self, held: Held) -> None:
        try:
            if self._dependencies.settings.lease.release_leases_on_shutdown:
                self._leases.release(held)
            else:
                self._leases.drop(held, "the worker stopped")
        except (AwsError, LeaseLostError) as error:
            self._dependencies.events(AwsTrouble(f"release of {held.lease.lease_key}", str(error)))

"""Move shard consumers from the gain of their lease to its end (protocol §6.6, §6.7, §6.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError, KclError, LeaseLostError, ShardSyncError
from kcl_pipeline.events import (
    AwsTrouble,
    DefectFound,
    LossReason,
    RecordsLost,
    ShardEnded,
)
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.shard_sync import child_leases, leases_after_loss, with_read_up_to
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.sinks.sink import Positions
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.commit import BatchCommit
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.shards.admission import Admission
from kcl_pipeline.worker.shards.ended import EndedLeases
from kcl_pipeline.worker.shards.losses import LossCheck
from kcl_pipeline.worker.shards.parents import Lineage, ParentCheck, ParentRows
from kcl_pipeline.worker.shards.streams import LeaseStreams
from kcl_pipeline.worker.sources.batch_source import BatchSource

ENDING_ATTEMPTS: Final = 10
_NOT_CHECKPOINTED: Final = "the lease is released without it, so its last batch may be read again"
_WITHOUT_STEPS: Final = frozenset(
    {ConsumerState.READING, ConsumerState.LEAVING, ConsumerState.ENDED}
)


class Lifecycle:
    """Move consumers from state to state, one bounded step per call.

    Only the processing thread uses it.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        source: Reads the shards.
        make_commit: Creates the commit of this worker; the argument returns the ancestors of a
            shard.
        stored: Asks the table for positions. None: the sink stores none.
        streams: The streams of the leases.
        check_application: Raises if the application has other streams or another sink now.
        map: Runs reads and writes of several lease rows.

    Attributes:
        commit: Starts shards, commits batches, writes checkpoints.
        consumers: The consumers by lease key.
        parents: Decides when a blocked consumer may start.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        source: BatchSource,
        make_commit: Callable[[Lineage], BatchCommit],
        stored: StoredShards | None,
        streams: LeaseStreams,
        check_application: Callable[[], None],
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._source = source
        self._streams = streams
        self._admission = Admission(dependencies, check_application)
        self._map = map
        initial = streams.shard_sync_of
        self.parents = ParentCheck(dependencies, leases, initial, stored)
        self.commit = make_commit(self.parents.ancestors_of)
        self._losses = LossCheck(dependencies, initial, stored)
        self._ended = EndedLeases(dependencies, leases)
        self._backoff_seconds = dependencies.settings.worker.task_backoff_time_millis / 1000
        self._stop_seconds = dependencies.settings.worker.stop_timeout_millis / 1000
        self.consumers: dict[str, ShardConsumer] = {}
        sink = dependencies.sink
        self._processors = sink if isinstance(sink, ProcessorCalls) else None

    def positions(self) -> dict[str, str]:
        """Return the committed positions by lease key, without those that are not started yet."""
        return {
            key: str(consumer.committed)
            for key, consumer in self.consumers.items()
            if consumer.committed is not None
        }

    def sync_with_leases(self) -> None:
        """Create consumers for gained leases, and remove those of lost leases.

        Buffered records of a lost lease are dropped at once. If the leader has withdrawn a handoff,
        the consumer is created again.

        Raises:
            OtherApplicationError: The application has other streams or another sink now.
        """
        held = {h.lease.lease_key: h for h in self._leases.held()}
        lost: list[ShardConsumer] = []
        without_processor: list[Held] = []
        for key, consumer in list(self.consumers.items()):
            is_lost = held.get(key) is not consumer.held
            is_withdrawn = (
                consumer.state is ConsumerState.LEAVING and not consumer.held.lease.in_handoff
            )
            if is_lost or is_withdrawn:
                self._source.end(key)
                del self.consumers[key]
                without_processor.append(consumer.held)
            if is_lost:
                lost.append(consumer)
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
        if gained and self._admission.admits():
            for key, one in gained.items():
                stream = self._streams.of(one.lease)
                if stream is not None:
                    state = ConsumerState.ENDED if one.lease.ended else ConsumerState.BLOCKED
                    self.consumers[key] = ShardConsumer(one, stream, state)
        list(self._map(self._losses.look, lost))

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

        A step that fails for any reason is repeated after a wait, and reported. `StallWatch` shows
        its error. Finished leases that nobody deletes are deleted.
        """
        self._ended.clean(self.consumers, stop, self.consumers.pop)
        now = self._dependencies.clock.monotonic()
        due = [
            c
            for c in self.consumers.values()
            if c.state not in _WITHOUT_STEPS and c.due <= now and not self._is_called(c.held)
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
        seen = self.commit.look_up(c for c in due if c.state is not ConsumerState.ENDING)
        for consumer in blocked:
            if stop.is_set():
                return
            rows = parents[consumer.lease_key]
            self._attempt(consumer, partial(self._unblock, rows=rows, stored=seen))
        if stop.is_set():
            return
        starting = [c for c in due if c.state is ConsumerState.STARTING and c.due <= now]
        started = self.commit.start(starting, seen) if starting else {}
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

    def _is_called(self, held: Held) -> bool:
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
        if not self.commit.end(consumer):
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
            leaving = [(held, consumer) for held, consumer in leaving if not self._is_called(held)]
        return sum(self._map(self._hand_over, leaving))

    def _hand_over(self, leaving: tuple[Held, ShardConsumer | None]) -> bool:
        held, consumer = leaving
        try:
            if consumer is not None and consumer.held is held:
                self.commit.checkpoint(consumer)
            return self._leases.complete_handoff(held)
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
        """Write the checkpoints that are due (`BatchCommit.flush_due`)."""
        now = self._dependencies.clock.monotonic()
        waiting = [
            c
            for c in self.consumers.values()
            if c.flush_needed
            and c.state is not ConsumerState.LEAVING
            and self.commit.flush_due(c, now)
            and c.due <= now
        ]
        list(self._map(self._flush, waiting))

    def _flush(self, consumer: ShardConsumer) -> None:
        try:
            self.commit.checkpoint(consumer)
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

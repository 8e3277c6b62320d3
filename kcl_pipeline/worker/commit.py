"""Commit batches exactly once.

The table of the sink stores, per shard, a number v, the position p of the last row, and whether the
shard has ended. One commit adds the files of a batch and moves p to the end of each of its ranges.
It is refused unless v, p and the id of the table are those that this worker read before it wrote
the files. So a paused worker cannot commit a range again. Safety depends neither on the lease row,
nor on its counter, nor on who holds the lease.

A lease goes through these steps, which are the methods of `ProgressStore` in their order:

1. `start`. The worker has read the row; it reads the table, and continues after the later one of
   the checkpoint C and p. C is ahead of p only if a Java worker has processed the records between
   the two, or the table has no position. Then the row is renewed first: if a seek has changed it
   since it was read, the renewal is refused, and row and table are read again.
2. `advance`. A batch is committed. The first commit of a child shard also ends each ancestor that
   the table does not show as ended. So no row of an ancestor lands after a row of a descendant.
3. `end`. The table learns that the shard has ended before the row does.
4. `checkpoint`. The row gets p, for workers of the Java KCL and for the next start. Renewals write
   it; a handoff, a stop and the end of the shard flush it.

The row also has a *mark*: the last checkpoint that was written by this package and that the table
had. If p is before the mark, the table is an older copy, or another one, and the lease stops.

With a user's function as the sink nothing is stored. Its positions are those that this process has
committed since it took the lease, and its checkpoints follow each batch. Record processors write
their checkpoints themselves, and this module writes none.

See docs/architecture.md, "Exactly once".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kcl_pipeline.batch import Batch
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import (
    AwsError,
    CommitStoppedError,
    OtherTableError,
    SinkError,
    TableMismatchError,
)
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.position import (
    LATEST,
    NOTHING_STORED,
    SHARD_END,
    TRIM_HORIZON,
    Position,
    StoredPosition,
)
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import (
    CommitOutcome,
    FileKeepingSink,
    Positions,
    Sink,
    shard_key,
)
from kcl_pipeline.threads import (
    MapCallable,
    RetryPolicy,
    StoppedWhileRetryingError,
    retry_transient,
    serial_map,
)

COMMIT: Final = RetryPolicy(
    120.0,
    first_wait_seconds=0.25,
    longest_wait_seconds=2.0,
    transient=(SinkError,),
    permanent=(TableMismatchError,),
)
Answer = TypeVar("Answer")

_LOST: Final = "the lease was lost before the commit"
_OVERTAKEN: Final = "the table has another commit; row and table are read again"
_CURE: Final = (
    "put the table back, or choose where the shard continues with `kcl-pipeline do seek`, or "
    "delete the lease row: then the shard continues after its position in the present table"
)


@dataclass(slots=True)
class ShardProgress:
    """What the table and the lease row have of one held shard, as this worker knows it.

    Attributes:
        held: The lease.
        stream: Its stream.
        committed: Last position that the table has (inclusive). None: not started yet.
        checkpointed: Last position in the lease row. It may be behind `committed`, because renewals
            write the checkpoint.
        table_id: Id of the table that this worker read. None: there was no table.
        stored: What the table has of the shard, as this worker last read or committed it.
        ancestors: What the table has of the ancestors, until the first commit of this shard.
        is_refused: Whether the table refused the last batch. The row is then read again.
        moved_at: When the last batch was committed or a parent last moved (monotonic seconds).
    """

    held: Held
    stream: StreamId
    committed: Position | None = None
    checkpointed: Position | None = None
    table_id: str | None = None
    stored: StoredPosition = NOTHING_STORED
    ancestors: dict[str, StoredPosition] = field(default_factory=dict)
    is_refused: bool = False
    moved_at: float = float("-inf")

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.held.lease.lease_key

    @property
    def flush_needed(self) -> bool:
        """Whether the checkpoint in the lease row is behind the table.

        A renewal may have written it since.
        """
        written = (self.checkpointed, self.held.lease.checkpoint)
        return self.committed is not None and self.committed not in written

    def settled_position(self) -> Position:
        """Return the position after which reading begins (exclusive).

        Raises:
            ValueError: The shard is not started yet.
        """
        if self.committed is None:
            raise ValueError(f"the lease {self.lease_key} has no position yet")
        return self.committed

    @property
    def reached(self) -> Position | None:
        """The committed position. None: not known yet, or no record."""
        committed = self.committed
        return None if committed is None or committed.is_sentinel else committed

    @property
    def knows_ancestor(self) -> bool:
        """Whether the table knows an ancestor of this shard."""
        return any(stored != NOTHING_STORED for stored in self.ancestors.values())

    def unended_ancestors(self) -> dict[str, StoredPosition]:
        """Return the ancestors that the first commit of the shard ends."""
        return {key: stored for key, stored in self.ancestors.items() if not stored.ended}

    def settle(self, position: Position, checkpointed: Position) -> None:
        """Set the position after which the shard is read, and the checkpoint of the row."""
        self.committed, self.checkpointed = position, checkpointed
        self.is_refused = False

    def note_committed(self, through: Position, stored: StoredPosition, now: float) -> None:
        """Note a commit that has landed, at a monotonic second."""
        self.committed, self.stored, self.ancestors = through, stored, {}
        self.moved_at = now

    def note_checkpointed(self) -> None:
        """Note that the lease row has the committed position."""
        self.checkpointed = self.committed


@dataclass(frozen=True, slots=True)
class AdvanceResult:
    """The outcome of a commit.

    Attributes:
        landed: Whether all ranges of the batch are in the table. If they are not, and nothing is
            refused, the files must be written again: they may have been removed before the table
            was created.
        version: A version of the table that has the commit. None: it did not land, or there is no
            table because no batch has had a row yet.
        refused: Why shards prevented the commit, by lease key.
    """

    landed: bool
    version: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


class ProgressStore:
    """Keeps the progress of a worker's shards in the table and in their lease rows.

    The processing thread uses it, and lets a pool read and write the rows of several shards at
    once; one thread at a time has a shard.

    Args:
        leases: The leases of this worker.
        sink: Where batches are committed.
        lineage: Returns the ancestors of a shard that its stream lists. Raises `AwsError`.
        clock: Limits the time of retries.
        events: Receives failed attempts.
        rng: Spreads the waits of workers that fail together.
        stop: Ends the waits. None: nothing ends them early.
        map: Runs the renewals of several rows.
        flush_seconds: Longest time between a commit and its checkpoint. None: renewals write all
            checkpoints.
    """

    def __init__(
        self,
        leases: HeldLeases,
        sink: Sink,
        lineage: Callable[[ShardProgress], Collection[str]],
        clock: Clock,
        events: EventSink,
        *,
        rng: random.Random,
        stop: StopSignal | None = None,
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
        flush_seconds: float | None = None,
    ) -> None:
        self._leases = leases
        self._sink = sink
        self._lineage = lineage
        self._clock = clock
        self._events = events
        self._rng = rng
        self._stop = stop or clock.signal()
        self._map = map
        self._flush_seconds = flush_seconds if sink.stores_positions else 0.0
        self._writes_checkpoints = not isinstance(sink, ProcessorCalls)

    # -- 1. start

    def look_up(self, consumers: Iterable[ShardProgress]) -> dict[str, Positions]:
        """Return what the table has of each shard, by lease key. One read covers all of them.

        Call it after the rows of the leases were read.

        Returns:
            Nothing for a shard that has no key. Empty: the table cannot be read now.
        """
        keys: dict[str, str] = {}
        for consumer in consumers:
            try:
                keys[consumer.lease_key] = _key(consumer)
            except SinkError as error:
                self._events(AwsTrouble(f"key of {consumer.lease_key} in the sink", str(error)))
        try:
            table = self._sink.positions(list(keys.values())) if keys else Positions(None)
        except SinkError as error:
            self._events(AwsTrouble("reading of the positions in the table", str(error)))
            return {}
        return {
            lease_key: Positions(table.table_id, {key: table.shards[key]})
            for lease_key, key in keys.items()
        }

    def start(
        self, consumers: Sequence[ShardProgress], looked_up: Mapping[str, Positions]
    ) -> dict[str, Position | Exception]:
        """Find out where shards are read from.

        Args:
            consumers: The shards, whose parents have ended. Their rows are as this worker last read
                or wrote them.
            looked_up: From `look_up`.

        Returns:
            By lease key, the position after which the shard is read (exclusive); SHARD_END if it
            has ended. Or the error: `LeaseLostError` if the row was refused, `OtherTableError` if
            the table is not the one that the row was written for, `SinkError` or `AwsError` if
            nothing is decided and the caller tries again.
        """
        outcomes: dict[str, Position | Exception] = {}
        ready: list[ShardProgress] = []
        for consumer in consumers:
            try:
                self._read_table(consumer, looked_up.get(consumer.lease_key))
                ready.append(consumer)
            except (AwsError, SinkError) as error:
                outcomes[consumer.lease_key] = error
        positions = self._map(self._position_or_error, ready)
        return outcomes | dict(zip((c.lease_key for c in ready), positions, strict=True))

    def _read_table(self, consumer: ShardProgress, table: Positions | None) -> None:
        """Note what the table has of a shard, and of the ancestors that its first commit ends."""
        key = _key(consumer)
        table = table or self._sink.positions([key])
        stored, ancestors = table.shards[key], dict[str, StoredPosition]()
        if self._sink.stores_positions and not stored.has_begun and table.table_id is not None:
            keys = [shard_key(consumer.stream, name) for name in sorted(self._lineage(consumer))]
            if keys:
                now = self._sink.positions(keys)
                if now.table_id != table.table_id:
                    raise SinkError("the table was replaced while it was read; it is read again")
                ancestors = dict(now.shards)
        consumer.table_id, consumer.stored, consumer.ancestors = table.table_id, stored, ancestors

    def _position_or_error(self, consumer: ShardProgress) -> Position | Exception:
        try:
            return self._position_of(consumer)
        except Exception as error:  # noqa: BLE001 (one error does not delay other shards)
            return error

    def _position_of(self, consumer: ShardProgress) -> Position:
        lease, stored, in_table = consumer.held.lease, consumer.stored, consumer.stored.position
        stores_positions = self._sink.stores_positions
        if not stores_positions:
            in_table = consumer.reached
        is_older = stores_positions and _is_older(lease.table_mark, in_table)
        if stored.ended and not is_older:
            return SHARD_END
        if is_older or in_table is None or lease.checkpoint > in_table or consumer.is_refused:
            # The checkpoint of the row decides. It may be one of before a seek, like the mark. A
            # seek removes the mark first, and then the position. If it has changed the row since
            # this worker read it, the renewal is refused, and the lease does not stop.
            lease = self._leases.renew(consumer.held)
        # The mark is checked after the renewal: meanwhile a renewal of another thread, or one whose
        # response was lost, may have written a position that only the former table had.
        if stores_positions and _is_older(lease.table_mark, in_table):
            raise OtherTableError(
                f"{lease.lease_key} stands still: its row was written when the table had the "
                f"position {lease.table_mark}, and the table has "
                f"{'none' if in_table is None else in_table}: it is an older copy, or another "
                f"table; {_CURE}"
            )
        position = checkpoint = lease.checkpoint
        if in_table is not None:
            position = max(position, in_table)
            self._note_processed(consumer, in_table)
        elif position == LATEST and stored == NOTHING_STORED and consumer.knows_ancestor:
            # A leader that does not ask the table has created the row.
            position = checkpoint = TRIM_HORIZON
        consumer.settle(position, checkpoint if self._writes_checkpoints else position)
        return position

    # -- 2. advance

    def advance(self, batch: Batch, consumers: Mapping[str, ShardProgress]) -> AdvanceResult:
        """Commit a written batch, with all of its ranges or none.

        Raises:
            ValueError: The batch is not written.
            CommitStoppedError: The worker stops.
            SinkError: The outcome is unknown. The shards must be started again.
        """
        # `sources.joined` has taken only chunks that follow what is committed, and only this thread
        # moves that.
        batched = [(consumers[one.lease_key], one.through) for one in batch.ranges]
        new = [c for c, _ in batched if c.table_id is None]
        refused, must_rewrite = self._ensure_table(new, batch)
        if refused or must_rewrite:
            return AdvanceResult(landed=False, refused=refused)
        table_id = batched[0][0].table_id
        expected, becomes, refused = _entries(batched, table_id)
        if refused:
            return AdvanceResult(landed=False, refused=refused)

        def attempt() -> AdvanceResult:
            lost = {c.lease_key: _LOST for c, _ in batched if not self._holds(c)}
            if lost:
                return AdvanceResult(landed=False, refused=lost)
            if table_id is None:  # No batch has had a row yet: there is nothing to store.
                return AdvanceResult(landed=True)
            outcome = self._sink.commit(
                table_id, batch.written_files, expected, becomes, batch.output_schema
            )
            others = {c.lease_key: _OVERTAKEN for c, _ in batched if _is_refused(c, outcome)}
            return AdvanceResult(outcome.version is not None, outcome.version, others)

        # The sink repeats what others have overtaken. Here a call that failed is repeated.
        result = self._retried(f"commit of the batch {batch.batch_id}", attempt)
        if result.landed:
            now = self._clock.monotonic()
            for consumer, through in batched:
                stored = consumer.stored if table_id is None else becomes[_key(consumer)]
                consumer.note_committed(through, stored, now)
                self._note_processed(consumer, through)
                if not self._writes_checkpoints:
                    consumer.note_checkpointed()
        return result

    def _ensure_table(
        self, new: Sequence[ShardProgress], batch: Batch
    ) -> tuple[dict[str, str], bool]:
        """Create the table if it did not exist when shards were started.

        Returns:
            The shards that another worker has begun in it. And whether the files must be written
            again: they precede the id of the table, and may have been in the folder of a former
            one, which was removed with them. After the id was read, files that exist are in the
            folder of this table: one that replaces it has another id, which refuses the commit.
        """
        if not new:
            return {}, False
        files, schema = batch.written_files, batch.output_schema
        if schema is not None:
            self._retried("creation of the table", lambda: self._sink.ensure(schema))
        refused = self._read_new_table(new)
        if new[0].table_id is None or not files:
            return refused, False
        sink = self._sink
        return refused, not (isinstance(sink, FileKeepingSink) and sink.has_files(files))

    def _read_new_table(self, new: Sequence[ShardProgress]) -> dict[str, str]:
        """Note the id of the table, and the ancestors that the first commits end.

        Returns:
            The shards that another worker has begun in it.
        """
        looked_up, refused = self.look_up(new), dict[str, str]()
        for consumer in new:
            expected = consumer.stored
            try:
                self._read_table(consumer, looked_up.get(consumer.lease_key))
            except AwsError as error:
                raise SinkError(f"ancestors of {consumer.lease_key}: {error}") from error
            if consumer.stored != expected:
                refused[consumer.lease_key] = _OVERTAKEN
        return refused

    # -- 3. end

    def end(self, consumer: ShardProgress) -> bool:
        """Note in the table that it has all records of the shard. SHARD_END is written after this.

        Returns:
            False: the table has another commit. The shard must be started again.

        Raises:
            SinkError: The outcome is unknown. Call again.
        """
        if not self._sink.stores_positions or consumer.stored.ended:
            return True
        if consumer.table_id is None and self._read_new_table([consumer]):
            return False
        if consumer.table_id is None:
            return True
        position = consumer.reached or consumer.stored.position
        key, expected = _key(consumer), consumer.unended_ancestors()
        becomes = {name: old.moved(old.position, ended=True) for name, old in expected.items()}
        expected[key], becomes[key] = consumer.stored, consumer.stored.moved(position, ended=True)
        outcome = self._sink.commit(consumer.table_id, (), expected, becomes)
        if outcome.version is None:
            return False
        consumer.stored = becomes[key]
        return True

    # -- 4. checkpoint

    def checkpoint(self, consumer: ShardProgress) -> None:
        """Write the committed position to the lease row, unless it is there already.

        Raises:
            LeaseLostError: Another worker has the lease.
            AwsError: The lease row cannot be written now. Call again.
        """
        if consumer.committed is None or not consumer.flush_needed:
            return
        self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        consumer.note_checkpointed()

    def flush_due(self, consumer: ShardProgress, now: float) -> bool:
        """Return whether a checkpoint that is behind the table must be written now.

        Args:
            consumer: The shard.
            now: Monotonic seconds.
        """
        since = now - consumer.held.checkpointed_at
        return self._flush_seconds is not None and since >= self._flush_seconds

    def _note_processed(self, consumer: ShardProgress, position: Position) -> None:
        """Let the next renewal write the checkpoint; with the mark, if a table has the position."""
        if not self._writes_checkpoints:
            return
        in_table = self._sink.stores_positions and consumer.table_id is not None
        self._leases.note_processed(consumer.held, position, in_table=in_table)

    def _holds(self, consumer: ShardProgress) -> bool:
        return self._leases.get(consumer.lease_key) is consumer.held

    def _retried(self, what: str, step: Callable[[], Answer]) -> Answer:
        try:
            return retry_transient(
                what, step, self._clock, self._rng, self._events, self._stop, COMMIT
            )
        except StoppedWhileRetryingError as error:
            raise CommitStoppedError(str(error)) from error


def _key(consumer: ShardProgress) -> str:
    return shard_key(consumer.stream, consumer.held.lease.shard_id)


def _is_older(mark: Position | None, in_table: Position | None) -> bool:
    return mark is not None and (in_table is None or in_table < mark)


def _entries(
    batched: Sequence[tuple[ShardProgress, Position]], table_id: str | None
) -> tuple[dict[str, StoredPosition], dict[str, StoredPosition], dict[str, str]]:
    """Return what a commit expects and sets by key, and the shards that cannot be part of it."""
    refused = {c.lease_key: _OVERTAKEN for c, _ in batched if c.table_id != table_id}
    expected = {_key(c): c.stored for c, _ in batched}
    becomes = {_key(c): c.stored.moved(through) for c, through in batched}
    for consumer, _ in batched:
        for key, stored in consumer.unended_ancestors().items():
            # Two children share the end of their parent. A parent that is itself in the batch
            # would be set twice.
            expected.setdefault(key, stored)
            if not becomes.setdefault(key, stored.moved(stored.position, ended=True)).ended:
                refused[consumer.lease_key] = "an ancestor is in the same batch"
    return expected, becomes, refused


def _is_refused(consumer: ShardProgress, outcome: CommitOutcome) -> bool:
    """Return whether a shard caused a refusal, itself or by an ancestor."""
    return not {_key(consumer), *consumer.ancestors}.isdisjoint(outcome.refused)

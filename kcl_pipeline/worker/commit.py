"""The commit protocol: prepare, commit, checkpoint; and what a taker does with a batch that its
predecessor left in flight.

Per lease the sink's log keeps two numbers, data and fence. For each batch:

1. *Prepare*: the lease row gets `pendingCheckpoint` = the end of the range and a number n that no
   other write of this row has (its own counter), and behind it the numbers that step 2 expects.
2. *Commit*: the files enter the log in one commit that sets data = n for every lease, and is
   refused unless both numbers are what this worker last saw.
3. *Checkpoint*: `checkpoint` moves to the end. It rides on the next batch's prepare, or is flushed
   when the shard idles or leaves.

A taker that finds a pending checkpoint with number n asks the log: data = n means that the batch
landed. Otherwise it first writes a *fence*, which refuses the old owner's commit for ever, and only
then reads the range again. Design §3 says why each step is needed; `docs/guarantees.md` lists what
was searched and tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from kcl_pipeline.batch import (
    Batch,
    BatchWriter,
    CommitEntry,
    CommitOutcome,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import (
    CommitStoppedError,
    InvalidRequestError,
    LeaseLostError,
    SinkError,
    TableMismatchError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import AwsTrouble, BatchRefused, EventSink, PendingResolved
from kcl_pipeline.leases.held import HeldLeases, pending_number
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.position import Position
from kcl_pipeline.worker.batches import without
from kcl_pipeline.worker.consumer import ShardConsumer

MAX_ATTEMPTS = 60
RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 2.0
_NOT_WRITTEN = "the lease could not be written before it expired"


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that landed: the leases it covers, the table version (None when found landed by its
    numbers) and milliseconds by phase.
    """

    lease_keys: tuple[str, ...]
    rows: int
    version: int | None
    milliseconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Prepare:
    """A prepare that is to be written: the lease, and the last position of its range."""

    consumer: ShardConsumer
    end: Position


class Committer:
    """Runs the protocol for the leases of one worker. Not thread-safe: only the processing thread
    uses it.

    `map` makes the writes of a batch's lease rows, which know nothing of each other: on several
    threads where that is allowed. `beside` is a thread on which they are made while the batch is
    still being written; None: they follow. `pause` waits so many seconds before another attempt and
    says whether the worker stops; None: it does not stop while it commits.
    """

    def __init__(
        self,
        leases: HeldLeases,
        sink: TransactionalSink,
        writer: BatchWriter,
        clock: Clock,
        events: EventSink,
        worker_id: str,
        *,
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
        beside: Executor | None = None,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._leases = leases
        self._sink = sink
        self._writer = writer
        self._clock = clock
        self._events = events
        self._worker_id = worker_id
        self._map = map
        self._beside = beside
        self._pause = pause or self._sleep
        self._table_known = False
        self._schema: pa.Schema | None = None

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """The table's numbers of these leases in one reading, for `resolve`; empty when the sink
        cannot be read now. Their rows were read before.
        """
        keys = [consumer.lease_key for consumer in consumers]
        try:
            return self._sink.numbers(keys) if keys else {}
        except SinkError as error:
            self._events(AwsTrouble("numbers", str(error)))
            return {}

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """Settle what the previous owner left; afterwards the shard is read after the returned
        position (exclusive).

        `seen` are the numbers of `look_up`, made after the consumer's row was read; None reads them
        now. Others may have moved them on since: whatever is concluded from them is either true for
        ever, or refused by the fence or the commit that expects them. Raises `LeaseLostError`,
        `SinkError`, `ThrottledError`, `UnavailableError`: call again later, nothing has been
        decided.
        """
        lease = consumer.held.lease
        key = lease.lease_key
        consumer.prepared = None
        numbers = seen if seen is not None else self._sink.numbers([key])[key]
        position = lease.checkpoint
        if lease.pending_checkpoint is not None and not lease.ended:
            number = pending_number(lease)
            landed = number is not None and numbers.data == number
            while not landed:
                fenced = self._sink.fence(key, numbers)
                if fenced is not None:
                    numbers = fenced
                    break
                numbers = self._sink.numbers([key])[key]
                landed = number is not None and numbers.data == number
            if landed:
                position = max(position, lease.pending_checkpoint)
                self._leases.checkpoint(consumer.held, checkpoint=position)
            self._events(PendingResolved(self._worker_id, key, landed))
        consumer.numbers = numbers
        consumer.committed = consumer.checkpointed = position
        return position

    @contextmanager
    def preparing(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> Iterator[None]:
        """Prepare the batch while its files are written within, if that may be: a prepare needs
        only where the ranges end.

        What goes wrong with a prepare is met again, and dealt with, by `commit`. A batch whose
        files fail stays prepared, as after a crash in between: `resolve` settles it. Not before the
        table exists, because a fence needs a log to stand in.
        """
        if self._beside is None or not self._table_known:
            yield
            return
        done = self._beside.submit(self._prepare_all, batch, consumers)
        try:
            yield
        finally:
            wait([done])

    def commit(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> Committed | None:
        """Prepare and commit; returns None when no lease of the batch is left.

        `consumers` maps each lease key of the batch to its state, which is brought up to date.
        Leases that turn out to be lost are removed from it and dropped, and the batch is written
        again without them. Raises `SinkError` when the sink stays unusable.
        """
        timings: dict[str, float] = {}
        self._schema = written.schema if written.schema is not None else self._schema
        if self._schema is None:
            return self._pass_over(batch, consumers)
        if not self._table_known:
            self._sink.ensure_table(self._schema)
            self._table_known = True
        for _ in range(len(batch.ranges) + 1):
            with self._timed(timings, "prepare"):
                lost = self._prepare_all(batch, consumers)
            if not lost:
                with self._timed(timings, "commit"):
                    with_schema = replace(written, schema=self._schema)
                    landed, version, lost = self._land(batch, consumers, with_schema)
                if landed:
                    self._note_landed(batch, consumers)
                    return Committed(
                        tuple(r.lease_key for r in batch.ranges), written.rows, version, timings
                    )
            self._drop(batch, consumers, lost)
            batch = without(batch, lost)
            if not batch.ranges:
                return None
            with self._timed(timings, "rewrite"):
                written = self._writer.write(batch)
                self._schema = written.schema if written.schema is not None else self._schema
        raise SinkError(f"batch {batch.batch_id} was refused more often than it has leases")

    def _pass_over(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> Committed | None:
        """Move past ranges without records when no columns are known to create the table with.

        Nothing of these leases can be in flight, since this worker prepares nothing before it has
        a table, so a checkpoint is enough.
        """
        lost = {
            part.lease_key: "the lease expired before the commit"
            for part in batch.ranges
            if not self._holds(consumers[part.lease_key])
        }
        if lost:
            self._drop(batch, consumers, lost)
        passed = without(batch, lost)
        now = self._clock.monotonic()
        for part in passed.ranges:
            consumer = consumers[part.lease_key]
            consumer.committed, consumer.last_commit = part.through, now
            consumer.set_aside.clear()
        keys = tuple(part.lease_key for part in passed.ranges)
        return Committed(keys, 0, None, {}) if keys else None

    def flush(self, consumer: ShardConsumer) -> None:
        """Step 3 on its own: bring the lease row up to what the table has. Raises `LeaseLostError`,
        `ThrottledError`, `UnavailableError`.

        Writes nothing while a prepared batch has no known outcome: a checkpoint would remove the
        pending one, by which the next owner finds out.
        """
        if consumer.committed is None or not consumer.flush_needed or consumer.prepared is not None:
            return
        self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        consumer.checkpointed = consumer.committed

    def _prepare_all(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> dict[str, str]:
        """Prepare every lease of the batch; returns those that are lost, with the reason.

        Round after round: what was throttled, or has no known outcome, is tried again after a wait
        for as long as its lease is held.
        """
        lost: dict[str, str] = {}
        todo = [_Prepare(consumers[part.lease_key], part.through) for part in batch.ranges]
        todo = [
            one
            for one in todo
            if one.consumer.prepared is None or one.consumer.prepared[0] != one.end
        ]
        for attempt in range(MAX_ATTEMPTS):
            todo = self._note_prepared(todo, list(self._map(self._try_prepare, todo)), lost)
            if not todo:
                return lost
            self._wait_to_retry(attempt, f"batch {batch.batch_id} was not prepared")
        return lost | {one.consumer.lease_key: _NOT_WRITTEN for one in todo}

    def _sleep(self, seconds: float) -> bool:
        self._clock.sleep(seconds)
        return False

    def _wait_to_retry(self, attempt: int, what: str) -> None:
        """Wait before the next attempt. Raises `CommitStoppedError` when the worker stops: the
        batch is left as a crash would leave it, and the next owner settles it.
        """
        if self._pause(min(RETRY_SECONDS * 2**attempt, MAX_RETRY_SECONDS)):
            raise CommitStoppedError(f"{what}; the worker stops")

    def _try_prepare(self, one: _Prepare) -> int | Exception:
        """The number, or what went wrong: one that fails must not leave the others behind, running
        on while the batch is given up.
        """
        try:
            return self._prepare(one.consumer, one.end)
        except Exception as error:  # noqa: BLE001
            # raised again, or answered, by the thread that has all the outcomes
            return error

    def _prepare(self, consumer: ShardConsumer, end: Position) -> int:
        checkpoint = consumer.committed if consumer.flush_needed else None
        return self._leases.prepare(
            consumer.held,
            checkpoint=checkpoint,
            end=end,
            avoid_number=consumer.numbers.data,
            expects=_named(consumer.numbers),
        )

    def _note_prepared(
        self, tried: Sequence[_Prepare], outcomes: Sequence[int | Exception], lost: dict[str, str]
    ) -> list[_Prepare]:
        """Bring the consumers up to date; returns what is to be tried again.

        A row that DynamoDB does not take, such as one that has grown too large, costs its lease
        alone. Raises the first error that is neither a lost lease nor a passing trouble.
        """
        again: list[_Prepare] = []
        failures: list[Exception] = []
        for one, outcome in zip(tried, outcomes, strict=True):
            consumer = one.consumer
            match outcome:
                case int():
                    consumer.prepared = (one.end, outcome)
                    consumer.checkpointed = consumer.committed
                case LeaseLostError() | UnreadableRowError() | InvalidRequestError():
                    lost[consumer.lease_key] = str(outcome)
                case ThrottledError() | UnavailableError():
                    self._events(AwsTrouble(outcome.operation or "UpdateItem", str(outcome)))
                    if self._holds(consumer):
                        again.append(one)
                    else:
                        lost[consumer.lease_key] = _NOT_WRITTEN
                case _:
                    failures.append(outcome)
        if failures:
            raise failures[0]
        return again

    def _land(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> tuple[bool, int | None, dict[str, str]]:
        entries = [_entry(consumers[part.lease_key]) for part in batch.ranges]
        failure: SinkError | None = None
        for attempt in range(MAX_ATTEMPTS):
            try:
                if failure is not None:
                    numbers = self._sink.numbers([e.lease_key for e in entries])
                    if all(numbers[e.lease_key].data == e.number for e in entries):
                        return True, None, {}
                # Also before another attempt: a sink without a log would get the batch again
                gone = {
                    c.lease_key: "the lease expired before the commit"
                    for c in (consumers[e.lease_key] for e in entries)
                    if not self._holds(c)
                }
                if gone:
                    return False, None, gone
                outcome = self._sink.commit(written, entries)
            except TableMismatchError:
                raise  # trying again changes nothing; what may have landed is found by `resolve`
            except SinkError as error:
                failure = error
                self._events(AwsTrouble("commit", str(error)))
                self._wait_to_retry(attempt, f"batch {batch.batch_id} was not committed: {error}")
                continue
            if outcome.version is not None:
                return True, outcome.version, {}
            return self._sort_out(entries, outcome, maybe_landed=failure is not None)
        raise SinkError(
            f"batch {batch.batch_id} could not be committed in {MAX_ATTEMPTS} attempts: {failure}"
        ) from failure

    def _sort_out(
        self, entries: Sequence[CommitEntry], outcome: CommitOutcome, *, maybe_landed: bool
    ) -> tuple[bool, int | None, dict[str, str]]:
        if maybe_landed:
            numbers = self._sink.numbers([e.lease_key for e in entries])
            if all(numbers[e.lease_key].data == e.number for e in entries):
                return True, None, {}
        reason = outcome.reason or "the table has another worker's commit or fence"
        return False, None, dict.fromkeys(outcome.refused, reason)

    def _holds(self, consumer: ShardConsumer) -> bool:
        return self._leases.get(consumer.lease_key) is consumer.held

    def _note_landed(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> None:
        now = self._clock.monotonic()
        for part in batch.ranges:
            consumer = consumers[part.lease_key]
            if consumer.prepared is None:
                raise SinkError(f"the lease {part.lease_key} was committed without a prepare")
            consumer.numbers = replace(consumer.numbers, data=consumer.prepared[1])
            consumer.prepared = None
            consumer.committed = part.through
            consumer.last_commit = consumer.moved_at = now
            consumer.restarted, consumer.error = False, None
            consumer.set_aside.clear()

    def _drop(
        self, batch: Batch, consumers: dict[str, ShardConsumer], lost: dict[str, str]
    ) -> None:
        for key, reason in lost.items():
            self._leases.drop(consumers.pop(key).held, reason)
        self._events(
            BatchRefused(
                self._worker_id,
                batch.batch_id,
                tuple(sorted(lost)),
                "; ".join(sorted(set(lost.values()))),
            )
        )

    @contextmanager
    def _timed(self, timings: dict[str, float], phase: str) -> Iterator[None]:
        began = self._clock.monotonic()
        yield
        timings[phase] = timings.get(phase, 0.0) + (self._clock.monotonic() - began) * 1000


def _named(numbers: TxnVersions) -> str:
    """The numbers as text; empty where the table has none of this lease."""
    return (
        ""
        if numbers == TxnVersions()
        else ",".join(
            "-" if number is None else str(number) for number in (numbers.data, numbers.fence)
        )
    )


def _entry(consumer: ShardConsumer) -> CommitEntry:
    if consumer.prepared is None:
        raise SinkError(f"the lease {consumer.lease_key} is not prepared")
    return CommitEntry(consumer.lease_key, consumer.prepared[1], consumer.numbers)

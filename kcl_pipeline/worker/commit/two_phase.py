"""Commit batches exactly once by a two-phase checkpoint.

For every lease the log of the sink stores two transaction versions, *data* and *fence*. A batch is
committed in three steps:

1. Prepare. One conditional write stores the end position and a batch number in the lease row. No
   other write of the row has this number. The versions that step 2 expects follow the number.
2. Commit. One log commit adds the files and sets *data* to the batch number for every lease. It is
   refused if a version changed since this worker read it.
3. Checkpoint. The checkpoint moves to the end position. It is combined with the next prepare, or
   flushed when the shard is idle or handed off.

When a worker takes a lease with a pending checkpoint, it first finds out whether step 2 happened.
If it did, *data* equals the batch number. If not, the worker commits a fence, which makes the old
commit fail, and reads the range again.

See docs/decisions/0002-exactly-once.md for the reasons and docs/guarantees.md for the verification.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import (
    Batch,
    CommitEntry,
    CommitOutcome,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.clock import Clock, StopSignal
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
from kcl_pipeline.events import AwsTrouble, EventSink, PendingResolved, ignore_events
from kcl_pipeline.leases.held import HeldLeases, pending_number
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.position import Position
from kcl_pipeline.worker.commit.foreign_positions import key_in, without_position
from kcl_pipeline.worker.commit.protocol import CommitResult
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.retry import RetryPolicy, StoppedWhileRetryingError, retry_transient

PREPARE: Final = RetryPolicy(120.0, first_wait_seconds=0.25, longest_wait_seconds=2.0)
COMMIT: Final = replace(PREPARE, transient=(SinkError,), permanent=(TableMismatchError,))
FLUSH_IDLE_SECONDS: Final = 1.0
_NOT_WRITTEN: Final = "the lease could not be written before it expired"
_EXPIRED: Final = "the lease expired before the commit"

_Prepare = tuple[ShardConsumer, Position]
"""A prepare that is not written yet: the lease, and the end of its range (inclusive)."""


class TwoPhaseCommit:
    """`CommitProtocol` of a sink whose log supports application transactions.

    Not thread-safe: only the processing thread uses it.

    Args:
        leases: The leases of this worker.
        sink: Owns the log.
        clock: Limits the time of retries.
        events: Receives failed attempts.
        worker_id: Names this worker in events.
        rng: Spreads the waits of workers that fail together.
        stop: Ends the waits. None: nothing ends them early.
        map: Runs the writes of a batch's lease rows, on several threads if that is allowed.
        prepare_pool: Runs these writes while the files are written. None: they follow the files.
    """

    def __init__(
        self,
        leases: HeldLeases,
        sink: TransactionalSink,
        clock: Clock,
        events: EventSink,
        worker_id: str,
        *,
        rng: random.Random | None = None,
        stop: StopSignal | None = None,
        map: MapCallable = serial_map,  # noqa: A002 (it stands for the builtin)
        prepare_pool: Executor | None = None,
    ) -> None:
        self._leases = leases
        self._sink = sink
        self._clock = clock
        self._events = events
        self._worker_id = worker_id
        self._rng = rng or random.Random(worker_id)
        self._stop = stop or clock.signal()
        self._map = map
        self._prepare_pool = prepare_pool
        self._table_known = False
        self._schema: pa.Schema | None = None

    @property
    def stored(self) -> StoredShards | None:
        """See `CommitProtocol`."""
        return None

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """See `CommitProtocol`. One read of the log covers all leases."""
        keys = {one.lease_key: key_in(self._sink, one) for one in consumers}
        try:
            found = self._sink.txn_versions(list(keys.values())) if keys else {}
            return {lease_key: found[key] for lease_key, key in keys.items()}
        except SinkError as error:
            self._events(AwsTrouble("reading of transaction versions", str(error)))
            return {}

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """See `CommitProtocol`.

        Others may have changed the versions since they were `seen`. That is safe: a landed batch
        stays landed, and a fence or commit that expects old versions is refused.
        """
        versions = without_position(self._sink, consumer, seen)
        position, versions = self._settled(consumer, self._key(consumer), versions)
        consumer.settle(position, versions)
        return position

    def _settled(
        self, consumer: ShardConsumer, key: str, versions: TxnVersions
    ) -> tuple[Position, TxnVersions]:
        """Find out whether the pending batch landed; return the checkpoint and the versions."""
        lease = consumer.held.lease
        position = lease.checkpoint
        if lease.pending_checkpoint is not None and not lease.ended:
            number = pending_number(lease)
            landed = number is not None and versions.data == number
            while not landed:
                fenced = self._sink.fence(key, versions)
                if fenced is not None:
                    versions = fenced
                    break
                versions = self._sink.txn_versions([key])[key]
                landed = number is not None and versions.data == number
            if landed:
                position = max(position, lease.pending_checkpoint)
                self._leases.checkpoint(consumer.held, checkpoint=position)
            self._events(PendingResolved(self._worker_id, lease.lease_key, landed))
        return position, versions

    def preparing(
        self, batch: Batch, consumers: dict[str, ShardConsumer]
    ) -> AbstractContextManager[None]:
        """See `CommitProtocol`. A prepare needs only the ends of the ranges.

        Nothing is prepared before the table exists, because a fence needs a log.
        """
        if self._prepare_pool is None or not self._table_known:
            return nullcontext()
        return _waiting_for(self._prepare_pool.submit(self._prepare_all, batch, consumers))

    def prepare(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> dict[str, str]:
        """See `CommitProtocol`.

        Nothing is prepared while the columns of the table are unknown. In this case no batch of
        this worker has had records.
        """
        self._schema = written.schema if written.schema is not None else self._schema
        if self._schema is None:
            return {}
        if not self._table_known:
            self._sink.ensure_table(self._schema)
            self._table_known = True
        return self._prepare_all(batch, consumers)

    def commit(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        """See `CommitProtocol`.

        While no columns are known, the ranges have no records and are not prepared. Then a
        checkpoint is enough, because no batch of these leases can be pending.
        """
        if self._schema is None:
            lost = self._gone(consumers[part.lease_key] for part in batch.ranges)
            result = CommitResult(not lost, lost=lost)
        else:
            result = self._land(batch, consumers, replace(written, schema=self._schema))
        if result.landed:
            now = self._clock.monotonic()
            for part in batch.ranges:
                consumers[part.lease_key].note_committed(part.through, now)
        return result

    def checkpoint(self, consumer: ShardConsumer) -> None:
        """See `CommitProtocol`.

        A checkpoint would remove the pending one. The next owner needs it to find out whether a
        prepared batch landed.
        """
        if consumer.committed is None or not consumer.flush_needed or consumer.prepared is not None:
            return
        self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        consumer.note_checkpointed()

    def begin(
        self, consumer: ShardConsumer, ended_parents: Iterable[str], seen: TxnVersions | None
    ) -> None:
        """See `CommitProtocol`. A fence or the end of a parent has refused its late writers."""

    def end(self, consumer: ShardConsumer) -> None:
        """See `CommitProtocol`. The lease row alone shows that a shard has ended."""

    def flush_due(self, consumer: ShardConsumer, now: float, *, idle: bool) -> bool:
        """See `CommitProtocol`. The next prepare writes the checkpoint, unless it takes long."""
        return idle and now - consumer.last_commit >= FLUSH_IDLE_SECONDS

    def _prepare_all(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> dict[str, str]:
        """Prepare every lease of the batch; return why leases are lost, by lease key.

        Writes that were throttled or have an unknown outcome are retried after a wait, while their
        lease is held.
        """
        lost: dict[str, str] = {}
        todo = [(consumers[part.lease_key], part.through) for part in batch.ranges]
        todo = [one for one in todo if not one[0].is_prepared_to(one[1])]

        def one_round() -> None:
            nonlocal todo
            outcomes = list(self._map(self._try_prepare, todo))
            todo, failure = self._note_prepared(todo, outcomes, lost)
            if failure is not None:
                raise failure

        try:
            # `_note_prepared` emits an event for each lease.
            retry_transient(
                f"batch {batch.batch_id} was not prepared",
                one_round,
                self._clock,
                self._rng,
                ignore_events,
                self._stop,
                PREPARE,
            )
        except StoppedWhileRetryingError as error:
            raise CommitStoppedError(str(error)) from error
        except (ThrottledError, UnavailableError):
            lost |= {consumer.lease_key: _NOT_WRITTEN for consumer, _ in todo}
        return lost

    def _try_prepare(self, one: _Prepare) -> int | Exception:
        """Return the batch number, or the error.

        An error raised here would abandon the batch while writes of other leases still run.
        """
        consumer, end = one
        try:
            return self._leases.prepare(
                consumer.held,
                checkpoint=consumer.committed if consumer.flush_needed else None,
                end=end,
                avoid_number=consumer.versions.data,
                expects=_named(consumer.versions),
            )
        except Exception as error:  # noqa: BLE001
            # Collected, not raised: `_note_prepared` sees the outcomes of all leases together.
            return error

    def _note_prepared(
        self, tried: Sequence[_Prepare], outcomes: Sequence[int | Exception], lost: dict[str, str]
    ) -> tuple[list[_Prepare], Exception | None]:
        """Update the consumers; return the prepares to retry, and their first error.

        If DynamoDB rejects a row, for example because it is too large, only its lease is lost. The
        first error that is neither a lost lease nor transient is raised.
        """
        again: list[_Prepare] = []
        transient: list[Exception] = []
        failures: list[Exception] = []
        for one, outcome in zip(tried, outcomes, strict=True):
            consumer, end = one
            match outcome:
                case int():
                    consumer.note_prepared(end, outcome)
                case LeaseLostError() | UnreadableRowError() | InvalidRequestError():
                    lost[consumer.lease_key] = str(outcome)
                case ThrottledError() | UnavailableError():
                    self._events(AwsTrouble(outcome.operation or "UpdateItem", str(outcome)))
                    if self._holds(consumer):
                        again.append(one)
                        transient.append(outcome)
                    else:
                        lost[consumer.lease_key] = _NOT_WRITTEN
                case _:
                    failures.append(outcome)
        if failures:
            raise failures[0]
        return again, transient[0] if transient else None

    def _land(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        batched = [consumers[part.lease_key] for part in batch.ranges]
        entries = [self._entry(consumers[part.lease_key], part.through) for part in batch.ranges]
        failed = False

        def once() -> CommitResult:
            nonlocal failed
            if failed and self._has_landed(entries):
                return CommitResult(landed=True)
            # Checked before every attempt, because a sink without a log would get the batch again.
            gone = self._gone(batched)
            if gone:
                return CommitResult(landed=False, lost=gone)
            try:
                outcome = self._sink.commit(written, entries)
            except SinkError:
                failed = True
                raise
            if outcome.version is not None:
                return CommitResult(landed=True, version=outcome.version)
            return self._sort_out(batched, entries, outcome, maybe_landed=failed)

        try:
            return retry_transient(
                "commit", once, self._clock, self._rng, self._events, self._stop, COMMIT
            )
        except StoppedWhileRetryingError as error:
            raise CommitStoppedError(
                f"batch {batch.batch_id} was not committed: {error}"
            ) from error

    def _sort_out(
        self,
        batched: Sequence[ShardConsumer],
        entries: Sequence[CommitEntry],
        outcome: CommitOutcome,
        *,
        maybe_landed: bool,
    ) -> CommitResult:
        """Explain a refusal: an earlier attempt landed, or leases are lost."""
        if maybe_landed and self._has_landed(entries):
            return CommitResult(landed=True)
        reason = outcome.reason or "the table has another worker's commit or fence"
        lost = {c.lease_key: reason for c in batched if self._key(c) in outcome.refused}
        return CommitResult(landed=False, lost=lost)

    def _has_landed(self, entries: Sequence[CommitEntry]) -> bool:
        versions = self._sink.txn_versions([e.lease_key for e in entries])
        return all(e.is_at(versions[e.lease_key]) for e in entries)

    def _key(self, consumer: ShardConsumer) -> str:
        """Return the key of the lease in the sink."""
        return consumer.transaction_key

    def _entry(self, consumer: ShardConsumer, end: Position) -> CommitEntry:  # noqa: ARG002
        if consumer.prepared is None:
            raise SinkError(f"the lease {consumer.lease_key} is not prepared")
        return CommitEntry(self._key(consumer), consumer.prepared[1], consumer.versions)

    def _gone(self, consumers: Iterable[ShardConsumer]) -> dict[str, str]:
        return {c.lease_key: _EXPIRED for c in consumers if not self._holds(c)}

    def _holds(self, consumer: ShardConsumer) -> bool:
        return self._leases.get(consumer.lease_key) is consumer.held


@contextmanager
def _waiting_for(done: Future[object]) -> Iterator[None]:
    try:
        yield
    finally:
        wait([done])


def _named(versions: TxnVersions) -> str:
    """Return the versions as text; empty if the table has none of this lease."""
    return (
        ""
        if versions == TxnVersions()
        else ",".join(
            "-" if version is None else str(version) for version in (versions.data, versions.fence)
        )
    )

"""Commit batches exactly once by a two-phase checkpoint.

For every lease the log of the sink stores two transaction versions, *data* and *fence*. A batch is
committed in three steps:

1. Prepare. One conditional write stores the end position and a batch number in the lease row. No
   other write of the row has this number. The versions that step 2 expects stand behind it.
2. Commit. One log commit adds the files and sets *data* to the batch number for every lease. It is
   refused if a version changed since this worker read it.
3. Checkpoint. The checkpoint moves to the end position. It is combined with the next prepare, or
   flushed when the shard is idle or handed off.

A worker that takes a lease with a pending checkpoint first finds out whether step 2 happened: then
*data* equals the batch number. If not, it commits a fence, which makes the old commit fail, and
reads the range again.

docs/decisions/0002-exactly-once.md has the reasons, docs/guarantees.md how this was verified.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from kcl_pipeline.position import Position
from kcl_pipeline.worker.commit.protocol import CommitResult
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.retry import RetryPolicy, StoppedWhileRetryingError, retry_transient

PREPARE: Final = RetryPolicy(120.0, first_wait_seconds=0.25, longest_wait_seconds=2.0)
COMMIT: Final = replace(PREPARE, transient=(SinkError,), permanent=(TableMismatchError,))
_NOT_WRITTEN: Final = "the lease could not be written before it expired"
_EXPIRED: Final = "the lease expired before the commit"


@dataclass(frozen=True, slots=True)
class _Prepare:
    """A prepare that is to be written: the lease, and the last position of its range."""

    consumer: ShardConsumer
    end: Position


class TwoPhaseCommit:
    """The `CommitProtocol` of a sink whose log takes application transactions.

    Not thread-safe: only the processing thread uses it.

    Args:
        leases: The leases of this worker.
        sink: Has the log.
        clock: Tells how long an attempt may be repeated.
        events: Receives failed attempts.
        worker_id: Names this worker in events.
        rng: Spreads the waits of workers that fail together.
        stop: Ends the waits; None: nothing does.
        map: Makes the writes of a batch's lease rows, on several threads where that is allowed.
        beside: A thread on which they are made while the files are written; None: they follow.
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
        beside: Executor | None = None,
    ) -> None:
        self._leases = leases
        self._sink = sink
        self._clock = clock
        self._events = events
        self._worker_id = worker_id
        self._rng = rng or random.Random(worker_id)
        self._stop = stop or clock.signal()
        self._map = map
        self._beside = beside
        self._table_known = False
        self._schema: pa.Schema | None = None

    def look_up(self, consumers: Iterable[ShardConsumer]) -> dict[str, TxnVersions]:
        """See `CommitProtocol`. All leases are looked up in one reading of the log."""
        keys = [consumer.lease_key for consumer in consumers]
        try:
            return self._sink.numbers(keys) if keys else {}
        except SinkError as error:
            self._events(AwsTrouble("numbers", str(error)))
            return {}

    def resolve(self, consumer: ShardConsumer, seen: TxnVersions | None = None) -> Position:
        """See `CommitProtocol`.

        Others may have moved the versions on since they were `seen`. Whatever is concluded from
        them is either true for ever, or refused by the fence or the commit that expects them.
        """
        lease = consumer.held.lease
        key = lease.lease_key
        versions = seen if seen is not None else self._sink.numbers([key])[key]
        position = lease.checkpoint
        if lease.pending_checkpoint is not None and not lease.ended:
            number = pending_number(lease)
            landed = number is not None and versions.data == number
            while not landed:
                fenced = self._sink.fence(key, versions)
                if fenced is not None:
                    versions = fenced
                    break
                versions = self._sink.numbers([key])[key]
                landed = number is not None and versions.data == number
            if landed:
                position = max(position, lease.pending_checkpoint)
                self._leases.checkpoint(consumer.held, checkpoint=position)
            self._events(PendingResolved(self._worker_id, key, landed))
        consumer.settle(position, versions)
        return position

    @contextmanager
    def preparing(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> Iterator[None]:
        """See `CommitProtocol`. A prepare needs only where the ranges end.

        Not before the table exists, because a fence needs a log to stand in.
        """
        if self._beside is None or not self._table_known:
            yield
            return
        done = self._beside.submit(self._prepare_all, batch, consumers)
        try:
            yield
        finally:
            wait([done])

    def prepare(
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> dict[str, str]:
        """See `CommitProtocol`.

        Nothing is prepared while no columns are known to create the table with: then no batch of
        this worker had records.
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
        """See `CommitProtocol`. Ranges of which nothing is prepared have no records: a checkpoint
        is enough, because nothing of these leases can be in flight.
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
        """See `CommitProtocol`. A checkpoint would remove the pending one, by which the next owner
        finds out whether a prepared batch landed.
        """
        if consumer.committed is None or not consumer.flush_needed or consumer.prepared is not None:
            return
        self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        consumer.note_checkpointed()

    def _prepare_all(self, batch: Batch, consumers: dict[str, ShardConsumer]) -> dict[str, str]:
        """Prepare every lease of the batch; returns those that are lost, with the reason.

        Round after round: what was throttled, or has no known outcome, is tried again after a wait
        for as long as its lease is held.
        """
        lost: dict[str, str] = {}
        todo = [_Prepare(consumers[part.lease_key], part.through) for part in batch.ranges]
        todo = [one for one in todo if not one.consumer.is_prepared_to(one.end)]

        def one_round() -> None:
            nonlocal todo
            outcomes = list(self._map(self._try_prepare, todo))
            todo, failure = self._note_prepared(todo, outcomes, lost)
            if failure is not None:
                raise failure

        what = f"batch {batch.batch_id} was not prepared"
        try:
            # `_note_prepared` has an event for each lease
            retry_transient(
                what, one_round, self._clock, self._rng, ignore_events, self._stop, PREPARE
            )
        except StoppedWhileRetryingError as error:
            raise CommitStoppedError(str(error)) from error
        except (ThrottledError, UnavailableError):
            lost |= {one.consumer.lease_key: _NOT_WRITTEN for one in todo}
        return lost

    def _try_prepare(self, one: _Prepare) -> int | Exception:
        """The number, or what went wrong: one that fails must not leave the others behind, running
        on while the batch is given up.
        """
        try:
            return self._prepare(one.consumer, one.end)
        except Exception as error:  # noqa: BLE001
            # Collected, not raised: `_note_prepared` sees the outcomes of all leases together.
            return error

    def _prepare(self, consumer: ShardConsumer, end: Position) -> int:
        return self._leases.prepare(
            consumer.held,
            checkpoint=consumer.committed if consumer.flush_needed else None,
            end=end,
            avoid_number=consumer.versions.data,
            expects=_named(consumer.versions),
        )

    def _note_prepared(
        self, tried: Sequence[_Prepare], outcomes: Sequence[int | Exception], lost: dict[str, str]
    ) -> tuple[list[_Prepare], Exception | None]:
        """Bring the consumers up to date; returns what is to be tried again, and its first error.

        A row that DynamoDB does not take, such as one that has grown too large, costs its lease
        alone. Raises the first error that is neither a lost lease nor transient.
        """
        again: list[_Prepare] = []
        transient: list[Exception] = []
        failures: list[Exception] = []
        for one, outcome in zip(tried, outcomes, strict=True):
            consumer = one.consumer
            match outcome:
                case int():
                    consumer.note_prepared(one.end, outcome)
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
        entries = [_entry(consumers[part.lease_key]) for part in batch.ranges]
        failed = False

        def once() -> CommitResult:
            nonlocal failed
            if failed and self._has_landed(entries):
                return CommitResult(landed=True)
            # Also before another attempt: a sink without a log would get the batch again
            gone = self._gone(consumers[e.lease_key] for e in entries)
            if gone:
                return CommitResult(landed=False, lost=gone)
            try:
                outcome = self._sink.commit(written, entries)
            except SinkError:
                failed = True
                raise
            if outcome.version is not None:
                return CommitResult(landed=True, version=outcome.version)
            return self._sort_out(entries, outcome, maybe_landed=failed)

        try:
            return retry_transient(
                "commit", once, self._clock, self._rng, self._events, self._stop, COMMIT
            )
        except StoppedWhileRetryingError as error:
            raise CommitStoppedError(
                f"batch {batch.batch_id} was not committed: {error}"
            ) from error

    def _sort_out(
        self, entries: Sequence[CommitEntry], outcome: CommitOutcome, *, maybe_landed: bool
    ) -> CommitResult:
        """What a refusal means: an earlier attempt landed, or leases are lost."""
        if maybe_landed and self._has_landed(entries):
            return CommitResult(landed=True)
        reason = outcome.reason or "the table has another worker's commit or fence"
        return CommitResult(landed=False, lost=dict.fromkeys(outcome.refused, reason))

    def _has_landed(self, entries: Sequence[CommitEntry]) -> bool:
        versions = self._sink.numbers([e.lease_key for e in entries])
        return all(versions[e.lease_key].data == e.number for e in entries)

    def _gone(self, consumers: Iterable[ShardConsumer]) -> dict[str, str]:
        return {c.lease_key: _EXPIRED for c in consumers if not self._holds(c)}

    def _holds(self, consumer: ShardConsumer) -> bool:
        return self._leases.get(consumer.lease_key) is consumer.held


def _named(versions: TxnVersions) -> str:
    """The versions as text; empty where the table has none of this lease."""
    return (
        ""
        if versions == TxnVersions()
        else ",".join(
            "-" if version is None else str(version) for version in (versions.data, versions.fence)
        )
    )


def _entry(consumer: ShardConsumer) -> CommitEntry:
    if consumer.prepared is None:
        raise SinkError(f"the lease {consumer.lease_key} is not prepared")
    return CommitEntry(consumer.lease_key, consumer.prepared[1], consumer.versions)

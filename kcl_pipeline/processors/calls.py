"""Call record processors: the sink of a pipeline with `processor=`.

A batch of the worker has records of several shards. `ProcessorCalls` is its writer and its sink:
`commit` delivers the records of each shard to the processor of the shard, all shards at the same
time. A call that does not return holds up its own shard only: the other shards of the batch are
committed, and so is this one when the call returns. No position is stored, and the worker writes no
checkpoint: the processors do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from kcl_pipeline.arguments import checked_arguments, function_name
from kcl_pipeline.batch import Batch, Chunk, DataFile, PartFailure, error_line
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import SettingsError, SinkError, TransformFailedError
from kcl_pipeline.events import EventSink, ProcessorCalled, RecordsDeadLettered
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition, check_entries
from kcl_pipeline.processors.checkpointer import Checkpointer
from kcl_pipeline.processors.processor import (
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    RecordProcessor,
    ShardEndedInput,
    ShutdownRequestedInput,
)
from kcl_pipeline.processors.records import Record, records_of
from kcl_pipeline.processors.thread import ProcessorThread, RunningCall
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.sinks.sink import CommitOutcome, Positions

_LOG: Final = logging.getLogger(__name__)


@checked_arguments
@dataclass(frozen=True, slots=True)
class ProcessorSink:
    """What `KinesisPipeline(processor=...)` writes to: a record processor for each shard.

    Raises:
        SettingsError: It is not a class or function without arguments.
    """

    processor: Callable[[], object]
    """The class of the processor, or a function that returns a new one."""

    def __post_init__(self) -> None:
        if not callable(self.processor):
            raise wrong(
                "processor",
                self.processor,
                "is not a class or a function that returns a RecordProcessor",
                "Write processor=MyProcessor",
            )

    def __repr__(self) -> str:
        return f"ProcessorSink({function_name(self.processor)})"

    def new(self) -> RecordProcessor:
        """Return a new processor.

        Raises:
            SettingsError: The function returned something else.
        """
        made: Any = self.processor()
        adapted = getattr(made, "as_record_processor", None)
        processor = made if adapted is None else adapted()
        if not isinstance(processor, RecordProcessor):
            raise SettingsError(
                f"processor={function_name(self.processor)} returned a {type(made).__name__}. "
                "Return a RecordProcessor."
            )
        return processor


CALL_SECONDS: Final = 0.25
"""How long the worker waits for calls. A call that lasts longer holds up its own shard only."""


class CallRunningError(TransformFailedError):
    """A call of `process_records` has not returned. Commit the records when it has."""


@dataclass(slots=True)
class _Delivery:
    """The calls for the records of one range: its end, and their outcome."""

    through: Position
    outcome: Future[None]


@dataclass(slots=True)
class _ShardState:
    """A processor, and how far it is. Only its own thread changes `processor` and `delivered`.

    Attributes:
        held: The lease.
        checkpointer: Its checkpointer.
        thread: Makes the calls.
        delivered: Last position of a call that has returned.
        start: The call of `initialize`.
        processor: The processor. None: `initialize` has not returned.
        delivery: The last range that was not committed yet.
        ended: The call of `shard_ended`, until its outcome is known.
        is_leaving: Whether `shutdown_requested` was called.
        called_at: When the last call for records, or for none, was added (monotonic seconds).
    """

    held: Held
    checkpointer: Checkpointer
    thread: ProcessorThread
    delivered: Position
    start: Future[None] = field(default_factory=Future)
    processor: RecordProcessor | None = None
    delivery: _Delivery | None = None
    ended: Future[None] | None = None
    is_leaving: bool = False
    called_at: float = 0.0


class ProcessorCalls:
    """Both the `BatchWriter` and the `Sink` of a `ProcessorSink`, and its calls about leases.

    The processing thread of the worker uses it. Each processor has a thread of its own, and the
    worker waits at most `CALL_SECONDS` for it, or longer when it ends (`leave`, `lose`). While a
    call runs longer, `is_busy` is true, and the worker takes no step for the shard.

    Args:
        settings: Creates processors.
        max_records: Most records of a call of `process_records`.
        skips_failures: Whether an error of `process_records` skips the records of the call, for
            all processors.
        calls_empty: Whether `process_records` is also called after reads that found no record.
    """

    stores_positions = False

    def __init__(
        self,
        settings: ProcessorSink,
        max_records: int = 10_000,
        *,
        skips_failures: bool = False,
        calls_empty: bool = False,
    ) -> None:
        self._settings = settings
        self._max_records = max_records
        self._skips_failures = skips_failures
        self._calls_empty = calls_empty
        self._shards: dict[str, _ShardState] = {}
        self._lost: dict[str, _ShardState] = {}
        self._batch: Batch | None = None
        self._version = 0

    def attach(
        self,
        worker_id: str,
        leases: HeldLeases,
        lag: Callable[[], Mapping[str, int]],
        clock: Clock,
        events: EventSink,
        is_stopped: Callable[[], bool],
        *,
        parallel: bool,
    ) -> None:
        """Join the worker. Called once, before all others.

        Args:
            worker_id: Names the worker in events.
            leases: Writes checkpoints.
            lag: Returns the lag by lease key in milliseconds.
            clock: Measures the calls.
            events: Receives calls and skipped records.
            is_stopped: Whether the worker stops. No further call of `process_records` begins.
            parallel: False: all calls are made on the calling thread.
        """
        self._worker_id, self._leases, self._lag = worker_id, leases, lag
        self._clock, self._events, self._is_stopped = clock, events, is_stopped
        self._parallel = parallel

    def is_busy(self, lease_key: str) -> bool:
        """Return whether a call runs for this lease, also one from before the lease was lost."""
        states = (self._shards.get(lease_key), self._lost.get(lease_key))
        return any(state is not None and state.thread.is_busy for state in states)

    def running(self) -> list[RunningCall]:
        """Return the calls that run, the longest first. Any thread may call it."""
        states = [*self._shards.values(), *self._lost.values()]
        calls = [call for state in states if (call := state.thread.running) is not None]
        return sorted(calls, key=lambda call: call.since)

    # -- leases

    def begin(self, starts: Sequence[tuple[Held, str]]) -> dict[str, Exception | None]:
        """Create and initialize the processors of shards that will be read.

        Args:
            starts: The leases, and the names of their streams. None of them is busy. A shard that
                is read again after a failure keeps its processor.

        Returns:
            By lease key, the error of a processor that could not be initialized. None: it is
            initialized. A shard whose call runs is missing. Call again for it, and after an error.
        """
        self.lose(
            [
                s.held
                for h, _ in starts
                if (s := self._shards.get(h.lease_key)) is not None and s.held is not h
            ]
        )
        for held, stream in starts:
            if held.lease_key not in self._shards:
                thread = ProcessorThread(held.lease_key, self._clock, parallel=self._parallel)
                state = _ShardState(
                    held, Checkpointer(self._leases, held), thread, held.lease.checkpoint
                )
                self._shards[held.lease_key] = state
                state.start = thread.add(partial(self._initialize, state, stream))
        begun = [self._shards[held.lease_key] for held, _ in starts]
        _wait([state.start for state in begun])
        keys = [state.held.lease_key for state in begun]
        outcomes = {
            key: _error_of(self._shards[key].start) for key in keys if not self.is_busy(key)
        }
        for key, error in outcomes.items():
            if error is not None:
                del self._shards[key]
        return outcomes

    def _initialize(self, state: _ShardState, stream: str) -> None:
        lease, processor = state.held.lease, self._settings.new()
        pending = lease.pending_checkpoint
        processor.initialize(
            InitializeInput(
                lease.shard_id,
                stream,
                lease.checkpoint.sequence_number,
                lease.checkpoint.sub_sequence_number,
                None if pending is None else pending.sequence_number,
                None if pending is None else pending.sub_sequence_number,
                lease.pending_checkpoint_state,
            )
        )
        state.processor = processor

    def end(self, held: Held) -> bool:
        """Call `shard_ended`, and forget the processor.

        Returns:
            False: the call runs. Call again when the shard is not busy.

        Raises:
            TransformFailedError: The end of the shard is not checkpointed. Call again.
        """
        shard = self._shards[held.lease_key]
        checkpointer, processor = shard.checkpointer, shard.processor
        if shard.ended is None and processor is not None:
            checkpointer.reach_end()
            if not checkpointer.is_at_end:
                call = partial(processor.shard_ended, ShardEndedInput(checkpointer))
                shard.ended = shard.thread.add(call)
                _wait([shard.ended])
        if shard.thread.is_busy:
            return False
        ended, shard.ended = shard.ended, None
        if not checkpointer.is_at_end:
            error = None if ended is None else _error_of(ended)
            name = type(processor).__name__
            what = f"shard_ended of {name} for {held.lease_key}"
            reason = "has not called checkpointer.checkpoint()"
            if error is not None:
                reason = f"failed: {error_line(error)}"
            raise TransformFailedError(f"{what} {reason}; it is called again") from error
        del self._shards[held.lease_key]
        return True

    def is_checkpointed(self, lease_key: str) -> bool:
        """Return whether all records that were delivered are checkpointed. Any thread may call."""
        shard = self._shards.get(lease_key)
        return shard is not None and shard.checkpointer.is_complete

    def leave(self, helds: Sequence[Held], seconds: float = CALL_SECONDS) -> None:
        """Call `shutdown_requested` once for each lease that will be given away.

        Args:
            helds: The leases. Those that are busy afterwards should not be given away yet.
            seconds: How long calls are waited for.
        """
        leaving = [s for s in map(self._of, helds) if s is not None]
        calls = []
        for shard in leaving:
            if not shard.is_leaving:
                shard.is_leaving = True
                calls.append(shard.thread.add(partial(self._request_shutdown, shard)))
        _wait(calls, seconds)

    def _request_shutdown(self, shard: _ShardState) -> None:
        processor = shard.processor
        if processor is not None:
            given = ShutdownRequestedInput(shard.checkpointer)
            self._call_logged(
                "shutdown_requested", shard, lambda: processor.shutdown_requested(given)
            )

    def lose(self, helds: Sequence[Held], seconds: float = CALL_SECONDS) -> None:
        """Call `lease_lost` for leases that this worker does not hold any more.

        Args:
            helds: The leases.
            seconds: How long calls are waited for, except of shards that are busy already.
        """
        self._lost = {key: state for key, state in self._lost.items() if state.thread.is_busy}
        calls = []
        for shard in [shard for shard in map(self._of, helds) if shard is not None]:
            shard.checkpointer.close()
            del self._shards[shard.held.lease_key]
            self._lost[shard.held.lease_key] = shard
            was_busy = shard.thread.is_busy
            call = shard.thread.add(partial(self._note_lost, shard))
            calls += [] if was_busy else [call]
        _wait(calls, seconds)

    def _note_lost(self, shard: _ShardState) -> None:
        processor = shard.processor
        if processor is not None:
            self._call_logged("lease_lost", shard, lambda: processor.lease_lost(LeaseLostInput()))

    def _of(self, held: Held) -> _ShardState | None:
        shard = self._shards.get(held.lease_key)
        return shard if shard is not None and shard.held is held else None

    def _call_logged(self, name: str, shard: _ShardState, call: Callable[[], object]) -> None:
        """Make a call whose error is logged, because nothing waits for it."""
        try:
            call()
        except Exception:  # noqa: BLE001 (it must not end the thread)
            _LOG.exception("%s of %s failed", name, shard.held.lease_key)

    # -- batches

    def write(self, batch: Batch) -> Batch:
        """Keep the batch for `commit` (see `BatchWriter.write`)."""
        self._batch, rows = batch, batch.records
        file = DataFile(batch.batch_id, rows.nbytes, rows.num_rows)
        return replace(batch, files=(file,), output_schema=rows.schema)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Return no failures: records that are written alone cannot fail."""
        return [None] * len(slices)

    def ensure(self, schema: pa.Schema) -> None:
        """Do nothing: there is no table."""

    def positions(self, keys: Sequence[str]) -> Positions:
        """Return nothing: the checkpoints are in the lease rows."""
        return Positions("processor", dict.fromkeys(keys, NOTHING_STORED))

    def write_dead_letters(self, records: pa.Table) -> None:
        """Refuse dead letters. There are none."""
        raise SinkError(f"{records.num_rows} records failed, and a processor takes no dead letters")

    def commit(
        self,
        table_id: str | None,  # noqa: ARG002 (there is no table)
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,  # noqa: ARG002
    ) -> CommitOutcome:
        """Deliver the records, the shards in parallel.

        Raises:
            TransformFailedError: A processor raised an error (or `CallRunningError`). The records
                of the other shards are delivered. A repeated call does not deliver them again, and
                does not wait for the call that runs.
        """
        check_entries(expected, becomes)
        batch = self._batch
        if files and batch is not None:
            self._commit(batch)
        self._version += 1
        return CommitOutcome(self._version)

    def _commit(self, batch: Batch) -> None:
        """Deliver a batch, unless its deliveries run or have ended: a part is committed again."""
        lag, begun = self._lag(), []
        shards: list[tuple[Chunk, _ShardState]] = []
        for part in batch.ranges:
            shard = self._shards.get(part.lease_key)
            if shard is None:
                continue
            shards.append((part, shard))
            if shard.delivery is None or shard.delivery.through != part.through:
                millis = lag.get(part.lease_key)
                call = partial(self._deliver, shard, part.through, part.records, millis)
                shard.called_at = self._clock.monotonic()
                shard.delivery = _Delivery(part.through, shard.thread.add(call))
                begun.append(shard.delivery.outcome)
        _wait(begun)
        error: Exception | None = None
        for part, shard in shards:
            error = error or self._outcome_of(part, shard)
        # If one of several shards has no success, the worker commits each of them alone next.
        if error is None or len(batch.ranges) == 1:
            for _, shard in shards:
                if not isinstance(error, CallRunningError):
                    shard.delivery = None
        if error is not None:
            raise error

    def call_empty(self, reads: Mapping[str, float | None]) -> None:
        """Call `process_records` without records, if the settings say so. An error is logged.

        A shard whose last call for records has failed is left out.

        Args:
            reads: When shards without a record that waits were last read (monotonic seconds), by
                lease key. There is one call for each read.
        """
        if not self._calls_empty:
            return
        calls, lag = [], self._lag()
        for key, read_at in reads.items():
            shard = self._shards.get(key)
            if read_at is None or shard is None or shard.thread.is_busy:
                continue
            if shard.checkpointer.delivered != shard.delivered:
                continue  # Records of a call that failed come again. No checkpoint may skip them.
            if read_at > shard.called_at and self._may_call(shard):
                shard.called_at = self._clock.monotonic()
                calls.append(shard.thread.add(partial(self._process_none, shard, lag.get(key))))
        _wait(calls)

    def _process_none(self, shard: _ShardState, lag_millis: int | None) -> None:
        call = partial(self._process, shard, [], shard.delivered, lag_millis)
        self._call_logged("process_records without records", shard, call)

    def _outcome_of(self, part: Chunk, shard: _ShardState) -> Exception | None:
        delivery = shard.delivery
        if delivery is None:
            return None
        if not delivery.outcome.done():
            return CallRunningError(f"process_records of {part.lease_key} has not returned")
        error = _error_of(delivery.outcome)
        if error is None:
            return None
        line = error_line(error)
        failed = TransformFailedError(f"process_records failed: {line}", detail=line)
        failed.__cause__ = error
        return failed

    def _deliver(
        self, shard: _ShardState, through: Position, rows: pa.Table, lag_millis: int | None
    ) -> None:
        rows = _after(rows, shard.delivered)
        for begin in range(0, rows.num_rows, self._max_records):
            if not self._may_call(shard):
                return
            some = rows.slice(begin, self._max_records)
            is_last = begin + self._max_records >= rows.num_rows
            end = through if is_last else _position(some, -1)
            self._process(shard, records_of(some), end, lag_millis)
            shard.delivered = end

    def _process(
        self, shard: _ShardState, records: list[Record], through: Position, lag_millis: int | None
    ) -> None:
        processor, key = shard.processor, shard.held.lease_key
        if processor is None:
            raise SinkError(f"the records of {key} came before its processor was initialized")
        shard.checkpointer.deliver(through)
        given = ProcessRecordsInput(records, lag_millis, shard.checkpointer)
        began, succeeded = self._clock.monotonic(), False
        try:
            processor.process_records(given)
            succeeded = True
        except Exception as error:
            if not (records and (self._skips_failures or processor.skips_failures)):
                raise
            line = error_line(error)
            _LOG.exception("process_records of %s failed; its records are skipped", key)
            self._events(
                RecordsDeadLettered(self._worker_id, key, len(records), line, skipped=True)
            )
        finally:
            millis = (self._clock.monotonic() - began) * 1000
            self._events(
                ProcessorCalled(self._worker_id, key, len(records), millis, succeeded=succeeded)
            )

    def _may_call(self, shard: _ShardState) -> bool:
        """Return whether the lease stays here. The next owner gets the rest of the records."""
        held = shard.held
        is_held = self._leases.get(held.lease_key) is held
        return is_held and not held.lease.in_handoff and not self._is_stopped()


def _wait(calls: Sequence[Future[None]], seconds: float = CALL_SECONDS) -> None:
    """Wait for calls. Those that last longer go on in their threads."""
    wait(calls, timeout=seconds)


def _error_of(call: Future[None]) -> Exception | None:
    """Return the error of a call that has returned; None for one that has not."""
    error = call.exception() if call.done() else None
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _position(rows: pa.Table, index: int) -> Position:
    number: Any = rows["sequence_number"][index].as_py()
    return Position(number, rows["sub_sequence_number"][index].as_py())


def _after(rows: pa.Table, delivered: Position) -> pa.Table:
    """Return the rows after a position: the first ones may be from a call that has returned."""
    if not rows.num_rows or _position(rows, 0) > delivered:
        return rows
    first = next((i for i in range(rows.num_rows) if _position(rows, i) > delivered), rows.num_rows)
    return rows.slice(first)

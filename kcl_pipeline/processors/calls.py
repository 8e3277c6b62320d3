"""Call record processors: the sink of a pipeline with `processor=`.

A batch of the worker has records of several shards. `ProcessorCalls` is its writer and its sink:
`commit` delivers the records of each shard to the processor of the shard, all shards at the same
time. No position is stored, and the worker writes no checkpoint: the processors do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar

import pyarrow as pa

from kcl_pipeline.arguments import checked_arguments, function_name
from kcl_pipeline.batch import Batch, DataFile, ShardRange, Written
from kcl_pipeline.errors import SettingsError, SinkError, TransformFailedError
from kcl_pipeline.events import EventSink, RecordsDeadLettered
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.position import Position
from kcl_pipeline.processors.checkpointer import Checkpointer
from kcl_pipeline.processors.processor import (
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    RecordProcessor,
    ShardEndedInput,
    ShutdownRequestedInput,
)
from kcl_pipeline.processors.records import records_of
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.sinks.sink import CommitOutcome, Entry, Positions, check_entries
from kcl_pipeline.sinks.stored import NOTHING_STORED
from kcl_pipeline.transform.errors import error_line

_LOG: Final = logging.getLogger(__name__)
_Item = TypeVar("_Item")


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


@dataclass(slots=True)
class _ShardState:
    """A processor, and how far it is.

    Attributes:
        held: The lease.
        processor: The processor.
        checkpointer: Its checkpointer.
        delivered: Last position of a call that has returned.
        failure: End of a range whose call has failed, and its error, until the shard is paused.
        is_leaving: Whether `shutdown_requested` was called.
    """

    held: Held
    processor: RecordProcessor
    checkpointer: Checkpointer
    delivered: Position
    failure: tuple[Position, Exception] | None = None
    is_leaving: bool = False


class ProcessorCalls:
    """Both the `BatchWriter` and the `Sink` of a `ProcessorSink`, and its calls about leases.

    The processing thread of the worker uses it.

    Args:
        settings: Creates processors.
        max_records: Most records of a call of `process_records`.
        skips_failures: Whether an error of `process_records` skips the records of the call, for
            all processors.
    """

    stores_positions = False

    def __init__(
        self, settings: ProcessorSink, max_records: int = 10_000, *, skips_failures: bool = False
    ) -> None:
        self._settings = settings
        self._max_records = max_records
        self._skips_failures = skips_failures
        self._shards: dict[str, _ShardState] = {}
        self._batch: Batch | None = None
        self._version = 0

    def attach(
        self,
        worker_id: str,
        leases: HeldLeases,
        lag: Callable[[], Mapping[str, int]],
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
            events: Receives skipped records.
            is_stopped: Whether the worker stops. No further call of `process_records` begins.
            parallel: False: all calls are made on the calling thread.
        """
        self._worker_id, self._leases, self._lag = worker_id, leases, lag
        self._events, self._is_stopped, self._parallel = events, is_stopped, parallel

    # -- leases

    def begin(self, starts: Sequence[tuple[Held, str]]) -> dict[str, Exception]:
        """Create and initialize the processors of shards that will be read.

        Args:
            starts: The leases, and the names of their streams. A shard that is read again after a
                failure keeps its processor.

        Returns:
            By lease key, the errors of processors that could not be initialized. Call again.
        """
        new = [
            (held, stream)
            for held, stream in starts
            if held.lease_key not in self._shards or self._shards[held.lease_key].held is not held
        ]
        self.lose([self._shards[held.lease_key].held for held, _ in new if self._knows(held)])
        errors = self._each(lambda start: self._begin(*start), new)
        return {
            held.lease_key: error
            for (held, _), error in zip(new, errors, strict=True)
            if error is not None
        }

    def _knows(self, held: Held) -> bool:
        return held.lease_key in self._shards

    def _begin(self, held: Held, stream: str) -> None:
        lease, processor = held.lease, self._settings.new()
        pending = lease.pending_checkpoint
        start = InitializeInput(
            lease.shard_id,
            stream,
            lease.checkpoint.sequence_number,
            lease.checkpoint.sub_sequence_number,
            None if pending is None else pending.sequence_number,
            None if pending is None else pending.sub_sequence_number,
            lease.pending_checkpoint_state,
        )
        checkpointer = Checkpointer(self._leases, held)
        processor.initialize(start)
        self._shards[held.lease_key] = _ShardState(held, processor, checkpointer, lease.checkpoint)

    def end(self, held: Held) -> None:
        """Call `shard_ended`, and forget the processor.

        Raises:
            TransformFailedError: The end of the shard is not checkpointed. Call again.
        """
        shard = self._shards[held.lease_key]
        shard.checkpointer.reach_end()
        error: Exception | None = None
        if not shard.checkpointer.is_at_end:
            ended = ShardEndedInput(shard.checkpointer)
            (error,) = self._each(shard.processor.shard_ended, [ended])
        if not shard.checkpointer.is_at_end:
            name = type(shard.processor).__name__
            what = f"shard_ended of {name} for {held.lease_key}"
            reason = "has not called checkpointer.checkpoint()"
            if error is not None:
                reason = f"failed: {error_line(error)}"
            raise TransformFailedError(f"{what} {reason}; it is called again") from error
        del self._shards[held.lease_key]

    def is_checkpointed(self, lease_key: str) -> bool:
        """Return whether all records that were delivered are checkpointed. Any thread may call."""
        shard = self._shards.get(lease_key)
        return shard is not None and shard.checkpointer.is_complete

    def leave(self, helds: Sequence[Held]) -> None:
        """Call `shutdown_requested` once for each lease that will be given away."""
        leaving = [s for s in map(self._of, helds) if s is not None and not s.is_leaving]
        for shard in leaving:
            shard.is_leaving = True
        self._call_all(
            leaving,
            "shutdown_requested",
            lambda s: s.processor.shutdown_requested(ShutdownRequestedInput(s.checkpointer)),
        )

    def lose(self, helds: Sequence[Held]) -> None:
        """Call `lease_lost` for leases that this worker does not hold any more."""
        lost = [shard for shard in map(self._of, helds) if shard is not None]
        for shard in lost:
            shard.checkpointer.close()
            del self._shards[shard.held.lease_key]
        self._call_all(lost, "lease_lost", lambda s: s.processor.lease_lost(LeaseLostInput()))

    def _of(self, held: Held) -> _ShardState | None:
        shard = self._shards.get(held.lease_key)
        return shard if shard is not None and shard.held is held else None

    def _call_all(
        self, shards: list[_ShardState], name: str, call: Callable[[_ShardState], None]
    ) -> None:
        """Make the last calls of processors. An error is logged, because nothing waits for them."""
        for shard, error in zip(shards, self._each(call, shards), strict=True):
            if error is not None:
                _LOG.error("%s of %s failed", name, shard.held.lease_key, exc_info=error)

    # -- batches

    def write(self, batch: Batch) -> Written:
        """Keep the batch for `commit` (see `BatchWriter.write`)."""
        self._batch, rows = batch, batch.records
        file = DataFile(batch.batch_id, rows.nbytes, rows.num_rows)
        return Written((file,), rows.schema, rows.num_rows)

    def probe(self, slices: Sequence[pa.Table]) -> list[str | None]:
        """Return no errors: records that are written alone cannot fail."""
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
        written: Written,
        entries: Sequence[Entry],
    ) -> CommitOutcome:
        """Deliver the records, the shards in parallel.

        Raises:
            TransformFailedError: A processor raised an error. The records of the other shards are
                delivered, and a repeated call does not deliver them again.
        """
        check_entries(entries)
        batch, lag = self._batch, self._lag()
        if written.files and batch is not None:
            ends = list(accumulate((part.rows or 0 for part in batch.ranges), initial=0))
            deliveries = [
                (part, batch.records.slice(end, part.rows or 0))
                for part, end in zip(batch.ranges, ends, strict=False)
                if part.lease_key in self._shards
            ]
            errors = self._each(lambda d: self._deliver(*d, lag.get(d[0].lease_key)), deliveries)
            failures = [(d[0], e) for d, e in zip(deliveries, errors, strict=True) if e is not None]
            if len(batch.ranges) > 1:
                # The worker commits each shard alone next. Those that failed are not called again.
                for part, error in failures:
                    self._shards[part.lease_key].failure = (part.through, error)
            for _, error in failures:
                line = error_line(error)
                what = f"process_records failed: {line}"
                raise TransformFailedError(what, detail=line) from error
        self._version += 1
        return CommitOutcome(self._version)

    def _deliver(self, part: ShardRange, rows: pa.Table, lag_millis: int | None) -> None:
        shard = self._shards[part.lease_key]
        failure, shard.failure = shard.failure, None
        if failure is not None and failure[0] == part.through:
            raise failure[1]
        rows = _after(rows, shard.delivered)
        for begin in range(0, rows.num_rows, self._max_records):
            if not self._may_call(shard):
                return
            some = rows.slice(begin, self._max_records)
            is_last = begin + self._max_records >= rows.num_rows
            through = part.through if is_last else _position(some, -1)
            self._process(shard, some, through, lag_millis)
            shard.delivered = through

    def _process(
        self, shard: _ShardState, rows: pa.Table, through: Position, lag_millis: int | None
    ) -> None:
        shard.checkpointer.deliver(through)
        try:
            shard.processor.process_records(
                ProcessRecordsInput(records_of(rows), lag_millis, shard.checkpointer)
            )
        except Exception as error:
            if not (self._skips_failures or shard.processor.skips_failures):
                raise
            key, line = shard.held.lease_key, error_line(error)
            _LOG.exception("process_records of %s failed; its records are skipped", key)
            self._events(
                RecordsDeadLettered(self._worker_id, key, rows.num_rows, line, skipped=True)
            )

    def _may_call(self, shard: _ShardState) -> bool:
        """Return whether the lease stays here. The next owner gets the rest of the records."""
        held = shard.held
        is_held = self._leases.get(held.lease_key) is held
        return is_held and not held.lease.in_handoff and not self._is_stopped()

    def _each(
        self, call: Callable[[_Item], object], items: Sequence[_Item]
    ) -> list[Exception | None]:
        """Call once per item, in parallel; return the errors.

        The threads are daemons: a call that hangs does not keep the process from ending.
        """
        errors: list[Exception | None] = [None] * len(items)

        def attempt(number: int) -> None:
            try:
                call(items[number])
            except Exception as error:  # noqa: BLE001 (the caller decides)
                errors[number] = error

        if not self._parallel or not items[1:]:
            for number in range(len(items)):
                attempt(number)
            return errors
        threads = [
            threading.Thread(target=attempt, args=(number,), name="processor", daemon=True)
            for number in range(len(items))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


def _position(rows: pa.Table, index: int) -> Position:
    number: Any = rows["sequence_number"][index].as_py()
    return Position(number, rows["sub_sequence_number"][index].as_py())


def _after(rows: pa.Table, delivered: Position) -> pa.Table:
    """Return the rows after a position: the first ones may be from a call that has returned."""
    if not rows.num_rows or _position(rows, 0) > delivered:
        return rows
    first = next((i for i in range(rows.num_rows) if _position(rows, i) > delivered), rows.num_rows)
    return rows.slice(first)

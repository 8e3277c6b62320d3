"""A user's function as the sink, which keeps its rows in a table in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa

from kcl_pipeline.batch import Batch, DataFile
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.foreach import BatchIdentity, ForeachArrowSink, FunctionCalls
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome
from kcl_pipeline.testing.sink import FaultHook, LogEntry, MemoryTable, SinkFault

_NO_BATCH = Batch("", (), pa.table({}))


class InMemoryFunction(FunctionCalls[tuple[DataFile, ...]]):
    """A user's function as the sink: it keeps all rows that it gets, and stores no position.

    The result of a transform is kept when it is committed, so any writer can make it.

    Args:
        table: Gets the files.
        clock: Measures the latency.
        faults: Chooses the fault of each call.
        latency_seconds: Time that passes before and after the effect of every call.
    """

    def __init__(
        self,
        table: MemoryTable,
        *,
        clock: Clock | None = None,
        faults: FaultHook | None = None,
        latency_seconds: float = 0.0,
    ) -> None:
        super().__init__(ForeachArrowSink(self._store), self._store)
        self.table = table
        self.faults: FaultHook = faults or (lambda _operation, _keys: None)
        self._latency = latency_seconds
        self._time = clock or SystemClock()
        self._keys: tuple[str, ...] = ()

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """See `FunctionCalls.commit`."""
        self._keys = tuple(expected)
        rows = sum(file.rows for file in files)
        kept = self.keep(_NO_BATCH, tuple(files), rows, ExitStack())
        return super().commit(table_id, [kept], expected, becomes, schema)

    def _store(self, rows: tuple[DataFile, ...], identity: BatchIdentity) -> None:
        fault = self.faults("commit", self._keys)
        self._time.sleep(self._latency)
        if fault is SinkFault.FAIL:
            raise RuntimeError("failed on demand")
        self.table.append(LogEntry(len(self.table.log), rows))
        self._time.sleep(self._latency)
        if fault is not None:
            raise RuntimeError("failed on demand after it had written")

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `Sink.write_dead_letters`."""
        self.table.dead_letters.append(records)

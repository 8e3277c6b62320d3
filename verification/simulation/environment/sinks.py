"""The two checked sinks of a simulated fleet: a table and a user's own store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, DataFile, PartFailure
from kcl_pipeline.clock import Clock
from kcl_pipeline.foreach import BatchIdentity, ForeachArrowSink, FunctionCalls
from kcl_pipeline.leases.stored_shards import SinkShards, StoredShards
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome
from kcl_pipeline.testing.sink import FaultHook, InMemorySink, LogEntry, MemoryTable, SinkFault
from verification.simulation.checks.sink import Begun, Checks, is_seek
from verification.simulation.environment.calls import Calls


class CheckedTable(MemoryTable):
    """A table whose every new entry is checked.

    `promised` are pending writes of a function. `_restored` are the files that a RESTORE removed
    from an entry, by version.
    """

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.checks = checks
        self._restored: dict[int, tuple[DataFile, ...]] = {}
        self.promised: list[tuple[tuple[DataFile, ...], dict[str, StoredPosition], Begun]] = []

    def append(self, entry: LogEntry) -> bool:
        """See `MemoryTable.append`."""
        landed = super().append(entry)
        if landed:
            self.checks.landed(entry, self.objects)
        return landed

    def copy(self) -> tuple[tuple[LogEntry, ...], dict[str, StoredPosition]]:
        """Copy the table as `put_back` needs it."""
        return tuple(self.log), dict(self.positions)

    def put_back(self, copy: tuple[tuple[LogEntry, ...], dict[str, StoredPosition]]) -> bool:
        """Put a copy back, unless nothing has landed since or something else changed the table.

        Late entries are dropped.
        """
        log, positions = copy
        gone = self.log[len(log) :]
        is_older = bool(gone) and tuple(self.log[: len(log)]) == log
        if not is_older or any(is_seek(entry) for entry in gone):
            return False
        self.log[len(log) :] = []
        self.positions = dict(positions)
        self._waiting.clear()
        # The positions go back behind the rows that a RESTORE removed since the copy was made, so
        # those are read again as well.
        self.checks.taken_out(
            [
                replace(entry, files=self._restored.pop(entry.version, entry.files))
                for entry in gone
            ],
            self.objects,
            self.positions,
        )
        return True

    def restore(self, versions: int) -> bool:
        """Remove the rows of the newest versions by a new one; return whether there were any."""
        chosen = range(max(len(self.log) - versions, 1), len(self.log))
        had_rows = any(self.log[number].files for number in chosen)
        for number in chosen:
            files = self.log[number].files
            self._restored.setdefault(number, files)
            self.log[number] = replace(self.log[number], files=())
        self.append(LogEntry(len(self.log)))
        return had_rows

    def land_late(self) -> int:
        """See `MemoryTable.land_late`.

        Promised writes are applied in any case, before or after the same rows are written again.
        """
        promised, self.promised = self.promised, []
        for files, positions, begun in promised:
            names = [self.checks.name_of_key(key) for key in positions]
            self.checks.excuse(*names)
            with self.checks.begun_at(begun):
                self.append(LogEntry(self.version + 1, files, positions))
            self.checks.excuse(*names)
        return super().land_late() + len(promised)


def stored_shards(table: CheckedTable, clock: Clock, calls: Calls) -> StoredShards | None:
    """Return what a leader asks the table with. None: the table stores no positions."""
    if not table.checks.scenario.stores_positions:
        return None

    def fault(_operation: str, _keys: tuple[str, ...]) -> SinkFault | None:
        return calls.sink_fault("sink.positions")

    sink = InMemorySink(table, clock=clock, faults=fault)
    return SinkShards(lambda: sink)


class NotedSink(InMemorySink):
    """The sink of the table; it reports dead letters to the checks."""

    def __init__(
        self,
        table: CheckedTable,
        *,
        clock: Clock,
        faults: FaultHook,
        latency_seconds: float,
    ) -> None:
        super().__init__(table, clock=clock, faults=faults, latency_seconds=latency_seconds)
        self._checks = table.checks

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `Sink.write_dead_letters`."""
        super().write_dead_letters(records)
        self._checks.dead_lettered(records)


class StoreFunction(FunctionCalls[tuple[DataFile, ...]]):
    """The writer and the sink of a fleet whose function keeps the rows in a store of its own.

    It stores no positions, so a paused writer is not refused.
    """

    def __init__(
        self,
        table: CheckedTable,
        worker_id: str,
        writer: BatchWriter,
        *,
        clock: Clock,
        faults: FaultHook,
        latency_seconds: float,
    ) -> None:
        super().__init__(ForeachArrowSink(self._store), self._store)
        self._table = table
        self._worker_id = worker_id
        self._writer = writer
        self._clock = clock
        self._faults = faults
        self._latency = latency_seconds
        self._becomes: Mapping[str, StoredPosition] = {}

    def write(self, batch: Batch) -> Batch:
        """See `BatchWriter.write`."""
        written = self._writer.write(batch)
        if not written.files:
            return written
        kept = self.keep(batch, written.files, written.output_rows, ExitStack())
        return replace(written, files=(kept,))

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """See `BatchWriter.probe`."""
        return list(self._writer.probe(slices))

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """See `FunctionCalls.commit`. The checks follow batches without rows, too."""
        self._becomes = becomes
        if not files:
            self._table.append(LogEntry(self._table.version + 1, (), self._positions()))
        return super().commit(table_id, files, expected, becomes, schema)

    def _positions(self) -> dict[str, StoredPosition]:
        return {f"app/{key}": stored for key, stored in self._becomes.items()}

    def _store(self, rows: tuple[DataFile, ...], identity: BatchIdentity) -> None:  # noqa: ARG002
        """Store the rows at once. If the response is lost, they are stored at any later time."""
        names = tuple(map(self._table.checks.name_of_key, self._becomes))
        begun = self._table.checks.begins(names)
        fault = self._faults("commit", names)
        self._clock.sleep(self._latency)
        if fault is not None:
            self._table.checks.excuse(*names)
        if fault in (SinkFault.FAIL, SinkFault.LOSE_RACE):
            raise RuntimeError("failed on demand")
        # A paused writer is not refused, so records that the lease's new owner reads again come
        # twice. If two processes share an id, the row does not show which one is the owner.
        is_shared = self._worker_id in self._table.checks.shared_ids
        self._table.checks.excuse(
            *(
                key
                for key in names
                if is_shared
                or (row := self._table.checks.lease(key)) is None
                or row.actual_owner != self._worker_id
            )
        )
        if fault is SinkFault.LAND_LATE:
            self._table.promised.append((rows, self._positions(), begun))
            raise TimeoutError("on demand; the rows are under way")
        with self._table.checks.begun_at(begun):
            self._table.append(LogEntry(self._table.version + 1, rows, self._positions()))
        self._clock.sleep(self._latency)
        if fault is SinkFault.LAND_AND_FAIL:
            raise TimeoutError("on demand; the rows are there")

    def write_dead_letters(self, records: pa.Table) -> None:
        """Keep failed records."""
        self._faults("write_dead_letters", ())
        self._clock.sleep(self._latency)
        self._table.dead_letters.append(records)
        self._table.checks.dead_lettered(records)

"""The two checked sinks of a simulated fleet: a transactional one and a user's own store."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kcl_pipeline.batch import CommitEntry, CommitOutcome, DataFile, TxnVersions, Written
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.leases.stored_shards import SinkShards, StoredShards
from kcl_pipeline.testing.sink import FaultHook, InMemorySink, LogEntry, MemoryTable, SinkFault
from verification.simulation.checks.sink import Begun, Checks
from verification.simulation.environment.calls import TXN_VERSIONS_SITE, Calls


class CheckedTable(MemoryTable):
    """A table whose every new entry is checked.

    `promised` are pending writes of a non-transactional store.
    """

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.checks = checks
        self.promised: list[tuple[tuple[DataFile, ...], dict[str, int], Begun]] = []

    def append(self, entry: LogEntry) -> bool:
        """See `MemoryTable.append`."""
        landed = super().append(entry)
        if landed:
            self.checks.landed(entry, self.objects)
        return landed

    def land_late(self) -> int:
        """See `MemoryTable.land_late`.

        Promised writes are applied in any case, before or after the same rows are written again.
        """
        promised, self.promised = self.promised, []
        for files, numbers, begun in promised:
            self.checks.excuse(*numbers)
            with self.checks.begun_at(begun):
                self.append(LogEntry(self.version + 1, files, numbers))
            self.checks.excuse(*numbers)
        return super().land_late() + len(promised)


def stored_shards(table: CheckedTable, clock: Clock, calls: Calls) -> StoredShards | None:
    """Return what a leader asks the table with. None: the table stores no positions."""
    if not table.checks.scenario.stores_positions:
        return None

    def fault(_operation: str, _keys: tuple[str, ...]) -> SinkFault | None:
        return calls.sink_fault(TXN_VERSIONS_SITE)

    sink = InMemorySink(table, clock=clock, faults=fault)
    return SinkShards(lambda: sink)


class NotedSink(InMemorySink):
    """The transactional sink; it reports dead letters to the checks."""

    def __init__(
        self,
        table: CheckedTable,
        _worker_id: str,
        *,
        clock: Clock,
        faults: FaultHook,
        latency_seconds: float,
    ) -> None:
        super().__init__(table, clock=clock, faults=faults, latency_seconds=latency_seconds)
        self._checks = table.checks

    def prefers_short_names(self) -> bool:
        """See `ShortNames`. So applications are recorded with short names."""
        return True

    def name_positions(self, *, short: bool) -> None:
        """See `ShortNames`. A table in memory has no names."""

    def use_long_names(self) -> None:
        """See `ShortNames`."""

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `TransactionalSink.write_dead_letters`."""
        super().write_dead_letters(records)
        self._checks.dead_lettered(records)


class StoreSink:
    """A user's own store behind a function, as `spark.foreach.ForeachBatch` calls it.

    This process keeps the transaction versions in memory, and there is no fence.
    """

    def __init__(
        self,
        table: CheckedTable,
        worker_id: str,
        *,
        clock: Clock,
        faults: FaultHook,
        latency_seconds: float,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._clock = clock
        self._faults = faults
        self._latency = latency_seconds
        self._numbers: dict[str, TxnVersions] = {}

    def ensure_table(self, schema: pa.Schema) -> None:
        """Do nothing; the function has its own store."""

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """The batch numbers that this process has written."""
        return {key: self._numbers.get(key, TxnVersions()) for key in lease_keys}

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Call the function.

        Its rows are stored at once. If its response is lost, they are stored at any later time.
        """
        keys = tuple(entry.lease_key for entry in entries)
        refused = tuple(
            e.lease_key
            for e in entries
            if self._numbers.get(e.lease_key, TxnVersions()) != e.expected
        )
        if refused:
            return CommitOutcome(None, refused)
        begun = self._table.checks.begins(keys)
        fault = self._faults("commit", keys)
        self._clock.sleep(self._latency)
        if fault is not None:
            self._table.checks.excuse(*keys)
        if fault in (SinkFault.FAIL, SinkFault.LOSE_RACE):
            raise SinkError("the function failed on demand")
        numbers = {entry.lease_key: entry.number for entry in entries}
        # A paused writer is not fenced here, so records that the lease's new owner reads again come
        # twice. If two processes share an id, the row does not show which one is the owner.
        is_shared = self._worker_id in self._table.checks.shared_ids
        self._table.checks.excuse(
            *(
                key
                for key in keys
                if is_shared
                or (row := self._table.checks.lease(key)) is None
                or row.actual_owner != self._worker_id
            )
        )
        if fault is SinkFault.LAND_LATE:
            self._table.promised.append((written.files, numbers, begun))
            raise SinkError("the function timed out on demand; its rows are under way")
        with self._table.checks.begun_at(begun):
            self._table.append(LogEntry(self._table.version + 1, written.files, numbers))
        self._clock.sleep(self._latency)
        if fault is SinkFault.LAND_AND_FAIL:
            raise SinkError("the function timed out on demand; its rows are there")
        self._numbers |= {
            entry.lease_key: TxnVersions(entry.number, entry.expected.fence) for entry in entries
        }
        return CommitOutcome(self._table.version)

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """See `ForeachBatch.fence`."""
        return expected if self._numbers.get(lease_key, TxnVersions()) == expected else None

    def write_dead_letters(self, records: pa.Table) -> None:
        """Keep failed records."""
        self._faults("write_dead_letters", ())
        self._clock.sleep(self._latency)
        self._table.dead_letters.append(records)
        self._table.checks.dead_lettered(records)

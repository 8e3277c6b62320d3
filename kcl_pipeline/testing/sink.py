"""An in-memory sink and batch writer that behave like the Delta sink, with injected faults.

One test suite runs against this sink and the Delta sink. Every call lets time pass on the clock
before and after its effect, so a simulation can schedule any event in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import (
    NOTHING_WRITTEN,
    Batch,
    CommitEntry,
    CommitOutcome,
    DataFile,
    TxnVersions,
    Written,
    names_of,
)
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import Position
from kcl_pipeline.transform.arrow import apply_arrow_transform, probe_arrow_transform
from kcl_pipeline.transform.rejected import split_rejected

_LIMIT: Final = 2**63
"""The version of an application transaction is a signed 64-bit number."""


class SinkFault(StrEnum):
    """Faults of a sink call.

    `LAND_AND_FAIL`, `LAND_LATE` and `LOSE_RACE` concern commits and fences. `FAIL` concerns every
    call.
    """

    FAIL = "fail"
    """The call raises `SinkError` and has no effect."""
    LAND_AND_FAIL = "land_and_fail"
    """The entry is committed, and the call raises `SinkError`."""
    LAND_LATE = "land_late"
    """The call raises `SinkError`; `MemoryTable.land_late` commits the entry later.

    The entry is dropped if another entry has taken its version by then.
    """
    LOSE_RACE = "lose_race"
    """Another writer's entry takes the version first, and the call retries by itself."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One version of the table: the files it adds and the transaction versions it sets.

    `data` and `fence` map lease keys to versions. `positions` maps keys of `shard_key` to what
    the table stores after the entry.
    """

    version: int
    files: tuple[DataFile, ...] = ()
    data: Mapping[str, int] = field(default_factory=dict)
    fence: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, TxnVersions] = field(default_factory=dict)

    @property
    def batched(self) -> frozenset[str]:
        """The lease keys whose data version or position the entry sets."""
        return frozenset((*self.data, *(names_of(key)[0] for key in self.positions)))


FaultHook = Callable[[str, tuple[str, ...]], SinkFault | None]
"""Called once per call with the method's name and the lease keys; None means no fault."""


@dataclass
class MemoryTable:
    """State that all sinks of one table share: the log, files by path, dead letters.

    `log` is empty until the table is created. `id` is the table's id.
    """

    log: list[LogEntry] = field(default_factory=list)
    schema: pa.Schema | None = None
    objects: dict[str, pa.Table] = field(default_factory=dict)
    dead_letters: list[pa.Table] = field(default_factory=list)
    id: str = "table-0"
    _waiting: list[LogEntry] = field(default_factory=list, init=False)
    _numbers: dict[str, TxnVersions] = field(default_factory=dict, init=False)
    _landed: dict[tuple[str, int], int] = field(default_factory=dict, init=False)
    _positions: dict[str, TxnVersions] = field(default_factory=dict, init=False)

    @property
    def version(self) -> int:
        """The newest version; −1 if the table does not exist."""
        return len(self.log) - 1

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All committed files, in commit order.

        A file that was committed twice is listed twice.
        """
        return tuple(file for entry in self.log for file in entry.files)

    def rows(self) -> pa.Table | None:
        """All committed rows, or None if there are none.

        The files must be those of a `MemoryBatchWriter`.
        """
        tables = [self.objects[file.path] for file in self.files]
        return pa.concat_tables(tables, promote_options="default") if tables else None

    def txn_versions(self, lease_key: str) -> TxnVersions:
        """The transaction versions of a lease at the end of the log."""
        lease_key, shard_name = names_of(lease_key)
        found = self._numbers.get(lease_key, TxnVersions())
        if self.log:
            found = replace(found, table=self.id)
        stored = self._positions.get(shard_name or "")
        if stored is None:
            return found
        return replace(found, number=stored.number, position=stored.position, ended=stored.ended)

    def landed_at(self, lease_key: str, number: int) -> int | None:
        """The version of the table that set the data version of a lease to `number`, or None."""
        return self._landed.get((lease_key, number))

    def new_dead_letters(self, records: pa.Table) -> pa.Table:
        """Select the records that are not among the dead letters yet, by lease and position."""
        names = ["lease_key", "sequence_number", "sub_sequence_number"]
        if not set(names) <= set(records.column_names):
            return records
        kept = [table for table in self.dead_letters if set(names) <= set(table.column_names)]
        known = {tuple(row.values()) for table in kept for row in table.select(names).to_pylist()}
        rows = records.select(names).to_pylist()
        new = [number for number, row in enumerate(rows) if tuple(row.values()) not in known]
        return records.take(pa.array(new, pa.int64()))

    def land_late(self) -> int:
        """Commit the entries of `LAND_LATE` calls and return how many were committed.

        An entry is dropped if its version is taken.
        """
        waiting, self._waiting = self._waiting, []
        return sum(self.append(entry) for entry in waiting)

    def append(self, entry: LogEntry) -> bool:
        """Append the entry if its version is the next one, and return whether it was appended."""
        if entry.version != len(self.log):
            return False
        self.log.append(entry)
        for key in {**entry.data, **entry.fence}:
            now = self.txn_versions(key)
            self._numbers[key] = TxnVersions(
                entry.data.get(key, now.data), entry.fence.get(key, now.fence)
            )
        self._landed |= dict.fromkeys(entry.data.items(), entry.version)
        for key, stored in entry.positions.items():
            self._positions[names_of(key)[1] or ""] = stored
            number = self.txn_versions(names_of(key)[0])
            self._numbers[names_of(key)[0]] = replace(number, fence=stored.fence)
            self._landed[key, stored.number or 0] = entry.version
        return True

    def send_late(self, entry: LogEntry) -> None:
        """Keep an entry for `land_late`."""
        self._waiting.append(entry)


class InMemorySink:
    """A `TransactionalSink` on a `MemoryTable`.

    Args:
        table: The table to write to; a new one by default.
        clock: Measures the latency.
        faults: Chooses the fault of each call.
        latency_seconds: Time that passes before and after the effect of every call.
    """

    def __init__(
        self,
        table: MemoryTable | None = None,
        *,
        clock: Clock | None = None,
        faults: FaultHook | None = None,
        latency_seconds: float = 0.0,
    ) -> None:
        self.table = table if table is not None else MemoryTable()
        self._clock = clock or SystemClock()
        self.faults: FaultHook = faults or (lambda _operation, _keys: None)
        self._latency = latency_seconds

    def ensure_table(self, schema: pa.Schema) -> None:
        """See `TransactionalSink.ensure_table`."""
        self._before("ensure_table", ())
        if self.table.schema is None:
            self.table.schema = schema
            self.table.append(LogEntry(0))
        else:
            self._check_schema(schema)
        self._pass_time()

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """See `TransactionalSink.txn_versions`."""
        self._before("txn_versions", tuple(lease_keys))
        found = {key: self.table.txn_versions(key) for key in lease_keys}
        self._pass_time()
        return found

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """See `TransactionalSink.commit`."""
        keys = tuple(entry.lease_key for entry in entries)
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"a commit needs at least one lease, and each once: {list(keys)}")
        if same := [e.lease_key for e in entries if e.sets is None and e.is_at(e.expected)]:
            raise ValueError(
                f"the number of a batch must be new, and for {same} the table has it already"
            )
        if unfit := tuple(one.lease_key for one in entries if not -_LIMIT <= one.number < _LIMIT):
            return CommitOutcome(None, unfit, "its number is not one that a log can hold")
        fault = self._before("commit", keys)
        if self.table.version < 0:
            raise SinkError("the table does not exist; it was removed while a worker writes to it")
        self._check_schema(written.schema)
        while True:
            landed = self._landed(entries)
            if landed is not None:
                return CommitOutcome(landed)
            refused = tuple(
                entry.lease_key
                for entry in entries
                if not entry.expected.fits(self.table.txn_versions(entry.lease_key))
            )
            if refused:
                return CommitOutcome(None, refused)
            version = self._land(_log_entry(self.table.version + 1, written, entries), fault)
            if version is not None:
                return CommitOutcome(version)
            fault = None

    def _landed(self, entries: Sequence[CommitEntry]) -> int | None:
        """The version that already committed these entries, or None.

        All entries must have the same version, and it must be newer than those that set the
        expected data versions. The order matters because the batch numbers of a lease start again
        after its row is deleted by hand.
        """
        versions = {self.table.landed_at(entry.lease_key, entry.number) for entry in entries}
        version = versions.pop()
        if versions or version is None:
            return None
        stored = self.table.log[version].positions
        if any(e.sets is not None and stored.get(e.lease_key) != e.sets for e in entries):
            return None
        expected = (
            self.table.landed_at(e.lease_key, e.expected.data)
            for e in entries
            if e.expected.data is not None and e.sets is None
        )
        return version if all(before is None or before < version for before in expected) else None

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """See `TransactionalSink.fence`."""
        fault = self._before("fence", (lease_key,))
        raised = replace(expected, fence=(expected.fence or 0) + 1)
        entry = LogEntry(0, fence={names_of(lease_key)[0]: raised.fence or 0})
        return self._replace(lease_key, expected, raised, entry, fault)

    def move(
        self, key: str, expected: TxnVersions, position: Position | None, *, ended: bool
    ) -> TxnVersions | None:
        """See `PositionStore.move`. Its faults are those of a fence."""
        fault = self._before("fence", (key,))
        raised = expected.moved_to(position, ended=ended)
        return self._replace(key, expected, raised, LogEntry(0, positions={key: raised}), fault)

    def _replace(
        self,
        key: str,
        expected: TxnVersions,
        raised: TxnVersions,
        entry: LogEntry,
        fault: SinkFault | None,
    ) -> TxnVersions | None:
        if self.table.version < 0:
            return expected
        while expected.fits(self.table.txn_versions(key)):
            if self._land(replace(entry, version=self.table.version + 1), fault) is not None:
                return raised
            fault = None
        return None

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `TransactionalSink.write_dead_letters`."""
        self._before("write_dead_letters", ())
        new = self.table.new_dead_letters(records)
        if new.num_rows:
            self.table.dead_letters.append(new)
        self._pass_time()

    def _before(self, operation: str, keys: tuple[str, ...]) -> SinkFault | None:
        fault = self.faults(operation, keys)
        self._pass_time()
        if fault is SinkFault.FAIL:
            raise SinkError(f"{operation} failed on demand")
        return fault

    def _land(self, entry: LogEntry, fault: SinkFault | None) -> int | None:
        """Append the entry after some time.

        Returns its version, or None if another writer was first.
        """
        if fault is SinkFault.LOSE_RACE:
            self.table.append(LogEntry(entry.version))
        self._pass_time()
        if fault is SinkFault.LAND_LATE:
            self.table.send_late(entry)
            raise SinkError("the answer was lost on demand; the entry is under way")
        if not self.table.append(entry):
            return None
        self._pass_time()
        if fault is SinkFault.LAND_AND_FAIL:
            raise SinkError("the answer was lost on demand; the entry landed")
        return entry.version

    def _pass_time(self) -> None:
        self._clock.sleep(self._latency)

    def _check_schema(self, schema: pa.Schema) -> None:
        known = self.table.schema
        if known is None or schema is known:
            return
        wrong = [
            field.name
            for field in schema
            if field.name not in known.names or known.field(field.name).type != field.type
        ]
        if wrong:
            raise TableMismatchError(
                f"the transform's output does not fit the table: {', '.join(wrong)}"
            )


def _log_entry(version: int, written: Written, entries: Sequence[CommitEntry]) -> LogEntry:
    two_phase = [entry for entry in entries if entry.sets is None]
    return LogEntry(
        version,
        written.files,
        {entry.lease_key: entry.number for entry in two_phase},
        {e.lease_key: e.expected.fence for e in two_phase if e.expected.fence is not None},
        {entry.lease_key: entry.sets for entry in entries if entry.sets is not None},
    )


@lru_cache(maxsize=100)
def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([one.with_nullable(True) for one in schema])


class MemoryBatchWriter:
    """A `BatchWriter` that keeps its files in a `MemoryTable`.

    `transform` maps the records to a table of rows. None keeps the records unchanged.
    """

    def __init__(
        self, table: MemoryTable, transform: Callable[[pa.Table], pa.Table] | None = None
    ) -> None:
        self._table = table
        self._transform = transform

    def write(self, batch: Batch) -> Written:
        """Transform the records and keep the rows (see `BatchWriter.write`)."""
        if self._transform is not None and not batch.records.num_rows:
            return NOTHING_WRITTEN
        rows, rejected = split_rejected(apply_arrow_transform(self._transform, batch.records))
        schema = _nullable(rows.schema)
        if not rows.num_rows:
            return Written((), schema, 0, rejected)
        path = next(
            name
            for number in itertools.count()
            if (name := f"batches/{batch.batch_id}-{number}.parquet") not in self._table.objects
        )
        self._table.objects[path] = rows
        file = DataFile(path, rows.get_total_buffer_size(), rows.num_rows)
        return Written((file,), schema, rows.num_rows, rejected)

    def probe(self, parts: Sequence[pa.Table]) -> list[str | None]:
        """Call the transform on each part (see `BatchWriter.probe`)."""
        return probe_arrow_transform(self._transform, parts)

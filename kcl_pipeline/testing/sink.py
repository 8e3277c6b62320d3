"""An in-memory table, its sink, and its batch writer, with injected faults.

The sink is the committer of all table formats (`sinks.sink.TableSink`) on a log in memory. Every
call lets time pass on the clock before and after its effect, so a simulation can schedule any event
in between.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

import pyarrow as pa

from kcl_pipeline.batch import (
    Batch,
    DataFile,
    PartFailure,
    apply_arrow_transform,
    probe_arrow_transform,
    split_rejected,
)
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import NOTHING_STORED, StoredPosition
from kcl_pipeline.sinks.log import Head
from kcl_pipeline.sinks.sink import CommitOutcome, Positions, TableSink


class SinkFault(StrEnum):
    """Faults of a sink call.

    `LAND_AND_FAIL`, `LAND_LATE` and `LOSE_RACE` concern commits. `FAIL` concerns every call.
    """

    FAIL = "fail"
    """The call raises `SinkError` and has no effect."""
    LAND_AND_FAIL = "land_and_fail"
    """The entry is committed, and its answer is lost."""
    LAND_LATE = "land_late"
    """The answer is lost; `MemoryTable.land_late` commits the entry later.

    The entry is dropped if another entry has taken its version by then.
    """
    LOSE_RACE = "lose_race"
    """Another writer's entry takes the version first, and the call retries by itself."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One version of the table.

    Attributes:
        version: Its number, from 0.
        files: The files that it adds.
        positions: What the table stores after it, by application and key of the shard.
    """

    version: int
    files: tuple[DataFile, ...] = ()
    positions: Mapping[str, StoredPosition] = field(default_factory=dict)


FaultHook = Callable[[str, tuple[str, ...]], SinkFault | None]
"""Called once per call with the method's name and the keys of shards; None means no fault."""


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
    positions: dict[str, StoredPosition] = field(default_factory=dict)
    _waiting: list[LogEntry] = field(default_factory=list, init=False)

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

    def stored(self, shard_id: str) -> StoredPosition:
        """What the table stores for the shard of this id that was set last."""
        found = [one for key, one in self.positions.items() if key.endswith(f"/{shard_id}")]
        return found[-1] if found else NOTHING_STORED

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
        for key, stored in entry.positions.items():
            self.positions.pop(key, None)
            self.positions[key] = stored
        return True

    def send_late(self, entry: LogEntry) -> None:
        """Keep an entry for `land_late`."""
        self._waiting.append(entry)


@dataclass(frozen=True, slots=True)
class MemoryHead:
    """The `Head` of a `MemoryTable`, at the end of its log when it was read."""

    version: int
    table_id: str
    positions: Mapping[str, StoredPosition]
    form: str = ""
    changed: int = 0

    def stored(self, key: str) -> StoredPosition:
        """See `Head`."""
        return self.positions.get(key, NOTHING_STORED)


class MemoryLog:
    """The `Log` of a `MemoryTable`.

    Args:
        table: The table.
        pass_time: Called before and after the effect of `add`.

    Attributes:
        fault: The fault of the next `add`.
    """

    name = "memory"

    def __init__(self, table: MemoryTable, pass_time: Callable[[], None]) -> None:
        self.table = table
        self.fault: SinkFault | None = None
        self._pass_time = pass_time

    def ensure(self, schema: pa.Schema) -> bool:
        """See `Log`."""
        known = self.table.schema
        if known is None:
            self.table.schema = schema
            return self.table.append(LogEntry(0))
        if schema is known:
            return False
        wrong = [
            field.name
            for field in schema
            if field.name not in known.names or known.field(field.name).type != field.type
        ]
        if wrong:
            raise TableMismatchError(
                f"the transform's output does not fit the table: {', '.join(wrong)}"
            )
        return False

    def read(self) -> MemoryHead | None:
        """See `Log`."""
        table = self.table
        if table.version < 0:
            return None
        changed = len(table.log[-1].positions)
        form = "" if table.schema is None else _shown(table.schema)
        return MemoryHead(table.version, table.id, dict(table.positions), form, changed)

    peek = read

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        """See `Log`. Faults happen here."""
        fault, self.fault = self.fault, None
        entry = LogEntry(head.version + 1, tuple(files), dict(sets))
        if fault is SinkFault.LOSE_RACE:
            self.table.append(LogEntry(entry.version))
        self._pass_time()
        if fault is SinkFault.LAND_LATE:
            self.table.send_late(entry)
            raise OSError("the answer was lost on demand; the entry is under way")
        if self.table.id != head.table_id or not self.table.append(entry):
            raise OSError(f"version {entry.version} exists")
        self._pass_time()
        if fault is SinkFault.LAND_AND_FAIL:
            raise OSError("the answer was lost on demand; the entry landed")

    def batch_name(self, files: Sequence[DataFile]) -> str | None:  # noqa: ARG002
        """See `Log`. Nothing is announced."""
        return None

    def problem(self, name: str, files: Sequence[DataFile]) -> str | None:  # noqa: ARG002
        """See `Log`."""
        missing = [one.path for one in files if one.path not in self.table.objects]
        return f"a file is missing: {missing[0]}" if missing else None

    def upkeep(self, version: int) -> None:
        """See `Log`."""


class InMemorySink(TableSink):
    """The sink of a `MemoryTable`: the committer of all table formats, with injected faults.

    Args:
        table: The table to write to; a new one by default.
        clock: Measures the latency.
        faults: Chooses the fault of each call.
        latency_seconds: Time that passes before and after the effect of every call.
        application: Name of the application.
        rng: Spreads the waits of writers that meet.
    """

    def __init__(
        self,
        table: MemoryTable | None = None,
        *,
        clock: Clock | None = None,
        faults: FaultHook | None = None,
        latency_seconds: float = 0.0,
        application: str = "app",
        rng: random.Random | None = None,
    ) -> None:
        self.table = table if table is not None else MemoryTable()
        self.faults: FaultHook = faults or (lambda _operation, _keys: None)
        self._latency = latency_seconds
        self._time = clock or SystemClock()
        self._memory = MemoryLog(self.table, self._pass_time)
        super().__init__(
            self._memory,
            application,
            dead_letters=self._keep,
            clock=self._time,
            rng=rng or random.Random(application),
        )

    def ensure(self, schema: pa.Schema) -> None:
        """See `Sink.ensure`."""
        self._before("ensure", ())
        super().ensure(schema)
        self._pass_time()

    def positions(self, keys: Sequence[str]) -> Positions:
        """See `Sink.positions`."""
        self._before("positions", tuple(keys))
        found = super().positions(keys)
        self._pass_time()
        return found

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """See `Sink.commit`."""
        self._memory.fault = self._before("commit", tuple(expected))
        return super().commit(table_id, files, expected, becomes, schema)

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `Sink.write_dead_letters`."""
        self._before("write_dead_letters", ())
        super().write_dead_letters(records)
        self._pass_time()

    def _keep(self, records: pa.Table) -> None:
        self.table.dead_letters.append(records)

    def _before(self, operation: str, keys: tuple[str, ...]) -> SinkFault | None:
        fault = self.faults(operation, keys)
        self._pass_time()
        if fault is SinkFault.FAIL:
            raise SinkError(f"{operation} failed on demand")
        return fault

    def _pass_time(self) -> None:
        self._time.sleep(self._latency)


@lru_cache(maxsize=100)
def _shown(schema: pa.Schema) -> str:
    return str(schema)


@lru_cache(maxsize=100)
def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([one.with_nullable(True) for one in schema])


class MemoryBatchWriter:
    """A `BatchWriter` that keeps its files in a `MemoryTable`.

    Attributes:
        transform: Maps the records to a table of rows. It may be replaced between batches. None:
            the records are kept unchanged.
    """

    def __init__(
        self, table: MemoryTable, transform: Callable[[pa.Table], pa.Table] | None = None
    ) -> None:
        self._table = table
        self.transform = transform

    def write(self, batch: Batch) -> Batch:
        """Transform the records and keep the rows (see `BatchWriter.write`)."""
        if self.transform is not None and not batch.records.num_rows:
            return replace(batch, files=())
        rows, rejected = split_rejected(apply_arrow_transform(self.transform, batch.records))
        schema = _nullable(rows.schema)
        if not rows.num_rows:
            return replace(batch, files=(), output_schema=schema, rejected=rejected)
        path = next(
            name
            for number in itertools.count()
            if (name := f"batches/{batch.batch_id}-{number}.parquet") not in self._table.objects
        )
        self._table.objects[path] = rows
        file = DataFile(path, rows.get_total_buffer_size(), rows.num_rows)
        return replace(batch, files=(file,), output_schema=schema, rejected=rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Call the transform on each part (see `BatchWriter.probe`)."""
        return probe_arrow_transform(self.transform, slices)

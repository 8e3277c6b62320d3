"""The conformance suite, on each sink of the package, and on sinks that are wrong."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, DataFile
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaSink, DeltaTableLog
from kcl_pipeline.errors import SinkError
from kcl_pipeline.foreach import BatchIdentity, ForeachArrow, ForeachArrowSink
from kcl_pipeline.position import NOTHING_STORED, StoredPosition, check_entries
from kcl_pipeline.sinks.sink import CommitOutcome, Positions, Sink
from kcl_pipeline.testing.conformance import (
    SCHEMA,
    FunctionUnderTest,
    LogUnderTest,
    SinkCase,
    SinkUnderTest,
    Step,
    at_least_once_cases,
    exactly_once_cases,
)
from kcl_pipeline.testing.sink import (
    InMemorySink,
    MemoryBatchWriter,
    MemoryLog,
    MemoryTable,
    SinkFault,
)
from tests.support.memory_function import InMemoryFunction

every_exactly_once_case = pytest.mark.parametrize("case", exactly_once_cases(), ids=str)


def staged(
    writer: MemoryBatchWriter | ArrowBatchWriter,
) -> Callable[[pa.Table], tuple[DataFile, ...]]:
    return lambda rows: writer.write(Batch("b", (), rows)).written_files


def memory() -> LogUnderTest:
    table = MemoryTable()

    def ids() -> list[int]:
        rows = table.rows()
        return [] if rows is None else rows["id"].to_pylist()

    def remove() -> None:
        table.log.clear()
        table.positions.clear()
        table.schema = None
        table.id = f"{table.id}, again"
        InMemorySink(table).ensure(SCHEMA)

    return LogUnderTest(
        lambda: MemoryLog(table, lambda: None),
        staged(MemoryBatchWriter(table)),
        ids,
        remove,
        lambda: copy_of(table),
    )


def copy_of(table: MemoryTable) -> Callable[[], None]:
    log, positions = list(table.log), dict(table.positions)

    def put_back() -> None:
        table.log, table.positions = list(log), dict(positions)

    return put_back


def delta(folder: Path) -> LogUnderTest:
    uri = str(folder)

    def log() -> DeltaTableLog:
        return DeltaTableLog(DeltaSink(uri), SystemClock(), random.Random(1), "app")

    def ids() -> list[int]:
        if not (folder / "_delta_log").exists():
            return []
        return DeltaTable(uri).to_pyarrow_table()["id"].to_pylist()

    def remove() -> None:
        shutil.rmtree(folder)
        log().ensure(SCHEMA)

    def copy() -> Callable[[], None]:
        older = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, older)

        def put_back() -> None:
            shutil.rmtree(folder)
            shutil.move(older, folder)

        return put_back

    return LogUnderTest(log, staged(ArrowBatchWriter(None, uri)), ids, remove, copy)


@every_exactly_once_case
def test_a_table_in_memory(case: SinkCase[SinkUnderTest]) -> None:
    case.run(memory)


@every_exactly_once_case
def test_a_delta_table(case: SinkCase[SinkUnderTest], tmp_path: Path) -> None:
    number = itertools.count()
    case.run(lambda: delta(tmp_path / str(next(number))))


class Function:
    """`InMemoryFunction` under test."""

    def __init__(self) -> None:
        self.table = MemoryTable()
        self._faults: list[SinkFault] = []

    def open(self) -> Sink:
        return InMemoryFunction(
            self.table, faults=lambda *_: self._faults.pop() if self._faults else None
        )

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        return MemoryBatchWriter(self.table).write(Batch("b", (), rows)).written_files

    def ids(self) -> Sequence[int]:
        rows = self.table.rows()
        return [] if rows is None else rows["id"].to_pylist()

    def fail(self) -> None:
        self._faults.append(SinkFault.FAIL)


class ArrowFunction:
    """A `ForeachArrowSink` under test: the function collects the ids."""

    def __init__(self) -> None:
        self._got: list[int] = []
        self._fails = False

    def _function(self, rows: pa.Table, _identity: BatchIdentity) -> None:
        if self._fails:
            self._fails = False
            raise ConnectionError("the store is down on demand")
        self._got.extend(rows["id"].to_pylist())

    def open(self) -> ForeachArrow:
        self._sink = ForeachArrow(ForeachArrowSink(self._function))
        return self._sink

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        return self._sink.write(Batch("b", (), rows)).written_files

    def ids(self) -> list[int]:
        return self._got

    def fail(self) -> None:
        self._fails = True


@pytest.mark.parametrize("make", [Function, ArrowFunction])
@pytest.mark.parametrize("case", at_least_once_cases(), ids=str)
def test_a_function(
    case: SinkCase[FunctionUnderTest], make: Callable[[], FunctionUnderTest]
) -> None:
    case.run(make)


# -- sinks that are wrong


class Simple:
    """A sink that is written without `TableSink`, with one defect or none.

    It commits in two steps: it compares, then it changes the table if that is as compared.
    """

    stores_positions = True

    def __init__(self, table: SimpleTable, step: Step) -> None:
        self._table = table
        self._step = step

    def ensure(self, schema: pa.Schema) -> None:
        self._table.log.ensure(schema)

    def positions(self, keys: Sequence[str]) -> Positions:
        head = self._table.log.read()
        if head is None:
            return Positions(None, dict.fromkeys(keys, NOTHING_STORED))
        return Positions(head.table_id, {key: head.stored(key) for key in keys})

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        defect = self._table.defect
        if defect != "any number":
            check_entries(expected, becomes)
        self._step("before read")
        now = self.positions(list(expected))
        self._step("after read")
        if now.table_id != table_id and defect != "no id":
            return CommitOutcome(None, tuple(expected))
        wrong = self._wrong(now, expected)
        if now.shards == becomes and defect != "a repeated commit is refused":
            return CommitOutcome(len(self._table.memory.log))
        if wrong and defect == "the others land":
            rest = {key: stored for key, stored in becomes.items() if key not in wrong}
            self._table.add(files, rest, self._step)
        if wrong and defect == "all are refused":
            wrong = list(expected)
        if wrong:
            return CommitOutcome(None, tuple(wrong))
        self._step("before add")
        if self.positions(list(now.shards)) != now and defect != "two successors":
            raise SinkError("the table has changed")
        self._table.add(files, becomes, self._step)
        self._step("after add")
        return CommitOutcome(len(self._table.memory.log))

    def _wrong(self, now: Positions, expected: Mapping[str, StoredPosition]) -> list[str]:
        """The keys of which something differs."""
        compared = {key: (stored, now.shards[key]) for key, stored in expected.items()}
        match self._table.defect:
            case "no comparison":
                return []
            case "no number":
                return [k for k, (a, b) in compared.items() if replace(a, number=b.number) != b]
            case "no position":
                return [k for k, (a, b) in compared.items() if a.number != b.number]
        return [key for key, (a, b) in compared.items() if a != b]

    def write_dead_letters(self, records: pa.Table) -> None:
        raise SinkError("no dead letters")


class SimpleTable:
    """The table of `Simple`."""

    def __init__(self, defect: str = "") -> None:
        self.defect = defect
        self.memory = MemoryTable()
        self.log = MemoryLog(self.memory, lambda: None)

    def open(self, step: Step) -> Sink:
        def reported(name: str) -> None:
            try:
                step(name)
            except OSError as error:
                raise SinkError(str(error)) from error

        return Simple(self, reported)

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        return MemoryBatchWriter(self.memory).write(Batch("b", (), rows)).written_files

    def ids(self) -> Sequence[int]:
        rows = self.memory.rows()
        return [] if rows is None else rows["id"].to_pylist()

    def replace(self) -> None:
        self.memory.log.clear()
        if self.defect != "positions stay":
            self.memory.positions.clear()
        self.memory.schema = None
        if self.defect != "the id stays":
            self.memory.id += " again"
        self.log.ensure(SCHEMA)

    def copy(self) -> Callable[[], None]:
        return copy_of(self.memory)

    def add(
        self, files: Sequence[DataFile], becomes: Mapping[str, StoredPosition], step: Step
    ) -> None:
        sets = {key: self._stored(key, stored) for key, stored in becomes.items()}
        head = self.log.read()
        assert head is not None
        if self.defect == "files first":
            self.log.add(head, files, {})
            step("between")
            head, files = self.log.read(), ()
        elif self.defect == "positions first":
            self.log.add(head, (), sets)
            step("between")
            head, sets = self.log.read(), {}
        elif self.defect == "one shard after the other":
            first = dict([next(iter(sets.items()))])
            self.log.add(head, files, first)
            step("between")
            head, files = self.log.read(), ()
        elif self.defect == "no files":
            files = ()
        assert head is not None
        self.log.add(head, files, sets)

    def _stored(self, key: str, becomes: StoredPosition) -> StoredPosition:
        position = becomes.position
        match self.defect:
            case "entries are removed" if position is None and not becomes.ended:
                return NOTHING_STORED
            case "the number begins again" if position is None:
                return replace(becomes, number=1)
            case "no sub-sequence number" if position is not None:
                return replace(becomes, position=replace(position, sub_sequence_number=0))
            case "positions of 64 bits" if position is not None and len(str(position)) > 20:
                return replace(becomes, position=replace(position, sequence_number="1"))
            case "ends are not stored":
                return replace(becomes, ended=False)
            case "a position never falls" if position is not None:
                before = self.memory.positions.get(key, NOTHING_STORED).position
                return replace(becomes, position=max(position, before or position))
        return becomes


@every_exactly_once_case
def test_a_sink_of_its_own(case: SinkCase[SinkUnderTest]) -> None:
    case.run(SimpleTable)


@pytest.mark.parametrize(
    ("defect", "found_by"),
    [
        ("no comparison", "a stale writer"),
        ("no number", "a seek"),
        ("no position", "an older copy that is put back"),
        ("no id", "a replaced table"),
        ("the id stays", "a replaced table"),
        ("positions stay", "a replaced table"),
        ("two successors", "another writer at each step"),
        ("a repeated commit is refused", "a commit that is repeated"),
        ("the others land", "all shards or none"),
        ("all are refused", "all shards or none"),
        ("any number", "a number that is not the next one"),
        ("files first", "a crash at each step"),
        ("positions first", "a crash at each step"),
        ("one shard after the other", "a crash at each step"),
        ("no files", "a commit"),
        ("entries are removed", "a seek"),
        ("the number begins again", "a seek"),
        ("a position never falls", "a seek"),
        ("no sub-sequence number", "positions of any size"),
        ("positions of 64 bits", "positions of any size"),
        ("ends are not stored", "a commit without files"),
    ],
)
def test_a_wrong_sink_is_found(defect: str, found_by: str) -> None:
    failed = []
    for case in exactly_once_cases():
        try:
            case.run(lambda: SimpleTable(defect))
        except AssertionError as error:
            print(f"{case}: {error}")
            failed.append(case.name)
    assert found_by in failed

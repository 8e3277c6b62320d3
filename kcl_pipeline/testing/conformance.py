"""Check that a sink keeps its promises, whatever it is made of.

`exactly_once_cases` are for sinks that store positions (`sinks.sink.Sink`), `at_least_once_cases`
for functions. A case runs against a new, empty table as often as it needs one: crashes, lost
answers and other writers are tried at every step that the sink reports. For a format that
implements `sinks.log.Log`, `LogUnderTest` reports every call of the log.

Example:
    >>> from kcl_pipeline.testing.conformance import exactly_once_cases
    >>> [case.name for case in exactly_once_cases()][:2]
    ['a new table', 'a commit']
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.errors import SinkError, TableMismatchError, TransformFailedError
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.sinks.log import Head, Log
from kcl_pipeline.sinks.sink import CommitOutcome, Sink, TableSink

SCHEMA: Final = pa.schema([("id", pa.int64()), ("text", pa.string())])
"""Columns of the rows that the cases write."""

Step = Callable[[str], None]
"""Called with the name of a step; an exception that it raises passes through the sink."""

_PARENT: Final = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000001"
_SHARD: Final = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000002"
_OTHER: Final = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000003"
_OLDEST: Final = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000000"
_MOST_STEPS: Final = 200


class SinkUnderTest(Protocol):
    """One table that a case works on. It is empty, and does not exist yet, when it is made."""

    def open(self, step: Step) -> Sink:
        """Open the table as a new process does.

        Args:
            step: Call it before and after each call of the store, also inside of a commit.
        """

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        """Write files with rows of `SCHEMA` that no reader sees."""

    def ids(self) -> Sequence[int]:
        """Return the column `id` of all rows of the table, in any order."""

    def replace(self) -> None:
        """Remove the table, and create another one of `SCHEMA` at its address."""

    def copy(self) -> Callable[[], None]:
        """Copy the table as it is now.

        Returns:
            A function that puts the copy in the place of the table.
        """


class FunctionUnderTest(Protocol):
    """One function as a sink. Nothing has been written when it is made."""

    def open(self) -> Sink:
        """Return the sink as a new process makes it."""

    def stage(self, rows: pa.Table) -> tuple[DataFile, ...]:
        """Prepare a batch of rows of `SCHEMA` for the sink that was opened last."""

    def ids(self) -> Sequence[int]:
        """Return the column `id` of all rows that the function got, in any order."""

    def fail(self) -> None:
        """Let the next call of the function raise an exception."""


_Tested = TypeVar("_Tested")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class SinkCase(Generic[_Tested]):
    """One promise.

    Attributes:
        name: What it is about.
        run: Checks it. The argument makes a new, empty sink. Raises `AssertionError` with what is
            wrong.
    """

    name: str
    run: Callable[[Callable[[], _Tested]], None]

    def __str__(self) -> str:
        return self.name


def exactly_once_cases() -> tuple[SinkCase[SinkUnderTest], ...]:
    """Return what a sink that stores positions must do."""
    return (
        SinkCase("a new table", _new_table),
        SinkCase("a commit", _commit),
        SinkCase("a commit that is repeated", _repeated),
        SinkCase("a commit without files", _without_files),
        SinkCase("a crash at each step", _crash),
        SinkCase("a lost answer at each step", _lost_answer),
        SinkCase("another writer at each step", _two_writers),
        SinkCase("the same commit at each step", _sent_twice),
        SinkCase("a stale writer", _stale_writer),
        SinkCase("all shards or none", _all_or_none),
        SinkCase("a replaced table", _replaced),
        SinkCase("an older copy that is put back", _older_copy),
        SinkCase("a child before the end of its ancestors", _child),
        SinkCase("an ancestor at each step of the child's first commit", _child_and_ancestor),
        SinkCase("a seek", _seek),
        SinkCase("a number that is not the next one", _not_next),
        SinkCase("positions of any size", _positions),
        SinkCase("many shards", _many_shards),
        SinkCase("columns that do not fit", _columns),
    )


def at_least_once_cases() -> tuple[SinkCase[FunctionUnderTest], ...]:
    """Return what a function as a sink must do."""
    return (
        SinkCase("it stores no position", _stores_nothing),
        SinkCase("every batch arrives", _batches_arrive),
        SinkCase("a call that fails is repeated", _failed_call),
        SinkCase("a number that is not the next one", _function_not_next),
    )


class LogUnderTest:
    """A `SinkUnderTest` for a format that implements `Log`.

    Args:
        log: Opens the log as a new process does.
        stage: See `SinkUnderTest.stage`.
        ids: See `SinkUnderTest.ids`.
        replace: See `SinkUnderTest.replace`.
        copy: See `SinkUnderTest.copy`.
        sink: Makes the sink over the log. By default a `TableSink` without announcements.
    """

    def __init__(
        self,
        log: Callable[[], Log],
        stage: Callable[[pa.Table], tuple[DataFile, ...]],
        ids: Callable[[], Sequence[int]],
        replace: Callable[[], None],
        copy: Callable[[], Callable[[], None]],
        sink: Callable[[Log], Sink] | None = None,
    ) -> None:
        self._log = log
        self.stage = stage
        self.ids = ids
        self.replace = replace
        self.copy = copy
        self._sink = sink or (
            lambda log: TableSink(log, "conformance", dead_letters=lambda _records: None)
        )

    def open(self, step: Step) -> Sink:
        """See `SinkUnderTest.open`."""
        return self._sink(_SteppedLog(self._log(), step))


class _SteppedLog:
    """A log that reports the begin and the end of each call."""

    def __init__(self, log: Log, step: Step) -> None:
        self._log = log
        self._step = step

    @property
    def name(self) -> str:
        return self._log.name

    def _call(self, name: str, call: Callable[[], _Result]) -> _Result:
        self._step(f"before {name}")
        result = call()
        self._step(f"after {name}")
        return result

    def ensure(self, schema: pa.Schema) -> bool:
        return self._call("ensure", lambda: self._log.ensure(schema))

    def read(self) -> Head | None:
        return self._call("read", self._log.read)

    def peek(self) -> Head | None:
        return self._call("peek", self._log.peek)

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        self._call("add", lambda: self._log.add(head, files, sets))

    def batch_name(self, files: Sequence[DataFile]) -> str | None:
        return self._log.batch_name(files)

    def problem(self, name: str, files: Sequence[DataFile]) -> str | None:
        return self._log.problem(name, files)

    def upkeep(self, version: int) -> None:
        self._call("upkeep", lambda: self._log.upkeep(version))


class _CrashError(BaseException):
    """The process ends: nothing handles it."""


class _At:
    """Does something at one step of a run."""

    def __init__(self, number: int, does: Callable[[], object]) -> None:
        self._left = number
        self._does = does
        self.name = ""

    def __call__(self, name: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.name = name
            self._does()


def _raise(error: BaseException) -> Callable[[], None]:
    def does() -> None:
        raise error

    return does


def _nothing(_step: str) -> None:
    """Let a step pass."""


def _each_step(run: Callable[[int], _At]) -> None:
    """Run with something that happens at the first step, the second one, and so on."""
    for number in itertools.count(1):
        if not run(number).name:
            return
        if number > _MOST_STEPS:
            raise AssertionError(f"a commit has more than {_MOST_STEPS} steps")


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


def _rows(*ids: int) -> pa.Table:
    texts = pa.array([str(one) for one in ids], pa.string())
    return pa.table({"id": pa.array(ids, pa.int64()), "text": texts}, schema=SCHEMA)


class _Entry(NamedTuple):
    """One shard of a commit."""

    key: str
    expected: StoredPosition
    becomes: StoredPosition


class _Writer:
    """One process that writes to the table."""

    def __init__(self, table: SinkUnderTest, step: Step = _nothing) -> None:
        self._table = table
        self._step = step
        self.sink = table.open(step)
        self.table_id: str | None = None
        self.stored: dict[str, StoredPosition] = {}

    def read(self, *keys: str) -> _Writer:
        found = self.sink.positions(list(keys))
        _require(set(found.shards) == set(keys), f"positions() lacks a key: {sorted(found.shards)}")
        self.table_id, self.stored = found.table_id, self.stored | dict(found.shards)
        return self

    def ready(self, *keys: str) -> _Writer:
        self.sink.ensure(SCHEMA)
        return self.read(*keys)

    def entry(self, key: str, position: int | None, *, ended: bool = False) -> _Entry:
        at = None if position is None else Position(str(position))
        expected = self.stored.get(key, NOTHING_STORED)
        return _Entry(key, expected, expected.moved(at, ended=ended))

    def commit(self, files: Sequence[DataFile], *entries: _Entry) -> CommitOutcome:
        self._step("before commit")
        expected = {entry.key: entry.expected for entry in entries}
        becomes = {entry.key: entry.becomes for entry in entries}
        schema = SCHEMA if files else None
        outcome = self.sink.commit(self.table_id, files, expected, becomes, schema)
        self._step("after commit")
        return outcome


def _landed(outcome: CommitOutcome, what: str) -> None:
    _require(outcome.version is not None, f"{what} was refused: {outcome.refused}")


def _refused(outcome: CommitOutcome, keys: set[str], what: str) -> None:
    _require(outcome.version is None, f"{what} landed")
    _require(set(outcome.refused) == keys, f"{what}: refused is {outcome.refused}, not {keys}")


def _has(table: SinkUnderTest, ids: Sequence[int], what: str) -> None:
    found = sorted(table.ids())
    _require(found == sorted(ids), f"{what}: the table has the rows {found}, not {sorted(ids)}")


def _stores(table: SinkUnderTest, key: str, expected: StoredPosition, what: str) -> None:
    found = _Writer(table).read(key).stored[key]
    _require(found == expected, f"{what}: the table stores {found}, not {expected}")


def _at(number: int, position: int | None, *, ended: bool = False) -> StoredPosition:
    return StoredPosition(number, None if position is None else Position(str(position)), ended)


# -- sinks that store positions


def _new_table(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    _require(table.open(_nothing).stores_positions, "stores_positions is False")
    before = _Writer(table).read(_SHARD)
    _require(before.table_id is None, "a table that does not exist has an id")
    _require(before.stored[_SHARD] == NOTHING_STORED, "a table that does not exist has a position")
    first = _Writer(table).ready(_SHARD)
    _require(first.table_id, "a table has no id")
    _require(first.stored[_SHARD] == NOTHING_STORED, "a new table has a position")
    again = _Writer(table).ready(_SHARD)
    _require(again.table_id == first.table_id, "the id of a table changes when it is opened again")
    _has(table, [], "a new table")


def _commit(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD, _OTHER)
    files = table.stage(_rows(1, 2))
    _has(table, [], "after files were written, before their commit")
    _landed(writer.commit(files, writer.entry(_SHARD, 2)), "the first commit")
    _has(table, [1, 2], "after a commit")
    _stores(table, _SHARD, _at(1, 2), "after a commit")
    _stores(table, _OTHER, NOTHING_STORED, "a shard that was not in the commit")
    writer.read(_SHARD, _OTHER)
    entries = writer.entry(_SHARD, 3), writer.entry(_OTHER, 4)
    _landed(writer.commit(table.stage(_rows(3, 4)), *entries), "a commit of two shards")
    _has(table, [1, 2, 3, 4], "after a second commit")
    _stores(table, _SHARD, _at(2, 3), "after a second commit")
    _stores(table, _OTHER, _at(1, 4), "after a first commit")


def _repeated(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    files, entry = table.stage(_rows(1)), writer.entry(_SHARD, 1)
    _landed(writer.commit(files, entry), "a commit")
    _landed(writer.commit(files, entry), "a commit that has landed and is repeated")
    _landed(_Writer(table).read().commit(files, entry), "a commit that a new process repeats")
    _has(table, [1], "after a commit was repeated")
    _stores(table, _SHARD, _at(1, 1), "after a commit was repeated")


def _without_files(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    _landed(writer.commit((), writer.entry(_SHARD, 5)), "a commit without files")
    _stores(table, _SHARD, _at(1, 5), "after a commit without files")
    writer.read(_SHARD)
    _landed(writer.commit((), writer.entry(_SHARD, 5, ended=True)), "the end of a shard")
    _stores(table, _SHARD, _at(2, 5, ended=True), "after the end of a shard")
    late = writer.commit(table.stage(_rows(6)), writer.entry(_SHARD, 6))
    _refused(late, {_SHARD}, "a commit that does not know the end")
    _has(table, [], "after commits without files")


def _crash(make: Callable[[], SinkUnderTest]) -> None:
    def run(number: int) -> _At:
        table, at = make(), _At(number, _raise(_CrashError()))
        try:
            writer = _Writer(table, at).ready(_SHARD, _OTHER)
            files = table.stage(_rows(1, 2))
            writer.commit(files, writer.entry(_SHARD, 1), writer.entry(_OTHER, 2))
        except _CrashError:
            pass
        what = f"after a crash {at.name}"
        taker = _Writer(table).ready(_SHARD, _OTHER)
        landed = taker.stored[_SHARD] != NOTHING_STORED
        _require(
            (taker.stored[_OTHER] != NOTHING_STORED) == landed, f"{what}: one of two shards landed"
        )
        _has(table, [1, 2] if landed else [], what)
        if not landed:
            again = taker.entry(_SHARD, 1), taker.entry(_OTHER, 2)
            _landed(taker.commit(table.stage(_rows(1, 2)), *again), f"a commit {what}")
        _has(table, [1, 2], f"a commit {what}")
        _stores(table, _SHARD, _at(1, 1), what)
        _stores(table, _OTHER, _at(1, 2), what)
        return at

    _each_step(run)


def _lost_answer(make: Callable[[], SinkUnderTest]) -> None:
    def run(number: int) -> _At:
        table = make()
        _Writer(table).ready()
        at = _At(number, _raise(OSError("the answer was lost on demand")))
        files = table.stage(_rows(1))
        sink = table.open(at)
        table_id = _Writer(table).read().table_id
        expected, becomes = {_SHARD: NOTHING_STORED}, {_SHARD: _at(1, 1)}
        try:
            outcome = sink.commit(table_id, files, expected, becomes, SCHEMA)
        except SinkError:
            outcome = sink.commit(table_id, files, expected, becomes, SCHEMA)
        except OSError as error:
            raise AssertionError(
                f"a commit whose answer is lost {at.name} raises {error!r}, not SinkError"
            ) from error
        _landed(outcome, f"a commit after an answer was lost {at.name}")
        _has(table, [1], f"after an answer was lost {at.name}")
        _stores(table, _SHARD, _at(1, 1), f"after an answer was lost {at.name}")
        return at

    _each_step(run)


def _two_writers(make: Callable[[], SinkUnderTest]) -> None:
    """While one writer is between two steps, another one takes the shard and commits."""

    def run(number: int) -> _At:
        table = make()
        _Writer(table).ready()

        def other() -> None:
            taker = _Writer(table).read(_SHARD)
            _landed(taker.commit(table.stage(_rows(7)), taker.entry(_SHARD, 7)), "a taker's commit")

        at = _At(number, other)
        writer = _Writer(table).read(_SHARD)
        writer = _with_steps(table, writer, at)
        files = table.stage(_rows(1))
        outcome = _until_known(writer, files, writer.entry(_SHARD, 1))
        what = f"a taker commits {at.name}" if at.name else "no taker commits"
        if not at.name:
            _has(table, [1], what)
        elif outcome.version is None:
            _has(table, [7], what)
            _stores(table, _SHARD, _at(1, 7), what)
        else:
            _has(table, [1, 7], what)
            _stores(table, _SHARD, _at(2, 7), what)
        return at

    _each_step(run)


def _sent_twice(make: Callable[[], SinkUnderTest]) -> None:
    """A commit that was thought to be lost arrives while it is repeated."""

    def run(number: int) -> _At:
        table = make()
        _Writer(table).ready()
        files = table.stage(_rows(1))

        def other() -> None:
            first = _Writer(table).read(_SHARD)
            first.stored[_SHARD] = NOTHING_STORED
            _landed(first.commit(files, first.entry(_SHARD, 1)), "the commit that was late")

        at = _At(number, other)
        writer = _with_steps(table, _Writer(table).read(_SHARD), at)
        outcome = _until_known(writer, files, writer.entry(_SHARD, 1))
        what = f"the same commit arrives {at.name}"
        _landed(outcome, what)
        _has(table, [1], what)
        _stores(table, _SHARD, _at(1, 1), what)
        return at

    _each_step(run)


def _with_steps(table: SinkUnderTest, reader: _Writer, step: Step) -> _Writer:
    """Return a writer whose steps are reported, and that knows what another one has read."""
    writer = _Writer(table, step)
    writer.table_id, writer.stored = reader.table_id, reader.stored
    return writer


def _until_known(writer: _Writer, files: Sequence[DataFile], *entries: _Entry) -> CommitOutcome:
    """Repeat a commit whose outcome is unknown, as the worker does."""
    for _ in range(5):
        try:
            return writer.commit(files, *entries)
        except SinkError:
            continue
    raise AssertionError("a commit that is repeated five times has no outcome")


def _stale_writer(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    stale = _Writer(table).ready(_SHARD)
    files = table.stage(_rows(1))
    for position in (2, 3):
        taker = _Writer(table).read(_SHARD)
        rows = table.stage(_rows(position))
        _landed(taker.commit(rows, taker.entry(_SHARD, position)), "a taker's commit")
    _refused(stale.commit(files, stale.entry(_SHARD, 1)), {_SHARD}, "a stale commit")
    # Also one that ends at the position of the taker: its number is an older one.
    _refused(stale.commit(files, stale.entry(_SHARD, 3)), {_SHARD}, "a stale commit to 3")
    _has(table, [2, 3], "after stale commits")
    _stores(table, _SHARD, _at(2, 3), "after stale commits")


def _all_or_none(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD, _OTHER)
    taker = _Writer(table).read(_OTHER)
    _landed(taker.commit(table.stage(_rows(9)), taker.entry(_OTHER, 9)), "a taker's commit")
    both = writer.entry(_SHARD, 1), writer.entry(_OTHER, 2)
    _refused(writer.commit(table.stage(_rows(1, 2)), *both), {_OTHER}, "a commit with a stale part")
    _has(table, [9], "after a commit with a stale part")
    _stores(table, _SHARD, NOTHING_STORED, "after a commit with a stale part")
    _landed(writer.commit(table.stage(_rows(1)), writer.entry(_SHARD, 1)), "the commit without it")
    _has(table, [1, 9], "after the commit without the stale part")


def _replaced(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD, _OTHER)
    _landed(writer.commit(table.stage(_rows(5)), writer.entry(_SHARD, 5)), "a commit")
    both = writer.read(_SHARD).entry(_SHARD, 6), writer.entry(_OTHER, 2)
    files = table.stage(_rows(6, 2))
    table.replace()
    now = _Writer(table).read(_SHARD)
    _require(now.table_id != writer.table_id, "another table at the same address has the same id")
    _refused(writer.commit(files, *both), {_SHARD, _OTHER}, "a commit for a former table")
    _refused(
        _with_steps(table, writer, _nothing).commit(files, *both),
        {_SHARD, _OTHER},
        "a commit of a new process for a former table",
    )
    _has(table, [], "after a commit for a former table")
    taker = _Writer(table).ready(_SHARD)
    _require(
        taker.stored[_SHARD] == NOTHING_STORED, "another table has positions of the former one"
    )
    _landed(taker.commit(table.stage(_rows(1)), taker.entry(_SHARD, 1)), "a commit after it")
    _has(table, [1], "after a commit for the new table")


def _older_copy(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    _landed(writer.commit(table.stage(_rows(1)), writer.entry(_SHARD, 1)), "a commit")
    put_back = table.copy()
    early = _Writer(table).read(_SHARD)
    writer.read(_SHARD)
    _landed(writer.commit(table.stage(_rows(2, 3)), writer.entry(_SHARD, 3)), "a commit")
    late = _Writer(table).read(_SHARD)
    put_back()
    _has(table, [1], "after an older copy was put back")
    _stores(table, _SHARD, _at(1, 1), "after an older copy was put back")
    refused = late.commit(table.stage(_rows(4)), late.entry(_SHARD, 4))
    _refused(refused, {_SHARD}, "a commit that expects what an older copy does not have")
    _landed(early.commit(table.stage(_rows(2)), early.entry(_SHARD, 2)), "a commit that fits it")
    # The number is the one that was read, and the position another one.
    refused = late.commit(table.stage(_rows(4)), late.entry(_SHARD, 4))
    _refused(refused, {_SHARD}, "a commit that expects another position under the same number")
    _has(table, [1, 2], "after commits to an older copy")
    _stores(table, _SHARD, _at(2, 2), "after commits to an older copy")


def _child(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    parent = _Writer(table).ready(_PARENT, _OLDEST)
    _landed(parent.commit(table.stage(_rows(1)), parent.entry(_PARENT, 1)), "a parent's commit")
    paused = _Writer(table).read(_PARENT, _OLDEST)
    child = _Writer(table).read(_SHARD, _PARENT, _OLDEST)
    ends = child.entry(_PARENT, 1, ended=True), child.entry(_OLDEST, None, ended=True)
    rows = table.stage(_rows(2))
    _landed(child.commit(rows, child.entry(_SHARD, 2), *ends), "the first commit of a child")
    _stores(table, _PARENT, _at(2, 1, ended=True), "after the first commit of a child")
    _stores(table, _OLDEST, _at(1, None, ended=True), "an ancestor that was not known")
    for key in (_PARENT, _OLDEST):
        late = paused.commit(table.stage(_rows(8)), paused.entry(key, 8))
        _refused(late, {key}, "a commit of an ancestor after its child")
    _has(table, [1, 2], "after the first commit of a child")


def _child_and_ancestor(make: Callable[[], SinkUnderTest]) -> None:
    def run(number: int) -> _At:
        table = make()
        paused = _Writer(table).ready(_PARENT)
        outcomes: list[CommitOutcome] = []

        def other() -> None:
            outcomes.append(paused.commit(table.stage(_rows(8)), paused.entry(_PARENT, 8)))

        at = _At(number, other)
        child = _with_steps(table, _Writer(table).read(_SHARD, _PARENT), at)
        entries = child.entry(_SHARD, 2), child.entry(_PARENT, None, ended=True)
        first = _until_known(child, table.stage(_rows(2)), *entries)
        what = f"an ancestor commits {at.name} of its child's first commit"
        if not outcomes:
            _landed(first, "the first commit of a child")
            return at
        _require(
            (first.version is None) != (outcomes[0].version is None), f"{what}: both or none landed"
        )
        if first.version is None:
            _refused(first, {_PARENT}, what)
        _has(table, [8] if first.version is None else [2], what)
        return at

    _each_step(run)


def _seek(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD, _OTHER)
    _landed(writer.commit(table.stage(_rows(1, 2)), writer.entry(_SHARD, 2)), "a commit")
    paused, unread = _Writer(table).read(_SHARD, _OTHER), _Writer(table).read(_OTHER)
    operator = _Writer(table).read(_SHARD, _OTHER)
    back = operator.entry(_SHARD, 1), operator.entry(_OTHER, None)
    _landed(operator.commit((), *back), "a seek")
    _stores(table, _SHARD, _at(2, 1), "after a seek")
    _stores(table, _OTHER, _at(1, None), "a shard that a seek removes the position of")
    late = paused.commit(table.stage(_rows(3)), paused.entry(_SHARD, 3))
    _refused(late, {_SHARD}, "a commit that was prepared before a seek")
    late = unread.commit(table.stage(_rows(4)), unread.entry(_OTHER, 4))
    _refused(late, {_OTHER}, "a first commit that was prepared before a seek")
    _has(table, [1, 2], "after a seek")
    taker = _Writer(table).read(_SHARD, _OTHER)
    again = taker.entry(_SHARD, 2), taker.entry(_OTHER, 4)
    _landed(taker.commit(table.stage(_rows(2, 4)), *again), "a commit after a seek")
    _has(table, [1, 2, 2, 4], "after records were read again")
    operator.read(_SHARD)
    _landed(operator.commit((), operator.entry(_SHARD, None)), "a seek to the begin")
    _stores(table, _SHARD, _at(4, None), "after a seek to the begin")
    stale = _Entry(_SHARD, NOTHING_STORED, _at(1, 1))
    late = operator.commit(table.stage(_rows(1)), stale)
    _refused(late, {_SHARD}, "a commit that expects nothing of a shard")


def _not_next(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    for becomes in (None, NOTHING_STORED, _at(2, 1)):
        entries = [] if becomes is None else [_Entry(_SHARD, NOTHING_STORED, becomes)]
        try:
            writer.commit(table.stage(_rows(1)), *entries)
        except ValueError:
            continue
        raise AssertionError(f"a commit that sets {becomes} is no ValueError")
    _has(table, [], "after commits that set no next number")
    _stores(table, _SHARD, NOTHING_STORED, "after commits that set no next number")


def _positions(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    for number, position in enumerate(
        (
            Position("0"),
            Position("1", 1),
            Position(str(2**62)),
            Position(str(2**63), 2**24),
            Position(str(2**124 + 5)),
            Position("49671246667567228643283430150187087032206582658", 7),
            Position(str(2**186 - 1), 2**24 - 1),
        ),
        1,
    ):
        expected = writer.stored[_SHARD]
        entry = _Entry(_SHARD, expected, expected.moved(position))
        _landed(writer.commit((), entry), f"a commit of the position {position}")
        _stores(table, _SHARD, StoredPosition(number, position), f"the position {position}")
        writer.read(_SHARD)


def _many_shards(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    keys = [f"{_SHARD[:-4]}{number:04}" for number in range(300)]
    writer = _Writer(table).ready(*keys)
    entries = [writer.entry(key, number) for number, key in enumerate(keys)]
    _landed(writer.commit(table.stage(_rows(*range(300))), *entries), "a commit of 300 shards")
    found = _Writer(table).read(*keys).stored
    wrong = [key for number, key in enumerate(keys) if found[key] != _at(1, number)]
    _require(not wrong, f"after a commit of 300 shards, {wrong[:3]} have another position")
    _has(table, range(300), "after a commit of 300 shards")


def _columns(make: Callable[[], SinkUnderTest]) -> None:
    table = make()
    writer = _Writer(table).ready(_SHARD)
    try:
        _Writer(table).sink.ensure(pa.schema([("id", pa.string()), ("text", pa.string())]))
    except TableMismatchError:
        pass
    else:
        raise AssertionError("columns of another type are no TableMismatchError")
    _landed(writer.commit(table.stage(_rows(1)), writer.entry(_SHARD, 1)), "a commit after it")


# -- functions


def _stores_nothing(make: Callable[[], FunctionUnderTest]) -> None:
    function = make()
    sink = function.open()
    _require(not sink.stores_positions, "stores_positions is True")
    _function_commit(function, sink, 1)
    found = sink.positions([_SHARD])
    _require(found.shards == {_SHARD: NOTHING_STORED}, f"it has a position: {found.shards}")


def _function_commit(
    function: FunctionUnderTest,
    sink: Sink,
    position: int,
    staged: tuple[DataFile, ...] | None = None,
) -> None:
    table_id = sink.positions([_SHARD]).table_id
    files = staged or function.stage(_rows(position))
    becomes = {_SHARD: _at(1, position)}
    outcome = sink.commit(table_id, files, {_SHARD: NOTHING_STORED}, becomes, SCHEMA)
    _landed(outcome, f"the batch {position}")


def _batches_arrive(make: Callable[[], FunctionUnderTest]) -> None:
    function = make()
    for position in (1, 2):
        _function_commit(function, function.open(), position)
    # The process has died before its checkpoint: the batch is processed again.
    _function_commit(function, function.open(), 2)
    found = set(function.ids())
    _require(found == {1, 2}, f"the function got {sorted(found)}, not [1, 2]")


def _failed_call(make: Callable[[], FunctionUnderTest]) -> None:
    function = make()
    sink = function.open()
    files = function.stage(_rows(1))
    function.fail()
    try:
        _function_commit(function, sink, 1, files)
    except TransformFailedError:
        pass
    else:
        raise AssertionError("a call of the function that fails is no TransformFailedError")
    _function_commit(function, sink, 1, files)
    _require(set(function.ids()) == {1}, f"after a repeated call, it got {function.ids()}")


def _function_not_next(make: Callable[[], FunctionUnderTest]) -> None:
    function = make()
    sink = function.open()
    table_id, files = sink.positions([_SHARD]).table_id, function.stage(_rows(1))
    try:
        sink.commit(table_id, files, {_SHARD: NOTHING_STORED}, {_SHARD: _at(2, 1)}, SCHEMA)
    except ValueError:
        return
    raise AssertionError("a commit that sets no next number is no ValueError")

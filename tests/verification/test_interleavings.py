"""Every interleaving of the commit protocol's I/O calls: crashes and pauses anywhere, paused
writers, twins, lost answers; and each guard is shown to be needed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import (
    Batch,
    CommitEntry,
    CommitOutcome,
    DataFile,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.delta.maintenance import vacuum
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.leases import lease_rows
from kcl_pipeline.leases.held import CheckpointWrite, Held, HeldLeases
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.lease_rows import LeaseRows
from kcl_pipeline.position import Position
from kcl_pipeline.testing.sink import FaultHook, SinkFault
from kcl_pipeline.worker.commit import Committer
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.shards.parents import ParentCheck
from verification.interleavings import world as microscope
from verification.interleavings.explorer import Actor, Turns, Violation, explore
from verification.interleavings.lineage import LineageScenario
from verification.interleavings.scenarios import explored, main, scenarios
from verification.interleavings.world import Bench, RangeWriter, Scenario, SteppedSink, range_of

ALL = {scenario.name: scenario for scenario in scenarios()}
ZOMBIE = replace(ALL["a paused writer"], preemptions=2)
COUNTS: dict[str, int] = {}


@pytest.mark.parametrize("scenario", ALL.values(), ids=ALL)
def test_every_schedule_is_exactly_once_and_goes_on(
    scenario: Scenario | LineageScenario,
) -> None:
    found = explored(scenario)
    COUNTS[scenario.name] = found.schedules
    print(f"{scenario.name}: {found.schedules} schedules, {found.steps} steps")
    assert found.schedules >= 10
    assert found.longest >= 8


# -- each guard is needed
# ----------------------------------------------------------------------------


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SteppedSink, "fence", lambda self, key, expected: self.numbers([key])[key])


class AnyNumbers(TxnVersions):
    """Equal to all others."""

    def __ne__(self, other: object) -> bool:
        return False

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _no_numbers(patch: pytest.MonkeyPatch) -> None:
    """The sink compares nothing: what comes lands."""
    commit = SteppedSink.commit

    def blind(self: SteppedSink, written: Written, entries: Sequence[CommitEntry]) -> object:
        return commit(
            self,
            written,
            [replace(e, expected=AnyNumbers(e.expected.data, e.expected.fence)) for e in entries],
        )

    patch.setattr(SteppedSink, "commit", blind)


def _higher_means_landed(patch: pytest.MonkeyPatch) -> None:
    """A taker takes any data number from the pending one on for a landed batch."""

    class AtLeast(int):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, int) and int(self) <= int(other)

        __hash__ = int.__hash__

    numbers = SteppedSink.numbers

    def generous(self: SteppedSink, keys: Sequence[str]) -> dict[str, TxnVersions]:
        return {
            key: replace(n, data=None if n.data is None else AtLeast(-1))
            for key, n in numbers(self, keys).items()
        }

    patch.setattr(SteppedSink, "numbers", generous)


def _twins_read_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_rows, "_same_progress", lambda row, lease: True)


def _flush_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the batch before is written between prepare and commit, which removes the
    pending one.
    """
    land = Committer._land

    def flushing(
        self: Committer, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> object:
        for consumer in consumers.values():
            self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        return land(self, batch, consumers, written)

    patch.setattr(Committer, "_land", flushing)


def _checkpoint_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The row says that the batch is done before the table has it."""
    prepare = HeldLeases.prepare

    def early(
        self: HeldLeases, held: Held, *, checkpoint: object, end: Position, avoid_number: int | None
    ) -> int:
        return prepare(self, held, checkpoint=end, end=end, avoid_number=avoid_number)

    patch.setattr(HeldLeases, "prepare", early)


def _no_prepare(patch: pytest.MonkeyPatch) -> None:
    """The number is the counter, but the row has no pending checkpoint: a taker sees nothing in
    flight.
    """
    patch.setattr(
        "kcl_pipeline.leases.held.HeldLeases._checkpoint", _without_pending(HeldLeases._checkpoint)
    )


def _without_pending(checkpoint: Callable[..., object]) -> Callable[..., object]:
    def write(self: HeldLeases, held: object, what: object) -> object:
        return checkpoint(self, held, replace(what, pending=None, pending_state=None))

    return write


def _believes_the_error(patch: pytest.MonkeyPatch) -> None:
    """A commit that failed is taken for one that did not land, and is sent again under new
    expectations.
    """
    commit = SteppedSink.commit

    def again(self: SteppedSink, written: Written, entries: Sequence[CommitEntry]) -> object:
        try:
            return commit(self, written, entries)
        except SinkError:
            fresh = [
                replace(e, number=e.number + 1000, expected=self.table.numbers(e.lease_key))
                for e in entries
            ]
            return commit(self, written, fresh)

    patch.setattr(SteppedSink, "commit", again)


def _no_restored_parent(patch: pytest.MonkeyPatch) -> None:
    """KCL's rule: a child starts when its parents have no row."""
    patch.setattr(ParentCheck, "may_start", lambda _self, _consumer, rows, _seen: rows.ended)


def _no_parent_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParentCheck, "may_start", lambda *_: True)


def _restored_without_the_child(patch: pytest.MonkeyPatch) -> None:
    """The rows of parents are created whatever the child's row says."""

    def blind(table: LeaseRows, _child: Lease, parents: Sequence[Lease]) -> tuple[str, ...]:
        return tuple(parent.lease_key for parent in parents if table.create_lease(parent))

    patch.setattr(LeaseRows, "restore_parents", blind)


def _end_is_moved_back(patch: pytest.MonkeyPatch) -> None:
    """A flush writes what was committed, whatever a settled write has made of the row."""

    def write(self: HeldLeases, held: Held, what: CheckpointWrite) -> Lease:
        if held.unsure != what:
            self._settle(held)
        return self._write(
            held,
            what,
            lambda lease: self._table.update_checkpoint(
                lease.with_(checkpoint=min(lease.checkpoint, what.checkpoint)),
                checkpoint=what.checkpoint,
                pending=what.pending,
                pending_state=what.pending_state,
            ),
        )

    patch.setattr(HeldLeases, "_checkpoint", write)
    patch.setattr(lease_rows, "_checkpoint_of", lambda _lease: [])


MUTANTS = {
    "a taker does not fence": (_no_fence, "a paused writer"),
    "the sink does not compare numbers": (_no_numbers, "a paused writer"),
    "a higher number counts as landed": (_higher_means_landed, "a paused writer"),
    "a renewal takes a twin's progress for its own": (
        _twins_read_each_other,
        "a lost answer among twins",
    ),
    "a flush removes the pending checkpoint of a batch in flight": (
        _flush_while_in_flight,
        "a paused writer",
    ),
    "the checkpoint moves before the commit": (_checkpoint_before_commit, "a paused writer"),
    "nothing is prepared": (_no_prepare, "a paused writer"),
    "a failed commit is sent again as a new one": (
        _believes_the_error,
        "commit 1 of the old owner: land_and_fail",
    ),
    "a child starts when its parent's row is gone": (
        _no_restored_parent,
        "the deleted row of a parent",
    ),
    "a child starts before its parents' ends": (
        _no_parent_check,
        "twins across the end of a shard",
    ),
    "parents are restored whatever the child's row says": (
        _restored_without_the_child,
        "a Java worker finishes a shard, and its lease goes",
    ),
    "parents that a leader has deleted are restored": (
        _restored_without_the_child,
        "a former owner of a child whose parent was deleted",
    ),
    "the end of a shard is moved back": (
        _end_is_moved_back,
        "an end of a shard without an answer, and a stop",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_guard_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, scenario = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(Violation, match="schedule:") as found:
        explored(ALL[scenario])
    print(f"{name}: {found.value}")


# -- the Delta log itself
# ----------------------------------------------------------------------------


class SteppedDelta(DeltaCommitter):
    """A real committer that may be overtaken before each call and between its look at the log and
    its write; its answers get lost as told.
    """

    def __init__(self, uri: str, turns: Turns, faults: FaultHook) -> None:
        super().__init__(
            DeltaSink(uri), "app", clock=microscope.StepClock(turns), rng=random.Random(1)
        )
        self._turns, self._faults, self._fault = turns, faults, None
        append = self._log.append

        def stepped(files: Sequence[DataFile], transactions: dict[str, int]) -> None:
            fault, self._fault = self._fault, None
            self._turns.give_way("append")
            if fault is SinkFault.FAIL:
                raise SinkError("failed on demand")
            append(files, transactions)

        self._log.append = stepped

    def _call(self, operation: str, call: Callable[[], object]) -> object:
        self._turns.give_way(operation)
        fault = self._faults(operation, ())
        self._fault = fault if fault is SinkFault.FAIL else None
        answer = call()
        if fault is SinkFault.LAND_AND_FAIL:
            raise SinkError("the answer was lost on demand; the entry landed")
        return answer

    def numbers(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        return self._call("numbers", lambda: super(SteppedDelta, self).numbers(lease_keys))

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        return self._call("commit", lambda: super(SteppedDelta, self).commit(written, entries))

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        return self._call("fence", lambda: super(SteppedDelta, self).fence(lease_key, expected))


class FileWriter(RangeWriter):
    """Real files, one row per record."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def write(self, batch: Batch) -> Written:
        written = super().write(batch)
        files = []
        for file in written.files:
            _, after, through = range_of(file.path)
            path = Path(self._uri, file.path.replace("/", "_") + ".parquet")
            pq.write_table(
                pa.table({"id": pa.array(range(after + 1, through + 1), pa.int64())}), path
            )
            files.append(
                replace(file, path=path.name, size=path.stat().st_size, rows=through - after)
            )
        return replace(written, files=tuple(files))


class DeltaBench(Bench):
    """The bench on a Delta table; `vacuums`: somebody checkpoints the log, cleans it up and removes
    unused files, at any moment.
    """

    def __init__(self, scenario: Scenario, uri: str, *, vacuums: bool = False) -> None:
        self.uri = uri
        super().__init__(scenario)
        self.writer = FileWriter(uri)
        for actor in self.actors:
            process = getattr(actor.body, "__self__", None)
            if isinstance(process, microscope.Process):
                process._writer = process._committer._writer = self.writer
        if vacuums:
            self.actors.append(Actor("vacuum", self._vacuum))

    def sink_for(self, faults: FaultHook) -> TransactionalSink:
        return SteppedDelta(self.uri, self.turns, faults)

    def ranges(self) -> Sequence[tuple[str, int, int]]:
        found = []
        for entry in sorted(Path(self.uri, "_delta_log").glob("*.json")):
            actions = [json.loads(line) for line in entry.read_text().splitlines()]
            found += [
                range_of(
                    a["add"]["path"].replace("%7E", "~").replace("_", "/").removesuffix(".parquet")
                )
                for a in actions
                if "add" in a
            ]
        return found

    def _vacuum(self) -> None:
        DeltaTable(self.uri).create_checkpoint()
        DeltaTable(self.uri).cleanup_metadata()
        vacuum(self.uri)

    def check(self) -> None:
        self._seen = ()
        super().check()

    def finish(self) -> None:
        super().finish()
        ids = sorted(DeltaTable(self.uri).to_pyarrow_table()["id"].to_pylist())
        assert ids == list(range(1, self.scenario.records + 1)), "what a reader of the table sees"


DELTA = {
    "a paused writer": (ALL["a paused writer"], False),
    "the table is vacuumed meanwhile": (replace(ALL["a paused writer"], name="vacuumed"), True),
    "a commit that landed but reported failure": (
        ALL["commit 1 of the old owner: land_and_fail"],
        False,
    ),
    "a commit that failed": (ALL["commit 2 of the old owner: fail"], False),
}


@pytest.mark.parametrize("name", DELTA)
def test_the_delta_log_is_exactly_once_too(name: str, tmp_path: Path) -> None:
    scenario, vacuums = DELTA[name]
    numbers = itertools.count()

    def make() -> Bench:
        return DeltaBench(scenario, str(tmp_path / f"t{next(numbers)}"), vacuums=vacuums)

    found = explore(make, preemptions=1)
    print(f"Delta, {name}: {found.schedules} schedules, {found.steps} steps")
    assert found.schedules >= 40


def test_the_delta_bench_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteppedDelta, "fence", lambda self, key, expected: self.numbers([key])[key])
    numbers = itertools.count()
    with pytest.raises(Violation, match="repeated records"):
        explore(lambda: DeltaBench(ZOMBIE, str(tmp_path / f"t{next(numbers)}")), preemptions=2)


def test_the_command_prints_what_it_explored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one worker"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("one worker")
    assert lines[-1].endswith("no violation")

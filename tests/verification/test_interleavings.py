"""Every interleaving of the commit protocol's I/O calls: crashes and pauses anywhere, paused
writers, shared worker ids, lost answers; and each guard is shown to be needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from kcl_pipeline.batch import Batch, DataFile
from kcl_pipeline.leases import writes as lease_rows
from kcl_pipeline.leases.held import Held, HeldLeases, Progress
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.position import TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.sinks.log import Head
from kcl_pipeline.sinks.sink import CommitOutcome, TableSink
from kcl_pipeline.testing.sink import MemoryLog
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.parents import ParentCheck
from verification.interleavings.explorer import Violation
from verification.interleavings.lineage import LineageScenario
from verification.interleavings.scenarios import explored, main, scenarios
from verification.interleavings.world import Scenario

ALL = {scenario.name: scenario for scenario in scenarios()}

COUNTS: dict[str, int] = {}


LONG = {
    "a shared worker id across the end of a shard, and a cleanup",
    "commit 1 of the old owner: fail",
    "commit 2 of the old owner: land_and_fail",
    "commit 2 of the old owner: lose_race",
    "the deleted row of a parent",
    "write 3 of the old owner: after",
}
"""In `make test-long` and `make microscope`. `make test` has the first without a cleanup, the row
of a parent with a former owner of the child, and each fault at one commit or write.
"""

SHORTER = {
    "Java in between, larger batches",
    "Java, and a table that is put back",
    "Java, and a table that is replaced",
    "a batch of two leases loses one",
    "a former owner of a child whose parent was deleted",
    "a Java worker finishes a shard, and its lease goes",
    "a Java worker finishes a shard, and its lease goes, at LATEST",
    "a lost answer with a shared worker id",
    "a shared worker id",
    "a shared worker id across the end of a shard",
    "a shared worker id and a taker",
    "a table that is put back",
    "commit 1 of the old owner: land_late",
    "commit 2 of the old owner: land_late",
    "there and back",
    "two paused writers",
}
"""`make test` explores them with one preemption less, `make test-long` as they are."""


def _cases() -> Iterator[ParameterSet]:
    for name, scenario in ALL.items():
        is_long = name in LONG | SHORTER
        yield pytest.param(scenario, 0, id=name, marks=[pytest.mark.long] if is_long else [])
        if name in SHORTER:
            yield pytest.param(scenario, -1, id=f"{name}, shorter")


@pytest.mark.parametrize(("scenario", "deeper"), _cases())
def test_every_schedule_is_exactly_once_and_goes_on(
    scenario: Scenario | LineageScenario, deeper: int
) -> None:
    found = explored(scenario, deeper=deeper)
    COUNTS[scenario.name] = found.schedules
    print(f"{scenario.name}: {found.schedules} schedules, {found.steps} steps")
    assert found.schedules >= 10
    assert found.longest >= 8


# -- each guard is needed
# ----------------------------------------------------------------------------


def _nothing_compared(patch: pytest.MonkeyPatch) -> None:
    """The sink compares nothing: what comes lands."""
    patch.setattr(TableSink, "_decided", lambda *_: None)


def _higher_means_fitting(patch: pytest.MonkeyPatch) -> None:
    """A batch lands if its end is after the position in the table."""

    def newer(_self: TableSink, head: Head, commit: Any) -> CommitOutcome | None:
        for key, becomes in commit.becomes.items():
            now = head.stored(key).position
            if now is not None and becomes.position is not None and becomes.position <= now:
                return CommitOutcome(None, (key,))
        return None

    patch.setattr(TableSink, "_decided", newer)


def _start_at_the_row(patch: pytest.MonkeyPatch) -> None:
    """A taker starts at the checkpoint of the row, whatever the table has."""
    position_of = ProgressStore._position_of

    def from_row(self: ProgressStore, consumer: ShardConsumer) -> Position:
        position_of(self, consumer)
        checkpoint = consumer.held.lease.checkpoint
        consumer.settle(checkpoint, checkpoint)
        return checkpoint

    patch.setattr(ProgressStore, "_position_of", from_row)


def _start_at_the_table(patch: pytest.MonkeyPatch) -> None:
    """A taker starts at the position in the table, whatever the row has."""
    position_of = ProgressStore._position_of

    def from_table(self: ProgressStore, consumer: ShardConsumer) -> Position:
        position_of(self, consumer)
        position = consumer.stored.position or TRIM_HORIZON
        consumer.settle(position, consumer.held.lease.checkpoint)
        return position

    patch.setattr(ProgressStore, "_position_of", from_table)


def _no_mark(patch: pytest.MonkeyPatch) -> None:
    """The mark of the row is not compared with the position in the table."""
    patch.setattr("kcl_pipeline.worker.commit._is_older", lambda *_: False)


def _any_table(patch: pytest.MonkeyPatch) -> None:
    """The id of the table is not compared."""
    decided = TableSink._decided

    def blind(self: TableSink, head: Head, commit: Any) -> CommitOutcome | None:
        return decided(self, head, replace(commit, table_id=head.table_id))

    patch.setattr(TableSink, "_decided", blind)


def _checkpoint_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The row says that the batch is done before the table has it."""
    commit = ProgressStore.advance

    def early(self: ProgressStore, batch: Batch, consumers: dict[str, ShardConsumer]) -> object:
        for part in batch.ranges:
            self._leases.checkpoint(consumers[part.lease_key].held, checkpoint=part.through)
        return commit(self, batch, consumers)

    patch.setattr(ProgressStore, "advance", early)


def _believes_the_error(patch: pytest.MonkeyPatch) -> None:
    """A commit that failed is taken for one that did not land, and is sent again under new
    expectations.
    """
    add = MemoryLog.add

    def again(
        self: MemoryLog, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        try:
            add(self, head, files, sets)
        except OSError:
            fresh = self.read()
            assert fresh is not None
            raised = {
                key: replace(one, number=fresh.stored(key).number + 1) for key, one in sets.items()
            }
            add(self, fresh, files, raised)

    patch.setattr(MemoryLog, "add", again)


def _no_restored_parent(patch: pytest.MonkeyPatch) -> None:
    """KCL's rule: a child starts when its parents have no row."""
    patch.setattr(ParentCheck, "may_start", lambda _self, _consumer, rows, _seen: rows.ended)


def _no_parent_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParentCheck, "may_start", lambda *_: True)


def _restored_without_the_child(patch: pytest.MonkeyPatch) -> None:
    """The rows of parents are created whatever the child's row says."""

    def blind(table: LeaseTable, _child: Lease, parents: Sequence[Lease]) -> tuple[str, ...]:
        return tuple(parent.lease_key for parent in parents if create_lease(table, parent))

    patch.setattr(LeaseTable, "restore_parents", blind)


def _end_is_moved_back(patch: pytest.MonkeyPatch) -> None:
    """A flush writes what was committed, whatever a write without an answer has made of the row."""

    def write(self: HeldLeases, held: Held, checkpoint: Position, *_: object) -> Lease:
        return self._write(
            held,
            lambda lease: self._table.update_checkpoint(
                lease.with_(checkpoint=min(lease.checkpoint, checkpoint)), checkpoint=checkpoint
            ),
            lambda _lease: Progress(checkpoint),
        )

    patch.setattr(HeldLeases, "_checkpoint", write)
    patch.setattr(lease_rows, "checkpoint_conditions", lambda _lease: [])


MUTANTS = {
    "the sink compares nothing": (_nothing_compared, "a paused writer"),
    "a higher position lands": (_higher_means_fitting, "a paused writer with larger batches"),
    "a taker starts at the checkpoint": (_start_at_the_row, "a paused writer"),
    "a taker starts at the table": (_start_at_the_table, "Java between two workers"),
    "the mark is not compared": (_no_mark, "a table that is replaced"),
    "the id of the table is not compared": (_any_table, "a table that is replaced"),
    "the checkpoint moves before the commit": (_checkpoint_before_commit, "a paused writer"),
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
        "a shared worker id across the end of a shard",
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


def test_the_command_prints_what_it_explored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one worker"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("one worker")
    assert lines[-1].endswith("no violation")

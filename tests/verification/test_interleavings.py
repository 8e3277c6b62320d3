"""Every interleaving of the commit protocol's I/O calls: crashes and pauses anywhere, paused
writers, shared worker ids, lost answers; and each guard is shown to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kcl_pipeline.batch import (
    Batch,
    CommitEntry,
    TxnVersions,
    Written,
)
from kcl_pipeline.errors import SinkError
from kcl_pipeline.leases.held import CheckpointWrite, Held, HeldLeases
from kcl_pipeline.leases.lease import rows as lease_rows
from kcl_pipeline.leases.lease.rows import LeaseRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import Position
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.shards.parents import ParentCheck
from verification.interleavings.explorer import Violation
from verification.interleavings.lineage import LineageScenario
from verification.interleavings.scenarios import explored, main, scenarios
from verification.interleavings.stepping import SteppedSink
from verification.interleavings.world import Scenario

ALL = {scenario.name: scenario for scenario in scenarios()}

COUNTS: dict[str, int] = {}


LONG = {
    "a shared worker id across the end of a shard, and a cleanup",
    "the deleted row of a parent",
}
"""In `make test-long` and `make microscope`. `make test` has the first without a cleanup, and the
second with a former owner of the child.
"""


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, scenario in ALL.items()
    ],
)
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
    patch.setattr(SteppedSink, "fence", lambda self, key, expected: self.txn_versions([key])[key])


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

    numbers = SteppedSink.txn_versions

    def generous(self: SteppedSink, keys: Sequence[str]) -> dict[str, TxnVersions]:
        return {
            key: replace(n, data=None if n.data is None else AtLeast(-1))
            for key, n in numbers(self, keys).items()
        }

    patch.setattr(SteppedSink, "txn_versions", generous)


def _processes_of_an_id_read_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_rows, "_same_progress", lambda row, lease: True)


def _flush_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the batch before is written between prepare and commit, which removes the
    pending one.
    """
    land = TwoPhaseCommit._land

    def flushing(
        self: TwoPhaseCommit, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> object:
        for consumer in consumers.values():
            self._leases.checkpoint(consumer.held, checkpoint=consumer.committed)
        return land(self, batch, consumers, written)

    patch.setattr(TwoPhaseCommit, "_land", flushing)


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
                replace(e, number=e.number + 1000, expected=self.table.txn_versions(e.lease_key))
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
        return tuple(parent.lease_key for parent in parents if create_lease(table, parent))

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
    patch.setattr(lease_rows, "checkpoint_conditions", lambda _lease: [])


MUTANTS = {
    "a taker does not fence": (_no_fence, "a paused writer"),
    "the sink does not compare numbers": (_no_numbers, "a paused writer"),
    "a higher number counts as landed": (_higher_means_landed, "a paused writer"),
    "a renewal takes the progress of another process for its own": (
        _processes_of_an_id_read_each_other,
        "a lost answer with a shared worker id",
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

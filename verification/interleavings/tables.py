"""Interleavings of commits with a Java worker, and with people who touch the table.

The code under test is the production `ProgressStore` and `TableSink`, as in
`verification.interleavings.world`. In addition to the workers there are these actors:

- a Java worker that has the lease between two of ours. It reads from the checkpoint of the row, and
  leaves our mark alone,
- somebody who replaces the table by an empty one, or copies its folder and puts the copy back. That
  happens at any time but between the last look of a commit and its write.

Invariants after every step: a range continues what is in the table, or what Java has processed. No
record lands twice, and none that Java has processed lands after the first commit of the worker that
took over, which starts at the checkpoint that Java wrote. No file lands in another table than the
one that it was written for. After every schedule a new worker reads the shard to its end, unless
the lease has stopped because the table has less than the mark of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kcl_pipeline.batch import Batch
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import Position
from kcl_pipeline.sinks.sink import Sink
from kcl_pipeline.testing.sink import FaultHook, LogEntry
from verification.interleavings.explorer import Actor
from verification.interleavings.ranges import RangeWriter, number_of, range_of
from verification.interleavings.stepping import SteppedSink, stepped_view
from verification.interleavings.world import Bench, Scenario

JAVA = "java"
_SHARD = "s0"


@dataclass(frozen=True, slots=True)
class TableScenario(Scenario):
    """A scenario with one lease, and an accident of the table.

    Attributes:
        accident: "replaced", "put back", or "" for none.
    """

    accident: str = ""


class _NotingWriter(RangeWriter):
    """A writer that notes for which table, and by which worker, each file was written."""

    def __init__(self, noted: dict[str, tuple[str, str]], table_id: Callable[[], str]) -> None:
        super().__init__()
        self._noted = noted
        self._table_id = table_id

    def write(self, batch: Batch) -> Batch:
        written = super().write(batch)
        noted = (self._table_id(), batch.batch_id)
        self._noted |= {file.path: noted for file in written.written_files}
        return written


class TableBench(Bench):
    """One run of a `TableScenario`, as a `World` of the explorer."""

    def __init__(self, scenario: TableScenario) -> None:
        self._sinks: list[SteppedSink] = []
        self._written: dict[str, tuple[str, str]] = {}
        self._checkpointed: set[int] = set()
        self._java: set[int] = set()
        self._closed: set[int] = set()
        self._landed: set[int] = set()
        self._reached = 0
        self._checked = 1
        self._touched = False
        super().__init__(scenario)
        self._checked = len(self.log.log)
        if any(owner == JAVA for _, owner in scenario.moves):
            self.actors.append(Actor(JAVA, self._java_works, enabled=self._java_owns))
        if scenario.accident == "replaced":
            self.actors.append(Actor("somebody", self._replace, enabled=self._may_touch))
        elif scenario.accident == "put back":
            self.actors.append(Actor("somebody", self._put_back))

    def new_writer(self) -> RangeWriter:
        """See `Bench.new_writer`."""
        return _NotingWriter(self._written, lambda: self.log.id)

    def sink_for(self, faults: FaultHook) -> Sink:
        """See `Bench.sink_for`."""
        sink = SteppedSink(self.log, self.turns, faults)
        self._sinks.append(sink)
        return sink

    # -- actors
    # ----------------------------------------------------------------------------

    def _row(self) -> Lease:
        return next(iter(self.rows()))

    def _java_owns(self) -> bool:
        return self._row().owner == JAVA

    def _java_works(self) -> None:
        view = stepped_view(self.table, self.turns, {})
        row = view.get(_SHARD)
        while row is not None and row.owner == JAVA:
            done = number_of(row.checkpoint) + 1
            if done > self.scenario.records:
                return
            self._java.add(done)
            self.turns.give_way("processed")
            row = view.update_checkpoint(row, checkpoint=Position(str(done)))
            if row is not None:
                self._checkpointed.add(done)

    def _may_touch(self) -> bool:
        """No commit is between its last look and its write."""
        return len(self.log.log) > 1 and not any(sink.is_adding for sink in self._sinks)

    def _replace(self) -> None:
        self.log.log[:] = [LogEntry(0)]
        self.log.positions.clear()
        self.log.id += "+"
        self._forget([], set())

    def _put_back(self) -> None:
        self.turns.wait_for(lambda: len(self.log.log) > 1)
        log, positions, closed = list(self.log.log), dict(self.log.positions), set(self._closed)
        self.turns.wait_for(lambda: len(self.log.log) > len(log) and self._may_touch())
        self.log.log[:], self.log.positions = log, positions
        self._forget(log, closed)

    def _forget(self, log: Sequence[LogEntry], closed: set[int]) -> None:
        """Note that the table has only the entries of `log`."""
        self._touched = True
        self._landed.clear()
        self._closed = closed
        for entry in log:
            for file in entry.files:
                _, after, through = range_of(file.path)
                self._landed |= set(range(after + 1, through + 1))
        self._checked = len(self.log.log)

    # -- checks
    # ----------------------------------------------------------------------------

    def check(self) -> None:
        """See `World.check`."""
        for entry in self.log.log[self._checked :]:
            for file in entry.files:
                table_id, worker = self._written[file.path]
                if table_id != self.log.id:
                    raise AssertionError(f"{file.path} was written for another table")
                self._note(worker, *range_of(file.path)[1:])
        self._checked = len(self.log.log)
        row = self._row()
        at = number_of(row.checkpoint)
        if at < self._reached:
            raise AssertionError(f"the checkpoint went back from {self._reached} to {at}")
        self._reached = at
        missing = set(range(1, at + 1)) - self._landed - self._java
        if missing and not self._touched:
            raise AssertionError(f"the checkpoint {at} is past {missing}, which nobody processed")

    def _note(self, worker: str, after: int, through: int) -> None:
        what, added = f"({after},{through}]", set(range(after + 1, through + 1))
        if added & self._landed:
            raise AssertionError(f"{what} repeats {added & self._landed}")
        if added & self._closed:
            raise AssertionError(f"{what} comes after the worker that followed Java")
        before = set(range(1, after + 1))
        if added & self._checkpointed and worker != self.scenario.workers[0].id:
            raise AssertionError(f"{what} of {worker} is before the checkpoint that Java wrote")
        if missing := before - self._landed - self._java:
            raise AssertionError(f"{what} skips {missing}")
        self._closed |= (before & self._java) - self._landed
        self._landed |= added

    def finish(self) -> None:
        """See `World.finish`."""
        for actor in self.actors:
            if actor.error is not None:
                raise AssertionError(
                    f"{actor.name} ended with {type(actor.error).__name__}: {actor.error}"
                ) from actor.error
        stopped = self.run_fresh().stopped
        self.check()
        if stopped and not self._touched:
            raise AssertionError("the lease has stopped, and nobody has touched the table")
        missing = set(range(1, self.scenario.records + 1)) - self._landed - self._java
        if missing and not stopped:
            raise AssertionError(f"nobody processed {missing}: {self._row()}")

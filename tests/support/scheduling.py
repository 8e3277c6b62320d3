"""Hands the units of tests to the worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

from tests.support.shares import unit_of

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class UnitScheduling(LoadFileScheduling):
    """Each file stays in one process, because its tests may share servers and processes; so do all
    tests of one slow fixture.

    When a process crashes, the test that it was in has failed, and its other tests run elsewhere.
    xdist 3.8 runs the test again and again, and hands out units that have no test left: the process
    that gets such a unit waits for ever, and so does the run.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process its next unit when it has one test left. xdist does it at two: the unit
        then waits for both, while another process may have nothing to do.
        """
        if node.shutting_down:
            return
        if not self.workqueue:
            node.shutdown()
        elif self._pending_of(self.assigned_work[node]) <= 1:
            self._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out; return the test in which it crashed."""
        work = self.assigned_work.pop(node)
        left = [(unit, test) for unit in work.values() for test, done in unit.items() if not done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update((name, unit) for name, unit in work.items() if not all(unit.values()))
        self._hand_out()
        return crashed

    def schedule(self) -> None:
        """Hand out units. A process runs its last test when it has the next one or is told to end,
        so one that was started for a crashed one needs two hand-outs.
        """
        if self.collection is None:
            super().schedule()
            return
        self._hand_out()
        self._hand_out()

    def _hand_out(self) -> None:
        for node in self.nodes:
            if node in self.registered_collections:
                self._reschedule(node)

"""Clock, lock, sink and table view with a scheduling point before each call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kcl_pipeline.batch import DataFile
from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.sinks.log import Head
from kcl_pipeline.testing.sink import FaultHook, InMemorySink, MemoryTable, SinkFault
from kcl_pipeline.testing.tables import InMemoryLeaseTable
from verification.interleavings.explorer import Turns

_COUNTED: Final = frozenset(
    {"GetItem", "UpdateItem", "PutItem", "DeleteItem", "TransactWriteItems"}
)


class StepClock:
    """A clock whose time does not pass; an actor that waits yields.

    No lease ever expires locally, which is the worst case for a commit.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def monotonic(self) -> float:  # noqa: D102 (documented by the protocol)
        return 0.0

    def wall(self) -> float:  # noqa: D102 (documented by the protocol)
        return 1_800_000_000.0

    # time does not pass; documented by the protocol
    def sleep(self, seconds: float) -> None:  # noqa: ARG002, D102
        self._turns.give_way("sleep")

    def signal(self) -> StepSignal:  # noqa: D102 (documented by the protocol)
        return StepSignal(self._turns)

    def lock(self) -> AbstractContextManager[object]:  # noqa: D102 (documented by the protocol)
        return StepLock(self._turns)


class StepSignal:
    """A stop signal that is never set: an actor that waits for it yields."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def is_set(self) -> bool:
        """Return False."""
        return False

    def set(self) -> None:
        """Do nothing."""
        raise NotImplementedError

    # time stands still
    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Yield to another actor."""
        self._turns.give_way("sleep")
        return False


class StepLock:
    """A lock for actors: an actor that finds it locked yields until it is free."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._taken = False

    def __enter__(self) -> bool:
        self._turns.wait_for(lambda: not self._taken)
        self._taken = True
        return True

    def __exit__(self, *_: object) -> None:
        self._taken = False


class SteppedSink(InMemorySink):
    """The in-memory sink with a scheduling point before each call.

    Commits have another one between the read of the log and the write.

    Attributes:
        is_adding: Whether a commit is between its last read and its write.
    """

    def __init__(self, table: MemoryTable, turns: Turns, faults: FaultHook) -> None:
        self.is_adding = False
        super().__init__(table, clock=StepClock(Turns()), faults=faults)
        self._turns = turns

        add = self._memory.add

        def stepped(
            head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
        ) -> None:
            self.is_adding = True
            try:
                self._turns.give_way("add")
                add(head, files, sets)
            finally:
                self.is_adding = False

        self._memory.add = stepped  # type: ignore[method-assign]

    def _before(self, operation: str, keys: tuple[str, ...]) -> SinkFault | None:
        if operation != "ensure":
            self._turns.give_way(operation)
        return super()._before(operation, keys)


def stepped_view(
    table: InMemoryLeaseTable, turns: Turns, lost_answers: Mapping[int, str]
) -> InMemoryLeaseTable:
    """Return the table as one process sees it.

    Other actors can run before every call on a row. `lost_answers` selects faults of the n-th
    UpdateItem (see `Worker.lost_answers`).
    """
    writes = itertools.count(1)
    outcome: list[str] = []

    def before(operation: str, _key: str) -> None:
        if operation in _COUNTED:
            turns.give_way(operation)
        fault = lost_answers.get(next(writes), "") if operation == "UpdateItem" else ""
        if fault == "throttled":
            raise ThrottledError("slow down", operation=operation)
        if fault == "before":
            raise UnavailableError("no answer, and not applied", operation=operation)
        outcome[:] = [fault]

    def after(operation: str, _key: str) -> None:
        if operation == "UpdateItem" and outcome == ["after"]:
            outcome.clear()
            raise UnavailableError("applied, and no answer", operation=operation)

    return table.view(before_call=before, after_call=after)

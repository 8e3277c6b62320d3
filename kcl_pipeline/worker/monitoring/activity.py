"""Note what the processing thread does, so that another thread can see that it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, Written
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import HangStep


@dataclass(frozen=True, slots=True)
class Doing:
    """A step of the processing thread.

    Attributes:
        step: None: the thread is between two steps.
        since: When the step began (monotonic seconds).
        thread: Identifier of the thread.
        is_users: Whether code of the user may run in the step.
    """

    step: HangStep | None
    since: float
    thread: int
    is_users: bool = False


class Activity:
    """The step of the processing thread.

    The processing thread calls `enter`. Any thread may read `now`, which is replaced as
    a whole.

    Args:
        clock: The clock.
        users: Steps in which code of the user runs. A stop waits longer for them.
    """

    def __init__(self, clock: Clock, users: Collection[HangStep] = (HangStep.WRITING,)) -> None:
        self._clock = clock
        self._users = frozenset(users)
        self.now = Doing(None, clock.monotonic(), threading.get_ident())

    def enter(self, step: HangStep | None, *, stores: bool = False) -> None:
        """Begin a step; None: end the last one.

        This is progress, also when the last step was the same.

        Args:
            step: The step.
            stores: The transform has returned, and its rows are written.
        """
        is_users = step in self._users and not stores
        self.now = Doing(step, self._clock.monotonic(), threading.get_ident(), is_users)


@runtime_checkable
class TransformsFirst(Protocol):
    """A `BatchWriter` whose transform has returned before it writes a file.

    Attributes:
        before_files: Called between the two.
    """

    before_files: Callable[[], None]


class WatchedWriter:
    """`BatchWriter` that notes each call of another one.

    What follows a `write`, until the next step, counts as COMMITTING: dead letters are written.
    """

    def __init__(self, writer: BatchWriter, activity: Activity) -> None:
        self._writer = writer
        self._activity = activity
        if isinstance(writer, TransformsFirst):
            writer.before_files = lambda: activity.enter(HangStep.WRITING, stores=True)

    def write(self, batch: Batch) -> Written:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[str | None]:  # noqa: D102
        self._activity.enter(HangStep.WRITING)
        return self._writer.probe(slices)

"""Note what the processing thread does, so that another thread can see that it hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    step: HangStep | None
    since: float
    thread: int


class Activity:
    """The step of the processing thread.

    The processing thread calls `enter`. Any thread may read `now`, which is replaced as
    a whole.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = Doing(None, clock.monotonic(), threading.get_ident())

    def enter(self, step: HangStep | None) -> None:
        """Begin a step; None: end the last one.

        This is progress, also when the last step was the same.
        """
        self.now = Doing(step, self._clock.monotonic(), threading.get_ident())


class WatchedWriter:
    """`BatchWriter` that notes each call of another one.

    What follows a `write`, until the next step, counts as COMMITTING: dead letters are written.
    """

    def __init__(self, writer: BatchWriter, activity: Activity) -> None:
        self._writer = writer
        self._activity = activity

    def write(self, batch: Batch) -> Written:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[str | None]:  # noqa: D102
        self._activity.enter(HangStep.WRITING)
        return self._writer.probe(slices)

"""End a worker that can neither read, renew nor commit, so that its supervisor acts.

Expired credentials, a revoked permission or a broken network of one host can last for ever. Such a
worker keeps its process, and to a supervisor it looks alive.
"""

from __future__ import annotations

import math
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.events import (
    AwsTrouble,
    BatchCommitted,
    Event,
    EventSink,
    LeaseTask,
    ReadFinished,
    TaskFinished,
)
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources.batch_source import BatchSource

_SHORTEST_GAP_SECONDS: Final = 5.0
"""A time between two looks that counts in full, however short `useless_after_millis` is."""


class UselessWatch:
    """Notes when the worker last read, renewed or committed. Any thread may send events.

    A worker without leases is as it should be while it finds out that it has none, and writes its
    row. The thread that renews the leases calls `look`. The time between two looks counts up to a
    quarter of `useless_after_millis`: a worker that was paused as a whole (SIGSTOP) can do nothing.

    Args:
        dependencies: The dependencies of the worker.
        stop: Is set when the worker is useless, so that steps that repeat their calls end.

    Attributes:
        is_useless: Whether the worker was useless for `worker.useless_after_millis`.
    """

    def __init__(self, dependencies: WorkerDependencies, stop: StopSignal) -> None:
        self._clock = dependencies.clock
        self._stop = stop
        self._after_seconds = dependencies.settings.worker.useless_after_millis / 1000
        self._longest_gap_seconds = max(self._after_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._useful = True
        self._looked_at: float | None = None
        self._seconds = 0.0
        self._read_at = -math.inf
        self._succeeded = {LeaseTask.DISCOVERY: False, LeaseTask.REPORT: False}
        self._last_error = ""
        self.is_useless = False

    def noting(self, events: EventSink) -> EventSink:
        """Return an event sink that notes what the worker could do, and passes events on."""

        def take(event: Event) -> None:
            self._note(event)
            events(event)

        return take

    def look(self, leases: HeldLeases, source: BatchSource) -> None:
        """Check the worker once."""
        now = self._clock.monotonic()
        held = leases.held()
        states = [source.state_of(one.lease_key) for one in held]
        read_at = max((s.read_at for s in states if s and s.read_at is not None), default=-math.inf)
        is_idle = not held and all(self._succeeded.values())
        if self._useful or is_idle or read_at > self._read_at or self._looked_at is None:
            self._seconds = 0.0
        else:
            self._seconds += min(now - self._looked_at, self._longest_gap_seconds)
        self._read_at = max(read_at, self._read_at)
        self._useful, self._looked_at = False, now
        if self._seconds >= self._after_seconds and not self.is_useless:
            self.is_useless = True
            self._stop.set()

    def sentence(self) -> str:
        """Return why the worker has ended."""
        text = (
            f"the worker could neither read, renew nor commit for {self._seconds:.0f} s "
            "(worker.useless_after_millis)"
        )
        return f"{text}; the last error is: {self._last_error}" if self._last_error else text

    def _note(self, event: Event) -> None:
        if isinstance(event, BatchCommitted):
            self._useful = True
        elif isinstance(event, ReadFinished):
            self._useful = self._useful or event.succeeded
        elif isinstance(event, TaskFinished):
            if event.task is LeaseTask.RENEWAL:
                self._useful = self._useful or event.leases > 0
            else:
                self._succeeded[event.task] = event.succeeded
        elif isinstance(event, AwsTrouble):
            self._last_error = event.error

"""Report, or end, a worker whose processing thread makes no progress while records wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.events import HangStep, WorkerHung, WorkerResumed
from kcl_pipeline.leases.state.worker_status import HungState
from kcl_pipeline.processors.thread import RunningCall
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.monitoring.activity import Activity, Doing
from kcl_pipeline.worker.monitoring.stacks import thread_stacks

_SHORTEST_GAP_SECONDS: Final = 5.0
"""A time between two looks that counts in full, however short `hung_after_millis` is."""


class HangWatch:
    """Report the worker as hung, once per `worker.hung_after_millis`.

    The thread that renews the leases calls `look` after it has renewed them. The time between two
    looks counts up to a quarter of `hung_after_millis`: while the worker is paused as a whole
    (SIGSTOP), its processing thread cannot make progress.

    Args:
        dependencies: The dependencies of the worker.
        activity: What the processing thread does.
        waiting: Returns the held leases that may have records that are not committed, unless they
            were read to their end after a time (monotonic seconds).
        calls: Returns the running calls of record processors, the longest first. One that runs for
            `hung_after_millis` is reported as a step that hangs, although the other shards go on.

    Attributes:
        hung: The state at the last look. None: the worker is not hung.
        over: Set when the watch gives the processing thread up. None: nobody waits for that.
        gave_up: Whether it has given the thread up.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        activity: Activity,
        waiting: Callable[[float], tuple[str, ...]],
        calls: Callable[[], Sequence[RunningCall]] = tuple,
    ) -> None:
        self._dependencies = dependencies
        self._activity = activity
        self._waiting = waiting
        self._calls = calls
        settings = dependencies.settings.worker
        self._after_seconds = settings.hung_after_millis / 1000
        self._longest_gap_seconds = max(self._after_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._observed: Doing | None = None
        self._observed_at = 0.0
        self._seconds = 0.0
        self._told: tuple[float, float] | None = None
        self.hung: HungState | None = None
        stop_millis = settings.stop_hung_after_millis
        self._stop_seconds = None if stop_millis is None else stop_millis / 1000
        self.over: StopSignal | None = None
        self.gave_up = False

    def look(self) -> None:
        """Check the processing thread once."""
        now, doing, calls = self._dependencies.clock.monotonic(), self._activity.now, self._calls()
        is_call = bool(calls) and calls[0].since <= doing.since
        if is_call:
            doing = Doing(HangStep.COMMITTING, calls[0].since, calls[0].thread, is_users=True)
        seconds = self._seconds_in(doing, now)
        if doing.step is None or seconds < self._after_seconds:
            self._resume()
            return
        if is_call:
            hung = [call for call in calls if now - call.since >= self._after_seconds]
            waiting = tuple(sorted({call.lease_key for call in hung}))
        else:
            waiting = self._waiting(doing.since)
        if not waiting:
            self._resume()
            return
        self.hung = HungState(doing.step.value, seconds, len(waiting))
        told = self._told
        if told is None or told[0] != doing.since or now - told[1] >= self._after_seconds:
            self._told = (doing.since, now)
            stacks = thread_stacks(doing.thread)
            self._dependencies.events(
                WorkerHung(self._dependencies.worker_id, doing.step, seconds, waiting, stacks)
            )
        if self._stop_seconds is not None and self.over is not None:
            self.gave_up = self.gave_up or seconds >= self._stop_seconds
            if self.gave_up:
                self.over.set()

    def _seconds_in(self, doing: Doing, now: float) -> float:
        """Return for how long the step has lasted while this worker ran."""
        if self._observed != doing:
            self._observed, self._observed_at, self._seconds = doing, doing.since, 0.0
        self._seconds += min(now - self._observed_at, self._longest_gap_seconds)
        self._observed_at = now
        return self._seconds

    def sentence(self) -> str:
        """Return why a worker that was given up has ended."""
        step, seconds = (
            ("unknown", 0.0) if self.hung is None else (self.hung.step, self.hung.seconds)
        )
        return (
            f"the worker was hung in step {step} for {seconds:.0f} s "
            "(worker.stop_hung_after_millis); its leases are released, and no record is lost"
        )

    def _resume(self) -> None:
        self.hung = None
        if self._told is not None:
            self._told = None
            self._dependencies.events(WorkerResumed(self._dependencies.worker_id))

"""Run the processing of a worker in a thread, and abandon it when it does not end at a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import AwsTrouble, BatchAbandoned, DefectFound, HangStep
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.summary import StopReason
from kcl_pipeline.worker.watchdog import Activity, Doing

STEP_SECONDS: Final = 2.5
"""How long a stop waits for a step that runs no code of the user: a call to AWS or to the store.

It is the time that the release of the leases leaves of 10 s.
"""
LOOK_SECONDS: Final = 0.25
"""Time between two looks whether the worker must end."""


class Processing:
    """Run the processing loop, and stop waiting for it when it hangs.

    A thread cannot be ended from outside. One that was abandoned, and goes on later, finds that its
    leases are not held any more, and commits nothing. It is a daemon thread: it ends with its
    process.

    Args:
        dependencies: The dependencies of the worker. Without `parallel`, and without
            `worker.stop_hung_after_millis`, the loop runs on the calling thread.
        activity: What the processing thread does.
        ending: Returns why the worker must end, also in the middle of a batch. None: it goes on.
            A thread that is hung is not waited for.

    Attributes:
        is_abandoned: Whether the thread was left alone.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        activity: Activity,
        ending: Callable[[], StopReason | None],
    ) -> None:
        self._dependencies = dependencies
        self._clock = dependencies.clock
        self._activity = activity
        self._ending = ending
        self._timeout_seconds = dependencies.settings.worker.stop_timeout_millis / 1000
        self.is_abandoned = False

    def run(self, loop: Callable[[], StopReason]) -> StopReason:
        """Return the reason of the loop, or of its end if it is abandoned.

        Raises:
            BaseException: The error of the loop.
        """
        stop_hung = self._dependencies.settings.worker.stop_hung_after_millis
        if not self._dependencies.parallel and stop_hung is None:
            return loop()
        over = self._clock.signal()
        outcome: list[StopReason | BaseException] = []

        def process() -> None:
            try:
                outcome.append(loop())
            except BaseException as error:  # noqa: BLE001 (the calling thread raises it)
                outcome.append(error)
                if self.is_abandoned:
                    what = "processing that was abandoned"
                    kind = AwsTrouble if isinstance(error, KclError) else DefectFound
                    self._dependencies.events(kind(what, described(error, what)))
            over.set()

        self._dependencies.spawn("processing", process)
        reason = self._wait(over)
        if reason is not None and not outcome:
            self.is_abandoned = True
            return reason
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _wait(self, over: StopSignal) -> StopReason | None:
        """Wait for the end of the loop; return why it is not waited for any longer."""
        began: float | None = None
        while not over.wait(LOOK_SECONDS):
            reason = self._ending()
            if reason is None:
                continue
            if reason is StopReason.HUNG:  # It was waited for as long as the settings say.
                return reason
            now = self._clock.monotonic()
            began = now if began is None else began
            doing = self._activity.now
            if self._left_seconds(doing, began, now) <= 0:
                step = HangStep.LEASES if doing.step is None else doing.step
                self._dependencies.events(
                    BatchAbandoned(self._dependencies.worker_id, step, now - doing.since)
                )
                return reason
        return None

    def _left_seconds(self, doing: Doing, began: float, now: float) -> float:
        left = began + self._timeout_seconds - now
        if doing.is_users:
            return left
        return min(left, max(began, doing.since) + STEP_SECONDS - now)

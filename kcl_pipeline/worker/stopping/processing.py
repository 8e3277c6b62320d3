"""Run the processing loop so that the worker can end although the loop blocks."""

from __future__ import annotations

from collections.abc import Callable

from kcl_pipeline.background import Spawn
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.worker.monitoring.hangs import HangWatch
from kcl_pipeline.worker.summary import StopReason


def run_watched(
    loop: Callable[[], StopReason], hangs: HangWatch, spawn: Spawn, events: EventSink
) -> StopReason:
    """Run the loop; return HUNG, and leave its thread alone, when the watch gives it up.

    Without `worker.stop_hung_after_millis` the loop runs on the calling thread. A thread cannot be
    ended from outside. One that was given up and goes on later finds that its leases are lost.

    Raises:
        BaseException: The error of the loop.
    """
    over = hangs.over
    if over is None:
        return loop()
    outcome: list[StopReason | BaseException] = []

    def process() -> None:
        try:
            outcome.append(loop())
        except BaseException as error:  # noqa: BLE001 (the calling thread raises it)
            outcome.append(error)
            if hangs.gave_up:
                events(AwsTrouble("processing that was given up", str(error)))
        over.set()

    spawn("processing", process)
    over.wait()
    if not outcome:
        return StopReason.HUNG
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]

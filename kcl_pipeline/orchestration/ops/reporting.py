"""Report a running worker to Dagster: its events, and when a drain has ended.

A worker materializes the output once, at its end. While workers run, the leader sensor reports the
output of the whole fleet, so that the plots of the asset are one series.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.events import Event, EventSink, WorkerHung
from kcl_pipeline.metrics.exporters import LoggingEvents, level_of, text_of
from kcl_pipeline.metrics.repeats import RepeatFilter
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import (
    DRAINED_TAG,
    HANDED_OVER_TAG,
    LANDED_TAG,
    READ_TAG,
)
from kcl_pipeline.orchestration.assets.runs.metadata import period_text
from kcl_pipeline.text import counted
from kcl_pipeline.worker.summary import WorkerProgress

_KEPT_EVENTS: Final = 50

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunEvents:
    """Collect the worker's events, for one log entry per period.

    Thread-safe. Callers do not wait for the run's log, where a write may take a second.

    Attributes:
        lines: The newest events, one line each.
        dropped: How many older events did not fit.
        process_log: Receives every event at once.
    """

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    dropped: int = 0
    process_log: EventSink = field(default_factory=LoggingEvents)
    repeats: RepeatFilter = field(default_factory=RepeatFilter)

    def __call__(self, told: Event) -> None:
        """Log the event, and keep it unless its level is below INFO (as for each batch), or the
        same error was kept less than a minute ago.
        """
        self.process_log(told)
        event = self.repeats(told)
        if event is None or level_of(event) < logging.INFO:
            return
        if len(self.lines) == _KEPT_EVENTS:
            self.dropped += 1
        self.lines.append(text_of(event))

    def drain(self) -> str | None:
        """The lines since the last call as one string; None without lines."""
        taken = [self.lines.popleft() for _ in range(len(self.lines))]
        dropped, self.dropped = self.dropped, 0
        if dropped:
            taken.insert(0, f"({dropped} earlier events are only in the log of the process)")
        return "\n".join(taken) or None


def hang_log(context: dg.OpExecutionContext) -> EventSink:
    """Return an event sink that writes the stacks of a hung worker to the log of the run.

    Each entry has a thread of its own: a write to Dagster's storage may take a second, an event
    sink must not wait, and the thread that writes the other events is the one that hangs.
    """

    def log(event: Event) -> None:
        if isinstance(event, WorkerHung):
            texts = ("%s\n%s", text_of(event), event.stacks)
            thread = threading.Thread(target=context.log.error, args=texts, daemon=True)
            thread.start()

    return log


class RunReporter:
    """Report the progress of one worker to Dagster once per period.

    It never raises: a failed report must not stop the worker.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        events: RunEvents,
        stop: StopSignal,
        clock: Clock,
        pipeline: PipelineLike,
        *,
        continuous: bool = False,
    ) -> None:
        self._context = context
        self._events = events
        self._stop = stop
        self._clock = clock
        self._pipeline = pipeline
        self._continuous = continuous
        self.last: WorkerProgress | None = None

    def __call__(self, progress: WorkerProgress) -> None:
        """Report one period.

        Writes one log entry with the period's events. A drain, which no sensor reports, also logs
        its counters.
        """
        self.last = progress
        try:
            self.flush_events()
            if not self._continuous:
                self._context.log.info(period_text(progress))
            run_id = self._context.run.run_id
            run = self._context.instance.get_run_by_id(run_id)
            if run is not None and run.is_finished:
                _log.warning("stopping the worker: its run %s was closed in Dagster", run_id)
                self._stop.set()
        except Exception:  # noqa: BLE001 (an error of Dagster's storage must not stop the worker)
            _log.exception("cannot report this period to Dagster")

    def report_totals(self, total: WorkerProgress) -> None:
        """Tag the run with what its worker read, landed and handed over."""
        landed = (
            f"{counted(total.rows_written, 'row')} in {counted(total.batches, 'batch', 'batches')}"
        )
        if total.dead_letters:
            landed += f", {counted(total.dead_letters, 'dead letter')}"
        tags = {
            READ_TAG: counted(total.records, "record"),
            LANDED_TAG: landed,
            HANDED_OVER_TAG: counted(total.handoffs, "shard"),
        }
        try:
            self._context.instance.add_run_tags(self._context.run.run_id, tags)
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("cannot tag the run with its totals in Dagster")

    def report_drained(self, *, is_alone: bool) -> None:
        """Tag the run of a drain with its time.

        All records that existed when the drain started are in the table, if no other worker holds
        shards (`is_alone`). The lag reads this tag for leases without a worker.
        """
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        tags = {DRAINED_TAG: now.isoformat(timespec="seconds")} if is_alone else {}
        try:
            self._context.instance.add_run_tags(self._context.run.run_id, tags)
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("cannot tag the run of the drain in Dagster")

    def dead_letter_table(self, dead_letters: int) -> dict[str, dg.MetadataValue]:
        """Return the address of the dead-letter table for a materialization with dead letters."""
        uri = dead_letter_address(self._pipeline.sink)
        if not dead_letters or uri is None:
            return {}
        return {"dead_letter_table": dg.MetadataValue.path(uri)}

    def flush_events(self) -> None:
        """Write the collected events as one entry of the run's log."""
        text = self._events.drain()
        if text:
            self._context.log.info(text)

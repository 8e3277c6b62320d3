"""Report a running worker to Dagster: its events, its lag, and its checks.

A worker materializes the output once, at its end. While workers run, the leader sensor reports the
output of the whole fleet, so that the plots of the asset are one series.
"""

import logging
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.events import Event, EventSink
from kcl_pipeline.leases.state.worker_status import PausedLease, WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.metrics.exporters import LoggingEvents, level_of, text_of
from kcl_pipeline.metrics.repeats import RepeatFilter
from kcl_pipeline.orchestration.assets.checks import health
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import (
    DRAINED_TAG,
    LAG_AT_TAG,
    LAG_TAG,
    PAUSED_TAG,
    STALLED_TAG,
    Names,
)
from kcl_pipeline.orchestration.assets.runs.metadata import period_text, table_rows
from kcl_pipeline.orchestration.assets.runs.runs import (
    RunView,
    active_runs,
    paused_shards,
    silent_lag_millis,
    stalled_shards,
    worst_lag_millis,
)
from kcl_pipeline.worker.summary import WorkerProgress

SLOW_COUNT_SECONDS: Final = 0.5
UNKNOWN: Final = "unknown"
"""Lag tag of a worker whose lag is not known. It replaces an older value."""
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


class RunReporter:
    """Report the progress of one worker to Dagster once per period.

    It never raises: a failed report must not stop the worker.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        names: Names,
        events: RunEvents,
        stop: StopSignal,
        clock: Clock,
        pipeline: PipelineLike,
        options: DagsterOptions,
        *,
        continuous: bool = False,
    ) -> None:
        self._context = context
        self._output = names.output
        self._events = events
        self._stop = stop
        self._clock = clock
        self._pipeline = pipeline
        self._options = options
        self._continuous = continuous
        self._passed: dict[str, bool] = {}
        self._count_seconds = 0.0
        self.last: WorkerProgress | None = None

    def __call__(self, progress: WorkerProgress) -> None:
        """Report one period.

        Writes one log entry with the period's events, and the lag as a run tag, which the leader
        sensor reads. A drain, which no sensor reports, also logs its counters.
        """
        self.last = progress
        try:
            self.flush_events()
            if not self._continuous:
                self._context.log.info(period_text(progress))
            run_id = self._context.run.run_id
            lag = progress.lag_millis
            known = UNKNOWN if lag is None else str(lag)
            tags = {
                STALLED_TAG: str(len(progress.stalled)),
                PAUSED_TAG: str(len(progress.paused)),
                LAG_TAG: known,
            } | self.reported_at()
            self._context.instance.add_run_tags(run_id, tags)
            if lag is not None or progress.stalled or progress.lag_unknown:
                self.check_lag(lag, len(progress.lag_unknown))
            self.check_paused(progress)
            run = self._context.instance.get_run_by_id(run_id)
            if run is not None and run.is_finished:
                _log.warning("stopping the worker: its run %s was closed in Dagster", run_id)
                self._stop.set()
        except Exception:  # noqa: BLE001 (an error of Dagster's storage must not stop the worker)
            _log.exception("cannot report this period to Dagster")

    def report_drained(self, *, is_alone: bool) -> None:
        """Report a lag of 0 after a drain.

        All records that existed when the drain started are in the table, if no other worker holds
        shards (`is_alone`). The lag check reads this tag for leases without a worker.
        """
        at = self.reported_at()
        drained = {DRAINED_TAG: at[LAG_AT_TAG]} if is_alone else {}
        try:
            self._context.instance.add_run_tags(
                self._context.run.run_id, {LAG_TAG: "0", STALLED_TAG: "0"} | drained | at
            )
        except Exception:  # noqa: BLE001 (as for a period's report)
            _log.exception("cannot report the lag after the drain to Dagster")

    def reported_at(self) -> dict[str, str]:
        """The tag with the time of the lag report."""
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        return {LAG_AT_TAG: now.isoformat(timespec="seconds")}

    def check_paused(self, progress: WorkerProgress) -> None:
        """Report whether a shard of the fleet is paused.

        The shards of other workers are known by their number.
        """
        paused = tuple(PausedLease(key, reason, 0.0) for key, reason in progress.paused.items())
        elsewhere = paused_shards(
            tuple(run for run in self._active_runs() if run.run_id != self._context.run.run_id)
        )
        status = WorkerStatus(paused=paused, paused_leases=len(paused) + elsewhere)
        row = WorkerMetrics(progress.worker_id, int(self._clock.wall()), status=status)
        self._report(health.paused([row]))

    def check_lag(self, own_lag_millis: int | None, unread_shards: int = 0) -> None:
        """Report the lag check for the latest materialization.

        The Dagster UI ignores an evaluation that does not belong to the latest materialization.
        The evaluation is reported without a run, as the sensor does it: within a run Dagster
        keeps one row per check, which would count as older than those of the sensor.
        """
        runs = self._active_runs()
        others = tuple(run for run in runs if run.run_id != self._context.run.run_id)
        reported = worst_lag_millis(runs) or 0
        period = self._options.progress_seconds
        silent = silent_lag_millis(others, self._clock.wall(), period) or 0
        worst = None if own_lag_millis is None else max(own_lag_millis, reported, silent)
        stalled = stalled_shards(runs)
        self._report(
            health.lag(
                worst,
                self._options.lag_threshold_seconds,
                stalled,
                unread_shards=unread_shards,
                error_seconds=self._options.check_limits.lag_error_seconds,
            )
        )

    def _active_runs(self) -> tuple[RunView, ...]:
        return active_runs(
            self._context.instance,
            self._pipeline.name,
            self._pipeline.settings.worker.worker_group_separator,
        )

    def _report(self, verdict: health.Health) -> None:
        """Report a check. A continuous worker reports it on change; the sensor, once a minute."""
        if self._continuous and self._passed.get(verdict.check) == verdict.passed:
            return
        self._passed[verdict.check] = verdict.passed
        instance, key = self._context.instance, self._output
        last = instance.fetch_materializations(key, limit=1).records
        evaluation = verdict.evaluation(key, of=last[0] if last else None)
        instance.report_runless_asset_event(evaluation)

    def dead_letter_table(self, dead_letters: int) -> dict[str, dg.MetadataValue]:
        """Return the address of the dead-letter table for a materialization with dead letters."""
        uri = dead_letter_address(self._pipeline.sink)
        if not dead_letters or uri is None:
            return {}
        return {"dead_letter_table": dg.MetadataValue.path(uri)}

    def row_count(self) -> dict[str, int]:
        """The table's row count as metadata; empty if it is not known.

        After one count that took longer than `SLOW_COUNT_SECONDS` the rows are not counted again,
        because counting delays the batches.
        """
        if self._count_seconds > SLOW_COUNT_SECONDS:
            return {}
        began = self._clock.monotonic()
        rows = table_rows(self._pipeline.sink)
        self._count_seconds = self._clock.monotonic() - began
        return {} if rows is None else {"dagster/row_count": rows}

    def flush_events(self) -> None:
        """Write the collected events as one entry of the run's log."""
        text = self._events.drain()
        if text:
            self._context.log.info(text)

"""Report a hung worker to Dagster, while the thread that reports its progress is blocked."""

import logging
import threading
from typing import Final

import dagster as dg

from kcl_pipeline.clock import Clock
from kcl_pipeline.events import Event, WorkerHung, WorkerResumed
from kcl_pipeline.leases.state.worker_status import HungState, WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.metrics.exporters import text_of
from kcl_pipeline.orchestration.assets.checks.hangs import hung, reported_hung
from kcl_pipeline.orchestration.assets.names import Names

FINISH_SECONDS: Final = 10.0
"""How long the end of a run waits for reports that are being written."""

_log = logging.getLogger(__name__)


class HangReporter:
    """Event sink that reports hung workers to the log of the run and as a check.

    Each report has a thread of its own: a write to Dagster's storage may take a second, and an
    event sink must not wait. There are at most two reports per `worker.hung_after_millis`. A report
    keeps the other hung workers of the last one. The leader corrects the check within a minute.

    Args:
        context: The run's context.
        names: Names the asset of the check.
        clock: Dates the report.
    """

    def __init__(self, context: dg.OpExecutionContext, names: Names, clock: Clock) -> None:
        self._context = context
        self._key = names.fleet
        self._clock = clock
        self._reports: list[threading.Thread] = []

    def __call__(self, event: Event) -> None:
        """Begin a report if the worker is hung, or is not hung any more."""
        if isinstance(event, WorkerHung | WorkerResumed):
            before = self._reports[-1] if self._reports else None
            thread = threading.Thread(
                target=self._report, args=(event, before), name="hang-report", daemon=True
            )
            self._reports = [*(one for one in self._reports if one.is_alive()), thread]
            thread.start()

    def finish(self) -> None:
        """Wait for the reports that are being written."""
        for thread in self._reports:
            thread.join(FINISH_SECONDS)

    def _report(self, event: WorkerHung | WorkerResumed, before: threading.Thread | None) -> None:
        try:
            if before is not None:
                before.join(FINISH_SECONDS)
            state = None
            if isinstance(event, WorkerHung):
                self._context.log.error("%s\n%s", text_of(event), event.stacks)
                state = HungState(event.step.value, event.seconds, len(event.lease_keys))
            row = WorkerMetrics(
                event.worker_id,
                int(self._clock.wall()),
                run_id=self._context.run.run_id,
                status=WorkerStatus(hung=state),
            )
            instance = self._context.instance
            others = reported_hung(instance, self._key, except_for=event.worker_id)
            last = instance.fetch_materializations(self._key, limit=1).records
            health = hung([row, *others])
            evaluation = health.evaluation(self._key, of=last[0] if last else None)
            instance.report_runless_asset_event(evaluation)
        except Exception:  # noqa: BLE001 (an error of Dagster's storage must not stop the worker)
            _log.exception("cannot report the hung worker to Dagster")

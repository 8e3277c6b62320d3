"""Periodic tasks for the leases: renewal, discovery, and the worker metrics row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError, NotFoundError
from kcl_pipeline.events import (
    AwsTrouble,
    LeaseTask,
    StatusMeasured,
    TaskFinished,
)
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.metrics.reporter import WorkerMetricsReporter
from kcl_pipeline.threads import Due, InFlight, attempt
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.watchdog import Watchdog
from kcl_pipeline.worker_status import WorkerStatus

FIRST_DISCOVERY_SECONDS: Final = 1.0
CHANGING_DISCOVERY_SECONDS: Final = 0.5
"""The default interval for a time after a lease was gained or lost. Other leases often follow, and
nobody reads a lease from its handoff until its new owner discovers it.
"""
CHANGING_SECONDS: Final = 30.0
COMING_DISCOVERY_SECONDS: Final = 0.2
"""The same while a worker hands leases over to this one. Nobody reads them in between."""
COMING_SECONDS_PER_LEASE: Final = 0.01
"""At least, so that the rows of many leases are read as often as those of a few."""
SECOND_REPORT_SECONDS: Final = 2.0
"""Short, because a leader considers a worker alive only after its row has changed."""


@dataclass(slots=True)
class _Sweep:
    """One renewal of all leases: the calls that it has started, and how they ended.

    Attributes:
        began: When it began (monotonic seconds).
        ended: When its last call ended.
        calls: Number of calls.
        renewed: One item for each call that has ended: whether it renewed its lease.
    """

    began: float
    ended: float
    calls: int = 0
    renewed: list[bool] = field(default_factory=list)


class LeaseLoop:
    """Renew, discover and report, each when it is due. One thread calls `tick`.

    The tick makes no call: it submits calls to `calls`, and a later tick collects them. A call that
    hangs delays only itself: renewals and look-ups have a key for each lease, the query of the
    index and the report have one each. A row has at most one call of this loop in flight. What
    other threads write is excluded by `HeldLeases`, which skips a row that another thread writes.

    `replaced` returns the tasks that the loop leaves out, because another module does them, or
    because they must not be done now. `no_table` is called when a table is missing.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        reporter: WorkerMetricsReporter,
        watchdog: Watchdog,
        source: BatchSource,
        calls: InFlight,
        stop: StopSignal,
        *,
        status: Callable[[], WorkerStatus],
        has_committed: Callable[[], bool],
        replaced: Callable[[], Collection[LeaseTask]],
        no_table: Callable[[], None],
    ) -> None:
        self._no_table = no_table
        self._dependencies = dependencies
        self._leases = leases
        self._reporter = reporter
        self._watchdog = watchdog
        self._status = status
        self._has_committed = has_committed
        self._has_told_commit = False
        self._replaced = replaced
        self._source = source
        self._calls = calls
        self._sweep: _Sweep | None = None
        self._stop = stop
        clock, settings = dependencies.clock, dependencies.settings
        self._renewal = Due(clock, settings.lease.renewal_interval_millis / 1000)
        self._discovery_seconds = settings.lease_discovery_interval_millis / 1000
        self._is_discovery_set = settings.lease.lease_discovery_interval_millis is not None
        self._discovered_at = -math.inf
        self._capture = Due(
            clock, settings.worker.in_memory_worker_metrics_capture_frequency_millis / 1000
        )
        period = settings.worker.worker_metrics_reporter_freq_in_millis / 1000
        self._report = Due(clock, period, first_seconds=min(period, SECOND_REPORT_SECONDS))

    def tick(self) -> float:
        """Run the tasks that are due; return the seconds until the next one is due.

        A task that fails does not prevent the others. After a stop only renewals go on.

        Raises:
            Exception: An unexpected error of a call.
        """
        self._calls.collect()
        self._report_sweep(is_over=False)
        replaced = self._replaced()
        if self._reporter.taken is not None:  # another process has the leases
            return FIRST_DISCOVERY_SECONDS
        if self._renewal.ready():
            self._report_sweep(is_over=True)
            # First, because a lease has one call in flight, and the transfer ends its renewals
            for held in self._leases.overdue_handoffs():
                self._start(held.lease_key, partial(self._force_handoff, held))
            now = self._dependencies.clock.monotonic()
            self._sweep = _Sweep(began=now, ended=now)
            self._leases.renew_all(map=partial(self._renew, self._sweep))
            self._report_sweep(is_over=False)
            self._watchdog.look(must_be_useful=LeaseTask.DISCOVERY not in replaced)
            self._dependencies.events(StatusMeasured(self._dependencies.worker_id, self._status()))
        if self._seconds_until_discovery() <= 0:
            self._discovered_at = self._dependencies.clock.monotonic()
            if not self._stop.is_set() and LeaseTask.DISCOVERY not in replaced:
                self._calls.start(LeaseTask.DISCOVERY, self._discover)
        captures = self._capture.ready()
        is_due = self._report.ready() or self._is_first_commit()
        reports = is_due and LeaseTask.REPORT not in replaced
        # After a stop the row is deleted, and a late report would write it again
        if (captures or reports) and not self._stop.is_set():
            self._calls.start(
                LeaseTask.REPORT, partial(self._measure, captures=captures, reports=reports)
            )
        return min(
            self._renewal.seconds(),
            self._seconds_until_discovery(),
            self._capture.seconds(),
            self._report.seconds(),
        )

    def _is_first_commit(self) -> bool:
        """Return True once: after the first commit, whose rows Dagster then shows soon."""
        if self._has_told_commit or not self._has_committed():
            return False
        self._has_told_commit = True
        return True

    def _start(self, lease_key: str, call: Callable[[], Any]) -> bool:
        return self._calls.start(("lease", lease_key), call)

    def _renew(
        self, sweep: _Sweep, renew: Callable[[Held], bool], leases: Sequence[Held]
    ) -> list[bool]:
        """Start the renewals of a sweep. Those of the sweep before that go on are not repeated."""

        def call(held: Held) -> None:
            is_renewed = renew(held)
            sweep.ended = self._dependencies.clock.monotonic()
            sweep.renewed.append(is_renewed)

        for held in leases:
            sweep.calls += self._start(held.lease_key, partial(call, held))
        return []

    def _report_sweep(self, *, is_over: bool) -> None:
        """Report the last sweep once all of its calls have ended, or `is_over` ends its time."""
        sweep = self._sweep
        if sweep is None:
            return
        is_complete = len(sweep.renewed) == sweep.calls
        if is_complete or is_over:
            self._sweep = None
            millis, renewed = (sweep.ended - sweep.began) * 1000, sum(sweep.renewed)
            worker_id = self._dependencies.worker_id
            self._dependencies.events(
                TaskFinished(worker_id, LeaseTask.RENEWAL, millis, renewed, is_complete)
            )

    def _discover(self) -> None:
        """Query the index; start a look-up for each new lease, so that none waits for another."""
        started: list[str] = []

        def start(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
            for item in items:
                key = item if isinstance(item, str) else item.lease_key
                if self._start(key, partial(call, item)):
                    started.append(key)
            return []

        def discover() -> int:
            self._leases.discover(map=start)
            return len(started)

        self._run(LeaseTask.DISCOVERY, "discovery", discover)

    def _measure(self, *, captures: bool, reports: bool) -> None:
        """Capture and report in one call, because both use the captured values."""
        if captures:
            self._reporter.capture()
        if reports:
            self._run(LeaseTask.REPORT, "worker metrics report", self._report_metrics)

    def _run(self, task: LeaseTask, what: str, step: Callable[[], int]) -> None:
        """Run a task. An `AwsError` is reported as an event, as by `attempt`.

        Args:
            task: The task.
            what: The task in the event of an error.
            step: Runs it; returns the number of leases that it renewed or found.
        """
        began = self._dependencies.clock.monotonic()
        leases, succeeded = 0, False
        try:
            leases, succeeded = step(), True
        except AwsError as error:
            self._dependencies.events(AwsTrouble(what, str(error)))
            if isinstance(error, NotFoundError):
                self._no_table()
        millis = (self._dependencies.clock.monotonic() - began) * 1000
        self._dependencies.events(
            TaskFinished(self._dependencies.worker_id, task, millis, leases, succeeded)
        )

    def _seconds_until_discovery(self) -> float:
        """Return the seconds until the next discovery is due, 0 or more.

        It is due more often while no lease is held, after one was gained or lost, and while one is
        handed over to this worker.
        """
        now, seconds = self._dependencies.clock.monotonic(), self._discovery_seconds
        if not self._leases.held():
            seconds = min(seconds, FIRST_DISCOVERY_SECONDS)
        if not self._is_discovery_set and now - self._leases.changed_at < CHANGING_SECONDS:
            seconds = min(seconds, CHANGING_DISCOVERY_SECONDS)
        if not self._is_discovery_set and (coming := self._leases.coming):
            wait = max(COMING_DISCOVERY_SECONDS, COMING_SECONDS_PER_LEASE * coming)
            seconds = min(seconds, wait)
        return max(self._discovered_at + seconds - now, 0.0)

    def _force_handoff(self, held: Held) -> None:
        self._source.end(held.lease_key)
        attempt(
            "handoff time-out",
            lambda: self._leases.complete_handoff(held, forced=True),
            self._dependencies.events,
        )

    def _report_metrics(self) -> int:
        self._reporter.report()
        return 0

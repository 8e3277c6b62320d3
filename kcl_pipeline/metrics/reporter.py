"""Capture a worker's CPU, and report averages in its metrics row (protocol §2.2, §2.3)."""

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from statistics import fmean
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import WorkerSettings
from kcl_pipeline.errors import WorkerIdTakenError
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.metrics.cpu import FULL_PERCENT, OWN_CPU, MetricProvider
from kcl_pipeline.text import printable
from kcl_pipeline.worker_status import WorkerStatus

FAILED_INTERVAL: Final = -1.0
MAX_RAW_VALUES: Final = 300
FIRST_SAMPLE_SECONDS: Final = 0.25
_MICRO: Final = Decimal("0.000001")

logger = logging.getLogger(__name__)


class WorkerMetricsReporter:
    """Capture and report the metrics of one worker.

    One thread calls `capture` and `report`. Every thread may read `drain_requested`.

    The first report does not wait for a capture, because the leader assigns no leases to a worker
    without a row. It does not report a failure either, because the leader assigns no leases to a
    failing worker. While the provider has never returned a value, the row has no metrics.
    Afterwards, an interval in which all captures failed is reported as −1. An interval without a
    capture adds no value.
    """

    def __init__(
        self,
        table: WorkerMetricsTable,
        worker_id: str,
        settings: WorkerSettings,
        clock: Clock,
        rng: random.Random,
        provider: MetricProvider | None,
        *,
        run_id: str | None = None,
        replaces: str | None = None,
        status: Callable[[], WorkerStatus] | None = None,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._clock = clock
        self._provider = None if settings.disable_worker_metrics else provider
        self._run_id = run_id
        self._replaces = replaces
        self._status = status
        self._raw: deque[float] = deque(maxlen=MAX_RAW_VALUES)
        self._averages: deque[float] = deque(
            maxlen=settings.no_of_persisted_metrics_per_worker_metrics
        )
        # Random, so that workers that start together do not sample at the same time.
        self._first_capture = (
            clock.monotonic()
            + rng.random() * settings.in_memory_worker_metrics_capture_frequency_millis / 1000
        )
        self._reported = False
        self._has_value = False
        self._tried = False
        self._warned = False
        self.drain_requested = False
        """Whether the stored row contained a drain request. It is never reset."""
        self.drains_for_pause = False
        """Whether the reason of the drain request is that the application is paused."""
        self._deregistered = False
        self._was_stored = False
        self.taken: WorkerIdTakenError | None = None
        """Set when another process has started under this worker id: this one must end."""

    def note_pause(self) -> None:
        """Note that the application is paused, as if the row contained a request for it."""
        self.drain_requested = self.drains_for_pause = True

    def capture(self) -> None:
        """Capture one value.

        Never raises. A failed capture, or a value outside 0 to 100, is dropped.
        """
        if self._provider is not None and self._clock.monotonic() >= self._first_capture:
            self._sample(self._provider)

    def _sample(self, provider: MetricProvider) -> None:
        self._tried = True
        try:
            value = checked(provider.sample())
        except Exception as error:  # noqa: BLE001
            # A provider may be the user's own. Its errors must not stop the worker.
            if not self._warned:
                logger.warning(
                    "cannot capture worker metric %s: %s: %s",
                    provider.short_name,
                    type(error).__name__,
                    printable(str(error)),
                )
                self._warned = True
            return
        if value is not None:
            self._has_value = True
            self._warned = False
            self._raw.append(value)

    def report(self) -> WorkerMetrics:
        """Write the row with the average of the interval that ends now.

        After `deregister` nothing is written, and neither after another process has taken the
        worker id (`taken`). The first report takes the worker id over.

        Returns:
            The row as stored.

        Raises:
            errors.AwsError: The table raised it. The next report contains the average.
        """
        if self._provider is not None and not self._deregistered:
            self._close_interval(self._provider)
        row = self._row()
        if self._deregistered or self.taken is not None:
            return row
        try:
            stored = self._table.report(row, takes_over=not self._was_stored)
        except WorkerIdTakenError as error:
            self.taken = error
            return row
        self._was_stored = True
        if stored.drain_requested and not self.drain_requested:
            self.drain_requested, self.drains_for_pause = True, stored.drains_for_pause
        return stored

    def verify_run(self) -> bool:
        """Read the row, set `taken` if another process has taken the worker id; return if not.

        Any thread may call it.

        Raises:
            errors.AwsError: The table raised it.
        """
        if self._run_id is not None and self._was_stored:
            try:
                self._table.verify_run(self._worker_id, self._run_id)
            except WorkerIdTakenError as error:
                self.taken = error
        return self.taken is None

    def note_taken(self) -> None:
        """Note in the row of the other process that this one ends, for those who look at it.

        Raises:
            errors.AwsError: The table raised it.
        """
        other = None if self.taken is None else self.taken.other_run_id
        if self._run_id is not None and other is not None:
            millis = round(self._clock.wall() * 1000)
            self._table.note_former_run(self._worker_id, self._run_id, other, millis)

    def _close_interval(self, provider: MetricProvider) -> None:
        if not self._reported and not self._raw:
            self._sample(provider)
            if not self._raw:  # a source with counters needs two readings
                self._clock.sleep(FIRST_SAMPLE_SECONDS)
                self._sample(provider)
        self._reported = True
        if self._has_value and self._tried:
            self._averages.append(round_half_up(fmean(self._raw)) if self._raw else FAILED_INTERVAL)
        self._tried = False
        self._raw.clear()

    def _row(self) -> WorkerMetrics:
        averages = tuple(self._averages)
        provider = self._provider if averages else None
        name = None if provider is None else provider.short_name
        is_own = name == OWN_CPU
        return WorkerMetrics(
            worker_id=self._worker_id,
            last_update_seconds=int(self._clock.wall()),
            stats={} if name is None or is_own else {name: averages},
            operating_range={}
            if provider is None or is_own
            else {provider.short_name: (provider.max_utilization_percent,)},
            own_cpu=averages if is_own else (),
            run_id=self._run_id,
            status=None if self._status is None else self._status(),
            replaces=self._replaces,
        )

    def deregister(self) -> None:
        """Delete the row, unless it is of another process. It is not written again.

        Raises:
            errors.AwsError: The table raised it.
        """
        self._deregistered = True
        self._table.deregister(self._worker_id, self._run_id)


def checked(value: float | None) -> float | None:
    """Return the value if it is None or from 0 to 100.

    Raises:
        ValueError: The value is out of range.
    """
    if value is not None and not (math.isfinite(value) and 0 <= value <= FULL_PERCENT):
        raise ValueError(f"{value} is not a percentage from 0 to 100")
    return value


def round_half_up(value: float) -> float:
    """Round to six decimals, halves away from zero (protocol §2.3)."""
    return float(Decimal(repr(value)).quantize(_MICRO, ROUND_HALF_UP))

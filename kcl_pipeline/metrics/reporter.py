"""A worker's own row: CPU is captured often, averaged and reported now and then (protocol §2.2,
§2.3).
"""

from __future__ import annotations

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
from kcl_pipeline.leases.tables import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.leases.worker_status import WorkerStatus
from kcl_pipeline.metrics.provider import FULL_PERCENT, MetricProvider
from kcl_pipeline.text import printable

FAILED_INTERVAL: Final = -1.0
MAX_RAW_VALUES: Final = 300
FIRST_SAMPLE_SECONDS: Final = 0.25
_MICRO: Final = Decimal("0.000001")

logger = logging.getLogger(__name__)


class WorkerMetricsReporter:
    """Two ticks, `capture` and `report`, called by one thread; `drain_requested` may be read by
    any.

    The first report needs no capture before it: for the leader a worker exists only by its row, so
    it should not wait, and it should not say "failing" either, which would keep leases away. A
    provider that has never given a value counts as none: the row is that of a worker without
    metrics. Once it has given one, an interval without any is −1; one so short that none was asked
    for says nothing.
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
        status: Callable[[], WorkerStatus] | None = None,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._clock = clock
        self._provider = None if settings.disable_worker_metrics else provider
        self._run_id = run_id
        self._status = status
        self._raw: deque[float] = deque(maxlen=MAX_RAW_VALUES)
        self._averages: deque[float] = deque(
            maxlen=settings.no_of_persisted_metrics_per_worker_metrics
        )
        # workers that were started together do not sample together
        self._first_capture = (
            clock.monotonic()
            + rng.random() * settings.in_memory_worker_metrics_capture_frequency_millis / 1000
        )
        self._reported = False
        self._has_value = False
        self._tried = False
        self._warned = False
        self._drain_requested = False
        self._deregistered = False
        self._was_stored = False
        self.other_run_id: str | None = None
        """The run of another process that reports under this worker id at the same time: it wrote
        the row after this process had. A run that is found at the first report may be over."""

    @property
    def drain_requested(self) -> bool:
        """Whether the row, as it came back from the last report, asked this worker to stop.

        It stays asked for.
        """
        return self._drain_requested

    def capture(self) -> None:
        """Take one value. Never raises: a capture that fails, or is not within 0 to 100, leaves no
        value behind.
        """
        if self._provider is not None and self._clock.monotonic() >= self._first_capture:
            self._sample(self._provider)

    def _sample(self, provider: MetricProvider) -> None:
        self._tried = True
        try:
            value = checked(provider.sample())
        except Exception as error:  # noqa: BLE001
            # a provider may be the user's own; a failed capture is a figure, not the end of a
            # worker
            if not self._warned:
                logger.warning(
                    "worker metric %s cannot be captured: %s: %s",
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
        """Write the row with the average of the interval that ends here; returns it as stored.
        After `deregister` nothing is written.

        Raises `errors.AwsError` when the table does; the average is then part of the next report.
        """
        if self._provider is not None and not self._deregistered:
            self._close_interval(self._provider)
        row = self._row()
        if self._deregistered:
            return row
        stored = self._table.report(row)
        if self._was_stored and stored.replaced_run_id is not None:
            self.other_run_id = stored.replaced_run_id
        self._was_stored = True
        self._drain_requested = self._drain_requested or stored.drain_requested
        return stored

    def _close_interval(self, provider: MetricProvider) -> None:
        if not self._reported and not self._raw:
            self._sample(provider)
            if not self._raw:  # a source that counts up says something only at the second look
                self._clock.sleep(FIRST_SAMPLE_SECONDS)
                self._sample(provider)
        self._reported = True
        if self._has_value and self._tried:
            self._averages.append(round_half_up(fmean(self._raw)) if self._raw else FAILED_INTERVAL)
        self._tried = False
        self._raw.clear()

    def _row(self) -> WorkerMetrics:
        provider = self._provider
        known = provider is not None and len(self._averages) > 0
        return WorkerMetrics(
            worker_id=self._worker_id,
            last_update_seconds=int(self._clock.wall()),
            stats={provider.short_name: tuple(self._averages)}
            if provider is not None and known
            else {},
            operating_range={provider.short_name: (provider.max_utilization_percent,)}
            if provider is not None and known
            else {},
            run_id=self._run_id,
            status=None if self._status is None else self._status(),
        )

    def deregister(self) -> None:
        """Delete the row; it is not written again. Raises `errors.AwsError` when the table does."""
        self._deregistered = True
        self._table.deregister(self._worker_id)


def checked(value: float | None) -> float | None:
    """The value itself. Raises `ValueError` unless it is None or a number from 0 to 100."""
    if value is not None and not (math.isfinite(value) and 0 <= value <= FULL_PERCENT):
        raise ValueError(f"{value} is not a percentage from 0 to 100")
    return value


def round_half_up(value: float) -> float:
    """Six decimals, halves away from zero (protocol §2.3)."""
    return float(Decimal(repr(value)).quantize(_MICRO, ROUND_HALF_UP))

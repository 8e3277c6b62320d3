"""Export metrics to CloudWatch, as KCL does (protocol §12.1).

Values of the same metric are merged into a statistic set. A thread of its own sends them: when
enough metrics wait, and at least once per buffer time.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.events import EventSink, MetricsDropped
from kcl_pipeline.metrics.exporters.exporter import Exporter
from kcl_pipeline.metrics.instruments import Attributes, Instrument, MetricValue
from kcl_pipeline.threads import Spawn, spawn_thread

BATCH_SIZE: Final = 1_000
"""CloudWatch: metrics per call of PutMetricData. A call has a price, whatever it carries."""
BATCH_BYTES: Final = 900_000
"""Estimated size of a call. CloudWatch refuses one of more than 1 MB."""
_DATUM_BYTES: Final = 450
_DIMENSION_BYTES: Final = 110
_BYTES_PER_CHARACTER: Final = 3
"""A character of a form that is encoded for a URL, the longest encoding of the client."""
MAX_VALUE: Final = 1024
"""CloudWatch: length of the value of a dimension."""

Key = tuple[Instrument, Attributes]


@dataclass(slots=True)
class Statistics:
    """The values of one metric since they were sent last."""

    millis: int
    count: int = 0
    total: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def datum(self, key: Key) -> dict[str, Any]:
        """Return the datum of PutMetricData."""
        instrument, attributes = key
        dimensions = [("Operation", instrument.operation), *attributes]
        return {
            "MetricName": instrument.name,
            "Dimensions": [
                {"Name": name, "Value": _printable(value)} for name, value in dimensions
            ],
            "Timestamp": datetime.fromtimestamp(self.millis / 1000, UTC),
            "StatisticValues": {
                "SampleCount": self.count,
                "Sum": self.total,
                "Minimum": self.least,
                "Maximum": self.most,
            },
            "Unit": instrument.unit.value.cloudwatch,
        }


class CloudWatchExporter(Exporter):
    """Sends values to CloudWatch. Thread-safe. No lock is held during a call.

    A full queue drops the oldest metric. As in KCL, the metrics of a failed call are dropped. Both
    emit `MetricsDropped`.

    Args:
        client: Creates the boto3 client. The thread calls it.
        namespace: The namespace.
        settings: Buffer time and sizes.
        clock: The clock.
        events: Receives `MetricsDropped`.
        spawn: Starts the thread.
    """

    name = "cloudwatch"

    def __init__(
        self,
        client: Callable[[], Any],
        namespace: str,
        settings: MetricsSettings,
        clock: Clock,
        events: EventSink,
        spawn: Spawn = spawn_thread,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._settings = settings
        self._clock = clock
        self._events = events
        self._lock = threading.Lock()
        self._waiting: dict[Key, Statistics] = {}
        self._overflow = 0
        self._due = threading.Event()
        self._stopped = False
        self._thread = spawn("metrics-cloudwatch", self._run)

    def record(self, values: Sequence[MetricValue]) -> None:
        """Add values to the queue."""
        millis = int(self._clock.wall() * 1000)
        with self._lock:
            waiting = self._waiting
            for instrument, value, attributes in values:
                key = (instrument, attributes)
                found = waiting.get(key)
                if found is None:
                    if len(waiting) >= self._settings.metrics_max_queue_size:
                        self._overflow += waiting.pop(next(iter(waiting))).count
                    found = waiting[key] = Statistics(millis)
                found.add(value)
            is_due = len(waiting) >= self._settings.publisher_flush_buffer
        if is_due:
            self._due.set()

    def close(self, seconds: float) -> None:
        """Send what waits, within about this time. The rest is dropped."""
        self._stopped = True
        self._due.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            with self._lock:
                left = sum(one.count for one in self._waiting.values())
                self._waiting.clear()
            self._dropped(left, f"they were not sent within {seconds:g} s at the end")

    def _run(self) -> None:
        while not self._stopped:
            self._due.wait(self._settings.metrics_buffer_time_millis / 1000)
            self._due.clear()
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Send what waits now. Never raises."""
        with self._lock:
            overflow, self._overflow = self._overflow, 0
        size = self._settings.metrics_max_queue_size
        self._dropped(overflow, f"more than {size} metrics waited (metrics_max_queue_size)")
        while batch := self._take():
            try:
                self._client().put_metric_data(
                    Namespace=self._namespace,
                    MetricData=[statistics.datum(key) for key, statistics in batch],
                )
            except Exception as error:  # noqa: BLE001 (reported; metrics must not stop a worker)
                values = sum(statistics.count for _, statistics in batch)
                self._dropped(values, f"{type(error).__name__}: {error}")

    def _take(self) -> list[tuple[Key, Statistics]]:
        with self._lock:
            keys: list[Key] = []
            left = BATCH_BYTES
            for key in itertools.islice(self._waiting, BATCH_SIZE):
                left -= _bytes_of(key)
                if keys and left < 0:
                    break
                keys.append(key)
            return [(key, self._waiting.pop(key)) for key in keys]

    def _dropped(self, values: int, reason: str) -> None:
        if values:
            self._events(MetricsDropped(self.name, values, reason))


def _bytes_of(key: Key) -> int:
    """Return an upper bound of the size of a datum in a request."""
    instrument, attributes = key
    texts = (instrument.name, instrument.operation, *itertools.chain(*attributes))
    size = sum(min(len(text), MAX_VALUE) for text in texts) * _BYTES_PER_CHARACTER
    return size + _DATUM_BYTES + _DIMENSION_BYTES * (len(attributes) + 1)


def _printable(text: str) -> str:
    """Return the value of a dimension as CloudWatch takes it: 1 to 1,024 characters of ASCII."""
    ascii_text = "".join(one if " " <= one <= "~" else "?" for one in text).strip()[:MAX_VALUE]
    return ascii_text or "-"

"""Export metrics to OpenTelemetry.

Only its API is used, if it is installed. The application configures the SDK and its exporters.
Names, instruments and attributes are those of the Java KCL's OpenTelemetry backend (protocol
§12.3).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

from kcl_pipeline.events import Event
from kcl_pipeline.extras import require
from kcl_pipeline.metrics.observations import (
    OPERATION,
    SHARD,
    STREAM,
    WORKER,
    HeldLeaseCount,
    Kind,
    Observation,
    lag,
    observations,
)
from kcl_pipeline.version import __version__

SCOPE: Final = "software.amazon.kinesis"
PREFIX: Final = "aws.kinesis.client."
MAX_NAME: Final = 255
_SPECIAL: Final = {
    "MillisBehindLatest": "consumer.lag.duration",
    "DataBytesProcessed": "records.size",
    "ActiveStreams.Count": "streams.active",
    "StreamsPendingDeletion.Count": "streams.pending_deletion",
    "NonExistingStreamDelete.Count": "streams.deleted_nonexistent",
    "DeletedStreams.Count": "streams.deleted",
    "NumStreamsToSync": "streams.pending_sync",
    "QueueSize": "stream_id_cache.queue.size",
    "NumWorkers": "workers",
    "NumWorkersWithInvalidEntry": "workers.invalid_entry",
    "NumWorkersWithFailingWorkerMetric": "workers.failing_worker_metric",
}
_ATTRIBUTES: Final = {
    OPERATION: "aws.kinesis.operation",
    SHARD: "aws.kinesis.shard.id",
    STREAM: "aws.kinesis.stream_name",
    WORKER: "aws.kinesis.consumer.name",
}
_LOWER_TO_UPPER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ACRONYM_END: Final = re.compile(r"(?<=[A-Z])(?=[A-Z][a-z])")
_ILLEGAL: Final = re.compile(r"[^a-z0-9_./-]")


def otel_name(name: str) -> str:
    """The OpenTelemetry name of a KCL metric.

    Example: `RenewLease.Time` becomes `aws.kinesis.client.renew_lease.duration`.
    """
    if name in _SPECIAL:
        return PREFIX + _SPECIAL[name]
    text = name.replace(":", ".")
    if text == "Time" or text.endswith(".Time"):
        text = text.removesuffix("Time") + "duration"
    text = text.removesuffix(".Count")
    words = ".".join(
        _ACRONYM_END.sub("_", _LOWER_TO_UPPER.sub("_", part)) for part in text.split(".")
    )
    return (PREFIX + _ILLEGAL.sub("_", words.lower()))[:MAX_NAME]


def otel_attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    """Dimensions with their OpenTelemetry names. Unknown ones get the prefix `aws.kinesis`."""
    return {
        _ATTRIBUTES.get(name, f"aws.kinesis.{name.lower()}"): value
        for name, value in attributes.items()
    }


class OtelEvents:
    """An event sink that records metrics.

    Args:
        meter: The meter; None uses the global provider's.

    Raises:
        SettingsError: The OpenTelemetry API is not installed.
    """

    def __init__(self, meter: Any = None) -> None:
        self._meter = meter if meter is not None else _global_meter()
        self._instruments: dict[tuple[str, Kind], Any] = {}
        self._held = HeldLeaseCount()

    def __call__(self, event: Event) -> None:
        """Record the metrics of one event."""
        for observation in (*observations(event), *self._held.after(event)):
            self.record(observation)

    def record_lag(self, worker_id: str, millis_behind_latest: Mapping[str, int]) -> None:
        """Record the lag by lease key. No event contains it."""
        for lease_key, millis in millis_behind_latest.items():
            self.record(lag(lease_key, millis, worker_id))

    def record(self, observation: Observation) -> None:
        """Record one value."""
        instrument, attributes = (
            self._instrument(observation),
            otel_attributes(observation.attributes),
        )
        match observation.kind:
            case Kind.COUNTER:
                instrument.add(observation.value, attributes)
            case Kind.GAUGE:
                instrument.set(observation.value, attributes)
            case Kind.HISTOGRAM:
                instrument.record(observation.value, attributes)

    def _instrument(self, observation: Observation) -> Any:
        key = (observation.name, observation.kind)
        if key not in self._instruments:
            make = getattr(self._meter, f"create_{observation.kind}")
            self._instruments[key] = make(otel_name(observation.name), unit=observation.unit)
        return self._instruments[key]


def _global_meter() -> Any:
    require("otel", "OtelEvents", "remove OtelEvents")
    metrics = importlib.import_module("opentelemetry.metrics")
    return metrics.get_meter(SCOPE, __version__)

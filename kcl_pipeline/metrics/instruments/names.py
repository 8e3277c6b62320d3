"""The names of the instruments in OpenTelemetry (protocol §12.3) and in Prometheus."""

import re
from collections.abc import Mapping
from typing import Final

from kcl_pipeline.metrics.instruments.instrument import (
    OPERATION,
    SHARD,
    STREAM,
    WORKER,
    Instrument,
    Kind,
)

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
_LABELS: Final = {OPERATION: "operation", SHARD: "shard", STREAM: "stream", WORKER: "worker"}
_LOWER_TO_UPPER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ACRONYM_END: Final = re.compile(r"(?<=[A-Z])(?=[A-Z][a-z])")
_ILLEGAL: Final = re.compile(r"[^a-z0-9_./-]")
_NOT_IN_PROMETHEUS: Final = re.compile(r"[^a-z0-9_]")


def otel_name(name: str) -> str:
    """The OpenTelemetry name of a KCL metric.

    Example: `RenewLease.Time` becomes `aws.kinesis.client.renew_lease.duration`. KCL's metric
    `Time` is no suffix: it becomes `aws.kinesis.client.time`.
    """
    if name in _SPECIAL:
        return PREFIX + _SPECIAL[name]
    text = name.replace(":", ".")
    if text.endswith(".Time"):
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


def prometheus_name(instrument: Instrument) -> str:
    """The Prometheus name: the OpenTelemetry name with underscores, the unit and `_total`.

    Example: `RenewLease.Time` becomes `aws_kinesis_client_renew_lease_duration_milliseconds`.
    """
    name = _NOT_IN_PROMETHEUS.sub("_", otel_name(instrument.name)) + instrument.unit.value.suffix
    return f"{name}_total" if instrument.prometheus_kind is Kind.COUNTER else name


def prometheus_label(dimension: str) -> str:
    """The Prometheus label of a dimension."""
    return _LABELS.get(dimension, dimension.lower())

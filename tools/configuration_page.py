"""Generate docs/configuration.md from the settings: python -m tools.configuration_page."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from kcl_pipeline import ConsumerSettings
from kcl_pipeline.config.model import StrictSettings, most_of

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
TABLES: Final = ("lease_table", "worker_metrics_table", "coordinator_state_table")

KCL: Final[dict[str, tuple[str, str]]] = {
    "application_name": ("applicationName", "required"),
    "streams": ("streamTracker", "required"),
    "client_version_config": ("clientVersionConfig", "CLIENT_VERSION_CONFIG_3X"),
    "lease_table.table_name": ("tableName", "applicationName"),
    "lease_table.billing_mode": ("billingMode", "PAY_PER_REQUEST"),
    "lease_table.read_capacity_units": ("initialLeaseTableReadCapacity", "10"),
    "lease_table.write_capacity_units": ("initialLeaseTableWriteCapacity", "10"),
    "lease_table.point_in_time_recovery_enabled": ("leaseTablePitrEnabled", "false"),
    "lease_table.deletion_protection_enabled": ("leaseTableDeletionProtectionEnabled", "false"),
    "lease_table.tags": ("tags", "none"),
    "lease.failover_time_millis": ("failoverTimeMillis", "10000"),
    "lease.epsilon_millis": ("epsilonMillis", "25"),
    "lease.lease_discovery_interval_millis": (
        "",
        "half the assignment interval, less epsilon",
    ),
    "lease.consistent_reads": ("consistentReads", "false"),
    "lease.dynamo_db_request_timeout_millis": ("dynamoDbRequestTimeout", "60 s"),
    "lease.max_lease_renewal_threads": ("maxLeaseRenewalThreads", "20"),
    "lease.lease_table_scan_total_segments": ("leaseTableScanTotalSegments", "1 to 32, by size"),
    "lease.is_graceful_lease_handoff_enabled": ("isGracefulLeaseHandoffEnabled", "true"),
    "lease.graceful_lease_handoff_timeout_millis": ("gracefulLeaseHandoffTimeoutMillis", "30000"),
    "assignment.lease_assignment_strategy": (
        "leaseAssignmentStrategy",
        "WORKER_UTILIZATION_AWARE",
    ),
    "assignment.lease_assignment_interval_millis": (
        "leaseAssignmentIntervalMillis",
        "twice the failover time",
    ),
    "assignment.max_leases_for_worker": ("maxLeasesForWorker", "2147483647"),
    "assignment.max_throughput_per_host_kbps": ("maxThroughputPerHostKBps", "Double.MAX_VALUE"),
    "assignment.re_balance_threshold_percentage": ("reBalanceThresholdPercentage", "10"),
    "assignment.dampening_percentage": ("dampeningPercentage", "60"),
    "assignment.allow_throughput_overshoot": ("allowThroughputOvershoot", "true"),
    "assignment.variance_balancing_frequency": ("varianceBalancingFrequency", "3"),
    "assignment.worker_metrics_ema_alpha": ("workerMetricsEMAAlpha", "0.5"),
    "assignment.max_leases_to_steal_at_one_time": ("maxLeasesToStealAtOneTime", "1"),
    "assignment.enable_priority_lease_assignment": ("enablePriorityLeaseAssignment", "true"),
    "assignment.stale_worker_metrics_entry_cleanup_millis": (
        "staleWorkerMetricsEntryCleanupDuration",
        "1 day",
    ),
    "leader.leader_lease_duration_millis": (
        "dynamoDbLockBasedLeaderLeaseDurationInMillis",
        "120000",
    ),
    "leader.leader_heartbeat_period_millis": (
        "dynamoDbLockBasedLeaderHeartbeatPeriodInMillis",
        "30000",
    ),
    "shard_sync.initial_position_in_stream": ("initialPositionInStreamExtended", "LATEST"),
    "shard_sync.initial_timestamp": ("initialPositionInStreamExtended", "none"),
    "shard_sync.leases_recovery_auditor_execution_frequency_millis": (
        "leasesRecoveryAuditorExecutionFrequencyMillis",
        "120000",
    ),
    "shard_sync.leases_recovery_auditor_inconsistency_confidence_threshold": (
        "leasesRecoveryAuditorInconsistencyConfidenceThreshold",
        "3",
    ),
    "shard_sync.list_shards_backoff_time_millis": ("listShardsBackoffTimeInMillis", "1500"),
    "shard_sync.max_list_shards_retry_attempts": ("maxListShardsRetryAttempts", "50"),
    "shard_sync.ignore_unexpected_child_shards": ("ignoreUnexpectedChildShards", "false"),
    "shard_sync.cleanup_leases_upon_shard_completion": (
        "cleanupLeasesUponShardCompletion",
        "true",
    ),
    "shard_sync.completed_lease_cleanup_interval_millis": (
        "completedLeaseCleanupIntervalMillis",
        "300000",
    ),
    "shard_sync.garbage_lease_cleanup_interval_millis": (
        "garbageLeaseCleanupIntervalMillis",
        "1800000",
    ),
    "shard_sync.former_streams_leases_deletion_strategy": (
        "formerStreamsLeasesDeletionStrategy",
        "NO_STREAMS_LEASES_DELETION",
    ),
    "shard_sync.former_streams": ("streamIdentifiersForLeaseCleanup", "none"),
    "shard_sync.wait_period_to_delete_former_streams_millis": (
        "waitPeriodToDeleteFormerStreams",
        "required",
    ),
    "shard_sync.orphaned_stream_initial_position_in_stream": (
        "orphanedStreamInitialPositionInStream",
        "LATEST",
    ),
    "retrieval.max_records": ("maxRecords", "10000"),
    "retrieval.idle_time_between_reads_in_millis": ("idleTimeBetweenReadsInMillis", "1500"),
    "retrieval.kinesis_request_timeout_millis": ("kinesisRequestTimeout", "30 s"),
    "retrieval.prefetch_max_bytes": ("maxByteSize", "8 MiB per shard"),
    "retrieval.retrieval_mode": ("retrievalSpecificConfig", "FanOutConfig"),
    "retrieval.consumer_name": ("consumerName", "applicationName"),
    "retrieval.consumer_arns": ("consumerArn", "none"),
    "metrics.metrics_backends": ("metricsBackend", "CLOUDWATCH"),
    "metrics.metrics_level": ("metricsLevel", "DETAILED"),
    "metrics.metrics_enabled_dimensions": ("metricsEnabledDimensions", "ALL"),
    "metrics.namespace": ("namespace", "applicationName"),
    "metrics.metrics_buffer_time_millis": ("metricsBufferTimeMillis", "10000"),
    "metrics.metrics_max_queue_size": ("metricsMaxQueueSize", "10000"),
    "metrics.publisher_flush_buffer": ("publisherFlushBuffer", "200"),
    "worker.worker_metrics_reporter_freq_in_millis": (
        "workerMetricsReporterFreqInMillis",
        "30000",
    ),
    "worker.in_memory_worker_metrics_capture_frequency_millis": (
        "inMemoryWorkerMetricsCaptureFrequencyMillis",
        "1000",
    ),
    "worker.no_of_persisted_metrics_per_worker_metrics": (
        "noOfPersistedMetricsPerWorkerMetrics",
        "10",
    ),
    "worker.call_process_records_even_for_empty_record_list": (
        "callProcessRecordsEvenForEmptyRecordList",
        "false",
    ),
    "worker.disable_worker_metrics": ("disableWorkerMetrics", "false"),
    "worker.parent_shard_poll_interval_millis": ("parentShardPollIntervalMillis", "10000"),
    "worker.task_backoff_time_millis": ("taskBackoffTimeMillis", "500"),
}
"""Name and default in the Java KCL 3.5. Settings that are not here exist only in this package."""

_OPENING: Final = """# Configuration

This page answers: which settings exist, what are their defaults, and what are their names in the
Java KCL? It is generated from the code by `make docs`.

Settings are written by section. Arguments of `KinesisPipeline` set `application_name` (`name=`) and
`streams`.

```python
from kcl_pipeline import DeltaSink, KinesisPipeline

orders = KinesisPipeline(
    name="orders",
    streams=["orders"],
    sink=DeltaSink("lake/orders"),
    settings_overrides={
        "lease": {"failover_time_millis": 5000},
        "batch": {"max_batch_records": 50_000},
    },
)
```

- Names are KCL's in snake_case, with the unit last. A wrong name or value is refused in one
  sentence.
- No setting is read from the environment. Region, endpoint and credentials of AWS are.
- Numbers are at most MOST, sizes in bytes at most BYTES, unless a range is given. Bounds are
  inclusive.
- "–" in the column *KCL* means that the Java KCL has no such setting.
- All workers of an application should have the same settings. A worker that does not name a
  stream begins it at the initial position that is recorded with the stream (`AT_TIMESTAMP`: at the
  time in the lease row), and uses the other settings of the application for it. A changed initial
  position or time does not move leases that exist.
- `streams=` takes names, ARNs and `StreamConfig`. An ARN names a stream of any account in the
  region; [IAM](iam.md) needs its ARN, and the other account a resource policy:

```python
from datetime import UTC, datetime

from kcl_pipeline import StreamConfig

streams = [
    "orders",
    "arn:aws:kinesis:eu-west-1:222222222222:stream/orders",
    StreamConfig("clicks", initial_position="LATEST"),
    StreamConfig("audit", "AT_TIMESTAMP", datetime(2026, 1, 31, 12, tzinfo=UTC)),
]
```

- `streams=` also takes a `StreamSelector`, or a function without arguments that returns names or
  ARNs. The leader asks every minute, and each worker at its start. The application is then one of
  several streams, also while there is only one. A failed or empty answer changes nothing, and a
  stream that was selected once stays recorded.

```python
from kcl_pipeline import StreamSelector

streams = StreamSelector(prefix="orders-", tags={"team": "orders"})
```
"""


def page() -> str:
    """Return the text of the page."""
    parts = [
        _OPENING.replace("MOST", f"{most_of('x'):,}").replace("BYTES", f"{most_of('bytes'):,}")
    ]
    fields = ConsumerSettings.model_fields
    top = {name: field for name, field in fields.items() if not _section(field)}
    parts.append(_table("General", "All settings of one application.", "", top))
    for name, field in fields.items():
        kind = _section(field)
        if kind is None or name in TABLES[1:]:
            continue
        title = f"`{name}`"
        if name == TABLES[0]:
            title = ", ".join(f"`{table}`" for table in TABLES)
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        parts.append(_table(title, summary, name, kind.model_fields))
    return "\n".join(parts)


def unknown_names() -> set[str]:
    """Return the names in `KCL` that are no settings."""
    return set(KCL) - set(all_settings())


def all_settings() -> Iterator[str]:
    """Yield the paths of all settings."""
    for name, field in ConsumerSettings.model_fields.items():
        kind = _section(field)
        if kind is None:
            yield name
        else:
            yield from (f"{name}.{inner}" for inner in kind.model_fields)


def _section(field: FieldInfo) -> type[StrictSettings] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, StrictSettings) else None


def _table(title: str, summary: str, section: str, fields: dict[str, FieldInfo]) -> str:
    rows = [
        f"## {title}\n\n{summary}\n",
        "| setting | values | default | KCL | KCL's default | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for name, field in fields.items():
        kcl = KCL.get(f"{section}.{name}" if section else name)
        java, java_default = (f"`{kcl[0]}`" if kcl[0] else "–", kcl[1]) if kcl else ("–", "–")
        meaning = (field.description or "").replace("|", "\\|")
        cells = (f"`{name}`", _values(field), _default(field), java, java_default, meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, float) and math.isinf(value):
        return "no limit"
    if value in ({}, ()):
        return "none"
    return f"`{value}`"


def _values(field: FieldInfo) -> str:
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
    texts = [_kind(kind) for kind in kinds]
    texts += ["None"] * (type(None) in _alternatives(field.annotation))
    return ", ".join(texts) + _range(field)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind is bool:
        return "`True`, `False`"
    names = {int: "whole number", float: "number", str: "string", datetime: "time"}
    if kind in names:
        return names[kind]
    return {dict: "dictionary", tuple: "list"}.get(get_origin(kind) or kind, str(kind))


def _range(field: FieldInfo) -> str:
    least = next((m.ge for m in field.metadata if isinstance(m, annotated_types.Ge)), None)
    above = next((m.gt for m in field.metadata if isinstance(m, annotated_types.Gt)), None)
    most = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), None)
    if least is not None and most is not None:
        return f", {least:,} to {most:,}"
    if least is not None:
        return f", {least:,} or more"
    return f", above {above:,}" if above is not None else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Read the properties file of an application of kclpy, as its MultiLangDaemon does.

`KEYS` has each key that the MultiLangDaemon of the KCL 3.5 reads: the setting of this package, or
the reason why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kcl_pipeline.errors import SettingsError

_LINE: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_DURATION: Final = re.compile(
    r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE
)


def parse_properties(text: str) -> dict[str, str]:
    """Parse a Java properties file: comments, `=`, `:`, escapes and continued lines."""
    properties: dict[str, str] = {}
    lines = iter(text.splitlines())
    for raw in lines:
        line = raw.lstrip()
        if not line or line[0] in "#!":
            continue
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + next(lines, "").lstrip()
        match = _LINE.match(line)
        if match is not None:
            properties[_unescaped(match[1])] = _unescaped(match[2]).strip()
    return properties


def _unescaped(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROL.get(code, code)

    return _ESCAPE.sub(plain, text)


def _flag(value: str) -> bool:
    return value.lower() in ("true", "yes", "on", "1")


def _tags(value: str) -> dict[str, str]:
    """Parse `key1=value1,key2=value2`."""
    pairs = (part.partition("=") for part in value.split(",") if part.strip())
    return {key.strip(): tag.strip() for key, _, tag in pairs}


def _duration_millis(value: str) -> int:
    """Parse an ISO 8601 duration such as PT15M or P2D."""
    match = _DURATION.fullmatch(value)
    if match is None or value[-1] in "PTpt":
        raise ValueError("is not a duration such as PT15M")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return round((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)


def _epoch_time(value: str) -> datetime:
    return datetime.fromtimestamp(int(value), UTC)


def _upper(value: str) -> str:
    return value.upper()


def _retrieval_mode(value: str) -> str | None:
    """Return the mode. None: the other keys decide."""
    return {"FANOUT": "fan_out", "POLLING": "polling", "DEFAULT": None}[value.upper()]


def _max_records(value: str) -> int:
    return min(int(value), 10_000)


def _idle_millis(value: str) -> int:
    """Kinesis allows five reads of a shard per second."""
    return max(int(value), 200)


@dataclass(frozen=True, slots=True)
class DaemonKey:
    """What becomes of a key.

    Attributes:
        setting: Our setting, `section.name`. Empty: there is none.
        convert: Converts its value.
        reason: Why there is no setting, or what is different.
    """

    setting: str = ""
    convert: Callable[[str], Any] = str
    reason: str = ""


def _table(prefix: str, section: str) -> dict[str, DaemonKey]:
    return {
        f"{prefix}TableName": DaemonKey(f"{section}.table_name"),
        f"{prefix}BillingMode": DaemonKey(f"{section}.billing_mode", _upper),
        f"{prefix}ReadCapacity": DaemonKey(f"{section}.read_capacity_units", int),
        f"{prefix}WriteCapacity": DaemonKey(f"{section}.write_capacity_units", int),
        f"{prefix}PointInTimeRecoveryEnabled": DaemonKey(
            f"{section}.point_in_time_recovery_enabled", _flag
        ),
        f"{prefix}DeletionProtectionEnabled": DaemonKey(
            f"{section}.deletion_protection_enabled", _flag
        ),
        f"{prefix}Tags": DaemonKey(f"{section}.tags", _tags),
    }


def _reason(text: str) -> DaemonKey:
    return DaemonKey(reason=text)


_ENVIRONMENT: Final = (
    "credentials come from the standard environment of AWS, for all services: variables, files, "
    "roles of a container or an instance"
)
_ENDPOINT: Final = "write it into AWS_ENDPOINT_URL_KINESIS or AWS_ENDPOINT_URL_DYNAMODB"
_RETRIES: Final = "calls are repeated as docs/errors.md says"
_CLOUDWATCH: Final = "metrics are exported as docs/metrics.md says"

KEYS: Final[Mapping[str, DaemonKey]] = {
    # The application and its script
    "executableName": DaemonKey("--processor", reason="the script runs in the worker's process"),
    "applicationName": DaemonKey("name"),
    "streamName": DaemonKey("streams"),
    "streamArn": DaemonKey("streams", reason="it takes precedence over streamName"),
    "workerId": DaemonKey("--worker-id"),
    "workerIdentifier": DaemonKey("--worker-id"),
    "regionName": DaemonKey("AWS_REGION", reason="the environment takes precedence"),
    "initialPositionInStream": DaemonKey("shard_sync.initial_position_in_stream", _upper),
    "initialPositionInStreamExtended": DaemonKey(
        "shard_sync.initial_timestamp",
        _epoch_time,
        "in seconds; it takes precedence over initialPositionInStream",
    ),
    "processingLanguage": _reason("there is one language"),
    "maxActiveThreads": _reason("each shard with records has a thread"),
    "shutdownGraceMillis": _reason("a stop waits for shutdown_requested"),
    "timeoutInSeconds": DaemonKey(
        "worker.stop_hung_after_millis",
        lambda value: int(value) * 1000,
        "the time of one step; the leases of the worker are released, and it ends",
    ),
    # Credentials and endpoints
    "awsCredentialsProvider": _reason(_ENVIRONMENT),
    "awsCredentialsProviderDynamoDB": _reason(_ENVIRONMENT),
    "awsCredentialsProviderCloudWatch": _reason(_ENVIRONMENT),
    "kinesisCredentialsProvider": _reason(_ENVIRONMENT),
    "dynamoDBCredentialsProvider": _reason(_ENVIRONMENT),
    "cloudWatchCredentialsProvider": _reason(_ENVIRONMENT),
    "kinesisEndpoint": _reason(_ENDPOINT),
    "dynamoDBEndpoint": _reason(_ENDPOINT),
    "kinesisClient": _reason("the client is that of boto3"),
    "dynamoDbClient": _reason("the client is that of boto3"),
    "cloudWatchClient": _reason("the client is that of boto3"),
    # Leases
    "tableName": DaemonKey("lease_table.table_name"),
    "failoverTimeMillis": DaemonKey("lease.failover_time_millis", int),
    "leaseAssignmentIntervalMillis": DaemonKey("assignment.lease_assignment_interval_millis", int),
    "enablePriorityLeaseAssignment": DaemonKey(
        "assignment.enable_priority_lease_assignment", _flag
    ),
    "maxLeasesForWorker": DaemonKey("assignment.max_leases_for_worker", int),
    "maxLeasesToStealAtOneTime": DaemonKey("assignment.max_leases_to_steal_at_one_time", int),
    "maxLeaseRenewalThreads": DaemonKey("lease.max_lease_renewal_threads", int),
    "initialLeaseTableReadCapacity": DaemonKey(
        "lease_table.read_capacity_units", int, "with lease_table.billing_mode PROVISIONED"
    ),
    "initialLeaseTableWriteCapacity": DaemonKey(
        "lease_table.write_capacity_units", int, "with lease_table.billing_mode PROVISIONED"
    ),
    "leaseTableDeletionProtectionEnabled": DaemonKey(
        "lease_table.deletion_protection_enabled", _flag
    ),
    "leaseTablePitrEnabled": DaemonKey("lease_table.point_in_time_recovery_enabled", _flag),
    "leaseTableScanTotalSegments": DaemonKey("lease.lease_table_scan_total_segments", int),
    "gracefulLeaseHandoffTimeoutMillis": DaemonKey(
        "lease.graceful_lease_handoff_timeout_millis", int
    ),
    "isGracefulLeaseHandoffEnabled": DaemonKey("lease.is_graceful_lease_handoff_enabled", _flag),
    "clientVersionConfig": DaemonKey("client_version_config", _upper),
    "migrateAllEntitiesToLeaseTable": _reason(
        "only workers of the Java KCL move an application to a single table"
    ),
    "tableMigrationCompleteBakeTimeSeconds": _reason(
        "only workers of the Java KCL move an application to a single table"
    ),
    # Shards
    "shardSyncIntervalMillis": _reason("the leader lists shards when a shard ends, and audits"),
    "cleanupLeasesUponShardCompletion": DaemonKey(
        "shard_sync.cleanup_leases_upon_shard_completion", _flag
    ),
    "ignoreUnexpectedChildShards": DaemonKey("shard_sync.ignore_unexpected_child_shards", _flag),
    "listShardsBackoffTimeInMillis": DaemonKey("shard_sync.list_shards_backoff_time_millis", int),
    "maxListShardsRetryAttempts": DaemonKey("shard_sync.max_list_shards_retry_attempts", int),
    "parentShardPollIntervalMillis": DaemonKey("worker.parent_shard_poll_interval_millis", int),
    "shardPrioritization": _reason("a child waits for its parents; there is no other order"),
    "skipShardSyncAtWorkerInitializationIfLeasesExist": _reason(
        "a worker does not wait for the list of shards"
    ),
    "schedulerInitializationBackoffTimeMillis": _reason(_RETRIES),
    "taskBackoffTimeMillis": DaemonKey("worker.task_backoff_time_millis", int),
    "logWarningForTaskAfterMillis": DaemonKey("worker.hung_after_millis", int),
    # Reading
    "retrievalMode": DaemonKey("retrieval.retrieval_mode", _retrieval_mode),
    "fanoutConfig": DaemonKey(
        "retrieval.consumer_name", reason="fanoutConfig.consumerName; other members have no setting"
    ),
    "maxRecords": DaemonKey(
        "retrieval.max_records", _max_records, "also the most records of a call of process_records"
    ),
    "idleTimeBetweenReadsInMillis": DaemonKey(
        "retrieval.idle_time_between_reads_in_millis", _idle_millis, "at least 200"
    ),
    "retryGetRecordsInSeconds": DaemonKey(
        "retrieval.kinesis_request_timeout_millis", lambda value: int(value) * 1000
    ),
    "maxGetRecordsThreadPool": DaemonKey("retrieval.fetch_threads", int),
    "millisBehindLatestThresholdForReducedTps": _reason(
        "shards at their end are read with idleTimeBetweenReadsInMillis, those behind without"
    ),
    "callProcessRecordsEvenForEmptyRecordList": DaemonKey(
        "worker.call_process_records_even_for_empty_record_list", _flag
    ),
    "validateSequenceNumberBeforeCheckpointing": _reason(
        "a number is compared with the records that were delivered"
    ),
    # Metrics
    "metricsLevel": _reason(_CLOUDWATCH),
    "metricsEnabledDimensions": _reason(_CLOUDWATCH),
    "metricsBufferTimeMillis": _reason(_CLOUDWATCH),
    "metricsMaxQueueSize": _reason(_CLOUDWATCH),
    # Load
    "inMemoryWorkerMetricsCaptureFrequencyMillis": DaemonKey(
        "worker.in_memory_worker_metrics_capture_frequency_millis", int
    ),
    "workerMetricsReporterFreqInMillis": DaemonKey(
        "worker.worker_metrics_reporter_freq_in_millis", int
    ),
    "noOfPersistedMetricsPerWorkerMetrics": DaemonKey(
        "worker.no_of_persisted_metrics_per_worker_metrics", int
    ),
    "disableWorkerMetrics": DaemonKey("worker.disable_worker_metrics", _flag),
    "maxThroughputPerHostKBps": DaemonKey("assignment.max_throughput_per_host_kbps", float),
    "dampeningPercentage": DaemonKey("assignment.dampening_percentage", int),
    "reBalanceThresholdPercentage": DaemonKey("assignment.re_balance_threshold_percentage", int),
    "allowThroughputOvershoot": DaemonKey("assignment.allow_throughput_overshoot", _flag),
    "varianceBalancingFrequency": DaemonKey("assignment.variance_balancing_frequency", int),
    "workerMetricsEMAAlpha": DaemonKey("assignment.worker_metrics_ema_alpha", float),
    "staleWorkerMetricsEntryCleanupDuration": DaemonKey(
        "assignment.stale_worker_metrics_entry_cleanup_millis", _duration_millis
    ),
    # The other tables
    **_table("coordinatorState", "coordinator_state_table"),
    **_table("workerMetrics", "worker_metrics_table"),
}


@dataclass(frozen=True, slots=True)
class DaemonProperties:
    """An application of kclpy.

    Attributes:
        name: The application.
        stream: Name or ARN of its stream.
        overrides: Settings that differ from their default.
        script: Its script. None: the file names none.
        worker_id: Name of the worker. None: the file names none.
        region: Region. None: the file names none.
        notes: One line per key that has no setting.
    """

    name: str
    stream: str
    overrides: Mapping[str, Any]
    script: Path | None = None
    worker_id: str | None = None
    region: str | None = None
    notes: tuple[str, ...] = field(default=())


def read_properties(path: Path) -> DaemonProperties:
    """Read a properties file. As in the MultiLangDaemon, an unknown key is not an error.

    A script is searched in the folder of the file, and then in the current one.

    Raises:
        SettingsError: The file cannot be read, a value is wrong, or a key is missing.
    """
    try:
        given = parse_properties(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"the properties file {path} cannot be read: {error}") from error
    values = {_key(key): value for key, value in given.items() if value}
    for key in ("applicationName", "streamArn" if "streamName" not in values else "streamName"):
        if key not in values:
            raise SettingsError(f"{path} has no {key}. Write {key} = NAME.")
    overrides: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in values.items():
        name, _, member = key.partition(".")
        known = KEYS.get(name)
        if known is None:
            notes.append(f"{key} is not a key of the MultiLangDaemon")
        elif not known.setting or (member and (name, member) != ("fanoutConfig", "consumerName")):
            notes.append(f"{key} has no effect: {known.reason}")
        elif "." in known.setting or known.setting == "client_version_config":
            _set(overrides, known, key, value)
    _complete(overrides, values)
    script = values.get("executableName")
    folder = next((f for f in (path.parent, Path()) if script and (f / script).exists()), Path())
    return DaemonProperties(
        values["applicationName"],
        values.get("streamArn") or values["streamName"],
        overrides,
        None if script is None else folder / script,
        values.get("workerId") or values.get("workerIdentifier"),
        values.get("regionName"),
        tuple(notes),
    )


def _key(key: str) -> str:
    return re.sub("^awscredentialsprovider", "awsCredentialsProvider", key, flags=re.IGNORECASE)


def _set(overrides: dict[str, Any], known: DaemonKey, key: str, value: str) -> None:
    try:
        converted = known.convert(value)
    except (ValueError, KeyError, OverflowError) as error:
        raise SettingsError(f"{key} = {value} cannot be used: {error}") from error
    section, _, name = known.setting.rpartition(".")
    target = overrides.setdefault(section, {}) if section else overrides
    target[name] = converted


def _complete(overrides: dict[str, Any], values: Mapping[str, str]) -> None:
    """Add what the values of several keys decide together."""
    if "initialPositionInStreamExtended" in values:
        overrides["shard_sync"]["initial_position_in_stream"] = "AT_TIMESTAMP"
    elif "initialPositionInStream" not in values:
        overrides.setdefault("shard_sync", {})["initial_position_in_stream"] = "LATEST"
    retrieval = overrides.setdefault("retrieval", {})
    if retrieval.get("retrieval_mode") is None:
        # As in the MultiLangDaemon: a property of polling chooses polling.
        retrieval["retrieval_mode"] = "polling" if _POLLING & values.keys() else "fan_out"
    worker = overrides.get("worker", {})
    stop = worker.get("stop_hung_after_millis")
    if stop is not None:
        worker["hung_after_millis"] = min(worker.get("hung_after_millis", stop), stop)


_POLLING: Final = {
    "maxRecords",
    "idleTimeBetweenReadsInMillis",
    "retryGetRecordsInSeconds",
    "maxGetRecordsThreadPool",
    "millisBehindLatestThresholdForReducedTps",
}

"""The registry of metrics: names, units, kinds, dimensions, levels, and the events that feed them.

`INSTRUMENTS` is the registry (protocol §12.2). Metrics of the Java KCL have its name, operation,
dimensions and level, so its dashboards work. The others have names of the same form and
`in_kcl=False`. `observations` turns an event into values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kcl_pipeline import events as ev
from kcl_pipeline.events import TOO_MANY_FAILURES, Event, LeaseTask

OPERATION: Final = "Operation"
WORKER: Final = "WorkerIdentifier"
SHARD: Final = "ShardId"
STREAM: Final = "StreamId"
REASON: Final = "Reason"
STEP: Final = "Step"
FORCED: Final = "Forced"
CALL: Final = "Call"


Attributes = tuple[tuple[str, str], ...]
"""Names and values of dimensions. A tuple, because a series is found by it."""


Measure = Callable[[Any], float | Mapping[str, float] | None]
"""The value of an event; or its values by lease key. None: it has none."""

FedBy = type[Event] | Mapping[type[Event], Measure]


class Kind(StrEnum):
    """Type of a metric: counters add up, gauges replace, histograms are distributions."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Level(StrEnum):
    """The least detailed `metrics_level` that emits a metric."""

    SUMMARY = "SUMMARY"
    DETAILED = "DETAILED"


class _Names(NamedTuple):
    ucum: str
    cloudwatch: str
    suffix: str


class Unit(Enum):
    """Unit of a metric, with its names in OpenTelemetry, CloudWatch and Prometheus."""

    COUNT = _Names("1", "Count", "")
    MILLISECONDS = _Names("ms", "Milliseconds", "_milliseconds")
    BYTES = _Names("By", "Bytes", "_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric of one operation.

    Attributes:
        name: Name in KCL, or a name of the same form. Several operations may have it.
        operation: Value of the dimension `Operation`.
        kind: Type of the metric, as in KCL's OpenTelemetry backend.
        unit: Unit of the values.
        level: The least detailed level that emits it.
        fed_by: The events that feed it, and the value of each. A type: each event counts 1.
        description: What it counts or measures.
        dimensions: Dimensions other than `Operation` that a value may have.
        in_kcl: Whether the Java KCL has this metric.
        prometheus: Type in Prometheus, if it is not `kind`.
    """

    name: str
    operation: str
    kind: Kind
    unit: Unit
    level: Level
    fed_by: FedBy
    description: str
    dimensions: tuple[str, ...] = ()
    in_kcl: bool = True
    prometheus: Kind | None = None

    @property
    def events(self) -> Mapping[type[Event], Measure]:
        """Types of the events that feed it, and the value of each."""
        return {self.fed_by: _count_one} if isinstance(self.fed_by, type) else self.fed_by

    @property
    def prometheus_kind(self) -> Kind:
        """Type of the metric in Prometheus."""
        return self.prometheus or self.kind

    def of(self, value: float, attributes: Attributes = ()) -> MetricValue:
        """Return one value."""
        return MetricValue(self, value, attributes)


def _count_one(_: Event) -> int:
    return 1


class MetricValue(NamedTuple):
    """One value of a metric.

    Attributes:
        instrument: The metric.
        value: The value in the unit of the instrument.
        attributes: Dimensions other than `Operation`.
    """

    instrument: Instrument
    value: float
    attributes: Attributes = ()


SUMMARY: Final = Level.SUMMARY
DETAILED: Final = Level.DETAILED
OF_LEASE: Final = (SHARD, STREAM)
OF_WORKER: Final = (WORKER,)


def counter(
    name: str,
    operation: str,
    level: Level,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    in_kcl: bool = True,
    prometheus: Kind | None = None,
) -> Instrument:
    """Return a counter."""
    return Instrument(
        name,
        operation,
        Kind.COUNTER,
        Unit.COUNT,
        level,
        fed_by,
        description,
        dimensions,
        in_kcl,
        prometheus,
    )


def gauge(
    name: str,
    operation: str,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    unit: Unit = Unit.COUNT,
    in_kcl: bool = True,
) -> Instrument:
    """Return a gauge of level SUMMARY."""
    return Instrument(
        name,
        operation,
        Kind.GAUGE,
        unit,
        SUMMARY,
        fed_by,
        description,
        dimensions,
        in_kcl,
    )


def histogram(
    name: str,
    operation: str,
    level: Level,
    description: str,
    fed_by: FedBy,
    *,
    dimensions: tuple[str, ...] = (),
    unit: Unit = Unit.MILLISECONDS,
    in_kcl: bool = True,
    prometheus: Kind | None = None,
) -> Instrument:
    """Return a histogram."""
    return Instrument(
        name,
        operation,
        Kind.HISTOGRAM,
        unit,
        level,
        fed_by,
        description,
        dimensions,
        in_kcl,
        prometheus,
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


_PROCESS: Final = "ProcessTask"


def _phase(name: str) -> FedBy:
    """The duration of a phase of a batch."""
    return {ev.BatchCommitted: lambda e: e.milliseconds.get(name)}


def _largest_lag(e: ev.StatusMeasured) -> float | None:
    if e.status.lag_millis is None and not e.status.unknown_lags:
        return 0  # The worker holds no lease.
    return e.status.lag_millis


MILLIS_BEHIND_LATEST: Final = histogram(
    "MillisBehindLatest",
    _PROCESS,
    SUMMARY,
    "age of the oldest record of a shard that is not committed",
    {ev.StatusMeasured: lambda e: {lag.lease_key: lag.millis for lag in e.status.lags}},
    dimensions=OF_LEASE,
    prometheus=Kind.GAUGE,
)
_PROCESSING: Final = (
    counter(
        "RecordsProcessed",
        _PROCESS,
        SUMMARY,
        "records in committed batches",
        {ev.BatchCommitted: lambda e: e.records_by_lease},
        dimensions=OF_LEASE,
    ),
    histogram(
        "DataBytesProcessed",
        _PROCESS,
        SUMMARY,
        "bytes of their data",
        {ev.BatchCommitted: lambda e: e.data_bytes_by_lease},
        dimensions=OF_LEASE,
        unit=Unit.BYTES,
        prometheus=Kind.COUNTER,
    ),
    MILLIS_BEHIND_LATEST,
    histogram(
        "MillisBehindLatest",
        "ApplicationTracker",
        SUMMARY,
        "largest lag of the worker's shards",
        {ev.StatusMeasured: _largest_lag},
        prometheus=Kind.GAUGE,
    ),
    counter(
        "Success",
        _PROCESS,
        SUMMARY,
        "1 per shard of a committed batch, 0 per shard of a refused one",
        {ev.BatchCommitted: lambda _: 1, ev.BatchRefused: lambda _: 0},
        dimensions=OF_LEASE,
    ),
    histogram(
        "Time",
        _PROCESS,
        SUMMARY,
        "from reading a batch to its commit, per shard",
        {ev.BatchCommitted: lambda e: sum(e.milliseconds.values())},
        dimensions=OF_LEASE,
    ),
    histogram(
        "RecordProcessor.processRecords.Time",
        _PROCESS,
        SUMMARY,
        "a call of a record processor; otherwise the transform of a batch and the write of its "
        "files, per shard",
        {
            ev.BatchCommitted: lambda e: e.milliseconds.get("write"),
            ev.ProcessorCalled: lambda e: e.milliseconds,
        },
        dimensions=OF_LEASE,
    ),
    counter(
        "RecordProcessor.processRecords.Failures",
        _PROCESS,
        SUMMARY,
        "calls of a record processor that raised an error",
        {ev.ProcessorCalled: lambda e: int(not e.succeeded)},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "RecordProcessor.processRecords.Records",
        _PROCESS,
        SUMMARY,
        "records of the calls of record processors, also of those that are repeated",
        {ev.ProcessorCalled: lambda e: e.records},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "KinesisDataFetcher.getRecords.Success",
        _PROCESS,
        DETAILED,
        "1 per successful read of a polled shard, 0 per failed one",
        {ev.ReadFinished: lambda e: int(e.succeeded)},
        dimensions=OF_LEASE,
    ),
    histogram(
        "KinesisDataFetcher.getRecords.Time",
        _PROCESS,
        DETAILED,
        "one read of a polled shard, with de-aggregation",
        {ev.ReadFinished: lambda e: e.milliseconds},
        dimensions=OF_LEASE,
    ),
    histogram(
        "ExecutorFetch.Time",
        _PROCESS,
        SUMMARY,
        "Spark job of an executor fetch",
        _phase("job"),
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    histogram(
        "SinkCommit.Time",
        _PROCESS,
        SUMMARY,
        "commit of a batch to the sink",
        _phase("commit"),
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    histogram(
        "Rewrite.Time",
        _PROCESS,
        DETAILED,
        "writes after a lease of a batch was lost",
        _phase("rewrite"),
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    counter(
        "BatchesRefused",
        _PROCESS,
        SUMMARY,
        "batches not committed with all shards",
        ev.BatchRefused,
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    counter(
        "RecordsDeadLettered",
        _PROCESS,
        SUMMARY,
        "records written as dead letters",
        {ev.RecordsDeadLettered: lambda e: None if e.skipped else e.records},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "RecordsSkipped",
        _PROCESS,
        SUMMARY,
        "failing records that were skipped",
        {ev.RecordsDeadLettered: lambda e: e.records if e.skipped else None},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "AggregatesOverLimit",
        _PROCESS,
        SUMMARY,
        "KPL aggregates above a limit",
        {ev.AggregatesRejected: lambda e: e.over_limit},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "AggregatesMisplaced",
        _PROCESS,
        SUMMARY,
        "KPL aggregates of another shard, dropped",
        {ev.AggregatesRejected: lambda e: e.misplaced},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "UserRecordsWithoutKey",
        _PROCESS,
        SUMMARY,
        "user records without a partition key",
        {ev.AggregatesRejected: lambda e: e.unknown_keys},
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "ShardPaused",
        _PROCESS,
        SUMMARY,
        "failed attempts of paused shards",
        ev.ShardPaused,
        dimensions=OF_LEASE,
        in_kcl=False,
    ),
    counter(
        "ShardStalled",
        _PROCESS,
        SUMMARY,
        "reports of a shard without progress",
        ev.ShardStalled,
        dimensions=(*OF_LEASE, STEP),
        in_kcl=False,
    ),
    counter(
        "WorkerHung",
        _PROCESS,
        SUMMARY,
        "reports of a hung processing thread",
        ev.WorkerHung,
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    gauge(
        "HungWorkers",
        _PROCESS,
        "1 while the worker is hung, otherwise 0",
        {ev.WorkerStarted: lambda _: 0, ev.WorkerHung: lambda _: 1, ev.WorkerResumed: lambda _: 0},
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    gauge(
        "RecordMemory",
        _PROCESS,
        "bytes of records and results in the worker",
        {ev.StatusMeasured: lambda e: e.status.memory_bytes},
        dimensions=OF_WORKER,
        unit=Unit.BYTES,
        in_kcl=False,
    ),
    gauge(
        "RecordMemoryLimit",
        _PROCESS,
        "limit of `RecordMemory`, at which reading waits",
        {ev.StatusMeasured: lambda e: e.status.memory_limit_bytes},
        dimensions=OF_WORKER,
        unit=Unit.BYTES,
        in_kcl=False,
    ),
    counter(
        "Success",
        "ShutdownTask",
        SUMMARY,
        "shards committed and checkpointed to their end",
        ev.ShardEnded,
        dimensions=OF_LEASE,
    ),
)


_RENEW: Final = "RenewAllLeases"
_DISCOVERY: Final = "LeaseDiscovery"
_REPORT: Final = "WorkerMetricStatsReporter"
_HANDOFF: Final = "LeaseHandoff"


def _task(task: LeaseTask, measure: Measure) -> FedBy:
    return {ev.TaskFinished: lambda e: measure(e) if e.task is task else None}


def _outcomes(
    operation: str, task: LeaseTask, successes: str, time: str
) -> tuple[Instrument, Instrument]:
    """Return `Success` and `Time` of a task of the lease thread, with these descriptions."""
    return (
        counter(
            "Success",
            operation,
            SUMMARY,
            successes,
            _task(task, lambda e: int(e.succeeded)),
            dimensions=OF_WORKER,
        ),
        histogram(
            "Time",
            operation,
            SUMMARY,
            time,
            _task(task, lambda e: e.milliseconds),
            dimensions=OF_WORKER,
        ),
    )


def _counted_elsewhere(_: ev.Event) -> None:
    """The value needs a memory: see `conversion.HeldLeaseCount`."""


CURRENT_LEASES: Final = gauge(
    "CurrentLeases",
    _RENEW,
    "leases that the worker holds",
    dict.fromkeys(
        (
            ev.WorkerStarted,
            ev.LeaseGained,
            ev.LeaseLost,
            ev.LeaseReleased,
            ev.HandoffCompleted,
            ev.WorkerStopped,
        ),
        _counted_elsewhere,
    ),
    dimensions=OF_WORKER,
)
_LEASES: Final = (
    counter("LostLeases", _RENEW, SUMMARY, "leases lost", ev.LeaseLost, dimensions=OF_WORKER),
    CURRENT_LEASES,
    *_outcomes(
        _RENEW,
        LeaseTask.RENEWAL,
        "1 per completed renewal of all leases, 0 per failed one",
        "renewal of all leases",
    ),
    counter(
        "RenewLease.Success",
        _RENEW,
        DETAILED,
        "leases renewed",
        _task(LeaseTask.RENEWAL, lambda e: e.leases),
        dimensions=OF_WORKER,
    ),
    *_outcomes(
        _DISCOVERY,
        LeaseTask.DISCOVERY,
        "1 per completed discovery, 0 per failed one",
        "one discovery",
    ),
    counter(
        "NewLeasesDiscovered",
        _DISCOVERY,
        DETAILED,
        "leases gained",
        ev.LeaseGained,
        dimensions=OF_WORKER,
    ),
    *_outcomes(
        _REPORT,
        LeaseTask.REPORT,
        "1 per written worker metrics row, 0 per failed write",
        "write of the worker metrics row",
    ),
    counter(
        "InMemoryMetricStatsReporterFailure",
        _REPORT,
        SUMMARY,
        "failed writes of the row",
        _task(LeaseTask.REPORT, lambda e: int(not e.succeeded)),
        dimensions=OF_WORKER,
    ),
    counter(
        "Initialize.Success",
        "Scheduler:Initialize",
        SUMMARY,
        "starts of a worker",
        ev.WorkerStarted,
    ),
    counter(
        "WorkerIdShared",
        _REPORT,
        SUMMARY,
        "reports of another process with this worker id",
        ev.WorkerIdShared,
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    counter(
        "Success",
        _HANDOFF,
        SUMMARY,
        "1 per handoff, 0 per forced one",
        {ev.HandoffCompleted: lambda e: int(not e.forced)},
        dimensions=(WORKER, FORCED),
        in_kcl=False,
    ),
    histogram(
        "Time",
        _HANDOFF,
        SUMMARY,
        "handoff of a lease by its old owner",
        {ev.HandoffCompleted: lambda e: e.seconds * 1000},
        dimensions=(WORKER, FORCED),
        in_kcl=False,
    ),
)


_ASSIGN: Final = "LeaseAssignmentManager"
_SYNC: Final = "PeriodicShardSyncManager"


def _led(measure: Measure) -> FedBy:
    """A value of the cycles that led."""
    return {ev.CycleFinished: lambda e: measure(e) if e.led else None}


_LEADER: Final = (
    counter(
        "Success",
        _ASSIGN,
        SUMMARY,
        "1 per leader cycle without an error, 0 with one",
        _led(lambda e: int(e.succeeded)),
    ),
    histogram("Time", _ASSIGN, SUMMARY, "one leader cycle", _led(lambda e: e.milliseconds)),
    gauge("TotalLeases", _ASSIGN, "lease rows", _led(lambda e: e.leases)),
    gauge("NumWorkers", _ASSIGN, "living workers", _led(lambda e: e.workers)),
    gauge(
        "ExpiredLeases",
        _ASSIGN,
        "leases whose owner has stopped renewing",
        _led(lambda e: e.expired),
    ),
    gauge(
        "UnownedLeases", _ASSIGN, "leases without an owner", _led(lambda e: e.unowned), in_kcl=False
    ),
    gauge(
        "NumWorkersWithFailingWorkerMetric",
        _ASSIGN,
        "living workers without a CPU measurement",
        _led(lambda e: e.failing_workers),
    ),
    gauge(
        "NumWorkersWithInvalidEntry",
        _ASSIGN,
        "living workers whose row has no operating range",
        _led(lambda e: e.invalid_workers),
    ),
    counter(
        "LeaseDeserializationFailureCount",
        _ASSIGN,
        SUMMARY,
        "lease rows that cannot be used, per cycle",
        _led(lambda e: e.unreadable),
    ),
    counter(
        "LeaseSpillover",
        _ASSIGN,
        SUMMARY,
        "leases that no worker has capacity for",
        {ev.PlanMade: lambda e: e.spilled},
    ),
    counter(
        "NumOfLeasesReassignment",
        _ASSIGN,
        SUMMARY,
        "moves of the plans",
        {ev.PlanMade: lambda e: e.moves},
    ),
    histogram(
        "Plan.Time",
        _ASSIGN,
        DETAILED,
        "computation of a plan with moves",
        {ev.PlanMade: lambda e: e.milliseconds},
        in_kcl=False,
    ),
    counter("FailedAssignmentCount", _ASSIGN, DETAILED, "moves that were refused", ev.MoveRefused),
    counter(
        "ForceLeaderRelease",
        _ASSIGN,
        SUMMARY,
        "releases of the lock after failed cycles",
        {ev.LeadershipLost: lambda e: 1 if e.reason == TOO_MANY_FAILURES else None},
    ),
    counter(
        "LeaderDecider:IsLeader",
        "LeaderDecider",
        DETAILED,
        "1 per cycle that led, otherwise 0",
        {ev.CycleFinished: lambda e: int(e.led)},
        prometheus=Kind.GAUGE,
    ),
    counter(
        "LeaderElected",
        "LeaderDecider",
        SUMMARY,
        "acquisitions of the leader lock",
        ev.LeaderElected,
        in_kcl=False,
    ),
    gauge(
        "ActiveStreams.Count",
        "MultiStreamTracker",
        "streams of the leader",
        _led(lambda e: e.streams),
    ),
    counter("NumStreamsWithPartialLeases", _SYNC, SUMMARY, "audits that found a gap", ev.HoleFound),
    gauge(
        "NumStreamsToSync",
        _SYNC,
        "streams whose leases have a gap, or which could not be listed",
        _led(lambda e: e.incomplete_streams + e.unavailable_streams),
    ),
    counter(
        "NumSkippedShardSyncTask",
        _SYNC,
        SUMMARY,
        "shard syncs that were due while the former one was running",
        _led(lambda e: int(e.sync_skipped)),
    ),
    gauge(
        "IncompleteStreams",
        _SYNC,
        "streams whose leases have a gap",
        _led(lambda e: e.incomplete_streams),
        in_kcl=False,
    ),
    gauge(
        "UnavailableStreams",
        _SYNC,
        "streams whose last attempt failed",
        _led(lambda e: e.unavailable_streams),
        in_kcl=False,
    ),
    counter(
        "CreateLease.Success",
        "ShardSyncTask",
        DETAILED,
        "leases created",
        {ev.LeasesCreated: lambda e: len(e.lease_keys)},
        dimensions=(STREAM,),
    ),
    counter(
        "StreamUnavailable",
        "ShardSyncTask",
        SUMMARY,
        "reports of a stream that cannot be read",
        ev.StreamUnavailable,
        dimensions=(STREAM,),
        in_kcl=False,
    ),
    counter(
        "DeleteLease.Success",
        "LeaseCleanup",
        DETAILED,
        "leases deleted",
        ev.LeaseDeleted,
        in_kcl=False,
    ),
)


_ERRORS: Final = (
    counter(
        "RecordsLost",
        "LeaseCleanup",
        SUMMARY,
        "ranges of records that never reach the table",
        ev.RecordsLost,
        dimensions=(REASON,),
        in_kcl=False,
    ),
    counter(
        "AwsTrouble",
        "AwsCalls",
        SUMMARY,
        "calls that failed and are retried",
        ev.AwsTrouble,
        dimensions=(CALL,),
        in_kcl=False,
    ),
    counter(
        "RowsRejected",
        "AwsCalls",
        SUMMARY,
        "rows of the tables that cannot be used",
        ev.RowRejected,
        in_kcl=False,
    ),
    counter(
        "AnnouncementsRejected",
        "SinkCommit",
        SUMMARY,
        "announcements that cannot be used",
        ev.AnnouncementRejected,
        in_kcl=False,
    ),
    counter(
        "TableRestored",
        "SinkCommit",
        SUMMARY,
        "RESTOREs of the table, after which rows are not read again",
        ev.TableRestored,
        in_kcl=False,
    ),
    counter(
        "ArrowMemorySkipped",
        "ProcessBatch",
        SUMMARY,
        "reasons not to pass batches or results of Spark as Arrow columns in memory",
        ev.ArrowMemorySkipped,
        in_kcl=False,
    ),
    counter(
        "CpuSourcesSkipped",
        "WorkerMetrics",
        SUMMARY,
        "CPU sources that cannot be read",
        ev.CpuSourceSkipped,
        in_kcl=False,
    ),
)


INSTRUMENTS: Final = (
    *_PROCESSING,
    *_LEASES,
    *_LEADER,
    *_ERRORS,
)
"""All instruments, in the order of the documented table."""


_TEXTS: Final[dict[str, Callable[[Any], str]]] = {
    WORKER: lambda e: e.from_worker if isinstance(e, ev.HandoffCompleted) else e.worker_id,
    STREAM: lambda e: e.stream,
    REASON: lambda e: str(e.reason),
    STEP: lambda e: str(e.step),
    FORCED: lambda e: str(e.forced).lower(),
    CALL: lambda e: e.operation.partition(" ")[0],
}
"""The values of the dimensions of an event, except those of its leases."""


def _by_event() -> Mapping[type[Event], list[tuple[Instrument, Measure]]]:
    found: defaultdict[type[Event], list[tuple[Instrument, Measure]]] = defaultdict(list)
    for instrument in INSTRUMENTS:
        for event, measure in instrument.events.items():
            found[event].append((instrument, measure))
    return found


_FED: Final = _by_event()


def observations(event: Event) -> tuple[MetricValue, ...]:
    """The values of one event; empty for an event without metrics."""
    fed = _FED.get(type(event), ())
    return tuple(one for instrument, measure in fed for one in _values(instrument, measure, event))


def _values(instrument: Instrument, measure: Measure, event: Any) -> Iterator[MetricValue]:
    value = measure(event)
    if value is None:
        return
    of_lease = SHARD in instrument.dimensions
    others = tuple(
        (name, _TEXTS[name](event))
        for name in instrument.dimensions
        if not (of_lease and name in (SHARD, STREAM))
    )
    if isinstance(value, Mapping):
        by_lease = value
    elif of_lease:
        keys = getattr(event, "lease_keys", None) or (event.lease_key,)
        by_lease = dict.fromkeys(keys, value)
    else:
        yield instrument.of(value, others)
        return
    for key, one in by_lease.items():
        yield instrument.of(one, (*dimensions_of(key), *others))


@lru_cache(maxsize=4096)
def dimensions_of(lease_key: str) -> Attributes:
    """The dimensions of a lease. Only keys of several streams name their stream, as in KCL."""
    stream, _, shard = lease_key.rpartition(":")
    return ((SHARD, shard), (STREAM, stream)) if stream else ((SHARD, shard),)


class HeldLeaseCount:
    """Count the leases that each worker of this process holds, from its events."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def after(self, event: Event) -> tuple[MetricValue, ...]:
        """The new count after an event that changes it; otherwise empty."""
        match event:
            case ev.WorkerStarted(worker_id=worker):
                self._held.setdefault(worker, set())
            case ev.LeaseGained(worker_id=worker, lease_key=key):
                self._held.setdefault(worker, set()).add(key)
            case (
                ev.LeaseLost(worker_id=worker, lease_key=key)
                | ev.LeaseReleased(worker_id=worker, lease_key=key)
                | ev.HandoffCompleted(from_worker=worker, lease_key=key)
            ):
                self._held.setdefault(worker, set()).discard(key)
            case ev.WorkerStopped(worker_id=worker):
                self._held[worker] = set()
            case _:
                return ()
        return (CURRENT_LEASES.of(len(self._held[worker]), ((WORKER, worker),)),)

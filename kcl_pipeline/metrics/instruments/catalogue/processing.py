"""The metrics of a worker's batches."""

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.instruments.instrument import (
    DETAILED,
    OF_LEASE,
    OF_WORKER,
    STEP,
    SUMMARY,
    FedBy,
    Kind,
    Unit,
    counter,
    gauge,
    histogram,
)

_PROCESS: Final = "ProcessTask"


def _phase(name: str) -> FedBy:
    """The duration of a phase of a batch."""
    return {ev.BatchCommitted: lambda e: e.milliseconds.get(name)}


def _largest_lag(e: ev.LagMeasured) -> float | None:
    if not e.millis_behind_latest and e.unknown:
        return None
    return max(e.millis_behind_latest.values(), default=0)


MILLIS_BEHIND_LATEST: Final = histogram(
    "MillisBehindLatest",
    _PROCESS,
    SUMMARY,
    "age of the oldest record of a shard that is not committed",
    {ev.LagMeasured: lambda e: e.millis_behind_latest},
    dimensions=OF_LEASE,
    prometheus=Kind.GAUGE,
)
INSTRUMENTS: Final = (
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
        {ev.LagMeasured: _largest_lag},
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
        "transform of a batch and write of its files, per shard",
        _phase("write"),
        dimensions=OF_LEASE,
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
        {ev.MemoryMeasured: lambda e: e.used_bytes},
        dimensions=OF_WORKER,
        unit=Unit.BYTES,
        in_kcl=False,
    ),
    gauge(
        "RecordMemoryLimit",
        _PROCESS,
        "limit of `RecordMemory`, at which reading waits",
        {ev.MemoryMeasured: lambda e: e.max_bytes},
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

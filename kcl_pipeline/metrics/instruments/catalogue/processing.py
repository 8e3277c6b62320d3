"""The metrics of a worker's batches."""

from __future__ import annotations

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.instruments.catalogue.builders import (
    DETAILED,
    OF_LEASE,
    OF_WORKER,
    SUMMARY,
    counter,
    gauge,
    histogram,
)
from kcl_pipeline.metrics.instruments.instrument import STEP, Kind, Unit

_PROCESS: Final = "ProcessTask"
RECORDS_PROCESSED: Final = counter(
    "RecordsProcessed",
    _PROCESS,
    SUMMARY,
    "records in committed batches",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
)
DATA_BYTES_PROCESSED: Final = histogram(
    "DataBytesProcessed",
    _PROCESS,
    SUMMARY,
    "bytes of their data",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
    unit=Unit.BYTES,
    prometheus=Kind.COUNTER,
)
MILLIS_BEHIND_LATEST: Final = histogram(
    "MillisBehindLatest",
    _PROCESS,
    SUMMARY,
    "age of the oldest record of a shard that is not committed",
    ev.LagMeasured,
    dimensions=OF_LEASE,
    prometheus=Kind.GAUGE,
)
APPLICATION_LAG: Final = histogram(
    "MillisBehindLatest",
    "ApplicationTracker",
    SUMMARY,
    "largest lag of the worker's shards",
    ev.LagMeasured,
    prometheus=Kind.GAUGE,
)
PROCESS_SUCCESS: Final = counter(
    "Success",
    _PROCESS,
    SUMMARY,
    "1 per shard of a committed batch, 0 per shard of a refused one",
    ev.BatchCommitted,
    ev.BatchRefused,
    dimensions=OF_LEASE,
)
PROCESS_TIME: Final = histogram(
    "Time",
    _PROCESS,
    SUMMARY,
    "from reading a batch to its commit, per shard",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
)
PROCESS_RECORDS_TIME: Final = histogram(
    "RecordProcessor.processRecords.Time",
    _PROCESS,
    SUMMARY,
    "transform of a batch and write of its files, per shard",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
)
UPDATE_LEASE_SUCCESS: Final = counter(
    "UpdateLease.Success",
    _PROCESS,
    DETAILED,
    "prepares of a shard",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
)
UPDATE_LEASE_TIME: Final = histogram(
    "UpdateLease.Time",
    _PROCESS,
    DETAILED,
    "prepare of a batch, after its files were written, per shard",
    ev.BatchCommitted,
    dimensions=OF_LEASE,
)
GET_RECORDS_SUCCESS: Final = counter(
    "KinesisDataFetcher.getRecords.Success",
    _PROCESS,
    DETAILED,
    "1 per successful read of a polled shard, 0 per failed one",
    ev.ReadFinished,
    dimensions=OF_LEASE,
)
GET_RECORDS_TIME: Final = histogram(
    "KinesisDataFetcher.getRecords.Time",
    _PROCESS,
    DETAILED,
    "one read of a polled shard, with de-aggregation",
    ev.ReadFinished,
    dimensions=OF_LEASE,
)
EXECUTOR_FETCH_TIME: Final = histogram(
    "ExecutorFetch.Time",
    _PROCESS,
    SUMMARY,
    "Spark job of an executor fetch",
    ev.BatchCommitted,
    dimensions=OF_WORKER,
    in_kcl=False,
)
SINK_COMMIT_TIME: Final = histogram(
    "SinkCommit.Time",
    _PROCESS,
    SUMMARY,
    "commit of a batch to the sink",
    ev.BatchCommitted,
    dimensions=OF_WORKER,
    in_kcl=False,
)
REWRITE_TIME: Final = histogram(
    "Rewrite.Time",
    _PROCESS,
    DETAILED,
    "writes after a lease of a batch was lost",
    ev.BatchCommitted,
    dimensions=OF_WORKER,
    in_kcl=False,
)
BATCHES_REFUSED: Final = counter(
    "BatchesRefused",
    _PROCESS,
    SUMMARY,
    "batches not committed with all shards",
    ev.BatchRefused,
    dimensions=OF_WORKER,
    in_kcl=False,
)
RECORDS_DEAD_LETTERED: Final = counter(
    "RecordsDeadLettered",
    _PROCESS,
    SUMMARY,
    "records written as dead letters",
    ev.RecordsDeadLettered,
    dimensions=OF_LEASE,
    in_kcl=False,
)
RECORDS_SKIPPED: Final = counter(
    "RecordsSkipped",
    _PROCESS,
    SUMMARY,
    "failing records that were skipped",
    ev.RecordsDeadLettered,
    dimensions=OF_LEASE,
    in_kcl=False,
)
AGGREGATES_OVER_LIMIT: Final = counter(
    "AggregatesOverLimit",
    _PROCESS,
    SUMMARY,
    "KPL aggregates above a limit",
    ev.AggregatesRejected,
    dimensions=OF_LEASE,
    in_kcl=False,
)
AGGREGATES_MISPLACED: Final = counter(
    "AggregatesMisplaced",
    _PROCESS,
    SUMMARY,
    "KPL aggregates of another shard, dropped",
    ev.AggregatesRejected,
    dimensions=OF_LEASE,
    in_kcl=False,
)
USER_RECORDS_WITHOUT_KEY: Final = counter(
    "UserRecordsWithoutKey",
    _PROCESS,
    SUMMARY,
    "user records without a partition key",
    ev.AggregatesRejected,
    dimensions=OF_LEASE,
    in_kcl=False,
)
SHARD_PAUSED: Final = counter(
    "ShardPaused",
    _PROCESS,
    SUMMARY,
    "failed attempts of paused shards",
    ev.ShardPaused,
    dimensions=OF_LEASE,
    in_kcl=False,
)
SHARD_STALLED: Final = counter(
    "ShardStalled",
    _PROCESS,
    SUMMARY,
    "reports of a shard without progress",
    ev.ShardStalled,
    dimensions=(*OF_LEASE, STEP),
    in_kcl=False,
)
WORKER_HUNG: Final = counter(
    "WorkerHung",
    _PROCESS,
    SUMMARY,
    "reports of a hung processing thread",
    ev.WorkerHung,
    dimensions=OF_WORKER,
    in_kcl=False,
)
HUNG_WORKERS: Final = gauge(
    "HungWorkers",
    _PROCESS,
    "1 while the worker is hung, otherwise 0",
    ev.WorkerStarted,
    ev.WorkerHung,
    ev.WorkerResumed,
    dimensions=OF_WORKER,
    in_kcl=False,
)
RECORD_MEMORY: Final = gauge(
    "RecordMemory",
    _PROCESS,
    "bytes of records and results in the worker",
    ev.MemoryMeasured,
    dimensions=OF_WORKER,
    unit=Unit.BYTES,
    in_kcl=False,
)
RECORD_MEMORY_LIMIT: Final = gauge(
    "RecordMemoryLimit",
    _PROCESS,
    "limit of `RecordMemory`, at which reading waits",
    ev.MemoryMeasured,
    dimensions=OF_WORKER,
    unit=Unit.BYTES,
    in_kcl=False,
)
SHUTDOWN_SUCCESS: Final = counter(
    "Success",
    "ShutdownTask",
    SUMMARY,
    "shards committed and checkpointed to their end",
    ev.ShardEnded,
    dimensions=OF_LEASE,
)

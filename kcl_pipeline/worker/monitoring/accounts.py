"""Count a committed batch: counters, throughput of its leases, and its event."""

from __future__ import annotations

from kcl_pipeline.events import BatchCommitted
from kcl_pipeline.kinesis.ranges import sampled_arrivals
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.worker.commit.protocol import Committed
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.splitting import SplitBatch
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.sources.batch_source import SourcedBatch


def count_commit(
    parts: WorkerDependencies,
    stats: WorkerStats,
    leases: HeldLeases,
    part: SplitBatch,
    sourced: SourcedBatch,
    done: Committed,
    written_millis: float,
) -> None:
    """Count a part of a batch that landed.

    Args:
        parts: The dependencies of the worker.
        stats: The counters of the worker.
        leases: Its leases.
        part: The part.
        sourced: The whole batch.
        done: The commit of the part.
        written_millis: How long it took to load and write the part.
    """
    bytes_of = sourced.by_lease(lambda shard: shard.bytes)
    data_of = sourced.by_lease(lambda shard: shard.data_bytes)
    records_of = sourced.by_lease(lambda shard: shard.record_count)
    for key in done.lease_keys:
        leases.record_bytes(key, data_of[key])
    read = sum(bytes_of[key] for key in done.lease_keys)
    failed_of = {key: records.num_rows for key, records in part.failed.items()}
    failed = sum(failed_of.values())
    is_whole = len(part.batch.ranges) == len(sourced.batch.ranges)
    stats.batch(
        part.records,
        sourced.arrival_micros if is_whole else sampled_arrivals(part.batch.records),
        bytes_read=read,
        rows_written=done.rows,
        dead_letters=failed,
        version=done.version,
        commit_millis=written_millis + sum(done.milliseconds.values()),
    )
    parts.events(
        BatchCommitted(
            parts.worker_id,
            part.batch.batch_id,
            part.records - failed,
            read,
            done.lease_keys,
            {**sourced.milliseconds, "write": written_millis, **done.milliseconds},
            done.version,
            {key: records_of[key] - failed_of.get(key, 0) for key in done.lease_keys},
            {key: data_of[key] for key in done.lease_keys},
        )
    )

"""Compute the status of a worker for its worker metrics row, and up to when its shards are read."""

from __future__ import annotations

from collections.abc import Mapping

from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.state.worker_status import (
    MAX_STALLED,
    HungState,
    PausedLease,
    StalledLease,
    UnavailableStream,
    WorkerStatus,
    furthest_behind,
    lags_by_stream,
    other_lags,
)
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.version import __version__
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.pauses import ShardPause
from kcl_pipeline.worker.monitoring.lag import Lag
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.sources.batch_source import BatchSource


def worker_status(
    dependencies: WorkerDependencies,
    leases: HeldLeases,
    source: BatchSource,
    lifecycle: Lifecycle,
    stats: WorkerStats,
    lag: Lag,
    pauses: Mapping[str, ShardPause],
    *,
    sink_failures: tuple[int, str | None],
    unavailable: tuple[UnavailableStream, ...] | None,
    hung: HungState | None,
    stalled: tuple[StalledLease, ...] = (),
) -> WorkerStatus:
    """Return the status now. The next renewals write up to when the shards are read.

    Args:
        dependencies: The dependencies of the worker.
        leases: The held leases.
        source: Knows how far each shard was read.
        lifecycle: Knows which shards wait for their parents.
        stats: Counts committed batches and dead letters.
        lag: The lag of committed data.
        pauses: The paused shards.
        sink_failures: The number of batches in a row that the sink refused, and why.
        unavailable: Streams that this worker's leader could not use. None: it does not lead.
        hung: Set while the worker is hung.
        stalled: The leases that make no progress, those that stand still longest first.
    """
    now, sink = dependencies.clock.monotonic(), dependencies.sink
    processors = sink if isinstance(sink, ProcessorCalls) else None
    for key, millis in lag.millis.items():
        state = source.state_of(key)
        if state is None or state.read_up_to_millis is None or state.read_at is None:
            continue
        if processors is not None and not processors.is_checkpointed(key):
            continue
        # All records are in the table that arrived until the shard was read, or until the arrival
        # of its oldest record that is not committed. Both are times of the service, because the
        # next owner of the lease may run on a host with another clock.
        served = state.read_up_to_millis + (state.behind_millis or 0)
        committed = served + round((now - state.read_at) * 1000) - millis
        leases.note_read_up_to(key, min(state.read_up_to_millis, committed))
    paused = tuple(
        PausedLease(key, pauses[key].reason, now - pauses[key].since) for key in sorted(pauses)
    )
    more_lags, more_lags_millis = other_lags(lag.millis)
    return WorkerStatus(
        lag.worst_millis,
        len(lag.unknown),
        paused,
        len(paused),
        furthest_behind(lag.millis),
        stats.dead_letters,
        *sink_failures,
        unavailable=unavailable,
        totals=stats.totals(),
        version=__version__,
        more_lags=more_lags,
        more_lags_millis=more_lags_millis,
        streams=lags_by_stream(lag.millis, lag.unknown),
        hung=hung,
        stalled=stalled[:MAX_STALLED],
        stalled_leases=len(stalled),
        read_leases=_read_leases(leases, source, lifecycle),
    )


def _read_leases(leases: HeldLeases, source: BatchSource, lifecycle: Lifecycle) -> int:
    """Count the held leases whose shard was read, or need not be read now."""

    def is_read(held: Held) -> bool:
        reading = source.state_of(held.lease_key)
        return (reading is not None and reading.read_at is not None) or lifecycle.waits_for_parents(
            held
        )

    return sum(not held.lease.ended and is_read(held) for held in leases.held())

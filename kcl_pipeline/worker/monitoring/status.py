"""Compute the status of a worker for its worker metrics row, and up to when its shards are read."""

from __future__ import annotations

from collections.abc import Mapping

from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.state.worker_status import (
    HungState,
    PausedLease,
    UnavailableStream,
    WorkerStatus,
    furthest_behind,
    lags_by_stream,
    other_lags,
)
from kcl_pipeline.version import __version__
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.pauses import Pause
from kcl_pipeline.worker.monitoring.lag import Lag
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.sources.batch_source import BatchSource


def worker_status(
    parts: WorkerDependencies,
    leases: HeldLeases,
    source: BatchSource,
    stats: WorkerStats,
    lag: Lag,
    pauses: Mapping[str, Pause],
    *,
    sink_failures: tuple[int, str | None],
    unavailable: tuple[UnavailableStream, ...] | None,
    hung: HungState | None,
) -> WorkerStatus:
    """Return the status now. The next renewals write up to when the shards are read.

    Args:
        parts: The dependencies of the worker.
        leases: The held leases.
        source: Knows how far each shard was read.
        stats: Counts committed batches and dead letters.
        lag: The lag of committed data.
        pauses: The paused shards.
        sink_failures: The number of batches in a row that the sink refused, and why.
        unavailable: Streams that this worker's leader could not use. None: it does not lead.
        hung: Set while the worker is hung.
    """
    now_millis = round(parts.clock.wall() * 1000)
    for key, millis in lag.millis.items():
        state = source.state_of(key)
        if state is not None and state.read_up_to_millis is not None:
            # All records are in the table that arrived until the shard was read, or until the
            # arrival of its oldest record that is not committed.
            leases.note_read_up_to(key, min(state.read_up_to_millis, now_millis - millis))
    now = parts.clock.monotonic()
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
    )

"""Compute the status of a worker for its worker metrics row, and up to when its shards are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kcl_pipeline.clock import Clock
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
from kcl_pipeline.worker.failures.pauses import Pause
from kcl_pipeline.worker.monitoring.lag import Lag
from kcl_pipeline.worker.monitoring.stats import WorkerStats
from kcl_pipeline.worker.sources.batch_source import BatchSource


class StatusSource:
    """Computes the status. The thread that renews leases calls it.

    Args:
        leases: The held leases.
        source: Knows how far each shard was read.
        stats: Counts committed batches and dead letters.
        clock: The clock.
        lag: Returns the lag of committed data.
        paused: Returns the paused shards.
        sink_failures: Returns the number of batches in a row that the sink refused, and why.
        unavailable: Streams that this worker's leader could not use. None: it does not lead.
        hung: Set while the worker is hung.
    """

    def __init__(
        self,
        leases: HeldLeases,
        source: BatchSource,
        stats: WorkerStats,
        clock: Clock,
        *,
        lag: Callable[[], Lag],
        paused: Callable[[], Mapping[str, Pause]],
        sink_failures: Callable[[], tuple[int, str | None]],
        unavailable: tuple[UnavailableStream, ...] | None,
        hung: HungState | None,
    ) -> None:
        self._leases = leases
        self._source = source
        self._stats = stats
        self._clock = clock
        self._lag = lag
        self._paused = paused
        self._sink_failures = sink_failures
        self._unavailable = unavailable
        self._hung = hung

    def current(self) -> WorkerStatus:
        """Return the status now. The next renewals write up to when the shards are read."""
        lag, pauses, now = self._lag(), self._paused(), self._clock.monotonic()
        self._note_read_up_to(lag)
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
            self._stats.dead_letters,
            *self._sink_failures(),
            unavailable=self._unavailable,
            totals=self._stats.totals(),
            version=__version__,
            more_lags=more_lags,
            more_lags_millis=more_lags_millis,
            streams=lags_by_stream(lag.millis, lag.unknown),
            hung=self._hung,
        )

    def _note_read_up_to(self, lag: Lag) -> None:
        """Note until when all records of a shard are in the table.

        That is the time up to which it was read, or the arrival of its oldest record that is not
        committed.
        """
        now_millis = round(self._clock.wall() * 1000)
        for key, millis in lag.millis.items():
            state = self._source.state_of(key)
            if state is not None and state.read_up_to_millis is not None:
                self._leases.note_read_up_to(key, min(state.read_up_to_millis, now_millis - millis))

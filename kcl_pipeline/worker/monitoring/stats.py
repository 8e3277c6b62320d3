"""Counters of a worker, summed per reporting period and over its lifetime."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.state.worker_status import WorkerTotals
from kcl_pipeline.worker.monitoring.lag import Lag
from kcl_pipeline.worker.monitoring.totals import RecentBatches
from kcl_pipeline.worker.summary import WorkerProgress

_LATENCY_SAMPLES = 10_000


@dataclass(slots=True)
class Period:
    """Counters of one period.

    Attributes:
        began: Start of the period (monotonic seconds).
        latencies: Put-to-commit milliseconds of at most the last 10,000 sampled records.
    """

    began: float
    records: int = 0
    bytes: int = 0
    rows_written: int = 0
    batches: int = 0
    dead_letters: int = 0
    refused_batches: int = 0
    handoffs: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCY_SAMPLES))

    def progress(
        self,
        worker_id: str,
        now: float,
        *,
        lag: Lag,
        positions: Mapping[str, str],
        stalled: Mapping[str, str],
        table_version: int | None,
        paused: Mapping[str, str],
    ) -> WorkerProgress:
        """Combine the counters with the newest gauges."""
        p50, p99 = (
            np.percentile(self.latencies, [50, 99]).tolist() if self.latencies else (None, None)
        )
        return WorkerProgress(
            worker_id=worker_id,
            seconds=now - self.began,
            records=self.records,
            bytes=self.bytes,
            rows_written=self.rows_written,
            batches=self.batches,
            dead_letters=self.dead_letters,
            refused_batches=self.refused_batches,
            handoffs=self.handoffs,
            leases=tuple(sorted(positions)),
            millis_behind_latest=dict(lag.millis),
            lag_unknown=lag.unknown,
            paused=dict(paused),
            positions=dict(positions),
            stalled=dict(stalled),
            table_version=table_version,
            put_to_commit_millis_p50=p50,
            put_to_commit_millis_p99=p99,
        )


class WorkerStats:
    """Counters of the current period and of the worker's lifetime.

    Only the processing thread uses it, except where a method says otherwise.
    """

    def __init__(self, worker_id: str, clock: Clock) -> None:
        self._worker_id = worker_id
        self._clock = clock
        self._life = Period(clock.monotonic())
        self._period = Period(clock.monotonic())
        self._recent = RecentBatches(clock)
        self.table_version: int | None = None

    def batch(
        self,
        records: int,
        arrival_micros: Sequence[int],
        *,
        bytes_read: int,
        rows_written: int,
        dead_letters: int,
        version: int | None,
        commit_millis: float = 0.0,
    ) -> None:
        """Count a batch that landed.

        `commit_millis` is the time to write and commit it.

        Put-to-commit compares this host's clock with the arrival time of Kinesis. It is reported
        only; no decision depends on it.
        """
        now_millis = self._clock.wall() * 1000
        waits = [max(now_millis - micros / 1000, 0.0) for micros in arrival_micros]
        for period in (self._period, self._life):
            period.records += records
            period.bytes += bytes_read
            period.rows_written += rows_written
            period.batches += 1
            period.dead_letters += dead_letters
            period.latencies.extend(waits)
        if version is not None:
            self.table_version = version
        self._recent.note(commit_millis, waits)

    def totals(self) -> WorkerTotals:
        """Return what the worker has committed since it started. Any thread may call it."""
        commit, put_to_commit = self._recent.percentiles_99()
        life = self._life
        return WorkerTotals(
            seconds=self._clock.monotonic() - life.began,
            records=life.records,
            bytes=life.bytes,
            rows=life.rows_written,
            batches=life.batches,
            last_batch_seconds=self._recent.last_age_seconds(),
            commit_millis_p99=commit,
            put_to_commit_millis_p99=put_to_commit,
            table_version=self.table_version,
        )

    @property
    def dead_letters(self) -> int:
        """Number of dead letters in the worker's lifetime. Any thread may read it."""
        return self._life.dead_letters

    def refused(self) -> None:
        """Count a batch that was not committed with all its leases."""
        self._period.refused_batches += 1
        self._life.refused_batches += 1

    def handoffs(self, count: int) -> None:
        """Count leases that a handoff gave to other workers."""
        self._period.handoffs += count
        self._life.handoffs += count

    def period_seconds(self) -> float:
        """Return the seconds since the current period began."""
        return self._clock.monotonic() - self._period.began

    def close_period(
        self,
        *,
        lag: Lag,
        positions: Mapping[str, str],
        stalled: Mapping[str, str],
        paused: Mapping[str, str],
    ) -> WorkerProgress:
        """End the period and begin the next; return the counters and gauges of the ended one."""
        now = self._clock.monotonic()
        done, self._period = self._period, Period(now)
        return self._progress(done, now, lag, positions, paused, stalled)

    def total(
        self, *, lag: Lag | None = None, paused: Mapping[str, str] | None = None
    ) -> WorkerProgress:
        """Return the counters of the worker's lifetime."""
        now = self._clock.monotonic()
        return self._progress(self._life, now, lag or Lag(), {}, paused or {})

    def _progress(
        self,
        period: Period,
        now: float,
        lag: Lag,
        positions: Mapping[str, str],
        paused: Mapping[str, str],
        stalled: Mapping[str, str] | None = None,
    ) -> WorkerProgress:
        return period.progress(
            self._worker_id,
            now,
            lag=lag,
            positions=positions,
            stalled=stalled or {},
            table_version=self.table_version,
            paused=paused,
        )

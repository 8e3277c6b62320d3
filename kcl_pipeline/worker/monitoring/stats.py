"""Counters of a worker, summed per reporting period and over its lifetime."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kcl_pipeline.clock import Clock
from kcl_pipeline.events import BatchCommitted
from kcl_pipeline.kinesis.ranges import sampled_arrivals
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.state.worker_status import WorkerTotals
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.worker.commit import Committed
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.isolation import SplitBatch
from kcl_pipeline.worker.monitoring.lag import Lag
from kcl_pipeline.worker.sources.batch_source import SourcedBatch
from kcl_pipeline.worker.summary import WorkerProgress

_LATENCY_SAMPLES: Final = 10_000
RECENT_SECONDS: Final = 300.0
"""Percentiles cover the batches of this time."""
_BATCHES: Final = 1_000
_SAMPLES: Final = 100


@dataclass(slots=True)
class StatsPeriod:
    """Counters of one period.

    Attributes:
        began: Start of the period (monotonic seconds).
        counts: Numbers by their name in `WorkerProgress`.
        latencies: Put-to-commit milliseconds of at most the last 10,000 sampled records.
    """

    began: float
    counts: Counter[str] = field(default_factory=Counter)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCY_SAMPLES))


class WorkerStats:
    """Counters of the current period and of the worker's lifetime.

    Only the processing thread uses it, except where a method says otherwise.
    """

    def __init__(self, dependencies: WorkerDependencies, leases: HeldLeases) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._life = StatsPeriod(dependencies.clock.monotonic())
        self._period = StatsPeriod(dependencies.clock.monotonic())
        self._recent = RecentBatches(dependencies.clock)
        self.table_version: int | None = None

    def note_commit(
        self, part: SplitBatch, sourced: SourcedBatch, done: Committed, written_millis: float
    ) -> None:
        """Count a part of a batch that landed, and note the throughput of its leases.

        Put-to-commit compares this host's clock with the arrival time of Kinesis. It is reported
        only; no decision depends on it.

        Args:
            part: The part.
            sourced: The whole batch.
            done: The commit of the part.
            written_millis: How long it took to load and write the part.
        """
        bytes_of = sourced.by_lease(lambda shard: shard.bytes)
        data_of = sourced.by_lease(lambda shard: shard.data_bytes)
        records_of = sourced.by_lease(lambda shard: shard.record_count)
        for key in done.lease_keys:
            self._leases.record_bytes(key, data_of[key])
        read = sum(bytes_of[key] for key in done.lease_keys)
        failed_of = {key: records.num_rows for key, records in part.failed.items()}
        failed = sum(failed_of.values())
        is_whole = len(part.batch.ranges) == len(sourced.batch.ranges)
        arrivals = sourced.arrival_micros if is_whole else sampled_arrivals(part.batch.records)
        now_millis = self._dependencies.clock.wall() * 1000
        waits = [max(now_millis - micros / 1000, 0.0) for micros in arrivals]
        self.count(
            records=part.records,
            bytes=read,
            rows_written=done.rows,
            batches=1,
            dead_letters=failed,
        )
        for period in (self._period, self._life):
            period.latencies.extend(waits)
        if done.version is not None and self._dependencies.sink.stores_positions:
            self.table_version = done.version
        # A record processor writes nothing. Its calls are measured one by one.
        is_written = not isinstance(self._dependencies.sink, ProcessorCalls)
        writing = {"write": written_millis} if is_written else {}
        self._recent.note(written_millis + sum(done.milliseconds.values()), waits)
        self._dependencies.events(
            BatchCommitted(
                self._dependencies.worker_id,
                part.batch.batch_id,
                part.records - failed,
                read,
                done.lease_keys,
                {**sourced.milliseconds, **writing, **done.milliseconds},
                done.version,
                {key: records_of[key] - failed_of.get(key, 0) for key in done.lease_keys},
                {key: data_of[key] for key in done.lease_keys},
            )
        )

    def count(self, **more: int) -> None:
        """Add numbers by their name in `WorkerProgress`."""
        for period in (self._period, self._life):
            period.counts.update(more)

    def totals(self) -> WorkerTotals:
        """Return what the worker has committed since it started. Any thread may call it."""
        commit, put_to_commit = self._recent.percentiles_99()
        counts = self._life.counts
        return WorkerTotals(
            seconds=self._dependencies.clock.monotonic() - self._life.began,
            records=counts["records"],
            bytes=counts["bytes"],
            rows=counts["rows_written"],
            batches=counts["batches"],
            last_batch_seconds=self._recent.last_age_seconds(),
            commit_millis_p99=commit,
            put_to_commit_millis_p99=put_to_commit,
            table_version=self.table_version,
        )

    @property
    def batches(self) -> int:
        """Number of batches in the worker's lifetime. Any thread may read it."""
        return self._life.counts["batches"]

    @property
    def dead_letters(self) -> int:
        """Number of dead letters in the worker's lifetime. Any thread may read it."""
        return self._life.counts["dead_letters"]

    def period_seconds(self) -> float:
        """Return the seconds since the current period began."""
        return self._dependencies.clock.monotonic() - self._period.began

    def close_period(
        self,
        *,
        lag: Lag,
        positions: Mapping[str, str],
        stalled: Mapping[str, str],
        paused: Mapping[str, str],
    ) -> WorkerProgress:
        """End the period and begin the next; return the counters and gauges of the ended one."""
        done, self._period = self._period, StatsPeriod(self._dependencies.clock.monotonic())
        return self._progress(done, lag, paused, positions, stalled)

    def total(self, *, lag: Lag, paused: Mapping[str, str]) -> WorkerProgress:
        """Return the counters of the worker's lifetime."""
        return self._progress(self._life, lag, paused, {}, {})

    def _progress(
        self,
        period: StatsPeriod,
        lag: Lag,
        paused: Mapping[str, str],
        positions: Mapping[str, str],
        stalled: Mapping[str, str],
    ) -> WorkerProgress:
        """Combine the counters of a period with the newest gauges."""
        p50, p99 = (
            np.percentile(period.latencies, [50, 99]).tolist() if period.latencies else (None, None)
        )
        return WorkerProgress(
            worker_id=self._dependencies.worker_id,
            seconds=self._dependencies.clock.monotonic() - period.began,
            **period.counts,
            leases=tuple(sorted(positions)),
            millis_behind_latest=dict(lag.millis),
            lag_unknown=lag.unknown,
            paused=dict(paused),
            positions=dict(positions),
            stalled=dict(stalled),
            table_version=self.table_version,
            put_to_commit_millis_p50=p50,
            put_to_commit_millis_p99=p99,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    at: float
    commit_millis: float
    waits: tuple[float, ...]


class RecentBatches:
    """Durations of the newest committed batches. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES)

    def note(self, commit_millis: float, waits: Sequence[float]) -> None:
        """Add a batch.

        Args:
            commit_millis: Time to write and commit it.
            waits: Put-to-commit milliseconds of its sampled records. About 100 are kept.
        """
        kept = tuple(waits[:: len(waits) // _SAMPLES + 1])
        with self._lock:
            self._batches.append(_Batch(self._clock.monotonic(), commit_millis, kept))

    def last_age_seconds(self) -> float | None:
        """Return the age of the last batch; None without one."""
        with self._lock:
            last = self._batches[-1].at if self._batches else None
        return None if last is None else max(self._clock.monotonic() - last, 0.0)

    def percentiles_99(self) -> tuple[int | None, int | None]:
        """Return the p99 of the commit time and of put-to-commit, in milliseconds.

        None: no batch was committed in the last `RECENT_SECONDS`.
        """
        begin = self._clock.monotonic() - RECENT_SECONDS
        with self._lock:
            recent = [batch for batch in self._batches if batch.at >= begin]
        commits = [batch.commit_millis for batch in recent]
        return _p99(commits), _p99([wait for batch in recent for wait in batch.waits])


def _p99(values: Sequence[float]) -> int | None:
    return round(float(np.percentile(values, 99))) if values else None

"""What the status of a worker is made of: counters since its start, its lag, hangs and stalls.

`WorkerStats` counts. `LagTracker` measures the lag of the table, which is the age of the oldest
record that is not committed. `worker_status` makes the one value (`WorkerStatus`) from these and
from what the watches found.

The age of a record counts from its arrival. Clocks of two hosts are never compared. Kinesis reports
how far a response is behind the tip. Arrival times of one response are subtracted from each other.
The time since the response is measured on this host's monotonic clock.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from kcl_pipeline.batch import Batch, sampled_arrivals
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import (
    BatchCommitted,
)
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.version import __version__
from kcl_pipeline.worker.consumer import Lifecycle
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures import ShardPause
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker_status import (
    HungState,
    PausedLease,
    StalledLease,
    UnavailableStream,
    WorkerStatus,
    WorkerTotals,
    lags_by_stream,
    lags_of,
)

UNKNOWN_SECONDS: Final = 30.0
"""After this time without a read, the lag of a shard is the time since its lease was gained.

The true lag may be larger, but the shard must not look healthy.
"""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of one worker.

    Attributes:
        millis: Lag by lease key. 0: no record waits to be committed.
        unknown: Keys of leases whose lag is not known yet.
    """

    millis: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def worst_millis(self) -> int | None:
        """The largest lag. None: no lag is known."""
        return max(self.millis.values(), default=None)


class LagTracker:
    """Remember the oldest record taken for a batch until it is committed.

    Failed attempts do not reset it. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held_since: dict[str, float] = {}
        self._oldest: dict[str, float] = {}

    def track(self, lease_keys: Collection[str]) -> None:
        """Track these leases, and no others."""
        now = self._clock.monotonic()
        with self._lock:
            self._held_since = {key: self._held_since.get(key, now) for key in lease_keys}
            self._oldest = {key: at for key, at in self._oldest.items() if key in self._held_since}

    def took(self, oldest: Mapping[str, float]) -> None:
        """Note that records were taken for a batch.

        Args:
            oldest: Arrival of the oldest record by lease key (monotonic seconds).
        """
        with self._lock:
            for key, at in oldest.items():
                self._oldest[key] = min(at, self._oldest.get(key, at))

    def committed(self, lease_keys: Collection[str]) -> None:
        """Note that the records taken from these leases are committed."""
        with self._lock:
            for key in lease_keys:
                self._oldest.pop(key, None)

    def current(self, unread: Mapping[str, int]) -> Lag:
        """Return the lag now.

        Args:
            unread: Lag of the records after the taken ones, in milliseconds by lease key.
        """
        now = self._clock.monotonic()
        with self._lock:
            held, oldest = dict(self._held_since), dict(self._oldest)
        millis: dict[str, int] = {}
        unknown = []
        for key, since in held.items():
            waits = [max(round((now - oldest[key]) * 1000), 0)] if key in oldest else []
            waits += [unread[key]] if key in unread else []
            if not waits and now - since >= UNKNOWN_SECONDS:
                waits = [round((now - since) * 1000)]
            if waits:
                millis[key] = max(waits)
            else:
                unknown.append(key)
        return Lag(millis, tuple(sorted(unknown)))


RECENT_SECONDS: Final = 300.0
"""Percentiles cover the batches of this time."""
_BATCHES: Final = 1_000
_SAMPLES: Final = 100


class WorkerStats:
    """The counters of a worker since its start, and the durations of its newest batches.

    The processing thread counts. Any thread may read.
    """

    def __init__(self, dependencies: WorkerDependencies, leases: HeldLeases) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._began = dependencies.clock.monotonic()
        self._counts: Counter[str] = Counter()
        self.recent = RecentBatches(dependencies.clock)
        self.table_version: int | None = None

    def note_commit(self, batch: Batch) -> None:
        """Count a batch that landed, and note the throughput of its leases.

        Put-to-commit compares this host's clock with the arrival time of Kinesis. It is reported
        only; no decision depends on it.
        """
        bytes_of = batch.by_lease(lambda read: read.bytes)
        data_of = batch.by_lease(lambda read: read.data_bytes)
        records_of = batch.by_lease(lambda read: read.record_count)
        for key, data in data_of.items():
            self._leases.record_bytes(key, data)
        failed_of = {key: records.num_rows for key, records in batch.failed.items()}
        arrivals = sampled_arrivals(batch.records)
        if not batch.loaded:
            samples = [read.arrival_micros for read in batch.read if read.lease_key in data_of]
            arrivals = tuple(chain.from_iterable(samples))
        now_millis = self._dependencies.clock.wall() * 1000
        waits = [max(now_millis - micros / 1000, 0.0) for micros in arrivals]
        self.count(
            records=sum(records_of.values()),
            bytes=sum(bytes_of.values()),
            rows=batch.output_rows,
            batches=1,
            dead_letters=sum(failed_of.values()),
        )
        if batch.version is not None and self._dependencies.sink.stores_positions:
            self.table_version = batch.version
        commit_millis = sum(took for step, took in batch.milliseconds.items() if step != "job")
        self.recent.note(commit_millis, waits)
        records = {key: number - failed_of.get(key, 0) for key, number in records_of.items()}
        self._dependencies.events(
            BatchCommitted(
                self._dependencies.worker_id,
                batch.batch_id,
                sum(records.values()),
                sum(bytes_of.values()),
                batch.lease_keys,
                batch.milliseconds,
                batch.version,
                records,
                data_of,
            )
        )

    def count(self, **more: int) -> None:
        """Add numbers by their name in `WorkerTotals`."""
        for name, number in more.items():
            self._counts[name] += number

    def seconds(self) -> float:
        """Return the seconds since the worker started."""
        return self._dependencies.clock.monotonic() - self._began

    def totals(self) -> WorkerTotals:
        """Return what the worker has done since it started."""
        return WorkerTotals(self.seconds(), **self._counts)

    @property
    def batches(self) -> int:
        """Number of committed batches since the worker started."""
        return self._counts["batches"]


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
    """Return the smallest value that at least 99 % of the values do not exceed."""
    if not values:
        return None
    # It is among the largest, so that neither a sort nor `np.percentile` is needed
    exceeding = len(values) - math.ceil(0.99 * len(values))
    return round(heapq.nlargest(exceeding + 1, values)[-1])


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
    is_drain: bool = False,
) -> WorkerStatus:
    """Return the status now. Any thread may call it.

    Args:
        dependencies: The dependencies of the worker.
        leases: The held leases.
        source: Knows how far each shard was read.
        lifecycle: Knows which shards wait for their parents, and the committed positions.
        stats: Counts committed batches and dead letters.
        lag: The lag of committed data.
        pauses: The paused shards.
        sink_failures: The number of batches in a row that the sink refused, and why.
        unavailable: Streams that this worker's leader could not use. None: it does not lead.
        hung: Set while the worker is hung.
        stalled: The leases that make no progress, those that stand still longest first.
        is_drain: Whether the worker drains the streams.
    """
    now, memory = dependencies.clock.monotonic(), dependencies.memory
    paused = tuple(
        PausedLease(key, pauses[key].reason, now - pauses[key].since) for key in sorted(pauses)
    )
    failed_batches, failure = sink_failures
    commit, put_to_commit = stats.recent.percentiles_99()
    return WorkerStatus(
        lag_millis=lag.worst_millis,
        unknown_lags=len(lag.unknown),
        paused=paused,
        paused_leases=len(paused),
        lags=lags_of(lag.millis),
        failed_batches=failed_batches,
        failure=failure,
        unavailable=unavailable,
        totals=stats.totals(),
        version=__version__,
        streams=lags_by_stream(lag.millis, lag.unknown),
        hung=hung,
        stalled=stalled,
        stalled_leases=len(stalled),
        read_leases=_read_leases(leases, source, lifecycle),
        last_batch_seconds=stats.recent.last_age_seconds(),
        commit_millis_p99=commit,
        put_to_commit_millis_p99=put_to_commit,
        table_version=stats.table_version,
        memory_bytes=None if memory is None else memory.used_bytes,
        memory_limit_bytes=None if memory is None else memory.max_bytes,
        is_drain=is_drain,
        positions=lifecycle.positions(),
    )


def note_read_up_to(
    dependencies: WorkerDependencies, leases: HeldLeases, source: BatchSource, lag: Lag
) -> None:
    """Let the next renewals write up to when the shards are read."""
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


def _read_leases(leases: HeldLeases, source: BatchSource, lifecycle: Lifecycle) -> int:
    """Count the held leases whose shard was read, or need not be read now."""

    def is_read(held: Held) -> bool:
        reading = source.state_of(held.lease_key)
        return (reading is not None and reading.read_at is not None) or lifecycle.waits_for_parents(
            held
        )

    return sum(not held.lease.ended and is_read(held) for held in leases.held())

"""What the status of a worker is made of: counters since its start, its lag, hangs and stalls.

`WorkerStats` counts. `LagTracker` measures the lag of the table, which is the age of the oldest
record that is not committed. `worker_status` makes the one value (`WorkerStatus`) from these and
from what the watches found.

The thread that renews the leases watches, because the processing thread may hang:

`Activity` is its step. `Watchdog` reports a step that lasts, with the calls of all threads, and
held leases whose shards make no progress, with the step that they wait in. It ends a worker that
was given up, whose leases are released, and one that can neither read, renew nor commit.

The age of a record counts from its arrival. Clocks of two hosts are never compared. Kinesis reports
how far a response is behind the tip. Arrival times of one response are subtracted from each other.
The time since the response is measured on this host's monotonic clock.
"""

from __future__ import annotations

import faulthandler
import math
import re
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, Written
from kcl_pipeline.changes import Lasting
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.events import (
    AwsTrouble,
    BatchCommitted,
    Event,
    EventSink,
    HangStep,
    LeaseTask,
    ReadFinished,
    ShardStalled,
    StallStep,
    TaskFinished,
    WorkerHung,
    WorkerResumed,
)
from kcl_pipeline.kinesis.client import sampled_arrivals
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.processors import ProcessorCalls
from kcl_pipeline.processors.thread import RunningCall
from kcl_pipeline.text import printable
from kcl_pipeline.version import __version__
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
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

    def hold(self, lease_keys: Collection[str]) -> None:
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
            rows=0 if batch.written is None else batch.written.rows,
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
        self._counts.update(more)

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
    return round(float(np.percentile(values, 99))) if values else None


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


@dataclass(frozen=True, slots=True)
class Doing:
    """A step of the processing thread.

    Attributes:
        step: None: the thread is between two steps.
        since: When the step began (monotonic seconds).
        thread: Identifier of the thread.
        is_users: Whether code of the user may run in the step.
    """

    step: HangStep | None
    since: float
    thread: int
    is_users: bool = False


class Activity:
    """The step of the processing thread.

    The processing thread calls `enter`. Any thread may read `now`, which is replaced as
    a whole.

    Args:
        clock: The clock.
        users: Steps in which code of the user runs. A stop waits longer for them.
    """

    def __init__(self, clock: Clock, users: Collection[HangStep] = (HangStep.WRITING,)) -> None:
        self._clock = clock
        self._users = frozenset(users)
        self.now = Doing(None, clock.monotonic(), threading.get_ident())

    def enter(self, step: HangStep | None, *, stores: bool = False) -> None:
        """Begin a step; None: end the last one.

        This is progress, also when the last step was the same.

        Args:
            step: The step.
            stores: The transform has returned, and its rows are written.
        """
        is_users = step in self._users and not stores
        self.now = Doing(step, self._clock.monotonic(), threading.get_ident(), is_users)


@runtime_checkable
class TransformsFirst(Protocol):
    """A `BatchWriter` whose transform has returned before it writes a file.

    Attributes:
        before_files: Called between the two.
    """

    before_files: Callable[[], None]


class WatchedWriter:
    """`BatchWriter` that notes each call of another one.

    What follows a `write`, until the next step, counts as COMMITTING: dead letters are written.
    """

    def __init__(self, writer: BatchWriter, activity: Activity) -> None:
        self._writer = writer
        self._activity = activity
        if isinstance(writer, TransformsFirst):
            writer.before_files = lambda: activity.enter(HangStep.WRITING, stores=True)

    def write(self, batch: Batch) -> Written:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[str | None]:  # noqa: D102
        self._activity.enter(HangStep.WRITING)
        return self._writer.probe(slices)


MAX_CHARACTERS: Final = 20_000
MAX_FRAMES: Final = 40

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_CALL: Final = re.compile(r'  File "(.*)", line (\S+) in (.*)')


def thread_stacks(first: int) -> str:
    """Return the calls of all threads, of each the newest call first.

    The text has names of files and functions and line numbers. It has no source lines and no
    values of variables, because they may contain records or secrets. At most 100 threads (the limit
    of `faulthandler`), `MAX_FRAMES` calls of each, and `MAX_CHARACTERS` characters are returned. If
    no temporary file can be written, the text says why.

    Args:
        first: Identifier of the thread that comes first.
    """
    try:
        stacks = _stacks()
    except OSError as error:
        return f"(the calls of the threads are not known: {printable(str(error))})"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(stacks, key=lambda ident: (ident != first, names.get(ident, "")))
    text = "\n".join(
        "\n".join((f"thread {printable(names.get(ident, str(ident)))}:", *stacks[ident]))
        for ident in order
    )
    cut = "\n... (cut)"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - len(cut)] + cut


def _stacks() -> dict[int, list[str]]:
    """Return the calls by the identifier of the thread.

    The frames of `sys._current_frames` are not used: while Python code walks them, their threads go
    on, and the process ends with a segmentation fault (CPython 3.11.7). `faulthandler` walks all of
    them before another thread runs. It writes to a file descriptor only.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = file.read().decode("ascii", "backslashreplace").splitlines()
    stacks: dict[int, list[str]] = {}
    calls: list[str] = []
    for line in lines:
        if (thread := _THREAD.match(line)) is not None:
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.match(line)) is not None and len(calls) < MAX_FRAMES:
            calls.append(f"  {printable(call[1])}:{call[2]} {printable(call[3])}")
    return stacks


_STEPS: Final = {
    ConsumerState.BLOCKED: StallStep.WAITING_FOR_PARENT,
    ConsumerState.STARTING: StallStep.STARTING,
    ConsumerState.ENDING: StallStep.ENDING,
    ConsumerState.LEAVING: StallStep.LEAVING,
}


@dataclass(slots=True)
class _Watched:
    """One incarnation of a held lease.

    Attributes:
        held: The lease.
        moved_at: Time of the last movement (monotonic seconds).
        told_at: When it was last reported as stalled (monotonic seconds). None: it is not stalled.
    """

    held: Held
    moved_at: float
    told_at: float | None = None


class Successes:
    """What a worker could do since the last look, from its events. Any thread may send them.

    Attributes:
        is_useful: Whether it has read, renewed or committed.
        last_error: The last error of a call.
    """

    def __init__(self) -> None:
        self.is_useful = True
        self.last_error = ""
        self._succeeded = {LeaseTask.DISCOVERY: False, LeaseTask.REPORT: False}

    @property
    def has_reported(self) -> bool:
        """Whether its last discovery and report succeeded."""
        return all(self._succeeded.values())

    def noting(self, events: EventSink) -> EventSink:
        """Return an event sink that notes what the worker could do, and passes events on."""

        def take(event: Event) -> None:
            self._note(event)
            events(event)

        return take

    def _note(self, event: Event) -> None:
        if isinstance(event, BatchCommitted):
            self.is_useful = True
        elif isinstance(event, ReadFinished):
            self.is_useful = self.is_useful or event.succeeded
        elif isinstance(event, TaskFinished):
            if event.task is LeaseTask.RENEWAL:
                self.is_useful = self.is_useful or event.leases > 0
            else:
                self._succeeded[event.task] = event.succeeded
        elif isinstance(event, AwsTrouble):
            self.last_error = event.error


class Watchdog:
    """Report shards that stand still and a worker that is hung, and end one that is of no use.

    The thread that renews the leases calls `look` after it has renewed them, because the processing
    thread may hang. `look` reads single attributes of consumers, which the processing thread
    changes. At worst a report is one call late.

    - *Stalled*: a held lease that has not moved for `worker.shard_stalled_after_millis`.
    - *Hung*: the processing thread is in one step for `worker.hung_after_millis`, while records
      wait. After `worker.stop_hung_after_millis` the worker is given up.
    - *Useless*: the worker could neither read, renew nor commit for `worker.useless_after_millis`.
      A worker without leases is as it should be while it finds out that it has none, and writes
      its row.

    The first two are reported again whenever their time has passed again.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        lifecycle: The consumers of the leases.
        source: Reports the read state of each shard.
        activity: What the processing thread does.
        successes: What the worker could do.
        stop: Is set when the worker is useless, so that steps that repeat their calls end.
        calls: Returns the running calls of record processors, the longest first. One that runs for
            `hung_after_millis` is reported as a step that hangs, although the other shards go on.

    Attributes:
        stalled: Stalled leases at the last look, those that stand still longest first.
        hung: The state at the last look. None: the worker is not hung.
        over: Set when the processing thread is given up. None: nobody waits for that.
        gave_up: Whether it was given up.
        is_useless: Whether the worker is useless.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        lifecycle: Lifecycle,
        source: BatchSource,
        activity: Activity,
        successes: Successes,
        stop: StopSignal,
        calls: Callable[[], Sequence[RunningCall]] = tuple,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._lifecycle = lifecycle
        self._source = source
        self._activity = activity
        self._successes = successes
        self._stop = stop
        self._calls = calls
        settings = dependencies.settings.worker
        self._stalled_seconds = settings.shard_stalled_after_millis / 1000
        self._watched: dict[str, _Watched] = {}
        self.stalled: tuple[StalledLease, ...] = ()
        self._hung_seconds = settings.hung_after_millis / 1000
        self._step = Lasting(self._hung_seconds)
        self._observed: Doing | None = None
        self._told: tuple[float, float] | None = None
        stop_millis = settings.stop_hung_after_millis
        self._stop_seconds = None if stop_millis is None else stop_millis / 1000
        self.hung: HungState | None = None
        self.over: StopSignal | None = None
        self.gave_up = False
        self._useless_seconds = settings.useless_after_millis / 1000
        self._useless = Lasting(self._useless_seconds)
        self._has_looked = False
        self._read_at = -math.inf
        self.is_useless = False

    def look(self, *, must_be_useful: bool) -> None:
        """Look once.

        Args:
            must_be_useful: Whether the worker does all of its tasks, so that it may be useless.
        """
        now = self._dependencies.clock.monotonic()
        self._look_for_stalls(now)
        self._look_for_hang(now)
        if must_be_useful:
            self._look_for_use(now)

    # -- shards that stand still

    def _look_for_stalls(self, now: float) -> None:
        consumers = dict(self._lifecycle.consumers)
        watched: dict[str, _Watched] = {}
        found: list[StalledLease] = []
        for held in self._leases.held():
            if held.lease.ended:
                continue
            key = held.lease_key
            consumer = consumers.get(key)
            if consumer is not None and consumer.held is not held:
                consumer = None
            one = watched[key] = self._of(held, now)
            if consumer is not None:
                moved_at = consumer.last_moved(self._source.state_of(key))
                one.moved_at = max(one.moved_at, moved_at)
            seconds = now - one.moved_at
            if seconds < self._stalled_seconds:
                one.told_at = None
                continue
            step, error = self._step_of(held, consumer)
            found.append(StalledLease(key, step, seconds, error))
            if one.told_at is None or now - one.told_at >= self._stalled_seconds:
                one.told_at = now
                self._dependencies.events(
                    ShardStalled(self._dependencies.worker_id, key, step, seconds, error)
                )
        self._watched = watched
        self.stalled = tuple(sorted(found, key=lambda lease: (-lease.seconds, lease.lease_key)))

    def _of(self, held: Held, now: float) -> _Watched:
        known = self._watched.get(held.lease_key)
        return known if known is not None and known.held is held else _Watched(held, now)

    def _step_of(self, held: Held, consumer: ShardConsumer | None) -> tuple[StallStep, str | None]:
        if consumer is None:
            if held.lease.in_handoff:
                return StallStep.LEAVING, None
            known = self._lifecycle.reads_stream_of(held.lease)
            return (StallStep.QUEUED if known else StallStep.UNKNOWN_STREAM), None
        if consumer.in_batch:
            return StallStep.PROCESSING, consumer.error
        if consumer.state is not ConsumerState.READING:
            return _STEPS.get(consumer.state, StallStep.QUEUED), consumer.error
        reading = self._source.state_of(consumer.lease_key)
        if reading is not None and reading.has_waiting:
            return StallStep.QUEUED, consumer.error
        return StallStep.READING, consumer.error or (None if reading is None else reading.error)

    # -- a processing thread that hangs

    def _look_for_hang(self, now: float) -> None:
        doing, calls = self._activity.now, self._calls()
        is_call = bool(calls) and calls[0].since <= doing.since
        if is_call:
            doing = Doing(HangStep.COMMITTING, calls[0].since, calls[0].thread, is_users=True)
        if self._observed != doing:
            self._observed = doing
            self._step.begin(doing.since)
        seconds = self._step.count(now)
        if doing.step is None or seconds < self._hung_seconds:
            self._resume()
            return
        if is_call:
            hung = [call for call in calls if now - call.since >= self._hung_seconds]
            waiting = tuple(sorted({call.lease_key for call in hung}))
        else:
            waiting = self._waiting(doing.since)
        if not waiting:
            self._resume()
            return
        self.hung = HungState(doing.step.value, seconds, len(waiting))
        told = self._told
        if told is None or told[0] != doing.since or now - told[1] >= self._hung_seconds:
            self._told = (doing.since, now)
            stacks = thread_stacks(doing.thread)
            self._dependencies.events(
                WorkerHung(self._dependencies.worker_id, doing.step, seconds, waiting, stacks)
            )
        if self._stop_seconds is not None and self.over is not None:
            self.gave_up = self.gave_up or seconds >= self._stop_seconds
            if self.gave_up:
                self.over.set()

    def _waiting(self, since: float) -> tuple[str, ...]:
        """Return the held leases that may have records that are not committed.

        A shard that was read to its end after `since` (monotonic seconds) has none. Any thread may
        call it.
        """
        consumers = dict(self._lifecycle.consumers)
        return tuple(
            held.lease_key
            for held in self._leases.held()
            if not held.lease.ended and self._is_behind(held, consumers.get(held.lease_key), since)
        )

    def _is_behind(self, held: Held, consumer: ShardConsumer | None, since: float) -> bool:
        if consumer is None or consumer.held is not held or consumer.in_batch:
            return True
        if consumer.state is not ConsumerState.READING:
            return consumer.state is not ConsumerState.ENDED
        reading = self._source.state_of(consumer.lease_key)
        if reading is None or reading.has_waiting or not reading.caught_up:
            return True
        return (reading.read_at or 0.0) <= since

    def _resume(self) -> None:
        self.hung = None
        if self._told is not None:
            self._told = None
            self._dependencies.events(WorkerResumed(self._dependencies.worker_id))

    def hung_sentence(self) -> str:
        """Return why a worker that was given up has ended."""
        step, seconds = (
            ("unknown", 0.0) if self.hung is None else (self.hung.step, self.hung.seconds)
        )
        return (
            f"the worker was hung in step {step} for {seconds:.0f} s "
            "(worker.stop_hung_after_millis); its leases are released, and no record is lost"
        )

    # -- a worker that can do nothing

    def _look_for_use(self, now: float) -> None:
        held = self._leases.held()
        states = [self._source.state_of(one.lease_key) for one in held]
        read_at = max((s.read_at for s in states if s and s.read_at is not None), default=-math.inf)
        is_idle = not held and self._successes.has_reported
        is_useful = self._successes.is_useful or is_idle or read_at > self._read_at
        if is_useful or not self._has_looked:
            self._useless.begin(now)
        seconds = self._useless.count(now)
        self._read_at = max(read_at, self._read_at)
        self._successes.is_useful, self._has_looked = False, True
        if seconds >= self._useless_seconds and not self.is_useless:
            self.is_useless = True
            self._stop.set()

    def useless_sentence(self) -> str:
        """Return why the worker has ended."""
        error = self._successes.last_error
        text = (
            f"the worker could neither read, renew nor commit for {self._useless.seconds:.0f} s "
            "(worker.useless_after_millis)"
        )
        return f"{text}; the last error is: {error}" if error else text

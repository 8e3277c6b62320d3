"""Watch a worker: shards that stand still, a step that hangs, a worker that can do nothing.

The processing thread notes its steps in `Activity`. The thread that renews the leases watches,
because the processing thread may hang. `Watchdog` reports held leases whose shards make no
progress, with the step that they wait in, and a step that lasts, with the calls of all threads. It
ends a worker that hangs for too long, and one that can neither read, renew nor commit.
"""

from __future__ import annotations

import faulthandler
import math
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, PartFailure
from kcl_pipeline.clock import Clock, Lasting, StopSignal
from kcl_pipeline.events import (
    HangStep,
    LeaseTask,
    ShardStalled,
    StallStep,
    WorkerHung,
    WorkerResumed,
)
from kcl_pipeline.kinesis.prefetch import ReadState
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.processors.thread import RunningCall
from kcl_pipeline.text import printable
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker.summary import StopReason
from kcl_pipeline.worker_status import HungState, StalledLease


class Doing(NamedTuple):
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

    def write(self, batch: Batch) -> Batch:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[PartFailure | None]:  # noqa: D102
        self._activity.enter(HangStep.WRITING)
        return self._writer.probe(slices)


_STEPS: Final = {
    ConsumerState.BLOCKED: StallStep.WAITING_FOR_PARENT,
    ConsumerState.STARTING: StallStep.STARTING,
    ConsumerState.ENDING: StallStep.ENDING,
    ConsumerState.LEAVING: StallStep.LEAVING,
}


@dataclass(slots=True)
class _Shard:
    """A held lease, as looks find it.

    Attributes:
        held: The lease.
        gained_at: `Held.renewed_at` at the first look. A worker that writes no row can gain a lease
            again and again, which is no renewal.
        moved_at: When the shard last moved. The first look is the first movement.
        told_at: When it was last reported as stalled.
        consumer: Its consumer. None: there is none yet.
        reading: The read state of its shard. None: it is not read.
    """

    held: Held
    gained_at: float
    moved_at: float
    told_at: float = -math.inf
    consumer: ShardConsumer | None = None
    reading: ReadState | None = None

    def look(self, consumer: ShardConsumer | None, reading: ReadState | None) -> None:
        """Note what a look finds. `consumer` may be of an earlier incarnation of the lease."""
        self.consumer = consumer if consumer is not None and consumer.held is self.held else None
        self.reading = reading
        if self.consumer is not None:
            self.moved_at = max(self.moved_at, self.consumer.last_moved(reading))

    def used_at(self) -> float:
        """Return when the worker last read the shard, renewed the lease, or committed a batch."""
        times = [-math.inf]
        if self.held.renewed_at > self.gained_at:
            times.append(self.held.renewed_at)
        if self.reading is not None and self.reading.read_at is not None:
            times.append(self.reading.read_at)
        if self.consumer is not None and self.consumer.state is not ConsumerState.BLOCKED:
            times.append(self.consumer.moved_at)
        return max(times)

    def is_behind(self, since: float) -> bool:
        """Return whether there may be records that are not committed.

        A shard that was read to its tip at or after `since` (monotonic seconds) has none. One that
        ends still needs the processing thread.
        """
        consumer, reading = self.consumer, self.reading
        if consumer is None or consumer.state is ConsumerState.ENDING:
            return True
        has_waiting = reading is not None and reading.has_waiting
        return has_waiting or not consumer.is_read(reading, since)

    def step(self, *, is_known: bool) -> tuple[StallStep, str | None]:
        """Return the step that the shard waits in, and the last error.

        Args:
            is_known: Whether the stream of the lease is known.
        """
        consumer, reading = self.consumer, self.reading
        if consumer is None:
            if self.held.lease.in_handoff:
                return StallStep.LEAVING, None
            return (StallStep.QUEUED if is_known else StallStep.UNKNOWN_STREAM), None
        if consumer.in_batch:
            return StallStep.PROCESSING, consumer.error
        if consumer.state is not ConsumerState.READING:
            return _STEPS.get(consumer.state, StallStep.QUEUED), consumer.error
        if reading is not None and reading.has_waiting:
            return StallStep.QUEUED, consumer.error
        return StallStep.READING, consumer.error or (None if reading is None else reading.error)


class Ending(NamedTuple):
    """Why the watchdog ends a worker: `HUNG` or `USELESS`, and a sentence."""

    reason: StopReason
    sentence: str


class Watchdog:
    """Report shards that stand still and a worker that is hung, and end one that is of no use.

    The thread that renews the leases calls `look` after it has renewed them, because the processing
    thread may hang. `look` reads single attributes of consumers, which the processing thread
    changes. At worst a report is one call late.

    - *Stalled*: a held lease that has not moved for `worker.shard_stalled_after_millis`.
    - *Hung*: the processing thread is in one step for `worker.hung_after_millis`, while records
      wait. After `worker.stop_hung_after_millis` the worker ends.
    - *Useless*: the worker could neither read, renew nor commit for `worker.useless_after_millis`.
      It ends. A worker without leases is as it should be while it finds out that it has none, and
      writes its row.

    The first two are reported again whenever their time has passed again.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        lifecycle: The consumers of the leases.
        source: Reports the read state of each shard.
        activity: What the processing thread does.
        stop: Is set when the worker is useless, so that steps that repeat their calls end.
        calls: Returns the running calls of record processors, the longest first. One that runs for
            `hung_after_millis` is reported as a step that hangs, although the other shards go on.

    Attributes:
        stalled: Stalled leases at the last look, those that stand still longest first.
        hung: The state at the last look. None: the worker is not hung.
        ending: Why the worker must end. None: it goes on.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        lifecycle: Lifecycle,
        source: BatchSource,
        activity: Activity,
        stop: StopSignal,
        calls: Callable[[], Sequence[RunningCall]] = tuple,
    ) -> None:
        self._clock = dependencies.clock
        self._events = dependencies.events
        self._worker_id = dependencies.worker_id
        self._leases = leases
        self._lifecycle = lifecycle
        self._source = source
        self._activity = activity
        self._stop = stop
        self._calls = calls
        settings = dependencies.settings.worker
        self._stalled_seconds = settings.shard_stalled_after_millis / 1000
        self._hung_seconds = settings.hung_after_millis / 1000
        stop_millis = settings.stop_hung_after_millis
        self._stop_seconds = math.inf if stop_millis is None else stop_millis / 1000
        self._useless_seconds = settings.useless_after_millis / 1000
        self._shards: dict[Held, _Shard] = {}
        self.stalled: tuple[StalledLease, ...] = ()
        self._doing: Doing | None = None
        self._step = Lasting(self._hung_seconds)
        self._told_seconds = 0.0
        """For how long the step had lasted when it was last reported."""
        self.hung: HungState | None = None
        self._used_at = -math.inf
        self._useless = Lasting(self._useless_seconds)
        self.ending: Ending | None = None

    def look(self, errors: Mapping[LeaseTask, str | None] | None) -> None:
        """Look once.

        Args:
            errors: The errors of the last discovery and report; None for one that has succeeded,
                "" for one that has not ended yet. None instead of all: the worker has neither, and
                cannot be useless.
        """
        now, consumers, before = self._clock.monotonic(), self._lifecycle.consumers, self._shards
        self._shards = {
            held: before.get(held) or _Shard(held, held.renewed_at, moved_at=now)
            for held in self._leases.held()
        }
        for held, shard in self._shards.items():
            shard.look(consumers.get(held.lease_key), self._source.state_of(held.lease_key))
        unfinished = [one for one in self._shards.values() if not one.held.lease.ended]
        self._look_for_stalls(unfinished, now)
        self._look_for_hang(unfinished, now)
        if errors is not None:
            self._look_for_use(errors, now)

    def _look_for_stalls(self, shards: Sequence[_Shard], now: float) -> None:
        stalled: list[StalledLease] = []
        for shard in shards:
            held, seconds = shard.held, now - shard.moved_at
            if seconds < self._stalled_seconds:
                continue
            step, error = shard.step(is_known=self._lifecycle.reads_stream_of(held.lease))
            stalled.append(StalledLease(held.lease_key, step, seconds, error))
            if now - shard.told_at >= self._stalled_seconds:
                shard.told_at = now
                self._events(ShardStalled(self._worker_id, held.lease_key, step, seconds, error))
        self.stalled = tuple(sorted(stalled, key=lambda lease: (-lease.seconds, lease.lease_key)))

    def _look_for_hang(self, shards: Sequence[_Shard], now: float) -> None:
        doing, calls = self._activity.now, self._calls()
        # The call of a processor that began before the present step is what lasts longest.
        is_call = bool(calls) and calls[0].since <= doing.since
        if is_call:
            doing = Doing(HangStep.COMMITTING, calls[0].since, calls[0].thread, is_users=True)
        if self._doing != doing:
            self._doing, self._told_seconds = doing, 0.0
            self._step.begin(doing.since)
        seconds = self._step.count(now)
        waiting: Collection[str] = ()
        if is_call:
            waiting = {c.lease_key for c in calls if now - c.since >= self._hung_seconds}
        elif seconds >= self._hung_seconds:
            waiting = [s.held.lease_key for s in shards if s.is_behind(doing.since)]
        if doing.step is None or seconds < self._hung_seconds or not waiting:
            if self.hung is not None:
                self._events(WorkerResumed(self._worker_id))
            self.hung, self._told_seconds = None, 0.0
            return
        self.hung = HungState(doing.step.value, seconds, len(waiting))
        # Not at multiples of the time: after a pause of the process the next one may be near.
        if seconds - self._told_seconds >= self._hung_seconds:
            self._told_seconds, stacks = seconds, thread_stacks(doing.thread)
            keys = tuple(sorted(waiting))
            self._events(WorkerHung(self._worker_id, doing.step, seconds, keys, stacks))
        if seconds >= self._stop_seconds and self.ending is None:
            sentence = (
                f"the worker was hung in step {doing.step} for {seconds:.0f} s "
                "(worker.stop_hung_after_millis); its leases are released, and no record is lost"
            )
            self.ending = Ending(StopReason.HUNG, sentence)

    def _look_for_use(self, errors: Mapping[LeaseTask, str | None], now: float) -> None:
        shards = self._shards.values()
        used_at = max((0.0, *(shard.used_at() for shard in shards)))
        is_idle = not shards and all(error is None for error in errors.values())
        if used_at > self._used_at or is_idle:  # also at the first look
            self._useless.begin(now)
        self._used_at, seconds = max(used_at, self._used_at), self._useless.count(now)
        if seconds < self._useless_seconds or self.ending is not None:
            return
        text = (
            f"the worker could neither read, renew nor commit for {seconds:.0f} s "
            "(worker.useless_after_millis)"
        )
        last_errors = [*errors.values(), *(shard.step(is_known=True)[1] for shard in shards)]
        error = next(filter(None, last_errors), None)
        sentence = f"{text}; the last error is: {error}" if error else text
        self.ending = Ending(StopReason.USELESS, sentence)
        self._stop.set()


MAX_CHARACTERS: Final = 20_000
_CALLS: Final = " (most recent call first):"
_THREAD: Final = re.compile(r"0x([0-9a-f]+)")


def thread_stacks(first: int) -> str:
    """Return the calls of all threads, of each the newest call first, as `faulthandler` does.

    Threads with the same calls, such as those of a pool that wait for work, are shown once. The
    text has names of files and functions and line numbers. It has no source lines and no
    values of variables, because they may contain records or secrets. At most 100 threads, 100 calls
    of each (the limits of `faulthandler`) and `MAX_CHARACTERS` characters are returned. If no
    temporary file can be written, the text says why.

    The frames of `sys._current_frames` are not used: while Python code walks them, their threads go
    on, and the process ends with a segmentation fault (CPython 3.11.7). `faulthandler` walks all of
    them before another thread runs. It writes to a file descriptor only.

    Args:
        first: Identifier of the thread that comes first.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            dump = file.read().decode("ascii", "backslashreplace")
    except OSError as error:
        return f"(the calls of the threads are not known: {printable(str(error))})"
    stacks = sorted(dump.strip().split("\n\n"), key=lambda stack: f"{first:x} " not in stack)
    names = {thread.ident: printable(thread.name) for thread in threading.enumerate()}
    threads_by_calls = defaultdict[str, list[str]](list)
    for stack in stacks:
        thread, _, calls = stack.partition(_CALLS)
        name = _THREAD.sub(lambda match: names.get(int(match[1], 16), match[0]), thread)
        threads_by_calls[calls].append(name)
    text = "\n\n".join(
        f"{threads[0]}{f' and {len(threads) - 1} more' if threads[1:] else ''}{_CALLS}{calls}"
        for calls, threads in threads_by_calls.items()
    )
    cut = "\n... (cut)"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - len(cut)] + cut

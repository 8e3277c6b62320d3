"""Watch a worker: shards that stand still, a step that hangs, a worker that can do nothing.

The processing thread notes its steps in `Activity`. The thread that renews the leases watches,
because the processing thread may hang. `Watchdog` reports a step that lasts, with the calls of all
threads, and held leases whose shards make no progress, with the step that they wait in. It ends a
worker that was given up, whose leases are released, and one that can neither read, renew nor
commit.
"""

from __future__ import annotations

import faulthandler
import math
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, PartFailure, Written
from kcl_pipeline.clock import Clock, Lasting, StopSignal
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
from kcl_pipeline.kinesis.prefetch import ReadState
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.processors.thread import RunningCall
from kcl_pipeline.text import printable
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources import BatchSource
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

    def write(self, batch: Batch) -> Written:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, slices: Sequence[pa.Table]) -> Sequence[PartFailure | None]:  # noqa: D102
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


_STEPS: Final = {
    ConsumerState.BLOCKED: StallStep.WAITING_FOR_PARENT,
    ConsumerState.STARTING: StallStep.STARTING,
    ConsumerState.ENDING: StallStep.ENDING,
    ConsumerState.LEAVING: StallStep.LEAVING,
}


@dataclass(frozen=True, slots=True)
class _Shard:
    """What a look finds of a held lease.

    Attributes:
        held: The lease.
        consumer: Its consumer. None: there is none yet.
        reading: The read state of its shard. None: it is not read.
    """

    held: Held
    consumer: ShardConsumer | None
    reading: ReadState | None

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


class _Reports:
    """When what lasts was reported: first after its limit, and again whenever that has passed."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._reported: dict[object, float] = {}
        """For how long it had lasted at its last report."""

    def is_due(self, key: object, seconds: float) -> bool:
        """Return whether something that has lasted for this time must be reported now."""
        before = self._reported.get(key, 0.0)
        if seconds < before:  # It has ended, and begun again.
            before = 0.0
        # Not multiples of the limit: after a pause of the process (SIGSTOP) the next may be near.
        is_due = seconds - before >= self.limit_seconds
        self._reported[key] = seconds if is_due else before
        return is_due

    def keep(self, keys: Collection[object]) -> None:
        """Forget all but these."""
        self._reported = {key: self._reported[key] for key in keys if key in self._reported}


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
        # By lease key: the lease that was held, and when it last moved
        self._moved: dict[str, tuple[Held, float]] = {}
        self._stalls = _Reports(settings.shard_stalled_after_millis / 1000)
        self.stalled: tuple[StalledLease, ...] = ()
        self._hangs = _Reports(settings.hung_after_millis / 1000)
        self._step = Lasting(self._hangs.limit_seconds)
        self._doing: Doing | None = None
        stop_millis = settings.stop_hung_after_millis
        self._stop_seconds = math.inf if stop_millis is None else stop_millis / 1000
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
        now, consumers = self._dependencies.clock.monotonic(), dict(self._lifecycle.consumers)
        held_leases = self._leases.held()
        shards: list[_Shard] = []
        for held in held_leases:
            consumer = consumers.get(held.lease_key)
            if consumer is not None and consumer.held is not held:
                consumer = None  # of an earlier incarnation
            shards.append(_Shard(held, consumer, self._source.state_of(held.lease_key)))
        unfinished = [shard for shard in shards if not shard.held.lease.ended]
        self._look_for_stalls(unfinished, now)
        self._look_for_hang(unfinished, now)
        if must_be_useful:
            self._look_for_use(shards, now)

    def _look_for_stalls(self, shards: Sequence[_Shard], now: float) -> None:
        before, self._moved = self._moved, {}
        stalled: list[StalledLease] = []
        for shard in shards:
            held, key, consumer = shard.held, shard.held.lease_key, shard.consumer
            known = before.get(key)
            moved_at = known[1] if known is not None and known[0] is held else now
            if consumer is not None:
                moved_at = max(moved_at, consumer.last_moved(shard.reading))
            self._moved[key] = held, moved_at
            seconds = now - moved_at
            is_due = self._stalls.is_due(key, seconds)
            if seconds < self._stalls.limit_seconds:
                continue
            step, error = shard.step(is_known=self._lifecycle.reads_stream_of(held.lease))
            stalled.append(StalledLease(key, step, seconds, error))
            if is_due:
                self._dependencies.events(
                    ShardStalled(self._dependencies.worker_id, key, step, seconds, error)
                )
        self._stalls.keep(self._moved)
        self.stalled = tuple(sorted(stalled, key=lambda lease: (-lease.seconds, lease.lease_key)))

    def _look_for_hang(self, shards: Sequence[_Shard], now: float) -> None:
        doing, calls = self._activity.now, self._calls()
        is_call = bool(calls) and calls[0].since <= doing.since
        if is_call:
            doing = Doing(HangStep.COMMITTING, calls[0].since, calls[0].thread, is_users=True)
        if self._doing != doing:
            self._doing = doing
            self._step.begin(doing.since)
        seconds, limit_seconds = self._step.count(now), self._hangs.limit_seconds
        waiting: Collection[str] = ()
        if is_call:
            waiting = {c.lease_key for c in calls if now - c.since >= limit_seconds}
        elif seconds >= limit_seconds:
            waiting = [s.held.lease_key for s in shards if s.is_behind(doing.since)]
        if doing.step is None or seconds < limit_seconds or not waiting:
            if self.hung is not None:
                self._dependencies.events(WorkerResumed(self._dependencies.worker_id))
            self.hung = None
            self._hangs.keep(())
            return
        self.hung = HungState(doing.step.value, seconds, len(waiting))
        if self._hangs.is_due(doing, seconds):
            keys = tuple(sorted(waiting))
            stacks = thread_stacks(doing.thread)
            self._dependencies.events(
                WorkerHung(self._dependencies.worker_id, doing.step, seconds, keys, stacks)
            )
        if self.over is not None and seconds >= self._stop_seconds:
            self.gave_up = True
            self.over.set()

    def hung_sentence(self) -> str:
        """Return why a worker that was given up has ended."""
        step, seconds = (
            ("unknown", 0.0) if self.hung is None else (self.hung.step, self.hung.seconds)
        )
        return (
            f"the worker was hung in step {step} for {seconds:.0f} s "
            "(worker.stop_hung_after_millis); its leases are released, and no record is lost"
        )

    def _look_for_use(self, shards: Sequence[_Shard], now: float) -> None:
        times = [shard.reading.read_at for shard in shards if shard.reading is not None]
        read_at = max((at for at in times if at is not None), default=-math.inf)
        is_idle = not shards and self._successes.has_reported
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

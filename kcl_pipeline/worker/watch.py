"""Watch a worker: what its processing thread does, which shards stand still, what it can do at all.

The thread that renews the leases looks, because the processing thread may hang:

- `Activity` is the step of the processing thread, and `HangWatch` reports a step that lasts, with
  the calls of all threads, and ends a worker that was given up. Its leases are released.
- `StallWatch` reports held leases whose shards make no progress, with the step that they wait in.
- `UselessWatch` ends a worker that can neither read, renew nor commit.
"""

from __future__ import annotations

import faulthandler
import math
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, Written
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
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.processors.thread import RunningCall
from kcl_pipeline.text import printable
from kcl_pipeline.worker.consumer import ConsumerState, Lifecycle, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.sources import BatchSource
from kcl_pipeline.worker_status import HungState, StalledLease


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


class StallWatch:
    """Report shards that have not moved, once per `worker.shard_stalled_after_millis`.

    The thread that renews the leases calls `look`, because the processing thread may hang. `look`
    reads single attributes of consumers, which the processing thread changes. At worst a report is
    one call late.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
        lifecycle: The consumers of the leases.
        source: Reports the read state of each shard.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        leases: HeldLeases,
        lifecycle: Lifecycle,
        source: BatchSource,
    ) -> None:
        self._dependencies = dependencies
        self._leases = leases
        self._lifecycle = lifecycle
        self._source = source
        self._after_seconds = dependencies.settings.worker.shard_stalled_after_millis / 1000
        self._watched: dict[str, _Watched] = {}
        self.stalled_leases: tuple[StalledLease, ...] = ()
        """Stalled leases at the last check, those that stand still longest first."""

    @property
    def stalled(self) -> Mapping[str, StallStep]:
        """Stalled leases at the last check, and the step that each waits in."""
        return {one.lease_key: StallStep(one.step) for one in self.stalled_leases}

    def look(self) -> None:
        """Check all held leases once."""
        now = self._dependencies.clock.monotonic()
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
            one.moved_at = max(one.moved_at, self._moved_at(consumer))
            seconds = now - one.moved_at
            if seconds < self._after_seconds:
                one.told_at = None
                continue
            step, error = self._step_of(held, consumer)
            found.append(StalledLease(key, step, seconds, error))
            if one.told_at is None or now - one.told_at >= self._after_seconds:
                one.told_at = now
                self._dependencies.events(
                    ShardStalled(self._dependencies.worker_id, key, step, seconds, error)
                )
        self._watched = watched
        self.stalled_leases = tuple(
            sorted(found, key=lambda lease: (-lease.seconds, lease.lease_key))
        )

    def waiting(self, since: float) -> tuple[str, ...]:
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

    def _of(self, held: Held, now: float) -> _Watched:
        known = self._watched.get(held.lease_key)
        return known if known is not None and known.held is held else _Watched(held, now)

    def _moved_at(self, consumer: ShardConsumer | None) -> float:
        """Return the time of the last movement (monotonic seconds).

        A read counts as movement only while no records of the shard wait to be committed. A shard
        whose last batch failed is read repeatedly. It moves when a batch is committed, or when a
        read finds no records.
        """
        if consumer is None:
            return float("-inf")
        reading = self._source.state_of(consumer.lease_key)
        is_read = (
            consumer.state is ConsumerState.READING
            and not consumer.in_batch
            and reading is not None
            and reading.read_at is not None
            and not reading.has_waiting
            and (reading.caught_up or not consumer.restarted)
        )
        if not is_read or reading is None or reading.read_at is None:
            return consumer.moved_at
        return max(consumer.moved_at, reading.read_at)

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


_SHORTEST_GAP_SECONDS: Final = 5.0
"""A time between two looks that counts in full, however short the limit of a watch is."""


class HangWatch:
    """Report the worker as hung, once per `worker.hung_after_millis`.

    The thread that renews the leases calls `look` after it has renewed them. The time between two
    looks counts up to a quarter of `hung_after_millis`: while the worker is paused as a whole
    (SIGSTOP), its processing thread cannot make progress.

    Args:
        dependencies: The dependencies of the worker.
        activity: What the processing thread does.
        waiting: Returns the held leases that may have records that are not committed, unless they
            were read to their end after a time (monotonic seconds).
        calls: Returns the running calls of record processors, the longest first. One that runs for
            `hung_after_millis` is reported as a step that hangs, although the other shards go on.

    Attributes:
        hung: The state at the last look. None: the worker is not hung.
        over: Set when the watch gives the processing thread up. None: nobody waits for that.
        gave_up: Whether it has given the thread up.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        activity: Activity,
        waiting: Callable[[float], tuple[str, ...]],
        calls: Callable[[], Sequence[RunningCall]] = tuple,
    ) -> None:
        self._dependencies = dependencies
        self._activity = activity
        self._waiting = waiting
        self._calls = calls
        settings = dependencies.settings.worker
        self._after_seconds = settings.hung_after_millis / 1000
        self._longest_gap_seconds = max(self._after_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._observed: Doing | None = None
        self._observed_at = 0.0
        self._seconds = 0.0
        self._told: tuple[float, float] | None = None
        self.hung: HungState | None = None
        stop_millis = settings.stop_hung_after_millis
        self._stop_seconds = None if stop_millis is None else stop_millis / 1000
        self.over: StopSignal | None = None
        self.gave_up = False

    def look(self) -> None:
        """Check the processing thread once."""
        now, doing, calls = self._dependencies.clock.monotonic(), self._activity.now, self._calls()
        is_call = bool(calls) and calls[0].since <= doing.since
        if is_call:
            doing = Doing(HangStep.COMMITTING, calls[0].since, calls[0].thread, is_users=True)
        seconds = self._seconds_in(doing, now)
        if doing.step is None or seconds < self._after_seconds:
            self._resume()
            return
        if is_call:
            hung = [call for call in calls if now - call.since >= self._after_seconds]
            waiting = tuple(sorted({call.lease_key for call in hung}))
        else:
            waiting = self._waiting(doing.since)
        if not waiting:
            self._resume()
            return
        self.hung = HungState(doing.step.value, seconds, len(waiting))
        told = self._told
        if told is None or told[0] != doing.since or now - told[1] >= self._after_seconds:
            self._told = (doing.since, now)
            stacks = thread_stacks(doing.thread)
            self._dependencies.events(
                WorkerHung(self._dependencies.worker_id, doing.step, seconds, waiting, stacks)
            )
        if self._stop_seconds is not None and self.over is not None:
            self.gave_up = self.gave_up or seconds >= self._stop_seconds
            if self.gave_up:
                self.over.set()

    def _seconds_in(self, doing: Doing, now: float) -> float:
        """Return for how long the step has lasted while this worker ran."""
        if self._observed != doing:
            self._observed, self._observed_at, self._seconds = doing, doing.since, 0.0
        self._seconds += min(now - self._observed_at, self._longest_gap_seconds)
        self._observed_at = now
        return self._seconds

    def sentence(self) -> str:
        """Return why a worker that was given up has ended."""
        step, seconds = (
            ("unknown", 0.0) if self.hung is None else (self.hung.step, self.hung.seconds)
        )
        return (
            f"the worker was hung in step {step} for {seconds:.0f} s "
            "(worker.stop_hung_after_millis); its leases are released, and no record is lost"
        )

    def _resume(self) -> None:
        self.hung = None
        if self._told is not None:
            self._told = None
            self._dependencies.events(WorkerResumed(self._dependencies.worker_id))


class UselessWatch:
    """Notes when the worker last read, renewed or committed. Any thread may send events.

    A worker without leases is as it should be while it finds out that it has none, and writes its
    row. The thread that renews the leases calls `look`. The time between two looks counts up to a
    quarter of `useless_after_millis`: a worker that was paused as a whole (SIGSTOP) can do nothing.

    Args:
        dependencies: The dependencies of the worker.
        stop: Is set when the worker is useless, so that steps that repeat their calls end.

    Attributes:
        is_useless: Whether the worker was useless for `worker.useless_after_millis`.
    """

    def __init__(self, dependencies: WorkerDependencies, stop: StopSignal) -> None:
        self._clock = dependencies.clock
        self._stop = stop
        self._after_seconds = dependencies.settings.worker.useless_after_millis / 1000
        self._longest_gap_seconds = max(self._after_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._useful = True
        self._looked_at: float | None = None
        self._seconds = 0.0
        self._read_at = -math.inf
        self._succeeded = {LeaseTask.DISCOVERY: False, LeaseTask.REPORT: False}
        self._last_error = ""
        self.is_useless = False

    def noting(self, events: EventSink) -> EventSink:
        """Return an event sink that notes what the worker could do, and passes events on."""

        def take(event: Event) -> None:
            self._note(event)
            events(event)

        return take

    def look(self, leases: HeldLeases, source: BatchSource) -> None:
        """Check the worker once."""
        now = self._clock.monotonic()
        held = leases.held()
        states = [source.state_of(one.lease_key) for one in held]
        read_at = max((s.read_at for s in states if s and s.read_at is not None), default=-math.inf)
        is_idle = not held and all(self._succeeded.values())
        if self._useful or is_idle or read_at > self._read_at or self._looked_at is None:
            self._seconds = 0.0
        else:
            self._seconds += min(now - self._looked_at, self._longest_gap_seconds)
        self._read_at = max(read_at, self._read_at)
        self._useful, self._looked_at = False, now
        if self._seconds >= self._after_seconds and not self.is_useless:
            self.is_useless = True
            self._stop.set()

    def sentence(self) -> str:
        """Return why the worker has ended."""
        text = (
            f"the worker could neither read, renew nor commit for {self._seconds:.0f} s "
            "(worker.useless_after_millis)"
        )
        return f"{text}; the last error is: {self._last_error}" if self._last_error else text

    def _note(self, event: Event) -> None:
        if isinstance(event, BatchCommitted):
            self._useful = True
        elif isinstance(event, ReadFinished):
            self._useful = self._useful or event.succeeded
        elif isinstance(event, TaskFinished):
            if event.task is LeaseTask.RENEWAL:
                self._useful = self._useful or event.leases > 0
            else:
                self._succeeded[event.task] = event.succeeded
        elif isinstance(event, AwsTrouble):
            self._last_error = event.error

"""Keeping a bounded number of bytes ready: one prefetcher per worker, many shards, any number of
fetch threads.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, Event, EventSink
from kcl_pipeline.kinesis.chunks import split, with_oldest
from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.pacing import Pace

MAX_WAIT_SECONDS: Final = 0.2
"""A fetch thread looks again after this time at the latest, so that a new shard is not kept
waiting.
"""

MIN_WAIT_SECONDS: Final = 0.001
FULL_SECONDS: Final = 0.05
STOP_CHECK_SECONDS: Final = 0.1
TOLERATED_THROTTLES: Final = 5


@runtime_checkable
class Reader(Protocol):
    """What is prefetched from: `reader.ShardReader` is one."""

    lease_key: str
    millis_behind_latest: int | None
    ended: bool
    last_bytes: int

    def read(self) -> Chunk | None:
        """One bounded step; None when it brought nothing new."""
        ...


@runtime_checkable
class PushedReader(Reader, Protocol):
    """A reader whose records come by themselves (`fanout.FanOutReader`): `read` makes no call for
    them and may be called every `poll_seconds`.
    """

    poll_seconds: float

    def close(self) -> None:
        """The lease is gone; must not wait, and may come from another thread than `read`."""
        ...


@dataclass(frozen=True, slots=True)
class ReadState:
    """How the reading of one shard goes, since it was begun.

    Attributes:
        read_at: When it was last read with success (monotonic seconds); None: never.
        has_waiting: Whether something of it was read and waits to be taken.
        caught_up: Whether it was read to its tip or end, and nothing of it waits.
        error: Why the last read failed; None when it did not.
    """

    read_at: float | None
    has_waiting: bool
    caught_up: bool
    error: str | None


@dataclass(slots=True)
class _Buffered:
    serial: int
    chunk: Chunk
    cost: int
    fetched: float


@dataclass(slots=True, eq=False)
class _Slot:
    """One reader with its buffer.

    All but the reader itself is touched under the prefetcher's lock.
    """

    reader: Reader
    pace: Pace
    succeeded: float
    pushed: bool
    buffer: deque[_Buffered] = field(default_factory=deque)
    busy: bool = False
    reached_tip: bool = False
    last_cost: int = 0
    read_at: float | None = None
    error: str | None = None
    behind: int | None = None


class Prefetcher:
    """Reads many shards ahead of processing within one budget of bytes. All methods may be called
    by any thread.

    A fetch begins only while the buffer, with what the fetches under way brought last time, is
    below `prefetch_max_bytes`; so it is exceeded by one answer per fetch thread at most. One
    shard's errors are its own: it backs off and is reported by `AwsTrouble`. No lock is held while
    a reader reads or the event sink runs.
    """

    def __init__(
        self, settings: RetrievalSettings, clock: Clock, rng: random.Random, events: EventSink
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._events = events
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._serial = 0
        self._bytes = 0
        self._records = 0
        self._cost = 0
        self._fresh = False
        self._arrival: StopSignal | None = None

    @property
    def buffered_bytes(self) -> int:
        """Payload bytes (`Chunk.bytes`) that `take` could give."""
        return self._bytes

    def fills(self, max_records: int, max_bytes: int) -> bool:
        """Whether `take` could reach one of these limits, or nothing more is fetched before
        something is taken: waiting would bring no more.
        """
        with self._lock:
            return (
                self._records >= max_records
                or self._bytes >= max_bytes
                or self._cost >= self._settings.prefetch_max_bytes
            )

    def add(self, reader: Reader) -> None:
        """Begin to read a shard; a reader that its lease had before is dropped with its buffer."""
        now = self._clock.monotonic()
        pace = Pace(self._settings.idle_time_between_reads_in_millis / 1000, due=now)
        if isinstance(reader, PushedReader):
            pace = Pace(reader.poll_seconds, due=now, min_call_seconds=0.0)
        with self._lock:
            dropped = self._drop(reader.lease_key)
            self._slots[reader.lease_key] = _Slot(
                reader, pace, now, isinstance(reader, PushedReader)
            )
        if dropped is not reader:
            _close(dropped)

    def remove(self, lease_key: str) -> None:
        """Stop reading a shard and forget what is buffered of it, also what a fetch under way will
        bring. Unknown keys are ignored.
        """
        with self._lock:
            dropped = self._drop(lease_key)
        _close(dropped)

    def step(self) -> float:
        """One due fetch, if there is one and the buffer has room; returns the seconds until
        something may be due.
        """
        began = self._clock.monotonic()
        with self._lock:
            slot, wait = self._next(began)
            if slot is None:
                return wait
            slot.busy = True
        chunk: Chunk | None = None
        error: Exception | None = None
        try:
            chunk = slot.reader.read()
        except Exception as caught:  # noqa: BLE001
            # whatever fails for one shard must not stop the others; it is reported below
            error = caught
        except BaseException:
            slot.busy = False
            raise
        now = self._clock.monotonic()
        with self._lock:
            slot.busy = False
            events = (
                self._note_failure(slot, error, now)
                if error is not None
                else self._note_success(slot, chunk, began, now)
            )
        for event in events:
            self._events(event)
        return 0.0

    def take(
        self,
        max_records: int,
        max_bytes: int,
        *,
        left: Mapping[str, int] | None = None,
        turn: int = sys.maxsize,
    ) -> list[Chunk]:
        """What has waited longest, up to both limits: chunks of one lease follow each other, a
        chunk that does not fit is cut in two.

        A first record that alone exceeds `max_bytes` is given on its own, so that it never blocks
        its shard. `left`: how many records each lease may still give; one that is not named is not
        limited. `turn`: after so many records of a lease the others have theirs.
        """
        taken: list[Chunk] = []
        given: dict[str, int] = {}
        with self._lock:
            while (slot := self._oldest(given, left or {}, turn)) is not None and max_records > 0:
                head = slot.buffer[0]
                key = head.chunk.lease_key
                had = given.get(key, 0)
                part, rest = split(
                    head.chunk,
                    min(max_records, (left or {}).get(key, sys.maxsize) - had, turn - had % turn),
                    max_bytes,
                )
                if part is None and not taken:
                    part, rest = split(head.chunk, 1, head.chunk.bytes)
                if part is None:
                    break
                self._replace_head(slot, rest)
                taken.append(part)
                max_records -= part.records.num_rows
                max_bytes -= part.bytes
                given[key] = had + part.records.num_rows
        return taken

    def lag(self) -> dict[str, int]:
        """Milliseconds that each lease's next record is behind the tip of its shard, as far as
        known: the age of the oldest buffered record, else what the last answer said. The time in
        which nothing could be read counts.
        """
        now = self._clock.monotonic()
        known: dict[str, int] = {}
        with self._lock:
            for key, slot in self._slots.items():
                oldest = next(
                    (b.chunk.oldest_at for b in slot.buffer if b.chunk.oldest_at is not None), None
                )
                if oldest is not None:
                    known[key] = max(round((now - oldest) * 1000), 0)
                elif slot.behind is not None:
                    failing = now - slot.succeeded if slot.pace.failures else 0.0
                    known[key] = slot.behind + round(failing * 1000)
        return known

    def caught_up(self, lease_key: str) -> bool:
        """Whether the shard was read to its tip or end since it was added, and nothing of it is
        buffered. False for unknown keys.
        """
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.reached_tip and not slot.buffer

    def state_of(self, lease_key: str) -> ReadState | None:
        """How the reading of a shard goes; None for unknown keys."""
        with self._lock:
            slot = self._slots.get(lease_key)
            if slot is None:
                return None
            waiting = bool(slot.buffer)
            return ReadState(slot.read_at, waiting, slot.reached_tip and not waiting, slot.error)

    def busy(self, lease_key: str) -> bool:
        """Whether a fetch of this shard is under way, or what it brought is not buffered yet.

        False for unknown keys.
        """
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.busy

    def wait_for_data(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until something new is buffered since the last call, `stop` is set, or `seconds`
        passed; True when there is something new.
        """
        deadline = self._clock.monotonic() + seconds
        while not stop.is_set():
            with self._lock:
                if self._fresh:
                    self._fresh = False
                    return True
                arrival = self._arrival = self._clock.signal()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                break
            arrival.wait(min(left, STOP_CHECK_SECONDS))
        return False

    # Everything below runs under the lock.

    def _next(self, now: float) -> tuple[_Slot | None, float]:
        idle = [slot for slot in self._slots.values() if not slot.busy and not slot.reader.ended]
        if not idle:
            return None, MAX_WAIT_SECONDS
        slot = min(idle, key=lambda s: s.pace.due)
        if slot.pace.due > now:
            return None, min(max(slot.pace.due - now, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
        under_way = sum(s.last_cost for s in self._slots.values() if s.busy)
        if self._cost + under_way >= self._settings.prefetch_max_bytes:
            return None, FULL_SECONDS
        return slot, 0.0

    def _note_success(
        self, slot: _Slot, chunk: Chunk | None, began: float, now: float
    ) -> tuple[Event, ...]:
        reader = slot.reader
        behind = reader.millis_behind_latest
        at_tip = behind == 0 or (behind is None and chunk is None and not slot.pushed)
        slot.pace.succeeded(
            began, size=reader.last_bytes, at_tip=chunk is None if slot.pushed else at_tip
        )
        slot.succeeded = slot.read_at = now
        slot.error = None
        slot.behind = behind
        if self._slots.get(reader.lease_key) is not slot:
            return ()
        slot.reached_tip = slot.reached_tip or at_tip or reader.ended
        slot.last_cost = 0
        if chunk is not None:
            slot.last_cost = max(chunk.bytes, chunk.records.get_total_buffer_size())
            self._serial += 1
            chunk = with_oldest(chunk, now)
            slot.buffer.append(_Buffered(self._serial, chunk, slot.last_cost, now))
            self._bytes += chunk.bytes
            self._records += chunk.records.num_rows
            self._cost += slot.last_cost
            self._fresh = True
            if self._arrival is not None:
                self._arrival.set()
            if chunk.rejected is not None:
                return (chunk.rejected,)
        return ()

    def _note_failure(self, slot: _Slot, error: Exception, now: float) -> tuple[Event, ...]:
        throttled = isinstance(error, ThrottledError)
        slot.pace.failed(now, self._rng, throttled=throttled)
        if self._slots.get(slot.reader.lease_key) is not slot:
            return ()
        slot.error = f"{type(error).__name__}: {error}"
        if throttled and slot.pace.failures % TOLERATED_THROTTLES != 0:
            return ()
        return (AwsTrouble(f"read of {slot.reader.lease_key}", slot.error),)

    def _oldest(self, given: Mapping[str, int], left: Mapping[str, int], turn: int) -> _Slot | None:
        waiting = [
            (key, slot)
            for key, slot in self._slots.items()
            if slot.buffer and given.get(key, 0) < left.get(key, sys.maxsize)
        ]
        return min(
            waiting,
            key=lambda one: (given.get(one[0], 0) // turn, one[1].buffer[0].serial),
            default=(None, None),
        )[1]

    def _replace_head(self, slot: _Slot, rest: Chunk | None) -> None:
        head = slot.buffer.popleft()
        self._bytes -= head.chunk.bytes
        self._records -= head.chunk.records.num_rows
        self._cost -= head.cost
        if rest is not None:
            # The whole table stays in memory until its last part is taken.
            slot.buffer.appendleft(_Buffered(head.serial, rest, head.cost, head.fetched))
            self._bytes += rest.bytes
            self._records += rest.records.num_rows
            self._cost += head.cost

    def _drop(self, lease_key: str) -> Reader | None:
        slot = self._slots.pop(lease_key, None)
        if slot is None:
            return None
        self._bytes -= sum(b.chunk.bytes for b in slot.buffer)
        self._records -= sum(b.chunk.records.num_rows for b in slot.buffer)
        self._cost -= sum(b.cost for b in slot.buffer)
        slot.buffer.clear()
        return slot.reader


def _close(reader: Reader | None) -> None:
    if isinstance(reader, PushedReader):
        reader.close()

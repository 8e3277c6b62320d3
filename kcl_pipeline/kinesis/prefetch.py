"""Read many shards ahead of processing, within one limit of bytes.

`Pace` decides when a shard is read again, and how long records wait for a batch. `PageMemory`
counts the pages of records in the memory budget of the worker. `Slot` is one shard: what reads it,
its progress, and its records that wait. `Prefetcher` reads them all, and hands out records for
batches.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcl_pipeline.batch import Chunk, payload_bytes
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import BatchSettings, RetrievalSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, Event, EventSink, ReadFinished
from kcl_pipeline.memory import READ_BYTES, Kind, MemoryBudget
from kcl_pipeline.position import Position

MIN_CALL_SECONDS: Final = 0.2
"""A shard allows five calls per second, for all its consumers together."""

SHARD_BYTES_PER_SECOND: Final = 2_000_000
MAX_BACK_OFF_SECONDS: Final = 10.0

COMMON_TIME_SHARE: Final = 0.1
"""A read is delayed by at most this share of the idle time, to take place at the common time.

A shard whose reads are at other times comes nearer to the common time by as much with each read.
"""

_ROUNDING_SECONDS: Final = 1e-6

LAGGING_FACTOR: Final = 5
"""Records of a shard that is not read to its end wait this many times longer for a batch.

They are late already, and larger batches cost less.
"""


@dataclass(slots=True)
class Pace:
    """The time of the next read of one shard.

    A shard allows two megabytes per second. The limit is observed only after the service has
    throttled a read, because a throttled call costs no more than a wait.

    Attributes:
        idle_seconds: Wait at the end of the shard.
        due: Time of the next read, in monotonic seconds.
        failures: Failed reads in a row.
        keeps_byte_rate: Whether the byte rate is observed.
        min_call_seconds: Shortest time between two reads. 0 for a subscription, where a read makes
            no call.
        common_time: One of the times at which all shards are read, in monotonic seconds. They are
            as far apart as two delayed reads. None: the shard is read at its own times.
    """

    idle_seconds: float
    due: float = 0.0
    failures: int = 0
    keeps_byte_rate: bool = False
    min_call_seconds: float = MIN_CALL_SECONDS
    common_time: float | None = None
    _paid_until: float = 0.0

    def succeeded(self, began: float, *, size: int, at_tip: bool) -> None:
        """Note a read that began at `began` and returned `size` bytes."""
        self.failures = 0
        self._paid_until = max(self._paid_until, began) + size / SHARD_BYTES_PER_SECOND
        self.due = began + self.min_call_seconds
        if at_tip:
            self.due = self._at_common_time(began + max(self.idle_seconds, self.min_call_seconds))
        if self.keeps_byte_rate:
            self.due = max(self.due, self._paid_until)

    def _at_common_time(self, due: float) -> float:
        """Return the common time that follows `due`, if it follows soon enough; else `due`."""
        if self.common_time is None:
            return due
        longest = COMMON_TIME_SHARE * self.idle_seconds
        # The time from `due` to the next common time; they are one period apart
        delay = (self.common_time - due) % (self.idle_seconds + longest)
        return due + delay if delay <= longest + _ROUNDING_SECONDS else due

    def failed(self, now: float, rng: random.Random, *, throttled: bool) -> None:
        """Note a failed read.

        The wait doubles with every failure in a row. It is randomized, so that workers do not retry
        at the same time.
        """
        self.failures += 1
        wait = min(
            max(self.idle_seconds, MIN_CALL_SECONDS) * 2 ** min(self.failures - 1, 10),
            MAX_BACK_OFF_SECONDS,
        )
        self.due = now + wait * rng.uniform(0.5, 1.0)
        if throttled:
            self.keeps_byte_rate = True
            self.due = max(self.due, min(self._paid_until, now + MAX_BACK_OFF_SECONDS))


@dataclass(slots=True, eq=False)
class PageCost:
    """What a page of records costs in memory.

    Attributes:
        bytes: Bytes of its buffers. All of them stay until the last piece of the page is released.
        uses: Pieces in the buffer of the prefetcher and in batches.
        kind: As what it is counted.
    """

    bytes: int
    uses: int = 1
    kind: Kind = "prefetch"


class PageMemory:
    """Count pages from their read until their batch has ended. All calls need one lock.

    Args:
        budget: Counts the pages. None: nothing is counted, and there is no limit.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._reading = self._pages = 0
        self._taken: list[PageCost] = []

    def limit(self, prefetch_max_bytes: int) -> int:
        """Return the most bytes that may wait."""
        share = prefetch_max_bytes if self._budget is None else self._budget.share_bytes
        return min(prefetch_max_bytes, share)

    def may_read(self) -> bool:
        """Return whether a read may begin.

        One read may always begin while no record is held and none is read. So reading never stops
        for good, whatever else uses the memory.
        """
        if self._budget is None or not (self._reading or self._pages):
            return True
        return self._budget.may_read()

    def is_full(self) -> bool:
        """Return whether no read can begin until records are released."""
        return not self._reading and not self.may_read()

    def begin_read(self) -> None:
        """Count a read under way."""
        self._reading += 1
        self._change({"prefetch": READ_BYTES})

    def end_read(self) -> None:
        """Note that a read has ended without records."""
        self._reading -= 1
        self._change({"prefetch": -READ_BYTES})

    def end_read_with(self, size: int) -> PageCost:
        """Note that a read has ended, and count its page."""
        self._reading -= 1
        self._pages += 1
        self._change({"prefetch": size - READ_BYTES})
        return PageCost(size)

    def take(self, cost: PageCost, *, is_split: bool) -> None:
        """Note that a piece of a page is in a batch. If it is split, the rest still waits."""
        if self._budget is None:
            return
        if is_split:
            cost.uses += 1
        elif cost.kind == "prefetch":
            cost.kind = "batch"
            self._change({"prefetch": -cost.bytes, "batch": cost.bytes})
        self._taken.append(cost)

    def release(self, cost: PageCost) -> None:
        """Release a piece of a page."""
        cost.uses -= 1
        if not cost.uses:
            self._pages -= 1
            self._change({cost.kind: -cost.bytes})

    def release_taken(self) -> None:
        """Release what was taken, because its batch has ended."""
        taken, self._taken = self._taken, []
        for cost in taken:
            self.release(cost)

    def _change(self, changes: dict[Kind, int]) -> None:
        if self._budget is not None:
            self._budget.change(changes)


@runtime_checkable
class Reader(Protocol):
    """The source of records of one shard, such as `reader.ShardReader`."""

    lease_key: str
    millis_behind_latest: int | None
    ended: bool
    last_bytes: int

    @property
    def read_up_to_millis(self) -> int | None:
        """See `reader.GapWatch`."""

    def read(self) -> Chunk | None:
        """Read once, in bounded time; return None if there is nothing new."""


@runtime_checkable
class PushedReader(Reader, Protocol):
    """A reader that Kinesis pushes records to (`fan_out.source.FanOutReader`).

    `read` makes no call for them. It may be called every `poll_seconds`.
    """

    poll_seconds: float

    def close(self) -> None:
        """End reading. Must not wait. May be called by another thread than `read`."""


@dataclass(frozen=True, slots=True)
class ReadState:
    """The progress of reading one shard since it was added.

    Attributes:
        read_at: Time of the last successful read in monotonic seconds. None: never.
        has_waiting: Whether records are buffered, or are in the last batch of an executor fetch.
        caught_up: Whether the shard was read to its latest record or its end, and no record is
            buffered.
        error: Error of the last read. None: it succeeded.
        read_up_to_millis: See `reader.GapWatch`.
        behind_millis: Lag of the last response. None: unknown.
    """

    read_at: float | None
    has_waiting: bool
    caught_up: bool
    error: str | None
    read_up_to_millis: int | None = None
    behind_millis: int | None = None


@dataclass(slots=True)
class Buffered:
    """Records that wait, and the memory of the page that they belong to."""

    serial: int
    chunk: Chunk
    cost: PageCost
    fetched: float


@dataclass(slots=True, eq=False)
class Slot:
    """One reader and its buffer. All attributes but `reader` need the lock of the prefetcher."""

    reader: Reader
    pace: Pace
    succeeded: float
    pushed: bool
    buffer: deque[Buffered] = field(default_factory=deque)
    busy: bool = False
    reached_tip: bool = False
    last_cost: int = 0
    read_at: float | None = None
    error: str | None = None
    behind: int | None = None
    held: bool = False


def split(chunk: Chunk, max_records: int, max_bytes: int) -> tuple[Chunk | None, Chunk | None]:
    """Split off the first piece that fits both limits.

    Returns:
        The first piece and the rest. None for an empty one. The rest keeps `shard_end`.
    """
    rows = chunk.records.num_rows
    if rows <= max_records and chunk.bytes <= max_bytes:
        return chunk, None
    fitting = min(
        int(np.searchsorted(_running_bytes(chunk.records), max_bytes, side="right")), max_records
    )
    if fitting >= rows:
        return chunk, None
    return split_after(chunk, fitting) if fitting > 0 else (None, chunk)


def split_after(chunk: Chunk, rows: int) -> tuple[Chunk, Chunk]:
    """Split a chunk after `rows` rows, which are more than 0 and fewer than all."""
    first = chunk.records.slice(0, rows)
    last = first.slice(rows - 1)
    through = Position(
        last.column("sequence_number")[0].as_py(), last.column("sub_sequence_number")[0].as_py()
    )
    size = payload_bytes(first)
    head = replace(chunk, records=first, through=through, bytes=size, shard_end=None)
    rest = chunk.records.slice(rows)
    later = _arrival_seconds(rest, 0) - _arrival_seconds(first, 0)
    return head, replace(
        chunk,
        records=rest,
        after=through,
        bytes=max(chunk.bytes - size, 0),
        oldest_at=None if chunk.oldest_at is None else chunk.oldest_at + later,
    )


def with_oldest(chunk: Chunk, now: float) -> Chunk:
    """Return the chunk with `oldest_at`: when its first record arrived.

    The last record is `millis_behind_latest` behind the latest record of the shard. The first one
    arrived before the last one by the difference of their arrival times.

    Args:
        chunk: The chunk.
        now: When it was read, in monotonic seconds.
    """
    rows = chunk.records.num_rows
    if not rows:
        return chunk
    span = _arrival_seconds(chunk.records, rows - 1) - _arrival_seconds(chunk.records, 0)
    behind = (chunk.millis_behind_latest or 0) / 1000
    return replace(chunk, oldest_at=now - behind - max(span, 0.0))


def _arrival_seconds(records: pa.Table, row: int) -> float:
    return float(records.column("approximate_arrival_timestamp")[row].value) / 1e6


def _running_bytes(records: pa.Table) -> npt.NDArray[np.int64]:
    """Return the cumulative payload bytes of the rows."""
    sizes = np.zeros(records.num_rows, np.int64)
    for name in ("data", "partition_key"):
        start = 0
        for array in records.column(name).chunks:
            if len(array):
                offsets = np.frombuffer(array.buffers()[1], np.int32)[
                    array.offset : array.offset + len(array) + 1
                ]
                sizes[start : start + len(array)] += np.diff(offsets)
            start += len(array)
    return np.cumsum(sizes)


MAX_WAIT_SECONDS: Final = 0.2
"""Longest wait of a fetch thread, so that a shard that was added is read soon."""

MIN_WAIT_SECONDS: Final = 0.001
FULL_SECONDS: Final = 0.05
STOP_CHECK_SECONDS: Final = 0.1
TOLERATED_THROTTLES: Final = 5


class Prefetcher:
    """Reads many shards ahead of processing within one limit of bytes. Thread-safe.

    A read starts only while the buffer is below `prefetch_max_bytes`. Each running read counts as
    many bytes as the last read of its shard returned. So the limit is exceeded by at most one
    response per fetch thread. With a memory budget, a read also needs room in it, and the limit is
    a quarter of it at most. An error of one shard does not stop the others: the shard backs off,
    and `AwsTrouble` reports it. No lock is held during a read or a call of the event sink.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        clock: Clock,
        rng: random.Random,
        events: EventSink,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._settings = settings
        self._pages = PageMemory(memory)
        self._max_cost = self._pages.limit(settings.prefetch_max_bytes)
        self._clock = clock
        self._rng = rng
        self._events = events
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._serial = 0
        self._bytes = self._records = self._cost = 0
        self._began = clock.monotonic()
        self._taken_at = -math.inf
        self._fresh = False
        self._arrival: StopSignal | None = None

    def payload_for(self, cost: int) -> int:
        """Return how many payload bytes of the buffer have about this many bytes in memory."""
        with self._lock:
            return cost * self._bytes // self._cost if self._cost else cost

    def ready_in(self, settings: BatchSettings) -> float | None:
        """Return the seconds after which the buffer should become a batch; None while it is empty.

        Records wait for others for the batch interval (`LAGGING_FACTOR` times as long if their
        shard was not read to its end). They do not wait when the buffer reaches a limit, and when
        no read is under way or due in that time. Records that are pushed may come at any time: with
        them, batches are taken at most once per interval.
        """
        interval = settings.min_batch_interval_millis / 1000
        with self._lock:
            slots = [slot for slot in self._slots.values() if not slot.held]
            heads = [slot.buffer[0] for slot in slots if slot.buffer]
            if not heads:
                return None
            if (
                self._records >= settings.max_batch_records
                or self._bytes >= settings.max_batch_bytes
                or self._cost >= self._max_cost
                or self._pages.is_full()
            ):
                return 0.0
            deadline = min(
                head.fetched + interval * (LAGGING_FACTOR if head.chunk.millis_behind_latest else 1)
                for head in heads
            )
            reading = [slot for slot in slots if not slot.reader.ended]
            # A read that may bring more records before the deadline is worth the wait.
            is_read_near = any(not s.pushed and (s.busy or s.pace.due < deadline) for s in reading)
            if not is_read_near and any(slot.pushed for slot in reading):
                deadline = min(deadline, self._taken_at + interval)
            elif not is_read_near:
                return 0.0
        return max(deadline - self._clock.monotonic(), 0.0)

    def add(self, reader: Reader) -> None:
        """Start reading a shard. A former reader of its lease is dropped with its buffer."""
        now = self._clock.monotonic()
        idle_seconds = self._settings.idle_time_between_reads_in_millis / 1000
        pace = Pace(idle_seconds, due=now, common_time=self._began)
        if isinstance(reader, PushedReader):
            pace = Pace(reader.poll_seconds, due=now, min_call_seconds=0.0)
        with self._lock:
            dropped = self._drop(reader.lease_key)
            self._slots[reader.lease_key] = Slot(
                reader, pace, now, isinstance(reader, PushedReader)
            )
        if dropped is not reader:
            _close(dropped)

    def remove(self, lease_key: str) -> None:
        """Stop reading a shard and drop its records, also those of a running read.

        Unknown keys are ignored.
        """
        with self._lock:
            dropped = self._drop(lease_key)
        _close(dropped)

    def step(self) -> float:
        """Read one shard, if one is due and the buffer is not full.

        Returns:
            Seconds until a shard may be due.
        """
        began = self._clock.monotonic()
        with self._lock:
            slot, wait = self._next(began)
            if slot is None:
                return wait
            slot.busy = True
            self._pages.begin_read()
        chunk: Chunk | None = None
        error: Exception | None = None
        try:
            chunk = slot.reader.read()
        except Exception as caught:  # noqa: BLE001 (reported below; the other shards continue)
            error = caught
        except BaseException:
            with self._lock:
                slot.busy = False
                self._pages.end_read()
            raise
        now = self._clock.monotonic()
        with self._lock:
            slot.busy = False
            events = (
                self._note_failure(slot, error, now)
                if error is not None
                else self._note_success(slot, chunk, began, now)
            )
            self._note_end_of_read()
        done = ReadFinished(slot.reader.lease_key, (now - began) * 1000, succeeded=error is None)
        for event in events if slot.pushed else (done, *events):
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
        """Remove the oldest records from the buffer, up to both limits.

        Chunks of one lease are in shard order. A chunk that does not fit is split. If the first
        record exceeds `max_bytes`, it is returned alone, so that it does not block its shard.

        Args:
            max_records: Largest number of records.
            max_bytes: Largest number of payload bytes.
            left: Largest number of records per lease. Other leases have no limit.
            turn: After this many records of a lease, records of other leases are taken.
        """
        taken: list[Chunk] = []
        given: dict[str, int] = {}
        with self._lock:
            while (slot := self._oldest(given, left or {}, turn)) is not None and max_records > 0:
                head = slot.buffer[0]
                key = head.chunk.lease_key
                had = given.get(key, 0)
                piece, rest = split(
                    head.chunk,
                    min(max_records, (left or {}).get(key, sys.maxsize) - had, turn - had % turn),
                    max_bytes,
                )
                if piece is None and not taken:
                    piece, rest = split(head.chunk, 1, head.chunk.bytes)
                if piece is None:
                    break
                self._replace_head(slot, rest)
                taken.append(piece)
                max_records -= piece.records.num_rows
                max_bytes -= piece.bytes
                given[key] = had + piece.records.num_rows
            if taken:
                self._taken_at = self._clock.monotonic()
        return taken

    def hold(self, lease_keys: Collection[str]) -> None:
        """Keep the records of these shards, and read no more of them, until the next call.

        If the buffer is full, the shards are removed: the others need the room.
        """
        dropped: list[Reader | None] = []
        with self._lock:
            for key, slot in self._slots.items():
                slot.held = key in lease_keys
            if lease_keys and (self._cost >= self._max_cost or self._pages.is_full()):
                dropped = [self._drop(key) for key in lease_keys]
        for reader in dropped:
            _close(reader)

    def release_taken(self) -> None:
        """Release the memory of all records that were taken. Their batch has ended."""
        with self._lock:
            self._pages.release_taken()

    def lag(self) -> dict[str, int]:
        """Return the lag of each lease in milliseconds, if it is known.

        It is the age of the oldest buffered record. Without one it is the lag of the last response
        plus the time of failed reads since then.
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
        """Return whether the shard was read to its latest record since it was added.

        False while records of it are buffered, and for unknown keys.
        """
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.reached_tip and not slot.buffer

    def state_of(self, lease_key: str) -> ReadState | None:
        """Return the progress of reading a shard; None for unknown keys."""
        with self._lock:
            slot = self._slots.get(lease_key)
            if slot is None:
                return None
            waiting, up_to = bool(slot.buffer), slot.reader.read_up_to_millis
            caught_up = slot.reached_tip and not waiting
            return ReadState(slot.read_at, waiting, caught_up, slot.error, up_to, slot.behind)

    def busy(self, lease_key: str) -> bool:
        """Return whether a read of the shard runs, or has not buffered its records yet."""
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.busy

    def wait_for_data(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until a read ends and records are buffered, `stop` is set, or `seconds` have passed.

        Returns:
            Whether a read has ended since the last call, and records were buffered then.
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

    # The methods below need the lock.

    def _next(self, now: float) -> tuple[Slot | None, float]:
        idle = [
            slot
            for slot in self._slots.values()
            if not (slot.busy or slot.held or slot.reader.ended)
        ]
        if not idle:
            return None, MAX_WAIT_SECONDS
        slot = min(idle, key=lambda s: s.pace.due)
        if slot.pace.due > now:
            return None, min(max(slot.pace.due - now, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
        under_way = sum(s.last_cost for s in self._slots.values() if s.busy)
        if self._cost + under_way >= self._max_cost or not self._pages.may_read():
            return None, FULL_SECONDS
        return slot, 0.0

    def _note_success(
        self, slot: Slot, chunk: Chunk | None, began: float, now: float
    ) -> tuple[Event, ...]:
        reader = slot.reader
        behind = reader.millis_behind_latest
        at_tip = behind == 0 or (behind is None and chunk is None and not slot.pushed)
        slot.pace.succeeded(
            began, size=reader.last_bytes, at_tip=chunk is None if slot.pushed else at_tip
        )
        slot.succeeded = slot.read_at = now
        slot.error, slot.behind = None, behind
        if self._slots.get(reader.lease_key) is not slot:
            self._pages.end_read()
            return ()
        slot.reached_tip = slot.reached_tip or at_tip or reader.ended
        slot.last_cost = 0
        if chunk is None:
            self._pages.end_read()
        else:
            slot.last_cost = max(chunk.bytes, chunk.records.get_total_buffer_size())
            self._serial += 1
            chunk = with_oldest(chunk, now)
            cost = self._pages.end_read_with(slot.last_cost)
            slot.buffer.append(Buffered(self._serial, chunk, cost, now))
            self._add_up(slot.buffer[-1], 1)
            if chunk.rejected is not None:
                return (chunk.rejected,)
        return ()

    def _note_end_of_read(self) -> None:
        """Wake the waiting thread: the records may not have to wait any longer (`ready_in`)."""
        if any(slot.buffer and not slot.held for slot in self._slots.values()):
            self._fresh = True
            if self._arrival is not None:
                self._arrival.set()

    def _note_failure(self, slot: Slot, error: Exception, now: float) -> tuple[Event, ...]:
        throttled = isinstance(error, ThrottledError)
        slot.pace.failed(now, self._rng, throttled=throttled)
        self._pages.end_read()
        if self._slots.get(slot.reader.lease_key) is not slot:
            return ()
        slot.error = f"{type(error).__name__}: {error}"
        if throttled and slot.pace.failures % TOLERATED_THROTTLES != 0:
            return ()
        return (AwsTrouble(f"read of {slot.reader.lease_key}", slot.error),)

    def _oldest(self, given: Mapping[str, int], left: Mapping[str, int], turn: int) -> Slot | None:
        waiting = [
            (key, slot)
            for key, slot in self._slots.items()
            if slot.buffer and not slot.held and given.get(key, 0) < left.get(key, sys.maxsize)
        ]
        return min(
            waiting,
            key=lambda item: (given.get(item[0], 0) // turn, item[1].buffer[0].serial),
            default=(None, None),
        )[1]

    def _replace_head(self, slot: Slot, rest: Chunk | None) -> None:
        head = slot.buffer.popleft()
        self._add_up(head, -1)
        self._pages.take(head.cost, is_split=rest is not None)
        if rest is not None:
            # The whole table stays in memory until its last piece is taken.
            slot.buffer.appendleft(Buffered(head.serial, rest, head.cost, head.fetched))
            self._add_up(slot.buffer[0], 1)

    def _add_up(self, buffered: Buffered, sign: int) -> None:
        self._bytes += sign * buffered.chunk.bytes
        self._records += sign * buffered.chunk.records.num_rows
        self._cost += sign * buffered.cost.bytes

    def _drop(self, lease_key: str) -> Reader | None:
        slot = self._slots.pop(lease_key, None)
        if slot is None:
            return None
        for buffered in slot.buffer:
            self._add_up(buffered, -1)
            self._pages.release(buffered.cost)
        slot.buffer.clear()
        return slot.reader


def _close(reader: Reader | None) -> None:
    if isinstance(reader, PushedReader):
        reader.close()
